"""Promises about the package as a whole."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import modelyard
from modelyard.config.schema import CORE_FIELDS
from modelyard.registry import DATASETS, HOOKS, MODELS, OPTIMIZERS, SCHEDULES

SOURCE = Path(modelyard.__file__).parent
# A module imports only from what stands above it in this list.
ORDER = [
    "errors",
    "faults",
    "registry",
    "storage",
    "system",
    "cluster",
    "config",
    "compat",
    "charts",
    "run",
    "data",
    "models",
    "engine",
    "loop",
    "distributed",
    "launcher",
    "comparison",
    "tuning",
    "reporting",
    "serving",
    "dashboard",
    "api",
    "cli",
]


def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}


def test_modules_import_only_from_above() -> None:
    wrong = []
    for path, tree in sources().items():
        home = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if home.startswith("__"):
            continue
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "modelyard" and len(parts) > 1 and ORDER.index(parts[1]) > ORDER.index(home):
                    wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert wrong == []


def _names_of(tree: ast.Module) -> set[str]:
    """The names that a module defines, also under `if TYPE_CHECKING` and `try`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def test_every_name_that_a_function_or_a_test_imports_exists() -> None:
    """An import inside a function fails only when it is called, perhaps on the other engine."""
    ours = {
        ".".join(("modelyard", *path.relative_to(SOURCE).with_suffix("").parts)): tree
        for path, tree in sources().items()
    }
    modules = {name.removesuffix(".__init__"): _names_of(tree) for name, tree in ours.items()}
    packages = {name.rpartition(".")[0] for name in modules}
    tests = Path(__file__).parent
    wrong = []
    for path in [*SOURCE.rglob("*.py"), *tests.rglob("*.py"), *(tests.parent / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "modelyard":
                known = modules.get(str(node.module), set())
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    if not {alias.name, "__getattr__"} & known and name not in modules and name not in packages:
                        wrong.append(f"{path.name}:{node.lineno} imports {name}")
    assert wrong == []


def test_every_option_is_read_somewhere() -> None:
    """An attribute of that name is read in the package, outside the schema that declares it."""
    # These are looked up by name, before there is a config.
    read = {"config_file", "config_set", "hyperparameter_file", "hyperparameter_set", "recipe"}
    read |= {"learning_rate_schedule", "label_smoothing", "class_weights", "focal_gamma"}
    read |= {"regression_loss", "huber_delta"}  # by `options_of` and by `getattr`
    for path, tree in sources().items():
        if path.name in ("schema.py", "catalog.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    options = set(CORE_FIELDS)
    for registry in (MODELS, DATASETS, OPTIMIZERS, SCHEDULES, HOOKS):
        for entry in registry.entries():
            if isinstance(entry.target, str):
                options |= set(entry.options.model_fields)
    assert sorted(options - read) == []


def test_every_option_has_a_help_text() -> None:
    assert [name for name, info in CORE_FIELDS.items() if not info.description] == []
    for registry in (MODELS, DATASETS, OPTIMIZERS, SCHEDULES, HOOKS):
        for entry in (entry for entry in registry.entries() if isinstance(entry.target, str)):
            assert entry.summary, entry.name
            for name, info in entry.options.model_fields.items():
                assert info.description, (entry.name, name)


def test_the_public_surface_is_what_is_written_down() -> None:
    assert sorted(modelyard.__all__) == modelyard.__all__
    for name in modelyard.__all__:
        assert getattr(modelyard, name) is not None
    assert set(dir(modelyard)) == {*modelyard.__all__, "__version__"}


def test_no_file_is_named_for_nothing() -> None:
    vague = [path for path in SOURCE.rglob("*.py") if re.fullmatch(r"(utils?|helpers?|common|misc)\.py", path.name)]
    assert vague == []


def test_every_recipe_resolves_and_says_how_to_run_it() -> None:
    from modelyard.config import load_config
    from modelyard.config.resolve import recipe_names, recipe_path

    for name in recipe_names():
        config = load_config(recipe=name)
        assert config.recipe == name
        header = recipe_path(name).read_text()
        assert f"# command:  modelyard train-and-evaluate --recipe {name}" in header
