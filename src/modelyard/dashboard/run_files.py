"""Reads what the table shows of one run folder: little, fast, and whatever a stranger wrote there.

Files are not checked as they are to resume a run: of a folder that is half written or damaged, what can be read is
shown. Links are not followed, only regular files are read, and no more of them than the limits below.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from modelyard.config.yaml_file import MAX_BYTES, RUN_CONFIG_KEY, parse_value
from modelyard.errors import CheckpointError
from modelyard.run.checkpoint import LOOP_STATE, STATE, list_checkpoints
from modelyard.run.directory import BEST, CHECKPOINTS, CONFIG, EVALUATOR, LOCK, LOGS, MANIFEST, METRICS
from modelyard.run.integrity import is_unchanged
from modelyard.run.summary import PAUSED
from modelyard.system.process import SUFFIX, read_holder

Row = dict[str, Any]
CHIEF_LOG, CHIEF_PID = f"{LOGS}/chief.log", f"{LOGS}/chief{SUFFIX}"
LONGEST_TEXT = 100_000
"""Characters of a text, such as an option or the end of a log."""
_SHORT_TEXT = 300
"""Characters of an option in the table."""
_LARGEST_JSON = 4 << 20
_TAILS = (1 << 12, 1 << 16, 1 << 20)
"""Bytes at the end of metrics.jsonl that are searched for the last row of every split, one after the other."""
_LOG_TAIL = 1 << 12
_LARGEST_INTEGER = 1 << 53  # JavaScript has no larger ones
_BESIDES = {"step", "epoch", "split", "seconds"}
_WATCHED = (CONFIG, MANIFEST, METRICS, f"{EVALUATOR}/{METRICS}", CHECKPOINTS, BEST, CHIEF_LOG, CHIEF_PID)
Signature = tuple[Any, ...]


# -- files ----------------------------------------------------------------------------------------------------------


def open_plain(path: str) -> int | None:
    """Opens a regular file to read and returns its descriptor; None if it is something else, a link, or not there."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def read_plain(path: str, most: int) -> bytes | None:
    """Returns the content of a regular file of at most ``most`` bytes; None if there is no such file."""
    handle = open_plain(path)
    if handle is None:
        return None
    try:
        size = os.fstat(handle).st_size
        return os.read(handle, size) if size <= most else None
    except OSError:
        return None
    finally:
        os.close(handle)


def read_end(path: str, most: int, before: int | None = None) -> tuple[bytes, int]:
    """Returns the last bytes of a file, and where they begin.

    Args:
        path: the file.
        most: the number of bytes.
        before: the end of the part that is of interest; by default that of the file.
    """
    handle = open_plain(path)
    if handle is None:
        return b"", 0
    try:
        end = os.fstat(handle).st_size
        start = max(0, (end if before is None else min(before, end)) - most)
        return os.pread(handle, most, start), start
    except OSError:
        return b"", 0
    finally:
        os.close(handle)


def read_object(path: str) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if it can't be read."""
    data = read_plain(path, _LARGEST_JSON)
    try:
        value = json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def signature(path: str) -> Signature:
    """Returns what changes when a file of a run folder changes that `read_row` reads."""
    found: list[Any] = []
    for name in _WATCHED:
        try:
            status = os.stat(f"{path}/{name}", follow_symlinks=False)
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append(None)
    found.append(is_locked(path))
    return tuple(found)


def is_locked(path: str) -> bool:
    """Returns whether a process on this machine trains in a run folder."""
    handle = open_plain(f"{path}/{LOCK}")
    if handle is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


# -- options --------------------------------------------------------------------------------------------------------

_OPTION = re.compile(r"\n(?=[^\s#-])")
"""Separates two options of a config.yaml that Modelyard wrote: further lines begin with a dash or a space."""
_COMMENT = re.compile(r"^#.*\n?", re.MULTILINE)
_PAIR = re.compile(r"([A-Za-z_][\w.]*): (\S+)")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,15}")
_FLOAT = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}(?:e[-+][0-9]{1,3})?")
_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_CONSTANTS: dict[str, Any] = {"null": None, "true": True, "false": False}
_AMBIGUOUS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def read_options(path: str) -> dict[str, Any] | None:
    """Returns the options in a config.yaml, each as plain text or a number; None if it is not the config of a run."""
    data = read_plain(path, MAX_BYTES)
    if data is None:
        return None
    return parse_options(data.decode("utf-8", "replace"))


