"""The health of a run: findings of the non-finite probe and of alerts, and the actions that follow them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_module_monitor.config.rules import Capture, Rule
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.health.alerts import Action
from lightning_module_monitor.health.causes import Diagnoses, diagnose
from lightning_module_monitor.health.history import History
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.options import IGNORE, ParsedHealth, watch_rules
from lightning_module_monitor.health.verdict import verdict_of
from lightning_module_monitor.lightning_packages import Trainer, is_a, messages
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.plan import DETAIL
from lightning_module_monitor.probes.planned import OF_WATCHES
from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, Finding, Record, fit_for_loggers
from lightning_module_monitor.sinks.store.rewrite import free
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.trainer.checks import AwaitedKeys, check_keys
from lightning_module_monitor.trainer.nonfinite import NonfiniteController

Folder = Callable[[Trainer], Path | None]
"""Gives the folder of a run's files; ``None`` if there are to be none."""


class HealthController:
    """Judges every record by the watches and alerts, whose rules it adds to the monitor, and performs the actions that follow."""

    def __init__(self, options: ParsedHealth, monitor: ModuleMonitor, folder: Folder, *, on_error: str) -> None:
        self.options = options
        self._monitor = monitor
        self._folder = folder
        self._on_error = on_error
        self.findings: list[Finding] = []
        """All findings since the latest fit began, in their order."""
        monitor.add_rules(watch_rules(options.recorded), OF_WATCHES, are_optional=True)
        self._judge: Judge | None = None
        self._history = History()
        """Of the run that is over."""
        self._state: dict[str, Any] = {}
        """The result of :meth:`state` for the resumed run, or at the end of this one."""
        self._awaited = AwaitedKeys()
        self._is_fit = False
        self.nonfinite: NonfiniteController | None = None
        """Finds non-finite values, while there is a model; ``None`` where ``nonfinite`` is ``ignore``."""
        self._forget()

    def _forget(self) -> None:
        self._details: dict[str, list[int]] = {}
        """Steps with raised detail, by site."""
        self._pending: list[Finding] = []
        self._following: list[tuple[Action, Finding]] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_state": self.state(), "_judge": None, "nonfinite": None}

    # The run

    def begin_fit(self) -> None:
        """A fit begins, anew unless :meth:`resume` follows."""
        self._state = {}
        self.findings = []

    def resume(self, state: dict[str, Any]) -> None:
        """Continue the run that gave a state; before or after :meth:`begin`."""
        self._state = state
        if self._judge is not None:
            self._restore(self._judge)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: a resumed run repeats no finding and loses no streak."""
        if self._judge is None or not self._is_fit:
            return self._state
        is_reported = self.nonfinite is not None and self.nonfinite.is_reported
        return {"alerts": self._judge.state(), "is_told": is_reported, "details": self._details}

    def begin(self, trainer: Trainer, planned_keys: Sequence[str], histograms: Sequence[str], *, is_fit: bool) -> None:
        """The model exists; ``planned_keys`` are those of numbers.

        Raises:
            ConfigError: If an alert can match no key.
        """
        planner = self._monitor.planner
        for label, pattern in self.options.patterns:
            if not check_keys(planner, pattern, label, planned_keys, histograms):
                self._awaited.add(label, pattern)
        self._is_fit = is_fit
        index = planner.index
        self._judge = Judge(self.options.rules, [*(site.name for site in index.modules), *(site.name for site in index.parameters)])
        if self.options.nonfinite != IGNORE:
            self.nonfinite = NonfiniteController(self.options, self._monitor, trainer, on_error=self._on_error)
        if is_fit:
            self._restore(self._judge)

    def _restore(self, judge: Judge) -> None:
        judge.load(self._state.get("alerts", {}))
        if self.nonfinite is not None:
            self.nonfinite.is_reported = self._state.get("is_told", False)
        for site, steps in self._state.get("details", {}).items() if self.options.may_capture else ():
            self._raise_detail(site, steps)

    def finish(self) -> list[Finding]:
        """The findings that only the whole fit shows; then log the diagnoses."""
        if self._judge is None or not self._is_fit:
            return []
        found = [] if self.options.is_off else [alarm.finding for alarm in self._judge.finish()]
        self.findings += found
        if is_first_process():
            self._log(found)
            for number, one in enumerate(self.diagnoses(), 1):
                messages.warning("[monitor] Diagnosis %d: %s", number, one)
            if self._judge.history.steps and not self.options.is_off:
                types = {type(site.module).__name__ for site in self._monitor.planner.index.modules}
                verdict = verdict_of(self._judge, (), self.findings, searched=self.options.nonfinite != IGNORE, types=types)
                messages.info("[monitor] Verdict: %s.", verdict.sentence)
        return found

    def diagnoses(self) -> Diagnoses:
        """The causes of the findings so far."""
        return diagnose(self.findings, self._history if self._judge is None else self._judge.history)

    def close(self) -> None:
        """Take every hook off, and forget the run except for its findings and their causes; a second call does no harm."""
        self._state = self.state()
        if self._judge is not None:
            self._history = self._judge.history
        if self.nonfinite is not None:
            self.nonfinite.close()
        self.nonfinite = self._judge = None
        self._forget()

    # Findings

    def note(self, finding: Finding | None) -> None:
        """Add a finding to the next record."""
        if finding is not None:
            self._pending.append(finding)

    def examined(self, step: int, record: Record | None) -> Record | None:
        """A record with the findings of the alerts on it, and those noted before."""
        found, self._pending = [*(() if record is None else record.findings), *self._pending], []
        self._details = {site: steps for site, steps in self._details.items() if steps[-1] > step}
        if record is not None and self._judge is not None:
            self._awaited.compare(record)
            for alarm in self._judge.observe(record):
                found.append(alarm.finding)
                self._following += [(action, alarm.finding) for action in alarm.then]
        if not found:
            return record
        self.findings += found
        return dataclasses.replace(record or Record(step), findings=found)

    def follow(self, trainer: Trainer, findings: Sequence[Finding]) -> None:
        """Log the findings of a step and perform their actions, on every rank the same."""
        if trainer.is_global_zero:
            self._log(findings)
        following, self._following = self._following, []
        for action, finding in following:
            if action == "stop":
                trainer.should_stop = True
            elif action == "checkpoint" and (path := self._folder(trainer)) is not None:
                name = fit_for_loggers(finding.name, MAX_STATISTIC_LENGTH)
                free_path = free(path / f"monitor-{name}-step={finding.step}.ckpt")
                self._save_checkpoint(trainer, trainer.strategy.broadcast(free_path))
            elif action == "capture":
                steps = range(finding.step + 1, finding.step + 1 + self.options.capture_steps)
                self._raise_detail(finding.site, list(steps))

    def _log(self, findings: Sequence[Finding]) -> None:
        """Log the first sentence of each finding, and what to try."""
        for one in findings:
            level = logging.ERROR if one.severity == "error" else logging.WARNING
            messages.log(level, "[monitor] Step %d, %s: %s", one.step, one.name, one.message)

    def _save_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Save a checkpoint, on every rank; it gets its name when it is complete."""
        # This plugin writes in its own thread, which may not have begun when the call returns.
        is_written_later = is_a(trainer.strategy.checkpoint_io, "AsyncCheckpointIO")
        written = path if is_written_later else path.with_name(f".{path.name}.new")
        try:
            trainer.save_checkpoint(written)
            if trainer.is_global_zero and written != path:
                written.replace(path)
        except Exception as error:
            messages.warning("The checkpoint %s was not saved (%s: %s). Training goes on.", path, type(error).__name__, error)
            if written.is_file():
                written.unlink()
            trainer.strategy.barrier("Trainer.save_checkpoint")  # other ranks wait there

    def _raise_detail(self, site: str, steps: list[int]) -> None:
        """Record every statistic and the raw tensors of a module and all within it in some steps, which are monitored then.

        ``site`` is a module; a parameter, output or head of it; or a transition of the gradient flow, which stands for the block that the
        gradient has come through.
        """
        self._details[site] = steps
        planner = self._monitor.planner
        sites, chain = planner.index, planner.plan().chain
        of_transitions = {} if chain is None else dict(zip(chain.transitions, chain.specs[1:], strict=True))
        name = of_transitions[site].site if site in of_transitions else site
        while sites.module_site(name) is None and "." in name:
            name = name.rpartition(".")[0]
        if sites.module_site(name) is None and not any(parameter.name == name for parameter in sites.parameters):
            if is_first_process():
                messages.warning("There is nothing to capture: %r is no module or parameter, nor within one.", site)
            return
        pattern = f"{re.escape(name)}(\\..*)?"
        kinds = ["activation", "activation_gradient", "parameter", "gradient"]
        plain = [key for key, one in STATISTICS.items() if isinstance(one, Statistic) and not (one.relative or one.paired)]
        rule = Rule(kinds=kinds, sites=pattern, statistics=[one for one in plain if not one.startswith("token")], every_n_steps=list(steps))
        self._monitor.add_rules(rule, DETAIL, are_optional=True)
        planner.add_capture(Capture(sites=pattern, steps=list(steps), kinds=kinds))
