"""Draws heat maps of a run's store for the loggers that log pictures."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import Log, require
from lightning_module_monitor.keys import is_total
from lightning_module_monitor.lightning_packages import Logger
from lightning_module_monitor.sinks.charts import Chart, charts_of
from lightning_module_monitor.sinks.logger_types import LoggerFailures, is_tensorboard, is_wandb, key_prefix, takes_media
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store

FIRST_DRAWING_S = 600.0
"""Seconds from the first record to the first drawing; the time doubles with each drawing."""

_FIRST_CHOICE = ("rms", "norm", "ratio", "gain", "mean")
"""Order of preference among statistics with equally many sites."""
_MAX_ROWS = 10_000
"""W&B's limit for the table of a chart."""
_PIXELS_PER_INCH = 80


def drawn_charts(keys: Iterable[str], modules: Collection[str] = ()) -> list[Chart]:
    """The chart with the most sites of each kind: pictures of all statistics would take too long."""
    charts = charts_of(keys, modules)

    def preference(chart: Chart) -> tuple[int, int]:
        return -charts[chart], _FIRST_CHOICE.index(chart.statistic) if chart.statistic in _FIRST_CHOICE else len(_FIRST_CHOICE)

    by_kind: dict[str, Chart] = {}
    for chart in sorted(charts, key=preference):
        by_kind.setdefault(chart.kind, chart)
    return [*by_kind.values()]


def picture(store: StoreReader, chart: Chart) -> NDArray[np.uint8]:
    """The heat map of a chart, without pyplot; shape ``(height, width, 3)``."""
    figure = require("matplotlib.figure", "plot").Figure(figsize=(8.0, 4.0), dpi=_PIXELS_PER_INCH)
    canvas = require("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    axes = store.plot.heatmap(*chart, ax=figure.subplots())
    # Room for the names by their length: matplotlib's own layout would double the time.
    longest = max(len(label.get_text()) for label in axes.get_yticklabels())
    figure.subplots_adjust(left=min(0.5, 0.03 + 0.009 * longest), right=0.99, bottom=0.14, top=0.92)
    canvas.draw()
    pixels: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3]
    return pixels


def lines(store: StoreReader, chart: Chart) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and finite values by site. Steps are left out evenly until W&B takes the rest."""
    matrix = store.matrix(chart.kind)
    modules = {module.name for module in store.modules()}
    columns = [column for column, key in enumerate(matrix.keys) if key.statistic == chart.statistic and not is_total(key, modules)]
    rows = slice(None, None, 1 + len(matrix.steps) * len(columns) // _MAX_ROWS)
    line_by_site = {}
    for column in columns:
        values = matrix.values[rows, column]
        is_finite = np.isfinite(values)
        line_by_site[matrix.keys[column].site] = (matrix.steps[rows][is_finite].tolist(), values[is_finite].tolist())
    return line_by_site


def draw(logger: Logger, store: StoreReader, step: int) -> None:
    """Log heat maps, and for W&B also a chart with the lines of all sites."""
    for chart in drawn_charts(store, [module.name for module in store.modules()]):
        name = f"{chart.kind}/{chart.statistic}"
        if is_tensorboard(logger):
            logger.experiment.add_image(f"{key_prefix(logger)}heat_maps/{name}", picture(store, chart), step, dataformats="HWC")
        elif is_wandb(logger):
            line_by_site = lines(store, chart)
            xs, ys = zip(*line_by_site.values(), strict=True)
            plot = importlib.import_module("wandb").plot
            curves = plot.line_series(xs, ys, keys=list(line_by_site), title=f"{chart.kind}: {chart.statistic}", xname="optimizer step")
            logger.log_image(f"heat_maps/{name}", [picture(store, chart)], step)
            logger.log_metrics({f"charts/{name}": curves}, step)


class HeatMaps:
    """Draws heat maps of a run's store for its loggers that log pictures.

    A drawing takes half a second for each kind, in the thread that trains: after 10, 20, 40, ... minutes, and when the run ends.
    """

    def __init__(self, loggers: Sequence[Logger], messages: Log) -> None:
        has_matplotlib = importlib.util.find_spec("matplotlib") is not None
        self._loggers = [logger for logger in loggers if has_matplotlib and takes_media(logger)]
        self._failures = LoggerFailures("Heat maps were not drawn for %s (%s: %s). Logged once.", messages)
        self._began_s = time.monotonic()
        self._wait_s = FIRST_DRAWING_S
        self._drawn_step = -1

    def draw_if_due(self, store: Path, step: int) -> None:
        """Draw the records until this step, if a drawing is due. Never raises."""
        if time.monotonic() - self._began_s >= self._wait_s:
            self._wait_s *= 2
            self.draw(store, step)

    def draw(self, store: Path, step: int) -> None:
        """Draw the records until this step once. Never raises; a logger that fails is tried again at the next drawing."""
        if step == self._drawn_step:
            return
        self._drawn_step = step
        for logger in self._loggers:
            with self._failures.reported(logger):
                draw(logger, load_store(store), step)
