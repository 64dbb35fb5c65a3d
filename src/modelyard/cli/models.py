"""`modelyard models`: all of them with what they cost, or one with its layers and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from modelyard.cli.commands import default_of, print_json, stdout
from modelyard.config.calls import parse_list
from modelyard.config.plugins import load_installed_plugins, load_plugins
from modelyard.errors import UserError
from modelyard.models.catalog import SIZES, Size
from modelyard.registry import MODELS, Entry

_USUAL = (32, 32, 3)


def show_all(options: dict[str, Any], *, as_json: bool) -> None:
    """Lists the models."""
    _load(options)
    _refuse(options)
    entries = MODELS.entries()
    if as_json:
        print_json([_described(entry) for entry in entries])
        return
    table = Table("model", "what it is", "images", "parameters", "FLOPs")
    for column in table.columns[2:]:
        column.justify = "right"
    for entry in entries:
        size = SIZES.get(entry.name)
        costs = ["–", "–", "–"]
        if size is not None:
            costs = [f"{size.side}×{size.side}", _short(size.parameters), _short(size.flops)]
        table.add_row(entry.name, entry.summary, *costs)
    stdout().print(table)
    stdout().print(
        "Parameters and FLOPs (multiplications and additions for one image) are those of the defaults, at these sizes."
        "\nmodelyard models NAME shows the layers and options of one."
    )


def show(name: str, image_shape: str | None, classes: int | None, options: dict[str, Any], *, as_json: bool) -> None:
    """Shows one model: its options, its layers, what it costs.

    Args:
        name: which.
        image_shape: height, width and channels to build it for; None for those of the list.
        classes: how many; None for those of the list.
        options: its options, plugins and the engine.
        as_json: one JSON object instead of tables.
    """
    _load(options)
    entry = MODELS.get(name)
    size = SIZES.get(name)
    shape = _shape(image_shape) if image_shape else size.shape if size else _USUAL
    model = built(entry, shape, classes or (size.classes if size else 10), options)
    from modelyard.models.flops import flops

    layers = [
        {
            "name": layer.name,
            "kind": type(layer).__name__,
            "output": _outputs(layer),
            "parameters": int(layer.count_params()),
        }
        for layer in model.layers
    ]
    parameters = sum(layer["parameters"] for layer in layers)
    trained = sum(int(_product(v.shape)) for v in model.trainable_variables)
    found = {"parameters": parameters, "trained": trained, "flops": flops(model), "image_shape": list(shape)}
    if as_json:
        print_json({**_described(entry), **found, "layers": layers})
        return
    table = Table("option", "default", "what it does", title=f"{name}: {entry.summary}", title_justify="left")
    for key, info in entry.options.model_fields.items():
        table.add_row(key, str(default_of(info)), info.description or "")
    stdout().print(table)
    table = Table("layer", "kind", "output", "parameters")
    table.columns[3].justify = "right"
    for layer in layers:
        table.add_row(layer["name"], layer["kind"], layer["output"], f"{layer['parameters']:,}")
    stdout().print(table)
    cost = f"{_short(flops(model))} FLOPs for an image of {'×'.join(map(str, shape))}"
    stdout().print(f"{parameters:,} parameters, {trained:,} of them trained; {cost}")


def built(entry: Entry, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> Any:
    """The Keras model, for images that are not there."""
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


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"--image_shape {text!r} is no height, width and channels, such as 32,32,3.")
    return shape


def _load(options: dict[str, Any]) -> None:
    plugins = parse_list(options.get("plugins"))
    if plugins:
        from modelyard.config.backend import select_engine

        select_engine(options.get("engine", "auto"))
    load_installed_plugins()
    load_plugins(tuple(plugins))


def _refuse(options: Mapping[str, Any]) -> None:
    own = [key for key in options if key not in ("plugins", "engine")]
    if own:
        raise UserError(f"--{own[0]} is an option of a model; which one? modelyard models NAME --{own[0]} …")


def _described(entry: Entry) -> dict[str, Any]:
    size: Size | None = SIZES.get(entry.name)
    cost = {} if size is None else {"parameters": size.parameters, "flops": size.flops, "image_shape": list(size.shape)}
    options = {key: default_of(info) for key, info in entry.options.model_fields.items()}
    return {"name": entry.name, "summary": entry.summary, **cost, "options": options}


def _outputs(layer: Any) -> str:
    output: Any = getattr(layer, "output", None)
    shapes = [tensor.shape for tensor in (output if isinstance(output, list | tuple) else [output])]
    return ", ".join("×".join(map(str, shape[1:])) or "1" for shape in shapes)


def _product(shape: Any) -> int:
    count = 1
    for side in shape:
        count *= int(side)
    return count


def _short(number: float) -> str:
    for unit, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.0f}"
