"""Checkpoints: complete or absent, with checksums, and selected by name."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.errors import CheckpointError
from modelyard.run.checkpoint import (
    FORMAT_VERSION,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Checkpoint,
    DamagedError,
    list_best,
    list_checkpoints,
    load_latest,
    prune,
    read_checkpoint,
    read_loop_state,
    select_checkpoint,
    step_of,
    write_checkpoint,
)
from modelyard.run.integrity import CHECKSUM, json_checksum
from modelyard.run.weights.read import load_weights


def checkpoint(step: int = 7, **loop_state: Any) -> Checkpoint:
    weights = {
        "conv/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "half": np.array([1.5, -2.0], np.float16),
        "double": np.array([1 / 3, 1e-300, np.inf, np.nan]),
        "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "every second": np.arange(10, dtype=np.float32)[::2],
        "big-endian": np.arange(3, dtype=">f8"),
        "empty": np.zeros((0, 3), np.float32),
    }
    optimizer = {
        "iterations": np.array(2**40 + step, np.int64),
        "scalar": np.array(0.1, np.float64),
        "seed": np.array([1, 2**32 - 1], np.uint32),
        "flag": np.array(True),
    }
    return Checkpoint(step, weights, optimizer, loop_state)


def written(folder: Path, *steps: int) -> list[Path]:
    return [write_checkpoint(folder, checkpoint(step)) for step in steps]


def change(path: Path, **values: Any) -> None:
    """Changes values of state.json and its checksum, as another version of Modelyard might write them."""
    state = json.loads((path / STATE).read_text()) | values
    (path / STATE).write_text(json.dumps(state | {CHECKSUM: json_checksum(state)}))


# -- write and read -------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    given = checkpoint(7, window={"loss": 0.1}, stopped=None, hooks={"early_stop": [1, 2]})
    path = write_checkpoint(tmp_path, given)
    assert path == tmp_path / "step-00000007"
    read = read_checkpoint(path)
    assert (read.step, read.loop_state) == (7, given.loop_state)
    for mine, theirs in ((given.weights, read.weights), (given.optimizer, read.optimizer)):
        assert set(mine) == set(theirs)
        for name, array in mine.items():
            assert theirs[name].shape == array.shape, name
            assert theirs[name].dtype == array.dtype.newbyteorder("="), name
            assert theirs[name].tobytes() == np.ascontiguousarray(array.astype(theirs[name].dtype)).tobytes(), name


def test_floats_in_memory_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-308, 123456789.123456789]
    assert read_checkpoint(write_checkpoint(tmp_path, checkpoint(values=values))).loop_state["values"] == values


def test_a_checkpoint_may_have_no_optimizer(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, Checkpoint(0, {"w": np.zeros(2)}, {}))
    read = read_checkpoint(path)
    assert (read.optimizer, read.loop_state) == ({}, {})


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint(7, turn=1))
    write_checkpoint(tmp_path, checkpoint(7, turn=2))
    assert read_loop_state(tmp_path / "step-00000007") == {"turn": 2}
    assert len(list(tmp_path.iterdir())) == 1


def test_checkpoints_are_listed_by_step_and_other_files_ignored(tmp_path: Path) -> None:
    written(tmp_path, 20, 3, 123_456_789)
    for name in ("step-5", "damaged-step-00000009", ".partial-abc", "notes"):
        (tmp_path / name).mkdir()
    assert list(list_checkpoints(tmp_path)) == [3, 20, 123_456_789]
    assert list_checkpoints(tmp_path / "nowhere") == {}
    assert step_of(tmp_path / "step-123456789") == 123_456_789
    with pytest.raises(CheckpointError, match="notes is not a checkpoint folder"):
        step_of(tmp_path / "notes")


# -- damage ---------------------------------------------------------------------------------------------------------


def small(folder: Path, step: int = 7) -> Path:
    """A checkpoint with everything that a run writes into one, in few bytes."""
    state = {
        "run": "6da5",
        "config": {"model": "mlp", "train_steps": 60, "hooks": ["early_stop"]},
        "window": {"loss": 2.5},
        "window_steps": 3,
        "evaluated_step": None,
        "hooks": {"metrics": {"offset": 1156}},
        "best": {"metric": "accuracy", "mode": "max", "value": 0.25, "step": step},
    }
    return write_checkpoint(folder, Checkpoint(step, {"w": np.float32([1, 2])}, {"m": np.float32([3])}, state))


def flip_every_bit(path: Path) -> Iterator[None]:
    """Flips each bit of the file in turn."""
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for place, byte in enumerate(whole):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                yield
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path, name: str) -> None:
    path = small(tmp_path)
    before = read_checkpoint(path)
    found, others = 0, []
    for _ in flip_every_bit(path / name):
        try:
            others.append(read_checkpoint(path))
        except DamagedError:  # it would be set aside
            found += 1
    assert found > 7.5 * (path / name).stat().st_size
    for read in others:  # such as another white space
        assert name == STATE
        assert (read.step, read.loop_state) == (before.step, before.loop_state)
        assert all(read.weights[key].tobytes() == before.weights[key].tobytes() for key in before.weights)
        assert all(read.optimizer[key].tobytes() == before.optimizer[key].tobytes() for key in before.optimizer)


def test_no_flipped_bit_of_a_state_changes_which_model_is_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What reads state.json alone notices damage, too."""
    caplog.set_level(logging.CRITICAL)
    first, second = best(tmp_path, 1, 0.5, "max"), best(tmp_path, 2, 0.25, "max")
    for _ in flip_every_bit(second / STATE):
        assert list_best(tmp_path) in ([first], [first, second])


