"""Looking at a run of somebody else does not run its code, and one's own runs need no flag."""

import inspect
import multiprocessing
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import modelyard
from modelyard.cli.app import COMMANDS, main
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.comparison.plan import MatrixRequest, make_cells
from modelyard.config import load_config, trust
from modelyard.config.plugins import load_plugins
from modelyard.config.trust import list_file, trust_plugins
from modelyard.errors import ConfigError, UntrustedPluginError
from modelyard.run.directory import config_text

CODE = "import pathlib\npathlib.Path(__file__).with_name('IT_RAN').touch()\n"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("modelyard_plugin_", "my_")):
            del sys.modules[name]


def plugin(path: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(CODE)
    return file.absolute()


def run_of_a_stranger(folder: str = "theirs", *plugins: str) -> Path:
    """A run folder whose config names a plugin in it."""
    run = Path(folder).absolute()
    file = plugin(f"{folder}/evil.py")
    config = load_config(model="mlp", train_steps=5).model_copy(update={"plugins": plugins or (str(file),)})
    (run / "config.yaml").write_text(config_text(config))
    (run / "manifest.json").write_text('{"evaluates": true}')
    return run


def status_of(*words: str) -> object:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as exited:
        main(list(words))
    return exited.value.code


def has_run(folder: str | Path = "theirs") -> bool:
    return (Path(folder) / "IT_RAN").exists()


def matrix_of_a_stranger(folder: str) -> None:
    run = run_of_a_stranger()
    cell = make_cells(MatrixRequest({"model": ["mlp"]}, options={"train_steps": 5}))[0]
    made = MatrixFolder(folder)
    made.create()
    made.write([cell])
    made.config(cell.name).write_text((run / "config.yaml").read_text())


RUN_COMMANDS = {
    "resume": ["resume", "theirs"],
    "evaluate": ["evaluate", "theirs"],
    "predict": ["predict", "theirs", "a.png"],
    "report": ["report", "theirs"],
    "export": ["export", "theirs"],
    "serve": ["serve", "--model_dir", "theirs"],
    "data": ["data", "check", "digits", "--run", "theirs"],
    "launch": ["launch", "--", "resume", "theirs"],
    **{
        name: [name, "--config_file", "theirs/config.yaml"]
        for name in ("config", "train", "train-and-evaluate", "find-learning-rate")
    },
    "matrix": ["matrix", "--output", "m", "--models", "mlp", "--config_file", "theirs/config.yaml"],
    "tune": ["tune", "--space", "hidden_units=[[8],[9]]", "--output", "t", "--config_file", "theirs/config.yaml"],
}
WITHOUT_A_RUN = (
    "convert",
    "stop",
    "submit",
    "models",
    "datasets",
    "hooks",
    "runs",
    "leaderboard",
    "dashboard",
    "doctor",
    "metrics",
)


def test_every_command_is_tried() -> None:
    assert {name.split()[0] for name in COMMANDS} == {*RUN_COMMANDS, *WITHOUT_A_RUN}


@pytest.mark.parametrize("words", RUN_COMMANDS.values(), ids=RUN_COMMANDS)
def test_no_command_runs_the_code_of_a_run_that_it_opens(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["modelyard"])
    run = run_of_a_stranger()
    assert (status_of(*words), has_run()) == (2, False)
    message = capsys.readouterr().err
    assert "theirs/config.yaml:9 names a plugin that you have not used before" in message
    assert str(run / "evil.py") in message
    assert f"repeat this with --trust:\n  modelyard {shlex.join(words)} --trust\n" in message


@pytest.mark.parametrize("words", [["runs"], ["runs", "theirs"], ["leaderboard", "theirs"], ["stop", "theirs"]])
def test_commands_that_only_list_runs_do_not_look_at_plugins(words: list[str]) -> None:
    run_of_a_stranger()
    status_of(*words)
    assert not has_run()


VERBS: dict[str, Callable[[], object]] = {
    "resume": lambda: modelyard.resume("theirs"),
    "evaluate": lambda: modelyard.evaluate("theirs"),
    "predict": lambda: modelyard.predict("theirs", "a.png"),
    "report": lambda: modelyard.report("theirs"),
    "export": lambda: modelyard.export("theirs"),
    "serve": lambda: modelyard.serve("theirs"),
    "load_config": lambda: modelyard.load_config(config_file="theirs/config.yaml"),
    "train": lambda: modelyard.train(config_file="theirs/config.yaml"),
    "train_and_evaluate": lambda: modelyard.train_and_evaluate({"config_file": "theirs/config.yaml"}),
    "find_learning_rate": lambda: modelyard.find_learning_rate(config_file="theirs/config.yaml"),
    "data_info": lambda: modelyard.data_info("digits", config_file="theirs/config.yaml"),
    "check_data": lambda: modelyard.check_data("digits", run="theirs"),
    "matrix": lambda: modelyard.matrix(models=["mlp"], output="m", config_file="theirs/config.yaml"),
    "tune": lambda: modelyard.tune("hidden_units=[[8], [9]]", output="t", config_file="theirs/config.yaml"),
    "load": lambda: modelyard.load("theirs"),
}
WITHOUT_PLUGINS = {
    "any_input", "convert", "fetch", "image_input", "launch", "leaderboard", "load_weights", "main", "runs",
    "show_data", "stop", "submit", "verify_data",
}  # fmt: skip


def test_every_function_is_tried() -> None:
    functions = {name for name in modelyard.__all__ if inspect.isfunction(getattr(modelyard, name))}
    assert {name for name in functions if not name.startswith("register_")} == {*VERBS, *WITHOUT_PLUGINS}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_no_function_runs_the_code_of_a_run_that_it_opens(verb: Callable[[], object]) -> None:
    run_of_a_stranger()
    with pytest.raises(UntrustedPluginError, match="trust=True"):
        verb()
    assert not has_run()


SEARCH = """search_version: 1
metric: auto
sampler: tpe
seed: 0
space: {{hidden_units: '[[8], [9]]'}}
options: {{model: mlp, dataset: digits, train_steps: 5, plugins: {plugin}}}
"""


@pytest.mark.parametrize(
    "words", [["--trials", "3"], ["--space", "hidden_units=[[8],[10]]"], ["--plugins", "theirs/mine.py"]]
)
def test_the_search_of_a_stranger_runs_none_of_their_code(words: list[str]) -> None:
    run_of_a_stranger()
    Path("theirs/mine.py").write_text("")
    folder = MatrixFolder("search")
    folder.create()
    folder.write([])
    Path("search/search.yaml").write_text(SEARCH.format(plugin=Path("theirs/evil.py").absolute()))
    assert (status_of("tune", "--output", "search", *words), has_run()) == (2, False)


@pytest.mark.parametrize("option", ["recipe", "config_file", "hyperparameter_file"])
@pytest.mark.parametrize("varies", [False, True])
def test_a_file_that_the_search_of_a_stranger_names_is_not_the_users(option: str, varies: bool) -> None:
    folder = MatrixFolder("search")
    folder.create()
    folder.write([])
    plugin("search/evil.py")
    for name in ("a", "b"):
        sets = "plugins: evil.py\n" if option == "recipe" else "default: {plugins: evil.py}\n"
        Path(f"search/{name}.yaml").write_text(sets)
    text = SEARCH.replace(", plugins: {plugin}", "" if varies else f", {option}: search/a.yaml").format()
    if varies:
        text = text.replace("hidden_units: '[[8], [9]]'", f"{option}: '[search/a.yaml, search/b.yaml]'")
    Path("search/search.yaml").write_text(text)
    assert status_of("tune", "--output", "search", "--trials", "3") == 2
    assert not Path("search/IT_RAN").exists()
    with pytest.raises(UntrustedPluginError, match="trust=True"):
        modelyard.tune(output="search", trials=3)


def test_a_search_with_a_recipe_of_the_user_is_resumed() -> None:
    plugin("my_plugin.py")
    Path("mine.yaml").write_text("plugins: my_plugin.py\nmodel: mlp\ndataset: digits\n")
    options: dict[str, Any] = {"output": "search", "seeds": 0, "program": ["false"]}
    for number in (1, 2):
        more = {"recipe": "mine.yaml"} if number == 1 else {}
        result = modelyard.tune(
            None if number > 1 else "dropout_rate=uniform(0, 0.5)", trials=number, **options, **more
        )
        assert len(result.trials) == number


def test_the_space_file_of_a_stranger_runs_none_of_their_code() -> None:
    run_of_a_stranger()
    evil = Path("theirs/evil.py").absolute()
    Path("theirs/space.yaml").write_text(f"space: {{hidden_units: [[8], [9]]}}\noptions: {{plugins: {evil}}}\n")
    words = ["tune", "--space", "theirs/space.yaml", "--output", "t", "--model", "mlp", "--dataset", "digits"]
    assert (status_of(*words), has_run()) == (2, False)


def run_of_a_stranger_with_a_saved_model() -> Path:
    """A run folder whose config names a program in it. It is no SavedModel, so nothing can load it unnoticed."""
    run = run_of_a_stranger()
    (run / "hub").mkdir()
    (run / "hub" / "saved_model.pb").write_bytes(b"a program")
    options = {"model": "saved_model", "saved_model_path": str(run / "hub"), "train_steps": 5}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CONFIG_HOME", str(Path("settings_of_the_stranger").absolute()))
        text = config_text(load_config(**options))
    trust._trusted_here.clear()  # as in another process
    (run / "config.yaml").write_text(text)
    return run


@pytest.mark.parametrize("words", RUN_COMMANDS.values(), ids=RUN_COMMANDS)
def test_the_saved_model_of_a_stranger_is_not_loaded(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["modelyard"])
    run = run_of_a_stranger_with_a_saved_model()
    words = [word for word in words if word not in ("--models", "mlp")]
    words += ["--models", "saved_model"] if words[0] == "matrix" else []
    assert status_of(*words) == 2
    message = capsys.readouterr().err
    assert "theirs/config.yaml:" in message
    assert f"names a SavedModel that you have not used before, or that has changed:\n  {run / 'hub'}\n" in message
    assert f"repeat this with --trust:\n  modelyard {shlex.join(words)} --trust\n" in message


@pytest.mark.parametrize("options", [{"trust": True}, {"saved_model_path": "theirs/hub"}])
def test_a_saved_model_that_changed_is_asked_for_again(options: dict[str, Any]) -> None:
    run = run_of_a_stranger_with_a_saved_model()
    file = str(run / "config.yaml")
    load_config(config_file=file, **options)
    trust._trusted_here.clear()
    assert load_config(config_file=file).component_options["saved_model_path"] == str(run / "hub")
    (run / "hub" / "saved_model.pb").write_bytes(b"another program")
    with pytest.raises(UntrustedPluginError, match="names a SavedModel"):
        load_config(config_file=file)


def test_a_saved_model_that_this_process_has_used_is_not_asked_for_without_a_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of_a_stranger_with_a_saved_model()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    file = str(run / "config.yaml")
    with pytest.raises(UntrustedPluginError):
        load_config(config_file=file)
    load_config(config_file=file, trust=True)
    load_config(config_file=file)


def test_the_saved_model_of_a_matrix_file_in_a_run_folder_is_not_the_users() -> None:
    run_of_a_stranger_with_a_saved_model()
    for text in ("axes: {model: [mlp]}\noptions: {saved_model_path: theirs/hub}\n",
                 "axes: {model: [saved_model], saved_model_path: [theirs/hub]}\n"):  # fmt: skip
        Path("theirs/m.yaml").write_text(text)
        with pytest.raises(UntrustedPluginError, match=r"theirs/m.yaml:\d names a SavedModel"):
            modelyard.matrix("theirs/m.yaml", output="m")


@pytest.mark.parametrize("again", [["--models", "mlp"], []])
def test_the_plan_of_a_matrix_may_be_a_strangers(again: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    matrix_of_a_stranger("m")
    Path("m/configs/mlp.yaml").write_text("default:\n  plugins: ../../theirs/evil.py\n  model: mlp\n")  # not as a run's
    assert (status_of("matrix", "--output", "m", *again), has_run()) == (2, False)
    assert "m/configs/mlp.yaml:2" in capsys.readouterr().err


def test_a_matrix_file_in_a_run_folder_is_not_the_users() -> None:
    run_of_a_stranger()
    Path("theirs/m.yaml").write_text("axes: {model: [mlp]}\noptions: {plugins: evil.py, train_steps: 5}\n")
    with pytest.raises(UntrustedPluginError, match=r"theirs/m.yaml:2 names a plugin"):
        modelyard.matrix("theirs/m.yaml", output="m")
    assert not has_run()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("theirs/config.yaml", "default:\n  plugins: evil.py\n"),  # sets, as the user's own files have them
        ("theirs/other.yaml", "default:\n  plugins: evil.py\n"),
        ("theirs/deeper/other.yaml", "default:\n  plugins: ../evil.py\n"),
        ("other.yaml", "config_version: 1\nplugins: theirs/evil.py\n"),
        ("other.yaml", '"config_version": 1\nplugins: theirs/evil.py\n'),
        ("theirs/other.yaml", "default:\n  recipe: r.yaml\n"),
        ("theirs/other.yaml", "default:\n  hyperparameter_file: h.yaml\n"),
    ],
)
def test_a_file_in_a_run_folder_is_not_the_users(file: str, text: str) -> None:
    run_of_a_stranger()
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(text)
    Path("r.yaml").write_text("plugins: theirs/evil.py\n")
    Path("h.yaml").write_text("default:\n  plugins: theirs/evil.py\n")
    with pytest.raises(UntrustedPluginError):
        load_config(config_file=file)
    assert not has_run()


