"""The Dockerfile of an image: its steps are followed here as docker would, in an environment of their own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import modelyard
from conftest import environment
from modelyard.errors import ConfigError
from modelyard.launcher import dockerfile as module
from modelyard.launcher.dockerfile import dockerfile

WORDS = ["train", "--model_dir", "gs://bucket/runs/mine"]


def steps(text: str) -> list[tuple[str, list[str]]]:
    """The COPY and RUN steps with their words."""
    lines = [line.split(" ", 1) for line in text.splitlines() if line.startswith(("COPY", "RUN"))]
    return [(kind, json.loads(words)) for kind, words in lines]


def installed_from(monkeypatch: pytest.MonkeyPatch, origin: dict[str, object]) -> None:
    """As if Modelyard were no checkout, and pip had installed it from there."""
    monkeypatch.setattr(modelyard, "__file__", "/usr/lib/python3/dist-packages/modelyard/__init__.py")
    monkeypatch.setattr(module, "_origin", lambda: origin)


def test_it_copies_the_files_of_the_command() -> None:
    for name in ("mine.py", "project.yaml", "requirements.txt", "it's.py"):
        Path(name).write_text("")
    found = steps(dockerfile([*WORDS, "--plugins", "mine.py,it's.py", "--recipe", "digits"], gpus=True))
    assert ("COPY", ["mine.py", "/app/mine.py"]) in found
    assert ("COPY", ["it's.py", "/app/it's.py"]) in found
    assert ("COPY", ["project.yaml", "/app/project.yaml"]) in found
    assert ("RUN", ["pip", "install", "--no-cache-dir", "-r", "/tmp/requirements.txt"]) in found
    with pytest.raises(ConfigError, match="must be in this folder"):
        dockerfile([*WORDS, "--plugins", "../other.py"], gpus=False)


@pytest.mark.parametrize(
    ("more", "gpus", "extras"),
    [([], False, "cpu"), ([], True, "gpu"), (["--engine", "jax"], False, "jax"), (["--engine=jax"], True, "jax-gpu")],
)
def test_it_installs_the_engine_of_the_command(more: list[str], gpus: bool, extras: str) -> None:
    assert f"py3-none-any.whl[{extras},cloud]" in dockerfile([*WORDS, *more], gpus)


@pytest.mark.parametrize(
    ("origin", "before", "installed"),
    [
        ({}, "", f"modelyard[cpu,cloud]=={modelyard.__version__}"),  # of a package index: a release
        (
            {"url": "https://example.org/modelyard-9.whl", "archive_info": {}},
            "",
            "modelyard[cpu,cloud] @ https://example.org/modelyard-9.whl",
        ),
        (
            {"url": "https://example.org/it.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "",
            "modelyard[cpu,cloud] @ git+https://example.org/it.git@ab12",
        ),
        (
            {"url": "file:///home/me/my%20wheels/modelyard-9-py3-none-any.whl", "archive_info": {}},
            "# cp '/home/me/my wheels/modelyard-9-py3-none-any.whl' .",
            "/tmp/modelyard-9-py3-none-any.whl[cpu,cloud]",
        ),
    ],
)
def test_it_installs_what_is_installed_here(
    origin: dict[str, object], before: str, installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(monkeypatch, origin)
    text = dockerfile(WORDS, gpus=False)
    assert before in text.splitlines() or not before
    assert ("RUN", ["pip", "install", "--no-cache-dir", installed]) in steps(text)


@pytest.mark.slow
def test_its_steps_make_an_environment_that_runs_the_command(tmp_path: Path) -> None:
    """Without the packages that Modelyard needs, which are those of this environment."""
    Path("mine.py").write_text(
        "import modelyard\n@modelyard.register_hook('cheer')\nclass Cheer(modelyard.Hook): ...\n"
    )
    Path("requirements.txt").write_text("")
    text = dockerfile([*WORDS, "--plugins", "mine.py"], gpus=False)
    (wheel,) = (line[2:] for line in text.splitlines() if line.startswith("# pip wheel"))
    built = subprocess.run([sys.executable, "-m", *shlex.split(wheel)], capture_output=True, text=True, check=False)
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("the build needs hatchling, which can't be fetched here")
    assert built.returncode == 0, built.stderr

    root, venv = tmp_path / "root", tmp_path / "venv"
    for folder in ("tmp", "app"):
        (root / folder).mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    variables = environment(PIP_NO_DEPS="1", PATH=f"{venv}/bin{os.pathsep}{os.environ['PATH']}")
    variables.pop("PYTHONPATH", None)
    for kind, words in steps(text):
        placed = [f"{root}{word}" if word.startswith(("/tmp/", "/app")) else word for word in words]
        if kind == "COPY":
            shutil.copy(placed[0], placed[1])
        elif words[0] != "chown":
            subprocess.run(placed, env=variables, check=True, stdout=subprocess.DEVNULL)
    words = [str(venv / "bin" / "modelyard"), "config", "--plugins", "mine.py", "--hooks", "+cheer"]
    libraries = {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(
        words, cwd=root / "app", env=variables | libraries, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where = [str(venv / "bin" / "python"), "-c", "import modelyard; print(modelyard.__file__)"]
    assert str(venv) in subprocess.run(where, env=variables | libraries, capture_output=True, text=True).stdout
