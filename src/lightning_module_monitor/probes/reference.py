"""The reference: a frozen sibling of the monitored module, and what it gives for the same input, call by call."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_module_monitor.modules.hooks import HookSet, UncopiedHook
from lightning_module_monitor.modules.names import ROOT, UNWATCHED, ParameterSite, without_wrappers
from lightning_module_monitor.modules.outputs import Path, copied, named_tensors
from lightning_module_monitor.probes.probe import Probe
from lightning_module_monitor.random_states import unchanged_random_states

NamedTensors = list[tuple[Path, Tensor]]


class Reference:
    """A frozen sibling of a module. It is held beside the model, and in nothing of it.

    Args:
        live: The module, or that part of it, that it is a sibling of.
        module: The sibling.
        follows: Whether it is called whenever ``live`` is about to run, with the same arguments. Otherwise somebody else
            runs it, before the model.
        cpu_offload: Whether what it gives waits for the model's own in the memory of the host.

    Raises:
        ValueError: If modules or parameters of the two have different names or shapes; lists them.
    """

    def __init__(self, live: nn.Module, module: nn.Module, *, follows: bool, cpu_offload: bool) -> None:
        differing = structural_differences(live, module)
        if differing:
            shown = ", ".join(differing[:10]) + (" ..." if len(differing) > 10 else "")
            raise ValueError(f"The reference must have the structure of the module; these are not in both, or of different shapes: {shown}")
        of_live, of_module = _by_name(live), _by_name(module)
        self.live = live
        self.module = module
        self.follows = follows
        self.cpu_offload = cpu_offload
        # The first name of a shared module counts, for both.
        self._twins: dict[nn.Module, nn.Module] = {one: of_module[name] for name, one in reversed(of_live.items())}
        self._is_running = False

    def twin(self, module: nn.Module) -> nn.Module | None:
        """The sibling of a module; ``None`` if it is outside of what there is a sibling of."""
        return self._twins.get(module)

    def model_of(self, module: nn.Module) -> nn.Module | None:
        """The module of the model that one of the reference's is the sibling of; ``None`` if it is none of them."""
        return next((live for live, twin in self._twins.items() if twin is module), None)

    def parameter(self, site: ParameterSite) -> Tensor | None:
        """The sibling of a parameter; ``None`` as for :meth:`twin`."""
        twin = self._twins.get(site.owner)
        return None if twin is None else twin._parameters.get(site.attribute)

    def device(self) -> torch.device:
        """Where it is."""
        first = next(itertools.chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block it runs as the model is about to: in the model's modes, and on the random numbers that come next.

        After the block those numbers come again, buffers are as before, and there is no graph of what was done.
        """
        if self._is_running:
            yield
            return
        self._is_running = True
        try:
            with (
                torch.no_grad(),
                unchanged_random_states(self.device()),
                unchanged_buffers(self.module),
                self._modes(self._twins),
                _slow_path(),
            ):
                yield
        finally:
            self._is_running = False
            for part in self.module.modules():
                if isinstance(part, Metric):
                    part.reset()  # it would gather what it is given, from step to step

    @contextmanager
    def _modes(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Train or eval mode as modules of the model have it, one by one."""
        pairs = ((live, self._twins.get(live)) for live in modules)
        changed = [(live, twin) for live, twin in pairs if twin is not None and live.training != twin.training]
        for live, twin in changed:
            twin.training = live.training
        try:
            yield
        finally:
            for live, twin in changed:
                twin.training = not live.training


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """After the block every buffer is the tensor that it was, with the values that it had."""
    saved = [
        (part, name, tensor, tensor.clone()) for part in module.modules() for name, tensor in part._buffers.items() if tensor is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, tensor, values in saved:
                part._buffers[name] = tensor.copy_(values)


@contextmanager
def _slow_path() -> Iterator[None]:
    """Attention takes the path that it takes while gradients are needed: without them it has a faster one, which rounds otherwise."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


TensorsOfCall = Callable[[tuple[Any, ...], dict[str, Any], object], NamedTensors]
"""What of a call is kept: a function of the positional arguments, the keyword arguments and the output."""


def named_outputs(output: object) -> NamedTensors:
    """The floating tensors in what a module gave."""
    if isinstance(output, Tensor):
        return [((), output)] if output.is_floating_point() else []
    return [(path, tensor) for path, tensor in named_tensors(output) if tensor.is_floating_point()]


class ReferenceProbe(Probe):
    """Keeps what the reference's modules give until the model's own come to the same call: only what is asked for.

    Args:
        reference: The reference.
        failed: Told of an error of the reference's, if the monitor itself has called it.
        say: Takes a sentence for the user.
    """

    def __init__(self, reference: Reference, failed: Callable[[Exception], None], say: Callable[[str], None]) -> None:
        self.reference = reference
        self._failed = failed
        self._say = say
        self._wanted: dict[tuple[nn.Module, str], tuple[TensorsOfCall, bool]] = {}
        self._waiting: defaultdict[tuple[nn.Module, str], deque[NamedTensors]] = defaultdict(deque)
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}
        """Copy by the identity of the tensor: the tensor, its version, the copy. What one module gives is what the next one gets."""
        self._hooks = HookSet()
        self._run = ExitStack()

    def want(self, module: nn.Module, by: str, tensors: TensorsOfCall, *, before_other_hooks: bool = False) -> None:
        """Keep tensors of every call of one of the reference's modules.

        Args:
            module: One of the reference's.
            by: The name under which :meth:`take` finds them.
            tensors: Gives the tensors to keep.
            before_other_hooks: Whether other forward hooks, which may replace the output, come later.
        """
        self._wanted[module, by] = tensors, before_other_hooks

    def is_needed(self) -> bool:
        """Whether anything is asked for."""
        return bool(self._wanted)

    def attach(self) -> None:
        """Put the hooks on."""
        if not self._wanted:
            return
        if self.reference.follows:
            hook = UncopiedHook(self._run_beside)
            self._hooks.add(self.reference.live.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        root = self.reference.module
        self._hooks.add(root.register_forward_pre_hook(UncopiedHook(self._begin_run), prepend=True))
        for (module, by), (tensors, before_other_hooks) in self._wanted.items():
            hook = UncopiedHook(functools.partial(self._after_forward, by, tensors))
            self._hooks.add(module.register_forward_hook(hook, with_kwargs=True, prepend=before_other_hooks))
        self._hooks.add(root.register_forward_hook(UncopiedHook(self._end_run), always_call=True))

    def end_micro_batch(self) -> None:
        """Forget what the model did not come to."""
        left = {module for (module, _by), calls in self._waiting.items() if calls}
        if left:
            names = [name or ROOT for name, module in self.reference.module.named_modules() if module in left]
            self._say(f"The reference ran modules more often than the model did, which are not compared: {', '.join(names[:5])}.")
        self._forget()

    def close(self) -> None:
        """Take every hook off, and forget everything."""
        self._hooks.close()
        self._run.close()
        self._forget()

    def take(self, module: nn.Module, by: str) -> NamedTensors | None:
        """The tensors of one of the reference's modules at the call that the model has come to; ``None`` if it has not run as often."""
        calls = self._waiting.get((module, by))
        if not calls:
            return None
        call = calls.popleft()
        if not self.reference.cpu_offload:
            return call
        device = self.reference.device()
        return [(path, one.to(device)) for path, one in call]

    def _run_beside(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Call the reference as the model is about to be: with copies, for it may write into its arguments."""
        # Not where a checkpointed forward is computed again, within the backward pass.
        if self.is_open and torch._C._current_graph_task_id() == -1:
            try:
                args, kwargs = copied((args, kwargs))
                with self.reference.running():
                    self.reference.module(*args, **kwargs)
            except Exception as error:
                self._failed(error)

    def _begin_run(self, *_args: object) -> None:
        self._run.enter_context(self.reference.running())

    def _end_run(self, *_args: object) -> None:
        self._run.close()

    def _after_forward(  # noqa: PLR0917  # torch's protocol, behind what is known of the module
        self, by: str, tensors: TensorsOfCall, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        if not self.is_suspended:
            self._waiting[module, by].append([(path, self._copy(tensor)) for path, tensor in tensors(args, kwargs, output)])

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy: what comes later in the reference may overwrite the tensor."""
        original, version, known = self._copies.get(id(tensor), _NO_COPY)
        copy = known()
        if copy is not None and original() is tensor and tensor._version == version:
            return copy
        copy = tensor.detach().to("cpu", copy=True) if self.reference.cpu_offload else _as_it_is(tensor)
        if not tensor.is_inference():  # such a one does not say whether it was overwritten
            self._copies[id(tensor)] = (weakref.ref(tensor), tensor._version, weakref.ref(copy))
        return copy

    def _forget(self) -> None:
        self._waiting.clear()
        self._copies.clear()


def _as_it_is(tensor: Tensor) -> Tensor:
    """A tensor that keeps the values, whatever is written into the original: a copy, but only once something is written.

    On a CPU; elsewhere a copy costs little, and is one at once. Of a part of a larger tensor too: the whole would be kept.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    is_whole = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    if not is_whole or tensor.is_neg() or tensor._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor.clone()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.clone()
    try:
        return torch._lazy_clone(tensor)
    except Exception:
        return tensor.clone()  # the other is private to torch, and may refuse, or be gone


def _nothing() -> None:
    return None


_NO_COPY: tuple[Callable[[], Tensor | None], int, Callable[[], Tensor | None]] = (_nothing, 0, _nothing)


def _by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Modules by name without wrappers, a wrapper for what it wraps; those that measure and are no layers are left out."""
    modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if not isinstance(module, UNWATCHED):
            modules.setdefault(without_wrappers(name), module)
    return modules


def structural_differences(live: nn.Module, module: nn.Module) -> list[str]:
    """Names of modules and parameters that are not in both, or not of one shape."""
    of_live, of_module = _by_name(live), _by_name(module)
    names = sorted(of_live.keys() ^ of_module.keys())
    for name in of_live.keys() & of_module.keys():
        shapes, others = _shapes(of_live[name]), _shapes(of_module[name])
        start = "" if name == ROOT else f"{name}."
        names += sorted(f"{start}{one}" for one in shapes.keys() | others.keys() if shapes.get(one) != others.get(one))
    return names


def _shapes(module: nn.Module) -> dict[str, object]:
    """Shape by name of a module's own parameters; of one that has none yet, what says so."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return {name: "not yet" if nn.parameter.is_lazy(parameter) else tuple(parameter.shape) for name, parameter in own.items()}
