"""What ``modelyard submit`` prints."""

from __future__ import annotations

import sys
from typing import Any

from modelyard.cli.commands import print_json
from modelyard.launcher.submit import dockerfile, submit, template_text
from modelyard.system.console import console


def run(target: str, words: list[str], settings: dict[str, Any], *, as_json: bool) -> None:
    """Submits, and says what was written and done. A dry run prints the script or manifest on standard output."""
    done = submit(target, words, **settings)
    say = console()
    if done.path is None:
        if not as_json:
            sys.stdout.write(done.text)
        say.print(f"nothing written or submitted. Without --dry_run: {done.command}", soft_wrap=True, markup=False)
    else:
        say.print(f"wrote {done.path}", soft_wrap=True, markup=False)
        if done.submitted:
            say.print(done.answer, soft_wrap=True, markup=False)
        else:
            tool = done.command.split()[0]
            say.print(f"{tool} is not here; submit it with: {done.command}", soft_wrap=True, markup=False)
    if as_json:
        print_json(
            {
                "name": done.name,
                "path": str(done.path) if done.path else None,
                "command": done.command,
                "submitted": done.submitted,
                "answer": done.answer,
                **({"text": done.text} if done.path is None else {}),
            }
        )


def print_template(target: str) -> None:
    """The template, to be changed and given back with --template."""
    sys.stdout.write(template_text(target))


def print_dockerfile(words: list[str], gpus: int | None) -> None:
    """A Dockerfile for a command."""
    sys.stdout.write(dockerfile(words, bool(gpus)))
