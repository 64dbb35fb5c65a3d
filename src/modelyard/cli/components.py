"""Commands that show the config, and the models, datasets and hooks by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.cli.output import Json, show, table
from modelyard.errors import UserError

if TYPE_CHECKING:
    from modelyard.registry import Entry, Registry

Plugins = Annotated[str | None, typer.Option(metavar="LIST", help="your own modules or .py files to import first")]
_USUAL_SHAPE = (32, 32, 3)


def config(options: dict[str, Any], json: Json = False) -> None:
    """Print the resolved config, and where each value comes from."""
    from modelyard.config import resolve
    from modelyard.config.schema import CORE_FIELDS, GROUPS
    from modelyard.config.yaml_file import inline
    from modelyard.system.console import console

    resolved = resolve(options)
    values = resolved.flat()
    groups = [(group.title, list(group.model_fields)) for group in GROUPS]
    groups.append(("Options of the chosen components", [key for key in values if key not in CORE_FIELDS]))
    width = min(60, max(len(key) + len(inline(value)) for key, value in values.items())) + 2
    paragraphs = []
    for title, keys in groups:
        lines = [f"{f'{key}: {inline(values[key])}':<{width}}  # {resolved.origin(key)}" for key in keys]
        paragraphs.append("\n".join([f"# {title}", *lines]))
    show(
        {key: {"value": value, "origin": resolved.origin(key)} for key, value in values.items()},
        ["\n\n".join(paragraphs)],
        as_json=json,
    )
    for note in [] if json else resolved.notes:
        console().print(f"note: {note}", soft_wrap=True)


def datasets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="dataset to show")] = None,
    plugins: Plugins = None,
    json: Json = False,
) -> None:
    """List the datasets with their options, or show the options of one."""
    from modelyard.config.resolve import import_plugins
    from modelyard.registry import DATASETS

    import_plugins(plugins=plugins)
    if name is None:
        _list_components(DATASETS, json)
        return
    entry = DATASETS.get(name)
    show({"name": name, "summary": entry.summary, "options": _defaults(entry)}, [_option_table(entry)], as_json=json)


def hooks(plugins: Plugins = None, json: Json = False) -> None:
    """List the hooks with their arguments."""
    from modelyard.config.resolve import import_plugins
    from modelyard.registry import HOOKS

    import_plugins(plugins=plugins)
    _list_components(HOOKS, json)


def metrics(plugins: Plugins = None, json: Json = False) -> None:
    """List the metrics for --metrics, with their tasks and arguments."""
    from rich.text import Text

    from modelyard.config.resolve import import_plugins
    from modelyard.registry import METRICS

    import_plugins(plugins=plugins)
    rows, found = [], []
    for entry in METRICS.entries():
        tasks, options = list(getattr(entry.load(), "tasks", ())), _defaults(entry)
        found.append({"name": entry.name, "summary": entry.summary, "tasks": tasks, "options": options})
        arguments = "\n".join(f"{name} = {value}" for name, value in options.items())
        rows.append((entry.name, entry.summary, Text("\n".join(tasks) or "any"), Text(arguments)))
    listed = table(("metric", "description", "task", "options and defaults"), rows, show_lines=True)
    show(found, [listed], as_json=json)


def _list_components(registry: Registry, as_json: bool) -> None:
    from rich.text import Text

    rows = [
        (e.name, e.summary, Text("\n".join(f"{name} = {value}" for name, value in _defaults(e).items())))
        for e in registry.entries()
    ]
    listed = table((registry.kind, "description", "options and defaults"), rows, show_lines=True)
    found = [{"name": e.name, "summary": e.summary, "options": _defaults(e)} for e in registry.entries()]
    show(found, [listed], as_json=as_json)


def models(
    options: dict[str, Any],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="model to show")] = None,
    image_shape: Annotated[
        str | None, typer.Option("--image_shape", metavar="H,W,C", help="build it for this shape (default: as listed)")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="build it for so many classes (default: as listed)", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """List the models with parameters and FLOPs, or show the layers and options of one."""
    from modelyard.config.resolve import import_plugins

    import_plugins(plugins=options.get("plugins"), engine=options.get("engine"))
    if name is not None:
        _show_model(name, image_shape, classes, options, json)
        return
    own = [key for key in options if key not in ("plugins", "engine")]
    if own:
        raise UserError(f"--{own[0]} is an option of a model. Name the model: modelyard models NAME --{own[0]} …")
    from modelyard.models.catalog import SIZES
    from modelyard.registry import MODELS

    rows = []
    for entry in MODELS.entries():
        size = SIZES.get(entry.name)
        costs = size and (f"{size.side}×{size.side}", _short(size.parameters), _short(size.flops))
        rows.append((entry.name, entry.summary, *(costs or (None, None, None))))
    numbers = ("images", "parameters", "FLOPs")
    listed = table(("model", "description", *numbers), rows, right=numbers)
    text = (
        "Parameters and FLOPs (multiplications and additions for one image) are those of the defaults, at these sizes."
        "\nmodelyard models NAME shows the layers and options of one."
    )
    show([_description(entry) for entry in MODELS.entries()], [listed, text], as_json=json)


def _show_model(
    name: str, image_shape: str | None, classes: int | None, options: dict[str, Any], as_json: bool
) -> None:
    from modelyard.models.catalog import SIZES
    from modelyard.registry import MODELS

    entry = MODELS.get(name)
    size = SIZES.get(name)
    shape = _parse_shape(image_shape) if image_shape else size.shape if size else _USUAL_SHAPE
    model = build_model(entry, shape, classes or (size.classes if size else 10), options)
    from modelyard.models.flops import flops  # after the engine is chosen: it imports Keras

    layers = [
        {
            "name": layer.name,
            "kind": type(layer).__name__,
            "output": _outputs(layer),
            "parameters": layer.count_params(),
        }
        for layer in model.layers
    ]
    parameters = sum(layer["parameters"] for layer in layers)
    trained = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    cost = {"parameters": parameters, "trained": trained, "flops": flops(model), "image_shape": list(shape)}
    layer_rows = [{**layer, "parameters": f"{layer['parameters']:,}"}.values() for layer in layers]
    layer_table = table(("layer", "kind", "output", "parameters"), layer_rows, right=("parameters",))
    line = f"{parameters:,} parameters, {trained:,} of them trained; "
    line += f"{_short(cost['flops'])} FLOPs for an image of {'×'.join(map(str, shape))}"
    show({**_description(entry), **cost, "layers": layers}, [_option_table(entry), layer_table, line], as_json=as_json)


def _option_table(entry: Entry) -> Any:
    fields = entry.options.model_fields
    rows = [(key, str(default), fields[key].description) for key, default in _defaults(entry).items()]
    return table(("option", "default", "description"), rows, title=f"{entry.name}: {entry.summary}")


def build_model(entry: Entry, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> Any:
    """Returns the Keras model for images of a shape, without a dataset."""
    from modelyard.config.backend import select_engine
    from modelyard.config.resolve import resolve

    config = resolve({**options, "model": entry.name, "engine": options.get("engine", "auto")}, pick_up_files=False)
    select_engine(config.engine)
    import numpy as np

    from modelyard.data.dataset import IMAGE, LABEL, Feature
    from modelyard.models.data_info import DataInfo

    features = {IMAGE: Feature(shape, "uint8"), LABEL: Feature((), "int32")}
    mean, spread = np.full(shape[-1], 127.5, np.float32), np.full(shape[-1], 64, np.float32)
    images = np.random.default_rng(0).integers(0, 256, (64, *shape)).astype(np.uint8)
    data = DataInfo(features, tuple(map(str, range(classes))), mean, spread, images)
    chosen, target = config.options_of("model"), entry.load()
    return target(chosen, data).network() if isinstance(target, type) else target(data, chosen)


def _parse_shape(text: str) -> tuple[int, ...]:

    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"--image_shape must be height, width and channels, such as 32,32,3; got {text!r}.")
    return shape


def _description(entry: Entry) -> dict[str, Any]:
    from modelyard.models.catalog import SIZES

    size = SIZES.get(entry.name)
    cost = {} if size is None else {"parameters": size.parameters, "flops": size.flops, "image_shape": list(size.shape)}
    return {"name": entry.name, "summary": entry.summary, **cost, "options": _defaults(entry)}


def _defaults(entry: Entry) -> dict[str, Any]:
    return {
        key: "(required)"
        if info.is_required()
        else list(info.default)
        if isinstance(info.default, tuple)
        else info.default
        for key, info in entry.options.model_fields.items()
    }


def _outputs(layer: Any) -> str:
    output: Any = getattr(layer, "output", None)
    shapes = [tensor.shape for tensor in (output if isinstance(output, list | tuple) else [output])]
    return ", ".join("×".join(map(str, shape[1:])) or "1" for shape in shapes)


def _short(number: float) -> str:
    for unit, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.0f}"
