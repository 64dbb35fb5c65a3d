"""A matrix as a SLURM array or a Kubernetes Indexed Job: a task for each cell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from slurm_cluster import install, slurm_cluster
from test_kubernetes_manifest import as_model
from test_submit import run_script

from conftest import COMMAND, TESTS, environment, on_engine
from modelyard.comparison.matrix_folder import MatrixFolder
from waiting import PATIENCE

Command = Callable[..., "subprocess.CompletedProcess[str]"]
CELLS = ("--models", "mlp", "--datasets", "digits", "--seeds", "2")
SHORT = ("--train_steps", "20", "--hidden_units", "16", "--threads", "1")


def test_a_slurm_array_has_a_task_for_each_cell_of_a_plan_that_is_written_first(
    command: Command, tmp_path: Path
) -> None:
    words = ("matrix", *CELLS, "--output", "runs/many", *SHORT)
    assert "--array=0-1" in command("submit", "slurm", "--dry_run", "--", *words).stdout
    assert not Path("runs").exists()
    Path("slurm.yaml").write_text("parallel: 1\n")
    done = command("submit", "slurm", "--resources", "slurm.yaml", "--time", "1h", "--", *words, PATH=str(tmp_path))
    assert "many.slurm.sh" in done.stderr
    text = Path("many.slurm.sh").read_text()
    assert "#SBATCH --array=0-1%1" in text
    assert "#SBATCH --output=many-%A_%a.log" in text
    assert subprocess.run(["bash", "-n", "many.slurm.sh"], check=False).returncode == 0
    assert list(MatrixFolder("runs/many").cell_axes()) == ["mlp-digits-seed0", "mlp-digits-seed1"]

    ids = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    srun = 'for word in "$@"; do echo "$word"; done > words.txt; kill -USR1 $PPID; exit 143'
    assert run_script(text, srun, tmp_path, **ids).returncode == 143
    ran = Path("words.txt").read_text().splitlines()
    assert ran[ran.index("matrix") :] == ["matrix", "--output", str(tmp_path / "runs/many"), "--only", "1"]
    # 70 alone would be all tasks of the array.
    assert "70_1" in Path("scancel.txt").read_text().split()
    assert Path("scontrol.txt").read_text().split() == ["requeue", "70_1"]

    grown = ("matrix", "--models", "simple_cnn,mlp", *CELLS[2:], "--output", "runs/many", *SHORT)
    command("submit", "slurm", "--force", "--", *grown, PATH=str(tmp_path))
    names = list(MatrixFolder("runs/many").cell_axes())
    assert names[:2] == ["mlp-digits-seed0", "mlp-digits-seed1"]  # jobs that wait name them by these numbers
    assert len(names) == 4


def test_a_kubernetes_job_has_an_index_for_each_cell_and_matches_the_api(command: Command) -> None:
    client = pytest.importorskip("kubernetes.client")
    Path("k.yaml").write_text("claim: shared\nparallel: 3\nmax_restarts: 4\ngpus: 1\nenv: {PRICE: $(HOME)}\n")
    words = ("matrix", *CELLS[:2], "--datasets", "digits,/data/photos", "--seeds", "2", "--output", "/runs/many")
    done = command("submit", "kubernetes", "--image", "a:1", "--resources", "k.yaml", "--dry_run", "--", *words)
    (document,) = yaml.safe_load_all(done.stdout)
    model = as_model(document, "V1Job", "Job")
    assert client.ApiClient().sanitize_for_serialization(model) == document
    spec = document["spec"]
    assert spec["completionMode"] == "Indexed"
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (4, 3, 4)
    assert spec["maxFailedIndexes"] == 4  # a cell that fails does not stop the others
    assert "backoffLimit" not in spec
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailIndex", "Ignore", "Ignore"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"] == ["modelyard", *words, "--only", "$(JOB_COMPLETION_INDEX)"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {"name": "PRICE", "value": "$$(HOME)"} in container["env"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--", "tune", "--space", "learning_rate=log(1e-4, 1)"], "tune --on ray"),
        (["vertex", "--image", "a", "--region", "b", "--", "matrix", *CELLS, "--output", "m"], "can't run the cells"),
        (["slurm", "--workers", "2", "--", "matrix", *CELLS, "--output", "m"], "every cell is one process"),
        (["slurm", "--", "matrix", *CELLS, "--output", "m", "--jobs", "2"], "every cell is a task of the job"),
        (["slurm", "--", "matrix", "--models", "mlpp", "--output", "m"], "Did you mean 'mlp'?"),
        (["slurm", "--", "matrix", *CELLS], "output: is missing"),
        (["kubernetes", "--image", "a", "--", "matrix", *CELLS, "--output", "m"], "set claim"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(command: Command, words: list[str], message: str) -> None:
    assert message in command("submit", *words, code=None).stderr
    assert list(Path().iterdir()) == []


def test_the_job_of_the_last_cell_writes_the_leaderboard(command: Command) -> None:
    words = ("matrix", *CELLS, "--output", "m", *SHORT, *on_engine())
    command(*words, "--only", "1")
    assert not Path("m/leaderboard.csv").exists()
    assert "is done already" in command("matrix", "--output", "m", "--only", "mlp-digits-seed1").stderr
    assert "0 to 1" in command("matrix", "--output", "m", "--only", "2", code=2).stderr
    assert "no effect" in command("matrix", "--output", "m", "--only", "0", "--jobs", "2", code=2).stderr
    assert "all cells are done" in command("matrix", "--output", "m", "--only", "mlp-digits-seed0").stderr
    assert Path("m/leaderboard.csv").exists()


@pytest.mark.slow
def test_an_array_on_a_real_slurm_survives_kills_and_its_time_limit(tmp_path: Path) -> None:
    reason = install()
    if reason:
        pytest.skip(reason)
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm", nodes=1) as slurm:
        slurm.environment |= environment(
            PYTHONPATH=str(TESTS.parent / "src"),
            SLURM_CONF=slurm.environment["SLURM_CONF"],
            MODELYARD_FAULTS="slow@save=300ms",
        )
        options = ("--train_steps", "600", "--save_every", "20 steps", "--hidden_units", "16", "--threads", "1")
        words = ["submit", "slurm", "--json", "--", "matrix", *CELLS, "--output", "m", *options, *on_engine()]
        done = subprocess.run([*COMMAND, *words], env=slurm.environment, capture_output=True, text=True, check=True)
        job = str(json.loads(done.stdout)["answer"].split()[-1])
        cells = [tmp_path / f"m/cells/mlp-digits-seed{seed}" for seed in range(2)]

        def is_under_way(cell: Path) -> bool:
            return any(int(path.name[5:]) >= 40 for path in cell.glob("checkpoints/step-*"))

        slurm.wait("both cells", lambda: all(map(is_under_way, cells)), PATIENCE)
        os.kill(int((cells[0] / "runlogs/chief.pid").read_text()), signal.SIGKILL)
        slurm.ask("scancel", "--batch", "--signal=USR1", f"{job}_1")  # as SLURM does shortly before the time limit
        hurried = 0.0

        def has_ended() -> bool:
            nonlocal hurried
            if time.monotonic() - hurried > 5:  # SLURM would wait two minutes
                slurm.ask("scontrol", "update", f"JobId={job}_1", "StartTime=now+1")
                hurried = time.monotonic()
            return not slurm.ask("squeue", "-h", "-j", job)

        slurm.wait("the array to end", has_ended, PATIENCE)
    logs = {path.name: path.read_text() for path in tmp_path.glob("m-*.log")}
    assert len(logs) == 2, logs
    for cell in cells:
        starts = [start["step"] for start in json.loads((cell / "manifest.json").read_text())["starts"]]
        assert len(starts) == 2, (starts, logs)
        assert starts[1] >= 40, (starts, logs)
    assert (tmp_path / "m/leaderboard.csv").exists(), logs
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path / "m") in (one.info["cmdline"] or [])]
