"""Contexts that undo side effects of code on random states, flags, buffers, attributes and autograd graphs."""

from __future__ import annotations

import functools
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.model.compiled import MODULE_ATTRIBUTES
from lightning_module_monitor.model.copies import overwrite, same_layout
from lightning_module_monitor.model.outputs import named_tensors, with_tensors

_WITHOUT_TENSORS = frozenset((type(None), bool, int, float, str))
"""Types of most attributes, which hold no tensor."""


class RandomStates:
    """Current states of the random generators that a model may use: Python's, numpy's, torch's on the CPU and on a device.

    Args:
        device: The device.
        torch_only: Leave out Python's and numpy's generators, whose states take ten times as long to read.
    """

    def __init__(self, device: torch.device, *, torch_only: bool = False) -> None:
        self._states: list[tuple[Callable[[Any], object], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
        if not torch_only:
            self._states += [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state(legacy=False))]
        if device.type != "cpu":
            module = getattr(torch, device.type)
            self._states.append((functools.partial(module.set_rng_state, device=device), module.get_rng_state(device)))

    def restore(self) -> None:
        """Set the generators to these states."""
        for restore, state in self._states:
            restore(state)


@contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """Restore the states of all random generators after the block.

    On CUDA the block draws from a copy of the generator's state. Setting a state would make cuDNN draw a new seed for the dropout of
    recurrent layers, so that training would differ.
    """
    is_cuda = device.type == "cuda"
    states = RandomStates(torch.device("cpu") if is_cuda else device)
    try:
        with _generator_of_cuda_replaced(device) if is_cuda else nullcontext():
            yield
    finally:
        states.restore()


@contextmanager
def _generator_of_cuda_replaced(device: torch.device) -> Iterator[None]:
    """Within the block the generator of a CUDA device draws from a copy of its state."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


@contextmanager
def unchanged_dropout_of_cudnn(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore cuDNN's random state after the block, in which a module with recurrent layers runs.

    cuDNN draws the dropout of :class:`torch.nn.RNNBase` from a state of its own, one for each device. Torch seeds it from the device's
    generator in the first such call after a seed or a state of the generator was set.
    """
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase) and part.dropout > 0] if device.type == "cuda" else []
    if not layers:
        yield
        return
    dropout, before = _CudnnDropout(), [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = dropout.wrapped(layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
        if dropout.was_seeded:  # the model draws the same seed in its next call
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), device)


class _CudnnDropout(TorchDispatchMode):
    """Within the mode, cuDNN's recurrent layers leave their random state as it was. No function of torch gives access to the state."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.was_seeded = False
        """Whether a call drew a seed for the state."""

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a layer with the mode active. A hook of the layer runs without the mode."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as forward
            with self:
                return forward(*args, **kwargs)

        return wrapped

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # as torch's
        self.was_seeded |= function is torch.ops.aten._cudnn_init_dropout_state.default
        if function is not torch.ops.aten._cudnn_rnn.default or args[-1] is None:
            return function(*args, **(kwargs or {}))
        before = args[-1].clone()
        result = function(*args, **(kwargs or {}))
        args[-1].copy_(before)
        return result


@contextmanager
def flags_of_model(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Within the block, modules have the training modes and ``requires_grad`` flags of a model, because torch selects kernels by both.

    Args:
        pairs: Modules of the model, each with the module that gets its flags, and has parameters of the same names.
    """
    pairs = list(pairs)
    flags = [[(tensor, tensor.requires_grad) for tensor in sibling.parameters(recurse=False)] for _live, sibling in pairs]
    before = [(sibling, sibling.training, members) for (_live, sibling), members in zip(pairs, flags, strict=True)]
    try:
        for live, sibling in pairs:
            if sibling.training != live.training:
                sibling.training = live.training
            for name, parameter in sibling._parameters.items():
                other = live._parameters.get(name)
                if parameter is not None and other is not None and not parameter.is_inference():
                    _set_flag(parameter, other.requires_grad)
        yield
    finally:
        for sibling, is_training, members in before:
            if sibling.training != is_training:
                sibling.training = is_training
            for tensor, flag in members:
                if tensor.grad_fn is not None:
                    tensor.detach_()
                _set_flag(tensor, flag)


def _set_flag(parameter: Tensor, flag: bool) -> None:
    is_differentiable = parameter.is_floating_point() or parameter.is_complex()
    if parameter.requires_grad != flag and (is_differentiable or not flag):
        parameter.requires_grad_(flag)


