"""The leaderboard, from run folders alone."""

from __future__ import annotations

import csv
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import write_run

import modelyard
from modelyard.comparison.matrix import MatrixResult
from modelyard.comparison.plots import Point, _overlap, scatter
from modelyard.comparison.scheduler import CellResult, progress
from modelyard.errors import RunError, UserError


def write(name: str, accuracy: float, **options: Any) -> None:
    scores = {split: {"accuracy": accuracy, "loss": 1 - accuracy} for split in ("validation", "test")}
    write_run(Path("runs") / name, **{"scores": scores, **options})


def fill() -> None:
    """On digits mlp and simple_cnn are within noise and mnist_cnn is worse; on the other mnist_cnn is missing."""
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        write(f"deep/er/a{seed}", 0.95 + noise, random_seed=seed, model="simple_cnn", flops=2000)
        write(f"b{seed}", 0.949 - noise, random_seed=seed)
        write(f"c{seed}", 0.60 + noise / 2, random_seed=seed, model="mnist_cnn", flops=5_000_000)
        for model, mean in (("simple_cnn", 0.8), ("mlp", 0.9)):
            write(f"{model}-other{seed}", mean + noise, random_seed=seed, model=model, dataset="synthetic")


def by_name(board: modelyard.Leaderboard) -> dict[str, Any]:
    return {entrant.name: entrant for entrant in board.entrants}


def test_means_spreads_and_ranks_with_noise_as_ties() -> None:
    fill()
    board = modelyard.leaderboard("runs")
    assert (board.metric, board.split, board.mode) == ("accuracy", "test", "max")
    assert board.datasets == ("digits", "synthetic")
    found = by_name(board)
    cnn, mlp, worst = (found[name].scores["digits"] for name in ("simple_cnn", "mlp", "mnist_cnn"))
    assert (cnn.mean, cnn.spread, cnn.n) == (pytest.approx(0.95), pytest.approx(0.01), 3)
    assert (cnn.mark, mlp.mark, worst.mark) == ("best", "within noise", "worse")
    assert (cnn.rank, mlp.rank, worst.rank) == (1.5, 1.5, 3)
    assert (cnn.parameters, cnn.flops, cnn.seconds, cnn.images_per_second) == (1234, 2000, 3.0, 4000)
    assert "synthetic" not in found["mnist_cnn"].scores
    assert board.ranked == ("digits",)  # where all have a result
    assert found["mlp"].mean_rank == 1.5
    assert any("mean rank is over the datasets where all have a result: digits" in note for note in board.notes)
    assert found["mlp"].scores["synthetic"].mark == "best"
    assert found["simple_cnn"].scores["synthetic"].mark == "worse"


def test_lower_is_better_for_a_loss() -> None:
    fill()
    board = modelyard.leaderboard("runs", metric="loss", split="validation")
    assert (board.split, board.mode) == ("validation", "min")
    assert by_name(board)["mnist_cnn"].scores["digits"].rank == 3


def test_a_single_seed_is_marked_unknown_with_a_note() -> None:
    write("a", 0.9)
    write("b", 0.8, model="simple_cnn")
    board = modelyard.leaderboard("runs")
    scores = {entrant.name: entrant.scores["digits"] for entrant in board.entrants}
    assert (scores["mlp"].mark, scores["simple_cnn"].mark) == ("best", "unknown")
    assert (scores["mlp"].rank, scores["simple_cnn"].rank) == (1, 2)
    assert any("single seed" in note for note in board.notes)
    assert "80.00 (1) ?" in Path("runs/leaderboard.md").read_text()


def write_values(name: str, right: Any, **options: Any) -> None:
    """A run whose values of each example are these, 1 for right."""
    values = np.asarray(right, np.float32)
    found = {"test": {"accuracy": values, "loss": 1 - values, "label": np.arange(len(values)) % 10}}
    write(name, float(values.mean()), examples=found, **options)


