"""From files, recipe and command line to one config that knows where each value came from.

Defaults < recipe < a set of project.yaml < a set of hyperparameters.yaml < command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from modelyard.config.backend import select_engine
from modelyard.config.calls import Call, parse_list
from modelyard.config.fine_tuning import read_phases
from modelyard.config.optimizer_groups import read_group
from modelyard.config.plugins import load_installed_plugins, load_plugins
from modelyard.config.schema import CORE_FIELDS, EXCLUSIVE, PARTS, PATH_DATASET, Config, is_path
from modelyard.config.wording import sentence
from modelyard.config.yaml_file import CONFIG_VERSION, RUN_CONFIG_KEY, Value, is_run_config, read_flat, read_set
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, nearest, unknown
from modelyard.registry import AUGMENTATIONS, ENGINES, HOOKS, PREPROCESSINGS

DEFAULT_RECIPE = "digits"


@dataclass(frozen=True)
class Layer:
    """Options that came from one place."""

    name: str
    values: Mapping[str, Value]


def load_config(**options: Any) -> Config:
    """The config for ``options``, given as keyword arguments; the rest are defaults.

    Files are read where ``config_file``, ``hyperparameter_file`` or ``recipe`` names them.

    Example:
        >>> load_config(model="mlp", hidden_units=[64], train_steps=100).train_steps
        100
    """
    return resolve(options, source="Python", pick_up_files=False)


def resolve(
    given: Mapping[str, Any],
    *,
    source: str = COMMAND_LINE,
    pick_up_files: bool = True,
    shared: bool = False,
) -> Config:
    """Builds the config.

    Args:
        given: the options of the top level, usually those of the command line.
        source: the name of that level.
        pick_up_files: read ./project.yaml and ./hyperparameters.yaml where they exist.
        shared: the options serve several runs, so that one may be for a part that only others have.

    Raises:
        ConfigError: with every mistake that was found.
    """
    problems: list[Problem] = []
    top = Layer(source, {k.replace("-", "_"): Value(v, source) for k, v in given.items() if v is not None})
    layers = _layers(top, pick_up_files, problems)
    merged = _merge(layers, problems)
    core = _check_core(merged, problems)
    names = core.get("plugins", ()) if isinstance(core, dict) else core.plugins
    if problems and names:
        raise ConfigError(_without_repeats(problems))  # before a user's code is imported
    plugin_origin = merged["plugins"].where if "plugins" in merged else source
    try:
        if names and isinstance(core, Config):
            select_engine(core.engine)  # a user's code may import Keras, which fixes its backend then
        load_installed_plugins()
        load_plugins(tuple(names))
    except UserError as error:
        problems.append(Problem(plugin_origin, "plugins", str(error)))
        raise ConfigError(_without_repeats(problems)) from error
    _check_calls(core if isinstance(core, dict) else core.model_dump(), merged, problems)
    part_options, notes = _check_parts(merged, None if shared else source, problems)
    if problems or not isinstance(core, Config):
        raise ConfigError(_without_repeats(problems))
    config = core.model_copy(update={"part_options": part_options})
    config._origins = {key: value.where for key, value in merged.items()}
    config._notes = notes
    return config


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _recipes().iterdir() if path.name.endswith(".yaml"))


def recipe_path(name: str) -> Path:
    """The file of a recipe, by name or path."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in recipe_names():
        raise UserError(unknown("recipe", name, recipe_names()))
    return Path(str(_recipes() / f"{name}.yaml"))


def _recipes() -> Any:
    return resources.files("modelyard") / "recipes"


