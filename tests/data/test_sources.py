"""A user's own files: folders, tables, arrays and records, by path or by split."""

from __future__ import annotations

import csv
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.config.durations import RunLength
from modelyard.config.schema import is_path
from modelyard.data.dataset import ArrayDataset, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.pipeline import Pipeline
from modelyard.data.records.example import encode_example
from modelyard.data.records.tfrecord import frame
from modelyard.errors import ConfigError, DataError
from photos import photo, photo_folder, save_photo


def load(dataset: str | Path, **options: Any) -> Dataset:
    return load_dataset(modelyard.load_config(model="mlp", dataset=str(dataset), **options))


def sized(dataset: str | Path, **options: Any) -> Dataset:
    return load(dataset, **{"image_size": 8, **options})


def names(dataset: Dataset, split: str) -> list[str]:
    return [dataset.name(split, i) for i in range(dataset.size(split))]


def labels(dataset: Dataset, split: str) -> list[str]:
    found = dataset.labels(split)
    assert found is not None
    return [dataset.classes[i] for i in found]


def put(*paths: Path, numbers: int = 0) -> None:
    for number, path in enumerate(paths):
        save_photo(path, numbers + number)


# -- a folder per class ---------------------------------------------------------------------------------------------


def test_a_folder_per_class_is_read_in_order_of_its_paths(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    put(root / "dog/b.png", root / "dog/a.png", root / "cat/z.png", root / "cat/deep/er/y.png", root / "cat/c.jpeg")
    made = sized(root, validation_fraction=0.01)
    every = sorted(names(made, "train") + names(made, "validation"))
    assert every == ["cat/c.jpeg", "cat/deep/er/y.png", "cat/z.png", "dog/a.png", "dog/b.png"]
    assert names(made, "train") == sorted(names(made, "train"))
    assert made.classes == ("cat", "dog")
    for split in ("train", "validation"):
        assert labels(made, split) == [name.split("/")[0] for name in names(made, split)]


def test_the_pixels_are_those_of_the_named_file(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 20, ending="png")
    made = load(root, image_size="30,34", image_fit="stretch")
    whole = photo(3, 36, 31)
    index = names(made, "train").index("cat/003.png")
    from modelyard.data.images import resize

    assert np.array_equal(made.read("train", np.array([index]))["image"][0], resize(whole, 30, 34))


@pytest.mark.parametrize("train", ["train", "Training"])
@pytest.mark.parametrize("validation", ["validation", "valid", "val", "eval", "dev", "VAL"])
@pytest.mark.parametrize("test", ["test", "Testing"])
def test_folders_of_splits_have_the_usual_spellings(tmp_path: Path, train: str, validation: str, test: str) -> None:
    root = tmp_path / "pets"
    put(
        root / train / "cat/a.png",
        root / train / "dog/b.png",
        root / validation / "cat/c.png",
        root / test / "dog/d.png",
    )
    made = sized(root)
    assert made.sizes() == {"train": 2, "validation": 1, "test": 1}
    assert names(made, "validation") == ["cat/c.png"]
    assert labels(made, "test") == ["dog"]


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "d/train/a/1.png", tmp_path / "d/val/a/2.png", tmp_path / "d/valid/a/3.png")
    with pytest.raises(DataError, match="two folders for validation: val and valid"):
        sized(tmp_path / "d")


def test_splits_without_train_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "d/val/a/2.png", tmp_path / "d/test/a/3.png")
    with pytest.raises(DataError, match="has no folder train; it has: "):
        sized(tmp_path / "d")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    put(tmp_path / "d/train/1.png", tmp_path / "d/car/2.png")
    assert sized(tmp_path / "d").classes == ("car", "train")