def test_the_first_bit_that_matters_was_a_step(tmp_path: Path) -> None:
    """Run folders were resumed at another step, with status 0."""
    path = small(tmp_path)
    text = (path / STATE).read_text()
    (path / STATE).write_text(text.replace('"step": 7', '"step": 6'))
    with pytest.raises(DamagedError, match="does not have the checksum that it was written with"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", [STATE, "weights.safetensors", "optimizer.safetensors"])
def test_a_file_of_a_checkpoint_that_is_not_a_regular_file_is_damaged(tmp_path: Path, name: str) -> None:
    """A link to /dev/zero filled the memory, and a pipe was waited for."""
    path = small(tmp_path)
    for make in (lambda file: file.symlink_to("/dev/full"), os.mkfifo):  # it has no end
        (path / name).unlink()
        make(path / name)
        with pytest.raises(DamagedError, match=f"{name} is a .*; only regular files are read"):
            read_checkpoint(path)


def test_a_damaged_format_version_is_not_taken_for_a_newer_one(tmp_path: Path) -> None:
    path = small(tmp_path)
    text = (path / STATE).read_text()
    (path / STATE).write_text(text.replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(DamagedError):
        read_checkpoint(path)


def test_a_checkpoint_in_the_folder_of_another_step_is_damaged(tmp_path: Path) -> None:
    for state_has_checksum in (True, False):
        path = small(tmp_path)
        if not state_has_checksum:
            as_before_checksums(path)
        moved = path.replace(tmp_path / "step-00000008")
        with pytest.raises(DamagedError, match=r"its step is 7, that of its folder is 8"):
            read_checkpoint(moved)
        shutil.rmtree(moved)


def as_before_checksums(path: Path) -> None:
    """Makes state.json what an earlier Modelyard wrote."""
    state = json.loads((path / STATE).read_text())
    del state[CHECKSUM], state["memory"]["config"]
    (path / STATE).write_text(json.dumps(state, indent=1))


def test_checkpoints_of_earlier_versions_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    path = small(tmp_path)
    before = read_checkpoint(path)
    as_before_checksums(path)
    assert set(json.loads((path / STATE).read_text())) == {"format_version", "step", "sha256", "memory"}
    read = read_checkpoint(path)
    assert (read.step, list(read.weights), read.loop_state["hooks"]) == (7, ["w"], before.loop_state["hooks"])


@pytest.mark.parametrize("renamed", ["checksun", "Checksum", "sum"])
def test_a_checksum_that_is_renamed_does_not_make_a_checkpoint_of_an_earlier_version(
    tmp_path: Path, renamed: str
) -> None:
    path = small(tmp_path)
    text = (path / STATE).read_text()
    (path / STATE).write_text(text.replace(f'"{CHECKSUM}"', f'"{renamed}"'))
    with pytest.raises(DamagedError, match="does not have the checksum"):
        read_checkpoint(path)


def test_a_hook_may_keep_anything_that_json_can_hold(tmp_path: Path) -> None:
    odd = {"numbers": {10: "a", 9: "b"}, "nan": float("nan"), "text": "ü\ud800", "big": 2**70, "pair": (1, 2)}
    path = write_checkpoint(tmp_path, Checkpoint(3, {}, {}, {"hooks": {"mine": odd}}))
    assert read_loop_state(path)["hooks"]["mine"]["numbers"] == {"10": "a", "9": "b"}


@pytest.mark.parametrize(
    "values",
    [
        {"window": {"loss": "2"}}, {"window": []}, {"window_steps": "3"}, {"window_steps": -1}, {"seconds": "1"},
        {"seconds": None}, {"evaluated_step": "x"}, {"evaluated_step": 1.5}, {"owes_evaluation": 1},
        {"last_evaluation": {"loss": None}}, {"stopped": 3}, {"stopped_under": "x"}, {"threads": 1.5},
        {"total_steps": "60"}, {"total_steps": None}, {"hooks": []}, {"best": []}, {"best": {"value": "high"}},
        {"best": {"metric": "m", "mode": "x", "value": 1, "step": 1}}, {"run": 5}, {"config": "text"},
        {"seconds": 10**300},
    ],
)  # fmt: skip
def test_a_state_with_a_value_of_another_type_is_damaged(tmp_path: Path, values: dict[str, Any]) -> None:
    """Earlier versions wrote no checksum, so their values are checked."""
    path = small(tmp_path)
    as_before_checksums(path)
    state = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps(state | {"memory": state["memory"] | values}))
    with pytest.raises(DamagedError, match=f"its {next(iter(values))} is "):
        read_checkpoint(path)


@pytest.mark.parametrize("what", ["folder", "file for the checkpoint", "loop of links", "broken link"])
@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_something_else_where_a_file_should_be_is_set_aside(tmp_path: Path, name: str, what: str) -> None:
    first, path = small(tmp_path, 1), small(tmp_path, 2)
    if what == "file for the checkpoint":
        shutil.rmtree(path)
        path.write_text("")
    else:
        (path / name).unlink()
        if what == "folder":
            (path / name).mkdir()
        else:
            (path / name).symlink_to(name if what == "loop of links" else "nowhere")
    newest = load_latest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged-step-00000002", first.name]


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_a_file_cut_off_is_found(tmp_path: Path, name: str) -> None:
    (path,) = written(tmp_path, 1)
    whole = (path / name).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            read_checkpoint(path)


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    (path,) = written(tmp_path, 1)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "5", "{}", "null", "\xff", '{"format_version": 1}', '{"format_version": "1"}', "[" * 100_000,
        '{"format_version": true, "step": 1, "memory": {}, "sha256": {}}',
        '{"format_version": 1, "step": true, "memory": {}, "sha256": {}}',
        '{"format_version": 1, "step": -1, "memory": {}, "sha256": {}}',
        '{"format_version": 1, "step": 1e400, "memory": {}, "sha256": {}}',
        '{"format_version": 1, "step": 1, "memory": {}, "sha256": [["weights.safetensors", "x"]]}',
        '{"format_version": 1, "step": 1' + 5000 * "0" + ', "memory": {}, "sha256": {}}',
        '{"format_version": 1, "step": 1, "memory": [], "sha256": {}}',
        '{"format_version": 1, "step": 1, "memory": {}, "sha256": 3}',
        '{"format_version": 1, "step": "1", "memory": {}, "sha256": {}}',
    ],
)  # fmt: skip
def test_a_state_that_is_none_is_damaged(tmp_path: Path, text: str) -> None:
    (path,) = written(tmp_path, 1)
    (path / STATE).write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=f"{STATE} is damaged"):
        read_checkpoint(path)


