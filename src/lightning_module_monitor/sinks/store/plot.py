"""Figures of a store: ``store.plot.heatmap("activation", "rms")``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import Described, Description, description_of_file
from lightning_module_monitor.errors import ConfigError, require
from lightning_module_monitor.histogram import FINITE, LABELS, NUM_BINS
from lightning_module_monitor.keys import Key, is_total
from lightning_module_monitor.kinds import CONTEXT_KIND, KINDS, LOSS, OWN_KIND
from lightning_module_monitor.record import is_undefined
from lightning_module_monitor.sinks.store.matrices import Table
from lightning_module_monitor.sinks.store.read_access import AbsentKeyError
from lightning_module_monitor.sinks.store.series import StoredSeries
from lightning_module_monitor.suggestions import nearest

if TYPE_CHECKING:  # matplotlib takes a second to import, and is an extra
    from matplotlib.axes import Axes

_HEAD = re.compile(r"(.*)\.head_(\d+)")

POINTS_PER_ROW = 10
"""Height of a row, for a name in letters of 8 points."""
MAX_COLUMN_LABELS = 10
WIDE = 30.0
"""A magnitude gets a logarithmic scale from this ratio of its largest to its smallest non-zero value on."""
MAX_LABELS = 3
"""More statistics than these are not named at the axis."""
MAX_CURVES = 20
"""More curves than these have no legend."""
MAX_MARKERS = 100
"""A longer curve has no markers."""

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
"""Unit by kind or statistic. Other statistics have the unknown unit of the tensor."""


class StorePlots(Described):
    """Draws the content of a store with matplotlib (extra ``plot``). Every method returns the axes.

    The argument ``ax`` has the axes to draw into; by default those of a new figure of ``matplotlib.pyplot``, which a notebook shows.
    All methods raise ``KeyError`` for names that were not recorded, with the nearest name, and ``ImportError`` without matplotlib.
    """

    def __init__(self, store: StoredSeries) -> None:
        self._store = store

    def _describe(self) -> Description:
        return description_of_file(self._store.location, "figure", ("store.plot",), lambda: [[call] for call in self._calls()])

    def _calls(self) -> Iterator[str]:
        keys, modules = self._store.keys(), {module.name for module in self._store.modules()}
        sited = [parts for parts in map(Key.parse, keys) if parts.site and parts.kind != OWN_KIND and not is_total(parts, modules)]
        charts = Counter((parts.full_kind, parts.statistic) for parts in sited)
        statistics = {kind: statistic for (kind, statistic), _num_sites in reversed(charts.most_common())}  # the one with the most sites
        for figure in ("heatmap", "profile"):
            yield from (f"{figure}({kind!r}, {statistic!r})" for kind, statistic in statistics.items())
        loss = next((key for key in keys if key.endswith(f"{CONTEXT_KIND}/{LOSS}")), None)
        for text in [*([loss] if loss else []), *(f"{kind}/.*/{statistic}" for kind, statistic in statistics.items())]:
            yield f"series({text!r})"
        for key in self._store.histogram_keys()[:1]:
            yield f"histogram({key!r})"
        for kind in [kind for kind in statistics if kind in KINDS and KINDS[kind].of_heads]:
            yield f"attention({kind!r})"

    def heatmap(self, kind: str, statistic: str, *, sites: str = ".*", ax: Axes | None = None) -> Axes:
        """A statistic of a kind, sites by steps; a magnitude that spans decades has a logarithmic scale.

        Args:
            kind: One of the store's ``kinds()``, e.g. ``activation``.
            statistic: E.g. ``rms``.
            sites: Pattern (``re.fullmatch``) of the sites.
            ax: Axes to draw into.
        """
        table = self._table(kind, statistic, sites)
        ax = ax or new_axes(len(table.sites))
        draw_image(ax, table.values, table.is_recorded, rows=table.sites, columns=table.steps.tolist(), label=label_of(kind, statistic))
        ax.set_title(f"{kind}: {statistic}")
        return ax

    def profile(
        self, kind: str, statistic: str, *, steps: int | Sequence[int] | None = None, sites: str = ".*", ax: Axes | None = None
    ) -> Axes:
        """A statistic of a kind over the depth of the model, a line for each step.

        Parameters have a separate line for each role, which is the last part of the name: ``weight``, ``bias``.

        Args:
            kind: One of the store's ``kinds()``.
            statistic: E.g. ``rms``.
            steps: Recorded steps. Default: the first, a middle and the last step.
            sites: Pattern (``re.fullmatch``) of the sites.
            ax: Axes to draw into.
        """
        table = self._table(kind, statistic, sites)
        columns = self._columns(table, steps)
        ax = ax or new_axes(len(table.sites))
        spec = KINDS.get(kind.rpartition("/")[2])
        has_parameters = spec is not None and spec.site == "parameter"
        roles = np.array([site.rpartition(".")[2] if has_parameters else "" for site in table.sites])
        for color, column in enumerate(columns):
            values = np.where(np.isfinite(table.values[:, column]), table.values[:, column], np.nan)
            for style, role in enumerate(dict.fromkeys(roles.tolist())):
                rows = np.flatnonzero(roles == role)
                label = f"{role}, step {table.steps[column]}" if role else f"step {table.steps[column]}"
                ax.plot(values[rows], rows, ("-", "--", ":", "-.")[style % 4], marker=".", color=f"C{color % 10}", label=label)
        if spans_decades(table.values):
            ax.set_xscale("log")
        label_rows(ax, table.sites)
        ax.set_ylim(len(table.sites) - 0.5, -0.5)  # the first module on top, as in a heat map
        ax.set_xlabel(label_of(kind, statistic))
        ax.set_title(f"{kind}: {statistic} over depth")
        ax.legend(fontsize=8, frameon=False)
        return ax

    def series(self, key: str, *more: str, ax: Axes | None = None) -> Axes:
        """The values of keys over the steps; red crosses at the upper edge are non-finite values, gaps undefined ones.

        Args:
            key: One of the store's ``keys()``; or a pattern (``re.fullmatch``).
            more: Further keys and patterns.
            ax: Axes to draw into.
        """
        matched = ([text] if text in self._store else self._store.keys(text) for text in (key, *more))
        keys = list(dict.fromkeys(name for names in matched for name in names))
        curves = [self._store.series(name) for name in keys]
        labels = {label_of(parsed.full_kind, parsed.statistic) for parsed in map(Key.parse, keys)}
        ax = ax or new_axes()
        for name, (steps, values) in zip(keys, curves, strict=True):
            is_finite = np.isfinite(values)
            ax.plot(steps, np.where(is_finite, values, np.nan), marker="." if len(steps) <= MAX_MARKERS else "", label=name)
            if (is_bad := ~is_finite & ~is_undefined(values)).any():
                mark_not_finite(ax, steps[is_bad])
        if spans_decades(np.concatenate([values for _steps, values in curves])):
            ax.set_yscale("log")
        ax.set_xlabel("optimizer step")
        ax.set_ylabel(" and ".join(sorted(labels)) if len(labels) <= MAX_LABELS else "value")
        if len(keys) <= MAX_CURVES:
            ax.legend(fontsize=8, frameon=False)
        ax.set_title(key if not more else f"{len(keys)} series")
        return ax

    def histogram(self, key: str, *, ax: Axes | None = None) -> Axes:
        """The histograms of a key over the steps: the share of the finite elements in each bin.

        Bins that are empty in every step are left out. Red crosses at the upper edge are steps with non-finite elements.

        Args:
            key: One of the store's ``histogram_keys()``.
            ax: Axes to draw into.
        """
        steps, counts, _edges = self._store.histogram(key)
        totals = counts.sum(axis=1, keepdims=True)
        shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
        filled = np.flatnonzero(counts.any(axis=0))[::-1] if counts.any() else [NUM_BINS // 2]  # the largest values on top
        image, bins = shares[:, filled].T, [LABELS[FINITE][index] for index in filled]
        ax = ax or new_axes(len(bins))
        draw_image(ax, image, image > 0, rows=bins, columns=steps.tolist(), label="share of the finite elements")
        if (not_finite := self._store.nonfinite(key)[1].any(axis=1)).any():
            mark_not_finite(ax, np.flatnonzero(not_finite))
            ax.legend(fontsize=8, frameon=False)
        ax.set_ylabel("value of an element")
        ax.set_title(key)
        return ax

    def attention(
        self, kind: str = "attention_entropy", statistic: str | None = None, *, step: int | None = None, ax: Axes | None = None
    ) -> Axes:
        """A statistic of every attention head in a step, modules by heads.

        Args:
            kind: ``attention_entropy``, ``attention_relative_entropy``, ``attention_max_logit`` or ``attention_sink``.
            statistic: Default: the first recorded statistic.
            step: A recorded step. Default: the last step.
            ax: Axes to draw into.
        """
        statistic = statistic or self._store.matrix(kind).keys[0].statistic
        table = self._table(kind, statistic, r".*\.head_\d+")
        (column,) = self._columns(table, int(table.steps[-1]) if step is None else step)
        heads = [(match[1], int(match[2])) for match in map(_HEAD.fullmatch, table.sites) if match]
        modules = list(dict.fromkeys(module for module, _head in heads))
        shape = (len(modules), 1 + max(head for _module, head in heads))
        values, is_recorded = np.full(shape, np.nan), np.zeros(shape, np.bool_)
        for row, (module, head) in enumerate(heads):
            cell = modules.index(module), head
            values[cell], is_recorded[cell] = table.values[row, column], table.is_recorded[row, column]
        ax = ax or new_axes(len(modules))
        draw_image(ax, values, is_recorded, rows=modules, columns=range(shape[1]), label=label_of(kind, statistic))
        ax.set_xlabel("head")
        ax.set_title(f"{kind}: {statistic} at step {table.steps[column]}")
        return ax

    def _table(self, kind: str, statistic: str, sites: str) -> Table:
        """The values of a statistic at the sites that a pattern matches; without totals, unless it matches nothing else."""
        matrix = self._store.matrix(kind)
        try:
            pattern = re.compile(sites)
        except re.error as error:
            raise ConfigError(f"sites is {sites!r}; expected a regular expression ({error}).") from error
        candidates = [column for column, key in enumerate(matrix.keys) if key.statistic == statistic]
        if not candidates:
            names = dict.fromkeys(key.statistic for key in matrix.keys)
            raise AbsentKeyError(f"{str(self._store.path)!r} has no {statistic!r} of {kind!r}{nearest(statistic, names)}")
        columns = [column for column in candidates if pattern.fullmatch(matrix.keys[column].site)]
        if not columns:
            known = [matrix.keys[column].site for column in candidates]
            raise AbsentKeyError(
                f"sites {sites!r} matches none of {len(known)} sites with {statistic!r} of {kind!r}{nearest(sites, known)}"
            )
        modules = {module.name for module in self._store.modules()}
        return matrix.table([column for column in columns if not is_total(matrix.keys[column], modules)] or columns)

    @staticmethod
    def _columns(table: Table, steps: int | Sequence[int] | None) -> list[int]:
        """The indices of the columns of these steps; by default those of the first, a middle and the last step."""
        if steps is None:
            return sorted({0, len(table.steps) // 2, len(table.steps) - 1})
        column_by_step = {step: column for column, step in enumerate(table.steps.tolist())}
        wanted = [steps] if isinstance(steps, int) else list(steps)
        for step in wanted:
            if step not in column_by_step:
                closest = min(column_by_step, key=lambda recorded: abs(recorded - step))
                raise AbsentKeyError(f"step {step} was not recorded; nearest: {closest}")
        return [column_by_step[step] for step in wanted]


def label_of(kind: str, statistic: str) -> str:
    """A statistic with its unit, if that is known.

    >>> label_of("activation", "rms"), label_of("validation/attention_entropy", "mean"), label_of("activation", "zero_fraction")
    ('rms', 'mean [nats]', 'zero_fraction [0 to 1]')
    """
    unit = _UNITS.get(kind.rpartition("/")[2]) or _UNITS.get(statistic) or ("0 to 1" if statistic.endswith("_fraction") else "")
    return f"{statistic} [{unit}]" if unit else statistic


def new_axes(num_rows: int = 20) -> Axes:
    """Axes of a new figure that is high enough for the rows."""
    height = float(np.clip(1.4 + 0.19 * num_rows, 3.0, 12.0))
    axes: Axes = require("matplotlib.pyplot", "plot").subplots(figsize=(8.0, height), layout="constrained")[1]
    return axes


def spans_decades(values: NDArray[np.float64]) -> bool:
    """Whether values are a magnitude that needs a logarithmic scale."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return bool(len(positive) and finite.min() >= 0 and positive.max() >= WIDE * positive.min())