def test_a_run_folder_as_working_folder_has_no_file_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of_a_stranger()
    Path("theirs/project.yaml").write_text("default:\n  plugins: evil.py\n")
    monkeypatch.chdir("theirs")
    assert (status_of("config"), has_run(".")) == (2, False)


def test_a_copy_of_a_runs_config_does_not_make_a_project_a_strangers() -> None:
    """The first lines of a run's config say that it may be used for new runs."""
    run = run_of_a_stranger()
    Path("mine").mkdir()
    plugin("mine/my_model.py")
    shutil.copy(run / "config.yaml", "mine/config.yaml")
    Path("mine/project.yaml").write_text("default:\n  plugins: my_model.py\n")
    load_config(config_file="mine/project.yaml")
    with pytest.raises(UntrustedPluginError):
        load_config(config_file="mine/config.yaml")


@pytest.mark.parametrize("name", ["my_setup", "my_package.part", "my_package"])
def test_a_module_in_the_working_folder_is_not_run_for_a_stranger(name: str) -> None:
    """Not even to find it: to look for ``my_package.part``, Python imports ``my_package``."""
    run = run_of_a_stranger("theirs", name)
    for file in ("my_setup.py", "my_package/__init__.py", "my_package/part.py"):
        plugin(file)
    with pytest.raises(UntrustedPluginError):
        modelyard.evaluate(run)
    assert [has_run("."), has_run("my_package")] == [False, False]