def test_swapped_files_are_found(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 1)
    (path / OPTIMIZER).write_bytes((path / WEIGHTS).read_bytes())
    with pytest.raises(CheckpointError, match=f"{OPTIMIZER} is damaged"):
        read_checkpoint(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 1)
    change(path, format_version=FORMAT_VERSION + 1)
    with pytest.raises(CheckpointError, match=f"has format version {FORMAT_VERSION + 1}; .* Install a newer"):
        read_checkpoint(path)


# -- the newest that can be read ------------------------------------------------------------------------------------


def test_the_newest_is_loaded(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None
    written(tmp_path, 1, 20, 3)
    newest = load_latest(tmp_path)
    assert newest is not None
    assert newest.step == 20


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    for turn in (1, 2):
        *_, last = written(tmp_path, 1, 2, 3)
        raw = bytearray((last / WEIGHTS).read_bytes())
        raw[-1] ^= 1
        (last / WEIGHTS).write_bytes(raw)
        newest = load_latest(tmp_path)
        assert newest is not None
        assert newest.step == 2
        aside = tmp_path / ("damaged-step-00000003" + ("" if turn == 1 else "-2"))
        assert (aside / WEIGHTS).read_bytes() == raw
        assert list(list_checkpoints(tmp_path)) == [1, 2]
        assert f"set aside as {aside.name}" in caplog.text


def test_where_all_are_damaged_the_run_does_not_begin_again_unasked(tmp_path: Path) -> None:
    for path in written(tmp_path, 1, 2):
        (path / STATE).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="nothing to resume from"):
            load_latest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000001", "damaged-step-00000002"]


