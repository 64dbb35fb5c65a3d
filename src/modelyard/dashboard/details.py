"""All that is shown of one run: options, environment, notes, files."""

from __future__ import annotations

from typing import Any

from modelyard.config.schema import CORE_FIELDS
from modelyard.dashboard.index import FoundRun, Index, is_plain
from modelyard.dashboard.remote import REPORT
from modelyard.dashboard.run_files import LONGEST_TEXT, object_of, plain, read_object, read_options
from modelyard.run.directory import CONFIG, MANIFEST

_MOST_STARTS = 20


def details(index: Index, run: FoundRun) -> dict[str, Any]:
    """Returns what the page of one run shows."""
    manifest = read_object(f"{run.path}/{MANIFEST}")
    data = object_of(manifest.get("dataset"))
    starts = manifest.get("starts")
    shown = [
        _start(one) for one in (starts if isinstance(starts, list) else [])[-_MOST_STARTS:] if isinstance(one, dict)
    ]
    classes = data.get("classes")
    sizes = {str(split)[:40]: plain(count) for split, count in list(object_of(data.get("sizes")).items())[:10]}
    best = run.row["best"]
    return {
        "id": run.id,
        "name": run.name,
        "path": index.address(run.path).encode("utf-8", "replace").decode(),
        "options": read_options(f"{run.path}/{CONFIG}") or {},
        "defaults": _defaults(),
        "starts": shown,
        "sizes": sizes,
        "classes": [str(plain(name))[:200] for name in classes[:200]] if isinstance(classes, list) else [],
        "class_count": len(classes) if isinstance(classes, list) else None,
        "best": {key: best[key] for key in ("metric", "value", "step")} if best else None,
        "notes": index.notes(run),
        "report": is_plain(f"{run.path}/{REPORT}"),
        "problem": run.row.get("problem", ""),
        "reason": run.row["reason"],
    }


def _defaults() -> dict[str, Any]:
    """Returns the defaults of the core options, so that the page can show what differs from them."""
    fields = CORE_FIELDS.items()
    return {name: plain(list(v) if isinstance(v := info.default, tuple) else v) for name, info in fields}


def _start(start: dict[str, Any]) -> dict[str, Any]:
    """Returns when, where and with which versions a run was started."""
    command = start.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    hardware, engine = object_of(start.get("hardware")), object_of(start.get("engine"))
    return {
        "time": str(start.get("time"))[:40],
        "step": plain(start.get("step")),
        "command": " ".join(words)[:LONGEST_TEXT],
        "git_commit": plain(start.get("git_commit")),
        "versions": _texts(start.get("versions")),
        "hardware": _texts(hardware),
        "engine": _texts(engine),
        "plugins": _texts(start.get("plugins")),
    }


def _texts(values: Any) -> dict[str, str]:
    return {str(key)[:100]: str(plain(value))[:1000] for key, value in list(object_of(values).items())[:100]}