_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore every buffer after the block: the same tensor, with the same shape and values.

    Where a module registers a buffer, attributes that are numbers, flags or texts are restored, too, such as the length of what it keeps.
    """
    plain = [(part, {name: value for name, value in vars(part).items() if type(value) in _PLAIN}) for part in module.modules()]
    before = [(part._buffers, dict(part._buffers.items())) for part in module.modules()]
    tensors = {id(tensor): tensor for _table, buffers in before for tensor in buffers.values() if tensor is not None}
    saved = [(tensor, same_layout(tensor.detach())) for tensor in tensors.values()]
    try:
        yield
    finally:
        for (part, attributes), (table, buffers) in zip(plain, before, strict=True):
            if dict(table.items()).keys() != buffers.keys() or any(table[name] is not tensor for name, tensor in buffers.items()):
                vars(part).update(attributes)
        _restore_entries(before)
        with torch.no_grad():
            for tensor, values in saved:
                if tensor.is_inference():
                    continue  # nothing can be written into it
                if tensor.grad_fn is not None:
                    tensor.detach_()
                if tensor.shape != values.shape:
                    tensor.set_(values)  # type: ignore[call-overload]  # torch declares it for storages alone
                else:
                    overwrite(tensor, values)


def _restore_entries(before: Iterable[tuple[Any, Mapping[str, Tensor | None]]]) -> None:
    """Make dictionaries of modules, such as ``_buffers``, hold their earlier entries, given each with these."""
    for table, entries in before:
        for name in [name for name in table.keys() if name not in entries]:  # noqa: SIM118  # TorchScript's is no dict
            del table[name]
        for name, tensor in entries.items():
            if name not in table or table[name] is not tensor:
                table[name] = tensor


class UnchangedParameters:
    """Restores the parameters of a module after its runs, which may write into them: EMA of a teacher, normalized or clipped weights.

    Such code writes into ``p.data``, whose version does not count it, so bits are compared. While the first run lasts, the device has
    copies of all parameters. That run is in the first monitored step, before there are gradients, which take as much memory. In later
    runs the device has copies of those parameters alone that were written into, and writing that begins in a later run is not noticed.
    Parameters that get other memory, or are replaced, need no copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._write_flags: list[tuple[nn.Parameter, Tensor]] | None = None
        """The parameters, each with a flag on its device: whether the first run that ended without an error has written into it."""
        self._written: list[nn.Parameter] | None = None
        """The parameters into which that run wrote, once the host has read the flags."""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore every parameter after the block: the same object, the same memory, and the same values."""
        entries = [(part._parameters, dict(part._parameters.items())) for part in self._module.modules() if part._parameters]
        parameters = {id(parameter): parameter for _table, named in entries for parameter in named.values() if parameter is not None}
        memory = [(parameter, parameter.data) for parameter in parameters.values() if _is_writable(parameter)]
        saved = [(parameter, parameter.detach().clone()) for parameter in self._may_be_written(memory)]
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            _restore_entries(entries)
            for parameter, data in memory:
                if not parameter.is_set_to(data):
                    parameter.data = data
            if is_complete and self._write_flags is None:
                self._write_flags = [(parameter, _bits_differ(parameter, values)) for parameter, values in saved]
            with torch.no_grad():
                for parameter, values in saved:
                    overwrite(parameter, values)

    def _may_be_written(self, memory: Iterable[tuple[nn.Parameter, Tensor]]) -> list[nn.Parameter]:
        """The parameters of which a run needs copies."""
        if self._write_flags is None:
            return [parameter for parameter, _data in memory]
        if self._written is None:
            self._written = _flagged(self._write_flags)
        return self._written


def _is_writable(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a plain tensor with elements in memory, and not e.g. a DTensor, a sparse one or one on the meta device."""
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return is_plain and not (parameter.is_meta or parameter.is_nested or parameter.is_quantized or parameter.is_inference())


def _bits_differ(tensor: Tensor, values: Tensor) -> Tensor:
    """Whether any bit of two tensors differs, as a tensor on their device. NaN equals NaN, and 0 differs from -0."""
    before, after = (each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (values, tensor))
    return (before != after).any()


def _flagged(flags: list[tuple[nn.Parameter, Tensor]]) -> list[nn.Parameter]:
    """The parameters whose flag is true; the host reads all flags at once."""
    if not flags:
        return []
    device = flags[0][1].device
    are_true = torch.stack([flag.to(device) for _parameter, flag in flags]).tolist()
    return [parameter for (parameter, _flag), is_true in zip(flags, are_true, strict=True) if is_true]


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Within the block autocast is off on a device."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


@contextmanager
def float32_products() -> Iterator[None]:
    """Within the block products of float32 matrices are not computed in TF32 or bfloat16, which a program may have allowed."""
    torch_backends: Any = torch.backends
    if not hasattr(torch_backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    backends = (torch_backends.cuda.matmul, torch_backends.mkldnn.matmul)
    reduced = [(backend, backend.fp32_precision) for backend in backends if backend.fp32_precision not in ("ieee", "none")]
    try:
        for backend, _precision in reduced:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in reduced:
            backend.fp32_precision = precision


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Within the block autocast does not cache cast weights: the cache, with their graph, would live until the model's autocast ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def no_warning_of_checkpoints() -> Iterator[None]:
    """Within the block ``torch.utils.checkpoint`` does not warn that no input requires a gradient.

    Without ``warnings.catch_warnings``, which resets Python's list of the warnings that were shown before.
    """
    entry: Any = ("ignore", re.compile("None of the inputs have requires_grad=True"), UserWarning, None, 0)
    filters: Any = warnings.filters  # annotated as a sequence
    filters.insert(0, entry)
    try:
        yield
    finally:
        if entry in filters:
            filters.remove(entry)


def saving_nothing() -> saved_tensors_hooks:
    """Within the block no tensor is saved for a backward pass; one through its operations raises an error."""

    def not_saved(_nothing: None) -> Tensor:
        raise RuntimeError("no tensors are kept for a backward pass")

    return saved_tensors_hooks(lambda _tensor: None, not_saved)


def drop_graphs(module: nn.Module) -> None:
    """Detach the tensors that a run has left in attributes of a module and its parts: they would keep its graph alive."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in MODULE_ATTRIBUTES and type(value) not in _WITHOUT_TENSORS:
                with suppress(Exception):  # a value that contains itself
                    if any(tensor.grad_fn is not None for _path, tensor in named_tensors(value)):
                        vars(part)[name] = with_tensors(value, Tensor.detach)