def test_a_checkpoint_of_a_newer_format_is_neither_damaged_nor_skipped(tmp_path: Path) -> None:
    """Going on from an older one would undo the work of the newer Modelyard."""
    *_, last = written(tmp_path, 1, 2)
    change(last, format_version=FORMAT_VERSION + 1)
    with pytest.raises(CheckpointError, match="Install a newer"):
        load_latest(tmp_path)
    assert list(list_checkpoints(tmp_path)) == [1, 2]


# -- choosing and pruning -------------------------------------------------------------------------------------------


def best(folder: Path, step: int, value: float, mode: str) -> Path:
    won = {"metric": "m", "mode": mode, "value": value, "step": step}
    return write_checkpoint(folder, checkpoint(step, best=won))


@pytest.mark.parametrize(("mode", "order"), [("max", [2, 5, 3, 1]), ("min", [1, 3, 2, 5])])
def test_the_best_is_first_and_of_equals_the_earlier(tmp_path: Path, mode: str, order: list[int]) -> None:
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.5), (5, 0.9)):
        best(tmp_path, step, value, mode)
    assert [step_of(path) for path in list_best(tmp_path)] == order


def test_of_equals_the_one_with_the_lower_loss_is_the_best(tmp_path: Path) -> None:
    for step, loss in (
        (1, {"loss": 0.3}),
        (2, {"loss": 0.2}),
        (3, {"loss": 0.2}),
        (4, {"loss": float("nan")}),
        (5, {}),
    ):
        won = {"metric": "m", "mode": "max", "value": 0.9, "step": step}
        write_checkpoint(tmp_path, checkpoint(step, best=won, metrics=loss))
    assert [step_of(path) for path in list_best(tmp_path)] == [2, 3, 1, 4, 5]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_not_a_number_is_never_best(tmp_path: Path, mode: str) -> None:
    for step, value in ((1, np.nan), (2, 0.9), (3, np.nan), (4, 0.9)):
        best(tmp_path, step, value, mode)
    assert [step_of(path) for path in list_best(tmp_path)] == [2, 4, 1, 3]


