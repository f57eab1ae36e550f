"""The plots of a run report, each a matplotlib Figure over consumed tokens with the phase changes marked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .console import format_count
from .summary import History, PhaseChange, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 600  # a curve; a layer's curve gets a third, as there may be 62 of them
BLUE, ORANGE, GREEN, RED, GREY = "#2563eb", "#ea580c", "#16a34a", "#dc2626", "#64748b"
STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.6,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Plot:
    title: str
    caption: str
    figure: Figure


def build_plots(history: History) -> list[Plot]:
    """The plots for which the run logged something, in reading order."""
    import matplotlib

    builders = (
        ("Loss", "Language-model loss in nats per token.", _loss),
        (
            "Indexer KL by layer",
            "KL(P || P_idx) on a log scale: one line a layer, the mean in black, a uniform index dashed. "
            "At the switch its support shrinks from all visible tokens to the kept ones.",
            _kl,
        ),
        ("Index recall", "On rows with more than k visible blocks. Skill: 0 is chance, 1 is perfect.", _recall),
        (
            "Gradient norms and learning rate",
            "Before clipping, on a log scale; the learning rates on the right.",
            _norms,
        ),
        ("Expert load", "Tokens of the busiest expert over the mean, worst layer: 1 is perfect balance.", _moe),
    )
    plots = []
    with matplotlib.rc_context(STYLE):
        for title, caption, build in builders:
            figure = build(history)
            if figure is not None:
                plots.append(Plot(title, caption, figure))
    return plots


def thin(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """At most `max_points` points: the lowest and the highest of each stretch, so that spikes stay visible."""
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(len(points) / (max_points // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept


def tick_text(tokens: float, _position: int | None = None) -> str:
    """Tokens as on the console, without zeros that say nothing: 1.5M, 300K."""
    text = format_count(tokens)
    number = text.rstrip("KMBT")
    short = number.rstrip("0").rstrip(".") if "." in number else number
    return short + text[len(number) :]


def _new_axes(history: History) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(6.4, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    axes = figure.add_subplot()
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(tick_text))
    return figure, axes


def _finish(figure: Any, axes: Any, history: History) -> Any:
    mark_phases(axes, history.phase_changes)
    if history.records:
        axes.set_xlim(0, max(1, history.records[-1]["consumed_tokens"]) * 1.02)
    figure.legend(loc="outside upper left", ncols=6, handlelength=1.6, columnspacing=1.4)
    return figure


def mark_phases(axes: Any, changes: Iterable[PhaseChange]) -> None:
    """A vertical line where a phase begins, with the name of that phase."""
    for change in changes:
        mark = f"phase-{change.after}-{change.step}"
        axes.axvline(change.tokens, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1, gid=mark)
        axes.annotate(
            f" {change.after}",
            (change.tokens, 1.0),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8,
            color=GREY,
        )


def _draw(axes: Any, points: Sequence[Point], label: str | None, *, max_points: int = MAX_POINTS, **style: Any) -> bool:
    if not points:
        return False
    xs, ys = zip(*thin(points, max_points), strict=True)
    if len(xs) < 40 and "marker" not in style:
        style |= {"marker": "o", "markersize": 2.5}
    axes.plot(xs, ys, label=label, **style)
    return True


def _loss(history: History) -> Any:
    figure, axes = _new_axes(history)
    drawn = _draw(axes, history.series("train/lm_loss"), "train", color=BLUE, linewidth=1.0, marker="")
    colors = (ORANGE, GREEN, RED, GREY)
    for index, name in enumerate(history.eval_sets()):
        color = colors[index % len(colors)]
        drawn |= _draw(axes, history.series(f"eval/{name}/lm_loss"), name, color=color, marker="o", markersize=3)
    axes.set_ylabel("nats per token")
    return _finish(figure, axes, history) if drawn else None


def _kl(history: History) -> Any:
    from matplotlib import colormaps

    figure, axes = _new_axes(history)
    layers = sorted(int(m[1]) for name in history.names() if (m := re.fullmatch(r"indexer/kl/layer_(\d+)", name)))
    for rank, layer in enumerate(layers):
        position = rank / max(1, len(layers) - 1)
        label = f"layer {layer}" if layer in (layers[0], layers[-1]) else None
        points = _positive(history.series(f"indexer/kl/layer_{layer}"))
        color = colormaps["viridis"](0.9 * position)
        _draw(axes, points, label, max_points=MAX_POINTS // 3, color=color, linewidth=0.8, alpha=0.8, marker="")
    drawn = _draw(axes, _positive(history.series("indexer/kl")), "mean", color="black", marker="", linewidth=1.6)
    uniform = _positive(history.series("indexer/kl_uniform"))
    drawn |= _draw(axes, uniform, "uniform index", color=RED, linestyle="--", linewidth=1.2, marker="")
    if not (drawn or layers):
        return None
    _log_scale(axes)
    axes.set_ylabel("nats")
    return _finish(figure, axes, history)


def _recall(history: History) -> Any:
    figure, axes = _new_axes(history)
    drawn = False
    curves: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("score_recall", "score recall", {"color": BLUE}),
        ("random_score_recall", "random selection", {"color": BLUE, "linestyle": ":"}),
        ("score_recall_skill", "skill", {"color": GREEN}),
        ("block_recall", "block recall", {"color": ORANGE}),
        ("captured_mass", "captured mass", {"color": GREY}),
    )
    for name, label, style in curves:
        points = history.series(f"indexer/{name}")
        if not points and history.eval_sets():
            points = history.series(f"eval/{history.eval_sets()[0]}/{name}")
        drawn |= _draw(axes, points, label, **style)
    if not drawn:
        return None
    low = min(0.0, *(float(y) for line in axes.lines for y in line.get_ydata()))
    axes.set_ylim(low, 1.0)
    return _finish(figure, axes, history)


def _norms(history: History) -> Any:
    figure, axes = _new_axes(history)
    thin_line: dict[str, Any] = {"linewidth": 0.9, "marker": ""}
    drawn = _draw(axes, _positive(history.series("optim/grad_norm")), "backbone norm", color=BLUE, **thin_line)
    index_norm = _positive(history.series("optim/indexer_grad_norm"))
    drawn |= _draw(axes, index_norm, "indexer norm", color=ORANGE, **thin_line)
    if drawn:
        _log_scale(axes)
        axes.set_ylabel("gradient norm")
    rates = axes.twinx()
    rates.grid(False)
    rates.spines["right"].set_visible(True)
    dashed: dict[str, Any] = {"linestyle": "--", "linewidth": 1.1, "alpha": 0.7, "marker": ""}
    has_rates = _draw(rates, history.series("optim/lr"), "backbone LR", color=BLUE, **dashed)
    has_rates |= _draw(rates, history.series("optim/indexer_lr"), "indexer LR", color=ORANGE, **dashed)
    if has_rates:
        rates.set_ylabel("learning rate")
        rates.set_ylim(bottom=0)
        rates.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    else:
        rates.set_visible(False)
    return _finish(figure, axes, history) if drawn or has_rates else None


def _moe(history: History) -> Any:
    figure, axes = _new_axes(history)
    drawn = _draw(
        axes, history.series("moe/max_over_mean_load"), "max / mean load", color=BLUE, linewidth=1.0, marker=""
    )
    if drawn:
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("max / mean")
    dead = history.series("moe/dead_experts")
    if any(value for _, value in dead):
        experts = axes.twinx() if drawn else axes
        experts.grid(False)
        experts.spines["right"].set_visible(True)
        experts.set_ylabel("dead experts")
        drawn |= _draw(experts, dead, "dead experts", color=RED, linewidth=0.9, marker="")
        experts.set_ylim(bottom=0)
    return _finish(figure, axes, history) if drawn else None


def _positive(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if y > 0]


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    values = [float(y) for line in axes.lines for y in line.get_ydata()]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    if max(values) / min(values) < 30:  # under a decade and a half, decades alone leave the axis bare
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