def test_hidden_files_and_what_is_no_image_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    put(root / "cat/a.png", root / "cat/b.png", root / "dog/c.png", root / ".git/d.png", root / "cat/.e.png")
    put(root / "cat/.hidden/f.png", root / "__MACOSX/cat/g.png")
    (root / "readme.txt").write_text("hello")
    (root / "cat/notes.txt").write_text("hello")
    (root / "cat/Thumbs.db").write_text("hello")
    made = sized(root)
    assert sorted(names(made, "train") + names(made, "validation")) == ["cat/a.png", "cat/b.png", "dog/c.png"]


def test_an_empty_class_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = photo_folder(tmp_path / "pets", 6)
    (root / "fox").mkdir()
    with caplog.at_level(logging.WARNING, "modelyard"):
        assert sized(root).classes == ("cat", "dog", "emu")
    assert re.search("fox holds no images and is left out", caplog.text)


def test_photos_of_an_unsupported_format_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "pets/fox").mkdir(parents=True)
    (tmp_path / "pets/fox/1.heic").write_bytes(b"")
    with pytest.raises(DataError, match=r"1.heic. HEIC is not supported: convert to JPEG"):
        sized(tmp_path / "pets")
    photo_folder(tmp_path / "pets", 6)
    with caplog.at_level(logging.WARNING, "modelyard"):
        assert sized(tmp_path / "pets").classes == ("cat", "dog", "emu")
    assert "fox/1.heic. HEIC is not supported: convert to JPEG" in caplog.text


def test_classes_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "d/train/Cat/1.png", tmp_path / "d/val/cat/2.png")
    with pytest.raises(DataError, match="classes 'Cat' and 'cat' differ in case only"):
        sized(tmp_path / "d")


def test_a_class_with_one_example_stays_in_train(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 20, ("cat", "dog"))
    put(root / "yak/1.png")
    made = sized(root, validation_fraction=0.5)
    assert "yak" in labels(made, "train")
    assert "yak" not in labels(made, "validation")
    assert made.sizes() == {"train": 11, "validation": 10}
    together = sorted(names(made, "train") + names(made, "validation"))
    assert len(set(together)) == 21


def test_derived_splits_keep_the_ids_of_the_whole(tmp_path: Path) -> None:
    made = sized(photo_folder(tmp_path / "pets", 20))
    ids = np.concatenate([made.read(s, np.arange(made.size(s)))["id"] for s in ("train", "validation")])
    assert sorted(ids.tolist()) == list(range(20))


