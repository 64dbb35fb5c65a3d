"""The processes of a matrix: in parallel, failing, stopped, killed. Small programs run instead of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_runs import stand_in, write_run

import modelyard
from modelyard.comparison.executor import make_slots
from modelyard.comparison.matrix import MatrixResult
from modelyard.comparison.scheduler import CellResult, cell_table, failure_reason, progress
from modelyard.errors import RunError
from waiting import PATIENCE, wait_until

AXES = {"model": ["mlp", "simple_cnn"], "dataset": ["digits"], "random_seed": [0, 1]}
MAIN = """
import sys, modelyard
from modelyard.cli.comparison import matrix
from modelyard.system.console import show_log
show_log()
matrix({}, models=sys.argv[1], datasets="digits", seeds="2", output="m", jobs=int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", str(tmp_path))


def run(tmp_path: Path, jobs: int = 2, **options: Any) -> MatrixResult:
    return modelyard.matrix(axes=AXES, output="m", jobs=jobs, program=stand_in(tmp_path), **options)


def noted(name: str, what: str = "starts") -> list[dict[str, Any]]:
    path = Path(f"{name}.{what}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_cells_that_fail_do_not_stop_the_others_and_are_tried_again(tmp_path: Path) -> None:
    Path("mlp-digits-seed0").write_text("error")
    Path("simple_cnn-digits-seed0").write_text("crash")
    Path("mlp-digits-seed1").write_text("traceback")
    result = run(tmp_path)
    assert {cell.name: cell.reason for cell in result.failed} == {
        "mlp-digits-seed0": "2 mistakes in the config: here: it is wrong.",
        "simple_cnn-digits-seed0": "killed by SIGSEGV",
        "mlp-digits-seed1": "KeyError: 'unexpected'",
    }
    assert "unexpected" in Path(result.failed[-1].log).read_text()
    assert result.leaderboard is not None
    assert {(run.name, run.status) for run in result.leaderboard.unfinished} == {
        (f"cells/{cell.name}", "failed") for cell in result.failed
    }
    for name in ("mlp-digits-seed0", "simple_cnn-digits-seed0", "mlp-digits-seed1"):
        Path(name).unlink()
    again = modelyard.matrix(output="m", program=stand_in(tmp_path))
    assert again.failed == ()
    assert json.loads(Path("m/failed.json").read_text()) == {}
    assert len(noted("mlp-digits-seed0")) == 2
    assert len(noted("simple_cnn-digits-seed1")) == 1  # it was finished
    assert again.leaderboard is not None
    assert again.leaderboard.unfinished == ()


def test_the_option_threads_applies_to_cells_that_run_in_parallel(tmp_path: Path) -> None:
    run(tmp_path, threads=3)
    assert {start["threads"] for name in ("mlp", "simple_cnn") for start in noted(f"{name}-digits-seed0")} == {"3"}


def start(jobs: int, tmp_path: Path) -> subprocess.Popen[str]:
    stand_in(tmp_path)
    code = MAIN.replace("matrix({", "sys.argv[0] = 'stand_in.py'; matrix({")
    return subprocess.Popen(
        [sys.executable, "-c", code, ",".join(AXES["model"]), str(jobs)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_cells_save_and_prints_how_to_resume(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    Path("mlp-digits-seed0").write_text("hang")
    process = start(1, tmp_path)
    wait_until(lambda: noted("mlp-digits-seed0", "hangs"), "a cell", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, errors
    assert len(noted("mlp-digits-seed0", "saved")) == 1
    assert "matrix --output m --jobs 1" in errors
    assert "mlp-digits-seed0: stopped after" in errors
    assert "/4]" not in errors  # none has ended
    assert "stopped with 0 of 4 cells done" in errors
    assert not Path("m/failed.json").exists()
    assert noted("simple_cnn-digits-seed0") == []


def test_a_cell_that_finishes_while_the_matrix_stops_counts_as_done_at_the_next_start(tmp_path: Path) -> None:
    Path("mlp-digits-seed0").write_text("late")
    process = start(1, tmp_path)
    wait_until(lambda: noted("mlp-digits-seed0", "hangs"), "a cell", process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, errors
    assert "[1/4] mlp-digits-seed0: done" in errors
    assert "stopped with 1 of 4 cells done" in errors
    _, errors = start(1, tmp_path).communicate(timeout=PATIENCE)
    assert "1 of 4 cells are done already" in errors
    assert "[2/4] simple_cnn-digits-seed0: done" in errors
    assert "[4/4]" in errors
    assert "[5/4]" not in errors
    assert len(noted("mlp-digits-seed0")) == 1


def test_a_signal_after_all_cells_have_finished_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path)
    for path in Path("m/cells/mlp-digits-seed1/checkpoints").glob("*/state.json"):
        path.unlink()
    Path("mlp-digits-seed1").write_text("late")
    process = start(1, tmp_path)
    wait_until(lambda: noted("mlp-digits-seed1", "hangs"), "a cell", process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "3 of 4 cells are done already" in errors
    assert "[4/4] mlp-digits-seed1: done" in errors


def test_a_second_matrix_is_refused_and_no_process_outlives_a_killed_one(tmp_path: Path) -> None:
    Path("mlp-digits-seed0").write_text("hang")
    Path("simple_cnn-digits-seed0").write_text("hang")
    process = start(2, tmp_path)
    wait_until(lambda: all(noted(f"{model}-digits-seed0", "hangs") for model in AXES["model"]), "both cells", process)
    with pytest.raises(RunError, match="is running already"):
        run(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    children = [noted(f"{model}-digits-seed0")[0]["pid"] for model in AXES["model"]]
    wait_until(lambda: not any(is_alive(pid) for pid in children))
    for model in AXES["model"]:
        Path(f"{model}-digits-seed0").unlink()
    assert run(tmp_path).failed == ()
    assert len(noted("mlp-digits-seed1")) == 1


def test_cores_and_gpus_are_divided() -> None:
    alone = make_slots(1, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 8)
    assert [(slot.environ["CUDA_VISIBLE_DEVICES"], slot.threads) for slot in alone] == [("0,1,2,3", 8)]
    two = make_slots(2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 8)
    assert [(slot.environ["CUDA_VISIBLE_DEVICES"], slot.threads) for slot in two] == [("0,1", 4), ("2,3", 4)]
    many = make_slots(3, {"CUDA_VISIBLE_DEVICES": "5"}, 2)
    assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in many] == ["5", "5", "5"]
    assert many[0].environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert [slot.threads for slot in many] == [1, 1, 1]
    assert make_slots(2, {"CUDA_VISIBLE_DEVICES": "-1"}, 4)[0].environ == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_the_reason_of_a_failure_is_a_line() -> None:
    assert failure_reason(-9, []) == "killed by SIGKILL – perhaps out of memory"
    assert failure_reason(2, ["error: the data is gone.", "more"]) == "the data is gone."
    assert (
        failure_reason(1, ["Traceback", "  File x", "modelyard.errors.UserError: so", "note"])
        == "modelyard.errors.UserError: so"
    )
    assert failure_reason(1, ["something"]) == "exited with status 1"
    assert failure_reason(0, []) == "exited before it was finished"


def test_the_table_shows_the_progress_of_each_cell(tmp_path: Path) -> None:
    from rich.console import Console

    done, running, failed, waiting = run(tmp_path).cells
    done.seconds = 0.0
    running.state = "running"
    failed.state, failed.reason, failed.seconds = "failed", "[bold]out of luck[/]", 12.0
    waiting.state = "waiting"
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(cell_table([done, running, failed, waiting]))
    text = console.export_text()
    assert "4 cells: 1 done, 1 running, 1 waiting, 1 failed" in text
    assert "validation accuracy 0.5" in text
    assert "[bold]out of luck[/]" in text
    assert "12 s" in text


@pytest.mark.parametrize("state", ["running", "done"])
def test_a_cell_shows_the_score_of_the_leaderboard(state: str) -> None:
    """That of the best model, even if its row is far from the end; and the metric that the leaderboard compares."""
    for number, best in enumerate((4, None)):
        scores = {"validation": {"loss": 0.5, "mae": 3.25}}
        earlier = [{"step": 4, "split": "validation", "mae": 1.125, "loss": 0.75}]
        earlier += [{"step": 5, "split": "train", "loss": 1.0, "seconds": 1.0}] * 400
        write_run(Path(f"runs/{number}"), scores=scores, earlier=earlier, best=best, random_seed=number)
        result = CellResult(name="a", axes={}, state=state, model_dir=f"runs/{number}", log="")
        expected = 3.25 if best is None else 1.125
        assert progress(result) == ("10", f"validation mae {expected}")
    board = modelyard.leaderboard("runs")
    assert board.metric == "mae"
    assert board.entrants[0].scores["digits"].values == {0: 1.125, 1: 3.25}
