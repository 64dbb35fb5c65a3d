"""Checks that the files and folders exist that the options of a new run name."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelyard.config.schema import COMPONENTS, Config, is_path, registered_name
from modelyard.config.yaml_file import Value
from modelyard.errors import Problem, nearest
from modelyard.storage import is_remote

_RUN_CONFIG = "config.yaml"
SAVED_MODEL_PATH = "saved_model_path"


def missing_files(config: Config, merged: Mapping[str, Value]) -> Iterator[Problem]:
    """Yields a problem for each path that does not exist. Cloud storage is not asked.

    A run that exists needs its initial weights no more. What its own config names is checked when it is read: it may
    have moved.
    """
    for key in ("data_dir", "cache_dir"):
        path = getattr(config, key)
        if path is not None and is_remote(path):
            yield Problem(merged[key].where, key, _not_remote(path))
    for key, path in _named(config):
        value = merged.get(key)
        if value is None or Path(value.where.rpartition(":")[0] or value.where).name == _RUN_CONFIG:
            continue
        if is_remote(path):
            if key == SAVED_MODEL_PATH:
                yield Problem(value.where, key, _not_remote(path))
        elif not _exists(path, is_prefix=key == "checkpoint_path"):
            yield Problem(value.where, key, f"there is no file or folder {path}.{_hint(path)}")


def _not_remote(path: str) -> str:
    return f"must be a folder on this machine, not the URL {path}."


def _named(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the options that name files, with their paths."""
    if is_path(config.dataset):
        yield "dataset", config.dataset
    if config.checkpoint_path is not None and not _may_exist(config.model_dir):
        yield "checkpoint_path", config.checkpoint_path
    for part in ("dataset", "model"):
        if part == "model" and _may_exist(config.model_dir):
            continue
        for key, field in _fields(config, part).items():
            extra: Any = field.json_schema_extra
            path = config.component_options.get(key)
            if isinstance(extra, dict) and extra.get("path") and path and path not in extra.get("words", ()):
                yield key, str(path)


def _fields(config: Config, part: str) -> Mapping[str, Any]:
    name = registered_name(part, getattr(config, part))
    registry = COMPONENTS[part]
    return registry.get(name).options.model_fields if name in registry.names() else {}


def _may_exist(model_dir: str | None) -> bool:
    """Whether a run folder may hold a run already."""
    return model_dir is not None and (is_remote(model_dir) or (Path(model_dir).expanduser() / _RUN_CONFIG).exists())


def _exists(path: str, is_prefix: bool) -> bool:
    found = Path(path).expanduser()
    try:
        if os.path.lexists(found) or (is_prefix and found.with_name(f"{found.name}.index").exists()):
            return True
        return any(letter in path for letter in "*?[") and next(glob.iglob(path, recursive=True), None) is not None  # noqa: PTH207
    except (OSError, ValueError):  # a name that is too long, or a folder that can't be read: explained when it is read
        return True


def _hint(path: str) -> str:
    """Names a file or folder beside it with a name like it."""
    found = Path(path).expanduser()
    try:
        near = nearest(found.name, os.listdir(found.parent), 1)  # noqa: PTH208 - names only
    except OSError:
        return ""
    return f" Did you mean {str(Path(path).with_name(near[0]))!r}?" if near else ""
