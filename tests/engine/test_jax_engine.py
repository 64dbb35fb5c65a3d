"""What only the JAX engine does: many steps in one program, divided parameters, its own errors and cache."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import Make, distance
from modelyard.data.pipeline import RESIDENT_BYTES
from modelyard.errors import TrainingError, UserError
from modelyard.system.machine import available_memory

pytestmark = pytest.mark.jax_only("it is about JAX")
FLOAT64: dict[str, Any] = {"precision": "float64", "optimizer": "sgd", "learning_rate": 0.05}
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345678 bytes."


@pytest.fixture
def like_an_accelerator(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compiled together, as they are where a loop costs nothing."""
    from modelyard.engine.jax import JaxEngine

    begin = JaxEngine.__init__

    def begun(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        self.on_cpu = False

    monkeypatch.setattr(JaxEngine, "__init__", begun)


# -- many steps in one program --------------------------------------------------------------------------------------


def test_steps_in_one_program_are_those_that_run_one_by_one(make: Make) -> None:
    options = {**FLOAT64, "ema_decay": 0.9, "augment": "flip_left_right"}
    single, together = (make(**options) for _ in range(2))
    together.on_cpu = False  # type: ignore[attr-defined]
    assert single.prepare([8, 16]) > 0
    assert together.prepare([8, 16], ["test"]) > 0
    assert (single.steps_per_call, together.steps_per_call) == (1, 8)
    one, many = (engine.train(3, 21) for engine in (single, together))  # two programs of eight steps, and five of one
    programs = {name for name in together._programs if name.startswith("resident")}  # type: ignore[attr-defined]
    assert programs == {"resident 8", "resident 1"}, "none for the five that are left"
    assert list(one) == list(many) == ["loss", "accuracy", "learning_rate"]
    for name, values in many.items():
        assert values.shape == (21,)
        np.testing.assert_allclose(values, one[name], rtol=1e-9)
    assert distance(single.state(), together.state()) < 1e-9
    assert together.evaluate("test") == pytest.approx(single.evaluate("test"), rel=1e-9)


def test_resident_data_is_in_the_memory_of_the_host_only_until_it_is_on_a_gpu(make: Make) -> None:
    plain, as_on_gpu = (make(model="mlp", resident="always") for _ in range(2))
    as_on_gpu.on_cpu = False  # type: ignore[attr-defined]
    for engine in (plain, as_on_gpu):
        engine.prepare([4])
    assert ("train" in plain.pipeline._resident, "train" in as_on_gpu.pipeline._resident) == (True, False)
    np.testing.assert_allclose(as_on_gpu.train(0, 4)["loss"], plain.train(0, 4)["loss"], rtol=1e-5)
    as_on_gpu.prepare([8])
    assert "train" not in as_on_gpu.pipeline._resident, "it is not read again"
    assert as_on_gpu.train(4, 8)["loss"].shape == (8,)


def test_a_state_that_is_copied_as_one_array_is_the_same(make: Make) -> None:
    engine = make(model="simple_cnn", optimizer="adam", ema_decay=0.9)
    engine.train(0, 2)
    one_by_one = engine.state()
    engine.on_cpu = False  # type: ignore[attr-defined]
    together = engine.state()
    assert "state" in engine._programs  # type: ignore[attr-defined]
    for kind in ("weights", "optimizer"):
        mine, other = getattr(together, kind), getattr(one_by_one, kind)
        assert list(mine) == list(other)
        for name, value in mine.items():
            assert value.dtype == other[name].dtype
            np.testing.assert_array_equal(value, other[name])


@pytest.mark.parametrize("pieces", [1, 2])
def test_streamed_batches_in_one_program_are_those_that_run_one_by_one(make: Make, pieces: int) -> None:
    options = {**FLOAT64, "resident": "never", "gradient_accumulation": pieces, "augment": "flip_left_right"}
    single, together = (make(**options) for _ in range(2))
    together.on_cpu = False  # type: ignore[attr-defined]
    for engine in (single, together):
        engine.prepare([8, 16])
    assert (single.steps_per_call, together.steps_per_call) == (1, 8)
    one, many = (engine.train(3, 21) for engine in (single, together))
    programs = {name for name in together._programs if name.startswith("streamed")}  # type: ignore[attr-defined]
    assert programs == {"streamed 8", "streamed 1"}
    for name, values in many.items():
        np.testing.assert_allclose(values, one[name], rtol=1e-9)
    assert distance(single.state(), together.state()) < 1e-9


@pytest.mark.parametrize("step", [0, 78])
def test_streamed_batches_of_one_program_lie_side_by_side_so_that_none_is_left_over(make: Make, step: int) -> None:
    engine: Any = make(model="mlp", resident="never", train_batch_size=16, train_steps=780)
    engine.on_cpu = False
    engine.prepare([39, 390], step=step)
    assert engine.steps_per_call == 39
    while step < 780:
        step += len(engine.train(step, min(390, 780 - step))["loss"])
    assert [name for name in engine._programs if name.startswith("streamed")] == ["streamed 39"]


def test_a_run_that_goes_on_between_two_programs_compiles_single_steps_at_once(make: Make) -> None:
    engine: Any = make(model="mlp")
    engine.on_cpu = False
    engine.prepare([8, 16], step=3)
    assert {"resident 8", "resident 1"} <= set(engine._programs)


def test_an_error_of_a_batch_that_is_copied_ahead_is_raised_at_its_own_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model="mlp", resident="never", train_steps=20)
    read = engine.pipeline.reader.read

    def broken(request: Any, out: Any) -> None:
        if request.batch == 5:
            raise OSError("batch 5")
        read(request, out)

    monkeypatch.setattr(engine.pipeline.reader, "read", broken)
    assert engine.train(0, 5)["loss"].shape == (5,)
    for _ in range(2):
        with pytest.raises(OSError, match="batch 5"):
            engine.train(5, 1)
    monkeypatch.undo()
    assert engine.train(5, 3)["loss"].shape == (3,)
    assert engine.train(2, 1)["loss"].shape == (1,), "another step than the one that was copied ahead"
    assert engine.train(19, 1)["loss"].shape == (1,)
    assert engine._next_batches is None, "there is no step after the last"  # type: ignore[attr-defined]