def _layers(top: Layer, pick_up_files: bool, problems: list[Problem]) -> list[Layer]:
    """All levels, lowest first."""
    project_file = _file(top.values, "config_file", "project.yaml", pick_up_files)
    project: dict[str, Value] = {}
    if project_file is not None:
        project = read_set(project_file, _text(top.values, "config_set"), problems)
        if is_run_config(project_file):
            _check_version(project_file, project.pop(RUN_CONFIG_KEY, None), problems)
            for key in {"recipe", "hyperparameter_file", "hyperparameter_set"} & set(top.values):
                message = f"has no use here: {project_file} is the complete config of a run."
                problems.append(Problem(top.name, key, message))
            return [Layer(str(project_file), project), top]
    elif "config_set" in top.values:
        problems.append(Problem(top.name, "config_set", "there is no ./project.yaml; name a file with config_file."))
    known = {**project, **top.values}
    hyper_file = _file(known, "hyperparameter_file", "hyperparameters.yaml", pick_up_files)
    hyper: dict[str, Value] = {}
    if hyper_file is not None:
        hyper = read_set(hyper_file, _text(known, "hyperparameter_set"), problems)
    elif "hyperparameter_set" in known:
        problems.append(
            Problem(
                known["hyperparameter_set"].where,
                "hyperparameter_set",
                "there is no ./hyperparameters.yaml; name a file with hyperparameter_file.",
            )
        )
    for key in ("config_file", "config_set"):
        for values in (project, hyper):
            if key in values:
                problems.append(
                    Problem(values[key].where, key, "has no effect inside a file; give it where you start.")
                )
    known = {**project, **hyper, **top.values}
    layers = [Layer(str(project_file), project), Layer(str(hyper_file), hyper), top]
    recipe = _text(known, "recipe")
    if recipe is None and not {"model", "dataset", "recipe"} & set(known):
        recipe = DEFAULT_RECIPE
        layers.insert(0, Layer("default", {"recipe": Value(recipe, "default, since no model or dataset is named")}))
    if recipe is not None:
        try:
            path = recipe_path(recipe)
            values = read_flat(path, problems)
            own = recipe.endswith((".yaml", ".yml"))  # the user's, who wants to know the line
            named = {k: value if own else Value(value.value, f"recipe {recipe}") for k, value in values.items()}
            layers.insert(0, Layer(f"recipe {recipe}", named))
        except UserError as error:
            problems.append(Problem(known["recipe"].where, "recipe", str(error)))
    return layers


def _check_version(path: Path, version: Value | None, problems: list[Problem]) -> None:
    if version is not None and (not isinstance(version.value, int) or version.value > CONFIG_VERSION):
        message = f"{version.value} is newer than {CONFIG_VERSION}, which this Modelyard reads. Install a newer one."
        problems.append(Problem(version.where, RUN_CONFIG_KEY, message))


def _file(values: Mapping[str, Value], key: str, usual: str, pick_up: bool) -> Path | None:
    named = _text(values, key)
    if named is not None:
        return Path(named)
    return Path(usual) if pick_up and Path(usual).is_file() else None


def _text(values: Mapping[str, Value], key: str) -> str | None:
    value = values.get(key)
    return None if value is None or value.value is None else str(value.value)


def _merge(layers: list[Layer], problems: list[Problem]) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for layer in layers:
        values = dict(layer.values)
        for one, other in EXCLUSIVE:
            given = [key for key in (one, other) if key in values and values[key].value is not None]
            own = [key for key in given if not values[key].inherited]
            if len(own) == 1:  # a set overrides what it inherits
                given = own
            if len(given) == 2:
                problems.append(Problem(values[one].where, one, f"stands beside {other}; give one of the two."))
            elif given:
                displaced = other if given[0] == one else one
                values[displaced] = Value(None, f"{values[given[0]].where}, displaced by {given[0]}")
        merged.update(values)
    return merged


