"""Logs statistics of all layers of a model after a step, with one line in a plain loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_module_monitor.config.rules import Rule, as_tuple
from lightning_module_monitor.config.schedule import Schedule, parse_schedule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.keys import check_prefix
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, is_in_backward
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.base import ErrorReporter, failing_alone
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.logger_types import takes_media
from lightning_module_monitor.sinks.loggers import TakesMetrics, log


class TorchWatcher:
    """Observes every layer of a model, and logs the values on request.

    In a plain loop, after the step::

        watcher = TorchWatcher(model, logger, tensor_stats=["mean", "norm", "hist"])
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            optimizer.step()
            watcher.watch(step)
            optimizer.zero_grad()

    :meth:`watch` logs the last step with all its micro-batches. A step ends when a torch optimizer with a parameter of the model steps;
    a step without a call of :meth:`watch` before the next forward pass is dropped. Values of evaluation mode (``model.eval()``) are kept
    apart from those of training mode: ``watch`` logs the current mode of the model, or the other mode if only that has values.

    Keys are ``[prefix/]base_namespace/kind/site/statistic``, e.g. ``model_internals/activation/fc1/mean``.

    Args:
        model: The model, which is called as a whole: ``model(x)``.
        run: Any object with ``log_metrics(values, step)``, as every Lightning logger has. A TensorBoard or W&B logger gets histograms,
            too.
        track_layers: Classes, or names of classes, of the layers to observe with their parameters; ``None`` for all.
        tensor_stats: Names in ``STATISTICS``, which may be extended; ``None`` for ``mean``.
        base_namespace: First part of every key.
        every_n_steps: The steps that may be logged, by the argument of ``watch``: every n-th, a list, ``"log"``, or a function of the
            step. In other steps the layers have no hooks, and ``watch`` does nothing.
        evaluation: Whether evaluation mode may be logged. If not, evaluation has no cost.

    Raises:
        ConfigError: If a value is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        run: TakesMetrics,
        track_layers: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        tensor_stats: str | Sequence[str] | None = None,
        base_namespace: str = "model_internals",
        *,
        every_n_steps: Schedule = 1,
        evaluation: bool = True,
    ) -> None:
        if not callable(getattr(run, "log_metrics", None)):
            raise ConfigError(f"run is a {type(run).__name__}; expected an object with log_metrics(values, step), e.g. a Lightning logger.")
        rule = Rule(
            kinds=["activation", "activation_gradient", "parameter", "gradient"],
            statistics="mean" if tensor_stats is None else list(as_tuple(tensor_stats)),
            types=None if track_layers is None else list(as_tuple(track_layers)),
        )
        self.model = model
        self.run = run
        self.base_namespace = check_prefix(base_namespace, "base_namespace")
        self._schedule = parse_schedule(every_n_steps, "every_n_steps")
        self._training, self._evaluation = _Mode(model, rule), _Mode(model, rule)
        self._watches_evaluation = evaluation
        self._next_step: int | None = None
        """The expected number of the current or else the next training step; unknown before the first."""
        self._awaits_update = False
        """Whether the optimizer has not made the last logged step yet."""
        self._reporter = ErrorReporter(logging.getLogger(__name__), "warn", lambda: True)
        self._hooks = HookSet()
        self._hooks.add(model.register_forward_pre_hook(UncopiedHook(_weak(self, TorchWatcher._begin_forward))))
        self._hooks.add(register_optimizer_step_post_hook(_weak(self, TorchWatcher._end_update)))
        self._close = weakref.finalize(self, _close, self._hooks, self._training, self._evaluation)

    def watch(
        self,
        step: int,
        *,
        track_activations: bool = True,
        track_gradients: bool = True,
        track_parameters: bool = False,
        prefix: str | None = None,
    ) -> None:
        """Log the last step. A failure to log is a warning, not an error.

        Args:
            step: Number of the step.
            track_activations: Whether to log the outputs of the layers.
            track_gradients: Whether to log the gradients of the outputs (``activation_gradient``) and the current gradients of the
                parameters (``gradient``).
            track_parameters: Whether to log the current parameters.
            prefix: First part of the keys, before the namespace: ``train``, ``validation``.

        Raises:
            ConfigError: If the prefix does not fit into a key.
        """
        checked_prefix = "" if prefix is None else check_prefix(prefix)
        namespace = check_prefix("/".join(part for part in (checked_prefix, self.base_namespace) if part))
        if not (self.model.training or self._watches_evaluation):
            self._report("watch() was called in evaluation mode, and evaluation is False; nothing is logged.")
            return
        with failing_alone(self._fail):
            # The model's mode, or the other mode if only that has values.
            mode, other = (self._training, self._evaluation) if self.model.training else (self._evaluation, self._training)
            mode = other if other.is_open and not mode.is_open else mode
            if mode is self._training and not self._is_due(mode, step):
                return
            record = mode.end(step, track_gradients, track_parameters)
            has_run_backward = any(key.startswith("activation_gradient/") for key in (*record.values, *record.histograms))
            kinds = {
                "activation": track_activations,
                "activation_gradient": track_gradients,
                "gradient": track_gradients and (mode is self._training or has_run_backward),  # otherwise they belong to training
            }
            self._log(record, step, namespace, [kind for kind, is_logged in kinds.items() if not is_logged])

    def close(self) -> None:
        """Remove every hook and release the model. May be called at any time; a second call does nothing."""
        self._close()

    def __enter__(self) -> TorchWatcher:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _begin_forward(self, *_call: object) -> None:
        if is_in_backward():
            return
        is_training = self.model.training and torch.is_grad_enabled()
        mode, other = (self._training, self._evaluation) if is_training else (self._evaluation, self._training)
        if is_training:
            other.monitor.engine.drop_steps()  # training continues: the evaluation was not logged
            is_expected = self._next_step is None or self._schedule(self._next_step)
            if mode.is_over and mode.is_open:
                self._report("A step was observed, but watch() was not called. Set every_n_steps.", logging.INFO)
        else:
            other.monitor.engine.gate.close(other)
            is_expected = self._watches_evaluation
        mode.begin_forward(is_expected)

    def _end_update(self, optimizer: Optimizer, *_call: object) -> None:
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in updated for parameter in self.model.parameters()):
            return
        self._training.is_over = self._evaluation.is_over = True
        if self._next_step is not None and not self._awaits_update:
            self._next_step += 1
        self._awaits_update = False

    def _is_due(self, mode: _Mode, step: int) -> bool:
        """Whether to log a training step. Its number determines the numbers of the next steps."""
        is_first = self._next_step is None
        self._awaits_update, self._next_step = not mode.is_over, step + 1
        if not self._schedule(step):
            mode.monitor.engine.drop_steps()
            return False
        if not mode.is_open and not is_first:
            self._report(f"The layers were not observed in step {step}: after the previous step, another number was expected.")
        return True

    def _log(self, record: Record, step: int, namespace: str, unwanted: Sequence[str]) -> None:
        chosen = [key for key in (*record.values, *record.histograms) if key.split("/")[0] not in unwanted]
        values = {f"{namespace}/{key}".lstrip("/"): record.values[key] for key in chosen if key in record.values}
        histograms = {f"{namespace}/{key}".lstrip("/"): record.histograms[key] for key in chosen if key in record.histograms}
        if histograms and not takes_media(self.run):
            self._report(f"Histograms are left out: {type(self.run).__name__} has no type for them.")
        try:
            log(self.run, values, histograms, step)
        except Exception as error:
            self._report(f"{type(self.run).__name__} did not take the values ({type(error).__name__}: {error}).")

    def _report(self, message: str, level: int = logging.WARNING) -> None:
        self._reporter.log_once(f"{message} Logged once.", level)

    def _fail(self, error: Exception) -> None:
        self._report(f"Observation failed ({type(error).__name__}: {error}).")


