"""Ctrl-C before the first step."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import COMMAND, environment
from modelyard.system.interrupt import check_interrupted, note_interrupts

WORDS = ["train-and-evaluate", "--model", "mlp", "--dataset", "digits", "--model_dir", "run"]


def test_a_run_says_at_once_what_it_does_and_ends_quietly_at_ctrl_c() -> None:
    process = subprocess.Popen(
        [*COMMAND, *WORDS], env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert first.rstrip().endswith("reading the data: digits …"), "before TensorFlow, JAX or Keras is imported"
    assert "Traceback" not in errors
    assert process.returncode == 130
    assert output == ""
    assert not Path("run").exists(), "nothing was trained"


def test_ctrl_c_that_python_drops_is_remembered(capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with note_interrupts():
        check_interrupted()
        Interrupted()
        with pytest.raises(KeyboardInterrupt):
            check_interrupted()
    check_interrupted()
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


CODE = """
import signal
from modelyard.system.interrupt import note_interrupts
try:
    with note_interrupts():
        exec("signal.raise_signal(signal.SIGINT)")
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def test_the_status_is_130_also_if_generated_code_was_interrupted() -> None:
    Path("interrupted.py").write_text(CODE)
    assert subprocess.run([sys.executable, "-m", "interrupted"], env=environment(), check=False).returncode == 130


def test_ctrl_c_while_the_command_is_imported_is_quiet(tmp_path: Path) -> None:
    code = """
import signal, sys, importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "modelyard.cli.app":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from modelyard.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
