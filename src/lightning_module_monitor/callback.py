"""The Lightning callback: Lightning's events become the phases of a run and of its steps."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_module_monitor.config.rules import Capture, GradientFlow, Rule
from lightning_module_monitor.config.schedule import Schedule
from lightning_module_monitor.display import Described, Description, Findings
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.alert_options import Alert, Health
from lightning_module_monitor.health.causes import Diagnoses
from lightning_module_monitor.lightning_packages import Callback, LightningModule, Trainer
from lightning_module_monitor.model.compiled import KEEP
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.trainer.controller import Prepared, RunController, prepare
from lightning_module_monitor.trainer.run import Results, Run
from lightning_module_monitor.trainer.step import StepController
from lightning_module_monitor.trainer.summary import described

P = ParamSpec("P")


def _event(
    event: Callable[Concatenate[ModuleMonitorCallback, StepController, P], None],
) -> Callable[Concatenate[ModuleMonitorCallback, P], None]:
    """An event in a run, with the controller of its steps; an error of the monitor ends the monitoring of this step, and not the run."""

    def guarded(self: ModuleMonitorCallback, /, *args: P.args, **kwargs: P.kwargs) -> None:
        steps = None if self._run is None else self._run.steps
        if steps is None:
            return
        try:
            event(self, steps, *args, **kwargs)
        except Exception as error:
            steps.fail(event.__name__.lstrip("_"), error)

    functools.update_wrapper(guarded, event)
    return guarded


class ModuleMonitorCallback(Described, Callback):  # type: ignore[misc]  # as Callback
    """Shows the inside of a model while it trains: in the Trainer's loggers, and in one HDF5 file.

    Without arguments it records, every 50 steps, ``rms``, ``abs_max`` and ``nonfinite_count`` of every leaf module's
    output, and the ``norm`` of every parameter and gradient. Several in one Trainer need a prefix each.

    Args:
        every_n_steps: Which optimizer steps are monitored: every n-th from 0 on, a list of steps, ``log`` (1, 2, 5, 10, ...), one every so
            many minutes (``{minutes: 5}``), or a function of the step. Values that modules log themselves are recorded in these steps, even
            if no rule is due. With ``minutes`` a run begins with the steps 0, 1, 11, 111, ..., until they are as far apart as asked. Each
            monitored step chooses the next one from the time of a step since the last (``monitor/seconds_per_step``, the largest of all
            ranks), so that all ranks monitor the same steps.
        module: Name of the submodule to monitor. Keys keep the names of the whole model.
        exclude: Pattern or patterns (``re.fullmatch``) of names that are not monitored, with everything inside.
        rules: What to record, instead of the default.
        reference: What activations and parameters are compared with: ``init``, a copy of the model at the start of the run; the path of a
            checkpoint; or, in Python, a module of the same structure. In monitored steps the reference runs its own ``training_step`` on
            the batch before the model does; with ``module`` it is called whenever that submodule is, with copies of its arguments. If no
            rule records a difference, ``ratio`` of both kinds of differences is recorded.
        rcc: Whether to run the refined coordinate check. Its reference is ``init`` unless another one is given.
        save_reference: Whether checkpoints hold the reference (one more set of weights), so that a resumed run compares with the same one.
        attention: Whether to record attention head by head: the means of its entropy and of the weight of the first key, and the largest
            logit, of every call of ``F.scaled_dot_product_attention`` and ``nn.MultiheadAttention``.
        gradient_flow: Blocks between which the gain of the gradient is recorded: ``{blocks: model.blocks}``.
        capture: Raw tensors to write to ``monitor.tensors.h5``, beside the store: ``{sites: model.head, steps: [0, 100]}``.
        health: What to look for: the module that made the first NaN or infinity, and the conditions of the built-in detectors, e.g.
            ``{nonfinite: always, watch: [dead_units, vanishing]}``. Default: both, as far as they are cheap. ``false``: nothing.
        alerts: Rules on recorded values: ``[{keys: "gradient/.*/norm", above: 100, for_steps: 3, then: stop}]``.
        store: Whether to write ``monitor.h5`` in the first logger's directory; or the path of the file.
        report: Whether to write a page about the run, ``monitor.html`` beside the store, when it ends, also by an exception.
        callback_metrics: Pattern or patterns of keys that EarlyStopping, ModelCheckpoint and other callbacks can monitor.
        progress_bar: Whether the progress bar shows those keys.
        stages: When to monitor: ``train``, ``validate``, ``test``, ``predict``. A validation, test or predict loop gives
            one record of the activations of all its batches, under ``validation/...``.
        prefix: Put before every key: ``run1`` gives ``run1/...``.
        max_logged_keys: If there are more keys, loggers get minimum, median and maximum over the sites, and one histogram of all sites
            together; the store gets everything.
        max_overhead: Largest share of the training time that monitoring may take, e.g. 0.02. Beyond it steps are left out, the same ones on
            all ranks; ``monitor/overhead_fraction`` is the measured share. At most every other step is monitored then, because the others
            show what a plain step takes.
        compiled: ``keep``: what ``torch.compile`` has compiled runs as without the callback, and what is inside of it is not observed; its
            output, parameters and gradients are. ``uncompiled``: monitored steps run uncompiled, and everything is observed.
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
        self._identity = ",".join(f"{name}={value}" for name, value in (("prefix", prefix), ("module", module)) if value)
        self._prepared: Prepared | ConfigError
        """The parsed options and the monitor, or the error in the options.

        It is raised in ``setup``, before the first batch. Raised here, LightningCLI would bury it in ninety lines of its own: it tries
        every type that a callback may have, and prints what was wrong with each.
        """
        try:
            self._prepared = prepare(arguments)
        except ConfigError as error:
            self._prepared = error
        self._run: RunController | None = None
        """The run in progress, from ``setup`` to its end."""
        self._results = Results()
        self._shown = self._results
        """The results of the latest run of this callback or of a deep copy of it: some libraries train with copies of their callbacks."""
        self._original: ModuleMonitorCallback | None = None
        """The callback that this one is a deep copy of."""

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
        return self._shown.last_record

    @property
    def store_path(self) -> str | None:
        """Where the latest store is, once something was recorded; it stays until another store is written."""
        return self._shown.store_path

    @property
    def findings(self) -> list[Finding]:
        """The findings of this run, in their order; a notebook shows them as a table."""
        return Findings(self._shown.findings)

    def diagnose(self) -> Diagnoses:
        """At most three diagnoses of this run: the causes of its findings, each with evidence, first step and advice."""
        return self._shown.diagnoses()

    def planned_keys(self) -> list[str]:
        """Every key of the run in progress that is known before its first step; none where the model does not exist yet."""
        return [] if self._run is None else self._run.planned_keys()

    def _describe(self) -> Description:
        if isinstance(self._prepared, ConfigError):
            return Description(f"refused: {self._prepared}", (), ())
        shown = described(self._prepared.options, self._prepared.monitor, self._shown)
        return shown if self._shown is self._results else shown._replace(title=f"{shown.title}, of a copy that was trained with")

    # The life of a run

    @property
    def state_key(self) -> str:
        """Differs between callbacks of one Trainer."""
        return f"{type(self).__name__}[{self._identity}]" if self._identity else type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs: the path of the store with the steps so far, that of the alerts, and the reference."""
        return self._results.state if self._run is None else self._run.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the run of the checkpoint; validating or testing a checkpoint resumes nothing."""
        if self._run is not None:
            self._run.resume(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The model has the weights of a checkpoint, also of one without this callback."""
        if self._run is not None:
            self._run.note_checkpoint(checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """Without the run, without what Lightning binds to a callback, which refers to the whole model, and without other copies."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        results = self._results.copied(self.state_dict())
        return state | {"_run": None, "_original": None, "_results": results, "_shown": results}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleMonitorCallback:
        """A copy that trains; this callback then shows the results of the copy."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        copied._original = self
        return copied

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the model's names and check the rules against them, before the first batch.

        Raises:
            ConfigError: If an option is wrong. The message names it, what was expected, and the nearest right one.
        """
        if isinstance(self._prepared, ConfigError):
            raise self._prepared
        self._close()
        if not self._prepared.options.observes_run(stage):
            return
        self._show(self._results)
        others = [one for one in trainer.callbacks if isinstance(one, ModuleMonitorCallback) and one is not self]  # type: ignore[union-attr]  # set by a connector, where mypy does not look
        self._run = RunController(Run(*self._prepared, self._results, trainer, pl_module, stage), [one.planned_keys for one in others])
        self._run.begin()

    def _show(self, results: Results) -> None:
        """Show results here, and in the callback that this one is a copy of."""
        self._shown = results
        if self._original is not None:
            self._original._show(results)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All layers exist now; parameters are those that will be trained."""
        if self._run is not None:
            self._run.observe()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove all hooks and close all files; Lightning calls no ``teardown`` after an exception."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove all hooks and close all files; the reference leaves the device with the model."""
        self._close(leaves_device=True)

    def _close(self, *, leaves_device: bool = False) -> None:
        """End the run in progress, if there is one."""
        if self._run is not None:
            self._run.close(leaves_device=leaves_device)
        self._run = None

    # A training step: once it is known that nothing is to be done in it, every further event returns after one test

    @_event
    def on_train_batch_start(
        self, steps: StepController, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """The first micro-batch of a step begins it; the hooks go on."""
        steps.begin_batch(batch, batch_idx)

    @_event
    def on_before_backward(self, steps: StepController, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The gradients that arrive at outputs from now on are those of the loss."""
        if not steps.is_idle:
            steps.begin_backward(loss)

    @_event
    def on_after_backward(self, steps: StepController, trainer: Trainer, pl_module: LightningModule) -> None:
        """The activation gradients of this micro-batch are complete."""
        if not steps.is_idle:
            steps.end_backward()

    @_event
    def on_before_optimizer_step(self, steps: StepController, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete, unscaled (unless by the optimizer itself) and not clipped; parameters have not moved."""
        if not steps.is_idle:
            steps.before_clipping(optimizer)

    @_event
    def on_train_batch_end(  # noqa: PLR0917  # the arguments that Lightning gives
        self, steps: StepController, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """The micro-batch is over, and with the last one of a step the step is."""
        if not steps.is_idle:
            steps.end_batch()

    # Loops without training: of validation, test and predict

    def _loop_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training's hooks observe nothing meanwhile, also in the middle of an accumulated step."""
        if self._run is not None:
            self._run.observe()  # outside of fit this is the first event after `configure_model`
        self._begin_loop(trainer, pl_module)

    @_event
    def _begin_loop(self, steps: StepController, trainer: Trainer, pl_module: LightningModule) -> None:
        steps.begin_loop()

    @_event
    def _loop_epoch_end(self, steps: StepController, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last moment of a loop at which values may be logged."""
        steps.end_loop()

    @_event
    def _loop_end(self, steps: StepController, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        steps.continue_step()

    on_validation_start = on_test_start = on_predict_start = _loop_start
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _loop_epoch_end
    on_validation_end = on_test_end = on_predict_end = _loop_end


# LightningCLI checks values by the annotations, and buries an error in a hundred lines of its own. With Any as a last resort, which type
# checkers do not see, it passes every value on to the checks of `Options`. It refuses an unknown option all the same.
_ANNOTATIONS = ModuleMonitorCallback.__init__.__annotations__
_ANNOTATIONS.update({name: f"{one} | Any" for name, one in _ANNOTATIONS.items()})
