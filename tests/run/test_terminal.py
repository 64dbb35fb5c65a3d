"""The terminal tells everything: each line once, whatever bars and tables are below it."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from conftest import COMMAND, environment, on_engine

BAR = re.compile("[━╸╺]")
_TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\]size;(\d+);(\d+)\x07|\r|\n|[^\x1b]")


class Screen:
    """A terminal with the controls that are used here, and all that has scrolled out of it."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.gone: list[str] = []
        self.lines: list[list[str]] = [[]]
        self.row, self.column, self.wraps = 0, 0, True

    def feed(self, text: str) -> None:
        """Shows what a program has written."""
        at = 0
        for token in _TOKENS.finditer(text):
            assert token.start() == at, f"an unknown control: {text[at : at + 20]!r}"
            at = token.end()
            if token[2] is not None:
                self._control(token[2], token[1])
            elif token[3] is not None:
                self.rows, self.columns = int(token[3]), int(token[4])
                self._scroll()
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self._next_line()
            else:
                self._put(token[0])
        assert at == len(text)

    def _control(self, name: str, numbers: str) -> None:
        line = self.lines[self.row]
        if name == "A":
            self.row = max(self.row - max(int(numbers or 1), 1), 0)
        elif name == "J":
            assert numbers in ("", "0")
            del line[self.column :], self.lines[self.row + 1 :]
        elif name == "K":
            at = min(self.column, self.columns - 1)  # after a full line the cursor is still on its last character
            del line[at if numbers in ("", "0") else 0 :]
        elif name in "hl" and numbers == "?7":
            self.wraps = name == "h"
        else:
            assert name == "m", f"an unknown control: {numbers}{name}"

    def _put(self, letter: str) -> None:
        if self.column >= self.columns:
            if self.wraps:
                self.column = 0
                self._next_line()
            else:
                self.column = self.columns - 1
        line = self.lines[self.row]
        line.extend(" " * (self.column + 1 - len(line)))
        line[self.column] = letter
        self.column += 1

    def _next_line(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])
        self._scroll()

    def _scroll(self) -> None:
        while len(self.lines) > self.rows and self.row > 0:
            self.gone.append("".join(self.lines.pop(0)))
            self.row -= 1

    @property
    def text(self) -> list[str]:
        """All lines, also those that have scrolled away."""
        return [*self.gone, *("".join(line) for line in self.lines)]


def shown(words: list[str], rows: int = 24, columns: int = 80) -> list[str]:
    """The lines on a terminal after a command has ended there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {name: value for name, value in environment(TERM="xterm-256color").items() if name != "COLUMNS"}
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    written = b""
    with subprocess.Popen(words, **ends, env=env, start_new_session=True) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: all have closed it
            while read := os.read(ours, 1 << 16):
                written += read
    os.close(ours)
    assert process.returncode == 0, written.decode(errors="replace")[-2000:]
    screen = Screen(rows, columns)
    screen.feed(written.decode())
    return screen.text


def without_spaces(text: str) -> str:
    return "".join(text.split())


PROGRAM = """
import fcntl, logging, os, struct, sys, termios, threading, time
from modelyard.system import console
from modelyard.system.console import bar, live_table, show_log

log = logging.getLogger("modelyard")
show_log()
count = 0
told = []


def tell(text=""):
    global count
    count += 1
    line = f"[{count:03}] {text}" + "word " * (count % 40)
    told.append(line.rstrip())
    log.info("%s", line)


def resize(rows, columns, know=True):
    with console._lock:
        os.write(2, f"\\x1b]size;{rows};{columns}\\x07".encode())
        if know:
            fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def others():
    for number in range(60):
        log.info("other thread %03d", number)
        told.append(f"other thread {number:03}")
        time.sleep(0.002)


tell()
thread = threading.Thread(target=others)
thread.start()
with bar("training", 100, note="compiling") as training:
    for step in range(100):
        training(step, note=f"loss {step}")
        tell()
        if step % 7 == 0:
            with bar("evaluating on validation", 3) as evaluation:
                for done in range(3):
                    evaluation(done)
                    tell()
        if step == 20:
            resize(12, 50)
        if step == 40:
            resize(12, 30, know=False)  # the window is smaller than the program knows
        if step == 60:
            resize(30, 100)
        if step == 70:
            print("printed to stdout")
            print("printed to stderr", file=sys.stderr)
            os.write(2, b"written by a library\\n")
            told.extend(["printed to stdout", "printed to stderr", "written by a library"])
    with live_table() as live:
        live("a table\\nof two lines")
        tell()
        live("the last table\\nof\\nthree lines")
thread.join()
tell("the end ")
open("told", "w").write("\\n".join(told))
"""


def test_every_line_is_on_the_terminal_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = shown([sys.executable, "program.py"])
    told = Path("told").read_text().splitlines()
    joined = without_spaces("".join(lines))
    others = [line for line in told if not line.startswith("[")]
    assert [line for line in others if joined.count(without_spaces(line)) != 1] == []
    assert [line for line in told if without_spaces(line) not in joined] == []
    numbers = re.findall(r"\[(\d{3})\]", joined)
    assert numbers == [f"{number:03}" for number in range(1, len(numbers) + 1)]
    assert len(numbers) == sum(line.startswith("[") for line in told)
    assert "".join(lines).count("the last table") == 1
    assert "a table" not in "".join(lines)
    assert [line for line in lines if BAR.search(line) or "training" in line or "evaluating" in line] == []


def test_every_logged_line_of_a_run_is_on_the_terminal_once() -> None:
    options = ["--dataset", "digits", "--model", "mlp", "--train_steps", "300", "--model_dir", "run"]
    often = ["--log_every", "5", "--eval_every", "5", "--eval_batch_size", "20"]
    lines = shown([*COMMAND, "train-and-evaluate", *options, *often, *on_engine()])
    joined = without_spaces("".join(lines))
    logged = [line.split(maxsplit=3) for line in Path("run/runlogs/chief.log").read_text().splitlines()]
    steps = [line[3] for line in logged if line[2] == "INFO" and line[3].startswith("step ")]
    assert len(steps) > 100
    assert [line for line in steps if joined.count(without_spaces(line)) != 1] == []
    others = [line[3] for line in logged if line[2] != "DEBUG"]
    assert [line for line in others if without_spaces(line) not in joined] == []
    assert [line for line in lines if BAR.search(line) and "/300" in line] == []


@pytest.mark.parametrize("ends", ["os._exit(0)", "pass"], ids=["while it is shown", "after its end"])
def test_a_table_as_wide_as_the_terminal_is_whole(ends: str) -> None:
    lines = [letter * 80 for letter in "abc"]
    program = f"""
import os
from modelyard.system.console import live_table
with live_table() as show:
    show({chr(10).join(lines)!r})
    {ends}
"""
    assert [line for line in shown([sys.executable, "-c", program]) if line.strip()] == lines
