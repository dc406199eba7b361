"""A run of a Trainer, from its setup to its end: the order in which its objects are made, and its checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from lightning_module_monitor.config.health_options import watch_rules
from lightning_module_monitor.config.rules import Rule, as_tuple, attention_rules, coordinate_check_rules, default_rules
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.distributed.shards import is_laid_out
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels.warm_up import warm_up
from lightning_module_monitor.keys import is_context
from lightning_module_monitor.kinds import ROOT_SITE, TRAIN
from lightning_module_monitor.lightning_packages import messages
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.plan.blocks import block_rules, blocks_of
from lightning_module_monitor.plan.matching import WATCH_LABEL
from lightning_module_monitor.probes.base import ErrorReporter
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.callback_metrics import names_context
from lightning_module_monitor.trainer import checks, strategy
from lightning_module_monitor.trainer.expected_launches import expected_launches
from lightning_module_monitor.trainer.health_controller import HealthController
from lightning_module_monitor.trainer.options import Options
from lightning_module_monitor.trainer.reference_controller import ReferenceOrigin
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.sinks_controller import SinksController
from lightning_module_monitor.trainer.step import StepController
from lightning_module_monitor.trainer.summary import dry_run_text, line_of_fit

STATE_VERSION = 1
"""Of the state in a checkpoint; increase it with each change that a resumed run must handle."""


class Prepared(NamedTuple):
    """The parsed arguments of a callback, for all its runs."""

    options: Options
    monitor: ModuleMonitor
    reporter: ErrorReporter


def prepare(arguments: Mapping[str, Any]) -> Prepared:
    """Parse the arguments of a callback, and make its monitor; a wrong option is a ``ConfigError``."""
    options = Options.parse(**arguments)
    parsed = options.arguments
    names = ("gradient_flow", "gradient_noise", "capture", "exclude", "module", "prefix", "on_error", "compiled")
    monitor = ModuleMonitor(
        parsed["every_n_steps"], logger=messages, rules=as_tuple(parsed["rules"]), history=1, **{name: parsed[name] for name in names}
    )
    if parsed["rules"] is None:
        monitor.add_rules(default_rules(), "rules", are_optional=True)
    if options.attention:
        monitor.add_rules(attention_rules(), "rules")
    needed_by = monitor.engine.recipe.first_needing_reference()
    if options.reference is None and needed_by is not None:
        raise ConfigError(f"{needed_by} needs a reference; expected reference: init, or the path of a checkpoint.")
    if options.rcc:
        monitor.add_rules(coordinate_check_rules(), "rcc", are_optional=True)
    if parsed["reference"] is not None and needed_by is None:  # not where rcc alone asks for it
        monitor.add_rules(Rule(kinds=["activation_difference", "parameter_difference"], statistics="ratio"), "reference")
    monitor.add_rules(watch_rules(options.health.recorded), WATCH_LABEL, are_optional=True)
    return Prepared(options, monitor, ErrorReporter(messages, parsed["on_error"], is_first_process))


class RunController:
    """Owns the controllers of a run: of its sinks and, once its model exists, of its steps, with its health and its reference."""

    def __init__(self, run: Run, keys_of_others: Sequence[Callable[[], Sequence[str]]]) -> None:
        self._run = run
        self._keys_of_others = keys_of_others
        """Functions that return the planned keys of the other callbacks of the Trainer."""
        self._resumed: dict[str, Any] = {}
        """The state of the resumed run."""
        self._sinks = SinksController(run)
        self.origin: ReferenceOrigin | None = None
        """Makes the reference, if the run has one that is not made yet."""
        self.steps: StepController | None = None
        """The controller of the steps, from when the model is about to run."""
        self.has_begun = False
        """Whether training has begun. Until then hooks may initialize the model, and make layers."""
        self._is_over = False
        """Whether the run ends: its last state is that of the results."""

    # From setup to the end

    def begin(self) -> None:
        """The run begins; it is a ``ConfigError`` if the run cannot be monitored, or a rule matches nothing in the model."""
        run, options = self._run, self._run.options
        messages.follow(run.trainer)
        run.reporter.begin(run.module)
        if run.is_fit:
            run.results.findings, run.results.state = [], {}
        runs_training_step = options.reference is not None and options.observes("train") and options.arguments["module"] is None
        requested_by = ("rcc" if options.arguments["reference"] is None else "reference") if runs_training_step else ""
        checks.check_manual_optimization(run.module, run.recipe, "" if options.dry_run else requested_by)
        strategy.check_strategy(run.trainer, options.health, run.recipe)
        if run.is_fit and run.recipe.gradient_noise is not None:
            strategy.check_gradient_noise(run.trainer)
        checks.check_compiled(run.module, options, run.reporter)
        if not checks.makes_layers_late(run.module):
            self._set_module()
        can_copy = "parameter_difference" not in strategy.unavailable_kinds(run.trainer)
        if options.reference is not None and run.observes_training and can_copy:
            self.origin = ReferenceOrigin(run)

    def observe(self) -> None:
        """The model is about to run, and parameters are those that will be trained; called again as long as there may be new layers."""
        run, options = self._run, self._run.options
        if self.steps is not None and (self.has_begun or not run.is_fit or self.steps.reference is not None):
            return
        if run.monitor.module is None:
            checks.check_compiled(run.module, options, run.reporter)  # layers that were created since setup may be compiled
            self._set_module()
        elif (run.planner.index.is_complete() or not self._set_module_again()) and self.steps is not None:
            return
        if self.steps is not None:
            self.steps.close()
        health = HealthController(run, self._sinks)
        health.load(self._resumed.get("health", {}))
        run.model.noise.load(self._resumed.get("gradient_noise", {}))
        if run.is_fit:
            run.model.wrapper = run.trainer.strategy.model
            if options.observes("validate") and run.trainer.is_global_zero:
                checks.check_validation(run.trainer, run.module, run.reporter)
            if not options.dry_run:
                run.engine.check_agreement()
            if run.trainer.is_global_zero:
                self._describe_step()
        self.steps = StepController(run, health, self._sinks)
        if self.origin is not None and is_laid_out(run.planner.index.within):
            self.make_reference()  # before a validation loop, after which the outermost unit of FSDP1 has its parameters whole

    def begin_training(self) -> None:
        """The first batch of training begins."""
        self.observe()
        self.make_reference()
        self.has_begun = True

    def make_reference(self) -> None:
        """Make the reference if there is none yet."""
        if self.origin is not None and self.steps is not None:
            self.steps.reference, self.origin = self.origin.make(), None

    def _describe_step(self) -> None:
        """Log what a monitored step records, or print it in a dry run."""
        run, options, sinks = self._run, self._run.options, self._sinks
        keys, histograms = sinks.planned_keys([TRAIN]), sinks.planned_histograms([TRAIN])
        if options.dry_run:
            print(dry_run_text(run.planner, options.every_n_steps, run.trainer.max_steps, keys, histograms))
            return
        limit = f"max_logged_keys={options.max_logged_keys}"
        has_roll_ups = bool(run.trainer.loggers) and sinks.rolls_up()
        roll_ups = f" Loggers get roll-ups, as the keys are more than {limit}." if has_roll_ups else ""
        run.reporter.log_once(line_of_fit(run.planner, options.every_n_steps, [*keys, *histograms], roll_ups))

    def _set_module(self) -> None:
        """Set the module to monitor; refuse patterns that match nothing in it, and keys that another callback also has."""
        run, monitor, trainer = self._run, self._run.monitor, self._run.trainer
        monitor.distributed, monitor.access = strategy.ranks_of(trainer), strategy.access_of(trainer)
        left_out = run.engine.leave_out(strategy.unavailable_kinds(trainer))
        if trainer.is_global_zero and (left_out or not strategy.has_parameters(trainer)):
            run.reporter.log_once(strategy.describe_left_out(trainer, left_out), logging.WARNING)
        monitor.set_module(run.module)
        # Under manual optimization the module clips, at a time that is not known.
        clips = bool(trainer.gradient_clip_val) and run.module.automatic_optimization
        if run.options.arguments["rules"] is None and (clips or "gradient" in left_out):
            before = Rule(kinds="gradient_before_clip", per_module=ROOT_SITE, statistics="norm")
            run.model.add_rule(run.recipe.parsed(before, "rules", is_optional=True))
        if self._sinks.rolls_up():  # loggers also get values by block
            blocks = blocks_of(run.planner.index)
            rules = block_rules(run.recipe.rules, run.planner.index, blocks)
            for rule in rules if len(rules) * len(blocks) <= run.options.max_logged_keys else ():
                run.model.add_rule(rule)
        if not run.recipe.has_any():
            raise ConfigError("rules is empty, and nothing would be recorded; expected at least one rule. Leave rules out for the default.")
        if run.options.rcc:
            checks.check_coordinate_check(run.planner.index, run.reporter)
        self._check_keys()
        if not run.options.dry_run:
            warm_up(trainer.strategy.root_device, expected_launches(trainer, run.module, run.planner.plan()))

    def _set_module_again(self) -> bool:
        """Read the names again, as hooks of the module have made layers since; returns whether options still name what there is."""
        engine = self._run.engine
        observed, engine.observed = engine.observed, None
        try:
            self._set_module()
        except ConfigError as error:
            engine.observed = observed
            reason = f"Layers that were made since setup are not observed, as options are for the model before: {error}"
            self._run.reporter.log_once(reason, logging.WARNING)
            return False
        if observed is not None:
            self._run.model.ranks = observed.ranks  # they have met
        return True

    def _check_keys(self) -> None:
        """Compare the keys of this run with the patterns of options, and with the keys of other callbacks."""
        run, options, keys, histograms = self._run, self._run.options, self._sinks.planned_keys(), self._sinks.planned_histograms()
        for label, pattern in (*(("callback_metrics", pattern) for pattern in options.callback_metrics), *options.health.patterns):
            hides_context = label == "callback_metrics" and not names_context(pattern)
            known = [key for key in keys if not (hides_context and is_context(key))]
            if not checks.check_keys(run.planner, pattern, label, known, histograms):
                run.results.awaited.setdefault((label, pattern), False)
        for planned_keys in self._keys_of_others:
            common = {*keys, *histograms} & {*planned_keys()}
            if common:
                remedy = "Give each callback a prefix of its own, e.g. prefix: second."
                raise ConfigError(f"Two callbacks have the key {min(common)!r}; expected keys that differ. {remedy}")
        if run.is_fit:
            checks.check_monitored_keys(run.trainer, {*keys}, options.callback_metrics, run.reporter)

    def planned_keys(self) -> list[str]:
        """Every key, also of a histogram, that is known before the first step; none before the model exists."""
        return [] if self._run.monitor.module is None else [*self._sinks.planned_keys(), *self._sinks.planned_histograms()]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: path of the store with the steps until now, state of health and gradient noise, and the reference."""
        if self._is_over:  # a signal's handler saves a checkpoint while the run ends
            return self._run.results.state
        state: dict[str, Any] = {
            "format_version": STATE_VERSION,
            **{name: self._resumed.get(name, {}) for name in ("health", "gradient_noise")},
        }
        reference: dict[str, Any] = {}
        if not self._run.is_fit:
            state |= self._run.results.state
        elif self.steps is not None:
            state["groups"] = self._run.groups.places
            state["health"] = self.steps.health.state()
            state["gradient_noise"] = self._run.model.noise.state()
            maker = self.steps.reference or self.origin
            reference = {} if maker is None else maker.state()
        self._sinks.checkpoint()
        return state | {"store": self._sinks.store_path, "run": self._sinks.store_run} | reference

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the :meth:`state` of an earlier run; validating or testing a checkpoint resumes nothing."""
        if not self._run.is_fit:
            return
        version = state.get("format_version", 0)
        if not isinstance(version, int) or not 1 <= version <= STATE_VERSION:
            message = (
                "The monitor's state in the checkpoint has format version %s; expected one from 1 to %d. Nothing of it is continued. %s"
            )
            messages.warning(message, version, STATE_VERSION, "Update lightning-module-monitor to read it.")
            return
        self._resumed = state
        self._run.groups.places = state.get("groups", [])
        self._sinks.resume(state)
        if self.origin is not None:
            self.origin.load(state)
        if self.steps is not None:
            self.steps.health.load(state.get("health", {}))
            self._run.model.noise.load(state.get("gradient_noise", {}))
            if self.steps.reference is not None:
                self.steps.reference.is_restored |= "reference" in state

    def note_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The weights of a checkpoint were loaded."""
        # A checkpoint from before the first step resumes nothing: a finder of learning rates loads such a checkpoint.
        reference = self.origin or (None if self.steps is None else self.steps.reference)
        if reference is not None and checkpoint.get("global_step", 0) > 0:
            reference.note_checkpoint()

    def close(self, exception: BaseException | None = None, *, leaves_device: bool = False) -> None:
        """Remove every hook and close the sinks, possibly after an exception; a second call does nothing.

        The reference ``leaves_device`` with the model.
        """
        steps, findings = self.steps, []
        with ExitStack() as stack:
            stack.callback(self._sinks.close)
            stack.callback(self._run.monitor.close)
            if steps is not None:
                steps.close()
            if leaves_device and steps is not None and steps.reference is not None:
                steps.reference.leave_device()
            self._run.results.state = self.state()
            self._is_over = True
            try:
                record = None if steps is None else steps.metrics_of_last_validation()
                if record is not None:
                    self._sinks.write(record)
            except (
                Exception
            ) as error:  # of a user's metric, or of a device that has failed: the error that ended the run must reach the user
                messages.warning("What the last validation logged was not stored (%s: %s).", type(error).__name__, error)
            try:
                findings = [] if steps is None else steps.health.finish(exception)
            except Exception as error:
                messages.warning("The run as a whole was not judged (%s: %s).", type(error).__name__, error)
            if findings:
                self._sinks.write(Record(findings[0].step), findings)
