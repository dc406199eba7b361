"""What loggers get beside numbers: which series belong in one chart, and heat maps as pictures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import require
from lightning_module_monitor.record import OWN_KIND, SUMMARY_SITE, Key
from lightning_module_monitor.sinks.store.reader import StoreReader

NONFINITE_COUNT = "nonfinite_count"
_FIRST_CHOICE = ("rms", "norm", "ratio", "gain", "mean")
"""Of statistics of as many sites the first of these is drawn."""
_MAX_ROWS = 10_000
"""W&B's own limit for the table of a chart."""
_PIXELS_PER_INCH = 80


class Chart(NamedTuple):
    """The series of one kind and statistic, a line for each site."""

    kind: str
    """With prefix and stage."""
    statistic: str

    def pattern(self, before: str) -> str:
        """A regular expression of the keys, with what a logger puts before each."""
        return f"^{re.escape(f'{before}{self.kind}')}/[^/]+/{re.escape(self.statistic)}$"


def charts_of(keys: Iterable[str]) -> Counter[Chart]:
    """The charts that these keys need, with their numbers of sites; without what loggers get in exceptional cases only."""
    parsed = map(Key.parse, keys)
    of_sites = (key for key in parsed if key.site not in ("", SUMMARY_SITE) and key.kind != OWN_KIND and key.statistic != NONFINITE_COUNT)
    return Counter(Chart(key._replace(site="", statistic="").format(), key.statistic) for key in of_sites)


def drawn_charts(keys: Iterable[str]) -> list[Chart]:
    """One chart of each kind, that of the most sites: a picture of every statistic would take too long."""
    charts = charts_of(keys)

    def preference(chart: Chart) -> tuple[int, int]:
        return -charts[chart], _FIRST_CHOICE.index(chart.statistic) if chart.statistic in _FIRST_CHOICE else len(_FIRST_CHOICE)

    return list({chart.kind: chart for chart in sorted(charts, key=preference, reverse=True)}.values())


def picture(store: StoreReader, chart: Chart) -> NDArray[np.uint8]:
    """The heat map of a chart, without pyplot; shape ``(height, width, 3)``."""
    figure = require("matplotlib.figure", "plot").Figure(figsize=(8.0, 4.0), dpi=_PIXELS_PER_INCH)
    canvas = require("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    axes = store.plot.heatmap(*chart, ax=figure.subplots())
    # Room for the names by their length: to have matplotlib find it would double the time.
    longest = max(len(label.get_text()) for label in axes.get_yticklabels())
    figure.subplots_adjust(left=min(0.5, 0.03 + 0.009 * longest), right=0.99, bottom=0.14, top=0.92)
    canvas.draw()
    pixels: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3]
    return pixels


def lines(store: StoreReader, chart: Chart) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and finite values by site; of many records some, evenly spaced."""
    matrix = store.matrix(chart.kind)
    columns = [place for place, key in enumerate(matrix.keys) if key.statistic == chart.statistic]
    rows = slice(None, None, 1 + len(matrix.steps) * len(columns) // _MAX_ROWS)
    found = {}
    for column in columns:
        values = matrix.values[rows, column]
        is_finite = np.isfinite(values)
        found[matrix.keys[column].site] = (matrix.steps[rows][is_finite].tolist(), values[is_finite].tolist())
    return found
