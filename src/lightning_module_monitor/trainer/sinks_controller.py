"""The sinks of a run: its store, the Trainer's loggers, and ``callback_metrics``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_module_monitor.config.health_options import WARN
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import OVERHEAD_FRACTION, RANK_DISAGREEMENT, SECONDS_PER_STEP, STEP_SKIPPED, STEPS_SINCE_NONFINITE
from lightning_module_monitor.lightning_packages import messages
from lightning_module_monitor.plan.blocks import blocks_of
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.report.page import write_report
from lightning_module_monitor.sinks.callback_metrics import CallbackMetrics
from lightning_module_monitor.sinks.heat_maps import HeatMaps
from lightning_module_monitor.sinks.loggers import LoggerSink
from lightning_module_monitor.sinks.roll_ups import without_context
from lightning_module_monitor.sinks.store.paths import is_numbered_path_of
from lightning_module_monitor.sinks.store.remote import RemoteFolder, is_url
from lightning_module_monitor.sinks.store.tensors import RunFiles
from lightning_module_monitor.trainer import strategy
from lightning_module_monitor.trainer.context import CONTEXT
from lightning_module_monitor.trainer.options import STAGES
from lightning_module_monitor.trainer.run import Run, passed_keys


class _OpenSinks(NamedTuple):
    """The files and loggers of a run that has a record."""

    files: RunFiles | None
    remote: RemoteFolder | None
    """The folder at a URL to which the files are copied."""
    loggers: LoggerSink
    heat_maps: HeatMaps


class SinksController:
    """Opens the files and loggers of a run at its first record, and writes every record to all of them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.options
        self._trainer = run.trainer
        self._patterns = run.options.callback_metrics
        self._callback_metrics = CallbackMetrics(run.module, self._patterns, progress_bar=self._options.progress_bar)
        self._stages = [name for stage, name in STAGES.items() if run.options.observes(stage)]
        self.store_path = run.results.store_of(run.trainer)
        """The store of this run, for its checkpoints; before it exists, the store to continue: of the resumed run or the Trainer's last."""
        self.store_run = ""
        """Identifier of the run that writes the store; before it does, of the resumed run."""
        self._open: _OpenSinks | None = None
        """The open sinks, from the first record to :meth:`close`."""
        self._runs_steps_again = False
        self._first_step = sys.maxsize
        self._last_step = 0

    # The run

    def resume(self, state: Mapping[str, object]) -> None:
        """Continue the store of the resumed run, whose later steps are run again.

        The path may come from an untrusted checkpoint: it never names the file to write to.
        """
        path = state.get("store")
        is_file = isinstance(path, str) and (self._is_at_url(path) or os.path.isfile(path))  # noqa: PTH113  # Path.is_file raises for a text that is no path
        if path is not None and not is_file and self._options.store is not False:
            message = "The store of the resumed run, %r, does not exist: this run's store begins without its earlier steps."
            messages.warning(message, path)
        self.store_path = str(path) if is_file else None
        self.store_run = str(state.get("run", ""))
        self._runs_steps_again = True

    def _is_at_url(self, path: str) -> bool:
        """Whether the resumed run's store is where this run may read: a checkpoint must not name any server."""
        if not is_url(path):
            return False
        own = self._location()
        return isinstance(own, str) and path.partition("://")[0] == own.partition("://")[0]

    def begin_step(self, step: int) -> None:
        """A training step begins: from its first step on, a resumed run repeats steps of the earlier run."""
        self._first_step = min(self._first_step, step)

    def checkpoint(self) -> None:
        """A checkpoint is saved: the file of the store is brought up to date."""
        if self._open is not None and self._open.files is not None:
            self._open.files.checkpoint()

    def close(self) -> None:
        """Close the files, write the page about them, and log their paths; a second call does nothing."""
        sinks, self._open = self._open, None
        if sinks is None or sinks.files is None:
            return
        sinks.files.close()
        if not sinks.files.has_begun:
            messages.warning("No value was stored: %s could not be written.", sinks.files.path)
            if sinks.remote is not None:
                sinks.remote.close()
            return
        path, page = sinks.files.path, None
        sinks.heat_maps.draw(path, self._last_step)
        if self._options.report:
            try:
                page = write_report(path)
            except Exception as error:  # the error that ended the run must reach the user, and not an error of the page
                messages.warning("The page was not written (%s: %s).", type(error).__name__, error)
        store, shown = str(path), str(page)
        if sinks.remote is not None:
            if sinks.remote.close():
                store, shown = sinks.remote.url_of(path), "" if page is None else sinks.remote.url_of(page)
            self.store_path = store
            self._run.results.note_store(self._trainer, store)
        command, label = ("summary", f"; page: {shown}. Verdict") if page else ("report", ". Page")
        messages.info("Monitored values: %s%s: lightning-module-monitor %s %s", store, label, command, shlex.quote(store))

    # Keys

    def planned_keys(self, stages: Sequence[str] | None = None) -> list[str]:
        """Every key of a number that is known before the first step, of all stages or of some."""
        run, scaler = self._run, strategy.scaler_of(self._trainer)
        measured = {
            STEP_SKIPPED: scaler is not None,
            OVERHEAD_FRACTION: self._options.max_overhead is not None,
            STEPS_SINCE_NONFINITE: self._options.health.nonfinite == WARN and not strategy.reads_at_once(self._trainer) and run.is_fit,
            RANK_DISAGREEMENT: run.monitor.distributed is not False and self._trainer.world_size > 1 and run.is_fit,
            SECONDS_PER_STEP: self._options.every_n_steps.by_clock is not None and run.is_fit,
        }
        figures = [name for name, is_measured in measured.items() if is_measured]
        return self._run.planner.planned_keys(
            self._stages if stages is None else stages, figures=figures, context=[*CONTEXT] if run.is_fit else []
        )

    def planned_histograms(self, stages: Sequence[str] | None = None) -> list[str]:
        """Every key of a histogram that is known before the first step, of all stages or of some."""
        return self._run.planner.planned_histograms(self._stages if stages is None else stages)

    def rolls_up(self) -> bool:
        """Whether loggers get roll-ups; by the plan and not by the record, so that a logger has the same columns at every step."""
        return any(
            len(self._run.planner.planned_keys([stage])) + len(self._run.planner.planned_histograms([stage]))
            > self._options.max_logged_keys
            for stage in self._stages
        )

    # Records

    def emit(self, record: Record, findings: Sequence[Finding], facts: Facts | None) -> None:
        """Give a record, what was found with it, and the facts of its step to every sink; the first process writes files and logs."""
        if self._trainer.is_global_zero:
            if self._open is None:
                self._open = self._opened(record)
            self._last_step = record.step
            self.write(record, findings, facts)
        if self._patterns:
            # On every rank, because other callbacks have to decide the same on all ranks.
            keys = self._callback_metrics.write(record)
            passed_keys.setdefault(self._trainer, set()).update(keys)

    def write(self, record: Record, findings: Sequence[Finding] = (), facts: Facts | None = None) -> None:
        """Write a record to the store and the loggers, if they are open."""
        if self._open is None:
            return
        files = self._open.files
        if files is not None:
            files.write(record, findings, facts)
            self.store_run = files.run
            if files.has_begun:
                self._note_store(files.path)
        self._open.loggers.write(record, findings)
        if findings:
            self.write_diagnoses()
        if files is not None and files.has_begun:
            self._open.heat_maps.draw_if_due(files.path, self._last_step)

    def _note_store(self, path: Path) -> None:
        """The store has records."""
        remote = None if self._open is None else self._open.remote
        self.store_path = str(path) if remote is None else remote.url_of(path)
        if remote is not None:
            remote.copy_if_due(path)
        self._run.results.note_store(self._trainer, self.store_path)

    def write_diagnoses(self) -> None:
        """Give the causes of the findings until now to the loggers, if they are open."""
        if self._open is not None:
            self._open.loggers.write_diagnoses(self._run.results.diagnoses(), self._last_step)

    def _opened(self, record: Record) -> _OpenSinks:
        # Keys of attention's heads are not planned; the first record has as many as any later record.
        rolls_up = self.rolls_up() or len(without_context(record.values)) + len(record.histograms) > self._options.max_logged_keys
        keys, modules = [*self.planned_keys(), *record.values], [module.name for module in record.modules]
        blocks = blocks_of(self._run.planner.index) if rolls_up else []
        if sum(Key.parse(key).site in blocks for key in {*keys}) > self._options.max_logged_keys:
            blocks = []  # the values of the blocks are many, too
        loggers = LoggerSink(self._trainer.loggers, rolls_up, self._patterns, messages, keys, modules=modules, blocks=blocks)
        location = self._location() if self._options.store else None
        files = remote = None
        if isinstance(location, str):
            folder, _, name = location.rpartition("/")
            remote = RemoteFolder(folder, messages)
            resumed = self.store_path if self.store_path is not None and is_url(self.store_path) else None
            files = self._open_files(remote.local / name, remote.prepare(name, resumed))
        elif location is not None:
            files = self._open_files(location.resolve(), None if self.store_path is None else Path(self.store_path).resolve())
        return _OpenSinks(files, remote, loggers, HeatMaps(self._trainer.loggers, messages))

    def _open_files(self, path: Path, earlier: Path | None) -> RunFiles:
        """The store of this run, and the file of raw tensors beside it.

        A resumed run continues the store ``earlier`` only if it would write there anyway. Else it begins with a copy.
        """
        return RunFiles(
            earlier if earlier is not None and is_numbered_path_of(earlier, path) else path,
            configuration=self._options.described(),
            keys=self.planned_keys(),
            histogram_keys=self.planned_histograms(),
            resumed=earlier,
            # Only a checkpoint runs steps again: a further run of the same Trainer supersedes no row.
            resume_from=self._first_step if self._runs_steps_again else None,
            resumed_run=self.store_run,
            logger=messages,
        )

    def folder(self) -> Path | str | None:
        """The folder of this run's store, a path or a URL, also without a store; ``None`` if the run writes no files."""
        location = self._location()
        return location.rpartition("/")[0] if isinstance(location, str) else None if location is None else location.parent

    def _location(self) -> Path | str | None:
        """The path, or the URL, of this run's store; by default in the first logger's directory, as for ModelCheckpoint.

        ``None`` in a trial (``fast_dev_run``), in which Lightning writes no files either.
        """
        trainer = self._trainer
        if getattr(trainer, "fast_dev_run", False):
            return None
        if not isinstance(self._options.store, bool):
            return self._options.store if is_url(self._options.store) else Path(self._options.store).expanduser()
        folders: list[str] = [trainer.default_root_dir]
        if trainer.loggers:
            logger = trainer.loggers[0]
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            folders = [os.fspath(logger.save_dir or trainer.default_root_dir), str(logger.name), version]
        return "/".join([folders[0].rstrip("/"), *folders[1:], "monitor.h5"]) if is_url(folders[0]) else Path(*folders, "monitor.h5")