def _check_core(merged: Mapping[str, Value], problems: list[Problem]) -> Config | dict[str, Any]:
    """The core options, or, where some are wrong, those that are right."""
    values = {key: value.value for key, value in merged.items() if key in CORE_FIELDS}
    wrong = _validate(Config, values, merged, problems)
    engine = values.get("engine", "auto")
    if engine != "auto" and engine not in ENGINES.names():
        where = merged["engine"].where
        problems.append(Problem(where, "engine", unknown("engine", str(engine), ["auto", *ENGINES.names()])))
    right = {key: value for key, value in values.items() if key not in wrong}
    config = Config(**right)
    if config.gpu_id is not None and config.num_gpus not in ("auto", 1):
        where = merged["gpu_id"].where
        problems.append(Problem(where, "gpu_id", f"names one GPU, but num_gpus asks for {config.num_gpus}."))
    if config.train_batch_size % config.gradient_accumulation:
        where = merged["gradient_accumulation"].where
        problems.append(
            Problem(
                where,
                "gradient_accumulation",
                f"{config.gradient_accumulation} pieces do not divide train_batch_size {config.train_batch_size}.",
            )
        )
    if config.optimizer_groups and config.precision == "float16":
        where = merged["optimizer_groups"].where
        message = "can't be combined with the loss scaling of precision float16. Use bfloat16, which needs none."
        problems.append(Problem(where, "optimizer_groups", message))
    if config.shard_parameters and config.engine == "tensorflow":
        where = merged["shard_parameters"].where
        message = "is the JAX engine's: use --engine jax, or --no_shard_parameters."
        problems.append(Problem(where, "shard_parameters", message))
    for pair in EXCLUSIVE:
        if not wrong & set(pair) and all(getattr(config, key) is None for key in pair):
            emptied = next(key for key in reversed(pair) if key in merged and "displaced" not in merged[key].where)
            problems.append(Problem(merged[emptied].where, emptied, f"is empty; give {' or '.join(pair)}."))
    pieces = config.gradient_accumulation * config.cpu_devices
    if config.cpu_devices > 1 and config.train_batch_size % pieces:
        message = f"{config.train_batch_size} examples can't be divided evenly over {config.cpu_devices} devices"
        more = f" × {config.gradient_accumulation} pieces" if config.gradient_accumulation > 1 else ""
        blamed = merged["train_batch_size"] if "train_batch_size" in merged else merged["cpu_devices"]
        problems.append(Problem(blamed.where, "train_batch_size", f"{message}{more}."))
    return config if not wrong else right


def _check_calls(values: Mapping[str, Any], merged: Mapping[str, Value], problems: list[Problem]) -> None:
    """The parts named in lists, and their arguments."""
    for key, registry in (("augment", AUGMENTATIONS), ("hooks", HOOKS), ("preprocess", PREPROCESSINGS)):
        if key not in merged or key not in values:
            continue
        for call in parse_list(values[key]):
            parsed = Call.parse(call)
            name = parsed.name.lstrip("+-") if registry is HOOKS else parsed.name
            try:
                Call(name, parsed.arguments).options(registry)
            except UserError as error:
                problems.append(Problem(merged[key].where, key, str(error)))
    for call in parse_list(values.get("optimizer_groups")) if "optimizer_groups" in merged else ():
        try:
            read_group(Call.parse(call))
        except UserError as error:
            problems.append(Problem(merged["optimizer_groups"].where, "optimizer_groups", str(error)))
    if "fine_tune" in merged and "fine_tune" in values:
        try:
            read_phases([Call.parse(call) for call in parse_list(values["fine_tune"])])
        except UserError as error:
            problems.append(Problem(merged["fine_tune"].where, "fine_tune", str(error)))


