"""Writes records to every Lightning logger, directly and on Lightning's x axis."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray

from lightning_module_monitor.errors import Log, require
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Columns, Key, is_context, is_of_spectrum, is_rate, is_total
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS, OWN_KIND, ROOT_SITE, SINGULAR_VALUES, SUMMARY_SITE, TRAIN
from lightning_module_monitor.lightning_packages import LightningModule, Logger, is_a, is_overridden
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.roll_ups import NONFINITE_COUNT, SITES, LoggedValues, summed
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store

FINDINGS, DIAGNOSES = f"{OWN_KIND}/findings", f"{OWN_KIND}/diagnoses"
"""Tags of findings and of their causes in loggers that log texts."""

GLANCE = "at a glance"
"""TensorBoard's first category of charts."""


class _Failures:
    """Keeps errors of loggers away from the training, and reports the first error of each logger."""

    def __init__(self, message: str, messages: Log) -> None:
        self._message = message  # with the names of the logger and of the error's class, and the error's text
        self._messages = messages
        self._reported: set[int] = set()

    @contextmanager
    def reported(self, logger: Logger) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if id(logger) not in self._reported:
                self._reported.add(id(logger))
                self._messages.warning(self._message, type(logger).__name__, type(error).__name__, error)


class LoggerSink:
    """Writes records to loggers, or roll-ups of them if there are too many keys.

    ``pl_module.log`` is not used: it takes 0.3 ms for each metric.

    Args:
        loggers: The trainer's loggers.
        roll_up: Whether to log only the minimum, median and maximum over the sites of each kind and statistic, and the sum of
            histograms.
        always: Patterns of keys that are always logged.
        messages: Logs the failure of a logger, once.
        keys: Expected keys, for TensorBoard's layout of charts.
        modules: Names of the modules of the model, by which totals are known: they are always logged, and first.
        blocks: Names of the modules whose values are logged beside roll-ups.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        roll_up: bool,
        always: Sequence[re.Pattern[str]],
        messages: Log,
        keys: Collection[str],
        *,
        modules: Collection[str] = (),
        blocks: Collection[str] = (),
    ) -> None:
        self._loggers = list(loggers)
        self._modules = frozenset(modules)
        self._rolls_up = roll_up
        self._logged = LoggedValues(roll_up=roll_up, always=always, modules=self._modules, blocks=frozenset(blocks))
        self._messages = messages
        self._failures = _Failures("%s did not take the monitor's values (%s: %s). Logged once.", messages)
        self._diagnoses: list[Sequence[str]] = [[] for _logger in loggers]
        """The texts that each logger has, in the order of the loggers."""
        self._without_histograms = [type(logger).__name__ for logger in loggers if not takes_media(logger)]
        for logger in loggers:
            with self._failures.reported(logger):
                lay_out(logger, keys, self._modules, rolls_up=roll_up)

    def write(self, record: Record, findings: Sequence[Finding] = ()) -> None:
        """Log a record, and what was found with it. The failure of a logger is reported once; the next record is logged again."""
        if not self._loggers:
            return
        values, histograms = self._logged(record), record.histograms
        if self._rolls_up:
            histograms = summed(histograms, self._modules)
        if histograms and self._without_histograms:
            names, self._without_histograms = ", ".join(self._without_histograms), []
            self._messages.info("Histograms are left out of %s: TensorBoard, W&B and a store take them.", names)
        for logger in self._loggers:
            with self._failures.reported(logger):
                if values or histograms:
                    log(logger, values, histograms, record.step)
                log_findings(logger, findings)

    def write_diagnoses(self, diagnoses: Sequence[object], step: int) -> None:
        """Log the causes of the findings until now to each logger that does not have them."""
        texts = [*map(str, diagnoses)]
        for index, logger in enumerate(self._loggers):
            if texts != self._diagnoses[index]:
                with self._failures.reported(logger):
                    log_diagnoses(logger, texts, step)
                    self._diagnoses[index] = texts


def _is_tensorboard(logger: object) -> TypeGuard[Logger]:
    return is_a(logger, "TensorBoardLogger")


def _is_wandb(logger: object) -> TypeGuard[Logger]:
    return is_a(logger, "WandbLogger")


def takes_media(logger: object) -> bool:
    """Whether a logger takes histograms and pictures beside numbers."""
    return _is_tensorboard(logger) or _is_wandb(logger)


class TakesMetrics(Protocol):
    """The method that every Lightning logger has."""

    def log_metrics(self, metrics: dict[str, Any], /, step: int) -> None:
        """Log the values of a step."""


def log(logger: TakesMetrics, values: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
    """Log numbers, and histograms if the logger has a type for them.

    Empty bins at the ends of a histogram are left out, and so are histograms without a finite element.
    """
    trimmed = {key: histogram.occupied() for key, histogram in histograms.items() if histogram.counts.any()}
    if _is_wandb(logger):
        # In one call: each call writes a row.
        wandb = importlib.import_module("wandb")
        converted = {key: wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist())) for key, (counts, edges) in trimmed.items()}
        logger.log_metrics({**values, **converted}, step=step)
    elif _is_tensorboard(logger):
        _log_to_tensorboard(logger, values, trimmed, step)
    else:
        logger.log_metrics(dict(values), step=step)


def _log_to_tensorboard(
    logger: Logger,
    values: Mapping[str, float],
    histograms: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]],
    step: int,
) -> None:
    """Write numbers and histograms; numbers in one event where Lightning's ``log_metrics`` would need 0.1 to 0.2 ms for each."""
    prefix = _key_prefix(logger)
    writer: Any = getattr(logger.experiment, "file_writer", None)  # None after the end of a run; the next add_scalar opens a new one
    uses_torch = type(writer).__module__ == "torch.utils.tensorboard.writer"  # tensorboardX has another Summary
    if uses_torch and not is_overridden(logger, "log_metrics"):
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


