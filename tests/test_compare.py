"""Runs on disk -> methods -> estimates with intervals -> text and figures."""

import json
import math
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from gagar_mini.config import CreditConfig, GraderConfig, tiny, to_yaml
from gagar_mini.view.compare import compare_runs, read_runs, table
from gagar_mini.view.plots import (
    plot_budget_sweep,
    plot_credit_scale,
    plot_fallbacks,
    plot_learning_curves,
    save_comparison,
)
from gagar_mini.view.tables import text_table, without_nan

GAGAR = {"credit": CreditConfig("gagar"), "grader": GraderConfig("rubric")}


def write_run(folder, *, seed, pass_rates, evaluations=(), **settings):
    folder.mkdir()
    config = replace(tiny(), seed=seed, steps=len(pass_rates), **settings)
    (folder / "config.yaml").write_text(to_yaml(config))
    lines = [
        {
            "step": step,
            "reward/pass_rate": rate,
            "credit/scale_mean": 1.2 if settings else None,
            "grader/fallback_rate": 0.0 if settings else None,
        }
        for step, rate in enumerate(pass_rates)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    if evaluations:
        text = "".join(json.dumps(line) + "\n" for line in evaluations)
        (folder / "eval.jsonl").write_text(text)
    return folder


@pytest.fixture
def folders(tmp_path):
    sweep = [
        {"max_turns": n, "max_tokens": 99, "pass_rate": n / 10, "clean_share": None}
        for n in (6, 8)
    ]
    make = [
        ("b0", {"seed": 0, "pass_rates": [0.0, 0.4], "evaluations": sweep}),
        ("b1", {"seed": 1, "pass_rates": [0.2, 0.6], "evaluations": sweep}),
        ("g0", {"seed": 0, "pass_rates": [0.1, 0.8], **GAGAR}),
    ]
    return [write_run(tmp_path / name, **settings) for name, settings in make]


def test_methods_are_runs_that_differ_in_the_seed_alone(folders):
    binary, gagar = compare_runs(read_runs(folders))
    assert (binary.method, binary.seeds) == ("binary, steps=2", (0, 1))
    assert (gagar.method, gagar.seeds) == ("gagar + rubric, steps=2", (0,))


def test_interval_over_two_seeds_is_students(folders):
    binary, _ = compare_runs(read_runs(folders))
    estimate = binary.training["reward/pass_rate"]
    # the last tenth of two steps is the last: .4 and .6, mean .5, error .1, t = 12.706
    assert estimate.mean == pytest.approx(0.5)
    assert estimate.high - estimate.mean == pytest.approx(12.706 * 0.1, abs=1e-3)


def test_a_single_seed_has_no_interval(folders):
    _, gagar = compare_runs(read_runs(folders))
    assert math.isnan(gagar.training["reward/pass_rate"].low)
    assert "[" not in table([gagar]).splitlines()[1]


def test_held_out_figures_are_kept_apart_by_budget(folders):
    binary, gagar = compare_runs(read_runs(folders))
    assert [held_out.max_turns for held_out in binary.held_out] == [8, 6]
    generous, tight = (held_out.figures for held_out in binary.held_out)
    assert generous["pass_rate"].mean == pytest.approx(0.8)
    assert tight["pass_rate"].mean == pytest.approx(0.6)
    assert "clean_share" not in tight
    assert gagar.held_out == ()


def test_an_evaluation_on_other_tasks_does_not_stand_for_the_held_out_ones(folders):
    line = {"max_turns": 8, "max_tokens": 99, "pass_rate": 0.0, "split": "train"}
    for folder in folders[:2]:
        with open(folder / "eval.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    binary, _ = compare_runs(read_runs(folders))
    assert binary.held_out[0].figures["pass_rate"].mean == pytest.approx(0.8)


def test_the_same_seed_twice_is_refused(folders):
    with pytest.raises(ValueError, match="same seed"):
        compare_runs(read_runs([folders[0], folders[0]]))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run"):
        read_runs([tmp_path])


def test_figures_name_their_axes_and_seeds(folders):
    runs = read_runs(folders)
    for plot in (
        lambda ax: plot_learning_curves(runs, "reward/pass_rate", ax),
        lambda ax: plot_fallbacks(runs, ax),
        lambda ax: plot_credit_scale(runs, ax),
        lambda ax: plot_budget_sweep(runs[:2], ax),
    ):
        ax = plot(Figure().subplots())
        assert ax.get_xlabel() and ax.get_ylabel()
        assert all("n = " in label for label in ax.get_legend_handles_labels()[1])
        assert ax.lines


def test_comparison_figure_is_written(folders, tmp_path):
    save_comparison(read_runs(folders), tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000


def test_text_table_aligns_numbers_and_marks_what_is_missing():
    rows = [{"name": "a", "value": 1.0}, {"name": "long", "value": None}]
    assert text_table(rows).splitlines() == [
        "name  value",
        "a     1.000",
        "long      -",
    ]


def test_json_has_no_nan():
    assert without_nan({"a": (math.nan, 1.5)}) == {"a": [None, 1.5]}