def test_significance_considers_the_examples() -> None:
    for seed in range(3):
        write_values(f"a{seed}", np.arange(153) >= 10, random_seed=seed)
        write_values(f"b{seed}", np.arange(153) < 153 - 15 - seed % 2, random_seed=seed, model="simple_cnn")
        write_values(f"c{seed}", np.arange(153) >= 75 + seed, random_seed=seed, model="mnist_cnn")
    board = modelyard.leaderboard("runs")
    scores = {name: entrant.scores["digits"] for name, entrant in by_name(board).items()}
    assert [scores[name].mark for name in ("mlp", "simple_cnn", "mnist_cnn")] == ["best", "within noise", "worse"]
    assert scores["simple_cnn"].p > 0.2
    assert [score.examples for score in scores.values()] == [153, 153, 153]
    low, high = scores["mlp"].interval
    assert low < scores["mlp"].mean - 0.02 < scores["mlp"].mean + 0.02 < high
    assert not any("seeds only" in note for note in board.notes)
    shown = f"[{100 * low:.1f}, {100 * high:.1f}]"
    row = next(csv.DictReader(Path("runs/leaderboard.csv").read_text().splitlines()))
    assert (float(row["low"]), float(row["high"]), row["examples"]) == (low, high, "153")
    assert f'<span class="interval">{shown}</span>' in Path("runs/leaderboard.html").read_text()
    assert shown in Path("runs/leaderboard.md").read_text().replace("\\", "")


def test_without_values_of_the_same_examples_only_seeds_count_and_a_note_says_so() -> None:
    for seed in range(3):
        write_values(f"a{seed}", np.arange(153) >= 10, random_seed=seed)
        write_values(f"b{seed}", np.arange(100) >= 10 + seed, random_seed=seed, model="simple_cnn")
        write(f"c{seed}", 0.5 + seed / 100, random_seed=seed, model="mnist_cnn")
        # Not the values of this score, such as those of another model of the run.
        wrong = {"test": {"accuracy": np.ones(153, np.float32)}}
        write(f"d{seed}", 0.6 + seed / 100, random_seed=seed, model="resnet20", examples=wrong)
    board = modelyard.leaderboard("runs")
    scores = {name: entrant.scores["digits"] for name, entrant in by_name(board).items()}
    assert {name: score.examples for name, score in scores.items()} == {
        "mlp": 153, "simple_cnn": None, "mnist_cnn": None, "resnet20": None,
    }  # fmt: skip
    note = next(note for note in board.notes if "seeds only" in note)
    assert note.startswith("on digits, significance considers the seeds only, not the number of examples, for simple")
    assert "mlp" not in note


def test_a_root_of_a_mean_has_values_of_examples_too() -> None:
    random = np.random.default_rng(0)
    for model, size in (("mlp", 1.0), ("simple_cnn", 1.5)):
        for seed in range(3):
            squares = np.square(random.normal(0, size, 400)).astype(np.float32)
            scores = {"test": {"rmse": float(np.sqrt(squares.mean()))}}
            examples = {"test": {"squared_error": squares}}
            write(f"{model}{seed}", 0.5, scores=scores, examples=examples, model=model, random_seed=seed)
    scores = {name: entrant.scores["digits"] for name, entrant in by_name(modelyard.leaderboard("runs")).items()}
    assert scores["mlp"].examples == 400
    assert scores["simple_cnn"].mark == "worse"


def test_the_board_says_of_how_many_evaluations_a_score_is_the_best() -> None:
    earlier = [{"step": step, "split": "validation", "accuracy": 0.5 + step / 100} for step in (2, 4, 6, 8)]
    scores = {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.5}}
    for number, model in enumerate(("mlp", "simple_cnn")):
        write(f"a{number}", 0.5, model=model, scores=scores, earlier=earlier, best=8)
    board = modelyard.leaderboard("runs", split="validation")
    assert [entrant.scores["digits"].mean for entrant in board.entrants] == [0.58, 0.58]
    assert [entrant.scores["digits"].looks for entrant in board.entrants] == [5, 5]
    assert any("the best of up to 5 evaluations of its run on validation" in note for note in board.notes)
    assert any("--test_at_end" in note for note in board.notes)
    for ending in ("html", "md"):
        assert "best of 5 evaluations on this split" in Path(f"runs/leaderboard.{ending}").read_text()
    board = modelyard.leaderboard("runs", split="test")
    assert board.looks == 1
    assert not any("optimistic" in note for note in board.notes)