def test_python_imports_modules_of_the_folder_in_which_it_is_started() -> None:
    """docs/security.md says so. Nothing that Modelyard does comes before it."""
    Path("typer.py").write_text("print('IT RAN')")
    words = [sys.executable, "-m", "modelyard", "--version"]
    assert "IT RAN" in subprocess.run(words, capture_output=True, text=True, check=False).stdout


def test_a_module_that_is_imported_already_runs_nothing() -> None:
    """A stranger's folder may have a file with the name of any library: it does not become one."""
    run = run_of_a_stranger("theirs", "json")
    plugin("json.py")
    before = sys.path[:]
    load_config(config_file=str(run / "config.yaml"))
    assert sys.path == before
    assert not has_run(".")


def test_the_users_own_files_name_plugins_as_before() -> None:
    plugin("mine.py")
    Path("project.yaml").write_text("default:\n  plugins: mine.py\n  model: mlp\n")
    assert (status_of("config"), has_run(".")) == (0, True)


def test_paths_of_plugins_are_relative_to_the_file_that_names_them() -> None:
    for folder in ("conf", "."):
        plugin(f"{folder}/mine.py")
    Path("conf/project.yaml").write_text("default:\n  plugins: [mine.py]\n")
    Path("conf/recipe.yaml").write_text("plugins: [mine.py]\nmodel: mlp\n")
    assert load_config(config_file="conf/project.yaml").plugins == ("conf/mine.py",)
    assert load_config(recipe="conf/recipe.yaml").plugins == ("conf/mine.py",)
    assert (has_run("conf"), has_run(".")) == (True, False)


