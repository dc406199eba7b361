"""The health of a run: findings of the non-finite probe and of alerts, and the actions that follow them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_module_monitor.config.rules import Capture, Rule
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.health.alerts import Action
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.options import IGNORE
from lightning_module_monitor.health.verdict import verdict_of
from lightning_module_monitor.lightning_packages import is_a, messages
from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, Finding, Record, fit_for_loggers
from lightning_module_monitor.sinks.store.rewrite import free
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.trainer.nonfinite import NonfiniteController
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.sinks import SinksController


class HealthController:
    """Judges every record of a run by the watches and alerts, and performs the actions that follow. The monitor has a module."""

    def __init__(self, run: Run, sinks: SinksController) -> None:
        self._run = run
        self._sinks = sinks
        self._trainer = run.trainer
        self.options = run.options.health
        index = run.index
        self._judge = Judge(self.options.rules, [*(site.name for site in index.modules), *(site.name for site in index.parameters)])
        run.results.history = self._judge.history
        self.nonfinite = None if self.options.nonfinite == IGNORE else NonfiniteController(run)
        """Finds non-finite values."""
        self._details: dict[str, list[int]] = {}
        """Steps with raised detail, by site."""
        self._pending: list[Finding] = []
        self._following: list[tuple[Action, Finding]] = []

    # The run

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the run that gave a state."""
        self._judge.load(state.get("alerts", {}))
        if self.nonfinite is not None:
            self.nonfinite.is_reported = state.get("is_reported", False)
        for site, steps in state.get("details", {}).items() if self.options.may_capture else ():
            self._raise_detail(site, steps)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: a resumed run repeats no finding and loses no streak."""
        is_reported = self.nonfinite is not None and self.nonfinite.is_reported
        return {"alerts": self._judge.state(), "is_reported": is_reported, "details": self._details}

    def finish(self) -> list[Finding]:
        """The findings that only the whole fit shows; then log the diagnoses."""
        if not self._run.is_fit:
            return []
        found = [] if self.options.is_off else [alarm.finding for alarm in self._judge.finish()]
        self._run.results.findings += found
        if is_first_process():
            self._log(found)
            for number, one in enumerate(self._run.results.diagnoses(), 1):
                messages.warning("[monitor] Diagnosis %d: %s", number, one)
            if self._judge.history.steps and not self.options.is_off:
                types = {type(site.module).__name__ for site in self._run.index.modules}
                verdict = verdict_of(self._judge, (), self._run.results.findings, searched=self.options.nonfinite != IGNORE, types=types)
                messages.info("[monitor] Verdict: %s.", verdict.sentence)
        return found

    def close(self) -> None:
        """Take every hook off; a second call does no harm."""
        if self.nonfinite is not None:
            self.nonfinite.close()

    # Findings

    def note(self, finding: Finding | None) -> None:
        """Add a finding to the next record."""
        if finding is not None:
            self._pending.append(finding)

    def examined(self, step: int, record: Record | None) -> Record | None:
        """A record with the findings of the alerts on it, and those noted before."""
        found, self._pending = [*(() if record is None else record.findings), *self._pending], []
        self._details = {site: steps for site, steps in self._details.items() if steps[-1] > step}
        if record is not None:
            for alarm in self._judge.observe(record):
                found.append(alarm.finding)
                self._following += [(action, alarm.finding) for action in alarm.then]
        if not found:
            return record
        self._run.results.findings += found
        return dataclasses.replace(record or Record(step), findings=found)

    def follow(self, findings: Sequence[Finding]) -> None:
        """Log the findings of a step and perform their actions, on every rank the same."""
        if self._trainer.is_global_zero:
            self._log(findings)
        following, self._following = self._following, []
        for action, finding in following:
            if action == "stop":
                self._trainer.should_stop = True
            elif action == "checkpoint" and (path := self._sinks.folder()) is not None:
                name = fit_for_loggers(finding.name, MAX_STATISTIC_LENGTH)
                free_path = free(path / f"monitor-{name}-step={finding.step}.ckpt")
                self._save_checkpoint(self._trainer.strategy.broadcast(free_path))
            elif action == "capture":
                steps = range(finding.step + 1, finding.step + 1 + self.options.capture_steps)
                self._raise_detail(finding.site, list(steps))

    def _log(self, findings: Sequence[Finding]) -> None:
        """Log the first sentence of each finding, and what to try."""
        for one in findings:
            level = logging.ERROR if one.severity == "error" else logging.WARNING
            messages.log(level, "[monitor] Step %d, %s: %s", one.step, one.name, one.message)

    def _save_checkpoint(self, path: Path) -> None:
        """Save a checkpoint, on every rank; it gets its name when it is complete."""
        trainer = self._trainer
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
        sites, chain = self._run.index, self._run.planner.plan().chain
        of_transitions = {} if chain is None else dict(zip(chain.transitions, chain.streams[1:], strict=True))
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
        self._run.model.add_detail(rule, Capture(sites=pattern, steps=list(steps), kinds=kinds))