def _check_parts(
    merged: Mapping[str, Value], source: str | None, problems: list[Problem]
) -> tuple[dict[str, Any], list[str]]:
    """The options of the chosen parts, complete with their defaults, and what is set but not used."""
    resolved: dict[str, Any] = {}
    accepted: dict[str, str] = {}
    all_chosen = True
    for part, registry in PARTS.items():
        default = CORE_FIELDS[part].default
        name = str(merged[part].value) if part in merged else default
        lookup = PATH_DATASET if part == "dataset" and is_path(name) else name
        if lookup not in registry.names():
            all_chosen = False
            where = merged[part].where if part in merged else "default"
            nor = f" There is no folder {name!r} here either." if part == "dataset" else ""
            problems.append(Problem(where, part, unknown(registry.kind, name, registry.names()) + nor))
            continue
        options = registry.get(lookup).options
        fields = options.model_fields
        clashes = sorted(set(fields) & set(CORE_FIELDS))
        if clashes:
            problems.append(
                Problem(
                    part, name, f"its options {clashes} are named like options of Modelyard; give them other names."
                )
            )
            continue
        values = {key: merged[key].value for key in fields if key in merged}
        chosen = merged[part].where if part in merged else "default"
        if not _validate(options, values, merged, problems, chosen):
            resolved.update(options(**values).model_dump(mode="json"))
        accepted.update(dict.fromkeys(fields, part))
    elsewhere = known_part_options()
    notes = []
    for key, value in merged.items():
        if key in CORE_FIELDS or key in accepted:
            continue
        owners = elsewhere.get(key)
        if owners is None:
            near = _near_options(key, [*CORE_FIELDS, *accepted])
            hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
            problems.append(Problem(value.where, key, f"there is no such option.{hint}"))
        elif not all_chosen:
            continue
        elif value.where == source:
            problems.append(Problem(value.where, key, f"has no use here: it is an option of {_some(owners)}."))
        else:
            notes.append(f"{value.where}: {key} is not used here: it is an option of {_some(owners)}.")
    return resolved, notes


def _near_options(key: str, names: list[str]) -> list[str]:
    """The names that ``key`` may stand for: those like it, or else those with a word like it (``seed``)."""
    words = dict.fromkeys(word for name in names for word in name.split("_"))
    return nearest(key, names) or [name for name in names if set(nearest(key, words, 1)) & set(name.split("_"))][:3]


def _some(owners: list[str], most: int = 5) -> str:
    """Parts that have an option: the first of many, and how to see the others."""
    if len(owners) <= most:
        return ", ".join(owners)
    where = " (modelyard models lists them)" if all(owner.startswith("model ") for owner in owners) else ""
    return f"{', '.join(owners[:most])} and {len(owners) - most} more{where}"


def known_part_options() -> dict[str, list[str]]:
    """Options of all registered parts, each with the parts that have it."""
    known: dict[str, list[str]] = {}
    for registry in PARTS.values():
        for entry in registry.entries():
            for key in entry.options.model_fields:
                known.setdefault(key, []).append(f"{registry.kind} {entry.name}")
    return known


def _validate(
    schema: type[BaseModel],
    values: Mapping[str, Any],
    merged: Mapping[str, Value],
    problems: list[Problem],
    chosen: str = "default",
) -> set[str]:
    """Checks ``values``, adds each mistake to ``problems``, and returns the keys that are wrong.

    What no single value is to blame for, such as a missing one, is said of ``chosen``, where the part was chosen.
    """
    try:
        schema(**values)
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for detail in error.errors():
            key = str(detail["loc"][0]) if detail["loc"] else ""
            wrong.setdefault(key, sentence(detail, values.get(key)))
        for key, text in wrong.items():
            problems.append(Problem(merged[key].where if key in merged else chosen, key, text))
        return set(wrong)
    return set()


def _without_repeats(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def field_kind(annotation: Any) -> str:
    """How an option is written on the command line: "flag", or what to show for its value."""
    text = str(annotation)
    if annotation is bool:
        return "flag"
    for mark, shown in (("Duration", "DURATION"), ("Call", "LIST"), ("tuple", "LIST"), ("list", "LIST")):
        if mark in text:
            return shown
    if "Literal" in text:
        return "CHOICE"
    if "int" in text:
        return "NUMBER"
    return "NUMBER" if "float" in text else "TEXT"