def test_the_majority_class_is_a_row() -> None:
    splits = {"train": {"classes": [40, 10]}, "test": {"classes": [60, 40]}}
    for seed in range(3):
        write(f"a{seed}", 0.95 + seed / 100, random_seed=seed, data={"splits": splits})
        write(f"b{seed}", 0.6 + seed / 100, random_seed=seed, model="simple_cnn", data={"splits": splits})
    board = modelyard.leaderboard("runs")
    assert (board.baseline, board.baselines) == ("majority class", {"digits": 0.6})
    assert "on digits, not better than the majority class by more than noise: simple_cnn." in board.notes
    assert "| majority class (baseline) | – | 60.00 |" in Path("runs/leaderboard.md").read_text().replace("\\", "")
    assert 'majority class <span class="options">baseline</span></th>' in Path("runs/leaderboard.html").read_text()
    last = list(csv.DictReader(Path("runs/leaderboard.csv").read_text().splitlines()))[-1]
    assert (last["entrant"], last["dataset"], last["mean"]) == ("majority class (baseline)", "digits", "0.6")


def test_two_seeds_are_too_few_to_tell_whether_a_model_is_better_than_the_majority_class() -> None:
    splits = {"train": {"classes": [10] * 10}, "test": {"classes": [10] * 10}}
    for seed, (better, worse) in enumerate([(0.357, 0.09), (0.3, 0.08)]):
        write(f"a{seed}", better, random_seed=seed, data={"splits": splits})
        write(f"b{seed}", worse, random_seed=seed, model="simple_cnn", data={"splits": splits})
    notes = modelyard.leaderboard("runs").notes
    assert "on digits, two seeds are too few to tell whether these are better than the majority class: mlp." in notes
    assert "on digits, not better than the majority class by more than noise: simple_cnn." in notes


def test_the_mean_of_the_labels_is_the_baseline_of_a_regression() -> None:
    labels = np.array([1, 2, 3, 6], np.float32)
    for seed in range(2):
        squares = np.full(4, 0.25 + seed, np.float32)
        examples = {"test": {"squared_error": squares, "label": labels}}
        scores = {"test": {"rmse": float(np.sqrt(squares.mean()))}}
        write(f"a{seed}", 0.5, random_seed=seed, scores=scores, examples=examples)
    board = modelyard.leaderboard("runs", metric="rmse")
    assert board.baseline == "mean of the labels"
    assert board.baselines["digits"] == pytest.approx(labels.std())


def write_folds(model: str, rate: float, *, seeds: int = 1, folds: int = 3, left_out: str = "", **options: Any) -> None:
    """Runs of a cross-validation whose values of each example are random, with this rate of right ones."""
    random = np.random.default_rng(len(model))
    for seed in range(seeds):
        for fold in range(1, folds + 1):
            right = (random.random(100 + fold) < rate).astype(np.float32)
            data = {
                "fingerprint": f"of fold {fold}",
                "undivided": "whole",
                "sizes": {"train": 9, "validation": len(right)},
            }
            name, scores = f"{model}{seed}{fold}{options}", {"validation": {"accuracy": float(right.mean())}}
            if f"{seed}{fold}" != left_out:
                write(
                    name, 0.5, model=model, random_seed=seed, folds=folds, fold=fold, scores=scores, data=data,
                    examples={"validation": {"accuracy": right}}, best=10, **options,
                )  # fmt: skip


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_examples_of_all_folds_are_pooled(seeds: int) -> None:
    write_folds("mlp", 0.9, seeds=seeds)
    write_folds("simple_cnn", 0.88, seeds=seeds)
    write_folds("mnist_cnn", 0.2, seeds=seeds)
    board = modelyard.leaderboard("runs")
    assert board.datasets == ("digits",)
    scores = {name: entrant.scores["digits"] for name, entrant in by_name(board).items()}
    assert {(score.n, score.folds, score.examples) for score in scores.values()} == {(seeds, 3, 306)}
    assert sorted(score.mark for score in scores.values()) == ["best", "within noise", "worse"]
    assert scores["mnist_cnn"].mark == "worse"
    assert f"({seeds} × 3)" in Path("runs/leaderboard.md").read_text()
    assert not any("single seed" in note for note in board.notes)
    assert "3 models, 1 dataset, " + str(9 * seeds) in Path("runs/leaderboard.html").read_text()


