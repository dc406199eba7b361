"""The Lightning callback: Lightning's events become the monitor's phases, and its records go to the sinks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_module_monitor.config import (
    Capture,
    GradientFlow,
    Rule,
    as_tuple,
    attention_rules,
    coordinate_check_rules,
    default_rules,
)
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.errors import ConfigError, MonitorError, NonfiniteError, nearest
from lightning_module_monitor.health.options import Alert, Health
from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.rcc_layers import layer_parts
from lightning_module_monitor.record import OVERHEAD_FRACTION, STEP_SKIPPED, TRAIN, Finding, Record
from lightning_module_monitor.schedule import Schedule, parse_schedule
from lightning_module_monitor.trainer.ddp_forward import RedirectedCalls
from lightning_module_monitor.trainer.dry_run import forecast
from lightning_module_monitor.trainer.health import HealthOfRun
from lightning_module_monitor.trainer.nonfinite import NonfiniteOfRun
from lightning_module_monitor.trainer.optimizers import OptimizerSteps
from lightning_module_monitor.trainer.overhead import Overhead, check_limit, clock_of
from lightning_module_monitor.trainer.reference import INIT, ReferenceOfRun
from lightning_module_monitor.trainer.sinks import SinksOfRun

STAGES = {"train": TRAIN, "validate": "validation", "test": "test", "predict": "predict"}
"""Stage in a key by Lightning's name of it."""

# A child of Lightning's logger: shown, and silenced, with Lightning's own messages.
_messages = logging.getLogger("lightning.pytorch.module_monitor")

P = ParamSpec("P")