def _key_prefix(logger: Logger) -> str:
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


class Chart(NamedTuple):
    """The series of a kind and statistic, a line for each site."""

    kind: str
    """With prefix and stage."""
    statistic: str

    def pattern(self, prefix: str, without: Collection[str] = ()) -> str:
        """A regular expression for the keys, after the prefix of a logger, of all sites but some."""
        site = f"(?!({'|'.join(map(re.escape, without))})/)[^/]+" if without else "[^/]+"
        return f"^{re.escape(f'{prefix}{self.kind}')}/{site}/{re.escape(self.statistic)}$"


def charts_of(keys: Iterable[str], modules: Collection[str] = ()) -> Counter[Chart]:
    """Number of sites by chart. Totals are not counted; counts of non-finite elements are rarely logged and have no chart.

    Of singular values the largest has a chart. Several are in charts of :func:`spectra_of`; their residuals are in none.
    """
    shown = (key for key in _drawn(keys) if key.statistic == SINGULAR_VALUES[0] or not is_of_spectrum(key))
    return Counter(Chart(key.full_kind, key.statistic) for key in shown if not is_total(key, modules))


def spectra_of(keys: Iterable[str], *, rolls_up: bool) -> list[Key]:
    """The sites, or the roll-ups, whose singular values have a chart because there are several, as keys without a statistic."""
    several = (key for key in _drawn(keys) if key.statistic == SINGULAR_VALUES[1] and is_of_spectrum(key))
    sites = (key._replace(site=site, statistic="") for key in several for site in (SITES if rolls_up else [key.site]))
    return [*dict.fromkeys(sites)]


def _drawn(keys: Iterable[str]) -> list[Key]:
    parsed = map(Key.parse, keys)
    return [key for key in parsed if key.site not in ("", SUMMARY_SITE) and key.kind != OWN_KIND and key.statistic != NONFINITE_COUNT]


def lay_out(logger: object, keys: Collection[str], modules: Collection[str] = (), *, rolls_up: bool) -> None:
    """Add charts to TensorBoard's tab CUSTOM SCALARS: those to look at first, then one for each kind and statistic, and spectra."""
    if not _is_tensorboard(logger) or not keys:
        return
    prefix = _key_prefix(logger)
    glance, layout = defaultdict[tuple[int, str], list[str]](list), defaultdict[str, dict[str, list[Any]]](dict)
    for text in dict.fromkeys(keys):
        chart_at_a_glance = _chart_at_a_glance(Key.parse(text), modules)
        if chart_at_a_glance is not None:
            glance[chart_at_a_glance].append(f"^{re.escape(prefix + text)}$")
    for (_order, title), patterns in sorted(glance.items()):
        layout[GLANCE][title] = ["Multiline", patterns]
    totals = [key for key in _drawn(keys) if is_total(key, modules)]
    for chart in charts_of(keys, modules):
        without = dict.fromkeys(key.site for key in totals if (key.full_kind, key.statistic) == chart)
        layout[chart.kind][f"{chart.kind}: {chart.statistic}"] = ["Multiline", [chart.pattern(prefix, without)]]
    for site in spectra_of(keys, rolls_up=rolls_up):
        pattern = f"^{re.escape(prefix + site.format())}/{SINGULAR_VALUES[0].replace('1', '[0-9]')}$"
        layout[site.full_kind][f"{site.full_kind}: singular values of {site.site}"] = ["Multiline", [pattern]]
    # The tab shows the last layout of a run, and those of all runs below its folder: a second one gets a run of its own.
    own = Path("monitor_charts", Key.parse(next(iter(keys))).prefix)
    if _has_layout(logger):
        with type(logger.experiment)(f"{logger.log_dir}/{own.as_posix()}") as writer:
            writer.add_custom_scalars(dict(layout))
    else:
        logger.experiment.add_custom_scalars(dict(layout))