def test_folds_are_compared_on_validation_and_on_request_on_test() -> None:
    for model, accuracy in (("mlp", 0.9), ("simple_cnn", 0.6)):
        for fold in (1, 2, 3):
            right = np.arange(200) >= 200 * (1 - accuracy) + fold
            data = {"fingerprint": f"of fold {fold}", "undivided": "whole"}
            examples = {"test": {"accuracy": right.astype(np.float32)}}
            options = {"model": model, "folds": 3, "fold": fold, "data": data, "examples": examples}
            scores = {"validation": {"accuracy": accuracy}, "test": {"accuracy": float(right.mean())}}
            write(f"{model}{fold}", 0.5, scores=scores, **options)
    assert modelyard.leaderboard("runs").split == "validation"
    board = modelyard.leaderboard("runs", split="test")
    scores = {name: entrant.scores["digits"] for name, entrant in by_name(board).items()}
    assert {(score.n, score.folds, score.examples) for score in scores.values()} == {(1, 3, 200)}
    assert (scores["mlp"].mark, scores["simple_cnn"].mark) == ("best", "worse")
    cell = CellResult(name="a", axes={"fold": 3}, state="done", model_dir="runs/simple_cnn3", log="")
    assert progress(cell)[1] == "validation accuracy 0.6"


def test_folds_that_not_all_have_are_left_out() -> None:
    write_folds("mlp", 0.9, left_out="02")
    write_folds("simple_cnn", 0.8)
    board = modelyard.leaderboard("runs")
    assert {entrant.scores["digits"].examples for entrant in board.entrants} == {204}
    note = next(note for note in board.notes if "folds" in note)
    assert note.startswith("on digits, folds 1, 3 are compared, which all have; left out: simple_cnn02")


def test_other_divisions_into_folds_are_other_datasets() -> None:
    write_folds("mlp", 0.9)
    write_folds("mlp", 0.9, split_seed=1)
    assert modelyard.leaderboard("runs").datasets == ("digits (split_seed=0)", "digits (split_seed=1)")


def test_options_that_vary_make_separate_entrants() -> None:
    for seed in range(2):
        write(f"a{seed}", 0.9, random_seed=seed, optimizer="sgd", learning_rate=0.1)
        write(f"b{seed}", 0.8, random_seed=seed, optimizer="adam")
        write(f"c{seed}", 0.7, random_seed=seed, model="simple_cnn", threads=seed + 1)
    board = modelyard.leaderboard("runs")
    assert set(by_name(board)) == {"mlp (optimizer=sgd)", "mlp (optimizer=adam)", "simple_cnn"}
    assert by_name(board)["mlp (optimizer=sgd)"].options == {"optimizer": "sgd"}


def test_options_that_differ_only_between_datasets_are_noted() -> None:
    write("a", 0.9, learning_rate=0.1)
    write("b", 0.9, learning_rate=0.2, dataset="synthetic")
    board = modelyard.leaderboard("runs")
    assert [entrant.name for entrant in board.entrants] == ["mlp"]
    assert any("learning_rate" in note for note in board.notes)


def test_the_same_run_twice_counts_once() -> None:
    write("a", 0.9)
    write("b", 0.8)
    write("c", 0.7, random_seed=1)
    board = modelyard.leaderboard("runs")
    assert board.entrants[0].scores["digits"].values == {0: 0.8, 1: 0.7}
    assert any(note.startswith("a is left out: b is newer") for note in board.notes)