def parse_options(text: str) -> dict[str, Any] | None:
    """Returns the options in the text of a config.yaml; None if it is not the config of a run."""
    if f"{RUN_CONFIG_KEY}:" not in text:
        return None
    found: dict[str, Any] = {}
    for part in _OPTION.split(_COMMENT.sub("", text).strip("\n")):
        try:
            found.update(_parse(part) if len(part) < _SHORT_TEXT else _parse.__wrapped__(part))
        except (ValueError, yaml.YAMLError):  # what remains is shown
            continue
    return found if found.pop(RUN_CONFIG_KEY, None) is not None else None


@lru_cache(maxsize=100_000)  # runs have most of their options in common, and YAML is slow
def _parse(part: str) -> dict[str, Any]:
    pair = _PAIR.fullmatch(part)
    if pair is not None:
        key, value = pair.groups()
        if value in _CONSTANTS:
            return {key: _CONSTANTS[value]}
        if _INTEGER.fullmatch(value):
            return {key: int(value)}
        if _FLOAT.fullmatch(value):
            return {key: plain(float(value))}
        if _WORD.fullmatch(value) and value.lower() not in _AMBIGUOUS:
            return {key: plain(value)}
    read = parse_value(part)
    if not isinstance(read, dict):
        raise ValueError("not an option")
    return {str(key)[:_SHORT_TEXT]: plain(value) for key, value in read.items()}


