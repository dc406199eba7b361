"""Writes records to every Lightning logger, directly and on Lightning's x axis."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import Log
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.kinds import OWN_KIND
from lightning_module_monitor.lightning_packages import Logger, is_overridden
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.charts import lay_out
from lightning_module_monitor.sinks.logger_types import LoggerFailures, is_tensorboard, is_wandb, key_prefix, takes_media
from lightning_module_monitor.sinks.roll_ups import LoggedValues, summed

FINDINGS, DIAGNOSES = f"{OWN_KIND}/findings", f"{OWN_KIND}/diagnoses"
"""Tags of findings and of their causes in loggers that log texts."""


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
        self._failures = LoggerFailures("%s did not take the monitor's values (%s: %s). Logged once.", messages)
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


class TakesMetrics(Protocol):
    """The method that every Lightning logger has."""

    def log_metrics(self, metrics: dict[str, Any], /, step: int) -> None:
        """Log the values of a step."""


def log(logger: TakesMetrics, values: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
    """Log numbers, and histograms if the logger has a type for them.

    Empty bins at the ends of a histogram are left out, and so are histograms without a finite element.
    """
    trimmed = {key: histogram.occupied() for key, histogram in histograms.items() if histogram.counts.any()}
    if is_wandb(logger):
        # In one call: each call writes a row.
        wandb = importlib.import_module("wandb")
        converted = {key: wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist())) for key, (counts, edges) in trimmed.items()}
        logger.log_metrics({**values, **converted}, step=step)
    elif is_tensorboard(logger):
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
    prefix = key_prefix(logger)
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


def log_findings(logger: object, findings: Sequence[Finding]) -> None:
    """Log findings, if the logger logs texts."""
    if findings and is_wandb(logger):
        columns = ["step", "name", "site", "words"]
        logger.log_text(FINDINGS, columns=columns, data=[[str(item.step), item.name, item.site, item.words] for item in findings])
    elif is_tensorboard(logger):
        for finding in findings:
            text = f"{finding.site}: {finding.words}" if finding.site else finding.words
            logger.experiment.add_text(f"{FINDINGS}/{finding.name}", text, finding.step)


def log_diagnoses(logger: object, texts: Sequence[str], step: int) -> None:
    """Log diagnoses, if the logger logs texts."""
    if is_wandb(logger):
        logger.log_text(DIAGNOSES, columns=["step", "diagnosis"], data=[[str(step), text] for text in texts])
    elif is_tensorboard(logger):
        lines = [f"{number}. {text}" for number, text in enumerate(texts, 1)]  # a numbered list in Markdown
        logger.experiment.add_text(DIAGNOSES, "\n".join(lines), step)
