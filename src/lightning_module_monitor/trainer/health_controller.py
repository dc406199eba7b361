"""The health of a run: findings of the non-finite search and of alerts, and their actions."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_module_monitor.config.health_options import IGNORE, STOP, WARN
from lightning_module_monitor.config.rules import Capture, Rule
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.health.alerts import Action
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import is_withdrawn
from lightning_module_monitor.health.facts import CallFacts, Facts
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.judgement import verdict_of
from lightning_module_monitor.health.run_history import NO_FACTS
from lightning_module_monitor.keys import MAX_STATISTIC_LENGTH, fit_for_loggers
from lightning_module_monitor.lightning_packages import is_a, messages
from lightning_module_monitor.model.names import unwrapped_class
from lightning_module_monitor.nonfinite.record_search import RecordSearch
from lightning_module_monitor.nonfinite.search import NonfiniteSearch
from lightning_module_monitor.nonfinite.step_search import StepSearch
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.store.paths import first_free_path
from lightning_module_monitor.sinks.store.remote import first_free_url
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.trainer import strategy
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.sinks_controller import SinksController


class HealthController:
    """Judges every record of a run by detectors and alerts, and performs their actions. The monitor has a module."""

    def __init__(self, run: Run, sinks: SinksController) -> None:
        self._run = run
        self._sinks = sinks
        self._trainer = run.trainer
        self.options = run.options.health
        index = run.planner.index
        modules = [site.name for site in index.whole.modules]
        self._judge = Judge(self.options.rules, [*modules, *(site.name for site in index.parameters)], modules)
        run.results.history, run.results.calls = self._judge.history, CallFacts()
        self.nonfinite = _search_of(run)
        self.needs_facts = not self.options.is_off or self.nonfinite.is_on
        """Whether anything needs the facts of training: detectors, or the diagnosis of a value that is not finite."""
        self._is_judging = self.needs_facts or bool(self._judge.states)
        self._details: dict[str, list[int]] = {}
        """Steps in which a site is recorded in detail, by site."""
        self._pending: list[Finding] = []
        self._actions: list[tuple[Action, Finding]] = []

    # The run

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self._judge.load(state.get("alerts", {}))
        if "findings" in state:  # of the run that is resumed; another run leaves the results of a fit as they are
            self._run.results.findings = [Finding(**finding) for finding in state["findings"]]
            calls: list[Any] = [tuple(item) if isinstance(item, list) else item for item in state.get("calls", ())]
            self._run.results.calls = CallFacts(*calls)
        self.nonfinite.is_reported = state.get("is_reported", False)
        for site, steps in state.get("details", {}).items() if self.options.may_capture else ():
            self._record_in_detail(site, steps)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: a resumed run repeats no finding and continues all streaks."""
        whole_run = [detector.name for detector in DETECTORS.values() if detector.rule is None]  # judged anew at the end
        findings = [dataclasses.asdict(finding) for finding in self._run.results.findings if finding.name not in whole_run]
        return {
            "alerts": self._judge.state(),
            "findings": findings,
            "calls": tuple(self._run.results.calls),
            "is_reported": self.nonfinite.is_reported,
            "details": self._details,
        }

    def finish(self, exception: BaseException | None = None) -> list[Finding]:
        """The findings about the whole fit, which an exception may have ended; logs the diagnoses and the verdict."""
        if not self._run.is_fit:
            return []
        findings = [] if self.options.is_off else [alarm.finding for alarm in self._judge.alarms_of_whole_run()]
        results = self._run.results
        withdrawn = [finding for finding in results.findings if is_withdrawn(finding, self._judge.history)]
        results.findings = [finding for finding in results.findings if finding not in withdrawn] + findings
        if is_first_process():
            for finding in withdrawn:
                messages.info("[monitor] Step %d, %s: withdrawn, as later records contradict it.", finding.step, finding.name)
            self._log(findings)
            for number, diagnosis in enumerate(results.diagnoses(), 1):
                messages.warning("[monitor] Diagnosis %d: %s", number, diagnosis)
            self._sinks.write_diagnoses()
            history = self._judge.history
            has_records = bool(history.losses.steps) or history.facts is not NO_FACTS  # a step without a loss has facts
            if has_records and not self.options.is_off:
                types = {unwrapped_class(site.module).__name__ for site in self._run.planner.index.modules}
                verdict = verdict_of(self._judge, (), results.findings, watched=self.options.watched, types=types)
                end = "" if exception is None else f" {type(exception).__name__} ended the run."
                messages.info("[monitor] Verdict: %s.%s", verdict.sentence, end)
        return findings

    # Findings

    def note(self, finding: Finding | None) -> None:
        """Add a finding to the next record."""
        if finding is not None:
            self._pending.append(finding)

    def examined(self, step: int, record: Record | None, facts: Facts | None) -> list[Finding]:
        """The findings since the last record, with those about this record, if there is one, and the facts of its step."""
        engine = self._run.engine
        findings, engine.findings, self._pending = [*engine.findings, *self._pending], [], []
        self._details = {site: steps for site, steps in self._details.items() if steps[-1] > step}
        if record is not None and self._is_judging:
            for alarm in self._judge.observe(record, facts):
                findings.append(alarm.finding)
                self._actions += [(action, alarm.finding) for action in alarm.then]
        self._run.results.findings += findings
        return findings

    def follow(self, findings: Sequence[Finding]) -> None:
        """Log the findings of a step and perform their actions, which are the same on every rank."""
        if self._trainer.is_global_zero:
            self._log(findings)
        actions, self._actions = self._actions, []
        for action, finding in actions:
            if action == "stop":
                self._trainer.should_stop = True
            elif action == "checkpoint" and (path := self._sinks.folder()) is not None:
                name = fit_for_loggers(finding.name, MAX_STATISTIC_LENGTH)
                file = f"monitor-{name}-step={finding.step}.ckpt"
                free = first_free_path(path / file) if isinstance(path, Path) else first_free_url(f"{path}/{file}")
                self._save_checkpoint(self._trainer.strategy.broadcast(free))
            elif action == "capture":
                steps = range(finding.step + 1, finding.step + 1 + self.options.capture_steps)
                self._record_in_detail(finding.site, list(steps))

    def _log(self, findings: Sequence[Finding]) -> None:
        """Log the first sentence of each finding, and its advice."""
        for finding in findings:
            level = logging.ERROR if finding.severity == "error" else logging.WARNING
            messages.log(level, "[monitor] Step %d, %s: %s", finding.step, finding.name, finding.message)

    def _save_checkpoint(self, path: Path | str) -> None:
        """Save a checkpoint, on every rank; the file gets its name when it is complete, as an object at a URL does by itself."""
        trainer = self._trainer
        # This plugin writes in a thread of its own, possibly after save_checkpoint has returned.
        is_written_later = is_a(trainer.strategy.checkpoint_io, "AsyncCheckpointIO")
        written = path if is_written_later or isinstance(path, str) else path.with_name(f".{path.name}.new")
        try:
            trainer.save_checkpoint(written)
            if trainer.is_global_zero and isinstance(written, Path) and written != path:
                written.replace(path)
        except Exception as error:
            messages.warning("The checkpoint %s was not saved (%s: %s). Training goes on.", path, type(error).__name__, error)
            if isinstance(written, Path) and written.is_file():
                written.unlink()
            trainer.strategy.barrier("Trainer.save_checkpoint")  # other ranks wait there

    def _record_in_detail(self, site: str, steps: list[int]) -> None:
        """Monitor some steps, and record every statistic and the raw tensors of a module, with everything inside, in them.

        ``site`` is a module; a parameter, output or head of a module; or a transition of the gradient flow, which stands for the block
        that the gradient has passed.
        """
        self._details[site] = steps
        sites, chain = self._run.planner.index.whole, self._run.planner.plan().chain  # parameters inside compiled code are recorded
        streams = {} if chain is None else dict(zip(chain.transitions, chain.streams[1:], strict=True))
        name = streams[site].site if site in streams else site
        while sites.module_site(name) is None and "." in name:
            name = name.rpartition(".")[0]
        if sites.module_site(name) is None and not any(parameter.name == name for parameter in sites.parameters):
            if is_first_process():
                messages.warning("There is nothing to capture: %r is no module or parameter, nor within one.", site)
            return
        pattern = f"{re.escape(name)}(\\..*)?"
        kinds = ["activation", "activation_gradient", "parameter", "gradient"]
        statistics = [
            name
            for name, entry in STATISTICS.items()
            if isinstance(entry, Statistic) and not (entry.relative or entry.compared_with or name.startswith("token"))
        ]
        rule = Rule(kinds=kinds, sites=pattern, statistics=statistics, every_n_steps=list(steps))
        self._run.model.add_detail(rule, Capture(sites=pattern, steps=list(steps), kinds=kinds))


def _search_of(run: Run) -> NonfiniteSearch:
    """The search for non-finite values of a run."""
    health, trainer, is_scaled = run.options.health, run.trainer, strategy.scaler_of(run.trainer) is not None
    if health.nonfinite == IGNORE:
        return NonfiniteSearch()
    if health.nonfinite == WARN and not strategy.reads_at_once(trainer):
        return RecordSearch(run.monitor, trainer, is_scaled=is_scaled)
    return StepSearch(
        run.monitor,
        trainer,
        is_at_every_step=health.is_at_every_step,
        can_run_again=strategy.can_run_again(trainer),
        is_scaled=is_scaled,
        stops=health.nonfinite == STOP,
        raises_errors=run.options.arguments["on_error"] == "raise",
    )
