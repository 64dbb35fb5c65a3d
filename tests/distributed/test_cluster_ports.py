"""A cluster on this machine listens on the loopback interface only, whatever the engine opens."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster_processes import PARTS
from conftest import COMMAND, environment, on_engine
from modelyard.system import network
from modelyard.system.network import expects_loopback, is_loopback
from waiting import wait_until

SYNCHRONOUS = ["--workers", "2", "--evaluator"]
SERVERS = ["--workers", "1", "--ps", "1", "--evaluator"]


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    sockets = [s for s in process.net_connections("inet") if s.type == socket.SOCK_DGRAM or s.status == "LISTEN"]
    return {(s.laddr.ip, s.laddr.port) for s in sockets}


@pytest.mark.parametrize(
    "layout",
    [SYNCHRONOUS, pytest.param(SERVERS, marks=pytest.mark.tensorflow_only("parameter servers"))],
    ids=["synchronous", "ps"],
)
def test_a_local_cluster_listens_on_loopback_only_and_keeps_its_secret(tmp_path: Path, layout: list[str]) -> None:
    run = tmp_path / "run"
    command = ["train-and-evaluate", *PARTS, *on_engine(), "--model", "tiny_norm", "--dataset", "digits"]
    words = [*COMMAND, "launch", "--model_dir", str(run), *layout, "--", *command]
    found: dict[str, set[tuple[str, int]]] = {}
    secrets: set[str] = set()

    def trains() -> bool:
        """Whether steps are logged: everything is connected. Looks at all sockets meanwhile."""
        assert launcher.poll() is None, (tmp_path / "out").read_text()[-3000:]
        with suppress(psutil.Error):
            for process in psutil.Process(launcher.pid).children(recursive=True):
                with suppress(psutil.Error):
                    variables = process.environ()
                    if "TF_CONFIG" not in variables:  # of the launcher still: the process does not run its program yet
                        continue
                    task = json.loads(variables["TF_CONFIG"])["task"]
                    secrets.add(variables.get("MODELYARD_CLUSTER_SECRET", "none"))
                    assert not any(secret in " ".join(process.cmdline()) for secret in secrets)
                    found.setdefault(f"{task['type']} {task['index']}", set()).update(listening(process))
        file = run / "metrics.jsonl"
        return file.is_file() and '"split": "train"' in file.read_text()

    options = ["--train_steps", "1000000", "--log_every", "20", "--threads", "1", "--start_timeout_secs", "600"]
    with open(tmp_path / "out", "wb") as output:
        launcher = subprocess.Popen(
            [*words, *options], stdout=output, stderr=output, env=environment(), start_new_session=True
        )
        try:
            wait_until(trains, "a step")
            trains()
        finally:
            launcher.send_signal(signal.SIGKILL)  # the others end with it
            launcher.wait()
    trainers = {name for name in found if not name.startswith("evaluator")}
    assert len(trainers) == (3 if "--ps" in layout else 2)
    assert all(found[name] for name in trainers), found  # the engine's own servers were seen
    assert {where for where in set.union(*found.values()) if not is_loopback(where[0])} == set()
    assert "listens on all interfaces" not in (tmp_path / "out").read_text()
    (secret,) = secrets  # one for all
    assert len(secret) == 64
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "manifest.json", "out"} <= {path.name for path in written}
    assert [path for path in written if secret.encode() in path.read_bytes()] == []


def test_a_program_that_listens_on_all_interfaces_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On macOS, TensorFlow does."""
    opened = iter([{7}, {7, 2222}] * 2)
    monkeypatch.setattr(network, "_open_ports", lambda: next(opened))
    with expects_loopback("TensorFlow", ["127.0.0.1:1", "localhost:2"]):
        pass
    assert "TensorFlow listens on all interfaces at port 2222, although" in caplog.text
    caplog.clear()
    with expects_loopback("TensorFlow", ["127.0.0.1:1", "192.0.2.7:2"]):  # several machines: it has to
        pass
    assert not caplog.records
