"""The reference: a frozen sibling of the monitored module, and its tensors for the same input, call by call."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_module_monitor.distributed.shards import gathered, reshard
from lightning_module_monitor.kernels.elements import plain, unwrapped
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.model.copies import NotPlainError, plain_copy
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, is_in_backward, requires_gradient
from lightning_module_monitor.model.names import ROOT, UNWATCHED, ParameterSite, is_fsdp_wrapper, without_wrappers
from lightning_module_monitor.model.outputs import NamedTensors, named_tensors, with_tensors
from lightning_module_monitor.model.unchanged import (
    drop_graphs,
    flags_of_model,
    no_warning_of_checkpoints,
    saving_nothing,
    uncached_autocast,
    unchanged_buffers,
    unchanged_random_states,
)
from lightning_module_monitor.probes.base import Probe, StepTools


class Reference:
    """A frozen sibling of a module. It is no part of the model.

    Args:
        live: The module, or a part of it, that it is a sibling of.
        module: The sibling.
        follows: Whether it is called whenever ``live`` is about to run, with the same arguments. Otherwise it is run by other means,
            before the model.
        cpu_offload: Whether its tensors wait for the model's own in the memory of the host.
        name: Name of ``live``, for messages.
        wrapper: What runs the sibling under FSDP1: it calls a function with arguments.
        units: The unit of FSDP1 around each module of both.

    Raises:
        ValueError: If modules or parameters of the two have different names or shapes; lists them.
    """

    def __init__(
        self,
        live: nn.Module,
        module: nn.Module,
        *,
        follows: bool,
        cpu_offload: bool,
        name: str = ROOT,
        wrapper: nn.Module | None = None,
        units: Mapping[nn.Module, Any] | None = None,
    ) -> None:
        differing = structural_differences(live, module)
        if differing:
            shown = ", ".join(differing[:10]) + (" ..." if len(differing) > 10 else "")
            raise ValueError(f"The reference must have the structure of the module; these are not in both, or of different shapes: {shown}")
        of_module = _by_name(module)
        self.live = live
        self.module = module
        self.follows = follows
        self.cpu_offload = cpu_offload
        self.name = name
        self.wrapper = wrapper
        self._units = units or {}
        # The first name of a shared module counts, for both.
        self._siblings: dict[nn.Module, nn.Module] = {one: of_module[name] for name, one in reversed(_by_name(live).items())}
        # The owner of a parameter may be within a wrapper.
        owners = {without_wrappers(name): one for name, one in module.named_modules(remove_duplicate=False)}
        named = reversed([*live.named_modules(remove_duplicate=False)])
        within = {one: owners.get(without_wrappers(name)) for name, one in named}
        self._owners = {one: owner for one, owner in within.items() if owner is not None}
        self.is_running = False
        self.operator_norms: dict[str, Tensor] = {}
        """Of its weights, by the site of a layer; they are computed once."""
        self.differentiates = False
        """Whether its forward pass runs a backward pass of its own, which needs the tensors that are otherwise not saved."""

    def why_not_run(self) -> str:
        """The message about a step in which the model's modules ran, and the reference did not."""
        if self.follows:
            why = f"{self.name} itself was not called, only modules within it, so its reference did not run: no activation is compared"
            return f"{why}. Give module the name of a submodule that is called as a whole."
        return "The reference has not run before the model, and no activation is compared. Run it first, on the same input."

    def sibling(self, module: nn.Module) -> nn.Module | None:
        """The sibling of a module of the model; ``None`` outside of ``live``."""
        return self._siblings.get(module)

    def model_of(self, module: nn.Module) -> nn.Module | None:
        """The module of the model that a module of the reference is the sibling of; ``None`` if it is none of them."""
        return next((live for live, sibling in self._siblings.items() if sibling is module), None)

    def parameter(self, site: ParameterSite) -> Tensor | None:
        """The sibling of a parameter; ``None`` as for :meth:`sibling`."""
        sibling = self._owners.get(site.owner)
        return None if sibling is None else sibling._parameters.get(site.attribute)

    def device(self) -> torch.device:
        """The device of its first tensor."""
        first = next(itertools.chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    @contextmanager
    def gathered(self, *modules: nn.Module) -> Iterator[None]:
        """Within the block modules of either, which do not run now, have whole parameters under FSDP1, too: all ranks take part."""
        with ExitStack() as stack:
            for unit in {self._units[module]: None for module in modules if module in self._units}:
                stack.enter_context(gathered(unit))
            yield

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the sibling."""
        return self.module(*args, **kwargs) if self.wrapper is None else self.wrapper(self.module, *args, **kwargs)

    @contextmanager
    def running(self, is_grad_enabled: bool = True) -> Iterator[None]:
        """Within the block it runs as the model will: in its modes, with its flags, and on the random numbers that come next; uncompiled.

        After the block the same random numbers come again, buffers and flags are as before, and it holds no graph. The grad mode is that
        of the model: torch selects kernels by it, and by ``requires_grad``.
        """
        if self.is_running:
            yield
            return
        self.is_running = True
        try:
            with (
                unchanged_random_states(self.device()),
                unchanged_buffers(self.module),
                flags_of_model(self._siblings.items()),
                uncached_autocast(),
                Uncompiled(),
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
                    part.reset()  # it would collect its inputs from step to step


TensorsOfCall = Callable[[tuple[Any, ...], dict[str, Any], object], NamedTensors]
"""The tensors of a call that are kept: a function of its positional arguments, keyword arguments and output."""

MISSED = "The model ran modules more often than the reference did; such calls are not compared"
OTHER_SHAPE = "Modules gave outputs of other shapes than in the reference; such calls are not compared"
LEFT = "The reference ran modules more often than the model did, which are not compared"


class ReferenceProbe(Probe):
    """Keeps the tensors of the reference's modules that :meth:`want` names until the model's own modules come to the same call.

    An error of the reference is reported if the monitor itself has called it.
    """

    def __init__(self, reference: Reference, tools: StepTools) -> None:
        self.reference = reference
        self._tools = tools
        self._log = tools.reporter.log_once
        self._wanted: dict[tuple[nn.Module, str], tuple[TensorsOfCall, bool]] = {}
        self._waiting: defaultdict[tuple[nn.Module, str], deque[NamedTensors]] = defaultdict(deque)
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}
        """Copy by the identity of the tensor: the tensor, its version, the copy. The output of a module is the input of the next one."""
        self._hooks = HookSet()
        self._runs: list[tuple[ExitStack, bool]] = []
        """The calls of its root that are not over, and whether the user makes them."""
        self._has_run = False
        self.not_compared: defaultdict[str, set[nn.Module]] = defaultdict(set)
        """Modules with a call that is not compared in this micro-batch, by :data:`MISSED` or :data:`OTHER_SHAPE`."""
        self._is_explained = False
        """Whether an error of the reference explains that calls are not compared."""

    def want(self, module: nn.Module, by: str, tensors: TensorsOfCall, *, before_other_hooks: bool = False) -> None:
        """Keep ``tensors`` of every call of a module of the reference until :meth:`take` with the same ``by``.

        With ``before_other_hooks`` other forward hooks, which may replace the output, come later.
        """
        self._wanted[module, by] = tensors, before_other_hooks

    def is_needed(self) -> bool:
        """Whether any tensors are wanted."""
        return bool(self._wanted)

    def attach(self) -> None:
        """Register the hooks."""
        if not self._wanted:
            return
        if self.reference.follows:
            self._hooks.add_forward_pre(self.reference.live, UncopiedHook(self._run_beside), with_kwargs=True, prepend=True)
        root = self.reference.module
        self._hooks.add_forward_pre(root, UncopiedHook(self._begin_call), prepend=True)
        for (module, by), (tensors, before_other_hooks) in self._wanted.items():
            hook = UncopiedHook(functools.partial(self._after_forward, by, tensors))
            self._hooks.add_forward(module, hook, with_kwargs=True, **({"prepend": True} if before_other_hooks else {}))
        self._hooks.add_forward(root, UncopiedHook(self._end_call), always_call=True)

    def run(self, call: Callable[[], object], is_grad_enabled: bool = True) -> None:
        """Run the reference by ``call`` and keep the tensors that are wanted. An error is reported.

        It is called once more if the reference needs tensors for a backward pass within its own forward pass.

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
                    pass  # it may need the tensors that were not saved
            self._forget()
            with self.reference.running(is_grad_enabled):
                call()
            self.reference.differentiates = True
        except NotPlainError:
            raise
        except Exception as error:
            self._is_explained = True
            self._tools.reporter.count("The reference could not run", "reference", error, self._tools.accumulator)

    def end_micro_batch(self) -> None:
        """Report calls of one of both only, once for each cause, and forget them."""
        if not self._is_explained:
            if self.not_compared[MISSED] and not self._has_run:
                self._log(self.reference.why_not_run())
                del self.not_compared[MISSED]
            self.not_compared[LEFT] = {module for (module, _by), calls in self._waiting.items() if calls}
            for what, modules in self.not_compared.items():
                if modules:
                    names = [name or ROOT for name, module in self.reference.module.named_modules() if module in modules]
                    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                    self._log(f"{what}: {', '.join(names[:5])}{more}.", once=what)
        self._forget()
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
        self._forget()
        self.not_compared.clear()

    def take(self, module: nn.Module, by: str) -> NamedTensors | None:
        """The tensors of a module of the reference at the call that the model makes now; ``None`` if it has not run as often."""
        calls = self._waiting.get((module, by))
        if not calls:
            self.not_compared[MISSED].add(module)
            return None
        call = calls.popleft()
        if not self.reference.cpu_offload:
            return call
        device = self.reference.device()
        return [(path, one.to(device)) for path, one in call]

    def _run_beside(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Call the reference with copies of the model's arguments, because it may write into them."""

        def call() -> None:
            own_args, own_kwargs = plain_copy((args, kwargs))
            self.reference(*own_args, **own_kwargs)

        if self._tools.is_observed() and not self._tools.gate.is_redirected(module) and not is_in_backward():
            try:
                self.run(call, torch.is_grad_enabled())
            except NotPlainError as error:
                self._forget()
                self._is_explained = True
                why = "The reference takes tensors, numbers, strings and plain containers of them; without module it runs its training_step"
                self._log(f"{self.reference.name} is called with a {error}: this call is not compared. {why}.", logging.WARNING, once=why)

    def _begin_call(self, *_args: object) -> None:
        is_of_user = not self.reference.is_running
        call = ExitStack()
        # The model of a training step runs with a graph, even where the user has none for the reference.
        call.enter_context(self.reference.running(torch.is_grad_enabled() if self._tools.is_suspended() else True))
        self._runs.append((call, is_of_user))

    def _end_call(self, _module: nn.Module, _args: object, output: object) -> object:
        """Detach the output that the user gets: a loss computed from it must not lead into the reference."""
        if not self._runs:
            return None
        call, is_of_user = self._runs.pop()
        call.close()
        if is_of_user and any(requires_gradient(tensor) for _path, tensor in named_tensors(output)):
            with suppress(Exception):  # a container that cannot be rebuilt
                return with_tensors(output, Tensor.detach)
        return None

    def _after_forward(self, by: str, tensors: TensorsOfCall, module: nn.Module, *call: Any) -> None:
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
        elements = unwrapped(tensor).detach()  # it outlives vmap
        copy = elements.to("cpu", copy=True) if self.reference.cpu_offload else elements.clone()
        if not plain(tensor).is_inference():  # an inference tensor has no version
            self._copies[id(tensor)] = (weakref.ref(tensor), plain(tensor)._version, weakref.ref(copy))
        return copy

    def _forget(self) -> None:
        self._waiting.clear()
        self._copies.clear()


def _by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Modules by name without wrappers, a wrapper in place of the wrapped module, if not FSDP1's; modules that measure are left out."""
    modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if not isinstance(module, UNWATCHED) and not is_fsdp_wrapper(module):
            modules.setdefault(without_wrappers(name), module)
    return modules


def structural_differences(live: nn.Module, module: nn.Module) -> list[str]:
    """Names of modules and parameters that are not in both, or of different shapes."""
    of_live, of_module = _by_name(live), _by_name(module)
    names = sorted(of_live.keys() ^ of_module.keys())
    for name in of_live.keys() & of_module.keys():
        shapes, others = _shapes(of_live[name]), _shapes(of_module[name])
        start = "" if name == ROOT else f"{name}."
        names += sorted(f"{start}{one}" for one in shapes.keys() | others.keys() if shapes.get(one) != others.get(one))
    return names


def _shapes(module: nn.Module) -> dict[str, object]:
    """Shape by name of a module's own parameters; "not yet" for a lazy one."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return {name: "not yet" if nn.parameter.is_lazy(parameter) else tuple(parameter.shape) for name, parameter in own.items()}
