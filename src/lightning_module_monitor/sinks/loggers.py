"""Records for every Lightning logger, directly and on Lightning's own x axis."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import Log, require
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.lightning_packages import LightningModule, Logger, is_a, is_overridden
from lightning_module_monitor.record import (
    CONTEXT_KIND,
    OWN_KIND,
    ROLL_UP_SITES,
    SUMMARY_SITE,
    TRAIN,
    Finding,
    Key,
    Record,
    is_context,
    is_undefined,
)
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store

*_SITES, ALL = ROLL_UP_SITES
"""The sites that stand for all others: of the minimum, the median and the maximum; and of the sum of all histograms."""

FINDINGS = f"{OWN_KIND}/findings"
"""Tag of findings in loggers that take texts."""

NONFINITE_COUNT = "nonfinite_count"


class LoggerSink:
    """Hands records to loggers; where there are too many keys, their roll-ups.

    ``pl_module.log`` is not used: it takes 0.3 ms for a single metric.

    Args:
        loggers: The trainer's loggers.
        roll_up: Whether to log, of each kind and statistic, the minimum, median and maximum over the sites only, and of
            histograms their sum.
        always: Patterns of keys that are logged in any case.
        messages: Gets a logger's failure, once.
        planned_keys: Keys to expect, for which TensorBoard gets a layout of charts.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        roll_up: bool,
        always: Sequence[re.Pattern[str]],
        messages: Log,
        planned_keys: Sequence[str] = (),
    ) -> None:
        self._loggers = list(loggers)
        self._roll_up = RollUps(always) if roll_up else None
        self._zero_counts = ZeroCounts(always)
        self._planned_keys: Sequence[str] | None = planned_keys
        """``None`` once the charts are laid out."""
        self._messages = messages
        self._failed: set[int] = set()
        self._has_reported_histograms = False

    def write(self, record: Record) -> None:
        """Log a record. A logger that fails is reported once, and tried again with the next record."""
        if not self._loggers:
            return
        values, histograms = without_context(record.values), record.histograms
        if self._roll_up is not None:
            values, histograms = self._roll_up(values), added_up(histograms)
        self._zero_counts.drop_from(values)
        without = [type(logger).__name__ for logger in self._loggers if not takes_histograms(logger)]
        if histograms and without and not self._has_reported_histograms:
            self._has_reported_histograms = True
            self._messages.info("Histograms are left out of %s, which has no place for them; the store has them.", ", ".join(without))
        planned_keys, self._planned_keys = self._planned_keys, None
        for logger in self._loggers:
            try:
                if values or histograms:
                    log(logger, values, histograms, record.step)
                log_findings(logger, record.findings)
                if planned_keys is not None:
                    lay_out(logger, charts_of([*planned_keys, *record.values]))
            except Exception as error:
                if id(logger) not in self._failed:
                    self._failed.add(id(logger))
                    name = type(logger).__name__
                    self._messages.warning("%s did not take the monitor's values (%s: %s). Logged once.", name, type(error).__name__, error)


def without_context(values: Mapping[str, float]) -> dict[str, float]:
    """The values without the context of training, which loggers have from Lightning."""
    return {key: value for key, value in values.items() if not is_context(key)}


def _is_tensorboard(logger: object) -> TypeGuard[Logger]:
    return is_a(logger, "TensorBoardLogger")


def _is_wandb(logger: object) -> TypeGuard[Logger]:
    return is_a(logger, "WandbLogger")


def takes_histograms(logger: object) -> bool:
    """Whether a logger has a histogram type of its own."""
    return _is_tensorboard(logger) or _is_wandb(logger)


class TakesMetrics(Protocol):
    """The method that every Lightning logger has."""

    def log_metrics(self, metrics: dict[str, Any], step: int, /) -> None:
        """Log the values of a step."""


def log(logger: TakesMetrics, values: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
    """Log numbers, and histograms if the logger has a type for them.

    The empty bins at the ends of a histogram are left away, and a histogram without a finite element is.
    """
    trimmed = {key: histogram.occupied() for key, histogram in histograms.items() if histogram.counts.any()}
    if _is_wandb(logger):
        # In one call: each makes a row of its own.
        of_wandb = importlib.import_module("wandb").Histogram if trimmed else None
        own = {key: of_wandb(np_histogram=(counts.tolist(), edges.tolist())) for key, (counts, edges) in trimmed.items() if of_wandb}
        logger.log_metrics({**values, **own}, step=step)
        return
    if _is_tensorboard(logger):
        _log_to_tensorboard(logger, values, trimmed, step)
        return
    logger.log_metrics(dict(values), step=step)  # type: ignore[call-arg]  # all loggers call it so; the first argument has many names


def _log_to_tensorboard(
    logger: Logger,
    values: Mapping[str, float],
    histograms: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]],
    step: int,
) -> None:
    """Write all numbers in one event: ``log_metrics`` writes one each, which takes 0.1 to 0.2 ms."""
    prefix = _before_keys(logger)
    writer: Any = getattr(logger.experiment, "file_writer", None)  # None after the end of a run; the next add_scalar opens a new one
    is_of_torch = type(writer).__module__ == "torch.utils.tensorboard.writer"  # tensorboardX has its own Summary
    if is_of_torch and not is_overridden(logger, "log_metrics"):
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary()
        for key, value in values.items():
            summary.value.add(tag=prefix + key, simple_value=value)
        writer.add_summary(summary, step)
    else:
        logger.log_metrics(dict(values), step=step)
    for key, (counts, edges) in histograms.items():
        # TensorBoard's charts use neither of the sums, and bins do not determine them.
        unknown = {"sum": math.nan, "sum_squares": math.nan}
        limits = {"min": edges[0], "max": edges[-1], "bucket_limits": edges[1:].tolist(), "bucket_counts": counts.tolist()}
        logger.experiment.add_histogram_raw(prefix + key, num=int(counts.sum()), **unknown, **limits, global_step=step)