def test_large_streamed_batches_are_trained_on_one_by_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.engine import jax

    engine = make(model="mlp", resident="never", train_batch_size=100)
    engine.on_cpu = False  # type: ignore[attr-defined]
    batch = 100 * sum(feature.nbytes for feature in engine.pipeline.features.values())
    for limit, steps in ((batch - 1, 1), (4 * batch, 4)):
        monkeypatch.setattr(jax, "_STREAMED_BYTES", limit)
        engine.prepare([8, 16])
        assert engine.steps_per_call == steps


def test_steps_that_are_left_over_are_compiled_before_the_clock_runs(make: Make) -> None:
    engine = make(model="mlp")
    engine.on_cpu = False  # type: ignore[attr-defined]
    engine.prepare([97, 97], ["test"])
    before = set(engine._programs)  # type: ignore[attr-defined]
    assert engine.train(0, 97)["loss"].shape == (97,)
    assert set(engine._programs) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("periods", "steps"),
    [
        ([1000, 100], 50),
        ([640, 64, 1280], 64),
        ([101, 37], 33),  # three and one, with two and four steps left over
        ([1954], 63),  # one step is left over
        ([5], 5),
        ([1], 1),
        ([40.47, 100], 20),
        ([300, 7.5], 7),
    ],
)
def test_as_many_steps_go_together_as_divide_the_periods_of_the_run(
    two_devices: None, periods: list[float], steps: int
) -> None:
    from modelyard.engine.jax import _choose_steps_per_call

    assert _choose_steps_per_call(periods, 64) == steps


@pytest.mark.usefixtures("like_an_accelerator")
def test_a_loss_that_is_no_number_is_told_with_its_own_step_of_many(make: Make) -> None:
    options = {"model": "mlp", "optimizer": "sgd", "learning_rate": 1e6, "warmup": "1000 steps", "train_batch_size": 32}
    losses = make(**options, train_steps=64).train(0, 32)["loss"]
    first = int(np.flatnonzero(~np.isfinite(losses))[0])
    assert 0 < first < 31, "neither the first nor the last of its program"
    with pytest.raises(TrainingError, match=rf"the loss became (nan|inf) at step {first + 1}\."):
        modelyard.train(**options, dataset="digits", engine="jax", train_steps=64, log_every=32, model_dir="run")
    log = next(Path("run/runlogs").glob("*.log")).read_text()
    assert "32 steps at a time" in log


# -- several devices ------------------------------------------------------------------------------------------------


def test_one_two_and_four_devices_learn_the_same(make: Make) -> None:
    options = {**FLOAT64, "model": "mlp", "clip_norm": 0.5, "gradient_accumulation": 2}
    options["augment"] = "pad_and_crop(padding=1), flip_left_right, mixup(alpha=0.3)"
    one, *others = (make(cpu_devices=n, **options) for n in (1, 2, 4))
    expected = one.train(0, 20)
    for engine in others:
        found = engine.train(0, 20)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-9)
        assert distance(one.state(), engine.state()) < 1e-9


