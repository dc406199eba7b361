"""The health of a run: what is found of values that are not finite, and by alerts on what is recorded; and what follows from it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_module_monitor.errors import ConfigError, nearest
from lightning_module_monitor.health.options import IGNORE, STOP, Alert, Health, parse_health, watch_rules
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.nonfinite_of_run import Folder, NonfiniteOfRun
from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, Finding, Key, Record, fit_for_loggers
from lightning_module_monitor.sinks.alerts import Action, Alerts


class HealthOfRun:
    """Looks out for what the options say, and does what is to follow.

    Args:
        health: What is watched.
        alerts: Rules of the user's.
        monitor: Gets the rules that the watches need.
        on_error: ``raise``: an error of ours in a hook is one.
        messages: Where findings are said.

    Raises:
        ConfigError: If an option is wrong.
    """

    def __init__(self, health: Health, alerts: Sequence[Alert], monitor: ModuleMonitor, *, on_error: str, messages: logging.Logger) -> None:
        self._options = parse_health(health, alerts)
        self._monitor = monitor
        self._on_error = on_error
        self._messages = messages
        self.findings: list[Finding] = []
        """Of the run, in their order."""
        monitor.add_rules(watch_rules(self._options.watches), "health.watch", are_optional=True)
        self._alerts: Alerts | None = None
        self.nonfinite: NonfiniteOfRun | None = None
        """Looks for values that are not finite, while there is a model; ``None`` also where nobody is to."""
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_alerts": None, "nonfinite": None}

    # The run

    def begin(self, planned_keys: Sequence[str], *, knows_all_keys: bool) -> None:
        """The model is there.

        Args:
            planned_keys: Keys of numbers that are known to come.
            knows_all_keys: Whether there will be no others.

        Raises:
            ConfigError: If an alert is about none of them.
        """
        rules = self._options.alerts
        for number, rule in enumerate(rules):
            if knows_all_keys and number < self._num_own and not any(rule.concerns(Key.parse(key), key) for key in planned_keys):
                near = nearest(rule.name, planned_keys)
                raise ConfigError(f"alerts[{number}].keys {rule.name!r} matches none of the {len(planned_keys)} keys{near}")
        self.findings = []
        parameters = {site.name: site for site in self._monitor.wishes.sites.parameters}

        def is_trained(name: str) -> bool:
            parameter = parameters[name].tensor() if name in parameters else None
            return parameter is not None and parameter.requires_grad

        self._alerts = Alerts(rules, is_trained)
        if self._options.nonfinite != IGNORE:
            self.nonfinite = NonfiniteOfRun(self._options, self._monitor, on_error=self._on_error, messages=self._messages)

    @property
    def _num_own(self) -> int:
        """How many of the rules are the user's: they come first."""
        return len(self._options.alerts) - len(self._options.watches)

    @property
    def may_capture(self) -> bool:
        """Whether raw tensors may follow a finding."""
        return any("capture" in rule.then for rule in self._options.alerts)

    @property
    def is_at_every_step(self) -> bool:
        """Whether every step is looked at."""
        return self._options.is_at_every_step

    def close(self) -> None:
        """Take every hook off, and forget the run but for its findings; a second call does no harm."""
        if self.nonfinite is not None:
            self.nonfinite.close()
        self.nonfinite = self._alerts = None
        self._forget()

    def _forget(self) -> None:
        self._pending: list[Finding] = []
        self._following: list[tuple[Action, Finding]] = []

    # What is found

    def note(self, finding: Finding | None) -> None:
        """Something was found: the next record has it."""
        if finding is not None:
            self._pending.append(finding)

    @property
    def nonfinite_option(self) -> str:
        """What was asked for of values that are not finite."""
        return self._options.nonfinite

    @property
    def is_fatal(self) -> bool:
        """Whether training is to end by an error where a value is not finite."""
        return self._options.nonfinite == STOP

    def examined(self, step: int, record: Record | None) -> Record | None:
        """A record with what is wrong by the alerts, and what was found before."""
        found, self._pending = self._pending, []
        if record is not None and self._alerts is not None:
            for alarm in self._alerts.alarms(record):
                found.append(alarm.finding)
                self._following += [(action, alarm.finding) for action in alarm.then]
        if not found:
            return record
        self.findings += found
        return dataclasses.replace(record or Record(step), findings=found)

    def follow(self, trainer: Trainer, findings: Sequence[Finding], folder: Folder) -> None:
        """Say what was found, and do what is to follow; on every rank the same.

        Args:
            trainer: Is stopped, or saves a checkpoint.
            findings: What was found in this step.
            folder: Where checkpoints go.
        """
        for one in findings if trainer.is_global_zero else ():
            level = logging.ERROR if one.severity == "error" else logging.WARNING
            where = f" at {one.site}" if one.site else ""
            self._messages.log(level, "%s%s, step %d: %s", one.name, where, one.step, one.words)
        following, self._following = self._following, []
        for action, finding in following:
            if action == "stop":
                trainer.should_stop = True
            elif action == "checkpoint":
                name = fit_for_loggers(finding.name, MAX_STATISTIC_LENGTH)
                trainer.save_checkpoint(folder(trainer) / f"monitor-{name}-step={finding.step}.ckpt")
            elif action == "capture":
                steps = range(finding.step + 1, finding.step + 1 + self._options.capture_steps)
                self._monitor.raise_detail(finding.site, list(steps))