def _before_keys(logger: Logger) -> str:
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


class Chart(NamedTuple):
    """The series of one kind and statistic, a line for each site."""

    kind: str
    """With prefix and stage."""
    statistic: str

    def pattern(self, before: str) -> str:
        """A regular expression of the keys, behind the prefix of a logger."""
        return f"^{re.escape(f'{before}{self.kind}')}/[^/]+/{re.escape(self.statistic)}$"


def charts_of(keys: Iterable[str]) -> Counter[Chart]:
    """The charts of these keys, with their numbers of sites; counts of non-finite elements, which loggers rarely get, have none."""
    parsed = map(Key.parse, keys)
    of_sites = (key for key in parsed if key.site not in ("", SUMMARY_SITE) and key.kind != OWN_KIND and key.statistic != NONFINITE_COUNT)
    return Counter(Chart(key.full_kind, key.statistic) for key in of_sites)


def lay_out(logger: object, charts: Collection[Chart]) -> None:
    """Give TensorBoard a chart for each kind and statistic, with the lines of all sites in it; its tab is CUSTOM SCALARS."""
    if _is_tensorboard(logger) and charts:
        before = _before_keys(logger)
        layout: dict[str, dict[str, list[Any]]] = {}
        for chart in charts:
            layout.setdefault(chart.kind, {})[f"{chart.kind}: {chart.statistic}"] = ["Multiline", [chart.pattern(before)]]
        logger.experiment.add_custom_scalars(layout)


def log_findings(logger: object, findings: Sequence[Finding]) -> None:
    """Log findings, if the logger takes texts."""
    if findings and _is_wandb(logger):
        columns = ["step", "name", "site", "words"]
        logger.log_text(FINDINGS, columns=columns, data=[[str(one.step), one.name, one.site, one.words] for one in findings])
    elif _is_tensorboard(logger):
        for one in findings:
            logger.experiment.add_text(f"{FINDINGS}/{one.name}", f"{one.site}: {one.words}" if one.site else one.words, one.step)


def added_up(histograms: Mapping[str, Histogram]) -> dict[str, Histogram]:
    """The histograms of all sites together, for each kind, under the site ``_all_``."""
    together: dict[str, Histogram] = {}
    for text, histogram in histograms.items():
        key = Key.parse(text)._replace(site=ALL).format()
        together[key] = together[key] + histogram if key in together else histogram
    return together


class ZeroCounts:
    """Leaves out counts of elements that are not finite while they are zero, unless a pattern of ``always`` matches the key.

    They are a third of what the default rules record of activations, and the store has them. From its first other value on a key is
    kept, so that a chart goes back to zero.
    """

    def __init__(self, always: Iterable[re.Pattern[str]] = ()) -> None:
        self._always = list(always)
        self._kept: set[str] = set()

    def drop_from(self, values: dict[str, float]) -> None:
        """Take such values out."""
        for key in [key for key in values if key.endswith(f"/{NONFINITE_COUNT}")]:
            if values[key] != 0 or (self._always and any(pattern.fullmatch(key) for pattern in self._always)):
                self._kept.add(key)
            elif key not in self._kept:
                del values[key]