def _never_fatal(event: Callable[Concatenate[ModuleMonitorCallback, P], None]) -> Callable[Concatenate[ModuleMonitorCallback, P], None]:
    """An error of ours in an event ends this step's monitoring, and not the run."""

    def guarded(self: ModuleMonitorCallback, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(self, *args, **kwargs)
        except (MonitorError, ConfigError):
            raise
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._lose_step()
            name = event.__name__
            if (name, type(error)) not in self._said:
                self._said.add((name, type(error)))
                message = "%s failed (%s: %s); this step is not monitored. Said once."
                _messages.warning(message, name, type(error).__name__, error, exc_info=error)

    functools.update_wrapper(guarded, event)
    return guarded


class ModuleMonitorCallback(Callback):
    """Shows the inside of a model while it trains: in the Trainer's loggers, and in one HDF5 file.

    Without arguments it records, every 50 steps, ``rms``, ``abs_max`` and ``nonfinite_count`` of every leaf module's
    output, and the ``norm`` of every parameter and gradient. Several in one Trainer need a prefix each.

    Args:
        every_n_steps: Which optimizer steps are monitored: every n-th from 0 on, a list, ``log`` (1, 2, 5, 10, ...), or a
            function of the step. Values that modules record themselves are taken in these, also where no rule is due.
        module: Name of the submodule outside of which nothing is watched. Names stay those of the whole.
        exclude: Pattern or patterns (``re.fullmatch``) of names that are never watched, with all that is inside.
        rules: What to watch, instead of the default.
        reference: What activations and parameters are compared with: ``init``, the model as it was at the start of the run;
            the path of a checkpoint; or, in Python, a module of the same structure. In monitored steps it runs its own
            ``training_step`` on the batch first; with ``module`` it is called whenever that is, with its arguments. Without
            a rule of a difference, ``ratio`` of all of them is recorded.
        rcc: Whether to do the refined coordinate check; its reference is ``init`` if no other is given.
        save_reference: Whether checkpoints hold the reference, one more set of weights, so that a resumed run compares with
            the same.
        attention: Whether to watch attention as well, head by head: the means of its entropy and of the weight on the first
            key, and the largest logit, of every ``F.scaled_dot_product_attention`` and ``nn.MultiheadAttention``.
        gradient_flow: Blocks between which the gain of the gradient is watched: ``{blocks: model.blocks}``.
        capture: Raw tensors to write to ``monitor.tensors.h5``, beside the store: ``{sites: model.head, steps: [0, 100]}``.
        health: What is looked out for: who made the first NaN or infinity (in monitored steps, if nothing else is said), and the built-in
            watches: ``{nonfinite: always, watch: [dead_units, vanishing]}``.
        alerts: Rules on recorded values: ``[{keys: "gradient/.*/norm", above: 100, for_steps: 3, then: stop}]``.
        store: Whether to write ``monitor.h5`` in the first logger's directory; or the path of the file.
        report: Whether to write a page about the run, ``monitor.html`` beside the store, when it ends, be it by an exception.
        callback_metrics: Pattern or patterns of keys that EarlyStopping, ModelCheckpoint and their like can monitor.
        progress_bar: Whether the progress bar shows those keys.
        stages: When to monitor: ``train``, ``validate``, ``test``, ``predict``. A validation, test or predict loop gives
            one record of the activations of all its batches, under ``validation/...``.
        prefix: Put before every key: ``run1`` gives ``run1/...``.
        max_logged_keys: Where there are more keys, loggers get minimum, median and maximum over the sites, and of histograms
            the one of all sites together; the store gets all.
        max_overhead: Share of the time that monitoring may take, e.g. 0.02. Where it would be more, steps are left out, on all
            ranks the same; ``monitor/overhead_fraction`` is what it takes. At most every other step is monitored then, for the others
            tell what one costs.
        on_error: ``warn``: what cannot be computed is said once and recorded as NaN. ``raise``: it is an error.
        dry_run: Print what would be watched and what it would take, and watch nothing.
    """

    def __init__(
        self,
        every_n_steps: Schedule = 50,
        *,
        module: str | None = None,
        exclude: str | list[str] | None = None,
        rules: Sequence[Rule | dict[str, Any]] | None = None,
        reference: str | os.PathLike[str] | nn.Module | None = None,
        rcc: bool = False,
        save_reference: bool = True,
        attention: bool = False,
        gradient_flow: GradientFlow | dict[str, Any] | None = None,
        capture: Capture | dict[str, Any] | None = None,
        health: Health | dict[str, Any] | bool | str | None = None,
        alerts: list[Alert | dict[str, Any]] | dict[str, Any] | str | None = None,
        store: bool | str = True,
        report: bool = False,
        callback_metrics: str | list[str] | None = None,
        progress_bar: bool = False,
        stages: str | list[str] | None = None,
        prefix: str = "",
        max_logged_keys: int = 500,
        max_overhead: float | None = None,
        on_error: str = "warn",
        dry_run: bool = False,
    ) -> None:
        self._configuration = _describe(locals())
        self._stages: frozenset[str] = frozenset()
        self._on_error = on_error
        self._attention = attention
        self._max_overhead = max_overhead
        self._dry_run = dry_run
        self._has_rcc = rcc
        self._module_name = module
        reference = os.fspath(reference) if isinstance(reference, os.PathLike) else reference
        self._save_reference = save_reference
        source = INIT if reference is None and rcc is True else reference
        self._reference = None if source is None else ReferenceOfRun(source, module, is_saved=save_reference, messages=_messages)
        self._identity = ",".join(f"{name}={value}" for name, value in (("prefix", prefix), ("module", module)) if value)
        self.last_record: Record | None = None
        """The newest record, without its raw tensors."""
        self._sinks: SinksOfRun | None = None
        """Missing where an option is wrong."""
        self._health: HealthOfRun | None = None
        """Likewise."""
        self._reset()
        self._refusal: ConfigError | None = None
        try:
            more = attention_rules() if attention is True else []
            rules = [*(default_rules() if rules is None else as_tuple(rules)), *more]
            self.monitor = ModuleMonitor(
                every_n_steps,
                logger=_messages,
                rules=rules,
                gradient_flow=gradient_flow,
                capture=capture,
                exclude=exclude,
                module=module,
                prefix=prefix,
                on_error=on_error,
                history=1,
            )
            self._add_reference_rules(rcc)
            self._cadence = parse_schedule(every_n_steps, "every_n_steps")
            if max_overhead is not None:
                check_limit(max_overhead)
            self._stages = _parse_stages(stages)
            self._health = HealthOfRun(
                Health() if health is None else health, as_tuple(alerts), self.monitor, on_error=on_error, messages=_messages
            )
            captures = "capture is given" if capture is not None else "capture follows an alert" if self._health.may_capture else ""
            self._check_options(progress_bar=progress_bar, captures=captures if store is False else "")
            self._sinks = SinksOfRun(
                self.monitor.planner,
                [name for stage, name in STAGES.items() if stage in self._stages],
                store=store,
                report=report,
                callback_metrics=callback_metrics,
                progress_bar=progress_bar,
                max_logged_keys=max_logged_keys,
                configuration=self._configuration,
                messages=_messages,
            )
        except ConfigError as error:
            # Raised in `setup`, before the first batch. Raised here, LightningCLI would bury it in ninety lines of its own:
            # it tries every type that a callback may have, and prints what was wrong with each.
            self._refusal = error

    def _check_options(self, *, progress_bar: bool, captures: str) -> None:
        booleans = {
            "attention": self._attention,
            "progress_bar": progress_bar,
            "dry_run": self._dry_run,
            "save_reference": self._save_reference,
        }
        for name, value in booleans.items():
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; expected true or false.")
        if self._health_of_run.is_at_every_step and TRAIN not in self._stages:
            what = f"health.nonfinite is {self._health_of_run.nonfinite_option!r}"
            raise ConfigError(f"{what}, and stages has no train; expected train among stages, or nonfinite: warn.")
        if captures:
            raise ConfigError(f"{captures}, and store is false; expected a store: raw tensors are written to a file beside it.")

    def _add_reference_rules(self, rcc: bool) -> None:
        """The rules that the reference and the coordinate check stand for."""
        source, needed_by = None if self._reference is None else self._reference.source, self.monitor.planner.first_of_reference()
        if not isinstance(rcc, bool):
            raise ConfigError(f"rcc is {rcc!r}; expected true or false.")
        if source is None and needed_by is not None:
            raise ConfigError(f"{needed_by} needs a reference; expected reference: init, or the path of a checkpoint.")
        if source is not None and not (isinstance(source, str | nn.Module) and source):
            raise ConfigError(f"reference is {source!r}; expected 'init', the path of a checkpoint, or a module.")
        if rcc:
            self.monitor.add_rules(coordinate_check_rules(), "rcc", are_optional=True)
        elif source is not None and needed_by is None:
            self.monitor.add_rules(Rule(kinds=["activation_difference", "parameter_difference"], statistics="ratio"), "reference")

    def _reset(self) -> None:
        """Forget the run before: the same callback may serve several."""
        self._optimizers: OptimizerSteps | None = None
        """Of the step, if it is monitored."""
        self._silence = ExitStack()
        """Keeps the monitor silent in a loop without training."""
        self._redirected: list[RedirectedCalls] = []
        """Of the step, and of the loop that interrupts it."""
        self._step: int | None = None
        """The step of the latest training batch; ``None`` when it is over."""
        self._is_idle = True
        """Whether nothing is left to do in that step."""
        self._overhead: Overhead | None = None
        self._has_left_out = False
        """Whether it was said that steps are left out."""
        self._has_left_out_capture = False
        self._is_fit = False
        if self._reference is not None:
            self._reference.begin()
        self._said: set[tuple[str, type[Exception]]] = set()

    # The life of a run

    @property
    def store_path(self) -> str | None:
        """Where the store of this run is, once something was recorded."""
        return None if self._sinks is None else self._sinks.store_path

    @property
    def findings(self) -> list[Finding]:
        """What was found to be wrong in this run, in the order in which it was found."""
        return [] if self._health is None else list(self._health.findings)

    @property
    def _health_of_run(self) -> HealthOfRun:
        assert self._health is not None, "setup has refused to go on without it"
        return self._health

    @property
    def _nonfinite(self) -> NonfiniteOfRun | None:
        return self._health_of_run.nonfinite

    @property
    def _sinks_of_run(self) -> SinksOfRun:
        assert self._sinks is not None, "setup has refused to go on without them"
        return self._sinks

    @property
    def state_key(self) -> str:
        """Differs between callbacks of one Trainer."""
        return f"{type(self).__name__}[{self._identity}]" if self._identity else type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the path of the store with the steps so far, what alerts have seen, and the reference."""
        state: dict[str, Any] = {"format": 1} | ({} if self._sinks is None else self._sinks.state())
        if self._health is not None:
            state["health"] = self._health.state()
        reference = None if self._reference is None else self._reference.state()
        if reference is not None:
            state["reference"] = reference
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the run that is resumed; validating or testing a checkpoint resumes nothing."""
        if self._is_fit:
            self._sinks_of_run.resume(state_dict)
            self._health_of_run.resume(state_dict.get("health", {}))
            if self._reference is not None:
                self._reference.load(state_dict.get("reference"))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The model has the weights of a checkpoint, also where that knows nothing of this callback."""
        # What was saved before the first step is where this run begins, not what it resumes: a finder of learning rates puts it back.
        if self._is_fit and self._reference is not None and checkpoint.get("global_step", 0) > 0:
            self._reference.resume()

    def __getstate__(self) -> dict[str, Any]:
        """Without what Lightning binds to a callback, which would drag the whole model along, and without the run: its hooks and files."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return state | {"_optimizers": None, "_silence": ExitStack(), "_redirected": [], "_step": None, "_is_idle": True, "_overhead": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the model's names and check the rules against them, before the first batch.

        Raises:
            ConfigError: If an option is wrong; says which, what was expected, and the nearest right one.
        """
        if self._refusal is not None:
            raise self._refusal
        self._close()
        self._reset()
        self._is_fit = stage == "fit"
        self._sinks_of_run.begin(trainer)
        if self._is_fit:
            self._health_of_run.begin_fit()
        if not self._is_wanted(stage):
            return
        if not pl_module.automatic_optimization:
            self._check_manual(type(pl_module).__name__)
        _refuse_unsupported(trainer, pl_module, at_every_step=self._health_of_run.is_at_every_step)
        if not _makes_layers_late(pl_module):
            self._set_module(trainer, pl_module)
        if self._is_fit and self._reference is not None and self._uses_reference():
            self._reference.begin_fit(pl_module, self.monitor)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All layers exist now; parameters are those that will be trained."""
        if not self._is_wanted("fit"):
            return
        if self.monitor.module is None:
            _refuse_unsupported(
                trainer, pl_module, at_every_step=self._health_of_run.is_at_every_step
            )  # what was made since may be compiled
            self._set_module(trainer, pl_module)
        if self._reference is not None and self._uses_reference():
            self._reference.prepare(trainer, pl_module, self.monitor)
        if self._max_overhead is not None:
            self._overhead = Overhead(self._max_overhead, clock_of(pl_module.device))
        if not self._dry_run:
            self.monitor.agree()
        if not trainer.is_global_zero:
            return
        if self._dry_run:
            planner = self.monitor.planner
            keys, histograms, captured = planner.planned_keys(), planner.planned_histograms(), planner.capture_plan()
            print(forecast(planner.plan(), keys, histograms, self._cadence, trainer.max_steps, captured=captured))
        else:
            _messages.info(self._announcement())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything off. ``teardown`` does not come after an exception."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything off; the reference leaves the device with the model."""
        self._close()
        if self._reference is not None:
            self._reference.leave_device()

    # A training step

    @_never_fatal
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """The first micro-batch of a step begins it; the hooks go on."""
        step = _step(trainer)
        # The number grows after the last micro-batch of a step.
        is_first = step != self._step
        if is_first:
            self._step = step
            self._sinks_of_run.note_step(step)
            # An error below must not prevent the end of the step: other ranks wait for it.
            self._is_idle = TRAIN not in self._stages or self._dry_run
        if self._is_idle:
            return
        if self._overhead is not None:
            self._overhead.begin_batch()
        if is_first:
            if self._begin_step(step):
                self._watch_redirected_calls(trainer, pl_module)
                self._watch_optimizers(trainer, pl_module)
            elif self._overhead is None and not self._health_of_run.is_at_every_step:
                self._is_idle = True
                return
        # Until Lightning says that it begins, a backward pass is an inner one of the user's.
        self.monitor.end_backward()
        if self._reference is not None and self.monitor.awaits_reference():
            self._reference.run(trainer, batch, batch_idx, self.monitor)
        is_monitored = self.monitor.is_monitoring()
        if self._nonfinite is not None:
            self._nonfinite.begin_micro_batch(pl_module, batch, batch_idx, is_first=is_first, is_monitored=is_monitored)

    @_never_fatal
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The gradients that arrive at outputs from now on are those of the loss."""
        if self._is_idle:
            return
        if self._nonfinite is not None:
            self._nonfinite.begin_backward(loss, is_scaled=_scaler(trainer) is not None)
        if self._optimizers is not None:
            self._optimizers.begin_backward(loss)

    @_never_fatal
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The activation gradients of this micro-batch are complete."""
        if self._is_idle:
            return
        self.monitor.end_backward()
        if self._nonfinite is not None:
            self._nonfinite.end_backward(is_scaled=_scaler(trainer) is not None)

    @_never_fatal
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete, unscaled (unless by the optimizer itself) and not clipped; parameters have not moved."""
        if self._is_idle:
            return
        if self._nonfinite is not None:
            self._look_before_update(self._nonfinite, trainer, pl_module)
        if self._optimizers is not None:
            self._optimizers.prepare(optimizer)

    @_never_fatal
    def _before_update(self, optimizer: Optimizer) -> None:
        if self._optimizers is not None:
            self._optimizers.begin(optimizer)

    @_never_fatal
    def _after_update(self, optimizer: Optimizer) -> None:
        if self._optimizers is not None:
            self._optimizers.end(optimizer)

    @_never_fatal
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int) -> None:
        """The micro-batch is over, and with the last one of a step the step is."""
        if self._is_idle:
            return
        if self._nonfinite is not None:
            self._nonfinite.end_micro_batch()
        self.monitor.after_micro_batch()
        ends_step = not trainer.fit_loop._should_accumulate()
        if ends_step:
            self._end_step(trainer, pl_module)
        if self._overhead is not None:
            self._overhead.end_batch()
            if ends_step:
                self._overhead.end_step()

    # Loops without training

    @_never_fatal
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training's hooks are silent, also in the middle of an accumulated step."""
        self._begin_loop("validate", trainer, pl_module)

    @_never_fatal
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last moment of a validation loop at which values may be logged."""
        self._emit(trainer, pl_module, self._health_of_run.examined(_step(trainer), self._end_stage()))

    @_never_fatal
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        self._silence.close()

    @_never_fatal
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._begin_loop("test", trainer, pl_module)

    @_never_fatal
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._emit(trainer, pl_module, self._health_of_run.examined(_step(trainer), self._end_stage()))

    @_never_fatal
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._silence.close()

    @_never_fatal
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._begin_loop("predict", trainer, pl_module)

    @_never_fatal
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._emit(trainer, pl_module, self._health_of_run.examined(_step(trainer), self._end_stage()))

    @_never_fatal
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._silence.close()

    # Inside

    def _begin_step(self, step: int) -> bool:
        """Begin a step, and say whether it is monitored."""
        if self._overhead is None:
            return self.monitor.begin_step(step)
        is_allowed = self._overhead.allows(step)
        if not is_allowed:
            self._say_left_out(step, self._overhead.closest)
        try:
            return is_allowed and self.monitor.begin_step(step)
        finally:
            # A step that fails to begin on this rank is monitored on others, and all count from it to the next.
            self._overhead.begin_step(step, is_monitored=is_allowed and self.monitor.is_monitoring())

    def _say_left_out(self, step: int, closest: int) -> None:
        """Say, once each, that the limit leaves steps out, and that it leaves out one that raw tensors are asked for of."""
        left_out = f"max_overhead={self._max_overhead}: "
        if not self._has_left_out and self.monitor.is_step_monitored(step):
            self._has_left_out = True
            self._say(f"{left_out}at most one step in {closest} is monitored, from step {step} on. This is said once.")
        if not self._has_left_out_capture and self.monitor.planner.is_captured(step):
            self._has_left_out_capture = True
            apart = f"capture has step {step}, less than {closest} steps after another that was monitored"
            self._say(f"{left_out}{apart}; the raw tensors of such steps are not written. This is said once.", logging.WARNING)

    def _say(self, message: str, level: int = logging.INFO) -> None:
        """Say what all ranks have to say, on the first."""
        if is_first_process():
            _messages.log(level, message)

    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With this batch the step is over. Under manual optimization the next batch may be of the same step: it begins it anew."""
        self._step, self._is_idle = None, True
        self._before_end_of_step()
        # Reached whatever has failed: other ranks wait for this one.
        record = self.monitor.end_step()
        if record is not None and self._overhead is not None:
            self._overhead.decide(record.values.get(self.monitor.planner.own_key(OVERHEAD_FRACTION), math.nan))
        if self._nonfinite is not None:
            self._health_of_run.note(self._nonfinite.end_step(_step(trainer), record))
        self._emit(trainer, pl_module, self._health_of_run.examined(_step(trainer), record))

    @_never_fatal
    def _before_end_of_step(self) -> None:
        self._end_redirected()
        if self._optimizers is not None:
            self._optimizers.finish()
            self._optimizers = None
        fraction = None if self._overhead is None else self._overhead.fraction()
        if fraction is not None:
            self.monitor.monitor_overhead(fraction)

    def _look_before_update(self, nonfinite: NonfiniteOfRun, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for values that are not finite.

        Raises:
            NonfiniteError: If there is one, and that is to be an error.
        """
        step, is_scaled = _step(trainer), _scaler(trainer) is not None
        found = nonfinite.before_update(trainer, pl_module, step, self._sinks_of_run.folder, is_scaled=is_scaled)
        self._health_of_run.note(found)
        if found is not None and self._health_of_run.is_fatal:
            self._emit(trainer, pl_module, self._health_of_run.examined(step, None))
            raise NonfiniteError(f"Step {step}, {found.site}: {found.words} Training ends here, as health.nonfinite is 'stop'.")

    def _check_manual(self, model: str) -> None:
        """Check that nothing is asked for that manual optimization has not.

        Raises:
            ConfigError: If so.
        """
        if self._uses_reference() and self._module_name is None:
            remedy = "give module, the name of the submodule to watch: its sibling is then called with its arguments"
            raise ConfigError(f"{model} uses manual optimization, and no reference can run its training_step; {remedy}.")
        wish = self.monitor.planner.first_of_kind("gradient_before_clip", without="gradient")
        if wish is not None:
            why = f"{model} uses manual optimization, and when it clips, if it does, is not known"
            raise ConfigError(f"{wish}: {why}; expected 'gradient', what the optimizer uses.")

    def _is_wanted(self, stage: str) -> bool:
        """Whether a run of Lightning's ``fit``, ``validate``, ``test`` or ``predict`` is to be monitored."""
        wanted = {"train", "validate"} if stage == "fit" else {stage}
        return bool(wanted & self._stages)

    def _set_module(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.monitor.distributed = trainer.world_size > 1
        if isinstance(trainer.strategy, ModelParallelStrategy):
            self.monitor.distributed = trainer.strategy.device_mesh["tensor_parallel"]
        self.monitor.set_module(pl_module)
        if trainer.strategy.root_device.type == "cpu":
            numba_kernel.loops()  # compiled here, and not within the first monitored step
        if not self.monitor.planner.has_any():
            raise ConfigError("rules is empty, and nothing would be watched; expected at least one rule. Leave rules out for the default.")
        measured = {STEP_SKIPPED: _scaler(trainer) is not None, OVERHEAD_FRACTION: self._max_overhead is not None}
        self._sinks_of_run.expect([name for name, is_measured in measured.items() if is_measured])
        modules = [site.module for site in self.monitor.planner.index.modules]
        if self._has_rcc and not any(layer_parts(module) for module in modules):
            what = "a layer that the coordinate check knows (Linear, convolution, embedding, normalization)"
            self._say(f"rcc: none of the {len(modules)} modules is {what}; nothing of it is recorded.")
        self._health_of_run.begin(self._sinks_of_run.planned_keys(), self._sinks_of_run.planned_histograms(), is_fit=self._is_fit)
        self._check_others(trainer)

    def _check_others(self, trainer: Trainer) -> None:
        """Check that no other callback of this kind writes the same keys.

        Raises:
            ConfigError: If so; names one.
        """
        mine = self._sinks_of_run.all_planned()
        for other in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector, where mypy does not look
            if isinstance(other, ModuleMonitorCallback) and other is not self and other.monitor.module is not None:
                common = mine & other._sinks_of_run.all_planned()
                if common:
                    raise ConfigError(
                        f"Two callbacks have the key {min(common)!r}; expected keys that differ. Give each a prefix of its own."
                    )

    def _uses_reference(self) -> bool:
        return self._reference is not None and TRAIN in self._stages and not self._dry_run

    def _announcement(self) -> str:
        planner = self.monitor.planner
        plan = planner.plan()
        num_keys = len(planner.planned_keys()) + len(planner.planned_histograms())
        keys = f"{num_keys} keys" + (" and those of heads of attention" if plan.has_heads() else "")
        blocks = f", gradient flow of {len(plan.chain.blocks)} blocks" if plan.chain is not None else ""
        captured = planner.capture_plan()
        num_modules = sum(one.site.runs for one in plan.modules)
        return (
            f"Watching {num_modules} modules, {len(plan.parameters)} parameters{blocks}: {keys} a step, {self._cadence}."
            + self._sinks_of_run.roll_ups_in_words()
            + (f" Raw tensors of {len(captured.modules)} modules, {len(captured.parameters)} parameters." if captured is not None else "")
        )

    def _begin_loop(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Silence training's hooks, and, if the loop is to be monitored, begin to."""
        if stage in self._stages and not (trainer.sanity_checking or self._dry_run):
            if self.monitor.module is None:
                # Outside of fit this is the first event after `configure_model`.
                self._set_module(trainer, pl_module)
            self.monitor.begin_stage(STAGES[stage], _step(trainer))
            self._watch_redirected_calls(trainer, pl_module)
        else:
            self._silence.enter_context(self.monitor.no_monitor())

    def _watch_redirected_calls(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where the strategy wraps the module, what calls the wrapper is no call of the module."""
        if trainer.strategy.model is not pl_module:
            self._redirected.append(RedirectedCalls(pl_module, self.monitor))

    def _end_redirected(self) -> None:
        """Watch the calls of the step, or of the loop that interrupts it, no longer."""
        if self._redirected:
            self._redirected[-1].close()
            self._redirected.pop()

    def _watch_optimizers(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_automatic, scaler = pl_module.automatic_optimization, _scaler(trainer)
        self._optimizers = OptimizerSteps(self.monitor, pl_module, trainer.optimizers, is_automatic=is_automatic, scaler=scaler)
        self._optimizers.watch(self._before_update, self._after_update)

    def _forget_optimizers(self) -> None:
        if self._optimizers is not None:
            self._optimizers.close()
        self._optimizers = None

    def _end_stage(self) -> Record | None:
        """End the monitored loop; what a module's own hooks do until the loop ends is of no stage."""
        if self.monitor.is_in_stage():
            self._end_redirected()
        record = self.monitor.end_stage()
        if record is not None:
            self._silence.enter_context(self.monitor.no_monitor())
        return record

    def _emit(self, trainer: Trainer, pl_module: LightningModule, record: Record | None) -> None:
        """Give a record to every sink."""
        if record is None:
            return
        if record.values:  # else it has only findings, of a step that was not monitored
            # Raw tensors are for the file, and may be large.
            self.last_record = dataclasses.replace(record, tensors=())
        self._sinks_of_run.emit(trainer, pl_module, record)
        self._health_of_run.follow(trainer, record.findings, self._sinks_of_run.folder)

    def _lose_step(self) -> None:
        """Go on without monitoring what is left of this step."""
        self._silence.close()
        while self._redirected:
            self._end_redirected()
        self._forget_optimizers()
        if self._nonfinite is not None:
            self._nonfinite.forget_step()
        self.monitor.lose()

    def _close(self) -> None:
        """Take every hook off and close the sinks; a second call does no harm."""
        if self._refusal is not None:
            return
        self._step, self._is_idle = None, True
        with ExitStack() as stack:
            stack.callback(self._sinks_of_run.close)
            stack.callback(self.monitor.close)
            stack.callback(self._health_of_run.close)
            stack.callback(self._forget_optimizers)
            for calls in self._redirected:
                stack.callback(calls.close)
            stack.callback(self._silence.close)
        self._redirected.clear()


def _scaler(trainer: Trainer) -> GradScaler | None:
    """What scales the loss under 16-mixed, and may skip a step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def _step(trainer: Trainer) -> int:
    """The step that Lightning's own loggers plot against: the number of batches that stepped (not public anywhere)."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _parse_stages(stages: str | Sequence[str] | None) -> frozenset[str]:
    if stages is not None and not as_tuple(stages):
        raise ConfigError(f"stages is empty, and nothing would be watched; expected one or several of {', '.join(STAGES)}.")
    for stage in as_tuple(stages):
        if not isinstance(stage, str) or stage not in STAGES:
            raise ConfigError(f"stages {stage!r} is not a stage; expected {', '.join(STAGES)}{nearest(str(stage), STAGES)}")
    return frozenset(as_tuple(stages) or ("train",))


def _refuse_unsupported(trainer: Trainer, pl_module: LightningModule, *, at_every_step: bool) -> None:
    """Refuse, before the first batch, what would be measured wrong.

    Raises:
        ConfigError: Says what is not supported and what to do.
    """
    remedy = "Leave the callback out of this run."
    if trainer.world_size > 1 and type(trainer.strategy) not in (DDPStrategy, ModelParallelStrategy):
        expected = "expected strategy ddp (and its kin ddp_spawn, ddp_notebook) or ModelParallelStrategy"
        raise ConfigError(f"{type(trainer.strategy).__name__} keeps parameters in a way that is not measured; {expected}. {remedy}")
    compiled = [name or "The model" for name, module in pl_module.named_modules() if _is_compiled(module)]
    if compiled and at_every_step:
        expected = "expected health: {nonfinite: warn}, which looks at monitored steps, when it runs uncompiled"
        raise ConfigError(f"health.nonfinite looks at every step, and {compiled[0]} is compiled, whose modules nobody sees; {expected}.")
    if compiled and not hasattr(torch.compiler, "set_stance"):
        why = f"torch {torch.__version__} cannot run it uncompiled in monitored steps"
        raise ConfigError(f"{compiled[0]} is compiled, and {why}; expected torch 2.6 or later. {remedy} Or do not compile it.")


def _makes_layers_late(pl_module: LightningModule) -> bool:
    """Whether the module may have layers after the callbacks' ``setup`` that it does not have yet."""
    return any(is_overridden(hook, pl_module, LightningModule) for hook in ("setup", "configure_model"))


def _is_compiled(module: nn.Module) -> bool:
    # Lightning unwraps a compiled LightningModule, and keeps the compiler in `_compiler_ctx`.
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or module._compiled_call_impl is not None or getattr(module, "_compiler_ctx", None) is not None


def _describe(options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as the store keeps it, in types that JSON has."""

    def plain(value: object) -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {str(key): plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if isinstance(value, nn.Module):
            return type(value).__qualname__
        return value if value is None or isinstance(value, bool | int | float | str) else getattr(value, "__qualname__", repr(value))

    return {name: plain(value) for name, value in options.items() if name not in ("self", "__class__")}
