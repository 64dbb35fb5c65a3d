"""The commands and programs in the README and the docs run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import environment

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- test(?:: (\w+) ([\w.]+))? -->\n```(\w+)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_what_a_page_says_runs(page: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for verb, file, language, code in BLOCK.findall(page.read_text()):
        if verb == "needs":
            labels = np.arange(80) % 4
            np.savez(file, x_train=np.random.default_rng(0).integers(0, 255, (80, 12, 12, 3), np.uint8), y_train=labels)
        if verb == "writes":
            Path(file).write_text(code)
            continue
        words = [sys.executable, "-c", code] if language == "python" else ["bash", "-euc", code]
        done = subprocess.run(
            words, env=environment(PATH=path), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{page.name}: {code}\n{done.stdout}\n{done.stderr}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_begins_with_the_two_commands() -> None:
    first = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make train", "make test"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make lint" in ci
    assert "make test" in ci


def test_every_hook_and_dataset_is_in_the_docs() -> None:
    from modelyard.registry import DATASETS, HOOKS

    hooks, data = ((ROOT / "docs" / name).read_text() for name in ("hooks.md", "data.md"))
    built_in = [entry.name for entry in HOOKS.entries() if isinstance(entry.target, str)]
    assert [name for name in built_in if f"`{name}" not in hooks] == []
    assert [
        entry.name for entry in DATASETS.entries() if isinstance(entry.target, str) and entry.name not in data
    ] == []