def test_one_list_of_classes_serves_all_splits(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    put(root / "train/dog/1.png", root / "train/cat/2.png", root / "val/bee/3.png", root / "val/dog/4.png")
    made = sized(root)
    assert made.classes == ("bee", "cat", "dog")
    assert labels(made, "train") == ["cat", "dog"]
    assert labels(made, "validation") == ["bee", "dog"]


def test_classes_that_are_numbers_are_sorted_as_such(tmp_path: Path) -> None:
    put(*(tmp_path / "d" / str(n) / "1.png" for n in (10, 9, 0)))
    assert sized(tmp_path / "d").classes == ("0", "9", "10")
    put(*(tmp_path / "e" / n / "1.png" for n in ("10", "9", "x")))
    assert sized(tmp_path / "e").classes == ("10", "9", "x")


def test_a_folder_without_classes_or_images_says_what_is_wanted(tmp_path: Path) -> None:
    put(tmp_path / "flat/1.png")
    with pytest.raises(DataError, match="no folder per class"):
        sized(tmp_path / "flat")
    (tmp_path / "none/cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no images under .*\.jpeg"):
        sized(tmp_path / "none")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        sized(tmp_path / "nowhere")


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    for n in range(4):
        save_photo(root / "train/cat" / f"{n}.png", n, 20, 30)
    put(root / "val/cat/x.png")
    made = load(root)
    assert made.features["image"].shape == (20, 30, 3)
    assert np.array_equal(made.read("train", np.array([2]))["image"][0], photo(2, 20, 30))
    with pytest.raises(DataError, match=r"cat/x\.png is 30×40, the first image 20×30\. .*--image_size 224"):
        made.read("validation", np.array([0]))


def test_image_size_fit_and_channels_are_as_asked(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 12)
    assert sized(root).features["image"].shape == (8, 8, 3)
    assert load(root, image_size="8,12", image_channels=1).features["image"].shape == (8, 12, 1)
    padded = sized(root, image_fit="pad").read("train", np.array([0]))["image"][0]
    assert padded[0].max() == 0 < sized(root).read("train", np.array([0]))["image"][0][0].max()


def test_a_file_that_has_gone_is_named(tmp_path: Path) -> None:
    made = sized(photo_folder(tmp_path / "pets", 9))
    name = made.name("train", 0)
    (tmp_path / "pets" / name).unlink()
    for use in (lambda: made.read("train", np.array([0])), made.fingerprint):
        with pytest.raises(DataError, match=f"{name} can't be read: No such file"):
            use()


def test_the_fingerprint_changes_with_the_files_and_what_is_made_of_them(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 30)
    found = {
        sized(root).fingerprint(),
        sized(root, image_size=9).fingerprint(),
        sized(root, image_fit="pad").fingerprint(),
    }
    found.add(sized(root, split_seed=5).fingerprint())
    assert len(found) == 4
    assert sized(root).fingerprint() in found
    put(root / "cat/new.png")
    found.add(sized(root).fingerprint())
    (root / "cat/new.png").rename(root / "dog/new.png")
    found.add(sized(root).fingerprint())
    assert len(found) == 6


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes on POSIX only")
def test_a_name_that_is_no_unicode_is_no_obstacle(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 9)
    try:
        (root / "cat/000.jpg").rename(os.fsdecode(os.fsencode(root / "cat/") + b"/caf\xe9.jpg"))
    except OSError:
        pytest.skip("this file system takes Unicode only")
    made = sized(root)
    assert len(made.fingerprint()) == 64
    assert sum(made.sizes().values()) == 9


# -- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("photos/pets", True), ("./digits", True), ("/data", True), ("pets/", True), (".", True), ("..", True),
        ("~/pets", True), ("mine.npz", True), ("mine.NPZ", True), ("x_train.npy", True), ("a.csv", True),
        ("a.tfrecord", True), ("a.tfrecords", True), ("a.tfrec", True), ("a.record", True), ("a.tfrecord.gz", True),
        ("gs://bucket/pets", True), ("train-*-of-*.tfrecord", True),
        ("digits", False), ("cifar10", False), ("digitz", False), ("npz", False), ("csv", False), ("a.csvx", False),
    ],
)  # fmt: skip
def test_a_path_is_told_from_a_name(name: str, expected: bool) -> None:
    assert is_path(name) is expected


def test_a_bare_word_is_a_path_if_it_is_a_folder_and_no_known_name(tmp_path: Path) -> None:
    assert not is_path("pets")
    (tmp_path / "pets").mkdir()  # the tests work in this folder
    (tmp_path / "digits").mkdir()
    (tmp_path / "file").write_text("")
    assert is_path("pets")
    assert not is_path("digits")
    assert not is_path("file")


def test_a_path_may_be_relative_or_at_home_or_end_in_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo_folder(tmp_path / "pets", 9)
    monkeypatch.setenv("HOME", str(tmp_path))
    fingerprints = {
        sized(name).fingerprint()
        for name in ("pets", "./pets", "pets/", f"{tmp_path}/pets", f"{tmp_path}/pets/", "~/pets")
    }
    assert len(fingerprints) == 1


def test_a_misspelt_name_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        load("digitz")


@pytest.mark.parametrize("name", ["best-of-2020", "set-1-of-2", "old.records"])
def test_a_folder_of_any_name_is_a_folder(tmp_path: Path, name: str) -> None:
    photo_folder(tmp_path / name, 9)
    assert sized(f"./{name}").classes == ("cat", "dog", "emu")
    assert sized("files", train_files=f"./{name}").classes == ("cat", "dog", "emu")
    photo_folder(tmp_path / "outer" / name, 9)  # and a class may be called so
    assert sized(tmp_path / "outer").classes == (name,)