def draw_image(
    axes: Axes, values: NDArray[np.float64], is_recorded: NDArray[np.bool_], *, rows: Sequence[str], columns: Sequence[int], label: str
) -> None:
    """Draw a matrix as an image with a colour bar, and name as many rows and columns as are legible.

    A cell without a value is grey, a non-finite cell is red. On a scale for values of both signs, zero is white; on a logarithmic scale,
    zero is black. Values and ``is_recorded`` have the shape ``(rows, columns)``; columns are steps, unless the caller labels them.
    """
    colors = require("matplotlib.colors", "plot")
    finite = values[is_recorded & np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    is_log, is_signed = spans_decades(finite), low < 0 < high
    if is_log:
        norm = colors.LogNorm(finite[finite > 0].min(), high)
    else:
        norm = colors.CenteredNorm(halfrange=max(-low, high)) if is_signed else colors.Normalize(low, high)
    cmap = require("matplotlib", "plot").colormaps["RdBu_r" if is_signed else "viridis"].with_extremes(under="black")
    # Zero has no logarithm. A tiny number in its place is below the scale, and has the color of ``under``.
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
    label_rows(axes, rows)
    ticks = _ticks(len(columns), MAX_COLUMN_LABELS)
    axes.set_xticks(ticks, [str(columns[tick]) for tick in ticks])
    axes.set_xlabel("optimizer step")


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of an image, as many as are legible."""
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    ticks = _ticks(len(names), max(1, int(points / POINTS_PER_ROW)))
    axes.set_yticks(ticks, [names[tick] for tick in ticks], fontsize=8)


def _ticks(num: int, most: int) -> range:
    return range(0, num, max(1, -(-num // most)))


def mark_not_finite(axes: Axes, positions: NDArray[np.int64]) -> None:
    """Draw red crosses at the upper edge, at these positions of the x axis."""
    edge = axes.get_xaxis_transform()
    axes.plot(positions, np.ones(len(positions)), "x", color="tab:red", transform=edge, clip_on=False, label="not finite")