def test_best_models_that_can_not_be_read_are_left_out(tmp_path: Path) -> None:
    best(tmp_path, 1, 0.5, "max")
    (best(tmp_path, 2, 0.9, "max") / STATE).write_text("torn")
    written(tmp_path, 3)
    change(best(tmp_path, 4, 0.9, "max"), memory={"best": {"value": "high", "mode": "max"}})
    assert [step_of(path) for path in list_best(tmp_path)] == [1]


def test_a_checkpoint_is_chosen_by_name_or_step(tmp_path: Path) -> None:
    saved, bests = tmp_path / "checkpoints", tmp_path / "best"
    written(saved, 10, 20)
    best(bests, 5, 0.9, "max")
    best(bests, 20, 0.8, "max")
    assert select_checkpoint(saved, bests, "latest") == saved / "step-00000020"
    assert select_checkpoint(saved, bests, "best") == bests / "step-00000005"
    assert select_checkpoint(saved, bests, "10") == saved / "step-00000010"
    assert select_checkpoint(saved, bests, "5") == bests / "step-00000005"
    assert select_checkpoint(saved, bests, "20") == saved / "step-00000020"
    best(bests, 30, 0.7, "max")
    assert select_checkpoint(saved, bests, "latest") == bests / "step-00000030"


@pytest.mark.parametrize("which", ["11", "first", "-1", "", "²", "1.5"])
def test_an_unknown_checkpoint_is_an_error_with_those_that_exist(tmp_path: Path, which: str) -> None:
    written(tmp_path / "checkpoints", 10, 20)
    best(tmp_path / "best", 5, 0.9, "max")
    with pytest.raises(CheckpointError) as caught:
        select_checkpoint(tmp_path / "checkpoints", tmp_path / "best", which)
    assert "Steps saved: 10, 20; best: 5. Give best, latest or one of these steps." in str(caught.value)
    assert repr(which) in str(caught.value)


@pytest.mark.parametrize("which", ["best", "latest", "0"])
def test_where_nothing_is_saved_nothing_is_chosen(tmp_path: Path, which: str) -> None:
    with pytest.raises(CheckpointError, match="nothing was saved yet"):
        select_checkpoint(tmp_path / "checkpoints", tmp_path / "best", which)


@pytest.mark.parametrize(("keep", "kept"), [(1, [30]), (2, [20, 30]), (5, [1, 20, 30])])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    written(tmp_path, 30, 1, 20)
    (tmp_path / "damaged-step-00000002").mkdir()
    prune(tmp_path, keep)
    assert list(list_checkpoints(tmp_path)) == kept
    assert (tmp_path / "damaged-step-00000002").exists()
    assert len(list(tmp_path.iterdir())) == len(kept) + 1


# -- weights to start from ------------------------------------------------------------------------------------------


def test_weights_are_read_from_a_run_a_checkpoint_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("config_version: 1\n")
    (path,) = written(tmp_path / "checkpoints", 3)
    for place in (tmp_path, path, path / WEIGHTS):
        assert set(load_weights(place)) == set(checkpoint().weights)
    won = {"metric": "m", "mode": "max", "value": 1.0, "step": 2}
    write_checkpoint(tmp_path / "best", Checkpoint(2, {"best": np.ones(1)}, {}, {"best": won}))
    assert set(load_weights(tmp_path)) == {"best"}


def test_a_path_without_weights_is_explained(tmp_path: Path) -> None:
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for place, words in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "is not a run folder, a checkpoint folder, a .safetensors"),
        (tmp_path / "torn.safetensors", "is damaged or no safetensors file"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_weights(place)


def test_a_checkpoint_is_not_there_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("write_bytes", "write_text"):
        real = getattr(Path, name)

        def watching(self: Path, *arguments: Any, real: Any = real, **more: Any) -> Any:
            seen.append(list(list_checkpoints(tmp_path)))
            return real(self, *arguments, **more)

        monkeypatch.setattr(Path, name, watching)
    write_checkpoint(tmp_path, Checkpoint(7, {"w": np.zeros(3)}, {"m": np.zeros(3)}))
    assert seen == [[], [], []]
    assert list(list_checkpoints(tmp_path)) == [7]
