"""The commands and programs in the README and the docs run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import environment
from waiting import PATIENCE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- test(?:: (\w+) ([\w.]+))? -->\n```(\w+)\n(.*?)```", re.DOTALL)


def _parameter(page: Path) -> Any:
    """The README is tried every time; what the other pages show has tests of its own, too."""
    return pytest.param(page, id=page.name, marks=[] if page.name == "README.md" else [pytest.mark.slow])


@pytest.mark.parametrize("page", [_parameter(page) for page in PAGES if BLOCK.search(page.read_text())])
def test_what_a_page_says_runs(page: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for verb, file, language, code in BLOCK.findall(page.read_text()):
        if verb == "needs" and not Path(file).exists():
            _make_photos(Path(file))
        if verb == "writes":
            Path(file).write_text(code)
            continue
        words = [sys.executable, "-c", code] if language == "python" else ["bash", "-euc", code]
        done = subprocess.run(
            words, env=environment(PATH=path), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, f"{page.name}: {code}\n{done.stdout}\n{done.stderr}"


def _make_photos(folder: Path) -> None:
    """A folder per class of small images of different sizes."""
    random = np.random.default_rng(0)
    for number in range(48):
        place = folder / ("cat", "dog", "horse")[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (40 + number % 5, 50, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg")


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_links_to_sections_lead_somewhere() -> None:
    """Anchors are made of headings as on GitHub: lower case, dashes for spaces, no punctuation."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target, section in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text()):
            text = (page.parent / target if target else page).read_text()
            headings = [re.sub(r"[^\w -]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
            assert section in [heading.replace(" ", "-") for heading in headings], f"{page.name}: {target}#{section}"


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


SOURCE = ROOT / "src" / "modelyard"
FILE_NAME = re.compile(r"(?<![\w/.:-])((?:[a-z_]+/)*[a-z_0-9]+\.py|(?:[a-z_]+/)+)(?![\w/])")


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/decisions.md", "CONTRIBUTING.md"])
def test_every_module_that_a_page_names_exists(page: str) -> None:
    """Paths are those of the package, or of the repository (`tests/…`, `benchmarks/…`)."""
    named = set(FILE_NAME.findall((ROOT / page).read_text()))
    packages = [path for path in SOURCE.rglob("*") if path.is_dir()]

    def exists(name: str) -> bool:
        # The map indents folders below the package that holds them; a bare `catalog.py` is in several packages.
        folders = packages if name.count("/") == name.endswith("/") else []
        return any((folder / name).exists() for folder in (ROOT, SOURCE, *folders))

    assert [name for name in sorted(named) if not exists(name)] == []


def test_the_map_of_architecture_is_complete() -> None:
    """Every package and every top-level module is in it, in the order of imports that `test_package.py` enforces."""
    from test_package import ORDER

    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(r"## Packages.*?```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    lines = [line.split()[0] for line in found[1].splitlines() if not line.startswith("  ")]
    assert [name.removesuffix("/").removesuffix(".py") for name in lines] == ORDER
    inner = [line.split()[0].rstrip("/") for line in found[1].splitlines() if line.startswith("  ")]
    folders = [path for path in SOURCE.glob("*/*") if (path / "__init__.py").exists()]
    assert sorted(inner) == sorted(path.name for path in folders)


# Options of other programs, of XLA, of a benchmark, and of the model that docs/models.md writes.
OTHER_OPTIONS = {"--help", "--logdir", "--no", "--quick", "--wheel", "--xla_gpu_autotune_level", "--wide_units"}


def test_every_option_that_a_page_names_exists() -> None:
    import typer

    from modelyard.cli.app import build_app
    from modelyard.config.schema import CORE_FIELDS
    from modelyard.registry import DATASETS, HOOKS, MODELS, OPTIMIZERS, SCHEDULES

    names = set(CORE_FIELDS)
    for registry in (MODELS, DATASETS, OPTIMIZERS, SCHEDULES, HOOKS):
        for entry in registry.entries():
            names |= set(entry.options.model_fields) if isinstance(entry.target, str) else set()
    known = {f"--{prefix}{name}" for name in names for prefix in ("", "no_")} | OTHER_OPTIONS
    commands = [typer.main.get_command(build_app())]
    while commands:
        command: Any = commands.pop()
        known |= {option for parameter in command.params for option in parameter.opts}
        commands += getattr(command, "commands", {}).values()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        named = set(re.findall(r"(?<![\w-])--[a-z]\w*", page.read_text()))
        assert sorted(named - known) == [], page.name


def test_every_test_that_the_security_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    found = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 40
    assert sorted(named - found) == []
