"""The Lightning callback: Lightning's events become the phases of a run and of its steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_module_monitor.config import Capture, GradientFlow, Rule
from lightning_module_monitor.display import Described, Description, Findings
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.diagnoses import Diagnoses, diagnose
from lightning_module_monitor.health.options import Alert, Health
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.schedule import Schedule
from lightning_module_monitor.trainer.options import Options
from lightning_module_monitor.trainer.run import RunController
from lightning_module_monitor.trainer.step import StepController

P = ParamSpec("P")


def _never_fatal(event: Callable[Concatenate[ModuleMonitorCallback, P], None]) -> Callable[Concatenate[ModuleMonitorCallback, P], None]:
    """An error of the monitor in an event ends the monitoring of this step, and not the run."""

    def guarded(self: ModuleMonitorCallback, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception as error:
            self._steps.fail(event.__name__, error)

    functools.update_wrapper(guarded, event)
    return guarded


class ModuleMonitorCallback(Described, Callback):
    """Shows the inside of a model while it trains: in the Trainer's loggers, and in one HDF5 file.

    Without arguments it records, every 50 steps, ``rms``, ``abs_max`` and ``nonfinite_count`` of every leaf module's
    output, and the ``norm`` of every parameter and gradient. Several in one Trainer need a prefix each.

    Args:
        every_n_steps: Which optimizer steps are monitored: every n-th from 0 on, a list, ``log`` (1, 2, 5, 10, ...), one every so many
            minutes (``{minutes: 5}``), or a function of the step. Values that modules record themselves are taken in these, also where no
            rule is due. By the clock, a run begins with the steps 0, 1, 11, 111, ... until they are as far apart. Each monitored step
            chooses the next one by its number, the same on all ranks, from the time of a step since the last one
            (``monitor/seconds_per_step``, the largest of all ranks): an interval in which steps become slower is longer.
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
        health: What is looked for: the module that made the first NaN or infinity, and the conditions of the built-in watches, e.g.
            ``{nonfinite: always, watch: [dead_units, vanishing]}``. Default: both, as far as it is cheap. ``false``: nothing.
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
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self._identity = ",".join(f"{name}={value}" for name, value in (("prefix", prefix), ("module", module)) if value)
        self._refusal: ConfigError | None = None
        """The error in the options; there is no run then."""
        try:
            self._run = RunController(Options(**arguments))
            self._steps = StepController(self._run)
            self.monitor = self._run.monitor
        except ConfigError as error:
            # Raised in `setup`, before the first batch. Raised here, LightningCLI would bury it in ninety lines of its own:
            # it tries every type that a callback may have, and prints what was wrong with each.
            self._refusal = error

    @property
    def last_record(self) -> Record | None:
        """The newest record, without its raw tensors."""
        return None if self._refusal is not None else self._run.last_record

    @property
    def store_path(self) -> str | None:
        """Where the store of this run is, once something was recorded."""
        return None if self._refusal is not None else self._run.sinks.store_path

    @property
    def findings(self) -> list[Finding]:
        """What was found to be wrong in this run, in the order in which it was found; a notebook shows a table."""
        return Findings() if self._refusal is not None else Findings(self._run.health.findings)

    def _describe(self) -> Description:
        return Description(f"refused: {self._refusal}", (), ()) if self._refusal is not None else self._run.describe()

    def diagnose(self) -> Diagnoses:
        """The causes that the findings of this run show, before what follows from them; at most three."""
        return diagnose([] if self._refusal is not None else self._run.health.findings)

    # The life of a run

    @property
    def state_key(self) -> str:
        """Differs between callbacks of one Trainer."""
        return f"{type(self).__name__}[{self._identity}]" if self._identity else type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs: the path of the store with the steps so far, that of the alerts, and the reference."""
        return {} if self._refusal is not None else self._run.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the run that is resumed; validating or testing a checkpoint resumes nothing."""
        self._run.resume(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The model has the weights of a checkpoint, also of one without this callback."""
        self._run.note_checkpoint(checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """Without what Lightning binds to a callback, which refers to the whole model."""
        return {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the model's names and check the rules against them, before the first batch.

        Raises:
            ConfigError: If an option is wrong; says which, what was expected, and the nearest right one.
        """
        if self._refusal is not None:
            raise self._refusal
        self._close()
        self._run.begin(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All layers exist now; parameters are those that will be trained."""
        self._steps.begin_fit(pl_module)
        self._run.begin_fit(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything off. ``teardown`` does not come after an exception."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything off; the reference leaves the device with the model."""
        self._close()
        if self._refusal is None and self._run.reference is not None:
            self._run.reference.leave_device()

    def _close(self) -> None:
        """Take every hook off and close the sinks; a second call does no harm."""
        if self._refusal is None:
            with ExitStack() as stack:
                stack.callback(self._run.close)
                stack.callback(self._steps.close)

    # A training step: once it is known that nothing is to be done in it, every further event returns after one test

    @_never_fatal
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """The first micro-batch of a step begins it; the hooks go on."""
        self._steps.begin_batch(trainer, pl_module, batch, batch_idx)

    @_never_fatal
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The gradients that arrive at outputs from now on are those of the loss."""
        if not self._steps.is_idle:
            self._steps.begin_backward(trainer, loss)

    @_never_fatal
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The activation gradients of this micro-batch are complete."""
        if not self._steps.is_idle:
            self._steps.end_backward(trainer)

    @_never_fatal
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete, unscaled (unless by the optimizer itself) and not clipped; parameters have not moved."""
        if not self._steps.is_idle:
            self._steps.before_clipping(trainer, pl_module, optimizer)

    @_never_fatal
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int) -> None:
        """The micro-batch is over, and with the last one of a step the step is."""
        if not self._steps.is_idle:
            self._steps.end_batch(trainer, pl_module)

    # Loops without training

    @_never_fatal
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training's hooks observe nothing meanwhile, also in the middle of an accumulated step."""
        self._steps.begin_loop("validate", trainer, pl_module)

    @_never_fatal
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last moment of a validation loop at which values may be logged."""
        self._steps.end_loop(trainer, pl_module)

    @_never_fatal
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        self._steps.continue_step()

    @_never_fatal
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._steps.begin_loop("test", trainer, pl_module)

    @_never_fatal
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._steps.end_loop(trainer, pl_module)

    @_never_fatal
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._steps.continue_step()

    @_never_fatal
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._steps.begin_loop("predict", trainer, pl_module)

    @_never_fatal
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._steps.end_loop(trainer, pl_module)

    @_never_fatal
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self._steps.continue_step()


# LightningCLI checks values by the annotations, and buries an error in a hundred lines of its own. With Any as a last resort, which type
# checkers do not see, it passes every value on to the checks of `Options`. It refuses an unknown option all the same.
_ANNOTATIONS = ModuleMonitorCallback.__init__.__annotations__
_ANNOTATIONS.update({name: f"{one} | Any" for name, one in _ANNOTATIONS.items()})
