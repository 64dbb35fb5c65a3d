"""A user's own code: found, imported once, and named with its line when it fails."""

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelyard.config import load_config
from modelyard.config.plugins import load_plugins
from modelyard.errors import ConfigError, UserError
from modelyard.registry import HOOKS, MODELS, Registry

MODEL = '''
from pydantic import Field, model_validator

from modelyard.registry import Options, register_model


class MyOptions(Options):
    """Options."""

    my_depth: int = Field({default}description="layers")
    my_width: int = Field(1, description="units")

    @model_validator(mode="after")
    def _narrow(self):
        if self.my_width > 100:
            raise ValueError("my_width must stay below 100")
        return self


@register_model("my_model", options=MyOptions)
def my_model(options, context):
    """Mine."""
'''


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a plugin registers and imports is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    modules = set(sys.modules)
    registries: list[Registry] = [MODELS, HOOKS]
    before = [(registry, set(registry.names())) for registry in registries]
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("modelyard_plugin_", "my_")):
            del sys.modules[name]
    for registry, names in before:
        for name in set(registry.names()) - names:
            del registry._entries[name]


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return name


def only_problem(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**options)
    assert len(caught.value.problems) == 1, caught.value.problems
    return str(caught.value.problems[0])


@pytest.mark.parametrize(("file", "named"), [("mine.py", "mine.py"), ("my_module.py", "my_module")])
def test_a_model_of_a_file_or_a_module_is_known_with_its_options(file: str, named: str) -> None:
    write(file, MODEL.format(default="3, "))
    config = load_config(model="my_model", plugins=named, my_width=5)
    assert (config.component_options["my_depth"], config.component_options["my_width"]) == (3, 5)
    assert config.plugins == (named,)


def test_plugins_may_be_named_in_a_file_and_be_several() -> None:
    write("mine.py", MODEL.format(default="3, "))
    write("my_other.py", "")
    write("project.yaml", "default:\n  plugins: [mine.py, my_other]\n  model: my_model\n")
    assert load_config(config_file="project.yaml").model == "my_model"
    assert "my_other" in sys.modules


def test_a_plugin_is_imported_once() -> None:
    write("mine.py", "import pathlib\nwith open('count', 'a') as f:\n    f.write('x')\n")
    load_plugins(("mine.py", "./mine.py"))
    load_plugins(("mine.py",))
    assert Path("count").read_text() == "x"


def test_an_option_without_default_must_be_given() -> None:
    write("mine.py", MODEL.format(default=""))
    assert only_problem(model="my_model", plugins="mine.py") == ("Python: my_depth: is required: it has no default.")
    assert load_config(model="my_model", plugins="mine.py", my_depth=2).component_options["my_depth"] == 2


def test_a_check_across_options_is_reported_where_the_part_was_chosen() -> None:
    write("mine.py", MODEL.format(default="3, "))
    write("project.yaml", "default:\n  model: my_model\n  my_width: 1000\n")
    problem = only_problem(config_file="project.yaml", plugins="mine.py")
    assert problem == "project.yaml:2: my_width must stay below 100"


def test_options_named_like_those_of_modelyard_are_refused() -> None:
    write("mine.py", MODEL.format(default="3, ").replace("my_width", "train_steps"))
    assert "train_steps" in only_problem(model="my_model", plugins="mine.py")


def test_a_name_that_is_taken_is_refused() -> None:
    write("mine.py", MODEL.format(default="3, ").replace('"my_model"', '"resnet20"'))
    assert "a model named 'resnet20' exists already" in only_problem(plugins="mine.py")


@pytest.mark.parametrize("name", ["missing.py", "missing", "missing.part", "sys.missing"])
def test_a_missing_plugin_is_named(name: str) -> None:
    problem = only_problem(plugins=name)
    assert problem.startswith("Python: plugins: there is no plugin")
    assert repr(name) in problem


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("x = 1\n\ny = 1 / 0\n", 3, "ZeroDivisionError"),
        ("import json\njson.loads('no')\n", 2, "JSONDecodeError"),
        ("import colorsys\n\n\ndef f():\n    colorsys.rgb_to_hsv(1, 2, 'x')\n\n\nf()\n", 5, "TypeError"),
        ("x = 1\nimport my_missing_library\n", 2, "ModuleNotFoundError"),
        ("x = 1\nif x\n", 2, "SyntaxError"),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_a_failing_plugin_is_named_with_its_own_line(text: str, line: int, what: str, module: bool) -> None:
    path = Path(write("my_broken.py", text)).resolve()
    problem = only_problem(plugins="my_broken" if module else "my_broken.py")
    assert what in problem
    assert problem.endswith(f"({path}:{line})")


def test_a_plugin_that_failed_can_be_mended_and_imported() -> None:
    write("mine.py", "1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_plugins(("mine.py",))
    write("mine.py", MODEL.format(default="3, "))
    load_plugins(("mine.py",))
    assert "my_model" in MODELS.names()


def test_a_config_error_comes_before_a_users_code_is_imported() -> None:
    write("mine.py", "open('it-ran', 'w')")
    assert "random_seed" in only_problem(plugins="mine.py", random_seed="x")
    assert not Path("it-ran").exists()


def test_the_engine_is_chosen_before_a_users_code_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.config import resolve as resolving

    write("mine.py", "open('it-ran', 'w')")
    seen: list[tuple[str, bool]] = []
    module = sys.modules[resolving.__module__]
    monkeypatch.setattr(module, "select_engine", lambda engine: seen.append((engine, Path("it-ran").exists())))
    resolving({"plugins": "mine.py"})
    assert seen == [("auto", False)]
    assert Path("it-ran").exists()


@pytest.mark.parametrize("imported_first", [True, False])
@pytest.mark.parametrize("named", ["my_module.py", "my_module"])
def test_a_plugin_that_a_script_imports_and_a_config_names_is_one(imported_first: bool, named: str) -> None:
    write("my_module.py", "open('count', 'a').write('x')\n" + MODEL.format(default="3, "))
    sys.path.insert(0, str(Path.cwd()))
    if imported_first:
        importlib.import_module("my_module")
    assert load_config(model="my_model", plugins=named).component_options["my_depth"] == 3
    importlib.import_module("my_module")  # a second name for a file is no second model
    assert load_config(model="my_model", plugins=named).component_options["my_depth"] == 3
    if imported_first:
        assert Path("count").read_text() == "x"


def test_a_main_script_that_is_named_as_a_plugin_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write("mine.py", "open('count', 'a').write('x')\n"))
    script = types.ModuleType("__main__")
    script.__file__ = str(path.resolve())
    monkeypatch.setitem(sys.modules, "__main__", script)
    load_plugins(("mine.py", "./mine.py"))
    assert not Path("count").exists()


def test_an_installed_package_brings_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install` leaves it: a module, and its entry point in the group of plugins."""
    write("site/my_package.py", MODEL.format(default="3, "))
    write("site/my_package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    write("site/my_package-1.0.dist-info/entry_points.txt", "[modelyard.plugins]\nany_name = my_package\n")
    sys.path.insert(0, str(Path("site").resolve()))
    chosen: list[tuple[str, bool]] = []
    module = sys.modules[load_config.__module__]
    monkeypatch.setattr(module, "select_engine", lambda engine: chosen.append((engine, "my_package" in sys.modules)))
    config = load_config(model="my_model", engine="auto", my_width=5)
    assert config.component_options == {**config.component_options, "my_depth": 3, "my_width": 5}
    assert chosen == [("auto", False)], "Keras fixes its backend when the package imports it"
    assert config.plugins == ()