def test_other_data_of_the_same_name_is_another_dataset() -> None:
    write("a", 0.9, fingerprint="0123456789")
    write("b", 0.8, fingerprint="abcdefghij")
    assert modelyard.leaderboard("runs").datasets == ("digits (01234567)", "digits (abcdefgh)")


def test_unfinished_and_damaged_runs_are_listed_and_not_counted() -> None:
    fill()
    write("late", 0.99, finished=False, random_seed=9)
    write("untested", 0.99, random_seed=9, scores={"validation": {"accuracy": 0.99}}, test_at_end=True)
    write("torn", 0.99, random_seed=9)
    Path("runs/torn/config.yaml").write_text("config_version: 1\nmodel: [")
    Path("runs/torn/manifest.json").write_text("{")
    board = modelyard.leaderboard("runs")
    listed = {run.name: run.status for run in board.unfinished}
    assert listed == {"late": "interrupted", "untested": "interrupted", "torn": "damaged"}
    assert all(9 not in score.values for entrant in board.entrants for score in entrant.scores.values())
    text = Path("runs/leaderboard.html").read_text()
    assert "Not counted" in text
    assert "late" in text


def test_runs_without_the_metric_are_left_out_or_an_error_names_them() -> None:
    write("a", 0.9)
    write("house", 0.9, random_seed=1, scores={"test": {"mae": 3.0}})
    with pytest.raises(RunError, match=r"share no metric.*a has .*test accuracy.*house has test mae.*--metric"):
        modelyard.leaderboard("runs")
    write("b", 0.8, random_seed=2)
    board = modelyard.leaderboard("runs")
    assert "house is left out, with test mae, but no test accuracy." in board.notes
    with pytest.raises(RunError, match="f1 on test"):
        modelyard.leaderboard("runs", metric="f1", split="test")
    with pytest.raises(UserError, match="no split 'tset'"):
        modelyard.leaderboard("runs", split="tset")


def test_runs_that_are_left_out_for_one_reason_are_one_note() -> None:
    write("a", 0.9)
    write("b", 0.8, model="simple_cnn")
    for seed in range(3):
        write(f"empty{seed}", 0.9, random_seed=seed, scores={})
        write(f"house{seed}", 0.9, random_seed=seed, scores={"test": {"mae": 3.0}})
    notes = [note for note in modelyard.leaderboard("runs").notes if "left out" in note]
    assert notes == [
        "3 runs are left out, with no metrics at all: empty0, empty1, empty2.",
        "3 runs are left out, with test mae, but no test accuracy: house0, house1, house2.",
    ]


def test_all_that_have_the_best_mean_are_marked_best() -> None:
    for seed in range(2):
        write(f"a{seed}", 0.9 + seed / 100, random_seed=seed)
        write(f"b{seed}", 0.91 - seed / 100, random_seed=seed, model="simple_cnn")
        write(f"c{seed}", 0.5 + seed / 100, random_seed=seed, model="mnist_cnn")
    board = modelyard.leaderboard("runs")
    marks = {entrant.name: entrant.scores["digits"].mark for entrant in board.entrants}
    assert marks == {"mlp": "best", "simple_cnn": "best", "mnist_cnn": "worse"}
    assert Path("runs/leaderboard.md").read_text().count("★") == 3  # two, and the legend
    assert "3 models, 1 dataset, 6 runs." in Path("runs/leaderboard.html").read_text()


def test_validation_is_compared_where_not_all_have_a_test_score() -> None:
    write("a", 0.9)
    write("b", 0.8, random_seed=1, scores={"validation": {"accuracy": 0.7}})
    assert modelyard.leaderboard("runs").split == "validation"


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(RunError, match="is not a folder"):
        modelyard.leaderboard("nowhere")
    Path("empty").mkdir()
    with pytest.raises(RunError, match="no finished run"):
        modelyard.leaderboard("empty")


class Tags(html.parser.HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)


