"""Decides which plugins may be imported, and which SavedModel and cache used: a stranger's config may name any of them.

Importing a plugin runs its code, a SavedModel is a program, a cache holds compiled programs, and the state of a
sampler may be a pickle. All are trusted if the user names them (``--plugins``, Python, their own project.yaml), if
they have used them before, or if they say so (``--trust``); plugins also if this process has imported them already.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from modelyard import storage
from modelyard.config.yaml_file import is_run_config
from modelyard.errors import UntrustedModelError, UntrustedPluginError

_RUN_CONFIG = "config.yaml"
_OF_A_RUN = ("manifest.json", "checkpoints")
_ANY_CONTENT = "-"
_trusted_here: set[tuple[Path, str]] = set()
"""SavedModels that this process may load, and their digests."""


def trust_plugins(names: Sequence[str], where: str, *, named_by_user: bool, trust: bool) -> None:
    """Returns if all plugins may be imported, and remembers those that the user trusts. Imports nothing.

    Args:
        names: modules or .py files.
        where: the file and line that names them.
        named_by_user: the user has named them: on the command line, in Python or in a file of their own.
        trust: the user trusts them, whatever names them.

    Raises:
        UntrustedPluginError: with all that may not be imported.
    """
    found = {name: find_file(name) for name in names}
    if named_by_user:
        _remember({path: _ANY_CONTENT for path in found.values() if path is not None})
        return
    known = _remembered()
    strange = {name: path for name, path in found.items() if _may_run(name, path) and not _is_known(path, known)}
    if strange and not trust:
        raise UntrustedPluginError(where, [_described(name, path) for name, path in strange.items()])
    # The user has looked at what is there now, not at what somebody may put there later.
    _remember({path: _digest(path) for path in strange.values() if path is not None})


def trust_cache(folder: str, *, named_by_user: bool, trust: bool) -> bool:
    """Returns whether a cache may be used, and remembers it if the user has named it.

    A stranger's may hold programs that they have compiled, or files of the user that are taken for old ones.
    """
    path = Path(folder).expanduser().resolve()
    if named_by_user or trust:
        _remember({path: _ANY_CONTENT})
        return True
    return path == storage.cache_folder().resolve() or _ANY_CONTENT in _remembered().get(str(path), ())


def trust_saved_model(folder: str, where: str, *, named_by_user: bool, trust: bool) -> None:
    """Returns if a SavedModel may be loaded, and remembers its content if the user trusts it, also in a run folder.

    Raises:
        UntrustedModelError: if it may not.
    """
    for named in {Path(folder), Path(folder).expanduser()}:  # a run makes it absolute; what only reads the run does not
        path = (named / "saved_model.pb").resolve()
        if not path.is_file():
            continue  # an error later
        digest = _digest(path)
        if named_by_user or trust:
            _trusted_here.add((path, digest))
            _remember({path: digest}, also_in_runs=True)
        elif (path, digest) not in _trusted_here and digest not in _remembered().get(str(path), ()):
            raise UntrustedModelError(where, [str(path.parent)])


def remember_state(path: Path) -> None:
    """Remembers a file in which the user's own search keeps the state of its sampler."""
    _remember({path.resolve(): _ANY_CONTENT})


def may_read_state(path: Path, *, trust: bool) -> bool:
    """Returns whether the state of a sampler may be read, which is a pickle: Python runs what is in it."""
    return trust or _ANY_CONTENT in _remembered().get(str(path.resolve()), ())


def _may_run(name: str, path: Path | None) -> bool:
    """Whether importing a plugin would run code. To look for a module may, too: it imports the packages around it."""
    return imported_module(name) is None and (path is not None or not name.endswith(".py"))


def is_own_file(path: Path | str) -> bool:
    """Whether a config file that the user names is their own: not the config of a run, not in a run folder, no URL."""
    if isinstance(path, str):
        return False
    return path.name != _RUN_CONFIG and not is_run_config(path) and not _is_in_run(path)


def find_file(name: str) -> Path | None:
    """Returns the file of a plugin, without importing anything; None if there is none."""
    if name.endswith(".py"):
        path = Path(name)
        return path.resolve() if path.is_file() else None
    spec = _find_module(name)
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None


def exists(name: str) -> bool:
    """Whether there is a plugin of this name. Imports nothing."""
    return Path(name).is_file() if name.endswith(".py") else _find_module(name) is not None


def imported_module(name: str) -> ModuleType | None:
    """Returns the module of a plugin that this process has imported, under whatever name, perhaps as its main script.

    Its file identifies it, so that a plugin that a script imports and a config names is one.
    """
    if not name.endswith(".py") and name in sys.modules:
        return sys.modules[name]
    path = Path(name).resolve() if name.endswith(".py") else find_file(name)
    if path is None:
        return None
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path:
            return module
    return None


def _find_module(name: str) -> ModuleSpec | None:
    """Finds a module, also in the working folder."""
    before = sys.path[:]
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        return _find_spec(name)
    finally:
        sys.path[:] = before


def _find_spec(name: str) -> ModuleSpec | None:
    """Finds a module, without importing the packages that it is in, as ``importlib.util.find_spec`` would."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
        for number in range(len(rest)):
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = PathFinder.find_spec(".".join((first, *rest[: number + 1])), list(spec.submodule_search_locations))
    except (ImportError, ValueError, KeyError, AttributeError):  # a namespace asks for its parent; a strange __spec__
        return None
    return spec


def _described(name: str, path: Path | None) -> str:
    where = "there is no such file" if path is None else str(path)
    return name if str(path) == name else f"{name} ({where})"


def _is_in_run(path: Path) -> bool:
    return any(map(_is_run, path.resolve().parents))


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run's. A project may have a copy of a run's config, for new runs."""
    return is_run_config(folder / _RUN_CONFIG) and any((folder / name).exists() for name in _OF_A_RUN)


# -- what the user has used before --------------------------------------------------------------------------------


def list_file() -> Path | None:
    """Returns the file that lists what is trusted; None if the user has no folder for it."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():  # also if it is not set
        try:
            folder = Path.home() / ".config"
        except (RuntimeError, KeyError):
            return None
    return folder / "modelyard" / "trusted"


def _remembered() -> dict[str, set[str]]:
    """Returns the trusted files, each with the SHA-256 of its trusted contents; ``-`` stands for any."""
    file, found = list_file(), dict[str, set[str]]()
    if file is not None:
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
                digest, _, path = line.partition(" ")
                found.setdefault(path, set()).add(digest)
    return found


def _is_known(path: Path | None, known: dict[str, set[str]]) -> bool:
    if path is None:
        return False
    digests = known.get(str(path), set())
    return _ANY_CONTENT in digests or (bool(digests) and _digest(path) in digests)


def _remember(files: dict[Path, str], *, also_in_runs: bool = False) -> None:
    """Adds files to the list. Plugins in a run folder are not added: what is there may be replaced with the run."""
    list_path, known = list_file(), _remembered()
    lines = [
        f"{digest} {path}\n"
        for path, digest in files.items()
        if digest not in known.get(str(path), ())
        and len(str(path).splitlines()) == 1
        and (also_in_runs or not _is_in_run(path))
    ]
    if not lines or list_path is None:
        return
    with contextlib.suppress(OSError):  # a home that is missing or read-only: they are asked again
        list_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(list_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, "".join(lines).encode("utf-8", "surrogateescape"))  # one write: others append, too
        finally:
            os.close(handle)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
