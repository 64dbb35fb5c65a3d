"""The command: it starts quickly, prints its address, and ends when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from written_runs import write_run

from conftest import COMMAND, environment
from waiting import PATIENCE


def test_it_prints_an_address_with_a_token_and_ends_quietly(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    with subprocess.Popen(
        [*COMMAND, "dashboard", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=PATIENCE) as page:
            assert page.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address.partition("?")[0], timeout=PATIENCE)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PATIENCE)
        assert server.returncode == 0
        assert errors == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["file"], "file is not a folder"),
        ([".", "--port", "70000"], "0 to 65535"),
        ([".", "--host", "not an address"], "is not an address of this machine"),
        ([".", "--allowed_host", "http://x"], "without scheme and port"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    from modelyard.cli.app import main

    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", *words])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_without_the_packages_it_says_how_to_install_them() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from modelyard.cli.app import main; main(['dashboard', '.'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode != 0
    assert "pip install 'modelyard[serve]'" in done.stderr


def test_nothing_heavy_is_imported() -> None:
    """What is imported before it listens; and what reads the runs, afterwards."""
    code = """
import sys
import modelyard.cli.app, modelyard.dashboard.server, modelyard.dashboard.app, modelyard.compat.uvicorn, uvicorn
print(sorted({"keras", "tensorflow", "jax", "numpy", "pydantic", "scipy", "cv2"} & set(sys.modules)))
import modelyard.dashboard.actions, modelyard.dashboard.details, modelyard.launcher.local
print(sorted({"keras", "tensorflow", "jax", "scipy", "sklearn", "cv2", "tensorboard"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]