def plain(value: Any) -> str | int | float | bool | None:
    """Returns a value as a text or number that every JSON parser reads."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _LARGEST_INTEGER else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return str(value)[:LONGEST_TEXT].encode("utf-8", "replace").decode()


# -- metrics --------------------------------------------------------------------------------------------------------


def parse_row(line: bytes) -> Row | None:
    """Returns a row of metrics.jsonl with numbers that are finite, or None if the line is none."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(read.get("split"), str):
        return None
    step = read.get("step")
    if type(step) is not int or not 0 <= step < _LARGEST_INTEGER:
        return None
    row = {key: number for key, value in read.items() if (number := _number(value)) is not None}
    row["split"], row["step"] = read["split"][:40], step
    return row


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def last_rows(path: str) -> dict[str, Row]:
    """Returns the last row of every split in a metrics.jsonl, if it is not far from the end."""
    found: dict[str, Row] = {}
    for most in _TAILS:
        data, start = read_end(path, most)
        lines = data.split(b"\n")
        found = {}
        # The last line is incomplete while it is written, the first one if it was cut here.
        for line in reversed(lines[bool(start) : -1]):
            row = parse_row(line)
            if row is not None:
                found.setdefault(row["split"], row)
                if len(found) > 1 and "train" in found and "validation" in found:
                    return found
        if not start:
            break
    return found


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a row."""
    return {key: value for key, value in row.items() if key not in _BESIDES}


# -- the row of the table -------------------------------------------------------------------------------------------

_RECORD = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) *(.*)", re.MULTILINE)
_ERROR_LINE = re.compile(rb"^error: (.*)", re.MULTILINE)


def read_row(path: str, seen: Signature) -> Row | None:
    """Returns what the table shows of a run: options, metrics, how far it is, its state and since when.

    Args:
        path: the run folder.
        seen: its `signature`.

    Returns:
        None if the folder is no run, or no longer one.
    """
    config = read_plain(f"{path}/{CONFIG}", MAX_BYTES)
    text = config.decode("utf-8", "replace") if config is not None else ""
    options = parse_options(text)
    if options is None:
        return None
    manifest, rows = read_object(f"{path}/{MANIFEST}"), last_rows(f"{path}/{METRICS}")
    if seen[3] is not None:
        rows |= last_rows(f"{path}/{EVALUATOR}/{METRICS}")
    starts = [start for start in _list(manifest.get("starts")) if isinstance(start, dict)]
    state = _newest_state(path, CHECKPOINTS)
    best = _best(path) if options.get("best_model_dir") is None else {}
    saved = max(_count(state.get("step")), best.get("step", 0))
    step = max([row["step"] for row in rows.values()] + [saved])
    loop = object_of(state.get(LOOP_STATE))
    total = _count(loop.get("total_steps")) or _count(options.get("train_steps"))
    times = [mark[0] / 1e9 for mark in (seen[2], seen[3], seen[6]) if mark is not None]
    first, last = (_time(starts[index].get("time")) if starts else None for index in (0, -1))
    row: Row = {
        "step": step,
        "total": total or None,
        "started": first,
        "changed": max(times, default=None),
        "starts": len(starts),
        "metrics": _metrics(rows, best),
        "best": best or None,
        "options": {key: _short(value) for key, value in options.items()},
    }
    row |= {key: rows["train"][key] for key in ("epoch",) if key in rows.get("train", {})}
    seconds = [each["seconds"] for each in rows.values() if "seconds" in each]
    row["seconds"] = max(seconds, default=None)
    size = object_of(manifest.get("model"))
    for name in ("parameters", "flops"):
        row[name] = plain(size.get(name)) if isinstance(size.get(name), int) else None
    row["state"], row["reason"] = _state(path, seen, loop, saved, total)
    row["since"] = last if row["state"] == "running" and last else row["changed"] or first
    if not is_unchanged(text):
        row["problem"] = f"{CONFIG} is not as the run wrote it"
    return row


def _metrics(rows: Mapping[str, Row], best: Mapping[str, Any]) -> dict[str, float]:
    """Returns the last metrics of every split; those of validation are of the best model, if there is one."""
    found: dict[str, float] = {}
    for split, row in rows.items():
        shown = metrics_of(row)
        if split == "validation" and isinstance(best.get("metrics"), dict):
            shown |= metrics_of({k: n for k, value in best["metrics"].items() if (n := _number(value)) is not None})
            if (value := _number(best.get("value"))) is not None:
                shown[str(best.get("metric"))[:100]] = value
        found |= {f"{split} {key}"[:100]: value for key, value in shown.items()}
    return found


def _newest_state(path: str, kind: str) -> dict[str, Any]:
    try:
        saved = list_checkpoints(Path(path, kind))
    except CheckpointError:
        return {}
    return read_object(f"{saved[max(saved)]}/{STATE}") if saved else {}


def _best(path: str) -> dict[str, Any]:
    """Returns metric, value and step of the best model, with all metrics of its evaluation; empty if there is none."""
    try:
        saved = list_checkpoints(Path(path, BEST))
    except CheckpointError:
        return {}
    found = []
    for folder in list(saved.values())[-10:]:
        loop = object_of(read_object(f"{folder}/{STATE}").get(LOOP_STATE))
        best = object_of(loop.get("best"))
        if (value := _number(best.get("value"))) is not None:
            sign = -1 if best.get("mode") == "max" else 1
            metrics = object_of(loop.get("metrics"))
            shown = {"metric": str(best.get("metric"))[:100], "value": value, "step": _count(best.get("step"))}
            found.append((sign * value, shown["step"], shown | {"metrics": metrics}))
    return min(found, key=lambda item: item[:2])[2] if found else {}


def _state(path: str, seen: Signature, loop: Mapping[str, Any], saved: int, total: int) -> tuple[str, str]:
    """Returns the state of a run in a word, and its reason if one is known. ``saved`` is the newest saved step."""
    if seen[-1]:
        return "running", ""
    if seen[7] is not None and read_holder(Path(path, CHIEF_PID)) is not None:
        return "running", "starting or ending"
    if loop.get("stopped"):
        return "finished", "stopped early"
    if total and _count(loop.get("total_steps")) and saved >= total:
        return "finished", ""
    if loop.get("paused") is True:
        return PAUSED, "it has come to its pause_at"
    reason = _failure(path)
    if reason:
        return "failed", reason
    if seen[7] is not None:  # a process that exits removes it
        return "killed", "its process was killed, or the machine stopped"
    if not loop and not saved:
        return "not begun", ""
    return "interrupted", ""


def _failure(path: str) -> str:
    """Returns the error at the end of a run's log; empty if it does not end with one."""
    data, _ = read_end(f"{path}/{CHIEF_LOG}", _LOG_TAIL)
    records = list(_RECORD.finditer(data))
    last = records[-1] if records else None
    reason = last[2] if last is not None and last[1] in (b"ERROR", b"CRITICAL") else b""
    said = [found for found in _ERROR_LINE.finditer(data) if last is None or found.start() > last.start()]
    if said:  # by a process that was started again and refused
        reason = said[-1][1]
    return reason.decode("utf-8", "replace")[:_SHORT_TEXT]


def _short(value: Any) -> Any:
    return f"{value[:_SHORT_TEXT]}…" if isinstance(value, str) and len(value) > _SHORT_TEXT else value


def object_of(value: Any) -> dict[str, Any]:
    """Returns a JSON object; empty if the value is none."""
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _LARGEST_INTEGER else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _time(value: Any) -> float | None:
    """Returns an ISO time as seconds since 1970."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None