def test_untrusted_names_are_escaped_on_every_page() -> None:
    evil = "=cmd|<script>alert('1')\"&.npz"
    for seed in range(2):
        write(f"a{seed}", 0.9 + seed / 100, random_seed=seed, dataset=f"x/{evil}")
        write(f"<img src=x onerror=alert(1)>{seed}", 0.9, random_seed=seed, finished=False)
        config = Path(f"runs/a{seed}/config.yaml")
        config.write_text(config.read_text().replace("model: mlp", 'model: "<script>|mlp"'))
    manifest = json.loads(Path("runs/a0/manifest.json").read_text())
    Path("runs/a0/manifest.json").write_text(json.dumps({**manifest, "model": {"flops": "<b>", "parameters": None}}))
    modelyard.leaderboard("runs", output="board")
    page = Tags(Path("board/leaderboard.html").read_text())
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert page.urls == []
    assert "svg" in page.tags
    rows = list(csv.DictReader(Path("board/leaderboard.csv").read_text().splitlines()))
    assert rows[0]["dataset"].startswith("'=cmd")
    assert float(rows[0]["mean"]) == pytest.approx(0.905)
    text = Path("board/leaderboard.md").read_text()
    assert "\n| \\<script\\>\\|mlp |" in text
    assert "<script>" not in text.replace("\\<", "")
    assert {len(line.replace("\\|", "").split("|")) for line in text.splitlines() if line.startswith("|")} == {9}


def test_the_heading_has_the_name_of_the_metric_as_it_is() -> None:
    write("a", 0.5, scores={"test": {"BLEU": 0.5}})
    modelyard.leaderboard("runs")
    assert "<p>Test BLEU, higher is better. 1 model" in Path("runs/leaderboard.html").read_text()


def test_numbers_below_zero_stay_numbers_in_csv() -> None:
    write("a", 0.5, scores={"test": {"r2": -0.25}})
    write("b", 0.5, random_seed=1, scores={"test": {"r2": -0.35}})
    modelyard.leaderboard("runs")
    row = next(csv.DictReader(Path("runs/leaderboard.csv").read_text().splitlines()))
    assert float(row["mean"]) == pytest.approx(-0.3)


def test_names_in_a_plot_do_not_overlap() -> None:
    points = [Point(f"model_{n}", 100.0, 90 + n / 10, (89.9 + n / 10, 90.2 + n / 10), n) for n in range(5)]
    points.append(Point("far", 1e6, 50.0, (49.9, 50.1), 5))
    drawn = scatter(points, "FLOPs", "accuracy")
    assert drawn.count("<circle") == 6
    assert drawn.count('class="bar ') == 6
    spots = [(float(x), float(y)) for x, y in re.findall(r'class="name" x="([-\d.]+)" y="([-\d.]+)"', drawn)]
    for number, (x, y) in enumerate(spots):
        for left, top in spots[number + 1 :]:
            assert abs(x - left) > 40 or abs(y - top) > 10
    assert scatter([Point("a", 0.0, 1.0, None, 0)], "x", "y") == ""
    assert "<svg" in scatter([Point("a", 5.0, 0.0, None, 0)], "x", "y")


def test_the_area_that_a_label_covers() -> None:
    boxes = np.array([(0, 0, 10, 10), (5, 5, 15, 15), (20, 20, 30, 30)], np.float64)
    assert _overlap((8, 8, 12, 12), boxes) == 4 + 16
    assert _overlap((11, 0, 12, 1), boxes) == 0
    assert _overlap((0, 0, 1, 1), boxes[:0]) == 0


def texts(drawn: str, kind: str) -> list[str]:
    return re.findall(rf'<text class="{kind}"[^>]*>([^<]*)</text>', drawn)


