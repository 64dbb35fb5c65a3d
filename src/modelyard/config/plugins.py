"""Imports a user's own code: modules or .py files of the option ``plugins``, and entry points of packages."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from modelyard.config.trust import exists, find_file, imported_module
from modelyard.errors import UserError
from modelyard.storage import is_remote

ENTRY_POINTS = "modelyard.plugins"


def load_plugins(names: tuple[str, ...]) -> None:
    """Imports each plugin once. It registers models, datasets and other components.

    `trust_plugins` decides before whether they may be imported.

    Raises:
        UserError: if a plugin does not exist or fails, with its line that failed.
    """
    for name in names:
        _load(name, partial(_import_file if name.endswith(".py") else _import_module, name))


def missing_plugins(names: tuple[str, ...]) -> list[str]:
    """Returns a message for each plugin that does not exist. Imports nothing."""
    return [_missing(name) for name in names if imported_module(name) is None and not exists(name)]


def _missing(name: str) -> str:
    if is_remote(name):
        return f"plugins at URLs are not imported. Copy {name} to this machine, and name the copy with --plugins."
    if name.endswith(".py"):
        return f"there is no plugin file {name!r}; --plugins PATH names another."
    return f"there is no plugin module {name!r}. The path of a file must end in .py."


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Returns the entry points on ``sys.path``. To find them reads a file of every package, and a search asks often."""
    return tuple(entry_points(group=ENTRY_POINTS))


def has_installed_plugins() -> bool:
    """Whether an installed package brings plugins. Nothing is imported."""
    return bool(_installed(tuple(sys.path)))


def load_installed_plugins() -> None:
    """Imports the plugins of installed packages: their entry points in the group `ENTRY_POINTS`."""
    for entry in _installed(tuple(sys.path)):
        _load(entry.value, entry.load)


def _load(name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{_line(error)}"
        raise UserError(f"the plugin {name!r} failed while it was imported: {reason}") from error


def _line(error: Exception) -> str:
    """Returns the last line that ran in the plugin itself, not in a library that it called."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen importlib")
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _import_module(name: str) -> None:
    if imported_module(name) is not None:
        return
    folder, file = Path.cwd(), find_file(name)
    # Only for a module that is there: in a stranger's folder, a file may have the name of any library.
    if file is not None and file.is_relative_to(folder.resolve()) and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UserError(_missing(name))
    importlib.import_module(name)


def _import_file(name: str) -> None:
    path = Path(name).resolve()
    if not path.is_file():
        raise UserError(_missing(name))
    if imported_module(name) is not None:
        return
    # Files with one name in different folders have different module names.
    module_name = f"modelyard_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{name!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
