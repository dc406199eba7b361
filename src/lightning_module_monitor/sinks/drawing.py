"""Recorded values as figures of matplotlib: what every figure has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import require

if TYPE_CHECKING:  # it takes a second to import, and is an extra
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

POINTS_PER_ROW = 10
"""A name is 8 points high."""
MAX_COLUMN_LABELS = 10
WIDE = 30.0
"""A magnitude gets a logarithmic scale if its largest value is so many times the smallest one that is not zero."""
MAX_MARKERS = 100
"""A longer curve has no mark for each step."""

_UNITS = {
    "attention_entropy": "nats",
    "attention_relative_entropy": "0 to 1",
    "attention_sink": "0 to 1",
    "cosine": "-1 to 1",
    "gain": "norm / norm",
    "log_gain": "natural logarithm of norm / norm",
    "nonfinite_count": "elements",
    "ratio": "norm / norm",
}
"""By kind or statistic. Other statistics have the unit of the tensor, which is not known."""


def label_of(kind: str, statistic: str) -> str:
    """What a scale says: the statistic, with its unit where it has one of its own.

    >>> label_of("activation", "rms"), label_of("validation/attention_entropy", "mean"), label_of("activation", "zero_fraction")
    ('rms', 'mean [nats]', 'zero_fraction [0 to 1]')
    """
    unit = _UNITS.get(kind.rpartition("/")[2]) or _UNITS.get(statistic) or ("0 to 1" if statistic.endswith("_fraction") else "")
    return f"{statistic} [{unit}]" if unit else statistic


def new_axes(num_rows: int = 20) -> Axes:
    """Axes of a new figure, as high as so many rows need.

    Raises:
        ImportError: If matplotlib is not installed; has the command that installs it.
    """
    height = float(np.clip(1.4 + 0.19 * num_rows, 3.0, 12.0))
    axes: Axes = require("matplotlib.pyplot", "plot").subplots(figsize=(8.0, height), layout="constrained")[1]
    return axes


def spans_decades(values: NDArray[np.float64]) -> bool:
    """Whether values are a magnitude that only a logarithmic scale shows whole."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return bool(len(positive) and finite.min() >= 0 and positive.max() >= WIDE * positive.min())


def draw_image(axes: Axes, values: NDArray[np.float64], is_recorded: NDArray[np.bool_], *, label: str) -> None:
    """Draw a matrix as an image with a colour bar.

    A cell without a value stays grey, one that is not finite is red. Signed values have a scale with white at zero. On a logarithmic scale
    zero is black.

    Args:
        axes: Where.
        values: Shape ``(rows, columns)``.
        is_recorded: Which cells have a value; same shape.
        label: Of the colour bar.
    """
    colormaps = require("matplotlib", "plot").colormaps
    finite = values[is_recorded & np.isfinite(values)]
    norm = _norm(finite)
    is_log = type(norm).__name__ == "LogNorm"
    cmap = colormaps["RdBu_r" if finite.size and finite.min() < 0 < finite.max() else "viridis"].with_extremes(under="black")
    # A logarithm has no place for zero: it is shown as smaller than everything else.
    shown = np.where(is_recorded, np.where(values == 0, np.finfo(np.float64).tiny, values), np.nan) if is_log else values
    hidden = ~is_recorded | ~np.isfinite(values)
    axes.set_facecolor("lightgrey")
    image = axes.imshow(np.ma.array(shown, mask=hidden), aspect="auto", interpolation="nearest", norm=norm, cmap=cmap)
    bad = is_recorded & ~np.isfinite(values)
    if bad.any():
        red = np.zeros((*values.shape, 4))
        red[bad] = (0.84, 0.10, 0.11, 1.0)
        axes.imshow(red, aspect="auto", interpolation="nearest")
        label += " (red: not finite)"
    has_zeros = is_log and bool((finite == 0).any())
    axes.figure.colorbar(image, ax=axes, pad=0.01, label=label, extend="min" if has_zeros else "neither")


def _norm(finite: NDArray[np.float64]) -> Normalize:
    """The scale of the colours of these values."""
    colors = require("matplotlib.colors", "plot")
    norm: Normalize
    if spans_decades(finite):
        norm = colors.LogNorm(finite[finite > 0].min(), finite.max())
    elif finite.size and finite.min() < 0 < finite.max():
        norm = colors.CenteredNorm(halfrange=float(np.abs(finite).max()))
    else:
        norm = colors.Normalize(*((finite.min(), finite.max()) if finite.size else (0.0, 1.0)))
    return norm


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of an image, as many of them as are legible."""
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    ticks = _ticks(len(names), max(1, int(points / POINTS_PER_ROW)))
    axes.set_yticks(ticks, [names[tick] for tick in ticks], fontsize=8)


def label_columns(axes: Axes, names: Sequence[object], axis_label: str) -> None:
    """Name the columns of an image, as many of them as are legible."""
    ticks = _ticks(len(names), MAX_COLUMN_LABELS)
    axes.set_xticks(ticks, [str(names[tick]) for tick in ticks])
    axes.set_xlabel(axis_label)


def _ticks(num: int, most: int) -> range:
    return range(0, num, max(1, -(-num // most)))


def mark_not_finite(axes: Axes, places: NDArray[np.int64]) -> None:
    """Put red crosses at the upper edge, at these places of the x axis."""
    edge = axes.get_xaxis_transform()
    axes.plot(places, np.ones(len(places)), "x", color="tab:red", transform=edge, clip_on=False, label="not finite")


def draw_curves(axes: Axes, curves: Sequence[tuple[str, NDArray[np.int64], NDArray[np.float64]]], *, label: str) -> None:
    """Draw curves over steps; values that are not finite are red crosses at the upper edge.

    Args:
        axes: Where.
        curves: Name, steps and values of each.
        label: Of the values' axis.
    """
    for name, steps, values in curves:
        is_finite = np.isfinite(values)
        axes.plot(steps, np.where(is_finite, values, np.nan), marker="." if len(steps) <= MAX_MARKERS else "", label=name)
        if not is_finite.all():
            mark_not_finite(axes, steps[~is_finite])
    if curves and spans_decades(np.concatenate([values for _name, _steps, values in curves])):
        axes.set_yscale("log")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.legend(fontsize=8, frameon=False)
