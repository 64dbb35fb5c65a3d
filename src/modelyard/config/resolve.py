"""Merges defaults, files and the command line into one config that knows the source of each value.

Defaults < recipe < a set of project.yaml < a set of hyperparameters.yaml < command line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from modelyard import storage
from modelyard.config.backend import select_engine
from modelyard.config.calls import Call, validation_message
from modelyard.config.named_files import SAVED_MODEL_PATH, missing_files
from modelyard.config.plugins import has_installed_plugins, load_installed_plugins, load_plugins, missing_plugins
from modelyard.config.schema import (
    COMPONENTS,
    CORE_FIELDS,
    EXCLUSIVE,
    GIVEN_DATASET,
    TRUST,
    Config,
    GivenDataset,
    registered_name,
)
from modelyard.config.trust import is_own_file, trust_cache, trust_plugins, trust_saved_model
from modelyard.config.weight_groups import read_group, read_phases
from modelyard.config.yaml_file import (
    CONFIG_VERSION,
    NO_DEFAULT,
    RUN_CONFIG_KEY,
    Value,
    config_path,
    is_run_config,
    read_flat,
    read_set,
)
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, nearest, unknown
from modelyard.registry import AUGMENTATIONS, ENGINES, HOOKS, METRICS, PREPROCESSINGS

_WITH_EXPONENT = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{1,2}(?![\w.])")
DEFAULT_RECIPE = "digits"
_NOTHING_NAMED = "default, since no model or dataset is given"
_RECIPE_NOTE = (
    f"this is the run of --recipe {DEFAULT_RECIPE}. With --model or --dataset, none of its options apply, unless you "
    f"add --recipe {DEFAULT_RECIPE}."
)
SAVED_MODEL = "saved_model"
"""The model whose option `SAVED_MODEL_PATH` names a program."""
log = logging.getLogger("modelyard")


def load_config(**options: Any) -> Config:
    """Returns the config for ``options``. Options that are not given have their defaults.

    Files are read only if ``config_file``, ``hyperparameter_file`` or ``recipe`` names them: unlike a command, Python
    does not pick up ./project.yaml and ./hyperparameters.yaml. Data and weights need not exist here.

    Example:
        >>> load_config(model="mlp", hidden_units=[64], train_steps=100).train_steps
        100
    """
    return resolve(options, source="Python", pick_up_files=False, check_files=False)


def resolve(
    given: Mapping[str, Any],
    *,
    source: str = COMMAND_LINE,
    pick_up_files: bool = True,
    shared: bool = False,
    own_files: bool = True,
    check_files: bool = True,
) -> Config:
    """Builds the config.

    Args:
        given: the options of the highest level, usually those of the command line. ``trust`` is not an option of the
            config: it says that the plugins may be imported, whichever file names them.
        source: the name of that level.
        pick_up_files: read ./project.yaml and ./hyperparameters.yaml if they exist.
        shared: the options serve several runs, so that one may be of a component that only others have.
        own_files: the config file may be the user's own; that of a run is not.
        check_files: the data and weights that the options name must exist here.

    Raises:
        ConfigError: with all errors.
        UntrustedPluginError: if a file that is not the user's own names plugins or a SavedModel.
    """
    problems: list[Problem] = []
    given, given_dataset = _without_objects(given)
    top = {option_name(key): Value(value, source) for key, value in given.items() if value is not None}
    trust = _pop_trust(top, problems)
    levels = _levels(top, pick_up_files, problems)
    merged = _merge([level.values for level in levels], problems)
    config = _locate_plugins(_check_core(merged, problems), levels)
    plugins_at = merged["plugins"].where if "plugins" in merged else source
    problems += [Problem(plugins_at, "plugins", message) for message in missing_plugins(config.plugins)]
    imported = not (
        problems and (config.plugins or has_installed_plugins())
    )  # a user's code is not imported for a config that is wrong
    if imported:
        config = _check_trust(config, levels, merged, own_files=own_files, trust=trust)
        try:
            _import_plugins(config)
        except UserError as error:
            problems.append(Problem(plugins_at, "plugins", str(error)))
            imported = False
    of_components: list[Problem] = []
    _check_calls(config, merged, of_components)
    component_options, notes = _check_components(merged, None if shared else source, of_components)
    problems += of_components if imported else map(_unless_a_plugin_has_it, of_components)
    config = config.model_copy(update={"component_options": component_options})
    if check_files:
        problems += missing_files(config, merged)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    config._origins = {key: value.where for key, value in merged.items()}
    if "recipe" in merged and merged["recipe"].where == _NOTHING_NAMED:
        notes = [f"no model, dataset or recipe is named: {_RECIPE_NOTE}", *notes]
    config._notes = notes
    config._given_dataset = given_dataset
    return config


def _without_objects(given: Mapping[str, Any]) -> tuple[dict[str, Any], GivenDataset | None]:
    """Returns the options as a file could have them, and the examples that are given as ``dataset``, if any."""
    options = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in given.items()}
    data = options.get("dataset")
    if data is None or isinstance(data, str):
        return options, None
    return {**options, "dataset": GIVEN_DATASET}, GivenDataset(data)


def import_plugins(**given: Any) -> None:
    """Imports the plugins that are given, or else those of ./project.yaml and ./hyperparameters.yaml.

    Other options of these files are not checked.

    Args:
        **given: ``plugins`` and ``engine``, if they were typed.

    Raises:
        ConfigError: if there is no such plugin, or the files can't be read.
    """
    problems: list[Problem] = []
    top = {key: Value(value, COMMAND_LINE) for key, value in given.items() if value is not None}
    levels = _levels(top, True, problems)
    merged = _merge([level.values for level in levels], [])
    merged = {key: merged[key] for key in ("plugins", "engine") if key in merged}
    config = _locate_plugins(_check_core(merged, problems), levels)
    if config.plugins:
        problems += [Problem(merged["plugins"].where, "plugins", text) for text in missing_plugins(config.plugins)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    if config.plugins:
        config = _check_trust(config, levels, merged, own_files=True, trust=False)
    _import_plugins(config)


def option_name(key: str) -> str:
    """Returns a key with underscores for dashes; as it is, if no option can be named like that."""
    name = key.replace("-", "_")
    return name if name.isidentifier() else key


def _import_plugins(config: Config) -> None:
    if config.plugins or has_installed_plugins():
        select_engine(config.engine)  # a user's code may import Keras, which fixes its backend then
    load_installed_plugins()
    load_plugins(config.plugins)


def _unless_a_plugin_has_it(problem: Problem) -> Problem:
    """Adds that a name may be that of a component of a plugin, which could not be imported."""
    if not problem.message.startswith("there is no "):
        return problem
    return replace(problem, message=f"{problem.message} Perhaps a plugin has it; they were not imported.")


def _pop_trust(top: dict[str, Value], problems: list[Problem]) -> bool:
    trust = top.pop(TRUST, Value(False, "default"))
    if not isinstance(trust.value, bool):
        problems.append(Problem(trust.where, TRUST, f"must be true or false, got {trust.value!r}."))
    return trust.value is True


def _locate_plugins(config: Config, levels: list[_Level]) -> Config:
    """Returns the config with the paths of plugins from the working folder."""
    if not config.plugins:
        return config
    file = next(level for level in reversed(levels) if "plugins" in level.values).file
    return config.model_copy(update={"plugins": relative_to_file(config.plugins, file)})


def _check_trust(
    config: Config, levels: list[_Level], merged: Mapping[str, Value], *, own_files: bool, trust: bool
) -> Config:
    """Returns the config without a stranger's cache.

    Raises:
        UntrustedPluginError: if one may not, or if a SavedModel may not be loaded.
    """
    # A file that names another one, such as a recipe, may be a stranger's.
    own = own_files and all(level.is_own for level in levels)

    def naming(key: str) -> tuple[Path | str | None, bool]:
        """Returns the file that sets an option, and whether the user has written it."""
        file = next(level for level in reversed(levels) if key in level.values).file
        return file, file is None or own

    if config.plugins:
        _, by_user = naming("plugins")
        trust_plugins(config.plugins, merged["plugins"].where, named_by_user=by_user, trust=trust)
    path = _text(merged, SAVED_MODEL_PATH)
    if path is not None and config.model == SAVED_MODEL:
        _, by_user = naming(SAVED_MODEL_PATH)
        trust_saved_model(path, merged[SAVED_MODEL_PATH].where, named_by_user=by_user, trust=trust)
    if config.cache_dir is not None:
        _, by_user = naming("cache_dir")
        if not trust_cache(config.cache_dir, named_by_user=by_user, trust=trust):
            log.warning(
                "%s: cache_dir: you have not used %s before, so your own cache is used. To use it, add --cache_dir.",
                merged["cache_dir"].where, config.cache_dir,
            )  # fmt: skip
            config = config.model_copy(update={"cache_dir": None})
    return config


def relative_to_file(plugins: tuple[str, ...], file: Path | str | None) -> tuple[str, ...]:
    """Returns plugins that a file or URL names, as paths from the working folder; ``None`` is no file."""
    if file is None:
        return plugins
    if isinstance(file, str):
        folder = storage.parent(file)
        is_beside = [name.endswith(".py") and not Path(name).is_absolute() for name in plugins]
        return tuple(storage.join(folder, name) if b else name for name, b in zip(plugins, is_beside, strict=True))
    return tuple(str(file.parent / name) if name.endswith(".py") else name for name in plugins)


def recipe_names() -> list[str]:
    """The recipes of the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _recipes().iterdir() if path.name.endswith(".yaml"))


