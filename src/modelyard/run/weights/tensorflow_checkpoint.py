"""TensorFlow checkpoints: of objects (``tf.train.Checkpoint``, Keras) and of names (``tf.compat.v1.train.Saver``)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from modelyard.errors import CheckpointError
from modelyard.run.weights.match import NamedWeights
from modelyard.system.protobuf import messages
from modelyard.system.untrusted import read_regular

STATE_FILE = "checkpoint"
"""The file that TensorFlow writes beside its checkpoints; it names the latest."""

_LARGEST_STATE = 1 << 24  # bytes
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_NUMBERED = re.compile(r"(?:layer_with_weights-|layer-|_operations/|_layers/|layers/)(\d+)(?:/|$)")
_NOT_LEARNED = {"global_step", "save_counter", "beta1_power", "beta2_power", "optimizer", "keras_api", "_optimizer"}


def find_prefix(path: Path) -> Path | None:
    """The prefix of the checkpoint that ``path`` means: itself, its ``.index`` file, or the latest of a folder.

    Raises:
        CheckpointError: if a folder has several and does not name the latest.
    """
    if path.suffix == ".index" and path.is_file():
        return path.with_suffix("")
    if path.with_name(path.name + ".index").is_file():
        return path
    if not path.is_dir():
        return None
    state = path / STATE_FILE
    if state.is_file():
        latest = latest_of(read_regular(state, _LARGEST_STATE, CheckpointError).decode("utf-8", "replace"))
        if latest is not None and (path / f"{latest}.index").is_file():
            return path / latest
    found = sorted(path.glob("*.index"))
    if len(found) > 1:
        names = ", ".join(file.stem for file in found[:5])
        raise CheckpointError(
            f"{path} has several TensorFlow checkpoints ({names}). Name one: {path / found[-1].stem}."
        )
    return found[0].with_suffix("") if found else None


def latest_of(state: str) -> str | None:
    """The name of the latest checkpoint in TensorFlow's file ``checkpoint``, without its path, which is not trusted."""
    line = re.search(r'^model_checkpoint_path:\s*"([^"\n]+)"', state, re.MULTILINE)
    return re.split(r"[/\\]", line[1])[-1] if line else None


def read_tensorflow(prefix: Path) -> NamedWeights:
    """The weights of the checkpoint with this prefix; slots of optimizers and counters are left out."""
    # Not at the top: what trains on arrays needs no package for such checksums.
    from modelyard.run.weights.tensor_bundle import TensorBundle

    try:
        bundle = TensorBundle(prefix)
        numbers = [key for key in sorted(bundle.entries) if bundle.is_numeric(key)]
        stored, claimed = bundle.stored_bytes(), sum(bundle.nbytes(key) for key in numbers)
        if claimed > stored:
            raise CheckpointError(f"{prefix} claims {claimed:,} bytes of arrays but has {stored:,}; it is not read.")
        full_names = _full_names(bundle.read_text(_GRAPH)) if _GRAPH in bundle.entries else None
        keys = _keys_by_name(numbers, full_names)
        weights = {name: bundle.read(key) for name, key in keys.items()}
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{prefix} is damaged or no TensorFlow checkpoint: {error}.") from error
    return NamedWeights(weights, order=_order(keys) if full_names is not None else None)


def _keys_by_name(keys: list[str], full_names: dict[str, str] | None) -> dict[str, str]:
    """The trained weights: names to the keys of the file."""
    if full_names is None:
        weights = set(keys)
        # Slots are named after their weight: conv1/kernel/Momentum, conv1/kernel/Adam_1.
        slots = {key for key in keys if any(key[:at] in weights for at, letter in enumerate(key) if letter == "/")}
        return {k.removesuffix(":0"): k for k in keys if k not in slots and not _NOT_LEARNED & set(k.split("/"))}
    learned = [
        key
        for key in keys
        if key.endswith(_VALUE) and "/.OPTIMIZER_SLOT/" not in key and not _NOT_LEARNED & set(key.split("/"))
    ]
    often = Counter(full_names.get(key) for key in learned)
    named = {}
    for key in learned:
        name = full_names.get(key)
        named[name if name and often[name] == 1 else key.removesuffix(_VALUE)] = key
    return {name: key for name, key in named.items() if "seed_generator" not in name}


def _full_names(graph: bytes) -> dict[str, str]:
    """The names of the variables in the program that saved them, by key: the attributes of the nodes of a graph."""
    found = {}
    for node in messages(graph, 1):
        for attribute in messages(node, 2):
            names = {number: text[-1].decode() for number in (2, 3) if (text := messages(attribute, number))}
            found[names.get(3, "")] = names.get(2, "").removesuffix(":0")
    return found


def _order(keys: dict[str, str]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The numbers of the layers in keys, and the attribute: layer_with_weights-2/kernel is (2,), kernel."""
    order = {}
    for name, key in keys.items():
        rest = key.removesuffix(_VALUE)
        start = _NUMBERED.search(rest)
        numbers: list[int] = []
        at = start.start() if start else len(rest)
        while found := _NUMBERED.match(rest, at):
            numbers.append(int(found[1]))
            at = found.end()
        if numbers and rest[at:]:
            order[name] = (tuple(numbers), rest[at:].removeprefix("_"))
    return order