def test_a_file_of_no_known_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(DataError, match=r"unsupported file type: .*a\.xyz"):
        load("./a.xyz")


# -- tables ---------------------------------------------------------------------------------------------------------


def table(path: Path, *rows: Sequence[object], encoding: str = "utf-8") -> Path:
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A table of six photographs in a folder beside it."""
    put(*(tmp_path / "tables/images" / f"{n}.png" for n in range(6)))
    return tmp_path / "tables/pets.csv"


def test_a_table_names_images_relative_to_itself(pets: Path) -> None:
    rows = [(f"images/{n}.png", ["dog", "cat"][n % 2]) for n in range(6)]
    made = sized(table(pets, ("path", "label"), *rows))
    assert made.classes == ("cat", "dog")
    assert sum(made.sizes().values()) == 6
    for split in made.sizes():
        for name, label in zip(names(made, split), labels(made, split), strict=True):
            assert (name, label) in rows


def test_other_names_of_columns_can_be_given_and_more_columns_are_no_obstacle(pets: Path) -> None:
    rows = [(n, "x", f"images/{n}.png", "train" if n < 4 else "val", n % 3) for n in range(6)]
    table(pets, ("", "note", "file", "part", "kind"), *rows)
    made = sized(pets, image_column="file", label_column="kind", split_column="part")
    assert made.sizes() == {"train": 4, "validation": 2}
    assert made.classes == ("0", "1", "2")


def test_rows_go_to_the_split_they_name_or_to_train(pets: Path) -> None:
    parts = ["train", "", "Test", "valid", " train ", "dev"]
    made = sized(table(pets, ("path", "label", "split"), *((f"images/{n}.png", "a", parts[n]) for n in range(6))))
    assert made.sizes() == {"train": 3, "test": 1, "validation": 2}
    assert names(made, "validation") == ["images/3.png", "images/5.png"]


def test_labels_that_are_numbers_are_sorted_as_numbers(pets: Path) -> None:
    made = sized(table(pets, ("path", "label"), *((f"images/{n}.png", [10, 9, 2][n % 3]) for n in range(6))))
    assert made.classes == ("2", "9", "10")


def test_a_byte_order_mark_spaces_and_quotes_are_no_obstacle(pets: Path) -> None:
    (pets.parent / "images/0.png").rename(pets.parent / 'images/a, "b".png')
    pets.write_bytes('\ufeffpath , label\r\n"images/a, ""b"".png","big, dog"\r\nimages/1.png, cat \r\n\r\n'.encode())
    made = sized(pets)
    assert made.classes == ("big, dog", "cat")
    assert sorted(n for s in made.sizes() for n in names(made, s)) == ["images/1.png", 'images/a, "b".png']


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([("path", "label"), ("images/0.png", "a"), ("images/9.png", "a")], {}, r":3: there is no file .*9\.png"),
        ([("path", "label"), ("", "a")], {}, r"pets\.csv:2: there is no file \(the path is empty\)"),
        ([("path", "label"), ("images/0.png", " ")], {}, r"pets\.csv:2: the label is empty"),
        ([("path", "label"), ("images/0.png", "a"), ("images/1.png",)], {}, r"pets\.csv:3: 1 columns where .* names 2"),
        ([("path", "label"), ("images/0.png", "a", "b")], {}, r"pets\.csv:2: 3 columns"),
        ([("pathh", "label"), ("images/0.png", "a")], {}, r"no column 'path'.* mean 'pathh'\? .*--image_column"),
        ([("path", "labels"), ("images/0.png", "a")], {}, r"no column 'label'.* mean 'labels'\? .*--label_column"),
        ([("path", "label"), ("images/0.png", "a")], {"split_column": "part"}, r"no column 'part'.*--split_column"),
        ([("path", "path", "label"), ("a", "b", "c")], {}, "two columns are named 'path'"),
        ([("path", "label", "split"), ("images/0.png", "a", "trian")], {}, r":2: there is no split .* mean 'train'"),
        ([("path", "label")], {}, "holds no rows"),
        ([], {}, "is empty; its first line must name the columns"),
        ([("path", "label", "split"), ("images/0.png", "a", "val")], {}, "there are no training examples"),
        ([("x", "label"), ("1", "a")], {"value_columns": "y"}, r"no column 'y'.*--value_columns"),
        ([("x", "label"), ("1", "2")], {"value_columns": "x,label"}, r"'label' is the label.*gives the answer"),
        ([("label",), ("a",)], {"value_columns": "all"}, "no columns of values beside the label"),
        ([("x", "label"), ("1", "a"), ("one", "a")], {"value_columns": "all"}, r":3: 'one' in the column 'x' is not"),
        ([("x", "label"), ("nan", "a")], {"value_columns": "x"}, "'nan' in the column 'x' is not"),
        ([("x", "label"), ("1e39", "a")], {"value_columns": "x"}, "'1e39' in the column 'x' is not"),
        ([("x", "label"), ("", "a")], {"value_columns": "x"}, "'' in the column 'x' is not"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_table_is_named_by_its_line(
    pets: Path, rows: list[Sequence[object]], options: dict[str, Any], message: str
) -> None:
    table(pets, *rows)
    with pytest.raises(DataError, match=message):
        load(pets, **options, **({} if "value_columns" in options else {"image_size": 8}))


@pytest.mark.parametrize("content", [b'path,label\n"images/0.png,a\n', b"path,label\nimages/0.png,caf\xe9\n"])
def test_what_is_no_table_in_utf8_is_refused(pets: Path, content: bytes) -> None:
    pets.write_bytes(content)
    with pytest.raises(DataError, match=r"pets\.csv can't be read as a CSV file in UTF-8"):
        sized(pets)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*none\.csv"):
        load(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"there is no file .*none\.csv"):
        load("files", train_files=str(tmp_path / "none.csv"))
    (tmp_path / "long.csv").write_text(f"path,label\n{'a' * 300}.jpg,cat\n")
    with pytest.raises(DataError, match=r"long\.csv:2: there is no file .*aaa\.jpg"):
        load(tmp_path / "long.csv")


def test_columns_of_numbers_are_values(tmp_path: Path) -> None:
    rows = [(n, n * 0.5, -n, "ab"[n % 2], "train" if n < 8 else "test") for n in range(10)]
    path = table(tmp_path / "t.csv", ("x", "y", "z", "label", "split"), *rows)
    made = load(path, value_columns="all", validation_fraction=0.25)
    assert made.features["image"].shape == (3,)
    assert made.sizes() == {"train": 6, "validation": 2, "test": 2}
    assert np.array_equal(made.read("test", np.arange(2))["image"], [[8, 4, -8], [9, 4.5, -9]])
    some = load(path, value_columns="z, x")
    assert np.array_equal(some.read("test", np.arange(2))["image"], [[-8, 8], [-9, 9]])
    with pytest.raises(DataError, match="image_size and image_channels are for images"):
        assert load(path, value_columns="all", image_size=8).features


def test_a_table_for_each_split(pets: Path) -> None:
    index = ("", "path", "label", "split")  # as pandas writes it
    train = table(pets, index, *((n, f"images/{n}.png", n % 2, "train") for n in range(4)))
    valid = table(pets.with_name("v.csv"), index[:3], *((n, f"images/{n}.png", 5) for n in (4, 5)))
    made = sized("files", train_files=str(train), eval_files=str(valid), test_files=str(valid))
    assert made.sizes() == {"train": 4, "validation": 2, "test": 2}
    assert made.classes == ("0", "1", "5")
    with pytest.raises(DataError, match=r"given as the test files, but its column 'split' also names train"):
        sized("files", train_files=str(valid), test_files=str(train))


def test_the_same_photographs_as_a_folder_and_as_a_table_give_the_same_batches(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 30)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in root.rglob("*.jpg"))
    path = table(tmp_path / "pets.csv", ("path", "label"), *((name, name.split("/")[1]) for name in found))
    batches = []
    for source in (root, path):
        config = modelyard.load_config(
            model="mlp", dataset=str(source), image_size=12, resident="never", train_batch_size=8,
            augment="random_resized_crop, flip_left_right",
        )  # fmt: skip
        made = load_dataset(config)
        pipeline = Pipeline(config, made, RunLength(made.size("train"), 8, 20))
        with pipeline.training(2, 5) as (arrays, count):
            batches.append((count, {name: array.copy() for name, array in arrays.items()}))
        batches.append((0, dict(made.read("validation", np.arange(made.size("validation"))))))
        pipeline.close()
    for one, two in zip(batches[:2], batches[2:], strict=True):
        assert one[0] == two[0]
        assert all(np.array_equal(one[1][name], two[1][name]) for name in one[1])


# -- by split -------------------------------------------------------------------------------------------------------


def test_patterns_of_images_take_the_class_from_the_folder(tmp_path: Path) -> None:
    photo_folder(tmp_path / "photos/train", 12, ending="png")
    photo_folder(tmp_path / "photos/val", 6, ("dog", "fox"), ending="png")
    (tmp_path / "photos/train/cat/notes.txt").write_text("hello")
    made = sized("files", train_files="photos/train/*/*.png", eval_files=str(tmp_path / "photos/val/*/*.png"))
    assert made.sizes() == {"train": 12, "validation": 6}
    assert made.classes == ("cat", "dog", "emu", "fox")
    assert sorted(set(labels(made, "validation"))) == ["dog", "fox"]
    by_folder = sized("files", train_files="photos/train", eval_files="photos/val/")
    for split in ("train", "validation"):
        rows = np.arange(made.size(split))
        one, two = made.read(split, rows), by_folder.read(split, rows)
        assert all(np.array_equal(one[name], two[name]) for name in one)


def records(path: Path, numbers: Sequence[int], **more: Any) -> Path:
    import io

    from PIL import Image

    content = b""
    for number in numbers:
        file = io.BytesIO()
        Image.fromarray(photo(number)).save(file, "PNG")
        content += frame(encode_example({"image/encoded": file.getvalue(), "image/class/label": number % 3, **more}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("pattern", ["train-*-of-*", "train-0000?-of-00002", "train*", "train-0000[01]-of-00002"])
def test_patterns_of_records_are_known(tmp_path: Path, pattern: str) -> None:
    records(tmp_path / "r/train-00000-of-00002", range(5))
    records(tmp_path / "r/train-00001-of-00002", range(5, 9))
    records(tmp_path / "r/validation-00000-of-00001", range(3))
    for _ in range(2):  # the second time there are indexes beside the files
        made = sized("files", train_files=f"r/{pattern}", eval_files="r/validation*")
        assert made.sizes() == {"train": 9, "validation": 3}
        assert made.classes == ("0", "1", "2")
        assert np.array_equal(
            load("files", train_files=f"r/{pattern}", eval_files="r/val*").read("train", np.array([6]))["image"][0],
            photo(6),
        )
    with pytest.raises(DataError, match=r"holds records\. Give the files .*--train_files"):
        sized("./r")


def test_one_file_of_records_is_a_path(tmp_path: Path) -> None:
    made = sized(records(tmp_path / "all.tfrecord", range(10)))
    assert sorted(n for s in made.sizes() for n in names(made, s)) == [f"all.tfrecord, record {n}" for n in range(10)]


def test_files_of_different_kinds_are_refused(tmp_path: Path, pets: Path) -> None:
    photo_folder(tmp_path / "photos", 6)
    table(pets, ("path", "label"), ("images/0.png", "a"))
    shards = records(tmp_path / "all.tfrecord", range(3))
    for train, other in [(tmp_path / "photos", pets), (pets, shards), (shards, tmp_path / "photos/*/*.jpg")]:
        with pytest.raises(DataError, match="must be of one kind"):
            sized("files", train_files=str(train), eval_files=str(other))


@pytest.mark.parametrize("pattern", ["photos/*/*.png", "r/train-*.tfrecord"])
def test_a_pattern_without_a_match_is_named(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"no file matches {pattern}")):
        sized("files", train_files=pattern)


def test_files_need_a_path_or_training_files_and_not_both(tmp_path: Path) -> None:
    photo_folder(tmp_path / "photos", 6)
    with pytest.raises(DataError, match="which files"):
        sized("files")
    with pytest.raises(DataError, match="which files"):
        sized("files", eval_files="photos")
    with pytest.raises(DataError, match="--dataset files only"):
        sized("./photos", eval_files="photos")


# -- options --------------------------------------------------------------------------------------------------------


def test_options_of_another_kind_are_refused_all_at_once(tmp_path: Path, pets: Path) -> None:
    photo_folder(tmp_path / "photos", 6)
    table(pets, ("path", "label"), ("images/0.png", "a"), ("images/1.png", "a"))
    with pytest.raises(ConfigError) as raised:
        sized("./photos", label_column="kind", record_first_label=1)
    assert sorted(problem.key for problem in raised.value.problems) == ["label_column", "record_first_label"]
    with pytest.raises(ConfigError, match="record_label: has no effect here: it is for records files, these are csv"):
        sized(pets, record_label="label")
    np.savez(tmp_path / "a.npz", x_train=np.zeros((4, 3, 3), np.uint8), y_train=np.arange(4) % 2)
    with pytest.raises(ConfigError, match="value_columns"):
        load("a.npz", value_columns="all")


def test_a_file_of_labels_names_the_classes(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "photos", 9)
    names_file = tmp_path / "names.txt"
    names_file.write_text("\ufeffCat\nDog \n\nEmu\nFox\n", encoding="utf-8")
    assert sized(root, labels_file="names.txt").classes == ("Cat", "Dog", "Emu", "Fox")
    np.savez(tmp_path / "a.npz", x_train=np.zeros((4, 3, 3), np.uint8), y_train=np.arange(4) % 2)
    assert load("a.npz", labels_file="names.txt").classes == ("Cat", "Dog", "Emu", "Fox")
    for content, message in [
        ("Cat\nDog\n", "names 2 classes, but there are 3"),
        ("a\nb\na\n", "names the class 'a' twice"),
    ]:
        names_file.write_text(content)
        with pytest.raises(DataError, match=message):
            sized(root, labels_file="names.txt")
    with pytest.raises(DataError, match=r"none\.txt can't be read"):
        sized(root, labels_file="none.txt")


# -- arrays ---------------------------------------------------------------------------------------------------------

X = np.arange(20 * 12, dtype=np.uint8).reshape(20, 4, 3)
Y = np.arange(20) % 2


def arrays(folder: Path, **given: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in given.items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_folder_of_npy_files_is_mapped_and_not_loaded(tmp_path: Path, dtype: Any) -> None:
    folder = arrays(
        tmp_path / "a", x_train=X.astype(dtype), y_train=Y, x_val=X[:5].astype(dtype), y_val=Y[:5],
        classes=np.array(["cat", "dog"]),
    )  # fmt: skip
    for path in (folder, folder / "x_train.npy"):
        made = load(path)
        assert isinstance(made, ArrayDataset)
        assert made.classes == ("cat", "dog")
        assert made.sizes() == {"train": 20, "validation": 5}
        whole = made.arrays("train")["image"]
        assert np.array_equal(whole[..., 0], X)
        base: Any = whole
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap), "it would take as much memory as it has bytes"


def test_a_folder_of_npy_files_without_validation_gets_one(tmp_path: Path) -> None:
    made = load(arrays(tmp_path / "a", x_train=X, y_train=Y))
    assert made.sizes() == {"train": 18, "validation": 2}
    for split in made.sizes():
        found = made.read(split, np.arange(made.size(split)))
        assert np.array_equal(found["image"][..., 0], X[found["id"]])


def test_arrays_can_be_given_another_size(tmp_path: Path) -> None:
    made = load(arrays(tmp_path / "a", x_train=X, y_train=Y), image_size=8, image_channels=3)
    assert made.features["image"].shape == (8, 8, 3)
    assert made.sizes() == {"train": 18, "validation": 2}


def test_damaged_and_dangerous_npy_files_are_named(tmp_path: Path) -> None:
    folder = arrays(tmp_path / "a", x_train=X, y_train=Y)
    whole = (folder / "x_train.npy").read_bytes()
    for content in (whole[:60], whole[:-5], b"", b"hello"):
        (folder / "x_train.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"x_train\.npy can't be read as an \.npy file"):
            load(folder)
    np.save(folder / "x_train.npy", np.array([{}] * 20), allow_pickle=True)
    with pytest.raises(DataError, match=r"x_train\.npy can't be read as an \.npy file"):
        load(folder)
    (folder / "x_train.npy").write_bytes(whole)
    (folder / "y_train.npy").unlink()
    with pytest.raises(DataError, match="only one of x_train and y_train"):
        load(folder)


# -- what people trip over ------------------------------------------------------------------------------------------


def test_beside_other_folders_train_is_a_split_if_it_holds_classes(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    put(root / "train/dog/a.png", root / "train/dog/b.png", root / "train/cat/c.png", root / "unlabelled/d.png")
    assert sized(root).classes == ("cat", "dog")
    vehicles = tmp_path / "vehicles"
    put(vehicles / "train/a.png", vehicles / "train/b.png", vehicles / "plane/c.png")
    assert sized(vehicles).classes == ("plane", "train")


def test_what_makes_poor_results_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "pets"
    put(*(root / f"train/dog/{n}.png" for n in range(3)), root / "validation/cat/c.png")
    with caplog.at_level(logging.WARNING, "modelyard"):
        sized(root)
    assert "no training example of: cat" in caplog.text
    assert "validation has 1 example(s) for 2 classes" in caplog.text


def test_an_unfinished_conversion_is_no_dataset(tmp_path: Path) -> None:
    shard = tmp_path / "half" / "train-00000-of-00002.tfrecord"
    shard.parent.mkdir()
    shard.write_bytes(frame(encode_example({"image/encoded": b"x", "image/class/label": 0})))
    (shard.parent / ".convert.json").write_text("{}")
    with pytest.raises(DataError, match="is not finished"):
        load(shard.parent)


def test_a_table_may_be_separated_by_semicolons(pets: Path) -> None:
    path = table(pets, ("path", "label"), *((f"images/{n}.png", n % 2) for n in range(4)))
    path.write_text(path.read_text().replace(",", ";"))
    assert sum(sized(path).sizes().values()) == 4


def test_records_without_any_record_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "none.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match="there are no training examples"):
        load(tmp_path / "none.tfrecord")


def test_a_label_beyond_reason_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wild.tfrecord"
    path.write_bytes(frame(encode_example({"image/encoded": b"x", "image/class/label": 20_000_000})))
    with pytest.raises(DataError, match="label 20000000 is out of range"):
        load(path)


def test_the_fit_of_images_needs_their_size(tmp_path: Path) -> None:
    root = photo_folder(tmp_path / "pets", 6)
    with pytest.raises(ConfigError, match="has no effect without image_size"):
        load(root, image_fit="pad")


def test_raw_records_of_grey_and_colour_photographs_give_what_the_folder_gives(tmp_path: Path) -> None:
    from PIL import Image

    root = photo_folder(tmp_path / "pets", 12, ending="png")
    Image.fromarray(photo(99)[..., 0]).save(root / "cat" / "000.png")  # the first is grey
    modelyard.convert(str(root), tmp_path / "raw", encoding="raw")
    rows = np.arange(5)
    found = [sized(place).read("train", rows)["image"] for place in (root, tmp_path / "raw")]
    assert found[0].shape[-1] == 3
    assert np.array_equal(*found)