def _has_layout(logger: Logger) -> bool:
    """Whether a run of TensorBoard has a layout, of the user's or of an earlier callback."""
    logger.experiment.flush()
    files, folder = url_to_fs(logger.log_dir)
    for path in files.find(folder, maxdepth=1):
        if "tfevents" in path:
            with files.open(path) as events:
                if any(b"custom_scalars__config__" in line for line in events):
                    return True
    return False


def _chart_at_a_glance(key: Key, modules: Collection[str]) -> tuple[int, str] | None:
    """Rank and title of the chart of a key among those to look at first; ``None`` if it is not in one of them."""
    if key.kind == CONTEXT_KIND:
        return (0, "loss") if key.statistic == LOSS else (1, "learning rate") if is_rate(key.statistic) else None
    if not is_total(key, modules) or key.statistic == NONFINITE_COUNT:
        return None
    title = f"{key.full_kind}: {key.statistic}"
    return (2 if key.kind == "gradient" else 3, title) if key.site == ROOT_SITE else (4, f"{title} by module")


def log_findings(logger: object, findings: Sequence[Finding]) -> None:
    """Log findings, if the logger logs texts."""
    if findings and _is_wandb(logger):
        columns = ["step", "name", "site", "words"]
        logger.log_text(FINDINGS, columns=columns, data=[[str(item.step), item.name, item.site, item.words] for item in findings])
    elif _is_tensorboard(logger):
        for finding in findings:
            text = f"{finding.site}: {finding.words}" if finding.site else finding.words
            logger.experiment.add_text(f"{FINDINGS}/{finding.name}", text, finding.step)


def log_diagnoses(logger: object, texts: Sequence[str], step: int) -> None:
    """Log diagnoses, if the logger logs texts."""
    if _is_wandb(logger):
        logger.log_text(DIAGNOSES, columns=["step", "diagnosis"], data=[[str(step), text] for text in texts])
    elif _is_tensorboard(logger):
        lines = [f"{number}. {text}" for number, text in enumerate(texts, 1)]  # a numbered list in Markdown
        logger.experiment.add_text(DIAGNOSES, "\n".join(lines), step)


def names_context(pattern: re.Pattern[str]) -> bool:
    """Whether a pattern of ``callback_metrics`` names context keys explicitly, unlike ``.*``."""
    return f"{CONTEXT_KIND}/" in pattern.pattern


class CallbackMetrics:
    """Logs values whose keys match a pattern for EarlyStopping, ModelCheckpoint and, as an option, the progress bar.

    Args:
        pl_module: Logs them.
        patterns: The patterns.
        progress_bar: Whether the progress bar shows them.
    """

    def __init__(self, pl_module: LightningModule, patterns: Sequence[re.Pattern[str]], *, progress_bar: bool) -> None:
        self._pl_module = pl_module
        self._patterns = patterns
        self._progress_bar = progress_bar
        self._matching: dict[Columns, tuple[int, list[int]]] = {}
        """The number of columns that were compared with the patterns, and those that match."""

    def write(self, record: Record) -> list[str]:
        """Log the values of a record, from a hook that may log; returns their keys."""
        columns, version = record.columns, len(record.numbers)
        known, matching = self._matching.get(columns, (0, []))
        if known < version:
            matching = matching + [column for column in range(known, version) if self._is_matching(columns.texts[column])]
            self._matching[columns] = version, matching
        there = [column for column in matching if record.is_there[column]]
        for column in there:
            in_step = columns.keys[column].stage == TRAIN
            value = float(record.numbers[column])
            self._pl_module.log(
                columns.texts[column], value, prog_bar=self._progress_bar, logger=False, on_step=in_step, on_epoch=not in_step
            )
        return [columns.texts[column] for column in there]

    def _is_matching(self, key: str) -> bool:
        return any(pattern.fullmatch(key) and (names_context(pattern) or not is_context(key)) for pattern in self._patterns)


# Heat maps

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
        if _is_tensorboard(logger):
            logger.experiment.add_image(f"{_key_prefix(logger)}heat_maps/{name}", picture(store, chart), step, dataformats="HWC")
        elif _is_wandb(logger):
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
        self._failures = _Failures("Heat maps were not drawn for %s (%s: %s). Logged once.", messages)
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
