"""A run of a Trainer, and the results that outlast it: for the user, for a checkpoint, and for the next run."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any

from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.engine.phases import StepEngine
from lightning_module_monitor.health.diagnoses import Diagnoses, diagnose
from lightning_module_monitor.health.facts import CallFacts
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.lightning_packages import LightningModule, Trainer
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.plan.planner import Planner
from lightning_module_monitor.plan.recipe import Recipe
from lightning_module_monitor.probes.base import ErrorReporter
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.trainer.checks import AwaitedKeys
from lightning_module_monitor.trainer.options import Options
from lightning_module_monitor.trainer.parameter_groups import ParameterGroups

passed_keys: weakref.WeakKeyDictionary[Trainer, set[str]] = weakref.WeakKeyDictionary()
"""The keys that monitors have passed to Lightning by ``callback_metrics``: all callbacks of a Trainer find them among its metrics."""


class RunResults:
    """The results of the runs of a callback."""

    def __init__(self) -> None:
        self.last_record: Record | None = None
        """The newest record, without its raw tensors."""
        self.store_path: str | None = None
        """Path of the latest store that a record was written to."""
        self.findings: list[Finding] = []
        """All findings since the latest fit began, in order."""
        self.history = History()
        """Values of the latest run that explain its findings."""
        self.calls = CallFacts()
        """Facts about the calls of modules in the latest fit."""
        self.awaited: AwaitedKeys = {}
        self.state: dict[str, Any] = {}
        """The state for a checkpoint that is saved when no run is in progress."""
        self._writer: weakref.ref[Trainer] | None = None
        """The Trainer whose run wrote the latest store."""

    def note_store(self, trainer: Trainer, path: str) -> None:
        """Note that a run of a Trainer has written a record to its store."""
        self.store_path, self._writer = path, weakref.ref(trainer)

    def store_of(self, trainer: Trainer) -> str | None:
        """The store of a Trainer's earlier run, which its next run continues, unless another Trainer has written a store since."""
        return self.store_path if self._writer is not None and self._writer() is trainer else None

    def diagnoses(self) -> Diagnoses:
        """The causes of the findings until now."""
        return diagnose(self.findings, self.history)

    def copied(self, state: dict[str, Any]) -> RunResults:
        """The same results for a copy of the callback, which no Trainer has run, and whose checkpoints hold no reference."""
        copied = copy.copy(self)
        copied._writer, copied.state = None, {name: value for name, value in state.items() if name != "reference"}
        return copied


@dataclass(frozen=True, eq=False)
class Run:
    """A run of ``fit``, ``validate``, ``test`` or ``predict``, from its ``setup`` to its end."""

    options: Options
    monitor: ModuleMonitor
    reporter: ErrorReporter
    results: RunResults
    trainer: Trainer
    module: LightningModule
    stage: str
    groups: ParameterGroups = field(default_factory=ParameterGroups)

    @property
    def engine(self) -> StepEngine:
        """The engine of the monitor."""
        return self.monitor.engine

    @property
    def recipe(self) -> Recipe:
        """The rules of the monitor."""
        return self.engine.recipe

    @property
    def model(self) -> ObservedModel:
        """The module while it is monitored."""
        return self.engine.model

    @property
    def planner(self) -> Planner:
        """The planner of the module: it knows what is recorded, and the names of the module."""
        return self.model.planner

    @property
    def is_fit(self) -> bool:
        """Whether it is a fit."""
        return self.stage == "fit"

    @property
    def observes_training(self) -> bool:
        """Whether steps of training are monitored."""
        return self.is_fit and self.options.observes("train") and not self.options.dry_run


def step_of(trainer: Trainer) -> int:
    """The step that Lightning's own loggers plot against: the number of batches that stepped (not public anywhere)."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