def forget_imports() -> None:
    """What has been imported is trusted: pretend that this is another process."""
    for name in [name for name in sys.modules if name.startswith(("modelyard_plugin_", "my_"))]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["elsewhere/mine.py", "my_module"])
def test_a_plugin_that_the_user_has_named_once_is_trusted(name: str) -> None:
    file = plugin(name if name.endswith(".py") else f"{name}.py")
    load_config(plugins=name, model="mlp")
    forget_imports()
    (file.parent / "IT_RAN").unlink()
    file.write_text(CODE + "edited = True\n")  # one's own plugin changes all the time
    run = run_of_a_stranger("mine", str(file) if name.endswith(".py") else name)
    load_config(config_file=str(run / "config.yaml"))
    assert has_run(file.parent)


def test_trust_imports_and_remembers_the_content() -> None:
    file = plugin("downloads/theirs.py")
    run = run_of_a_stranger("theirs", str(file))
    assert (status_of("config", "--config_file", "theirs/config.yaml", "--trust"), has_run("downloads")) == (0, True)
    forget_imports()
    load_config(config_file=str(run / "config.yaml"))
    forget_imports()
    file.write_text(CODE + "# something else\n")
    with pytest.raises(UntrustedPluginError):
        load_config(config_file=str(run / "config.yaml"))
    load_config(config_file=str(run / "config.yaml"), trust=True)