def recipe_path(name: str) -> Path | str:
    """The file of a recipe, given by its name, path or URL."""
    if name.endswith((".yaml", ".yml")):
        return config_path(name)
    if name not in recipe_names():
        raise UserError(unknown("recipe", name, recipe_names()))
    return Path(str(_recipes() / f"{name}.yaml"))


def _recipes() -> Any:
    return resources.files("modelyard") / "recipes"


# -- levels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """Options, the file that has them, and whether that is the user's own.

    There is no file for what the user typed, and for what comes with the package.
    """

    values: dict[str, Value]
    file: Path | str | None = None
    is_own: bool = True


def _levels(top: dict[str, Value], pick_up_files: bool, problems: list[Problem]) -> list[_Level]:
    """Returns the options of all levels, lowest first."""

    def read(kind: str, default: str, known: Mapping[str, Value]) -> tuple[Path | str | None, dict[str, Value]]:
        """Reads the file and the set that ``known`` chooses with ``{kind}_file`` and ``{kind}_set``."""
        named, chosen = _text(known, f"{kind}_file"), f"{kind}_set"
        path = config_path(default if named is None else named)
        if named is not None:
            return path, read_set(path, _text(known, chosen), problems, choose_with=chosen)
        if pick_up_files and Path(default).is_file():
            found: list[Problem] = []
            values = read_set(path, _text(known, chosen), found, choose_with=chosen)
            if len(found) == 1 and NO_DEFAULT in found[0].message:  # it may be for other commands
                log.warning("%s: %s", found[0].where, found[0].message)
            else:
                problems.extend(found)
            return path, values
        if chosen in known:
            message = f"there is no ./{default}; name a file with {kind}_file."
            problems.append(Problem(known[chosen].where, chosen, message))
        return None, {}

    project_file, project = read("config", "project.yaml", top)
    if project_file is not None and (is_run_config(project_file) or RUN_CONFIG_KEY in project):
        _check_version(project.pop(RUN_CONFIG_KEY, None), problems)
        for key in ("recipe", "hyperparameter_file", "hyperparameter_set"):
            if key in top:
                message = f"has no effect here: {project_file} is the complete config of a run."
                problems.append(Problem(top[key].where, key, message))
        _refuse_in_files((TRUST,), (project,), problems)
        return [_Level(project, project_file, is_own=False), _Level(top)]
    hyper_file, hyper = read("hyperparameter", "hyperparameters.yaml", {**project, **top})
    _refuse_in_files(("config_file", "config_set", TRUST), (project, hyper), problems)
    levels = [_of_file(project, project_file), _of_file(hyper, hyper_file), _Level(top)]
    known = {**project, **hyper, **top}
    if not {"model", "dataset", "recipe"} & set(known):
        known["recipe"] = Value(DEFAULT_RECIPE, _NOTHING_NAMED)
        levels.insert(0, _Level({"recipe": known["recipe"]}))
    recipe = _text(known, "recipe")
    if recipe is not None:
        try:
            path = recipe_path(recipe)
            values = read_flat(path, problems)
        except UserError as error:
            problems.append(Problem(known["recipe"].where, "recipe", str(error)))
            return levels
        _refuse_in_files((TRUST,), (values,), problems)
        level = _of_file(values, path)
        if not recipe.endswith((".yaml", ".yml")):  # of the package: its lines do not help the user
            level = _Level({key: Value(value.value, f"recipe {recipe}") for key, value in values.items()})
        levels.insert(0, level)
    return levels


def _of_file(values: dict[str, Value], file: Path | str | None) -> _Level:
    return _Level(values) if file is None else _Level(values, file, is_own_file(file))


def _refuse_in_files(keys: tuple[str, ...], files: tuple[dict[str, Value], ...], problems: list[Problem]) -> None:
    for key in keys:
        for values in files:
            if key in values:
                message = "has no effect inside a file; give it on the command line or in Python."
                problems.append(Problem(values[key].where, key, message))


def _check_version(version: Value | None, problems: list[Problem]) -> None:
    if version is not None and (not isinstance(version.value, int) or version.value > CONFIG_VERSION):
        message = f"is {version.value}, but this Modelyard reads versions up to {CONFIG_VERSION}. Install a newer one."
        problems.append(Problem(version.where, RUN_CONFIG_KEY, message))


def _text(values: Mapping[str, Value], key: str) -> str | None:
    value = values.get(key)
    return None if value is None or value.value is None else str(value.value)


def _merge(levels: list[dict[str, Value]], problems: list[Problem]) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for level in levels:
        values = dict(level)
        for one, other in EXCLUSIVE:
            given = [key for key in (one, other) if key in values and values[key].value is not None]
            own = [key for key in given if not values[key].inherited]
            if len(own) == 1:  # a set overrides what it inherits
                given = own
            if len(given) == 2:
                message = f"cannot be combined with {other}; give one of them."
                problems.append(Problem(values[one].where, one, message))
            elif given:
                displaced = other if given[0] == one else one
                values[displaced] = Value(None, f"{values[given[0]].where}, displaced by {given[0]}")
        merged.update(values)
    return merged


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_core(merged: Mapping[str, Value], problems: list[Problem]) -> Config:
    """Returns the core options, with defaults for those that are wrong."""
    values = _values_of(CORE_FIELDS, merged)
    wrong = _validate(Config, values, merged, problems)
    config = Config(**{key: value for key, value in values.items() if key not in wrong})

    def refuse(key: str, message: str, of: str | None = None) -> None:
        problems.append(Problem(merged[of or key].where, key, message))

    batch, micro_batches = config.train_batch_size, config.gradient_accumulation
    if config.engine != "auto" and config.engine not in ENGINES.names():
        refuse("engine", unknown("engine", config.engine, ["auto", *ENGINES.names()]))
    if config.gpu_id is not None and config.num_gpus not in ("auto", 1):
        refuse("gpu_id", f"selects one GPU, but num_gpus is {config.num_gpus}.")
    if batch % micro_batches:
        refuse("gradient_accumulation", f"must divide train_batch_size {batch}, got {micro_batches}.")
    if config.optimizer_groups and config.precision == "float16":
        message = "cannot be combined with the loss scaling of precision float16. Use bfloat16, which needs none."
        refuse("optimizer_groups", message)
    if config.loss_scale is not None and config.precision != "float16":
        message = f"is only for precision float16; the precision is {config.precision}, which needs no loss scale."
        refuse("loss_scale", f"{message} Remove it, or set precision to float16.")
    if config.shard_parameters and config.engine == "tensorflow":
        refuse("shard_parameters", "needs the JAX engine. Use --engine jax or --no_shard_parameters.")
    if config.folds is None and config.validation_fraction + config.test_fraction >= 1:
        message = f"{config.test_fraction} and validation_fraction {config.validation_fraction} leave nothing to train."
        refuse("test_fraction", message, "test_fraction" if "test_fraction" in merged else "validation_fraction")
    if config.test_time_augmentation_below is not None and not config.test_time_augmentation:
        refuse("test_time_augmentation_below", "needs test_time_augmentation: the views, such as flip.")
    if config.folds is None and config.fold is not None and "folds" not in wrong:
        refuse("fold", "needs folds: the number of folds.")
    if config.folds is not None and config.fold is None and "fold" not in wrong:
        message = f"is {config.folds}, but which one is the validation split? Give fold 1 to {config.folds}."
        refuse("folds", f"{message} `modelyard matrix` runs all of them.")
    if config.folds is not None and config.fold is not None and config.fold > config.folds:
        refuse("fold", f"must be 1 to {config.folds}, the number of folds; got {config.fold}.")
    for pair in EXCLUSIVE:
        if not wrong & set(pair) and all(getattr(config, key) is None for key in pair):
            emptied = next(key for key in reversed(pair) if key in merged and "displaced" not in merged[key].where)
            refuse(emptied, f"is empty; give {' or '.join(pair)}.")
    if config.cpu_devices > 1 and batch % (micro_batches * config.cpu_devices):
        more = f" × {micro_batches} micro-batches" if micro_batches > 1 else ""
        message = f"must be divisible by {config.cpu_devices} devices{more}, got {batch}."
        refuse("train_batch_size", message, "train_batch_size" if "train_batch_size" in merged else "cpu_devices")
    return config


def _check_calls(config: Config, merged: Mapping[str, Value], problems: list[Problem]) -> None:
    """Checks components in lists, and their arguments."""

    def check(key: str, read: Callable[..., Any], *arguments: Any) -> None:
        try:
            read(*arguments)
        except UserError as error:
            problems.append(Problem(merged[key].where, key, str(error)))

    for key, registry in (
        ("augment", AUGMENTATIONS),
        ("hooks", HOOKS),
        ("metrics", METRICS),
        ("preprocess", PREPROCESSINGS),
    ):
        for call in getattr(config, key):
            name = call.name.lstrip("+-") if registry is HOOKS else call.name
            check(key, Call(name, call.arguments).options, registry)
    named = [str(call) for call in config.metrics]
    if len(set(named)) < len(named):
        twice = max(named, key=named.count)
        problems.append(Problem(merged["metrics"].where, "metrics", f"names {twice!r} twice."))
    for call in config.optimizer_groups:
        check("optimizer_groups", read_group, call)
    check("fine_tune", read_phases, config.fine_tune)


def _folder_hint(name: str) -> str:
    """Returns what to say of folders if there is no dataset of this name."""
    with contextlib.suppress(OSError):
        near = nearest(name, [path.name for path in Path().iterdir() if path.is_dir()], most=1)
        if near:
            return f" Did you mean the folder {near[0]!r}?"
    return f" There is no folder {name!r} either."


def _check_components(
    merged: Mapping[str, Value], source: str | None, problems: list[Problem]
) -> tuple[dict[str, Any], list[str]]:
    """Returns all options of the chosen components, and notes about options that have no effect."""
    resolved: dict[str, Any] = {}
    accepted: set[str] = set()
    all_chosen = True
    for component, registry in COMPONENTS.items():
        chosen = merged.get(component) or Value(CORE_FIELDS[component].default, "default")
        name = str(chosen.value)
        if not _is_plain(chosen.value):  # reported as one of the core options
            all_chosen = False
            continue
        if registered_name(component, name) not in registry.names():
            all_chosen = False
            hint = _folder_hint(name) if component == "dataset" else ""
            problems.append(Problem(chosen.where, component, unknown(registry.kind, name, registry.names()) + hint))
            continue
        options = registry.get(registered_name(component, name)).options
        fields = options.model_fields
        clashes = sorted(set(fields) & {*CORE_FIELDS, TRUST})
        if clashes:
            problems.append(Problem(component, name, f"has options that Modelyard has too: {clashes}. Rename them."))
            continue
        values = _values_of(fields, merged)
        if not _validate(options, values, merged, problems, chosen.where):
            resolved.update(options(**values).model_dump(mode="json"))
        accepted.update(fields)
    owners = _owners_of_options()
    notes = []
    for key, value in merged.items():
        if key in CORE_FIELDS or key in accepted:
            continue
        if key not in owners:
            near = _near_options(key, [*CORE_FIELDS, *accepted])
            hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
            problems.append(Problem(value.where, key, f"there is no such option.{hint}"))
        elif all_chosen:
            message = f"has no effect here: it is an option of {_shortened(owners[key])}."
            if len(owners[key]) == 1:
                kind, _, name = owners[key][0].rpartition(" ")
                component = next(option for option, registry in COMPONENTS.items() if registry.kind == kind)
                message += f" Add --{component} {name}, or leave it out."
            if value.where == source:
                problems.append(Problem(value.where, key, message))
            else:
                notes.append(f"{value.where}: {key} {message}")
    return resolved, notes


def _near_options(key: str, names: list[str]) -> list[str]:
    """Returns names like ``key``; without any, names with a word like it (``seed``)."""
    words = dict.fromkeys(word for name in names for word in name.split("_"))
    return nearest(key, names) or [name for name in names if set(nearest(key, words, 1)) & set(name.split("_"))][:3]


def _shortened(owners: list[str], most: int = 5) -> str:
    """Lists components that have an option: the first of many, and how to see the others."""
    if len(owners) <= most:
        return ", ".join(owners)
    command = " (modelyard models lists them)" if all(owner.startswith("model ") for owner in owners) else ""
    return f"{', '.join(owners[:most])} and {len(owners) - most} more{command}"


def _owners_of_options() -> dict[str, list[str]]:
    """Returns the options of all registered components, each with the components that have it."""
    owners: dict[str, list[str]] = {}
    for registry in COMPONENTS.values():
        for entry in registry.entries():
            for key in entry.options.model_fields:
                owners.setdefault(key, []).append(f"{registry.kind} {entry.name}")
    return owners


def _values_of(fields: Mapping[str, FieldInfo], merged: Mapping[str, Value]) -> dict[str, Any]:
    """Returns the values of some options. Whole numbers are without an exponent, which pydantic does not read."""
    values = {key: merged[key].value for key in fields if key in merged}
    for key, value in values.items():
        if isinstance(value, str) and re.search(r"\bint\b", str(fields[key].annotation)):
            values[key] = without_exponents(value)
    return values


def without_exponents(text: str) -> str:
    """Returns a text with ``1e3`` as 1000, where that is a whole number."""

    def plain(found: re.Match[str]) -> str:
        number = Decimal(found[0])
        return str(int(number)) if number == number.to_integral_value() else found[0]

    return _WITH_EXPONENT.sub(plain, text)


def _validate(
    schema: type[BaseModel],
    values: Mapping[str, Any],
    merged: Mapping[str, Value],
    problems: list[Problem],
    chosen: str = "default",
) -> set[str]:
    """Validates ``values``, adds the errors to ``problems``, and returns the keys that are wrong.

    An error without a value, such as a missing option, is reported at ``chosen``, where the component was chosen.
    """
    try:
        schema(**values)
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for detail in error.errors():
            key = str(detail["loc"][0]) if detail["loc"] else ""
            given = values.get(key)
            text = (
                _needs_a_name(key) if key in COMPONENTS and not _is_plain(given) else validation_message(detail, given)
            )
            wrong.setdefault(key, text)
        for key, text in wrong.items():
            problems.append(Problem(merged[key].where if key in merged else chosen, key, text))
        return set(wrong)
    return set()


def _is_plain(value: Any) -> bool:
    """Whether a value could stand in a config file."""
    return value is None or isinstance(value, str | int | float | list | tuple | dict)


def _needs_a_name(component: str) -> str:
    """Words the error of a function or an object, such as a keras.Model, in place of a name."""
    kind = COMPONENTS[component].kind
    return (
        f"must be a name, not an object. Register a function that returns yours with "
        f"@modelyard.register_{kind.split()[-1]}('my_name'), and give its name."
    )


def field_kind(annotation: Any) -> str:
    """How the command line shows an option: "flag", or the placeholder of its value."""
    text = str(annotation)
    if annotation is bool:
        return "flag"
    for mark, shown in (("Duration", "DURATION"), ("Call", "LIST"), ("tuple", "LIST"), ("list", "LIST")):
        if mark in text:
            return shown
    if "Literal" in text:
        return "CHOICE"
    return "NUMBER" if "int" in text or "float" in text else "TEXT"
