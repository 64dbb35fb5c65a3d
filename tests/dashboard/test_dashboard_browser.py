"""The pages in a browser: filter, overlay, note, stop, delete, restore."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from conftest import COMMAND, environment
from modelyard.run.directory import BIN
from waiting import PATIENCE, wait_until

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt install chromium", allow_module_level=True)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STAND_IN = [sys.executable, str(Path(__file__).parent / "standing_in.py")]
BAD = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    top = tmp_path / "runs"
    for number in range(30):
        optimizer = "adam" if number % 2 else "sgd"
        write_run(top / f"run-{number:02}", step=5, rows=8, accuracy=number / 30, optimizer=optimizer)
    write_run(top / BAD.replace("/", ""), step=5, hypothesis=BAD, accuracy=0.99)
    return top


@pytest.fixture
def page(browser: Any, runs: Path) -> Iterator[Any]:
    words = [*COMMAND, "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(PATIENCE * 1000)
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        opened.goto(address)
        opened.get_by_text("31 runs", exact=True).wait_for()
        yield opened
        assert problems == []
        assert opened.evaluate("window.hit") is None
        opened.close()
        server.terminate()


def names(page: Any) -> list[str]:
    return [text.strip() for text in page.locator("tbody tr[data-id] th").all_inner_texts()]


def act(page: Any, name: str) -> None:
    page.locator("#actions").get_by_role("button", name=name).click()
    page.get_by_role("dialog").get_by_role("button", name=name, exact=True).click()


def test_filter_sort_and_columns(page: Any) -> None:
    page.get_by_role("searchbox", name="Filter").fill("accuracy>0.85 optimizer=adam run-")
    assert sorted(names(page)) == ["run-27", "run-29"]
    page.get_by_role("button", name="validation accuracy").click()
    assert names(page) == ["run-29", "run-27"]
    page.get_by_role("button", name="validation accuracy").click()
    assert names(page) == ["run-27", "run-29"]
    page.get_by_role("searchbox", name="Filter").fill("wrong>1")
    page.get_by_text("no run has wrong").wait_for()
    page.get_by_role("searchbox", name="Filter").fill("-run-")
    assert names(page) == [BAD.replace("/", "")], "a name is text"
    page.get_by_role("searchbox", name="Filter").fill("")
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("dialog").get_by_role("checkbox", name="learning_rate", exact=True).check()
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("columnheader", name="learning_rate").wait_for()
    page.reload()
    page.get_by_role("columnheader", name="learning_rate").wait_for()


def test_keys_move_through_rows_that_are_not_in_the_document(page: Any) -> None:
    page.get_by_role("button", name="run", exact=True).click()
    page.locator("[data-kind=open]").first.focus()
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") == "run-29"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "run-00"
    page.keyboard.press("Space")
    page.get_by_text("1 chosen", exact=True).wait_for()
    assert page.get_by_role("checkbox", name="Choose run-00").is_checked()
    assert page.evaluate("document.activeElement.textContent") == "run-00", "the focus stays"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="run-00").wait_for()


def test_curves_of_chosen_runs_are_laid_over_each_other_and_options_compared(page: Any, runs: Path) -> None:
    page.get_by_role("searchbox", name="Filter").fill("run-0")
    for name in ("run-01", "run-02"):
        page.get_by_role("checkbox", name=f"Choose {name}").check()
    plot = page.get_by_role("img", name="train loss against step")
    plot.wait_for()
    assert "run-01 ends at 0.1250; run-02 ends at 0.1250" in plot.get_attribute("aria-label")
    with open(runs / "run-02" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "split": "train", "loss": 0.0625}\n')
    page.get_by_role("img", name="run-02 ends at 0.0625").first.wait_for()
    page.get_by_role("combobox", name="x").select_option("seconds")
    page.get_by_role("checkbox", name="log y").check()
    page.get_by_role("slider", name="smoothing").fill("0.5")
    page.get_by_role("img", name="train loss against time").wait_for()
    page.reload()
    page.get_by_role("img", name="train loss against time").wait_for()
    page.get_by_role("tab", name="Options").click()
    differing = page.locator(".compare tr.differs")
    assert [text.split() for text in differing.all_inner_texts()] == [["≠", "differs:", "optimizer", "adam", "sgd"]]


def test_a_note_is_added_to_the_journal(page: Any, runs: Path) -> None:
    page.get_by_role("searchbox", name="Filter").fill("onerror")
    page.locator("[data-kind=open]").first.click()
    page.get_by_role("combobox", name="Kind of note").select_option("Conclusion")
    page.get_by_role("textbox", name="Text of the note").fill(f"It worked. {BAD}")
    page.get_by_role("button", name="Add to the journal").click()
    page.locator(".notes").get_by_text(f"It worked. {BAD}").wait_for()
    assert f"> It worked. {BAD}" in (runs / "training_log.md").read_text()


def test_a_run_is_stopped_from_the_page(page: Any, runs: Path) -> None:
    run = runs / "run-03"
    with subprocess.Popen([*STAND_IN, "train", str(run)]) as process:
        try:
            wait_until((run / "started").exists, process=process)
            page.get_by_role("searchbox", name="Filter").fill("state=running")
            page.get_by_role("button", name="run-03").click()
            act(page, "Stop")
            assert process.wait(PATIENCE) == 143
            page.locator("#panel .state.interrupted").wait_for()
        finally:
            process.kill()


def test_runs_are_deleted_after_a_question_and_restored_from_the_bin(page: Any, runs: Path) -> None:
    page.get_by_role("searchbox", name="Filter").fill("run-1")
    for name in ("run-11", "run-12"):
        page.get_by_role("checkbox", name=f"Choose {name}").check()
    page.locator("#actions").get_by_role("button", name="Delete (2)").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert (runs / "run-11").exists()
    act(page, "Delete")
    page.get_by_text("8 of 29 runs").wait_for()
    assert len(list((runs / BIN).iterdir())) == 2
    page.get_by_role("button", name="Bin (2)").click()
    page.get_by_role("dialog").get_by_role("listitem").filter(has_text="run-11").get_by_role("button").click()
    page.get_by_text("9 of 30 runs").wait_for()
    assert (runs / "run-11" / "config.yaml").exists()


def test_without_the_token_the_page_asks_for_it(page: Any, browser: Any) -> None:
    address = page.evaluate("location.origin")
    stranger = browser.new_context().new_page()
    stranger.goto(address)
    stranger.get_by_role("heading", name="This page needs its token").wait_for()
    assert page.evaluate("location.search") == "", "the token is not left in the address"
    assert "token" not in page.evaluate("document.cookie")
