"""The reference: a frozen copy of the monitored module, and its tensors for the same input, call by call."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_module_monitor.distributed.shards import gathered, reshard
from lightning_module_monitor.errors import shortened
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.compiled import OriginalCode
from lightning_module_monitor.model.copies import NotPlainError, plain_copy
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, is_in_backward, requires_gradient
from lightning_module_monitor.model.names import ROOT, UNWATCHED, ParameterSite, is_fsdp_wrapper, without_wrappers
from lightning_module_monitor.model.outputs import NamedTensors, named_tensors, with_tensors
from lightning_module_monitor.model.unchanged import (
    UnchangedParameters,
    drop_graphs,
    flags_of_model,
    no_warning_of_checkpoints,
    saving_nothing,
    uncached_autocast,
    unchanged_buffers,
    unchanged_dropout_of_cudnn,
    unchanged_random_states,
)
from lightning_module_monitor.probes.base import Probe, StepTools


class Reference:
    """A frozen module with the structure of the model's module, which is not part of the model. Its modules are siblings of the model's.

    Args:
        live: The model's module.
        module: The frozen module.
        follows: Whether it is called before every call of ``live``, with the same arguments. Otherwise the user runs it before the model.
        cpu_offload: Whether its tensors are kept in host memory until the model's call.
        name: Name of ``live``, for messages.
        wrapper: Under FSDP1 the module that runs ``module``: it calls a function with arguments.
        units: The FSDP1 unit around each module of both.

    Raises:
        ValueError: If modules or parameters of the two have different names or shapes; the message lists them.
    """

    def __init__(
        self,
        live: nn.Module,
        module: nn.Module,
        *,
        follows: bool,
        cpu_offload: bool,
        name: str,
        wrapper: nn.Module | None,
        units: Mapping[nn.Module, Any],
    ) -> None:
        differing = structural_differences(live, module)
        if differing:
            why = f"these are not in both, or of different shapes: {shortened(differing, 10)}"
            raise ValueError(f"The reference must have the structure of the module; {why}")
        siblings = _by_name(module)
        self.live = live
        self.module = module
        self.follows = follows
        self.cpu_offload = cpu_offload
        self.name = name
        self.wrapper = wrapper
        self._units = units
        self._parameters = UnchangedParameters(module)
        # Reversed, because the first name of a shared module counts.
        self._siblings: dict[nn.Module, nn.Module] = {original: siblings[name] for name, original in reversed(_by_name(live).items())}
        # The owner of a parameter may be within a wrapper.
        owners = {without_wrappers(name): owner for name, owner in module.named_modules(remove_duplicate=False)}
        originals = reversed([*live.named_modules(remove_duplicate=False)])
        self._owners = {original: owners.get(without_wrappers(name)) for name, original in originals}
        self.is_running = False
        self.operator_norms: dict[str, Tensor] = {}
        """Numbers of the operator norms of its weights, by the site of a layer; they are computed once."""
        self.differentiates = False
        """Whether its forward pass runs a backward pass, which needs saved tensors."""

    def sibling(self, module: nn.Module) -> nn.Module | None:
        """The sibling of a module of the model; ``None`` outside ``live``."""
        return self._siblings.get(module)

    def model_of(self, module: nn.Module) -> nn.Module | None:
        """The module of the model whose sibling this module of the reference is; ``None`` if it has none."""
        return next((live for live, sibling in self._siblings.items() if sibling is module), None)

    def parameter(self, site: ParameterSite) -> Tensor | None:
        """The sibling of a parameter; ``None`` outside ``live``."""
        sibling = self._owners.get(site.owner)
        return None if sibling is None else sibling._parameters.get(site.attribute)

    def device(self) -> torch.device:
        """The device of the reference's first tensor."""
        first = next(itertools.chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    @contextmanager
    def gathered(self, *modules: nn.Module) -> Iterator[None]:
        """Within the block modules of model and reference have whole parameters under FSDP1; a collective."""
        with ExitStack() as stack:
            for unit in {self._units[module]: None for module in modules if module in self._units}:
                stack.enter_context(gathered(unit))
            yield

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the frozen module."""
        return self.module(*args, **kwargs) if self.wrapper is None else self.wrapper(self.module, *args, **kwargs)

    @contextmanager
    def running(self, is_grad_enabled: bool = True) -> Iterator[None]:
        """Within the block the reference runs uncompiled, with the model's modes and flags, and on the same random numbers.

        After the block random states, buffers, parameters and flags are as before, and the reference holds no graph. It has the grad mode
        of the model, because torch selects kernels by it and by ``requires_grad``.
        """
        if self.is_running:
            yield
            return
        self.is_running = True
        try:
            with (
                unchanged_dropout_of_cudnn(self.module, self.device()),
                unchanged_random_states(self.device()),
                unchanged_buffers(self.module),
                nullcontext() if self._units else self._parameters.restored(),  # FSDP1 moves parameters itself
                flags_of_model(self._siblings.items()),
                uncached_autocast(),
                OriginalCode(),
                no_warning_of_checkpoints(),
                torch.set_grad_enabled(is_grad_enabled),
            ):
                yield
        finally:
            self.is_running = False
            drop_graphs(self.module)
            reshard(self.wrapper or self.module)
            for part in self.module.modules():
                if isinstance(part, Metric):
                    part.reset()  # it would collect inputs over all steps


TensorsOfCall = Callable[[tuple[Any, ...], dict[str, Any], object], NamedTensors]
"""Selects the tensors of a call to keep, from its positional arguments, keyword arguments and output."""

NOT_RUN = "The reference has not run before the model, and no activation is compared. Run it first, on the same input."
NOT_CALLED = (
    "{} itself was not called, only modules within it, so its reference did not run: no activation is compared. "
    "Give module the name of a submodule that is called as a whole."
)
MISSED = "The model ran modules more often than the reference did; such calls are not compared"
OTHER_SHAPE = "Modules gave outputs of other shapes than in the reference; such calls are not compared"
LEFT_OVER = "The reference ran modules more often than the model did; such calls are not compared"


class ReferenceProbe(Probe):
    """Keeps tensors of the reference's modules, those in :attr:`wanted`, until the model makes the same call.

    An error of the reference is reported if the monitor has called the reference.
    """

    def __init__(self, reference: Reference, tools: StepTools) -> None:
        self.reference = reference
        self._tools = tools
        self._log = tools.reporter.log_once
        self.wanted: dict[tuple[nn.Module, Hashable], tuple[TensorsOfCall, bool]] = {}
        """Which tensors are kept of every call of a module of the reference until :meth:`take` with the same key, and whether before other
        forward hooks can replace the output."""
        self._waiting: defaultdict[tuple[nn.Module, Hashable], deque[NamedTensors]] = defaultdict(deque)
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}
        """By ``id`` of a tensor: the tensor, its version, and its copy. An output is often the input of the next module, too."""
        self._hooks = HookSet()
        self._runs: list[tuple[ExitStack, bool]] = []
        """The running calls of the reference, each with whether the user made it."""
        self._has_run = False
        self.not_compared: defaultdict[str, set[nn.Module]] = defaultdict(set)
        """Modules with a call that is not compared in this micro-batch, by message."""
        self._is_explained = False
        """Whether an error of the reference explains why calls are not compared."""

    def attach(self) -> None:
        """Register the hooks."""
        if self.reference.follows:
            self._hooks.add_forward(self.reference.live, UncopiedHook(self._run_beside), with_kwargs=True, prepend=True, is_before=True)
        root = self.reference.module
        self._hooks.add_forward(root, UncopiedHook(self._begin_call), prepend=True, is_before=True)
        for (module, by), (tensors, before_other_hooks) in self.wanted.items():
            hook = UncopiedHook(functools.partial(self._after_forward, by, tensors))
            self._hooks.add_forward(module, hook, with_kwargs=True, **({"prepend": True} if before_other_hooks else {}))
        self._hooks.add_forward(root, UncopiedHook(self._end_call), always_call=True)

    def run(self, call: Callable[[], object], is_grad_enabled: bool = True) -> None:
        """Run the reference by ``call`` and keep the requested tensors. An error is reported.

        ``call`` is repeated if the reference runs a backward pass within its forward pass, which needs saved tensors.

        Raises:
            NotPlainError: If an argument cannot be copied.
        """
        try:
            if not self.reference.differentiates:
                try:
                    with self.reference.running(is_grad_enabled), saving_nothing():
                        call()
                    return
                except NotPlainError:
                    raise
                except Exception:
                    pass  # it may need saved tensors
            self._release_calls()
            with self.reference.running(is_grad_enabled):
                call()
            self.reference.differentiates = True
        except NotPlainError:
            raise
        except Exception as error:
            self._is_explained = True
            self._tools.reporter.count("The reference could not run", "reference", error, self._tools.accumulator)

    def end_micro_batch(self) -> None:
        """Report the calls that only the model or only the reference made, once for each cause, and release them."""
        if not self._is_explained:
            if self.not_compared[MISSED] and not self._has_run:
                self._log(NOT_CALLED.format(self.reference.name) if self.reference.follows else NOT_RUN)
                del self.not_compared[MISSED]
            self.not_compared[LEFT_OVER] = {module for (module, _by), calls in self._waiting.items() if calls}
            for message, modules in self.not_compared.items():
                if modules:
                    names = [name or ROOT for name, module in self.reference.module.named_modules() if module in modules]
                    self._log(f"{message}: {shortened(names, 5)}.", once=message)
        self._release_calls()
        self.not_compared.clear()
        self._has_run = self._is_explained = False

    def finish(self) -> None:
        """End the micro-batch, in a loop that does not report its end."""
        self.end_micro_batch()

    def close(self) -> None:
        """Remove every hook and release every tensor."""
        self._hooks.close()
        while self._runs:
            self._runs[-1][0].close()
            self._runs.pop()
        self._release_calls()
        self.not_compared.clear()

    def take(self, module: nn.Module, by: Hashable) -> NamedTensors | None:
        """The tensors of a module of the reference for the model's current call; ``None`` if the reference made fewer calls."""
        calls = self._waiting.get((module, by))
        if not calls:
            self.not_compared[MISSED].add(module)
            return None
        call = calls.popleft()
        if not self.reference.cpu_offload:
            return call
        device = self.reference.device()
        return [(path, tensor.to(device)) for path, tensor in call]

    def _run_beside(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Call the reference with copies of the model's arguments, into which it may write."""

        def call() -> None:
            copied_args, copied_kwargs = plain_copy((args, kwargs))
            self.reference(*copied_args, **copied_kwargs)

        if self._tools.observes_calls() and not self._tools.gate.is_redirected(module) and not is_in_backward():
            try:
                self.run(call, torch.is_grad_enabled())
            except NotPlainError as error:
                self._release_calls()
                self._is_explained = True
                why = "The reference takes tensors, numbers, strings and plain containers of them; without module it runs its training_step"
                self._log(f"{self.reference.name} is called with a {error}: this call is not compared. {why}.", logging.WARNING, once=why)

    def _begin_call(self, *_args: object) -> None:
        is_of_user = not self.reference.is_running
        call = ExitStack()
        # In a training step the model has a graph, even if the user calls the reference without.
        call.enter_context(self.reference.running(torch.is_grad_enabled() if self._tools.is_suspended() else True))
        self._runs.append((call, is_of_user))

    def _end_call(self, _module: nn.Module, _args: object, output: object) -> object:
        """Detach the user's output, so that a loss computed from it has no gradient in the reference."""
        if not self._runs:
            return None
        call, is_of_user = self._runs.pop()
        call.close()
        if is_of_user and any(requires_gradient(tensor) for _path, tensor in named_tensors(output)):
            with suppress(Exception):  # a container that cannot be rebuilt
                return with_tensors(output, Tensor.detach)
        return None

    def _after_forward(self, by: Hashable, tensors: TensorsOfCall, module: nn.Module, *call: Any) -> None:
        if not self._tools.is_suspended():
            self._has_run = True
            self._waiting[module, by].append([(path, self._copy(tensor)) for path, tensor in tensors(*call)])

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, which a later module of the reference may overwrite."""
        if id(tensor) in self._copies:
            original, version, known = self._copies[id(tensor)]
            copy = known()
            if copy is not None and original() is tensor and plain(tensor)._version == version:
                return copy
        elements = plain(tensor).detach()
        copy = elements.to("cpu", copy=True) if self.reference.cpu_offload else elements.clone()
        if not plain(tensor).is_inference():  # an inference tensor has no version
            self._copies[id(tensor)] = (weakref.ref(tensor), plain(tensor)._version, weakref.ref(copy))
        return copy

    def _release_calls(self) -> None:
        self._waiting.clear()
        self._copies.clear()


def _by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Modules by name without wrappers. A wrapper stands for its module, except for FSDP1's; metrics are omitted."""
    modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if not isinstance(module, UNWATCHED) and not is_fsdp_wrapper(module):
            modules.setdefault(without_wrappers(name), module)
    return modules


def structural_differences(live: nn.Module, module: nn.Module) -> list[str]:
    """Names of modules and parameters that are missing in either module or have different shapes."""
    originals, siblings = _by_name(live), _by_name(module)
    names = sorted(originals.keys() ^ siblings.keys())
    for name in originals.keys() & siblings.keys():
        start = "" if name == ROOT else f"{name}."
        names += sorted({f"{start}{key}" for key, _shape in _shapes(originals[name]) ^ _shapes(siblings[name])})
    return names


def _shapes(module: nn.Module) -> set[tuple[str, object]]:
    """Name and shape of each of a module's own parameters; "lazy" if it is not initialized."""
    parameters = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
    return {(name, "lazy" if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)) for name, parameter in parameters}
