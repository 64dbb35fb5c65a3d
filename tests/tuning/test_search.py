"""Searches of real runs: killed, extended, with trials that fail, and compared with new seeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import modelyard
from conftest import COMMAND, environment
from modelyard.cli.comparison import tune as tune_command
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.comparison.plan import Cell, MatrixRequest
from modelyard.config import resolve
from modelyard.errors import ConfigError, Interrupted, RunError, UserError
from modelyard.system.process import holders
from modelyard.tuning.search_file import Request, Search, find_search
from modelyard.tuning.space import read_space
from modelyard.tuning.trials import Budget, Trials, _remember, _remembered
from waiting import PATIENCE, wait_until

SPACE = "learning_rate=log(1e-3, 1), optimizer=[sgd, adam]"
OPTIONS: dict[str, Any] = {"model": "mlp", "dataset": "digits", "hidden_units": [16], "train_steps": 60, "threads": 1}
LONG: dict[str, Any] = {**OPTIONS, "train_steps": 400, "save_every": "20 steps", "deterministic": True}


def words(output: str, trials: int, **options: Any) -> list[str]:
    given = {"output": output, "trials": trials, "space": SPACE, "seeds": 0, **options}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def start(output: str, trials: int, **options: Any) -> subprocess.Popen[str]:
    command = [*COMMAND, "tune", *words(output, trials, **options)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "split", "loss", "accuracy")} for row in found]


def trial_process(folder: Path) -> int | None:
    """The process of the trial that runs."""
    running = [holder for path in folder.glob("cells/*/runlogs") for holder in holders(path)]
    return running[0].pid if running else None


def checkpoint_of(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def test_a_search_whose_processes_are_killed_ends_with_the_same_trials(tmp_path: Path) -> None:
    long = {key: str(value).strip("[]") for key, value in LONG.items()}
    whole = start("whole", 3, **long)
    output = whole.communicate(timeout=PATIENCE)[0]
    assert whole.returncode == 0, output
    killed = tmp_path / "killed"
    # The search and its trial, in the middle of the second trial; then only the trial, in the middle of the third.
    search = start(str(killed), 3, **long)
    second, third = (killed / "cells" / f"trial-000{number}" for number in (1, 2))
    wait_until(lambda: checkpoint_of(second) >= 20)
    search.kill()
    search.communicate()
    assert checkpoint_of(second) < 400
    search = start(str(killed), 3, **long)
    wait_until(lambda: checkpoint_of(third) >= 20)
    pid = trial_process(killed)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    output = search.communicate(timeout=PATIENCE)[0]
    assert search.returncode == 0, output
    assert "trial-0002 was killed by SIGKILL and goes on" in output, output
    for number in range(3):
        mine, undisturbed = (Path(folder) / "cells" / f"trial-000{number}" for folder in (killed, "whole"))
        assert rows(mine) == rows(undisturbed)
        for weights in undisturbed.glob("best/*/weights.safetensors"):
            assert (mine / weights.relative_to(undisturbed)).read_bytes() == weights.read_bytes()
    assert (killed / "best.yaml").read_text() == Path("whole/best.yaml").read_text()
    assert len(json.loads((third / "manifest.json").read_text())["starts"]) == 2


def test_a_search_is_extended_compared_with_new_seeds_and_tested() -> None:
    first = modelyard.tune(SPACE, output="search", trials=2, seeds=0, jobs=2, **OPTIONS)
    assert [trial.state for trial in first.trials] == ["done", "done"]
    assert first.trials[0].score >= first.trials[1].score  # type: ignore[operator]
    assert (first.final, first.test) == (None, {})
    again = modelyard.tune(output="search", seeds=0, program=["false"])  # a start without a budget has the last one
    assert [trial.state for trial in again.trials] == ["done", "done"]
    with pytest.raises(ConfigError, match=r"(?s)train_steps: is 70 here, but 60 in the trials.*options may not"):
        modelyard.tune(SPACE, output="search", trials=3, **{**OPTIONS, "train_steps": 70})
    with pytest.raises(
        ConfigError, match=r"(?s)search_seed: is 7 here, but 0 in this search.*halving: is 3 here, but not"
    ):
        modelyard.tune(output="search", trials=3, search_seed=7, halving=3)
    before = {name: Path("search", name).read_bytes() for name in ("search.yaml", "search.html", "best.yaml")}
    with pytest.raises(UserError, match="there is no metric 'acuracy'"):
        modelyard.tune(output="search", trials=3, metric="acuracy")
    assert before == {name: Path("search", name).read_bytes() for name in before}
    narrower = "learning_rate=log(1e-2, 1), optimizer=[sgd]"
    result = modelyard.tune(narrower, output="search", trials=3, top=1, seeds=2, jobs=2)
    assert next(trial for trial in result.trials if trial.number == 2).values["optimizer"] == "sgd"
    assert [trial.number for trial in sorted(result.trials, key=lambda trial: trial.number)] == [0, 1, 2]
    assert {trial.number: trial.values for trial in first.trials}.items() <= {
        t.number: t.values for t in result.trials
    }.items()
    assert result.final is not None
    assert list(result.test) == ["seed 1", "seed 2"]
    best = result.trials[0]
    rows_of_final = rows(Path("search/final/cells") / f"trial-{best.number:04}-seed1")
    assert [row["split"] for row in rows_of_final].count("test") == 1
    assert result.test["seed 1"] == rows_of_final[-1]["accuracy"]
    assert not any(row["split"] == "test" for trial in result.trials for row in rows(Path(trial.model_dir)))
    again = [*COMMAND, "train-and-evaluate", "--config_file", str(result.best), "--model_dir", "again"]
    subprocess.run(again, env=environment(), capture_output=True, check=True)
    assert rows(Path("again")) == rows(Path(best.model_dir))
    assert f"trial {best.number}: " in str(result)


def test_a_trial_that_fails_counts_as_failed_and_stays_so() -> None:
    space = "learning_rate=[0.01, 1e30], hidden_units=[[8], [16]]"
    options = {key: value for key, value in OPTIONS.items() if key != "hidden_units"} | {"optimizer": "sgd"}
    result = modelyard.tune(space, output="search", trials=4, seeds=0, jobs=2, **options)
    failed = [trial for trial in result.trials if trial.values["learning_rate"] == 1e30]
    assert [trial.state for trial in result.trials] == ["done", "done", "failed", "failed"]
    assert result.trials[2:] == tuple(failed)
    assert "the loss became" in failed[0].reason
    page = Path("search/search.html").read_text()
    assert "4 trials: 2 done, 2 failed" in page
    assert all(f'href="cells/trial-{trial.number:04}/"' in page for trial in result.trials)
    before = {
        trial.number: (Path("search/runlogs") / f"trial-{trial.number:04}.log").stat().st_mtime for trial in failed
    }
    again = modelyard.tune(output="search", trials=9, seeds=0)
    assert again.trials == result.trials, "there are no other values, and failed trials are not trained again"
    assert before == {
        trial.number: (Path("search/runlogs") / f"trial-{trial.number:04}.log").stat().st_mtime for trial in failed
    }


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        ("learning_rat=log(1e-3, 1)", {}, "learning_rat.*[Dd]id you mean 'learning_rate'"),
        ("learning_rate=log(1e-3, 1)", {"learning_rate": 0.1}, "learning_rate: is both in the space and an option"),
        ("learning_rate=uniform(-1, 1)", {}, "learning_rate: must be greater than 0"),
        ("hidden_units=[[8], [16]], model=[mlp, resnet20]", {}, "hidden_units.*no effect.*resnet20"),
        ("augment.cutout.size=[2, 4]", {}, "cutout is not in augment"),
        ("model_dir=[a, b]", {}, "model_dir: has no effect here"),
    ],
)
def test_a_space_that_contradicts_the_config_is_told_before_anything_starts(
    space: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        modelyard.tune(space, output="search", trials=4, dataset="digits", train_steps=5, **options)
    assert not Path("search").exists()


def test_what_is_missing_or_unknown_is_told() -> None:
    with pytest.raises(ConfigError, match="space: is missing"):
        modelyard.tune(output="search")
    with pytest.raises(ConfigError, match=r"space: is missing.* Did you mean it by spaces\?"):
        modelyard.tune(output="search", spaces=SPACE)
    with pytest.raises(ConfigError, match=r"(?s)output: is missing.*trials: must be 1 to"):
        modelyard.tune(SPACE, output="", trials=0)
    with pytest.raises(UserError, match="no sampler 'tpa'"):
        modelyard.tune(SPACE, output="search", sampler="tpa", **OPTIONS)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 0", "seed: abc", "search.yaml.*seed: must be a whole number, got abc"),
        ("seed: 0", "seed: [1]", "seed: must be a whole number"),
        ("sampler: tpe\n", "", "sampler: must be text, got null"),
        ("  learning_rate: log(1e-3, 1)", "  5", "space: must be 'option: values' lines, got 5"),
        ("  dataset: digits", "  - 7", "options: must be 'option: values' lines"),
    ],
)
def test_a_damaged_search_file_is_told_and_nothing_is_changed(old: str, new: str, message: str) -> None:
    Path("search").mkdir()
    Path("search/matrix.yaml").write_text("matrix_version: 1\ncells: {}\n")
    text = "search_version: 1\nmetric: auto\nsampler: tpe\nseed: 0\nspace:\n  learning_rate: log(1e-3, 1)\n"
    damaged = f"{text}options:\n  dataset: digits\n".replace(old, new)
    Path("search/search.yaml").write_text(damaged)
    with pytest.raises(ConfigError, match=message):
        modelyard.tune(output="search")
    assert Path("search/search.yaml").read_text() == damaged


def test_a_damaged_memory_of_the_sampler_is_left_out(tmp_path: Path) -> None:
    good, path = {"trial": {"a": 1}, "study": {"b": [2]}}, tmp_path / "sampler.jsonl"
    path.write_text('[1]\n{"x": [1]}\n{"y": {"study": 3}}\nnull\n{"trial-0001": {"stu')
    _remember(path, "trial-0000", good)
    assert _remembered(path) == {"trial-0000": good}
    assert _remembered(tmp_path / "missing") == {}


@pytest.mark.parametrize("sampler", ["cmaes", "CMA-ES"])
def test_the_pickles_of_a_strangers_search_are_not_read(sampler: str, caplog: pytest.LogCaptureFixture) -> None:
    cell = Cell("trial-0000", {"dropout_rate": 0.1}, resolve({"model": "mlp", "dataset": "digits"}))
    pickled = {"trial": {"cma:optimizer:0": "80049525"}}

    def known(folder: str, *, trust: bool = False) -> list[Any]:
        space = read_space("dropout_rate=uniform(0, 0.5)", "here")[0]
        request = MatrixRequest({}, trust=trust)
        run = Trials(MatrixFolder(folder), Search(space, {}, sampler=sampler), request, Budget(), [cell])
        return [one.remembered for one in run.known()]

    MatrixFolder("theirs").create()
    MatrixFolder("theirs").write([cell])
    _remember(Path("theirs/sampler.jsonl"), cell.name, pickled)
    assert known("theirs") == [{}]
    assert "theirs/sampler.jsonl is not read: your searches have not written it" in caplog.text
    assert known("theirs", trust=True) == [pickled]
    assert known("theirs") == [{}], "what is there may be replaced later"

    modelyard.tune("dropout_rate=uniform(0, 0.5)", output="mine", trials=1, seeds=0, sampler="nsgaii", **OPTIONS)
    assert Path("mine/sampler.jsonl").exists()
    _remember(Path("mine/sampler.jsonl"), cell.name, pickled)
    assert known("mine") == [pickled]


@pytest.mark.parametrize("name", ["sampler.jsonl", "optuna.log", "runlogs/tune.pid", "runlogs/trial-0001.log"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_search_does_not_write_through_links(name: str, kind: str) -> None:
    folder, mine = MatrixFolder("theirs"), Path("mine").absolute()
    folder.create()
    folder.write([])
    mine.write_text("mine")
    if kind == "link":
        (folder.path / name).symlink_to(mine)
    else:
        os.mkfifo(folder.path / name)
    with pytest.raises(RunError, match=rf"{name} is (a link to .*mine|no regular file), and a (search|matrix) writes"):
        modelyard.tune(SPACE, output="theirs", trials=2, seeds=0, program=["false"], **OPTIONS)
    assert mine.read_text() == "mine"


def test_a_folder_of_a_matrix_and_a_search_without_its_file_are_refused_and_stay_as_they_are() -> None:
    folder = MatrixFolder("other")
    folder.create()
    for name, message in (
        ("mlp-digits-seed0", r"other is a matrix, not a search: .*mlp-digits-seed0\. Choose another"),
        ("trial-0000", r"other/search.yaml is missing.*1 trials of this folder\. Restore"),
    ):
        folder.write([Cell(name, {"model": "mlp"}, resolve({"model": "mlp", "dataset": "digits"}))])
        plan = folder.plan.read_text()
        with pytest.raises(UserError, match=message):
            modelyard.tune(SPACE, output="other", trials=2, seeds=0, **OPTIONS)
        assert folder.plan.read_text() == plan
        assert not Path("other/search.yaml").exists()


def test_a_search_that_was_killed_before_its_first_file_was_whole_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, text: str) -> None:
        if path.name in ("search.yaml", "matrix.yaml"):
            written.append(path.name)
            if len(written) == 2:
                raise KeyboardInterrupt
        path.write_text(text)

    written: list[str] = []
    monkeypatch.setattr("modelyard.tuning.search.write_text", killed)
    monkeypatch.setattr("modelyard.comparison.matrix_folder.write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        modelyard.tune(SPACE, output="search", trials=1, seeds=0, **OPTIONS)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="space: is missing"):
        modelyard.tune(output="search")
    with pytest.raises(ConfigError, match=r"space: is missing.* Did you mean it by spaces\?"):
        modelyard.tune(output="search", spaces=SPACE)


def test_a_matrix_adds_no_cells_to_a_search() -> None:
    folder = MatrixFolder("search")
    folder.create()
    folder.write([])
    Path("search/search.yaml").write_text("search_version: 1\n")
    with pytest.raises(UserError, match=r"search is a search, .*Choose another --output"):
        modelyard.matrix(models=["mlp"], datasets=["digits"], seeds=1, output="search", program=["false"])
    assert folder.cell_axes() == {}


def test_options_that_are_written_in_another_way_are_the_same() -> None:
    folder = MatrixFolder("search")
    folder.create()
    folder.write([])
    options = {
        "train_steps": "20",
        "hidden_units": "16,32",
        "augment": "cutout, flip_left_right",
        "weight_decay": "1e-4",
    }
    space = {"learning_rate": "log(1e-3, 1)"}
    search = find_search(folder, space, options, Request(), "here", False)
    Path("search/search.yaml").write_text(search.text())
    typed = {
        "train_steps": 20,
        "hidden_units": [16, 32],
        "augment": ["cutout", "flip_left_right"],
        "weight_decay": 0.0001,
    }
    assert find_search(folder, space, typed, Request(), "here", False) == search
    Path("s.yaml").write_text("space:\n  learning_rate: log(1e-3, 1)\noptions:\n  train_steps: 25\n  model: mlp\n")
    with pytest.raises(
        ConfigError,
        match=r"(?s)s.yaml:4.*train_steps: is 25 here, but 20 in the trials.*model: is mlp here, but the "
        "trials of this search do not have it",
    ):
        find_search(folder, "s.yaml", {}, Request(), "here", False)


def test_a_search_of_failures_only_tries_them_again() -> None:
    Path("fails").write_text("raise SystemExit('error: the disk is full.')")
    failing = [sys.executable, "fails"]
    short = {**OPTIONS, "train_steps": 10}
    for _ in range(2):
        with pytest.raises(UserError, match=r"(?s)first 3 trials of this search failed: .*Run the same command again"):
            modelyard.tune(SPACE, output="search", trials=4, seeds=0, program=failing, **short)
    result = modelyard.tune(output="search", trials=3, seeds=0, jobs=3)
    assert [trial.state for trial in result.trials] == ["done"] * 3


def test_the_command_that_resumes_a_search_has_all_that_is_not_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise Interrupted(signal.SIGINT, 1, "search")

    monkeypatch.setattr("modelyard.tuning.search.tune", interrupted)
    with pytest.raises(SystemExit, match="130"):
        tune_command({}, output="search", trials=7, top=2, seeds=0, jobs=4)
    printed = capsys.readouterr()
    assert "tune --output search --trials 7 --top 2 --seeds 0 --jobs 4" in printed.out + printed.err


def test_arguments_of_wrong_types_are_told_at_once() -> None:
    wrong: dict[str, Any] = {"trials": "4", "jobs": 1.5, "seeds": None, "sampler": 3, "search_seed": "x", "metric": [1]}
    with pytest.raises(ConfigError) as error:
        modelyard.tune(["learning_rate"], output="search", **wrong)  # type: ignore[arg-type]
    told = {problem.key for problem in error.value.problems}
    assert told == {*wrong, "space"}
    with pytest.raises(ConfigError, match=r"s\.yaml: No such file"):
        modelyard.tune(Path("s.yaml"), output="search")


def test_a_metric_that_nothing_measures_is_told_after_the_first_trial_and_can_be_corrected() -> None:
    options = {**OPTIONS, "train_steps": 20}
    with pytest.raises(UserError, match=r"(?s)metric: .*f7.*accuracy.*Run the same command with another --metric"):
        modelyard.tune(SPACE, output="search", trials=2, metric="f7", seeds=0, **options)
    assert len(list(Path("search/configs").iterdir())) == 1
    result = modelyard.tune(output="search", trials=1, metric="loss", seeds=1, top=1)
    assert [(trial.number, trial.state) for trial in result.trials] == [(0, "done")]
    assert result.final is not None
    assert result.final.metric == "loss"
    row = [row for row in rows(Path("search/cells/trial-0000")) if row["split"] == "validation"][-1]
    assert result.trials[0].scores == {"loss": row["loss"]}


def test_a_search_whose_time_is_over_saves_its_trials_and_goes_on_with_more() -> None:
    options = {**LONG, "train_steps": 10**6}
    result = modelyard.tune(SPACE, output="search", time="1 s", seeds=0, **options)
    assert [trial.state for trial in result.trials] == ["stopped"]
    assert result.best is None
    again = modelyard.tune(output="search", time="1 s", trials=5, seeds=0)
    assert [trial.values for trial in again.trials] == [trial.values for trial in result.trials]
