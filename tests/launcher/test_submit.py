"""Scripts and manifests for SLURM, Kubernetes and Vertex AI, and the errors of `submit`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import modelyard
from conftest import environment, last_json
from modelyard.cli.output import program
from modelyard.errors import ConfigError, RunError, UserError
from modelyard.launcher.submit import Submission, submit, template_text
from modelyard.run.remote_lock import STALE_SECONDS
from waiting import PATIENCE

Command = Callable[..., "subprocess.CompletedProcess[str]"]
MINE = ["train", "--model_dir", "runs/mine"]
CLOUD = ["train", "--model_dir", "gs://bucket/runs/mine"]
RESOURCES: dict[str, dict[str, Any]] = {
    "slurm": {},
    "kubernetes": {"image": "registry/mine:1"},
    "vertex": {"image": "registry/mine:1", "region": "europe-west4"},
}
START_TIMEOUT = ["--start_timeout_secs", "1800"]
NASTY = [
    "'; touch owned; '",
    "$(touch owned)",
    "`touch owned`",
    "a\n#SBATCH --x\nb",
    "@COMMAND@ @NAME@",
    "\u2028é 🙂",
    "$HOME",
    "0o17",
]
TEXT = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20),
)
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def dry(target: str, words: list[str], **more: Any) -> Submission:
    return submit(target, words, dry_run=True, **{**RESOURCES[target], **more})


def tool(name: str, code: str) -> None:
    """A command of that name, found before any other."""
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{code}\n")
    path.chmod(0o755)


def with_tools() -> dict[str, str]:
    return {"PATH": f"{Path('bin').resolve()}{os.pathsep}{os.environ['PATH']}"}


def run_script(text: str, srun: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a batch script with stand-ins for SLURM's commands."""
    for name, code in (
        ("srun", srun),
        ("scancel", 'echo "$@" >> scancel.txt; : > signalled'),
        ("scontrol", 'echo "$@" >> scontrol.txt'),
        ("sleep", ":"),
    ):
        tool(name, code)
    Path("job.sh").write_text(text)
    environ = {**os.environ, **with_tools(), "SLURM_JOB_ID": "7", **more}
    return subprocess.run(
        ["bash", "job.sh"], env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize("target", RESOURCES)
def test_a_dry_run_writes_nothing_and_returns_the_command(target: str) -> None:
    done = dry(target, CLOUD, workers=2)
    assert done.path is None
    assert not done.submitted
    assert list(Path().iterdir()) == []
    assert done.command.startswith({"slurm": "sbatch ", "kubernetes": "kubectl ", "vertex": "gcloud "}[target])
    assert "mine" in done.text


def test_the_file_is_named_after_the_run_and_replaced_only_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = submit("slurm", MINE)
    assert done.path == Path("mine.slurm.sh")
    assert done.path.read_text() == done.text
    assert not done.submitted
    with pytest.raises(RunError, match=r"mine\.slurm\.sh exists"):
        submit("slurm", MINE, workers=2)
    assert done.path.read_text() == done.text
    assert "--ntasks=2" in submit("slurm", MINE, workers=2, force=True).text


@pytest.mark.parametrize("target", ["kubernetes", "vertex"])
def test_only_its_owner_may_read_a_file_with_a_secret(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    path = submit(target, CLOUD, workers=2, **RESOURCES[target]).path
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert re.search(r"\b[0-9a-f]{64}\b", path.read_text())


def test_all_machines_of_vertex_have_the_same_secret() -> None:
    pools = yaml.safe_load(dry("vertex", CLOUD, workers=3, ps=1, evaluator=True).text)["workerPoolSpecs"]
    variables = [{one["name"]: one["value"] for one in pool["containerSpec"]["env"]} for pool in pools]
    assert len({found["MODELYARD_CLUSTER_SECRET"] for found in variables}) == 1
    assert len(pools) == 4


def test_the_secret_of_a_slurm_job_is_made_when_it_runs(tmp_path: Path) -> None:
    text = dry("slurm", MINE, workers=2).text
    seen = []
    for _ in range(2):
        done = run_script(text, 'printf %s "$MODELYARD_CLUSTER_SECRET" > secret', tmp_path)
        assert done.returncode == 0, done.stderr
        seen.append(Path("secret").read_text())
        assert re.fullmatch(r"[0-9a-f]{64}", seen[-1])
        assert seen[-1] not in text + done.stdout + done.stderr
    assert seen[0] != seen[1]


def test_the_output_of_the_tool_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    tool("sbatch", 'echo "Submitted batch job 12"; cp "$1" got.sh')
    monkeypatch.setenv("PATH", with_tools()["PATH"])
    done = submit("slurm", MINE)
    assert (done.submitted, done.answer) == (True, "Submitted batch job 12")
    assert Path("got.sh").read_text() == done.text
    tool("sbatch", "echo 'invalid partition' >&2; exit 1")
    with pytest.raises(RunError, match=r"sbatch failed: invalid partition"):
        submit("slurm", MINE, force=True)


def test_resources_become_directives() -> None:
    Path("cluster.yaml").write_text(
        "nodes: 2\ntasks-per-node: 2\ncpus: 8\nmemory: 64G\ngpus: 1\ntime: 1d12h\npartition: long\naccount: team\n"
    )
    text = dry("slurm", MINE, workers=2, ps=1, evaluator=True, resources="cluster.yaml", partition="short").text
    of_all = ["--cpus-per-task=8", "--mem=64G", "--time=1-12:00:00", "--partition=short", "--account=team"]
    first = ["--signal=B:USR1@120", "--requeue", "--open-mode=append", "--job-name=mine", "--output=mine-%j.log"]
    assert components(text) == [  # in the order of ranks: chief, workers, parameter server, evaluator
        [*first, "--ntasks=1", *of_all],
        ["--ntasks=2", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", *of_all],
        ["--ntasks=1", *of_all],
        ["--ntasks=1", "--gpus-per-task=1", *of_all],
    ]
    assert "srun --het-group=0-3 " in text
    for equal in ({"workers": 2, "evaluator": True}, {"workers": 2, "ps": 1, "gpus": 0}):
        text = dry("slurm", MINE, resources="cluster.yaml", **equal).text
        (options,) = components(text)
        assert "--ntasks=3" in options or "--ntasks=4" in options
        assert ("--gpus-per-task=1" in options) == ("gpus" not in equal)
        assert "het" not in re.sub("SLURM_HET_SIZE|heterogeneous", "", text)


def components(text: str) -> list[list[str]]:
    """The options of sbatch, for each component of a heterogeneous job."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    parts: list[list[str]] = [[]]
    for line in lines:
        parts.append([]) if line == "hetjob" else parts[-1].append(line)
    return parts


def test_the_environment_of_tasks() -> None:
    text = dry("slurm", MINE, workers=2, ps=1, evaluator=True).text
    assert "export MODELYARD_PS=1 MODELYARD_EVALUATOR=1 " in text


def test_all_problems_are_reported_at_once_with_near_names() -> None:
    Path("cluster.yaml").write_text("partitoin: long\ncpus: many\ntime: 12:00:00\nmemory: lots\ngpus: -1\n")
    with pytest.raises(ConfigError) as caught:
        dry("slurm", MINE, resources="cluster.yaml", image="mine:1")
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    assert "cluster.yaml:1: partitoin: slurm has no such resource. Did you mean 'partition'?" in text
    assert "cluster.yaml:2: cpus: must be a whole number" in text
    assert "write it as 12h" in text
    assert "'lots' is not a size such as 16G" in text
    assert "command line: image: slurm has no such resource" in text


@pytest.mark.parametrize(
    ("time", "seconds"), [("90m", 5400), ("1d 12h", 129600), ("12:00:00", 43200), ("1-0:00:30", 86430), ("45s", 45)]
)
def test_durations(time: str, seconds: int) -> None:
    assert f"activeDeadlineSeconds: {seconds}\n" in dry("kubernetes", CLOUD, time=time).text


@pytest.mark.parametrize("time", ["", "0h", "12", "12 parsecs", "1h30", "-1h", "1:99:00", 90, "9" * 40 + "h"])
def test_invalid_durations(time: Any) -> None:
    with pytest.raises(ConfigError, match="write it as 12h"):
        dry("kubernetes", CLOUD, time=time)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the command is missing"),
        (["evaluate", "runs/mine"], "no command to submit 'evaluate'"),
        (["train"], "Give --model_dir or --name"),
        (["resume"], "needs the folder of a run"),
        (["resume", "--train_steps", "40", "runs/mine"], "right after it"),
        ([*MINE, "a\0b"], "bytes that are not text"),
        ([*MINE, "\udcff"], "bytes that are not text"),
    ],
)
def test_commands_that_cannot_be_submitted(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dry("slurm", words)


def test_counts_have_limits() -> None:
    with pytest.raises(ConfigError) as caught:
        dry("slurm", MINE, workers=0, ps=-1)
    assert [problem.key for problem in caught.value.problems] == ["workers", "ps"]


def test_a_name_becomes_the_run_folder_if_all_processes_can_reach_it() -> None:
    assert f"--model_dir {shlex.quote(str(Path.cwd()))}/runs/nightly " in dry("slurm", ["train"], name="nightly").text
    manifest = dry("kubernetes", ["train"], name="nightly", resources={"claim": "shared"}).text
    assert '"/runs/nightly"' in manifest
    for target in ("kubernetes", "vertex"):
        with pytest.raises(ConfigError, match="Give --model_dir"):
            dry(target, ["train"], name="nightly")


@pytest.mark.parametrize("target", ["kubernetes", "vertex"])
def test_a_run_folder_that_would_be_lost_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="would be lost with"):
        dry(target, ["train", "--model_dir", "/elsewhere/mine"])


def test_a_run_folder_outside_the_claim_is_refused() -> None:
    for folder in ("/runsmine/x", "/runs/../x", "runs/x"):
        with pytest.raises(ConfigError, match="would be lost with"):
            dry("kubernetes", ["train", "--model_dir", folder], resources={"claim": "shared"})


def test_templates_can_be_changed() -> None:
    Path("mine.sh").write_text(template_text("slurm").replace("cd @WORKDIR@", "module load cuda\ncd @WORKDIR@"))
    done = dry("slurm", MINE, template="mine.sh")
    assert "module load cuda\ncd /" in done.text
    assert not re.search(r"@[A-Z_]+@", done.text)
    assert dry("slurm", MINE).text == done.text.replace("module load cuda\n", "")


@pytest.mark.parametrize("target", RESOURCES)
def test_unknown_and_missing_placeholders_are_named(target: str) -> None:
    Path("bad").write_text("# one\nkey: '@NAMEE@'\n")
    with pytest.raises(ConfigError) as caught:
        dry(target, CLOUD, template="bad")
    assert "bad:2: @NAMEE@: there is no placeholder 'NAMEE'" in str(caught.value)
    needed = {"slurm": "@COMMAND@", "kubernetes": "@ARGS@", "vertex": "@POOLS@"}[target]
    assert f"bad: {needed}: is missing" in str(caught.value)


def test_a_template_that_is_invalid_yaml_or_missing() -> None:
    Path("bad").write_text(template_text("kubernetes").replace('"@NAME@"', "@NAME@"))
    with pytest.raises(ConfigError, match=r"bad:\d+: is not valid YAML"):
        dry("kubernetes", CLOUD, template="bad")
    with pytest.raises(ConfigError, match="can't be read"):
        dry("kubernetes", CLOUD, template="nowhere")


def test_an_unknown_target_gets_near_names() -> None:
    with pytest.raises(UserError, match="Did you mean 'kubernetes'"):
        submit("kubernets", CLOUD)


@MANY
@given(words=st.lists(TEXT, max_size=4), workdir=st.sampled_from(["it's here", "$(touch owned)", "a\nb", "-n"]))
def test_words_are_quoted_for_the_shell(words: list[str], workdir: str, tmp_path: Path) -> None:
    (tmp_path / workdir).mkdir(exist_ok=True)
    folder = str(tmp_path / workdir)
    text = dry("slurm", [*MINE, *words], resources={"workdir": folder}).text
    srun = f'printf "%s\\0" "$@" > {shlex.quote(str(tmp_path))}/words; pwd > {shlex.quote(str(tmp_path))}/where'
    done = run_script(text, srun, tmp_path)
    assert done.returncode == 0, done.stderr
    given = (tmp_path / "words").read_bytes().decode().split("\0")[:-1]
    assert given[given.index("task") + 1 :][1:] == ["-m", "modelyard", *MINE, *words]
    assert (tmp_path / "where").read_text() == folder + "\n"
    assert not list(tmp_path.rglob("owned"))


@MANY
@given(value=TEXT, key=st.sampled_from(["partition", "account", "qos", "constraint", "python", "memory"]))
def test_a_resource_adds_at_most_one_directive(value: str, key: str) -> None:
    plain = dry("slurm", MINE).text.splitlines()
    try:
        text = dry("slurm", MINE, resources={key: value}).text
    except ConfigError:
        return
    assert len(text.splitlines()) == len(plain) + (key != "python")
    assert re.fullmatch(r"[\w.,:/@+=-]+", value, re.ASCII)


@MANY
@given(words=st.lists(TEXT, max_size=4), variable=TEXT)
def test_words_are_quoted_for_kubernetes(words: list[str], variable: str) -> None:
    text = dry("kubernetes", [*CLOUD, *words], resources={"env": {"MINE": variable}, "image": "a:1"}).text
    assert len(list(yaml.safe_load_all(text))) == 3
    container = list(yaml.safe_load_all(text))[2]["spec"]["template"]["spec"]["containers"][0]
    assert [expanded(word) for word in container["args"]] == ["modelyard", *CLOUD, *words, *START_TIMEOUT]
    assert expanded({one["name"]: one.get("value") for one in container["env"]}["MINE"]) == variable
    assert all(line == line.strip("\r\x85\u2028\u2029") for line in text.split("\n"))


@MANY
@given(words=st.lists(TEXT, max_size=4))
def test_words_are_quoted_for_vertex(words: list[str]) -> None:
    spec = yaml.safe_load(dry("vertex", [*CLOUD, *words]).text)
    assert spec["workerPoolSpecs"][0]["containerSpec"]["args"] == ["modelyard", *CLOUD, *words, *START_TIMEOUT]


def expanded(text: str) -> str:
    """An argument as Kubernetes expands it: $(NAME) is replaced, $$ is a dollar sign."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda match: "$" if match[0] == "$$" else "EXPANDED", text)


@MANY
@given(name=TEXT)
def test_names_are_refused_or_fit_everywhere(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        with pytest.raises(ConfigError, match="must be letters, digits"):
            dry("kubernetes", CLOUD, name=name)
        return
    done = dry("kubernetes", CLOUD, name=name)
    assert done.name == name
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", next(yaml.safe_load_all(done.text))["metadata"]["name"])


@pytest.mark.parametrize(
    ("folder", "name"),
    [("runs/My Run!/", "My-Run"), ("/a/..", "run"), ("gs://b/x" + "y" * 200, "x" + "y" * 99), ("$(id)", "id")],
)
def test_names_are_made_from_any_run_folder(folder: str, name: str) -> None:
    assert dry("slurm", ["train", "--model_dir", folder]).name == name


COUNTING = 'echo x >> starts; [ "$(wc -l < starts)" -ge {ends} ] && exit {last}; exit {status}'


@pytest.mark.parametrize(
    ("status", "last", "starts", "returned"),
    [
        (75, 0, 3, 0),
        (137, 0, 3, 0),
        (249, 0, 3, 0),
        (248, 0, 3, 0),
        (250, 0, 1, 2),
        (143, 0, 1, 143),
        (130, 0, 1, 130),
        (75, 250, 3, 2),
    ],
)
def test_failures_are_restarted_unless_a_restart_would_repeat_them(
    tmp_path: Path, status: int, last: int, starts: int, returned: int
) -> None:
    srun = COUNTING.format(ends=3, last=last, status=status)
    done = run_script(dry("slurm", MINE).text, srun, tmp_path)
    assert done.returncode == returned, done.stderr
    assert len(Path("starts").read_text().split()) == starts
    assert not Path("scontrol.txt").exists()


def test_tasks_get_the_requested_cores(tmp_path: Path) -> None:
    """Since SLURM 22.05, srun does not inherit the cores requested from sbatch."""
    text = dry("slurm", MINE, resources={"cpus": 8}).text
    run_script(
        text, "echo $SRUN_CPUS_PER_TASK $MODELYARD_PS $MODELYARD_EVALUATOR > seen", tmp_path, SLURM_CPUS_PER_TASK="8"
    )
    assert Path("seen").read_text() == "8 0 0\n"


def test_restarts_are_limited(tmp_path: Path) -> None:
    text = dry("slurm", MINE, resources={"max_restarts": 2}).text
    done = run_script(text, "echo x >> starts; exit 75", tmp_path)
    assert done.returncode == 75
    assert len(Path("starts").read_text().split()) == 3
    assert "status 75 after 2 restarts: giving up" in done.stderr


def test_a_kill_from_outside_is_not_counted_and_a_crash_is(tmp_path: Path) -> None:
    text = dry("slurm", MINE, resources={"max_restarts": 2}).text
    srun = "echo x >> starts; case $(wc -l < starts) in 1|2|4|5) exit 248 ;; *) exit 249 ;; esac"
    done = run_script(text, srun, tmp_path)
    assert done.returncode == 1
    assert len(Path("starts").read_text().split()) == 7  # of them 3, 6 and 7 crash
    assert done.stderr.count("a task was killed from outside") == 4
    assert "restart 2 of 2" in done.stderr
    text = dry("slurm", MINE, resources={"max_restarts": 0}).text
    Path("starts").unlink()
    assert run_script(text, srun, tmp_path).returncode == 1
    assert len(Path("starts").read_text().split()) == 1


@pytest.mark.parametrize(
    ("code", "memory_kills", "rank", "how"),
    [
        ("exit 1", ["oom_kill 3"] * 2, 249, "exited with status 1"),
        ("kill -SEGV $$", ["oom_kill 3"] * 2, 249, "exited with status 139"),
        ("kill -KILL $$", ["oom_kill 3"] * 2, 248, "was killed by SIGKILL from outside (not for lack of memory)"),
        ("kill -KILL $$", ["oom_kill 3", "oom_kill 4"], 249, "was killed by SIGKILL: out of memory"),
        ("kill -KILL $$", ["", ""], 249, "was killed by SIGKILL (from outside, or out of memory)"),
        ("exit 75", [""] * 2, 75, ""),
        ("exit 143", [""] * 2, 143, ""),
    ],
)
def test_a_task_tells_how_it_ended(tmp_path: Path, code: str, memory_kills: list[str], rank: int, how: str) -> None:
    for number, text in enumerate(memory_kills):
        Path(f"vmstat.{number}").write_text(f"pgfault 1\n{text}\n")
    tool("grep", f'echo x >> reads; exec {shutil.which("grep")} "$2" "vmstat.$(($(wc -l < reads) - 1))"')
    tool("fails", code)
    text = dry("slurm", MINE, resources={"python": str(tmp_path / "bin" / "fails"), "max_restarts": 0}).text
    srun = 'while [ "$1" != bash ]; do shift; done; SLURM_PROCID=3 "$@"; echo $? > rank; exit $(cat rank)'
    done = run_script(text, srun, tmp_path)
    assert int(Path("rank").read_text()) == rank
    told = [line for line in done.stderr.splitlines() if line.startswith("task 3 on ")]
    assert [line.split(" ", 4)[4] for line in told] == ([how] if how else [])


@pytest.mark.parametrize(
    ("status", "rank", "times"), [(75, 3, 1), (2, 3, 1), (1, 0, 1), (1, 3, 0), (143, 0, 0), (0, 0, 0)]
)
def test_a_task_tells_when_all_must_restart(tmp_path: Path, status: int, rank: int, times: int) -> None:
    """Training goes on without an evaluator that crashes, and without a worker of parameter servers."""
    tool("ends", f"exit {status}")
    text = dry("slurm", MINE, resources={"python": str(tmp_path / "bin" / "ends"), "max_restarts": 0}).text
    srun = f'while [ "$1" != bash ]; do shift; done; SLURM_PROCID={rank} "$@"; exit $?'
    run_script(text, srun, tmp_path)
    told = Path("scancel.txt").read_text().splitlines() if Path("scancel.txt").exists() else []
    assert told == ["--quiet --batch --signal=USR2 7"] * times


def test_the_rest_of_a_failed_step_is_killed(tmp_path: Path) -> None:
    """A task that is frozen would never exit, and srun waits for all."""
    first = "trap 'exit 143' TERM; kill -USR2 $PPID; while :; do :; done"
    srun = f"echo x >> sruns; [ $(wc -l < sruns) = 1 ] || exit 0; {first}"
    done = run_script(dry("slurm", MINE, resources={"max_restarts": 1}).text, srun, tmp_path)
    assert "a task had not ended 60 s after another had failed: killed" in done.stderr
    assert "status 137: restart 1 of 1" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(("number", "requeued"), [("USR1", True), ("TERM", False)])
@pytest.mark.parametrize("status", [143, 75, 0, 250])
def test_only_a_job_at_its_time_limit_is_requeued(tmp_path: Path, number: str, requeued: bool, status: int) -> None:
    srun = f"kill -{number} $PPID; until [ -e signalled ]; do :; done; exit {status}"  # until the script has noticed
    done = run_script(dry("slurm", MINE).text, srun, tmp_path)
    assert done.returncode == {0: 0, 250: 2}.get(status, 143), done.stderr
    expected = requeued and status in (143, 75)
    assert Path("scontrol.txt").exists() is expected
    if expected:
        assert Path("scontrol.txt").read_text() == "requeue 7\n"


def test_a_user_error_of_one_task_outranks_the_failures_of_others(tmp_path: Path) -> None:
    """srun's status is the highest of its tasks', so 2 must not be hidden behind the 75 of the others."""
    srun = 'while [ "$1" != bash ]; do shift; done; "$@"; exit $?'
    text = dry("slurm", MINE, resources={"python": str(tmp_path / "bin" / "fails")}).text
    tool("fails", "echo x >> starts; exit 2")
    assert run_script(text, srun, tmp_path).returncode == 2
    assert Path("starts").read_text() == "x\n"


def test_a_task_may_save_when_all_of_its_step_gets_sigterm(tmp_path: Path) -> None:
    srun = 'while [ "$1" != bash ]; do shift; done; "$@"; exit $?'
    text = dry("slurm", MINE, resources={"python": str(tmp_path / "bin" / "saves")}).text
    tool("saves", "kill -TERM $PPID; for i in 1 2 3; do read -t 0.1 < <(:); done; touch saved; exit 0")
    assert run_script(text, srun, tmp_path).returncode == 0
    assert Path("saved").exists()


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        ({"workers": 1}, [1]),
        ({"workers": 3}, [1, 2]),
        ({"workers": 1, "evaluator": True}, [1, 0, 0, 1]),
        ({"workers": 2, "ps": 1, "evaluator": True}, [1, 2, 1, 1]),
        ({"workers": 2, "ps": 3}, [1, 2, 3]),
    ],
)
def test_vertex_pools_are_in_its_order(shape: dict[str, Any], counts: list[int]) -> None:
    text = dry("vertex", CLOUD, resources={"gpus": 1, "accelerator": "NVIDIA_TESLA_T4"}, **shape).text
    pools = yaml.safe_load(text)["workerPoolSpecs"]
    assert [pool.get("replicaCount", 0) for pool in pools] == counts
    has_gpus = ["acceleratorCount" in pool["machineSpec"] for pool in pools if pool]
    trains = [not shape.get("ps"), True, False, True]
    assert has_gpus == [can for can, count in zip(trains, counts, strict=False) if count]
    assert all(pool == {} for pool, count in zip(pools, counts, strict=True) if not count)


def container(target: str, **more: Any) -> list[str]:
    """What a container runs."""
    document = list(yaml.safe_load_all(dry(target, CLOUD, **more).text))[-1]
    if target == "vertex":
        spec = document["workerPoolSpecs"][0]["containerSpec"]
        return [*spec["command"], *spec["args"]]
    spec = document["spec"]["template"]["spec"]["containers"][0]
    return [expanded(word) for word in (*spec["command"], *spec["args"])]


@pytest.mark.parametrize("target", ["kubernetes", "vertex"])
@pytest.mark.parametrize(
    ("status", "starts", "returned"), [(75, 3, 0), (2, 1, 2), (143, 1, 143), (139, 1, 139), (0, 1, 0)]
)
def test_a_container_restarts_only_after_a_lost_peer(target: str, status: int, starts: int, returned: int) -> None:
    tool("modelyard", COUNTING.format(ends=3, last=0, status=status))
    tool("sleep", ":")
    done = subprocess.run(container(target), env={**os.environ, **with_tools()}, timeout=PATIENCE, check=False)
    assert done.returncode == returned
    assert len(Path("starts").read_text().split()) == starts


def test_a_container_gives_up_and_passes_on_sigterm() -> None:
    tool("sleep", ":")
    tool("modelyard", "echo x >> starts; exit 75")
    words = container("kubernetes", resources={"max_restarts": 2})
    assert subprocess.run(words, env={**os.environ, **with_tools()}, timeout=PATIENCE, check=False).returncode == 75
    assert len(Path("starts").read_text().split()) == 3
    # The process signals the shell around it, which passes SIGTERM on.
    tool(
        "modelyard", "trap 'echo saved > saved; exit 143' TERM; kill -TERM $PPID; while :; do read -t 0.1 < <(:); done"
    )
    assert subprocess.run(words, env={**os.environ, **with_tools()}, timeout=PATIENCE, check=False).returncode == 143
    assert Path("saved").exists()


def test_the_pauses_of_a_container_are_longer_than_the_lock_of_a_dead_process_in_cloud_storage() -> None:
    tool("sleep", "echo $1 >> pauses")
    tool("modelyard", "exit 75")
    subprocess.run(container("vertex"), env={**os.environ, **with_tools()}, timeout=PATIENCE, check=False)
    pauses = [int(line) for line in Path("pauses").read_text().split()]
    assert pauses[0] == 5
    assert sum(pauses) + 3 * len(pauses) > STALE_SECONDS  # a start takes some seconds, too


def test_start_timeout_is_passed_to_the_processes() -> None:
    assert container("vertex", resources={"start_timeout_secs": 60})[-2:] == ["--start_timeout_secs", "60"]
    spec = yaml.safe_load(dry("vertex", [*CLOUD, "--start-timeout-secs=5"]).text)["workerPoolSpecs"][0]
    assert spec["containerSpec"]["args"] == ["modelyard", *CLOUD, "--start-timeout-secs=5"]


def test_gpus_of_vertex_need_an_accelerator() -> None:
    with pytest.raises(ConfigError, match="accelerator: must be given with gpus"):
        dry("vertex", CLOUD, gpus=1)


def test_the_command(command: Command) -> None:
    done = command("submit", "slurm", "--workers", "2", "--dry-run", "--", "train_and_eval", "--model-dir", "runs/x y")
    assert "-m modelyard train-and-evaluate --model-dir 'runs/x y' &" in done.stdout
    assert "Without --dry_run: sbatch x-y.slurm.sh" in done.stderr
    done = command("submit", "vertex", "--json", "--dry_run", "--image", "a:1", "--region", "r", "--", *CLOUD)
    assert json.loads(done.stdout) == last_json(done)
    assert last_json(done)["command"].endswith("--region=r --config=mine.vertex.yaml")
    assert command("submit", "kubernetes", "--print_template").stdout == template_text("kubernetes")
    assert "FROM python" in command("submit", "kubernetes", "--print_dockerfile").stdout
    assert "1 mistake" in command("submit", "slurm", code=2).stderr
    assert list(Path().iterdir()) == []


def said(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status of a command and what it wrote for people."""
    try:
        modelyard.main(words)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, capfd.readouterr().err


KUBERNETES = ("kubernetes", "--image", "a:1")


@pytest.mark.parametrize(
    ("target", "words", "status", "text"),
    [
        (("slurm",), ("--model", "resnet21"), 2, "there is no model 'resnet21'. Did you mean 'resnet32'"),
        (("slurm",), ("--epochs", "5"), 2, "epochs: there is no such option. Did you mean 'train_epochs'"),
        (("slurm",), ("--train_steps", "many"), 2, "train_steps: must be a whole number"),
        (("slurm",), ("--gpus", "2"), 2, "gpus: is an option of submit. Write it before --."),
        (("slurm",), ("--plugins", "only_there"), 2, "there is no plugin module 'only_there'"),
        (("slurm",), ("--cluster", "none"), 2, "every process would train alone"),
        (("slurm",), ("--config_file", "mine.yaml"), 2, "mine.yaml"),
        (("slurm", "--ps", "1"), ("--engine", "jax"), 2, "only TensorFlow supports parameter servers"),
        (("slurm",), ("--dataset", "data/pets"), 0, "data/pets does not exist here; the machines of the job must"),
        (KUBERNETES, ("--model", "resnet21"), 2, "If a package registers it where the job runs, name that package"),
        (KUBERNETES, ("--model", "theirs", "--plugins", "only_there"), 0, "'theirs'"),
        (KUBERNETES, ("--hidden", "5", "--plugins", "only_there"), 0, "(unless a plugin has it)"),
        (KUBERNETES, ("--train_steps", "many", "--plugins", "only_there"), 2, "train_steps: must be a whole number"),
        (KUBERNETES, ("--config_file", "/app/mine.yaml"), 0, "/app/mine.yaml is not here, so the options are not"),
    ],
)
def test_a_command_is_checked_before_it_waits_in_a_queue(
    target: tuple[str, ...], words: tuple[str, ...], status: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, errors = said(["submit", *target, "--dry_run", "--", *CLOUD, *words], capfd)
    assert ended == status, errors
    assert text in errors
    assert list(Path().iterdir()) == []


def test_a_plugin_that_is_here_is_used_for_the_check(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import modelyard\n\n\n@modelyard.register_hook('cheer')\nclass Cheer(modelyard.Hook): ...\n"
    )
    words = ["submit", *KUBERNETES, "--dry_run", "--", *CLOUD, "--plugins", "mine.py", "--hooks"]
    assert said([*words, "+cheer"], capfd)[0] == 0
    status, errors = said([*words, "+cher"], capfd)
    assert status == 2
    assert "'cheer'" in errors


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("slurm train --model mlp", "so -- must stand before train:\n  modelyard submit slurm -- train --model mlp"),
        ("slurm --workers 2 --model mlp", "--model is not an option of submit. Write it after --"),
        ("-- train --model mlp", "the target is missing: slurm, kubernetes, vertex."),
    ],
)
def test_a_missing_separator_is_explained(words: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, errors = said(["submit", *words.split()], capfd)
    assert status == 2
    assert text.replace("modelyard submit", f"{program()} submit") in errors


def test_submitting_imports_nothing_heavy() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "modelyard", "submit", "slurm", "--dry_run", "--", *MINE]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "modelyard" in imported
    assert imported.isdisjoint({"tensorflow", "keras", "jax", "cv2", "PIL", "sklearn", "kubernetes"})
