"""A user's own code: modules or .py files named by ``plugins``, and installed packages that announce themselves."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from modelyard.errors import UserError

ENTRY_POINT_GROUP = "modelyard.plugins"


def load_plugins(names: tuple[str, ...]) -> None:
    """Imports each plugin once; what it registers is then known by name.

    Raises:
        UserError: if a plugin is not there or fails, with the line of the plugin that failed.
    """
    for name in names:
        _guarded(name, _import_file if name.endswith(".py") else _import_module)


def load_installed_plugins() -> list[str]:
    """Imports what installed packages announce in the entry-point group ``modelyard.plugins``."""
    loaded = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        _guarded(entry.value, lambda _, load=entry.load: load())  # type: ignore[misc]
        loaded.append(entry.value)
    return loaded


def _guarded(name: str, load: Callable[[str], object]) -> None:
    try:
        load(name)
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"the plugin {name!r} failed while it was imported: {what}{_line(error)}") from error


def _line(error: Exception) -> str:
    """The last line of the plugin itself that ran, not that of a library it called."""
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
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UserError(f"there is no plugin module {name!r}. For a file, write its path with .py at the end.")
    importlib.import_module(name)


def plugin_module(name: str) -> str:
    """The name under which a plugin is imported; files of one name in different folders do not collide."""
    if not name.endswith(".py"):
        return name
    path = Path(name).resolve()
    return f"modelyard_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _import_file(name: str) -> None:
    path = Path(name).resolve()
    if not path.is_file():
        raise UserError(f"there is no plugin file {name!r}.")
    module_name = plugin_module(name)
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return
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
