"""Damage to the small files of a run folder is noticed: config.yaml and manifest.json."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.config import Config, load_config
from modelyard.errors import ConfigError, RunError, UserError
from modelyard.run.checkpoint import Checkpoint, DamagedError, read_state, write_checkpoint
from modelyard.run.directory import (
    RunDirectory,
    config_text,
    find_run_folder,
    open_run_folder,
    recorded_options,
    restore_config,
    run_options,
    write_config,
)
from modelyard.run.integrity import CHECKSUM, is_unchanged, with_checksum
from modelyard.run.manifest import read_manifest, write_manifest
from modelyard.run.summary import summarize


def config(**options: Any) -> Config:
    return load_config(**{"model": "mlp", "train_steps": 60, **options})


def made(folder: Path, copy: bool = True, **options: Any) -> RunDirectory:
    """A run folder with a checkpoint."""
    directory = RunDirectory(folder / "run")
    directory.create()
    write_config(directory, config(**options))
    state = {"run": "6da5", "total_steps": 60} | ({"config": recorded_options(config(**options))} if copy else {})
    write_checkpoint(directory.checkpoints, Checkpoint(20, {"w": np.zeros(1)}, {}, state))
    return directory


def flipped(whole: bytes) -> Iterator[bytes]:
    for place, byte in enumerate(whole):
        for bit in range(8):
            yield whole[:place] + bytes([byte ^ 1 << bit]) + whole[place + 1 :]


def edit(directory: RunDirectory, old: str, new: str) -> None:
    text = directory.config.read_text()
    assert old in text
    directory.config.write_text(text.replace(old, new))


# -- config.yaml ----------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_config_is_found() -> None:
    whole = with_checksum(config_text(config(hidden_units=[7], hooks="early_stop"))).encode()
    assert is_unchanged(whole.decode())
    for data in flipped(whole):
        try:
            text = data.decode()
        except UnicodeDecodeError:  # an error in itself
            continue
        assert not is_unchanged(text)


def test_a_config_that_is_cut_anywhere_is_found(tmp_path: Path) -> None:
    directory = made(tmp_path)
    whole = directory.config.read_text()
    assert run_options(directory)["train_steps"] == 60
    for end in range(len(with_checksum("")) + 1, len(whole)):
        assert not is_unchanged(whole[:end])
    ends = [end for end, letter in enumerate(whole) if letter == "\n"]
    for end in [0, 10, *ends[:4], *ends[4:-1:20]]:
        directory.config.write_text(whole[: end + 1])
        with pytest.raises(ConfigError, match="edited, cut or damaged"):
            run_options(directory)


def test_an_edited_config_is_explained(tmp_path: Path) -> None:
    directory = made(tmp_path)
    edit(directory, "train_steps: 60\n", "train_steps: 200\n")
    edit(directory, "random_seed: 0\n", "")
    with pytest.raises(ConfigError) as caught:
        open_run_folder(directory.path)
    text = str(caught.value)
    for words in (
        f"{directory.config}: train_steps: is 200; 60 in checkpoints/step-00000020.",
        f"{directory.config}: random_seed: is missing; 0 in checkpoints/step-00000020.",
        f"modelyard resume {directory.path} --restore_config",
        f"modelyard resume {directory.path} --train_steps",
        "delete its lines that begin with #",
    ):
        assert words in text
    assert summarize(directory)["status"].startswith("damaged")


def test_an_edited_config_is_accepted_without_its_comments(tmp_path: Path) -> None:
    directory = made(tmp_path)
    edit(directory, "train_steps: 60\n", "train_steps: 200\n")
    lines = directory.config.read_text().splitlines(keepends=True)
    directory.config.write_text("".join(line for line in lines if not line.startswith("#")))
    assert run_options(directory)["train_steps"] == 200


def test_who_edits_a_config_on_purpose_can_compute_its_checksum_again(tmp_path: Path) -> None:
    """docs/security.md says so: checksums are not signatures."""
    directory = made(tmp_path, copy=False)
    edit(directory, "train_steps: 60\n", "train_steps: 200\n")
    lines = directory.config.read_text().splitlines(keepends=True)
    directory.config.write_text(with_checksum("".join(line for line in lines if not line.startswith("#"))))
    assert run_options(directory)["train_steps"] == 200


def test_a_damaged_config_is_restored_from_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    directory = made(tmp_path, learning_rate=0.25)
    whole = directory.config.read_text()
    later = write_checkpoint(directory.checkpoints, Checkpoint(40, {}, {}, {"config": recorded_options(config())}))
    (later / "state.json").write_text("torn")
    for damage in (whole[:500], "", "a: [", "\x00" * 10):
        directory.config.write_text(damage)
        with pytest.raises(ConfigError, match="--restore_config"):
            run_options(directory)
        restore_config(find_run_folder(directory.path))
        assert directory.config.read_text() == whole
        assert (directory.path / "damaged-config.yaml").read_text() == damage
    directory.config.unlink()
    with pytest.raises(ConfigError, match="there is no such file"):
        open_run_folder(directory.path)
    restore_config(find_run_folder(directory.path))
    assert directory.config.read_text() == whole


def test_without_a_copy_a_damaged_config_is_not_invented(tmp_path: Path) -> None:
    directory = made(tmp_path, copy=False)
    edit(directory, "train_steps: 60\n", "")
    with pytest.raises(ConfigError, match=r"Restore .*config\.yaml from a copy"):
        run_options(directory)
    with pytest.raises(RunError, match=r"no checkpoint in .* has a copy"):
        restore_config(directory)


def test_a_config_is_not_restored_under_a_running_process(tmp_path: Path) -> None:
    directory = made(tmp_path)
    with RunDirectory(directory.path), pytest.raises(RunError, match="is in use"):
        restore_config(directory)


def test_a_config_of_an_earlier_version_has_no_checksum_and_is_read(tmp_path: Path) -> None:
    directory = made(tmp_path, copy=False)
    directory.config.write_text(config_text(config(train_steps=5)))
    assert run_options(directory)["train_steps"] == 5


def test_the_config_of_a_run_may_be_edited_and_used_for_another(tmp_path: Path) -> None:
    directory = made(tmp_path)
    edit(directory, "train_steps: 60\n", "train_steps: 7\n")
    copied = tmp_path / "mine.yaml"
    copied.write_bytes(directory.config.read_bytes())
    for file in (copied, directory.config):
        assert load_config(config_file=str(file)).train_steps == 7


# -- manifest.json --------------------------------------------------------------------------------------------------


def with_manifest(folder: Path) -> RunDirectory:
    directory = made(folder)
    data = {"fingerprint": "f" * 8, "sizes": {"train": 5}}
    before: dict[str, Any] = {"run_id": "6da5", "evaluates": True, "data": {"classes": ["cat", "dog"]}}
    for step in (0, 20):
        before = write_manifest(directory, config(), data, {"engine": "x"}, step, before)
    return directory


def test_every_flipped_bit_of_a_manifest_is_found_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.run.manifest.versions", lambda: {"keras": "3"})
    monkeypatch.setattr("modelyard.run.manifest.hardware", lambda: {"cores": 2})
    monkeypatch.setattr("sys.argv", ["modelyard", "train"])
    directory = with_manifest(tmp_path)
    before, whole = read_manifest(directory), directory.manifest.read_bytes()
    found = 0
    for data in flipped(whole):
        directory.manifest.write_bytes(data)
        try:
            assert read_manifest(directory) == before
        except RunError:
            found += 1
    assert found > 6 * len(whole)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "5", '{"dataset": 3}', '{"starts": 5}', '{"starts": [5]}', '{"data": []}', '{"run_id": 1}',
        '{"starts": [{"chekcsum": "x"}]}',
        '{"startr": []}',
        '{"dataset": {"fingerprint": 1e300}}',
        '{"dataset": {"sizes": {"train": "x"}}}',
        '{"starts": [{"versions": 3}]}', '{"model": "x"}', "[" * 100_000, "\xff", '{"evaluates": 3}',
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_an_error_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    directory = made(tmp_path)
    directory.manifest.write_bytes(text.encode("latin1"))
    with pytest.raises(RunError, match=r"manifest\.json is damaged: .*Restore it from a copy, or delete it"):
        read_manifest(directory)


def test_a_manifest_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    directory = with_manifest(tmp_path)
    old = json.loads(directory.manifest.read_text())
    for start in old["starts"]:
        del start[CHECKSUM]
    directory.manifest.write_text(json.dumps(old))
    assert read_manifest(directory)["data"] == {"classes": ["cat", "dog"]}


def test_a_manifest_that_an_earlier_version_continued_is_read(tmp_path: Path) -> None:
    """It adds a start, and keeps what it does not know."""
    directory = with_manifest(tmp_path)
    continued = json.loads(directory.manifest.read_text())
    continued["starts"].append({"time": "now", "step": 40, "command": ["modelyard"]})
    continued["dataset"]["sizes"] = {"train": 6}
    directory.manifest.write_text(json.dumps(continued))
    assert read_manifest(directory)["dataset"]["sizes"] == {"train": 6}


def test_json_of_any_depth_is_read_or_refused_in_words(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, Checkpoint(20, {}, {}))
    text = (path / "state.json").read_text().rstrip().removesuffix("}")
    limit = sys.getrecursionlimit()
    for depth in (1, *range(limit - 150, limit + 10), 100_000):
        (path / "state.json").write_text(f'{text}, "deep": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(DamagedError):
            read_state(path)


def test_a_folder_in_place_of_a_file_is_explained(tmp_path: Path) -> None:
    directory = with_manifest(tmp_path)
    for file in (directory.manifest, directory.config):
        file.unlink()
        file.mkdir()
    with pytest.raises(RunError, match=r"manifest\.json.*(is a folder|Is a directory)"):
        read_manifest(directory)
    with pytest.raises(UserError, match=r"is not a run folder|is a folder|Is a directory"):
        open_run_folder(directory.path)


def test_a_run_that_can_not_be_read_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = made(tmp_path / "a"), made(tmp_path / "b")

    def denied(self: Path, *arguments: Any, **more: Any) -> Any:
        if self == one.checkpoints:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, *arguments, **more)

    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", denied)
    assert (
        summarize(one)["status"] == f"damaged: can't read {one.checkpoints}: Permission denied. Check its permissions."
    )
    assert summarize(other)["step"] == 20