class RollUps:
    """Minimum, median and maximum over the sites, for each kind and statistic. Keys are parsed once, for all records that have them.

    A NaN among the values makes all three NaN, so that it is not hidden; one of a statistic that finite tensors do not have is left out.
    Keys that a pattern of ``always`` matches are kept as they are, and so are those without a site, and summaries.
    """

    def __init__(self, always: Iterable[re.Pattern[str]] = ()) -> None:
        self._always = list(always)
        self._keys: list[str] = []
        self._kept: list[int] = []
        """Places of the keys that stay."""
        self._groups: list[tuple[list[str], NDArray[np.int64]]] = []
        """The three keys of a group, and the places of its members."""

    def __call__(self, values: Mapping[str, float]) -> dict[str, float]:
        """Value by key, with the sites ``_min_``, ``_median_`` and ``_max_``."""
        keys = list(values)
        if keys != self._keys:
            self._read(keys)
        numbers = np.fromiter(values.values(), np.float64, len(keys))
        rolled = {keys[place]: float(numbers[place]) for place in self._kept}
        for names, places in self._groups:
            members = numbers[places]
            if np.isnan(members).any():
                members = members[~is_undefined(members)]
            if not len(members) or np.isnan(members).any():
                rolled.update(dict.fromkeys(names, math.nan))
            else:
                rolled.update(zip(names, (float(members.min()), float(np.median(members)), float(members.max())), strict=True))
        return rolled

    def _read(self, keys: list[str]) -> None:
        self._keys, self._kept = keys, []
        places_by_group: defaultdict[Key, list[int]] = defaultdict(list)
        for place, text in enumerate(keys):
            key = Key.parse(text)
            if key.site in ("", SUMMARY_SITE) or key.kind == OWN_KIND or any(pattern.fullmatch(text) for pattern in self._always):
                self._kept.append(place)
            if key.site not in ("", SUMMARY_SITE):
                places_by_group[key._replace(site="")].append(place)
        self._groups = [
            ([group._replace(site=site).format() for site in _SITES], np.array(places)) for group, places in places_by_group.items()
        ]


def names_context(pattern: re.Pattern[str]) -> bool:
    """Whether a pattern of ``callback_metrics`` is one of the context, which ``.*`` is not."""
    return f"{CONTEXT_KIND}/" in pattern.pattern


def log_callback_metrics(record: Record, pl_module: LightningModule, patterns: Sequence[re.Pattern[str]], progress_bar: bool) -> None:
    """Give values with keys of these patterns to EarlyStopping, ModelCheckpoint and, as an option, the progress bar.

    To be called from a hook that may log.
    """
    for text, value in record.values.items():
        if any(pattern.fullmatch(text) and (names_context(pattern) or not is_context(text)) for pattern in patterns):
            in_step = Key.parse(text).stage == TRAIN
            pl_module.log(text, value, prog_bar=progress_bar, logger=False, on_step=in_step, on_epoch=not in_step)


# Heat maps

FIRST_DRAWING_S = 600.0
"""Seconds from the first record to the first drawing; each further one comes after twice the time of the one before."""

_FIRST_CHOICE = ("rms", "norm", "ratio", "gain", "mean")
"""The first of these is drawn among statistics with equally many sites."""
_MAX_ROWS = 10_000
"""W&B's own limit for the table of a chart."""
_PIXELS_PER_INCH = 80


def drawn_charts(keys: Iterable[str]) -> list[Chart]:
    """For each kind the chart with the most sites: a picture of every statistic would take too long."""
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


def draw(logger: Logger, store: StoreReader, charts: Sequence[Chart], step: int) -> None:
    """Give a logger heat maps, and W&B a chart with the lines of all sites as well."""
    for chart in charts:
        name = f"{chart.kind}/{chart.statistic}"
        if _is_tensorboard(logger):
            logger.experiment.add_image(f"{_before_keys(logger)}heat_maps/{name}", picture(store, chart), step, dataformats="HWC")
        elif _is_wandb(logger):
            by_site = lines(store, chart)
            xs, ys = zip(*by_site.values(), strict=True)
            of_wandb = importlib.import_module("wandb").plot
            curves = of_wandb.line_series(xs, ys, keys=list(by_site), title=f"{chart.kind}: {chart.statistic}", xname="optimizer step")
            logger.log_image(f"heat_maps/{name}", [picture(store, chart)], step)
            logger.log_metrics({f"charts/{name}": curves}, step)


class HeatMaps:
    """Draws heat maps of the store of a run for those of its loggers that take pictures.

    That takes half a second for each kind, and is done in the thread that trains: after 10, 20, 40, ... minutes, and when the run ends.
    """

    def __init__(self, loggers: Sequence[Logger], messages: Log) -> None:
        has_matplotlib = importlib.util.find_spec("matplotlib") is not None
        self._loggers = [logger for logger in loggers if has_matplotlib and takes_histograms(logger)]
        self._messages = messages
        self._began_s = time.monotonic()
        self._wait_s = FIRST_DRAWING_S
        self._drawn_step: int | None = None

    def draw_if_due(self, store: Path, step: int) -> None:
        """Draw the records until this step, if it is time. Never raises."""
        if time.monotonic() - self._began_s >= self._wait_s:
            self._wait_s *= 2
            self.draw(store, step)

    def draw(self, store: Path, step: int) -> None:
        """Draw the records until this step, unless that was done. Never raises."""
        if not self._loggers or step == self._drawn_step:
            return
        self._drawn_step = step
        try:
            reader = load_store(store)
            charts = drawn_charts(reader)
            for logger in self._loggers:
                draw(logger, reader, charts, step)
        except Exception as error:
            self._loggers = []
            self._messages.warning("Heat maps were not drawn for the loggers (%s: %s). Reported once.", type(error).__name__, error)