class _Mode:
    """The values of the model's training mode, or of its evaluation mode, since the last log."""

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.monitor = ModuleMonitor(rules=rule, history=1)
        self.monitor.set_module(model)
        self.is_over = False
        """Whether an optimizer has stepped since the last forward pass."""

    @property
    def is_open(self) -> bool:
        return self.monitor.current_step is not None

    def begin_forward(self, is_expected: bool) -> None:
        """Begin a forward pass in this mode; values from before the last optimizer step are dropped."""
        if self.is_over:
            self.monitor.engine.drop_steps()
        self.is_over = False
        if is_expected and not self.is_open:
            self.monitor.begin_step(0)
        self.monitor.engine.gate.open(self)

    def end(self, step: int, gradients: bool, parameters: bool) -> Record:
        """Return the values of the mode, with the current gradients and parameters."""
        self.monitor.engine.gate.open(self)
        if not self.is_open:
            self.monitor.begin_step(step)
        if gradients:
            self.monitor.monitor_gradients()
        if parameters:
            self.monitor.monitor_parameters()
        record = self.monitor.end_step()
        assert record is not None
        return record


def _weak(watcher: TorchWatcher, method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls a method of a watcher while the watcher exists, and reports an error."""
    reference = weakref.ref(watcher)

    def call(*args: object) -> None:
        existing = reference()
        if existing is not None:
            with failing_alone(existing._fail):
                method(existing, *args)

    return call


def _close(hooks: HookSet, *modes: _Mode) -> None:
    hooks.close()
    for mode in modes:
        mode.monitor.close()