@pytest.mark.parametrize("devices", [2, 4])
def test_divided_parameters_learn_the_same_and_are_really_divided(make: Make, devices: int) -> None:
    options = {"model": "mlp", "hidden_units": [1024], "precision": "float64", "clip_norm": 1.0, "ema_decay": 0.9}
    whole, divided = make(**options), make(cpu_devices=devices, shard_parameters=True, **options)
    losses = [engine.train(0, 8)["loss"] for engine in (whole, divided)]
    np.testing.assert_allclose(*losses, rtol=1e-9)
    assert distance(whole.state(), divided.state()) < 1e-9
    for engine in (whole, divided):  # whole arrays come out and go in
        engine.load(engine.state())
        engine.train(8, 2)
    assert distance(whole.state(), divided.state()) < 1e-9
    assert whole.evaluate("test") == pytest.approx(divided.evaluate("test"), rel=1e-9)
    state = divided._state  # type: ignore[attr-defined]
    large = [a for part in state for a in part if a.shape == (64, 1024)]
    assert len(large) == 4, "the kernel, two moments, an average"
    for array in large:
        assert {shard.data.shape for shard in array.addressable_shards} == {(64, 1024 // devices)}
        assert len({shard.device for shard in array.addressable_shards}) == devices
    small = [a for part in state for a in part if a.shape == (1024,)]
    assert {shard.data.shape for array in small for shard in array.addressable_shards} == {(1024,)}


def test_one_device_has_nothing_to_divide(make: Make) -> None:
    with pytest.raises(UserError, match=r"shard_parameters shards .* but there is one"):
        make(shard_parameters=True)


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["compiling", "training", "fetching", "evaluating"])
def test_memory_that_runs_out_is_told_with_the_batch_size_and_what_to_do(make: Make, where: str) -> None:
    import jax

    class Fetched:
        """A result that turns out to be none when it is looked at."""

        def __array__(self, *_: Any, **__: Any) -> Any:
            return fail()

    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(FULL)

    engine: Any = make(model="mlp", eval_batch_size=77)
    if where == "compiling":
        engine._lowered = fail
    else:
        engine.prepare([10], ["test"])
        table = SimpleNamespace(values=Fetched(), names=())
        given = fail if where != "fetching" else lambda state, *_: (state, table)
        engine._programs = dict.fromkeys(engine._programs, given)
        if where == "evaluating":
            engine._programs = dict.fromkeys(engine._programs, lambda *_: ({"loss": Fetched()}, {}))
    with pytest.raises(TrainingError) as caught:
        engine.evaluate("test") if where == "evaluating" else engine.train(0, 10)
    for text in ("train_batch_size 32", "eval_batch_size 77", "gradient_accumulation", "bfloat16", "resident never"):
        assert text in str(caught.value)


def test_data_may_have_half_of_what_the_fullest_device_has_free(make: Make) -> None:
    def device(**numbers: int) -> Any:
        return SimpleNamespace(memory_stats=lambda: numbers or None)

    def memory(*devices: Any) -> int:
        engine.layout = SimpleNamespace(mesh=SimpleNamespace(local_devices=devices))
        found: int = engine.data_memory()
        return found

    engine: Any = make(model="mlp")
    assert engine.data_memory() == memory(device()) == RESIDENT_BYTES
    two = [device(bytes_limit=100 << 30, bytes_in_use=20 << 30), device(bytes_limit=100 << 30, bytes_in_use=40 << 30)]
    assert memory(*two) == 30 << 30
    assert memory(*two, device()) == RESIDENT_BYTES


@pytest.mark.slow
def test_examples_beyond_two_billion_numbers_are_found(make: Make) -> None:
    size = 180_000
    if available_memory() < 12 << 30:
        pytest.skip("12 GiB of memory are needed")
    images = np.empty((size, 64, 64, 3), np.uint8)
    images[...] = (np.arange(size) % 251).astype(np.uint8)[:, None, None, None]
    assert images.size > 1 << 31
    data = modelyard.ArrayDataset({"train": {"image": images, "label": np.arange(size) % 10}})
    engine = make(data, model="watcher", resident="always", train_batch_size=32)
    engine.prepare([8])
    found = engine.train(0, 8)["pixels"]
    expected = (engine.pipeline.rows(0, 8) % 251).mean(axis=1) * 64 * 64 * 3
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_another_error_of_xla_stays_what_it_is(make: Make) -> None:
    import jax

    engine: Any = make(model="mlp")
    engine.prepare([10])

    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    engine._programs = dict.fromkeys(engine._programs, fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        engine.train(0, 10)


# -- compiled programs ----------------------------------------------------------------------------------------------


def test_the_programs_do_not_depend_on_the_seed(make: Make) -> None:
    options = {"model": "tiny_dropout", "augment": "pad_and_crop(padding=1), cutout(size=2), mixup(alpha=0.3)"}
    texts = []
    for seed in (5, 6):
        engine: Any = make(random_seed=seed, **options)
        engine._compile = lambda *_: None
        engine.prepare([10])  # brings the data to the device
        batch = engine._placed(*next(iter(engine.evaluation_batches("test"))))
        lowered = (
            engine._lowered("resident", 1, 0),
            engine._lowered("streamed", 1, 0),
            engine._lowered_for("evaluate", *batch),
        )
        texts.append([program.as_text() for program in lowered])
    assert texts[0] == texts[1]


@pytest.fixture
def own_cache(two_devices: None, tmp_path: Path) -> Iterator[Path]:
    """An empty cache for compiled programs."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    from modelyard.engine import jax_cache

    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    options = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{name}" for name in names[1:])]
    before = {name: getattr(jax.config, name) for name in options}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax_cache.use_cache(modelyard.load_config(cache_dir=str(tmp_path / "cache")))
    yield Path(jax.config.jax_compilation_cache_dir)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_program_in_the_cache_is_compiled_again_and_then_found(
    own_cache: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    import jax

    from modelyard.engine.jax_cache import compile_all, counted_compilations

    def compiled() -> dict[str, int]:
        def a_program_of_this_test(x: Any) -> Any:
            return x * (3 + size)

        shape = jax.ShapeDtypeStruct((4,), np.float32)
        jax.clear_caches()
        with counted_compilations() as counts, warnings.catch_warnings():
            warnings.simplefilter("error")
            (program,) = compile_all([jax.jit(a_program_of_this_test).lower(shape)])
        np.testing.assert_array_equal(program(np.ones(4, np.float32)), np.full(4, 3 + size, np.float32))
        return counts

    caplog.set_level(logging.WARNING, "modelyard")
    assert compiled() == {"found": 0, "compiled": 1}
    assert compiled() == {"found": 1, "compiled": 0}
    (entry,) = own_cache.glob("jit_a_program_of_this_test-*")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:size])
    (own_cache / "jit_another-1-cache").write_bytes(b"not of this name")
    assert compiled() == {"found": 0, "compiled": 1}
    assert [message for message in caplog.messages if re.search("cache .* is damaged and is compiled again", message)]
    assert len(entry.read_bytes()) > 100
    assert (own_cache / "jit_another-1-cache").exists()
    assert compiled() == {"found": 1, "compiled": 0}
    assert len(caplog.messages) == 1


def test_a_cache_that_the_user_set_up_is_left_alone(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.engine import jax_cache

    monkeypatch.setattr(jax_cache, "_own", set())
    (own_cache / "jit_f-1-cache").touch()
    text = "Error reading persistent compilation cache entry for 'jit_f': zlib.error"
    with pytest.warns(UserWarning, match="jit_f"), jax_cache._repaired_cache():
        warnings.warn(text, stacklevel=1)
    assert (own_cache / "jit_f-1-cache").exists()


def test_options_that_a_version_of_xla_does_not_know_do_not_keep_it_from_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    from modelyard.engine import jax_cache

    unknown = {"xla_gpu_of_another_version": True}, {"xla_gpu_enable_command_buffer": "FUSION,OF_ANOTHER_VERSION"}
    for number, options in enumerate(unknown, start=2):
        monkeypatch.setattr(jax_cache, "_compiler_options", lambda *_, options=options: options)
        (program,) = jax_cache.compile_all([jax.jit(lambda x, number=number: x * number).lower(1.5)])
        assert float(program(1.5)) == 1.5 * number


def test_kernels_are_tried_out_unless_told_and_flags_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.engine import jax_cache

    assert jax_cache._compiler_options(False, 1) == {}  # on a CPU there is nothing to try
    monkeypatch.setattr(jax_cache.jax, "default_backend", lambda: "gpu")
    assert jax_cache._compiler_options(True, 8)["xla_gpu_autotune_level"] == 1
    assert jax_cache._compiler_options(False, 8) == {"xla_gpu_exclude_nondeterministic_ops": True}
    assert "WHILE" in jax_cache._compiler_options(False, 1)["xla_gpu_enable_command_buffer"].split(",")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_enable_command_buffer=")
    assert list(jax_cache._compiler_options(True, 1)) == ["xla_gpu_experimental_enable_fusion_autotuner"]
