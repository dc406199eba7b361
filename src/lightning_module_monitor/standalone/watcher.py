"""All layers of a model with one line in the loop: what each step did, told to a logger after the step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_module_monitor.config import Rule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.model.hooks import ForwardHook, HookSet, is_in_backward
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.record import Histogram, Record, check_prefix
from lightning_module_monitor.schedule import Schedule, parse_schedule
from lightning_module_monitor.sinks.loggers import TakesMetrics, log, takes_histograms

_messages = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


class TorchWatcher:
    """Watches every layer of a model from now on, and logs what it saw when it is asked to.

    In a plain loop, after the step::

        watcher = TorchWatcher(model, logger, tensor_stats=["mean", "norm", "hist"])
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            optimizer.step()
            watcher.watch(step)
            optimizer.zero_grad()

    What :meth:`watch` tells of is the step that is just over: everything since the step before it, all its micro-batches. A step ends
    when a torch optimizer that has a parameter of the model has stepped; one that is not asked about before the next forward pass is
    forgotten. What the model does in evaluation mode (``model.eval()``) is kept apart from what it does in training mode: ``watch`` tells
    of the mode that the model is in, or, if nothing was seen in that one, of the other.

    Keys are ``[prefix/]base_namespace/kind/site/statistic``, e.g. ``model_internals/activation/fc1/mean``.

    Args:
        model: The model. It has to be called as a whole: ``model(x)``.
        run: Any object with ``log_metrics(values, step)``, as every Lightning logger has. A TensorBoard or W&B logger gets histograms,
            too.
        track_layers: Class or classes of the layers to watch, and whose parameters; ``None`` for all.
        tensor_stats: One or several names in ``STATISTICS``, to which you may add; ``None`` for ``mean``.
        base_namespace: Put before every key.
        every_n_steps: Which steps may be asked about, by the numbers that ``watch`` gets: every n-th, a list, ``"log"``, or a
            function of the step. On others there are no hooks on the layers, and ``watch`` does nothing.
        evaluation: Whether evaluation mode may be asked about. If not, it costs nothing.

    Raises:
        ConfigError: If a value is wrong; says which, what was expected, and the nearest right one.
    """

    def __init__(
        self,
        model: nn.Module,
        run: TakesMetrics,
        track_layers: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
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
            statistics="mean" if tensor_stats is None else _one_or_listed(tensor_stats),
            types=None if track_layers is None else _one_or_listed(track_layers),
        )
        self.model = model
        self.run = run
        self.base_namespace = check_prefix(base_namespace, "base_namespace")
        self._schedule = parse_schedule(every_n_steps, "every_n_steps")
        self._training, self._evaluation = _Mode(model, rule), _Mode(model, rule)
        self._watches_evaluation = evaluation
        self._next_step: int | None = None
        """The number that the training step in progress, or else the next, will probably get; not known before the first."""
        self._owes_update = False
        """Whether the step that was told of last has its optimizer step yet to come."""
        self._is_ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """By optimizer whether it has a parameter of the model."""
        self._said: set[str] = set()
        self._hooks = HookSet()
        this = weakref.ref(self)
        self._hooks.add(model.register_forward_pre_hook(_ForwardPreHook(this)))
        self._hooks.add(register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: _tell_of_update(this, optimizer)))
        # A watcher that nobody holds any more leaves nothing behind either.
        weakref.finalize(self, _close, self._hooks, self._training, self._evaluation)

    def watch(
        self,
        step: int,
        *,
        track_activations: bool = True,
        track_gradients: bool = True,
        track_parameters: bool = False,
        prefix: str | None = None,
    ) -> None:
        """Log what the step that is just over did. What cannot be logged is a warning, and no error.

        Args:
            step: Its number.
            track_activations: Whether to log the outputs of the layers.
            track_gradients: Whether to log the gradients that arrived at them (``activation_gradient``), and those that the parameters
                have now (``gradient``).
            track_parameters: Whether to log the parameters, as they are now.
            prefix: Put before the namespace: ``train``, ``validation``.

        Raises:
            ConfigError: If the prefix cannot stand in a key.
        """
        before = "" if prefix is None else check_prefix(prefix)
        namespace = check_prefix("/".join(part for part in (before, self.base_namespace) if part))
        if not (self.model.training or self._watches_evaluation):
            self._say_once("watch() was called in evaluation mode, and evaluation is False; nothing is logged.")
            return
        with self.guard():
            self._tell(step, namespace, track_activations, track_gradients, track_parameters)

    def close(self) -> None:
        """Take every hook off and let the model go. May be called at any time, also twice."""
        _close(self._hooks, self._training, self._evaluation)

    def __enter__(self) -> TorchWatcher:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Called by the hooks

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An error of ours is said, and never the reason that a run dies."""
        try:
            yield
        except Exception as error:
            self._say_once(f"Watching failed ({type(error).__name__}: {error}).")

    def begin_forward(self) -> None:
        """The model is about to run."""
        is_training = self.model.training and torch.is_grad_enabled()
        mode, other = (self._training, self._evaluation) if is_training else (self._evaluation, self._training)
        if is_training:
            other.forget()  # training goes on: nobody asked about the evaluation
            is_expected = self._next_step is None or self._schedule(self._next_step)
            if mode.is_over and mode.is_open:
                self._say_once("A step was watched and not asked about, which takes time: every_n_steps says which will be.", logging.INFO)
        else:
            other.listen(False)
            is_expected = self._watches_evaluation
        mode.begin_forward(is_expected)

    def end_update(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if optimizer not in self._is_ours:
            ours = {id(parameter) for parameter in self.model.parameters()}
            self._is_ours[optimizer] = any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
        if not self._is_ours[optimizer]:
            return
        self._training.is_over = self._evaluation.is_over = True
        if self._next_step is not None and not self._owes_update:
            self._next_step += 1
        self._owes_update = False

    # Inside

    def _tell(self, step: int, namespace: str, activations: bool, gradients: bool, parameters: bool) -> None:
        """Log the step, or the evaluation, that is just over."""
        mode = self._mode_to_tell_of()
        if mode is self._training and not self._is_due(mode, step):
            return
        record = mode.tell(step, gradients, parameters)
        wanted = {"activation": activations, "activation_gradient": gradients, "gradient": gradients}
        if mode is self._evaluation and not any(key.startswith("activation_gradient/") for key in (*record.values, *record.histograms)):
            wanted["gradient"] = False  # it is left from training
        self._log(step, _chosen(record.values, wanted, namespace), _chosen(record.histograms, wanted, namespace))

    def _mode_to_tell_of(self) -> _Mode:
        """That of the model, if anything was seen in it; else that in which something was."""
        mode, other = (self._training, self._evaluation) if self.model.training else (self._evaluation, self._training)
        return other if other.is_open and not mode.is_open else mode

    def _is_due(self, mode: _Mode, step: int) -> bool:
        """Whether a training step is to be told of; from its number follow those of the next."""
        is_first = self._next_step is None
        self._owes_update, self._next_step = not mode.is_over, step + 1
        if not self._schedule(step):
            mode.forget()
            return False
        if not mode.is_open and not is_first:
            self._say_once(f"The layers were not watched in step {step}: after the one before, another number was expected.")
        return True

    def _log(self, step: int, values: dict[str, float], histograms: dict[str, Histogram]) -> None:
        if histograms and not takes_histograms(self.run):
            self._say_once(f"Histograms are left out: {type(self.run).__name__} has no place for them.")
        try:
            log(self.run, values, histograms, step)
        except Exception as error:
            self._say_once(f"{type(self.run).__name__} did not take the values ({type(error).__name__}: {error}).")

    def _say_once(self, message: str, level: int = logging.WARNING) -> None:
        if message not in self._said:
            self._said.add(message)
            _messages.log(level, "%s Said once.", message)


class _Mode:
    """What the model does in training mode, or in evaluation mode, since it was last told of."""

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self._monitor = ModuleMonitor(rules=rule, history=1)
        self._monitor.set_module(model)
        self._silence = ExitStack()
        self.is_open = False
        """Whether anything was seen since."""
        self.is_over = False
        """Whether an optimizer has stepped since the last forward pass."""

    def begin_forward(self, is_expected: bool) -> None:
        """A forward pass in this mode begins; what was seen before the last optimizer step is forgotten."""
        if self.is_over:
            self.forget()
        self.is_over = False
        if is_expected and not self.is_open:
            self._open(0)
        self.listen(True)

    def listen(self, is_listening: bool) -> None:
        """Whether what the layers do now is of this mode."""
        self._silence.close()
        if not is_listening:
            self._silence.enter_context(self._monitor.no_monitor())

    def tell(self, step: int, gradients: bool, parameters: bool) -> Record:
        """What was seen, and gradients and parameters as they are now."""
        self.listen(True)
        if not self.is_open:
            self._open(step)
        if gradients:
            self._monitor.monitor_gradients()
        if parameters:
            self._monitor.monitor_parameters()
        record = self._monitor.end_step()
        assert record is not None
        self.is_open = False
        return record

    def forget(self) -> None:
        """Take the hooks off, without a word of what was seen."""
        self._monitor.abandon()
        self.is_open = False

    def close(self) -> None:
        """Take the hooks off and let the model go."""
        self.forget()
        self._silence.close()
        self._monitor.close()

    def _open(self, step: int) -> None:
        self._monitor.begin_step(step)
        self.is_open = True


class _ForwardPreHook(ForwardHook):
    """Called before the model's forward."""

    def __init__(self, watcher: weakref.ref[TorchWatcher]) -> None:
        self._watcher = watcher

    def see(self, _model: nn.Module, _args: object) -> None:
        watcher = self._watcher()
        if watcher is not None and not is_in_backward():
            with watcher.guard():
                watcher.begin_forward()


def _tell_of_update(watcher: weakref.ref[TorchWatcher], optimizer: Optimizer) -> None:
    this = watcher()
    if this is not None:
        with this.guard():
            this.end_update(optimizer)


def _close(hooks: HookSet, *modes: _Mode) -> None:
    hooks.close()
    for mode in modes:
        mode.close()


def _one_or_listed(wish: ValueT | Sequence[ValueT]) -> ValueT | list[ValueT]:
    """A name or a class as it is; of several a list, whatever they came in."""
    return list(wish) if isinstance(wish, Iterable) and not isinstance(wish, str) else wish


def _chosen(by_key: Mapping[str, ValueT], wanted: Mapping[str, bool], namespace: str) -> dict[str, ValueT]:
    """Without the kinds that are not wanted, by their keys in the namespace."""
    return {f"{namespace}/{key}".lstrip("/"): value for key, value in by_key.items() if wanted.get(key.split("/")[0], True)}
