"""training_log.md: entries are only ever added."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from modelyard.config import load_config
from modelyard.errors import RunError
from modelyard.run.manifest import JOURNAL_TITLE, log_result, log_start
from waiting import PATIENCE


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "training_log.md"


def test_a_run_adds_its_settings_its_hypothesis_and_its_results(journal: Path) -> None:
    config = load_config(model="mlp", hidden_units=[7], train_epochs=3, hypothesis="more is more", clip_norm=None)
    log_start(journal, "my-run", config, 0)
    log_result(journal, "my-run", {"step": "63", "test accuracy": 0.987654321})
    text = journal.read_text()
    assert text.startswith(JOURNAL_TITLE)
    for words in (
        "\n## my-run\n",
        "- model: mlp\n",
        "- hidden_units: [7]\n",
        "- train_epochs: 3\n",
        "- learning_rate: 0.001\n",
        "**Hypothesis:** more is more\n",
        "**Results of my-run**",
        "- test accuracy: 0.987654\n",
    ):
        assert words in text
    assert "random_seed" not in text, "defaults are not worth saying"
    assert "clip_norm" not in text


def test_a_resumed_run_logs_its_step(journal: Path) -> None:
    config = load_config(model="mlp")
    log_start(journal, "my-run", config, 0)
    log_start(journal, "my-run", config, 500)
    text = journal.read_text()
    assert text.count("## my-run") == 1
    assert "**my-run** resumed at step 500" in text


def test_what_a_user_wrote_stays(journal: Path) -> None:
    config = load_config(model="mlp")
    written = "My own notes, wïth ümlauts, and no newline at the end"
    journal.write_text(written, encoding="utf-8")
    log_start(journal, "one", config, 0)
    first = journal.read_text(encoding="utf-8")
    assert first.startswith(f"{written}\n## one")
    edited = first.replace("## one", "## one: was a mistake")
    journal.write_text(edited, encoding="utf-8")
    log_result(journal, "one", {"step": 5})
    assert journal.read_text(encoding="utf-8").startswith(edited)
    assert JOURNAL_TITLE not in journal.read_text(encoding="utf-8")


def test_the_title_is_written_once(journal: Path) -> None:
    for name in ("one", "two"):
        log_start(journal, name, load_config(model="mlp"), 0)
    assert journal.read_text().count(JOURNAL_TITLE) == 1


def test_a_value_of_several_lines_stays_on_its_own(journal: Path) -> None:
    log_result(journal, "one", {"note": "a\n## b"})
    assert "- note: a ## b\n" in journal.read_text()


def test_runs_side_by_side_lose_no_entry(journal: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom modelyard.run.manifest import log_result\n"
        "for i in range(50):\n    log_result(Path(sys.argv[1]), f'{sys.argv[2]}-{i}', {'x': 'y' * 5000})\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", program, str(journal), name]) for name in ("a", "b")]
    assert [run.wait() for run in runs] == [0, 0]
    text = journal.read_text()
    assert text.count(JOURNAL_TITLE) == 1
    assert all(f"**Results of {name}-{i}**" in text for name in "ab" for i in range(50))
    assert text.count(f"- x: {'y' * 5000}\n") == 100


def test_an_entry_waits_until_the_other_run_has_written_its_own(journal: Path) -> None:
    with open(journal, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        entry = threading.Thread(target=log_result, args=(journal, "mine", {}))
        entry.start()
        entry.join(0.2)
        assert entry.is_alive()
        other.write("theirs\n")
    entry.join(PATIENCE)
    assert journal.read_text().startswith("theirs\n\n**Results of mine**")


def test_a_journal_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="can't write"):
        log_result(tmp_path / "nowhere" / "training_log.md", "one", {})
