"""The Dockerfile of an image that runs a command: Modelyard as it is installed here, and the files of the command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import modelyard
from modelyard.config.calls import parse_list
from modelyard.errors import COMMAND_LINE, ConfigError, Problem
from modelyard.launcher.job import named_files, option
from modelyard.launcher.template import fill_text, shipped_template
from modelyard.storage import is_remote

_CONFIG_FILES = ("project.yaml", "hyperparameters.yaml")


def dockerfile(words: Sequence[str], gpus: bool) -> str:
    """Returns a Dockerfile for a command, with the plugins and config files that it uses.

    Args:
        words: the command that the image runs.
        gpus: whether it needs CUDA.

    Raises:
        ConfigError: for files outside this folder, where ``docker build`` can't see them.
    """
    files = [name for name in _CONFIG_FILES if Path(name).is_file()]
    files += [name for name in named_files(words) if not is_remote(name)]
    files += [str(name) for name in parse_list(option(words, "plugins") or "") if str(name).endswith(".py")]
    problems = []
    for name in files:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            problems.append(Problem(COMMAND_LINE, name, "must be in this folder, or docker build can't see it."))
        elif not path.is_file():
            problems.append(Problem(COMMAND_LINE, name, "there is no such file."))
    if problems:
        raise ConfigError(problems)
    copies = [_copy(name, f"/app/{name}") for name in dict.fromkeys(files)]
    if Path("requirements.txt").is_file():
        requirements = "/tmp/requirements.txt"
        copies = [_copy("requirements.txt", requirements), _run("pip", "install", "-r", requirements), *copies]
    engine = ("jax-gpu" if gpus else "jax") if option(words, "engine") == "jax" else "gpu" if gpus else "cpu"
    before, install = _installation(f"{engine},cloud")
    values = {"BEFORE": "".join(f"# {line}\n" for line in before), "INSTALL": install, "FILES": "".join(copies)}
    return fill_text(shipped_template("Dockerfile"), values, values, "Dockerfile")


def _installation(extras: str) -> tuple[list[str], str]:
    """Returns the commands to run before the build, and the lines that install Modelyard as it is here.

    Only a release is installed by its version: a checkout, or what pip has installed from elsewhere, may be no release.
    """
    source = Path(modelyard.__file__).resolve().parents[2]
    if (source / "pyproject.toml").is_file():
        wheel = f"modelyard-{modelyard.__version__}-py3-none-any.whl"
        return [f"pip wheel --no-deps --wheel-dir . {shlex.quote(str(source))}"], _from_file(wheel, extras)
    origin = _origin()
    url, version_control = str(origin.get("url", "")), origin.get("vcs_info")
    if isinstance(version_control, dict):
        at = f"{version_control.get('vcs')}+{url}@{version_control.get('commit_id')}"
        return [], _run("apt-get", "update") + _run("apt-get", "install", "-y", "git") + _install(extras, f" @ {at}")
    if url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
        return [f"cp {shlex.quote(str(path))} ."], _from_file(path.name, extras)
    return [], _install(extras, f" @ {url}" if url else f"=={modelyard.__version__}")


def _origin() -> dict[str, Any]:
    """Returns from where pip has installed Modelyard (PEP 610); empty for a package index."""
    try:
        found = json.loads(metadata.distribution("modelyard").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _from_file(name: str, extras: str) -> str:
    path = str(PurePosixPath("/tmp") / name)
    return _copy(name, path) + _run("pip", "install", f"{path}[{extras}]")


def _install(extras: str, where: str) -> str:
    return _run("pip", "install", f"modelyard[{extras}]{where}")


def _copy(source: str, target: str) -> str:
    return f"COPY {json.dumps([source, target])}\n"


def _run(*words: str) -> str:
    if words[:2] == ("pip", "install"):
        words = ("pip", "install", "--no-cache-dir", *words[2:])
    return f"RUN {json.dumps(words)}\n"
