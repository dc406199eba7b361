"""One run of a Trainer: what belongs to it from its setup to its end, and where its records go."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from typing import Any

from lightning_module_monitor.config.rules import Rule, as_tuple, attention_rules, coordinate_check_rules, default_rules
from lightning_module_monitor.display import Description, counted
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.lightning_packages import LightningModule, Trainer, messages
from lightning_module_monitor.model.compiled import UNCOMPILED
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.rcc_layers import layer_parts
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import (
    OVERHEAD_FRACTION,
    RANK_DISAGREEMENT,
    SECONDS_PER_STEP,
    STEP_SKIPPED,
    STEPS_SINCE_NONFINITE,
    Record,
)
from lightning_module_monitor.trainer import checks, strategy
from lightning_module_monitor.trainer.context import CONTEXT
from lightning_module_monitor.trainer.health import HealthController
from lightning_module_monitor.trainer.nonfinite import marks_steps
from lightning_module_monitor.trainer.options import Options
from lightning_module_monitor.trainer.reference import ReferenceController
from lightning_module_monitor.trainer.sinks import SinksController
from lightning_module_monitor.trainer.summary import dry_run, summary


class RunController:
    """Owns the monitor and the other controllers of a run, and gives every record to all of them.

    Raises:
        ConfigError: If an option is wrong.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.monitor = ModuleMonitor(
            options.every_n_steps,
            logger=messages,
            rules=as_tuple(options.rules),
            gradient_flow=options.gradient_flow,
            capture=options.capture,
            exclude=options.exclude,
            module=options.module,
            prefix=options.prefix,
            on_error=options.on_error,
            history=1,
            compiled=options.compiled,
        )
        self.reporter = ErrorReporter(messages, options.on_error, is_first_process)
        if options.rules is None:
            self.monitor.add_rules(default_rules(), "rules", are_optional=True)
        if options.attention:
            self.monitor.add_rules(attention_rules(), "rules")
        needed_by = self.monitor.planner.first_of_reference()
        if options.source is None and needed_by is not None:
            raise ConfigError(f"{needed_by} needs a reference; expected reference: init, or the path of a checkpoint.")
        if options.rcc:
            self.monitor.add_rules(coordinate_check_rules(), "rcc", are_optional=True)
        elif options.source is not None and needed_by is None:
            self.monitor.add_rules(Rule(kinds=["activation_difference", "parameter_difference"], statistics="ratio"), "reference")
        self.observes_training = options.observes("train") and not options.dry_run
        self.reference: ReferenceController | None = None
        if options.source is not None and self.observes_training:
            self.reference = ReferenceController(self.monitor, options.source, options.module, is_saved=options.save_reference)
        self.sinks = SinksController(self.monitor.planner, options)
        self.health = HealthController(options.parsed_health, self.monitor, self.sinks.folder, on_error=options.on_error)
        self.last_record: Record | None = None
        """The newest record, without its raw tensors."""
        self.is_fit = False

    # From setup to the end

    def begin(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A run of ``fit``, ``validate``, ``test`` or ``predict`` begins; the run before is forgotten.

        Raises:
            ConfigError: If the run cannot be monitored, or a rule matches nothing in the model.
        """
        messages.follow(trainer)
        self.is_fit = stage == "fit"
        self.reporter.begin(pl_module)
        self.sinks.begin(trainer)
        if self.reference is not None:
            self.reference.begin()
        if self.is_fit:
            self.health.begin_fit()
        if not self.options.observes_run(stage):
            return
        runs_training_step = self.reference is not None and self.options.module is None
        asks_for_reference = ("rcc" if self.options.reference is None else "reference") if runs_training_step else ""
        checks.check_manual_optimization(pl_module, self.monitor.planner, asks_for_reference)
        strategy.check_strategy(trainer, self.health.options, self.monitor.planner)
        self._check_compiled(pl_module)
        if not checks.makes_layers_late(pl_module):
            self.set_module(trainer, pl_module)
        if self.is_fit and self.reference is not None and strategy.can_copy(trainer):
            self.reference.begin_fit(trainer, pl_module)

    def begin_fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every layer exists now, and parameters are those that will be trained."""
        if not self.options.observes_run("fit"):
            return
        if self.monitor.module is None:
            self._check_compiled(pl_module)  # layers made since may be compiled
            self.set_module(trainer, pl_module)
        self.monitor.wrapper = trainer.strategy.model
        if self.reference is not None and strategy.can_copy(trainer):
            self.reference.prepare(trainer, pl_module)
        if not self.options.dry_run:
            self.monitor.agree()
        planner, schedule = self.monitor.planner, self.options.schedule
        if trainer.is_global_zero and self.options.dry_run:
            print(dry_run(planner, schedule, trainer.max_steps))
        elif trainer.is_global_zero:
            self.reporter.log_once(summary(planner, schedule, self.sinks.roll_ups_in_words()))

    def _check_compiled(self, pl_module: LightningModule) -> None:
        if self.options.compiled == UNCOMPILED:
            checks.check_compiled(pl_module, self.reporter, at_every_step=self.health.options.is_at_every_step)

    def set_module(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the module to monitor, and check the options against its names.

        Raises:
            ConfigError: If a pattern matches nothing in it, or another callback has the same keys.
        """
        self.monitor.distributed, self.monitor.access = strategy.ranks_of(trainer), strategy.access_of(trainer)
        left_out = self.monitor.planner.leave_out(strategy.unavailable_kinds(trainer))
        if trainer.is_global_zero and (left_out or not strategy.has_parameters(trainer)):
            self.reporter.log_once(strategy.left_out_in_words(trainer, left_out), logging.WARNING)
        self.monitor.set_module(pl_module)
        if trainer.strategy.root_device.type == "cpu":
            numba_kernel.loops()  # compiled here, and not within the first monitored step
        if not self.monitor.planner.has_any():
            raise ConfigError("rules is empty, and nothing would be recorded; expected at least one rule. Leave rules out for the default.")
        index = self.monitor.planner.index
        modules = index.modules
        if self.options.rcc and not any(layer_parts(site.module) for site in modules):
            inside = [site.name for site in index.whole.modules if layer_parts(site.module)]
            if inside:
                raise index.refusal("rcc", inside)
            what = "a layer that the coordinate check knows (Linear, convolution, embedding, normalization)"
            self.reporter.log_once(f"rcc: none of the {len(modules)} modules is {what}; nothing of it is recorded.")
        self._expect_keys(trainer)

    def _expect_keys(self, trainer: Trainer) -> None:
        """Announce the keys of this run to the sinks and the watches, and compare them with those of other callbacks."""
        measured = {
            STEP_SKIPPED: strategy.scaler_of(trainer) is not None,
            OVERHEAD_FRACTION: self.options.max_overhead is not None,
            STEPS_SINCE_NONFINITE: marks_steps(self.health.options, trainer) and self.is_fit,
            RANK_DISAGREEMENT: self.monitor.distributed is not False and trainer.world_size > 1 and self.is_fit,
            SECONDS_PER_STEP: self.options.schedule.by_clock is not None and self.is_fit,
        }
        self.sinks.expect([name for name, is_measured in measured.items() if is_measured], [*CONTEXT] if self.is_fit else [])
        keys, histograms = self.sinks.planned_keys(), self.sinks.planned_histograms()
        self.health.begin(trainer, keys, histograms, is_fit=self.is_fit)
        for callback in trainer.callbacks:  # type: ignore[union-attr]  # set by a connector, where mypy does not look
            run = vars(callback).get("_run")
            if isinstance(run, RunController) and run is not self and run.monitor.module is not None:
                common = {*keys, *histograms} & {*run.sinks.planned_keys(), *run.sinks.planned_histograms()}
                if common:
                    raise ConfigError(
                        f"Two callbacks have the key {min(common)!r}; expected keys that differ. Give each a prefix of its own."
                    )
        if self.is_fit:
            checks.check_monitored_keys(trainer, {*keys}, self.options.metric_patterns, self.reporter)

    def state(self) -> dict[str, Any]:
        """The state in a checkpoint: path of the store with the steps so far, state of the alerts, and the reference."""
        reference = None if self.reference is None else self.reference.state()
        state = {"format": 1, **self.sinks.state(), "health": self.health.state()}
        return state if reference is None else {**state, "reference": reference}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave; validating or testing a checkpoint resumes nothing."""
        if self.is_fit:
            self.sinks.resume(state)
            self.health.resume(state.get("health", {}))
            if self.reference is not None:
                self.reference.load(state.get("reference"))

    def note_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The weights of a checkpoint were loaded."""
        # A checkpoint from before the first step resumes nothing: a finder of learning rates loads one.
        if self.is_fit and self.reference is not None and checkpoint.get("global_step", 0) > 0:
            self.reference.resume()

    def emit(self, trainer: Trainer, pl_module: LightningModule, record: Record | None) -> None:
        """Give a record, and what was found since the last one, to every sink, and act on the findings."""
        record = self.health.examined(step_of(trainer), record)
        if record is None:
            return
        if record.values:  # else it has only findings, of a step that was not monitored
            # Raw tensors are for the file, and may be large.
            self.last_record = dataclasses.replace(record, tensors=())
        self.sinks.emit(trainer, pl_module, record)
        self.health.follow(trainer, record.findings)

    def describe(self) -> Description:
        """The rules, the store and the findings, for the prompt and a notebook."""
        rules, findings, store = self.monitor.planner.rules, self.health.findings, self.sinks.store_path
        last = "none" if self.last_record is None else f"of step {self.last_record.step}: {counted(len(self.last_record.values), 'value')}"
        rows = [
            *(("watched", f"{', '.join(rule.kinds)}: {', '.join(rule.outputs)}, {rule.schedule}") for rule in rules),
            ("last record", last),
            ("store", store or "none"),
            *(("finding", f"step {one.step}, {one.name} {one.site}: {one.words}") for one in findings),
        ]
        title = f"{self.options.schedule}, {counted(len(rules), 'rule')}, store: {store or 'none'}, {counted(len(findings), 'finding')}"
        return Description(title, ("", ""), rows)

    def close(self) -> None:
        """Take every hook off and close the sinks; a second call does no harm."""
        with ExitStack() as stack:
            stack.callback(self.sinks.close)
            stack.callback(self.monitor.close)
            stack.callback(self.health.close)
            try:
                found = self.health.finish()
            except Exception as error:
                messages.warning("The run as a whole was not judged (%s: %s).", type(error).__name__, error)
                found = []
            if found:
                self.sinks.write(Record(found[0].step, findings=found))


def step_of(trainer: Trainer) -> int:
    """The step that Lightning's own loggers plot against: the number of batches that stepped (not public anywhere)."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