@pytest.mark.parametrize("how", [{"trust": True}, {"plugins": "theirs/evil.py"}])
def test_a_plugin_in_a_run_folder_is_not_remembered(how: dict[str, object]) -> None:
    run_of_a_stranger()
    load_config(config_file="theirs/config.yaml", **how)
    assert has_run()
    forget_imports()
    with pytest.raises(UntrustedPluginError):
        load_config(config_file="theirs/config.yaml")


@pytest.mark.parametrize(
    "file", ["project.yaml", "hyperparameters.yaml", "recipe.yaml", "theirs/config.yaml", "m.yaml"]
)
def test_no_file_can_say_that_it_is_trusted(file: str) -> None:
    run_of_a_stranger()
    plugin("theirs.py")
    if file == "theirs/config.yaml":
        Path(file).write_text(Path(file).read_text() + "trust: true\n")
    else:
        flat = "trust: true\nplugins: theirs.py\n"
        Path(file).write_text(flat if file == "recipe.yaml" else "default:\n  " + flat.replace("\np", "\n  p"))
    if file == "m.yaml":
        Path(file).write_text("axes: {model: [mlp]}\noptions: {trust: true, config_file: theirs/config.yaml}\n")
        with pytest.raises((ConfigError, UntrustedPluginError)):
            modelyard.matrix(file, output="m")
    else:
        key = {"hyperparameters.yaml": "hyperparameter_file", "recipe.yaml": "recipe"}.get(file, "config_file")
        with pytest.raises(ConfigError, match="trust: has no effect inside a file"):
            load_config(**{key: file})
    assert [has_run(), has_run(".")] == [False, False]


def test_the_cache_of_a_stranger_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """It may hold compiled programs, which are code."""
    theirs = Path("theirs/cache").absolute()
    for named in (str(theirs), "elsewhere", "~/elsewhere"):
        Path("theirs").mkdir(exist_ok=True)
        text = config_text(load_config(model="mlp")).replace("cache_dir: null", f"cache_dir: {named}")
        Path("theirs/config.yaml").write_text(re.sub("# checksum.*\n", "", text))
        caplog.clear()
        assert load_config(config_file="theirs/config.yaml").cache_dir is None
        assert "cache_dir: you have not used" in caplog.text
    assert load_config(config_file="theirs/config.yaml", trust=True).cache_dir == "~/elsewhere"
    assert load_config(config_file="theirs/config.yaml").cache_dir == "~/elsewhere"


