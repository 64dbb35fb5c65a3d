"""A Dockerfile for the image that Kubernetes and Vertex AI run: modelyard, the user's requirements and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from modelyard import __version__
from modelyard.config.calls import parse_list
from modelyard.config.resolve import COMMAND_LINE
from modelyard.errors import ConfigError, Problem
from modelyard.launcher.job import option

_PICKED_UP = ("project.yaml", "hyperparameters.yaml")
_NAMING = ("config_file", "hyperparameter_file", "recipe")

_TEXT = """\
# Build it in this folder: docker build -t REGISTRY/NAME:TAG . && docker push REGISTRY/NAME:TAG
FROM python:3.12-slim
RUN pip install --no-cache-dir "modelyard[{extras}]=={version}"
{requirements}WORKDIR /app
{files}RUN chown -R 1000:1000 /app
USER 1000:1000
ENTRYPOINT ["modelyard"]
"""


def dockerfile(words: Sequence[str], gpus: bool) -> str:
    """The text of a Dockerfile for a command: plugins and files of options that it names go along.

    Args:
        words: the command that the image is to run.
        gpus: whether it needs CUDA.

    Raises:
        ConfigError: for files that are not in this folder, where ``docker build`` can't see them.
    """
    named = [option(words, name) for name in _NAMING]
    files = [name for name in _PICKED_UP if Path(name).is_file()]
    files += [name for name in named if name and name.endswith((".yaml", ".yml"))]
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
    copies = [f"COPY {json.dumps([name, f'/app/{name}'])}\n" for name in dict.fromkeys(files)]
    requirements = ""
    if Path("requirements.txt").is_file():
        requirements = (
            "COPY requirements.txt /tmp/requirements.txt\nRUN pip install --no-cache-dir -r /tmp/requirements.txt\n"
        )
    extras = "gpu,cloud" if gpus else "cpu,cloud"
    return _TEXT.format(extras=extras, version=__version__, requirements=requirements, files="".join(copies))
