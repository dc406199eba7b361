"""The Lightning callback: Lightning's events become the phases of a run and of its steps.

Internal: it may change in any version.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_module_monitor.config.gradient_options import GradientFlow, GradientNoise
from lightning_module_monitor.config.health_options import Alert, Health
from lightning_module_monitor.config.rules import Capture, Rule
from lightning_module_monitor.config.schedule import Schedule
from lightning_module_monitor.display import Described, Description, Findings
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.diagnoses import Diagnoses
from lightning_module_monitor.lightning_packages import Callback, LightningModule, Trainer
from lightning_module_monitor.model.compiled import KEEP
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.trainer.controller import Prepared, RunController, prepare
from lightning_module_monitor.trainer.run import Run, RunResults
from lightning_module_monitor.trainer.step import StepController
from lightning_module_monitor.trainer.summary import description_of


@dataclass
class _ShownResults:
    """The results that a callback shows: of its latest run, or of that of a deep copy; some libraries train with copies of callbacks."""

    results: RunResults


class ModuleMonitorCallback(Described, Callback):  # type: ignore[misc]  # as Callback
    """Shows the inside of a model while it trains: in the Trainer's loggers, and in one HDF5 file.

    Without arguments it records, every 50 steps, ``rms``, ``abs_max`` and ``nonfinite_count`` of every leaf module's
    output, the ``norm`` of every parameter and gradient, and the norms of all parameters and of the whole gradient
    (``gradient/_root_/norm``; where the Trainer clips also before clipping). Several in one Trainer need a prefix each.

    Args:
        every_n_steps: Which optimizer steps are monitored: every n-th from 0 on, a list of steps, ``log`` (1, 2, 5, 10, ...), one step
            every so many minutes (``{minutes: 5}``), or a function of the step. Values that modules log themselves are recorded in these
            steps, even if no rule is due. With ``minutes``, the first monitored steps are 0, 1, 11, 111, ... until the interval is reached.
            Each monitored step chooses the next one from the time of a step since the last (``monitor/seconds_per_step``, the largest of
            all ranks), so that all ranks monitor the same steps.
        module: Name of the submodule to monitor. Keys keep the names of the whole model.
        exclude: Pattern or patterns (``re.fullmatch``) of names that are not monitored, with everything inside.
        rules: What to record, instead of the default.
        reference: The model that activations and parameters are compared with: ``init``, a copy at the start of the run; the path of a
            checkpoint; or, in Python, a module of the same structure. In monitored steps the reference runs its own ``training_step`` on
            the batch before the model does; with ``module`` it is called whenever that submodule is, with copies of its arguments. If no
            rule needs it, ``ratio`` of both kinds of differences is recorded, also beside ``rcc``.
        rcc: Whether to run the refined coordinate check. Its reference is ``init`` unless another one is given.
        save_reference: Whether checkpoints hold the reference (one more set of weights), so that a resumed run has the same reference.
        attention: Whether to record attention head by head: the means of its entropy and of the weight of the first key, and the largest
            logit, of every call of ``F.scaled_dot_product_attention`` and ``nn.MultiheadAttention``.
        gradient_flow: Blocks between which the gain of the gradient is recorded: ``{blocks: model.blocks}``.
        gradient_noise: Whether to record the simple noise scale, from the gradients of accumulated micro-batches and of DDP's ranks: of
            the whole model, or of modules (``{per_module: [_root_, model.encoder]}``).
        capture: Raw tensors to write to ``monitor.tensors.h5`` beside the store: ``{sites: model.head, steps: [0, 100]}``.
        health: Checks while training: the search for the module that made the first NaN or infinity, and the built-in detectors, e.g.
            ``{nonfinite: always, watch: [dead_units, vanishing]}``. Default: both, without those that cost more. ``false``: no check.
        alerts: Rules on recorded values: ``[{keys: "gradient/.*/norm", above: 100, for_steps: 3, then: stop}]``.
        store: Whether to write ``monitor.h5`` in the first logger's directory; or the path of the file.
        report: Whether to write a page about the run, ``monitor.html`` beside the store, at the end of the run or after an exception.
        callback_metrics: Pattern or patterns of keys that EarlyStopping, ModelCheckpoint and other callbacks can monitor.
        progress_bar: Whether the progress bar shows those keys.
        stages: When to monitor: ``train``, ``validate``, ``test``, ``predict``. A validation, test or predict loop gives
            one record of the activations of all its batches, under ``validation/...``.
        prefix: Put before every key: ``run1`` gives ``run1/...``.
        max_logged_keys: If there are more keys, loggers get minimum, median and maximum over the sites, one histogram of all sites
            together, and the values by block (the children of the longest ``ModuleList`` or ``Sequential``); the store gets everything.
        max_overhead: Largest share of the training time that monitoring may take, e.g. 0.02. Beyond it steps are left out, the same on all
            ranks; ``monitor/overhead_fraction`` is the measured share. Then at most every second step is monitored, because the
            unmonitored steps are the baseline for the cost.
        compiled: ``keep``: code that ``torch.compile`` has compiled runs as without the callback; its output, parameters and gradients are
            observed, and modules inside of it are not. ``uncompiled``: monitored steps run uncompiled, and everything is observed.
        on_error: ``warn``: a value that cannot be computed is logged once and recorded as NaN. ``raise``: it is an error.
        dry_run: Print what would be recorded and what it would cost, and record nothing.
    """

    def __init__(
        self,
        every_n_steps: Schedule = 50,
        *,
        module: str | None = None,
        exclude: str | Sequence[str] | None = None,
        rules: Sequence[Rule | Mapping[str, Any]] | None = None,
        reference: str | os.PathLike[str] | nn.Module | None = None,
        rcc: bool = False,
        save_reference: bool = True,
        attention: bool = False,
        gradient_flow: GradientFlow | Mapping[str, Any] | None = None,
        gradient_noise: GradientNoise | Mapping[str, Any] | bool = False,
        capture: Capture | Mapping[str, Any] | None = None,
        health: Health | Mapping[str, Any] | bool | str | None = None,
        alerts: Sequence[Alert | Mapping[str, Any]] | Mapping[str, Any] | str | None = None,
        store: bool | str = True,
        report: bool = False,
        callback_metrics: str | Sequence[str] | None = None,
        progress_bar: bool = False,
        stages: str | Sequence[str] | None = None,
        prefix: str = "",
        max_logged_keys: int = 500,
        max_overhead: float | None = None,
        compiled: str = KEEP,
        on_error: str = "warn",
        dry_run: bool = False,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        parameters = inspect.signature(ModuleMonitorCallback.__init__).parameters
        # None, the null of YAML, stands for the default.
        arguments |= {name: parameters[name].default for name, value in arguments.items() if value is None}
        self._identity = ",".join(f"{name}={value}" for name, value in (("prefix", prefix), ("module", module)) if value)
        self._prepared: Prepared | ConfigError
        """The parsed options and the monitor, or the error in the options, which ``setup`` raises.

        If it was raised here, LightningCLI would try every other type of a callback, and print ninety lines of errors.
        """
        try:
            self._prepared = prepare(arguments)
        except ConfigError as error:
            self._prepared = error
        self._was_set_up = False
        self._run: RunController | None = None
        """The run in progress, from ``setup`` to its end."""
        self._results = RunResults()
        self._shown = _ShownResults(self._results)
        self._shown_by_originals: tuple[_ShownResults, ...] = ()
        """Results shown by the callbacks of which this one is a deep copy. A run of this callback replaces them."""

    @property
    def monitor(self) -> ModuleMonitor:
        """The monitor of all runs; metrics and rules may be added to it before a run.

        Raises:
            ConfigError: If an option of the callback is wrong.
        """
        if isinstance(self._prepared, ConfigError):
            raise self._prepared
        return self._prepared.monitor

    @property
    def last_record(self) -> Record | None:
        """The newest record, without its raw tensors."""
        return self._shown.results.last_record

    @property
    def store_path(self) -> str | None:
        """Path of the latest store that a record was written to."""
        return self._shown.results.store_path

    @property
    def findings(self) -> list[Finding]:
        """The findings of this run, in order; a notebook shows them as a table."""
        return Findings(self._shown.results.findings)

    def diagnose(self) -> Diagnoses:
        """At most three diagnoses of this run: the causes of its findings, each with evidence, first step and advice."""
        return self._shown.results.diagnoses()

    def planned_keys(self) -> list[str]:
        """Every key of the run in progress that is known before its first step; none before the model exists."""
        return [] if self._run is None else self._run.planned_keys()

    def _describe(self) -> Description:
        if isinstance(self._prepared, ConfigError):
            return Description(f"refused: {self._prepared}", (), ())
        results = self._shown.results
        description = description_of(self._prepared.options, self._prepared.monitor, results)
        if results is self._results:
            return description
        return description._replace(title=f"{description.title}, of a copy that was trained with")

    # The life of a run

    @property
    def state_key(self) -> str:
        """Differs between callbacks of one Trainer.

        Before the first successful setup it is unique. A Trainer refuses two callbacks of one state key with an error that names no
        option, whereas ``setup`` raises an error that names ``prefix``.
        """
        identity = self._identity if self._was_set_up else f"{self._identity} {id(self)}"
        return f"{type(self).__name__}[{identity}]" if identity else type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs: the path of the store, the state of the alerts, and the reference."""
        return self._results.state if self._run is None else self._run.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the run of the checkpoint; validating or testing a checkpoint resumes nothing."""
        if self._run is not None:
            self._run.resume(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The model has the weights of a checkpoint, possibly of a run without this callback."""
        if self._run is not None:
            self._run.note_checkpoint(checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the run, other copies, and the methods that Lightning binds to a callback, which refer to the model."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        results = self._results.copied(self.state_dict())
        return state | {"_run": None, "_shown_by_originals": (), "_results": results, "_shown": _ShownResults(results)}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleMonitorCallback:
        """A copy that trains; this callback then shows the results of the copy."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        copied._shown_by_originals = (self._shown, *self._shown_by_originals)
        return copied

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the names of the model, and check the rules against them, before the first batch.

        Raises:
            ConfigError: If an option is wrong. The message names it, what was expected, and the nearest right one.
        """
        if isinstance(self._prepared, ConfigError):
            raise self._prepared
        self._close()
        if not self._prepared.options.observes_run(stage):
            self._was_set_up = True
            return
        for shown in (self._shown, *self._shown_by_originals):
            shown.results = self._results
        callbacks = trainer.callbacks  # type: ignore[union-attr]  # set by a connector, where mypy does not look
        others = [callback for callback in callbacks if isinstance(callback, ModuleMonitorCallback) and callback is not self]
        run = Run(*self._prepared, self._results, trainer, pl_module, stage)
        self._run = RunController(run, [other.planned_keys for other in others])
        self._run.begin()
        self._was_set_up = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is complete, unless hooks of the module make layers before the first batch; its parameters are those to be trained."""
        if self._run is not None:
            self._run.observe()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Search the step that it has ended for NaN, and end the run; Lightning calls no ``teardown`` after an exception."""
        steps = None if self._run is None else self._run.steps
        try:
            if steps is not None and isinstance(exception, Exception) and not isinstance(exception, torch.cuda.OutOfMemoryError):
                steps.search_after(exception)
        finally:
            self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove all hooks and close all files; the reference leaves the device with the model."""
        self._close(leaves_device=True)

    def _close(self, exception: BaseException | None = None, *, leaves_device: bool = False) -> None:
        """End the run in progress, if there is one."""
        if self._run is not None:
            self._run.close(exception, leaves_device=leaves_device)
        self._run = None

    def _notify(self, name: str, event: Callable[..., None], *args: object, also_idle: bool = False) -> None:
        """Notify the controller of the steps. An error ends the monitoring of this step, and the run only under ``on_error: raise``."""
        steps = None if self._run is None else self._run.steps
        if steps is None or (steps.is_idle and not also_idle):
            return
        try:
            event(steps, *args)
        except Exception as error:
            steps.fail(name, error)

    # A training step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """The first micro-batch of a step begins the step, and registers the hooks."""
        if self._run is not None and not self._run.has_begun:
            self._run.begin_training()
        self._notify("on_train_batch_start", StepController.begin_batch, batch, batch_idx, also_idle=True)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Gradients that arrive at outputs from now on are gradients of the loss."""
        self._notify("on_before_backward", StepController.begin_backward, loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The activation gradients of this micro-batch are complete."""
        self._notify("on_after_backward", StepController.end_backward)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete, and unscaled unless the optimizer unscales them itself; parameters have not moved.

        Lightning clips the gradients afterwards. Under manual optimization the module may have clipped them already.
        """
        self._notify("on_before_optimizer_step", StepController.before_optimizer_step, optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        """The micro-batch is over; the last micro-batch of a step ends the step."""
        self._notify("on_train_batch_end", StepController.end_batch)

    # Validation, test and predict loops

    def _loop_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training's hooks observe nothing until the loop ends, also within an accumulated step."""
        if self._run is not None:
            self._run.observe()  # outside of fit this is the first event after configure_model
        self._notify("begin_loop", StepController.begin_loop, also_idle=True)

    def _loop_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last event of a loop in which values may be logged."""
        self._notify("loop_epoch_end", StepController.end_loop, also_idle=True)

    def _loop_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training continues."""
        self._notify("loop_end", StepController.continue_step, also_idle=True)

    on_validation_start = on_test_start = on_predict_start = _loop_start
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _loop_epoch_end
    on_validation_end = on_test_end = on_predict_end = _loop_end


# LightningCLI checks values by the annotations, and adds a hundred lines to every error. With `Any` in each annotation, which type checkers
# do not see, it leaves the values to the checks of `Options`. It still refuses an unknown option.
_ANNOTATIONS = ModuleMonitorCallback.__init__.__annotations__
_ANNOTATIONS.update({name: f"{annotation} | Any" for name, annotation in _ANNOTATIONS.items()})