def test_the_users_own_cache_is_remembered() -> None:
    mine = Path("cache").absolute()
    Path("run").mkdir()
    Path("run/config.yaml").write_text(config_text(load_config(model="mlp", cache_dir=str(mine))))
    assert load_config(config_file="run/config.yaml").cache_dir == str(mine)


def test_trust_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="trust: must be true or false, got 'yes'"):
        load_config(trust="yes")
    assert "trust" not in load_config(trust=True).flat()


def test_a_config_is_judged_before_its_plugins() -> None:
    run = run_of_a_stranger()
    text = (run / "config.yaml").read_text().replace("random_seed: 0", "random_seed: x")
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="random_seed"):
        load_config(config_file=str(run / "config.yaml"), trust=True)
    assert not has_run()


def test_a_plugin_that_is_gone_is_reported_as_such() -> None:
    run = run_of_a_stranger("theirs", "/nowhere/mine.py")
    with pytest.raises(ConfigError, match="there is no plugin file"):
        load_config(config_file=str(run / "config.yaml"))


# -- processes of one command --------------------------------------------------------------------------------------


def test_launch_passes_trust_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("modelyard.launcher.local.launch", lambda words, **_: started.append(words))
    run_of_a_stranger()
    assert status_of("launch", "--", "resume", "theirs", "--trust") == 0
    assert status_of("launch", "--", "train", "--plugins", "theirs/evil.py", "--model_dir", "new") == 0
    assert [words.count("--trust") for words in started] == [1, 1]


def test_submit_passes_trust_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine that runs the job does not know what the user has used on this one."""
    mine = plugin("mine.py")
    run_of_a_stranger("run", str(mine))
    submit = ["submit", "slurm", "--dry_run", "--", "resume", "run"]
    assert status_of(*submit) == 2
    load_config(plugins=str(mine), model="mlp")
    capsys.readouterr()
    assert status_of(*submit) == 0
    assert "resume run --trust" in capsys.readouterr().out
    assert status_of(*submit, "--plugins", "mine.py") == 0
    assert "--trust" not in capsys.readouterr().out


def test_a_matrix_passes_trust_on() -> None:
    """The processes of the cells get the configs of a plan, which need not be the user's."""
    mine = plugin("mine.py")
    Path("program.py").write_text("import sys\nopen('words', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n")
    program = [sys.executable, "program.py"]
    modelyard.matrix(models=["mlp"], seeds=2, output="m", train_steps=5, plugins=str(mine), program=program)
    modelyard.matrix(models=["mlp"], seeds=2, output="n", train_steps=5, program=program)
    words = Path("words").read_text().splitlines()
    assert ["--trust" in line.split() for line in words] == [True, True, False, False]


# -- the list ------------------------------------------------------------------------------------------------------


def test_the_list_is_the_users_alone() -> None:
    load_plugin("mine.py")
    file = list_file()
    assert file is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text() == f"- {Path('mine.py').absolute()}\n"


def load_plugin(name: str) -> None:
    plugin(name)
    trust_plugins([name], "command line", named_by_user=True, trust=False)
    load_plugins((name,))


@pytest.mark.parametrize("home", ["missing", "a file", "a folder", "garbage"])
def test_a_home_that_cannot_be_used_is_no_error(home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    place = tmp_path / "home"
    monkeypatch.setenv("HOME", str(place))
    if home == "a file":
        place.write_text("")
    elif home == "a folder":  # that can't be opened as a file; root may write to read-only ones
        (place / ".config/modelyard/trusted").mkdir(parents=True)
    elif home == "garbage":
        (place / ".config/modelyard").mkdir(parents=True)
        (place / ".config/modelyard/trusted").write_bytes(os.urandom(1000))
    load_plugin("mine.py")
    assert has_run(".")
    run_of_a_stranger()
    with pytest.raises(UntrustedPluginError):
        modelyard.evaluate("theirs")


def test_many_processes_add_to_the_list_at_once() -> None:
    names = [plugin(f"mine_{number}.py") for number in range(40)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_remember_each, args=(names[n::8],)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    file = list_file()
    assert file is not None
    assert sorted(file.read_text().splitlines()) == sorted(f"- {name}" for name in names)


def _remember_each(names: list[Path]) -> None:
    for name in names:
        trust_plugins([str(name)], "command line", named_by_user=True, trust=False)