def test_when_all_have_the_most_there_is_no_tick_above_it_and_none_is_cut_off() -> None:
    drawn = scatter(
        [Point(f"m{n}", 10.0**n, 100.0, (100.0, 100.0), n) for n in range(3)], "FLOPs", "accuracy", most=100
    )
    ends = re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]*)<', drawn)
    ticks = [float(text) for _, text in ends]
    assert max(ticks) == 100
    assert 99 <= min(ticks) < 100
    above = scatter([Point("a", 1.0, 99.9, (99.5, 100.3), 0)], "FLOPs", "accuracy", most=100)  # its bar ends there
    assert max(float(text) for text in re.findall(r'text-anchor="end">([^<]*)<', above)) == 100
    assert all(7 * len(text) < float(x) for x, text in ends)
    wide = scatter([Point("a", 1.0, 123456.5, None, 0), Point("b", 1.0, 123460.5, None, 1)], "x", "y")
    ends = re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]*)<', wide)
    assert all(7 * len(text) < float(x) for x, text in ends)


def test_numbered_points_at_the_same_position_share_a_label() -> None:
    points = [Point(f"a very long name, different at its end: {n}", 5.0, 0.9, None, n) for n in (0, 1, 2, 4, 6, 7)]
    points.append(Point("another", 500.0, 0.5, None, 3))
    assert texts(scatter(points, "x", "y", numbered=True), "name") == ["1–3, 5, 7, 8", "4"]


def test_entrants_with_long_names_are_numbered_on_the_page() -> None:
    for number, (epochs, rate) in enumerate([(3, 0.1), (3, 0.01), (5, 0.1), (5, 0.01)]):
        options = {"train_steps": None, "train_epochs": epochs, "learning_rate": rate, "optimizer": "sgd"}
        write(f"a{number}", 0.9 + number / 100, **options)
    board = modelyard.leaderboard("runs")
    page = Path("runs/leaderboard.html").read_text()
    assert all(len(entrant.name) > 26 for entrant in board.entrants)
    assert "…" not in page
    assert texts(page, "name")[:4] == ["1", "2", "3", "4"]
    best = board.entrants[0].options
    shown = " ".join(f'<span class="option">{key}={value}</span>' for key, value in best.items())
    assert f'<span class="number">1</span>mlp <span class="options">{shown}</span>' in page
    assert f'<li value="4" class="c3">{board.entrants[3].name}</li>' in page


def test_short_names_are_shown_in_the_plots() -> None:
    fill()
    modelyard.leaderboard("runs")
    page = Path("runs/leaderboard.html").read_text()
    assert set(texts(page, "name")) == {"mlp", "simple_cnn", "mnist_cnn"}
    assert 'class="number"' not in page


def test_it_prints_as_a_table() -> None:
    fill()
    lines = str(modelyard.leaderboard("runs")).splitlines()
    assert lines[0] == "test accuracy in %, higher is better"
    assert lines[2].split()[:3] == ["model", "mean", "rank"]
    assert any(line.startswith("simple_cnn") and "95.00 ± 1.00 (3)" in line and "★" in line for line in lines)
    assert any(line.startswith("note: ") for line in lines)


def test_the_result_of_a_matrix_prints_its_cells_and_the_board() -> None:
    fill()
    board = modelyard.leaderboard("runs")
    cells = [CellResult(name=name, axes={}, state="done", model_dir="", log="") for name in ("a", "b")]
    cells.append(CellResult(name="c", axes={}, state="failed", reason="out of memory", model_dir="", log=""))
    text = f"m: 3 cells, 2 done, 1 failed\nc: out of memory\n{board}"
    assert str(MatrixResult("m", tuple(cells), board)) == text


def test_the_command_prints_what_it_writes(command: Any) -> None:
    fill()
    done = command("leaderboard", "runs", "--metric", "accuracy", "--json")
    board = json.loads(done.stdout.splitlines()[-1])
    assert board["entrants"][0]["scores"]["digits"]["mean"] == pytest.approx(0.949, abs=0.002)
    assert "in place of" not in done.stderr
    again = command("leaderboard", "runs", "--metric", "loss").stdout
    assert "★" in again
    assert "written: runs/leaderboard.csv, runs/leaderboard.md, runs/leaderboard.html" in again
    assert "in place of the earlier leaderboard.csv, leaderboard.md, leaderboard.html; --output" in again
    assert "in place of" not in command("leaderboard", "runs", "--output", "other").stdout
