"""Which weights of a file a model takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelyard.errors import CheckpointError
from modelyard.run.weights.match import NamedWeights, match

MODEL = {
    "standardize/mean": (3,),
    "conv1/kernel": (3, 3, 3, 8),
    "conv1/bias": (8,),
    "norm1/gamma": (8,),
    "norm1/beta": (8,),
    "norm1/moving_mean": (8,),
    "norm1/moving_variance": (8,),
    "logits/kernel": (8, 10),
    "logits/bias": (10,),
}


def named(shapes: dict[str, tuple[int, ...]], **known: Any) -> NamedWeights:
    """Arrays of these shapes, each with numbers of its own."""
    arrays = {name: np.full(shape, number, np.float32) for number, (name, shape) in enumerate(shapes.items())}
    return NamedWeights(arrays, **known)


def numbers(model: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same weights as a file has them that knows only numbers: conv1/0."""
    seen: dict[str, int] = {}
    found = {}
    for name, shape in model.items():
        layer = name.rpartition("/")[0]
        found[f"{layer}/{seen.setdefault(layer, 0)}"] = shape
        seen[layer] += 1
    return found


def in_order(model: dict[str, tuple[int, ...]]) -> NamedWeights:
    """The same weights under names that say nothing, in the order of their layers."""
    layers = list(dict.fromkeys(name.rpartition("/")[0] for name in model))
    order = {}
    for name in model:
        layer, _, leaf = name.rpartition("/")
        order[f"strange-{layers.index(layer)}-{leaf}"] = ((layers.index(layer),), leaf)
    return named(dict(zip(order, model.values(), strict=True)), order=order)


def test_every_weight_is_accounted_for() -> None:
    file = named({**MODEL, "logits/kernel": (8, 1000), "logits/bias": (1000,), "extra/kernel": (2,)})
    del file["conv1/bias"]
    found = match(file, MODEL, exclude=["norm1/*"])
    assert set(found.loaded) == {"standardize/mean", "conv1/kernel"}
    assert found.skipped == ("norm1/gamma", "norm1/beta", "norm1/moving_mean", "norm1/moving_variance")
    assert found.missing == ("conv1/bias",)
    assert found.wrong_shape == {"logits/kernel": ((8, 1000), (8, 10)), "logits/bias": ((1000,), (10,))}
    assert found.unused == ("extra/kernel",)


def test_strict_lists_what_is_missing_and_of_another_shape() -> None:
    file = named({**MODEL, "logits/kernel": (8, 1000)})
    del file["conv1/bias"]
    with pytest.raises(CheckpointError, match=r"missing in the file: conv1/bias; .*logits/kernel \(8×1000 in the file"):
        match(file, MODEL, strict=True)
    assert "conv1/bias" not in match(file, MODEL, strict=True, exclude=["logits/*", "conv1/bias"]).loaded
    assert len(match(named(MODEL), MODEL, strict=True).loaded) == len(MODEL)


def test_include_takes_only_these_and_a_pattern_for_nothing_is_an_error() -> None:
    assert list(match(named(MODEL), MODEL, include=["conv?/*"]).loaded) == ["conv1/kernel", "conv1/bias"]
    with pytest.raises(CheckpointError, match=r"checkpoint_include: 'conv1/kernl' matches no weight.*conv1/kernel"):
        match(named(MODEL), MODEL, include=["conv1/kernl"])
    with pytest.raises(CheckpointError, match="checkpoint_exclude: 'head"):
        match(named(MODEL), MODEL, exclude=["head/*"])
    with pytest.raises(CheckpointError, match="leave no weight"):
        match(named(MODEL), MODEL, include=["conv1/*"], exclude=["*"])


def test_renames_are_regular_expressions_one_after_the_other() -> None:
    file = named({f"net/{name.replace('kernel', 'w')}": shape for name, shape in MODEL.items()})
    found = match(file, MODEL, rename=["^net/=", r"/w$=/kernel"], strict=True)
    assert found.sources["conv1/kernel"] == "net/conv1/w"
    with pytest.raises(CheckpointError, match=r"'\^nett/=' changes no name of the file. It has: net/standardize/mean"):
        match(file, MODEL, rename=["^nett/="])


def test_the_name_of_a_model_around_the_layers_does_not_matter() -> None:
    outer = {f"resnet/{name}": shape for name, shape in MODEL.items()}
    assert len(match(named(outer), MODEL, strict=True).loaded) == len(MODEL)
    assert len(match(named(MODEL), outer, strict=True).loaded) == len(MODEL)
    assert len(match(named(numbers(outer)), MODEL, strict=True).loaded) == len(MODEL)


