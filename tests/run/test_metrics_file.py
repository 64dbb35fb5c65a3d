"""metrics.jsonl: complete rows, none twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from modelyard.errors import RunError
from modelyard.run.metrics import MetricsFile, cut_metrics, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (10, 20, 20, 30):
        file.write({"step": step, "loss": 1 / step})
    file.close()
    return tmp_path / "metrics.jsonl"


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_one_json_object_a_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 20, 30]
    assert json.loads(lines[0])["loss"] == 0.1


def test_a_row_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m")
    file.write({"step": 1})
    assert steps(tmp_path / "m") == [1]
    file.close()


def test_numbers_of_numpy_are_plain_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m")
    file.write({"a": np.float32(0.5), "b": np.int64(3), "c": float("nan"), "d": np.float32("inf"), "e": "text"})
    file.close()
    assert read_metrics(tmp_path / "m") == [{"a": 0.5, "b": 3, "c": None, "d": None, "e": "text"}]
    json.loads((tmp_path / "m").read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(("step", "kept"), [(0, []), (10, [10]), (20, [10, 20, 20]), (25, [10, 20, 20]), (99, None)])
def test_what_came_after_a_step_is_cut(path: Path, step: int, kept: list[int] | None) -> None:
    whole = path.read_bytes()
    cut_metrics(path, step)
    assert steps(path) == ([10, 20, 20, 30] if kept is None else kept)
    assert whole.startswith(path.read_bytes())


@pytest.mark.parametrize("torn", [b'{"step": 3', b'{"step": 31}', b"\x00\x00\x00", b"garbage\n", b'"\n'])
def test_a_torn_last_line_is_not_read_and_is_cut(path: Path, torn: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps(path) == [10, 20, 20, 30]
    cut_metrics(path, 99)
    assert path.read_bytes() == whole


def test_a_file_torn_at_any_byte_continues_with_complete_lines(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        cut_metrics(path, 30)
        file = MetricsFile(path)
        file.write({"step": 40})
        file.close()
        assert steps(path) == [*[10, 20, 20, 30][: whole[:length].count(b"\n")], 40]


def test_a_resumed_run_writes_nothing_twice(path: Path) -> None:
    whole = path.read_bytes()
    cut_metrics(path, 10)
    file = MetricsFile(path)
    for step in (20, 20, 30):
        file.write({"step": step, "loss": 1 / step})
    file.close()
    assert path.read_bytes() == whole


def test_a_missing_file_has_no_rows_and_needs_no_cut(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nothing") == []
    cut_metrics(tmp_path / "nothing", 5)
    assert not (tmp_path / "nothing").exists()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"can't write .*m: No such file"):
        MetricsFile(tmp_path / "nowhere" / "m")


def test_a_damaged_line_in_the_middle_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "split": "train", "loss": 1.0}) + "\n" for step in (10, 20, 30, 40)]
    odd = [
        "\x00\x00\n",
        '{"step": "x"}\n',
        '{"step": 5, "split": []}\n',
        '{"step": 5, "seconds": "1"}\n',
        "[" * 9999 + "\n",
    ]
    path.write_text("".join([whole[0], *odd, *whole[1:]]))
    assert [row["step"] for row in read_metrics(path)] == [10, 20, 30, 40]
    cut_metrics(path, 30)
    assert [row["step"] for row in read_metrics(path)] == [10, 20, 30]
