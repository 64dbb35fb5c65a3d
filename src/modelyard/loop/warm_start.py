"""Initial weights from elsewhere: checkpoint_path is read, matched with the model, and logged."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelyard.config import Config
from modelyard.errors import CheckpointError
from modelyard.run.weights.match import SHOWN, Matched, match, shape_differences
from modelyard.run.weights.read import check_finite

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.run.weights.match import NamedWeights

log = logging.getLogger("modelyard")


def read_initial_weights(config: Config) -> NamedWeights | None:
    """Returns the weights of checkpoint_path, read before anything is built; None if the config has none."""
    if config.checkpoint_path is None:
        for key in ("checkpoint_include", "checkpoint_exclude", "checkpoint_rename", "strict"):
            if getattr(config, key):
                log.warning("%s (%s) has no effect without checkpoint_path", key, config.origin(key))
        return None
    from modelyard.run.weights.read import load_weights

    log.info("starting from the weights in %s", config.checkpoint_path)
    return load_weights(config.checkpoint_path, config.cache_dir)


def warm_start(engine: Engine, weights: NamedWeights) -> Matched:
    """Loads the weights that fit into the engine; the others keep their initial values.

    Raises:
        CheckpointError: if nothing fits, ``strict`` is not met, or values are not finite.
    """
    from modelyard.compat.keras import weight_paths
    from modelyard.engine.base import State
    from modelyard.engine.network import name_weights

    config = engine.config
    expected = engine.network.shapes()[0]
    try:
        matched = match(
            weights,
            expected,
            include=config.checkpoint_include,
            exclude=config.checkpoint_exclude,
            rename=config.checkpoint_rename,
            strict=config.strict,
            paths=weight_paths(engine.model, name_weights(engine.model)) if weights.paths else None,
        )
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint_path {config.checkpoint_path}: {error}") from None
    loaded = {matched.sources[name]: array for name, array in matched.loaded.items()}
    hint = "Training had diverged by then: use an earlier checkpoint, or exclude these (checkpoint_exclude)."
    check_finite(loaded, f"checkpoint_path {config.checkpoint_path}", hint)
    _log_matched(matched, expected)
    engine.load(State({**engine.state().weights, **matched.loaded}, {}), weights_only=True)
    return matched


def _log_matched(matched: Matched, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Logs a table on the terminal, and every name in the log file."""
    done, all_ = (sum(math.prod(expected[name]) for name in names) for names in (matched.loaded, expected))
    fraction = done / max(all_, 1)
    level = logging.WARNING if fraction < 0.5 and not matched.skipped else logging.INFO
    message = "loaded %d of %d weights, %.1f %% of the parameters"
    log.log(level, message, len(matched.loaded), len(expected), 100 * fraction)
    groups = {
        "loaded": [_renamed(name, matched.sources[name]) for name in matched.loaded],
        "excluded": list(matched.skipped),
        "missing in the file": list(matched.missing),
        "of another shape": shape_differences(matched.wrong_shape),
        "unused in the file": list(matched.unused),
    }
    if len(matched.loaded) < len(expected) or matched.unused:
        log.info("%s", table(groups))
    for group, names in groups.items():
        if names:
            log.debug("%s: %s", group, ", ".join(names))


def _renamed(name: str, source: str) -> str:
    return name if name == source else f"{name} (in the file: {source})"


def table(groups: Mapping[str, list[str]]) -> str:
    """Returns groups of weights with their number and first names, as text."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    made = Table("weights", Column("number", justify="right"), Column("names", overflow="fold"), box=box.SIMPLE_HEAD)
    for group, names in groups.items():
        if names:
            shown: list[str] = names[:SHOWN] if group != "loaded" else names[:3]
            rest: list[str] = [f"… and {len(names) - len(shown)} more"] if len(names) > len(shown) else []
            made.add_row(group, str(len(names)), "\n".join([*shown, *rest]))
    page = Console(file=io.StringIO(), width=110, highlight=False, markup=False)
    page.print(made)
    lines: Any = page.file
    return "weights:\n" + "\n".join(line.rstrip() for line in lines.getvalue().splitlines() if line.strip())