def test_of_two_that_could_be_meant_none_is_taken() -> None:
    file = named({"teacher/conv1/kernel": (3, 3, 3, 8), "student/conv1/kernel": (3, 3, 3, 8), "logits/bias": (10,)})
    found = match(file, MODEL)
    assert list(found.loaded) == ["logits/bias"]
    assert set(found.unused) == {"teacher/conv1/kernel", "student/conv1/kernel"}
    exact = match(named({"teacher/conv1/kernel": (3, 3, 3, 8), "conv1/kernel": (3, 3, 3, 8)}), MODEL)
    assert exact.sources == {"conv1/kernel": "conv1/kernel"}


def test_numbers_count_only_in_layers_with_as_many_weights() -> None:
    file = named(numbers(MODEL))
    assert match(file, MODEL, strict=True).sources["norm1/moving_mean"] == "norm1/2"
    without_scale = {name: shape for name, shape in MODEL.items() if name != "norm1/gamma"}
    found = match(file, without_scale)
    assert found.missing == ("norm1/beta", "norm1/moving_mean", "norm1/moving_variance")
    assert "conv1/kernel" in found.loaded


def test_names_of_keras_2_and_slim_are_known() -> None:
    file = named({"conv1/depthwise_kernel": (3, 3, 3, 8), "conv1/biases": (8,), "logits/weights": (8, 10)})
    assert set(match(file, MODEL).loaded) == {"conv1/kernel", "conv1/bias", "logits/kernel"}


def test_order_finds_layers_under_other_names() -> None:
    assert len(match(in_order(MODEL), MODEL, strict=True).loaded) == len(MODEL)
    bare = {name: shape for name, shape in MODEL.items() if not name.startswith("standardize")}
    assert match(in_order(bare), MODEL).missing == ("standardize/mean",)
    other_classes = {**MODEL, "logits/kernel": (8, 100), "logits/bias": (100,)}
    assert set(match(in_order(other_classes), MODEL).wrong_shape) == {"logits/kernel", "logits/bias"}


def test_order_is_no_guess_where_layers_differ() -> None:
    other = {**MODEL, "conv1/kernel": (5, 5, 3, 8)}
    with pytest.raises(CheckpointError, match="no weight of the file has the name"):
        match(in_order(other), MODEL)


def paths_of(model: dict[str, tuple[int, ...]], prefix: str = "layers/") -> dict[str, str]:
    classes = {"standardize": "standardize", "conv1": "conv2d", "norm1": "batch_normalization", "logits": "dense"}
    return {
        f"{prefix}{classes[layer]}/vars/{number}": name
        for name, (layer, number) in zip(model, (n.split("/") for n in numbers(model)), strict=True)
    }


@pytest.mark.parametrize(("there", "here"), [("", ""), ("layers/functional/", ""), ("", "layers/functional/")])
def test_paths_find_layers_of_a_class_inside_and_outside_of_another_model(there: str, here: str) -> None:
    file = named({f"x{number}": shape for number, shape in enumerate(MODEL.values())})
    file.paths = dict(zip(file, paths_of(MODEL, f"{there}layers/"), strict=True))
    found = match(file, MODEL, paths=paths_of(MODEL, f"{here}layers/"), strict=True)
    assert found.sources["norm1/gamma"] == "x3"


def test_paths_are_no_guess_where_two_layers_differ() -> None:
    shapes = {**MODEL, "conv1/kernel": (5, 5, 3, 8), "logits/kernel": (9, 10)}
    file = named({f"x{number}": shape for number, shape in enumerate(shapes.values())})
    file.paths = dict(zip(file, paths_of(MODEL), strict=True))
    with pytest.raises(CheckpointError, match="no weight of the file"):
        match(file, MODEL, paths=paths_of(MODEL))


def test_own_names_go_before_paths() -> None:
    """Two convolutions in another order have the same paths, but not the same layers."""
    model = {"a/kernel": (3, 3), "b/kernel": (3, 3)}
    file = named({"b/0": (3, 3), "a/0": (3, 3)}, paths={"b/0": "layers/c/vars/0", "a/0": "layers/c_1/vars/0"})
    paths = {"layers/c/vars/0": "a/kernel", "layers/c_1/vars/0": "b/kernel"}
    assert match(file, model, paths=paths).sources == {"a/kernel": "a/0", "b/kernel": "b/0"}


def test_a_file_of_which_nothing_fits_shows_the_closest_names() -> None:
    with pytest.raises(CheckpointError, match=r"The closest \(model ~ file\): .*conv1/kernel ~ convolution1/kernels"):
        match(named({"convolution1/kernels": (1,), "zzz": (1,)}), MODEL)
    with pytest.raises(CheckpointError, match="of another shape: conv1/bias"):
        match(named({"conv1/bias": (9,)}), MODEL)
    with pytest.raises(CheckpointError, match="no weights in the file"):
        match({}, MODEL)
