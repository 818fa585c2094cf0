"""Records -> figures. Each function draws on the axes that it gets and returns them.

Colours have fixed meanings and are never the only cue: each method has a line style and
a marker, too. A band is the range over seeds, and the legend says how many there are.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gagar_mini.view.compare import Run, by_method

PROMPT, POLICY, OBSERVATION = "0.6", "tab:blue", "tab:orange"
PASS, FAIL = "tab:green", "tab:red"
BASELINE, METHOD = "0.25", "tab:blue"

RULE_STYLES = {
    "binary": (BASELINE, "-", "o"),
    "gagar": (METHOD, "--", "s"),
    "gagar-exact": ("tab:cyan", (0, (5, 1)), "D"),
    "downweight": ("tab:purple", "-.", "^"),
}
CONTROL_STYLES = {
    "agentic": ("tab:orange", (0, (4, 1, 1, 1)), "h"),
    "llm": ("teal", (0, (2, 1)), "p"),
    "random": ("tab:brown", ":", "v"),
    "reversed": ("tab:pink", (0, (3, 1, 1, 1)), "P"),
    "shortest": ("tab:olive", (0, (1, 2)), "X"),
    "oracle": ("tab:green", (0, (6, 2)), "*"),
}
"""Colour, line style and marker; with a grader other than the rubric, its own count."""

LABELS = {
    "reward/pass_rate": "pass rate on training tasks",
    "patch/clean_share": "share of passes without noise",
    "patch/noise_lines": "noise lines per passing patch",
    "rollout/turns": "turns per trajectory",
    "rollout/action_tokens": "sampled tokens per trajectory",
    "policy/entropy": "entropy (nats per token)",
    "grader/fallback_rate": "gradings without a usable grade",
    "time/grade_cpu_share": "share of the step's processor time",
    "time/grade_wall_share": "share of the step's wall time",
    "credit/scale_mean": "credit scale (lambda), uncapped",
    "pass_rate": "pass rate on held-out tasks",
    "clean_share": "share of held-out passes without noise",
    "action_tokens": "sampled tokens per held-out trajectory",
}


def plot_learning_curves(
    runs: Sequence[Run], metric: str, ax: Axes, *, smooth: int = 5
) -> Axes:
    """Mean over seeds of a metric against the step, with the range over seeds as band.

    Each run is first averaged over a trailing window of `smooth` steps; steps without a
    value (a mean over nothing) are left out of it.
    """
    for method, members in by_method(runs).items():
        curves = [curve(run, metric, smooth) for run in members]
        if all(np.isnan(values).all() for values in curves):
            continue
        length = min(map(len, curves))
        stacked = np.stack([values[:length] for values in curves])
        steps = np.arange(length)
        style = style_of(members[0])
        label = f"{method} (n = {len(members)})"
        ax.plot(steps, stacked.mean(0), label=label, markevery=0.2, **style)
        if len(members) > 1:
            low, high = stacked.min(0), stacked.max(0)
            ax.fill_between(steps, low, high, color=style["color"], alpha=0.15, lw=0)
    ax.set_xlabel("optimisation step")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel(LABELS.get(metric, metric))
    if metric.endswith(("_rate", "_share")):
        ax.set_ylim(-0.02, 1.02)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def curve(run: Run, metric: str, smooth: int) -> np.ndarray:
    """[steps]: trailing mean over up to `smooth` steps, NaN where there is no value."""
    raw = [line.get(metric) for line in run.metrics]
    values = np.array([np.nan if value is None else value for value in raw], float)
    smoothed = np.full(len(values), np.nan)
    for step in range(len(values)):
        window = values[max(0, step - smooth + 1) : step + 1]
        known = window[~np.isnan(window)]
        smoothed[step] = known.mean() if len(known) else np.nan
    return smoothed


def plot_budget_sweep(
    runs: Sequence[Run], ax: Axes, *, metric: str = "pass_rate"
) -> Axes:
    """A held-out figure against the budget of turns, one line a method.

    Needs runs evaluated with `gagar-mini eval RUN --max-turns ...`; the newest
    evaluation of each budget counts. Bars are the range over seeds.
    """
    for method, members in by_method(runs).items():
        by_run = [
            {line["max_turns"]: line[metric] for line in run.evaluations}
            for run in members
        ]
        turns = sorted(set.intersection(*map(set, by_run)))
        if not turns:
            continue
        values = np.array([[found[turn] for turn in turns] for found in by_run])
        mean = values.mean(0)
        spread = np.stack([mean - values.min(0), values.max(0) - mean])
        label = f"{method} (n = {len(members)})"
        style = style_of(members[0])
        ax.errorbar(turns, mean, yerr=spread, label=label, capsize=3, **style)
        ax.set_xticks(turns)
    ax.set_xlabel("turns allowed")
    ax.set_ylabel(LABELS.get(metric, metric))
    return ax


def plot_fallbacks(runs: Sequence[Run], ax: Axes) -> Axes:
    """Graded groups that ended on plain GRPO, so that a broken grader is seen."""
    graded = [run for run in runs if run.config.grader.name != "none"]
    return plot_learning_curves(graded, "grader/fallback_rate", ax)


def plot_credit_scale(runs: Sequence[Run], ax: Axes) -> Axes:
    """The mean credit scale of the redistributed groups, and the cap."""
    graded = [run for run in runs if run.config.grader.name != "none"]
    plot_learning_curves(graded, "credit/scale_mean", ax)
    caps = sorted({run.config.credit.max_scale for run in graded})
    for cap in caps:
        ax.axhline(cap, color="0.5", lw=0.8, ls=":")
        ax.annotate(f"cap {cap:g}", (0, cap), va="bottom", color="0.4", fontsize=8)
    # lambda is at least 1, since no factor exceeds 1
    ax.set_ylim(1, max([ax.get_ylim()[1], *(1.05 * cap for cap in caps)]))
    return ax


def save_comparison(runs: Sequence[Run], path: Path) -> None:
    """Four panels to a file: pass rate, quality, cost, and what the grader did."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    plot_learning_curves(runs, "reward/pass_rate", top_left).set_title("Success")
    plot_learning_curves(runs, "patch/clean_share", top_right).set_title("Quality")
    plot_learning_curves(runs, "rollout/action_tokens", low_left).set_title("Cost")
    plot_credit_scale(runs, low_right).set_title("Credit scale of graded groups")
    handles, labels = top_left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel(caption(runs), fontsize=8, color="0.35")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def caption(runs: Sequence[Run]) -> str:
    """Presets, seeds and steps of the runs, for below a figure."""
    presets = ", ".join(sorted({run.config.preset for run in runs}))
    seeds = ", ".join(map(str, sorted({run.config.seed for run in runs})))
    steps = max(len(run.metrics) for run in runs)
    return (
        f"preset {presets}, seeds {seeds}, {steps} steps; lines: mean over seeds of a "
        "trailing mean over 5 steps; bands: range over seeds"
    )


def style_of(run: Run) -> dict[str, object]:
    """Colour, line style and marker of a method: the same in every figure."""
    default = ("tab:gray", "-", ".")
    style = CONTROL_STYLES.get(
        run.config.grader.name, RULE_STYLES.get(run.config.credit.rule, default)
    )
    colour, line, marker = style
    return {"color": colour, "ls": line, "marker": marker, "markersize": 4, "lw": 1.5}
