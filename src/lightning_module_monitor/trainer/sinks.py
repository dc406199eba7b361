"""The sinks of one run: its store, the Trainer's loggers, and ``callback_metrics``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from lightning_module_monitor.lightning_packages import messages
from lightning_module_monitor.record import (
    OVERHEAD_FRACTION,
    RANK_DISAGREEMENT,
    SECONDS_PER_STEP,
    STEP_SKIPPED,
    STEPS_SINCE_NONFINITE,
    Record,
)
from lightning_module_monitor.report.page import write_report
from lightning_module_monitor.sinks.loggers import HeatMaps, LoggerSink, log_callback_metrics, without_context
from lightning_module_monitor.sinks.store.tensors import RunFiles
from lightning_module_monitor.sinks.store.writer import is_name_of
from lightning_module_monitor.trainer import strategy
from lightning_module_monitor.trainer.context import CONTEXT
from lightning_module_monitor.trainer.nonfinite import marks_steps
from lightning_module_monitor.trainer.options import STAGES
from lightning_module_monitor.trainer.run import Run


class SinksController:
    """Opens the files and loggers of a run when its first record comes, and gives every record to all of them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.options
        self._trainer = run.trainer
        self._patterns = run.options.callback_metrics
        self._stages = [name for stage, name in STAGES.items() if run.options.observes(stage)]
        self._path: str | None = None
        """Where the store of this run is, once something was recorded."""
        self._earlier_path = run.results.store_of(run.trainer)
        """The store of the run that is resumed, or of the loop before."""
        self._files: RunFiles | None = None
        self._loggers: LoggerSink | None = None
        self._heat_maps: HeatMaps | None = None
        self._last_step = 0
        self.first_step: int | None = None
        """The first step of training: a resumed run repeats the earlier run's steps from there."""
        self._runs_steps_again = False

    # The run

    def resume(self, state: Mapping[str, object]) -> None:
        """Go on from the store of the resumed run, whose later steps are run again.

        The path may come from an untrusted checkpoint: it never names the file to write to.
        """
        path = state.get("store")
        is_file = isinstance(path, str) and os.path.isfile(path)  # noqa: PTH113  # Path.is_file raises where a text is no path at all
        if path is not None and not is_file and self._options.store is not False:
            message = "The store of the resumed run, %r, does not exist: this run's store begins without its earlier steps."
            messages.warning(message, path)
        self._path, self._earlier_path = None, str(path) if is_file else None
        self._runs_steps_again = True

    def state(self) -> dict[str, object]:
        """The state for a checkpoint: the path of the store with the steps so far."""
        return {"store": self._path or self._earlier_path}

    def close(self) -> None:
        """Close the files, write the page about them, and log where they are; twice does no harm."""
        files, heat_maps = self._files, self._heat_maps
        self._files = self._loggers = self._heat_maps = None
        if files is None:
            return
        files.close()
        if not files.has_begun:
            return
        if heat_maps is not None:
            heat_maps.draw(files.path, self._last_step)
        page = None
        if self._options.report:
            try:
                page = write_report(files.path)
            except Exception as error:  # the error that ended the run must reach the user, and none of its page
                messages.warning("The page was not written (%s: %s).", type(error).__name__, error)
        shown = f"; page: {page}. Verdict: {_command('summary', files.path)}" if page else f". Page: {_command('report', files.path)}"
        messages.info("Monitored values: %s%s", files.path, shown)

    # Keys

    def planned_keys(self) -> list[str]:
        """Every key of a number that is known before the first step."""
        run, scaler = self._run, strategy.scaler_of(self._trainer)
        measured = {
            STEP_SKIPPED: scaler is not None,
            OVERHEAD_FRACTION: self._options.max_overhead is not None,
            STEPS_SINCE_NONFINITE: marks_steps(run) and run.is_fit,
            RANK_DISAGREEMENT: run.monitor.distributed is not False and self._trainer.world_size > 1 and run.is_fit,
            SECONDS_PER_STEP: self._options.every_n_steps.by_clock is not None and run.is_fit,
        }
        figures = [name for name, is_measured in measured.items() if is_measured]
        return self._run.planner.planned_keys(self._stages, figures=figures, context=[*CONTEXT] if run.is_fit else [])

    def planned_histograms(self) -> list[str]:
        """Every key of a histogram that is known before the first step."""
        return self._run.planner.planned_histograms(self._stages)

    def roll_ups_in_words(self) -> str:
        """A sentence about roll-ups, if there will be any."""
        return f" Loggers get roll-ups, as these are more than max_logged_keys={self._options.max_logged_keys}." if self._rolls_up() else ""

    def _rolls_up(self) -> bool:
        """Whether loggers get roll-ups: by the plan and not by the record, so that a logger's columns are the same at every step."""
        return any(
            len(self._run.planner.planned_keys([stage])) + len(self._run.planner.planned_histograms([stage]))
            > self._options.max_logged_keys
            for stage in self._stages
        )

    # Records

    def emit(self, record: Record) -> None:
        """Give a record to every sink; the first process writes."""
        if self._trainer.is_global_zero:
            self._write(record)
        if self._patterns:
            # On every rank: what decides by them decides alike everywhere.
            log_callback_metrics(record, self._run.module, self._patterns, self._options.progress_bar)

    def _write(self, record: Record) -> None:
        """Write a record to the store and the loggers."""
        if self._loggers is None:
            # Keys of attention's heads are not planned; those of the first record are as many as there will be.
            rolls_up = self._rolls_up() or len(without_context(record.values)) + len(record.histograms) > self._options.max_logged_keys
            self._loggers = LoggerSink(self._trainer.loggers, rolls_up, self._patterns, messages, self.planned_keys())
            self._heat_maps = HeatMaps(self._trainer.loggers, messages)
        if self._files is None and self._options.store and (path := self._new_store_path()) is not None:
            self._files = self._open_files(path.resolve())
        self.write(record)
        self._last_step = record.step
        if self._files is not None and self._files.has_begun and self._heat_maps is not None:
            self._heat_maps.draw_if_due(self._files.path, record.step)

    def write(self, record: Record) -> None:
        """Write a record to the store and the loggers that are open."""
        if self._files is not None:
            self._files.write(record)
            self._path = str(self._files.path)
            self._run.results.note_store(self._trainer, self._path)
        if self._loggers is not None:
            self._loggers.write(record)

    def _open_files(self, path: Path) -> RunFiles:
        """The store of this run, and the file of raw tensors beside it.

        A run goes on in the store of the run that it resumes only where it would write by itself. Elsewhere it begins with a copy.
        """
        earlier = None if self._earlier_path is None else Path(self._earlier_path).resolve()
        return RunFiles(
            earlier if earlier is not None and is_name_of(earlier, path) else path,
            configuration=self._options.described(),
            keys=self.planned_keys(),
            histogram_keys=self.planned_histograms(),
            resumed=earlier,
            # Only a checkpoint runs steps again: a further loop of the same Trainer supersedes no row.
            resume_from=self.first_step if self._runs_steps_again else None,
            logger=messages,
        )

    def folder(self) -> Path | None:
        """Where the store of this run is, or would be; ``None`` where there are to be no files."""
        path = self._new_store_path()
        return None if path is None else path.parent

    def _new_store_path(self) -> Path | None:
        """Where this run writes its store: by default into the first logger's directory for it, as ModelCheckpoint does.

        ``None`` in a trial (``fast_dev_run``), in which Lightning too writes no file.
        """
        trainer = self._trainer
        if getattr(trainer, "fast_dev_run", False):
            return None
        if not isinstance(self._options.store, bool):
            return Path(self._options.store).expanduser()
        if not trainer.loggers:
            return Path(trainer.default_root_dir, "monitor.h5")
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version, "monitor.h5")


def _command(name: str, store: Path) -> str:
    return f"lightning-module-monitor {name} {shlex.quote(str(store))}"
