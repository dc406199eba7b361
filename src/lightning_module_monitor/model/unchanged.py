"""Contexts that run code without side effects: random states, flags, buffers and attributes are as before, and no graph is left."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_module_monitor.model.copies import overwrite, same_layout
from lightning_module_monitor.model.outputs import named_tensors, with_tensors

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold no results."""
_PLAIN = frozenset((type(None), bool, int, float, str))
"""Types of most other attributes, which hold no tensor."""


@dataclass(frozen=True)
class RandomStates:
    """The states of the generators that a model may draw from: Python's, numpy's, torch's on the CPU and on one device."""

    of_python: tuple[Any, ...] | None
    of_numpy: dict[str, Any] | None
    of_cpu: Tensor
    device: torch.device | None
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device, *, of_torch_alone: bool = False) -> RandomStates:
        """The states of the CPU's and a device's generators as they are; those of Python and numpy take ten times as long as torch's."""
        own = None if device.type == "cpu" else device
        of_device = None if own is None else getattr(torch, own.type).get_rng_state(own)
        of_python = None if of_torch_alone else random.getstate()
        of_numpy = None if of_torch_alone else np.random.get_state(legacy=False)
        return cls(of_python, of_numpy, torch.get_rng_state(), own, of_device)

    def restore(self) -> None:
        """Let the generators go on from here."""
        if self.of_python is not None and self.of_numpy is not None:
            random.setstate(self.of_python)
            np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_cpu)
        if self.device is not None:
            getattr(torch, self.device.type).set_rng_state(self.of_device, self.device)


@contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """What is drawn in the block from the CPU's and a device's generators is drawn again after it."""
    states = RandomStates.now(device)
    try:
        yield
    finally:
        states.restore()


@contextmanager
def flags_of_model(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Give modules the modes of a model's, and their parameters its ``requires_grad`` flags: torch selects kernels by both.

    Each pair is a module of the model, and the module of the same parameters that gets its flags.
    """
    pairs = list(pairs)
    before = [
        (sibling, sibling.training, [(one, one.requires_grad) for one in sibling._parameters.values() if one is not None])
        for _live, sibling in pairs
    ]
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
        for sibling, is_training, flags in before:
            if sibling.training != is_training:
                sibling.training = is_training
            for tensor, flag in flags:
                if tensor.grad_fn is not None:
                    tensor.detach_()
                _set_flag(tensor, flag)


def _set_flag(parameter: Tensor, flag: bool) -> None:
    is_differentiable = parameter.is_floating_point() or parameter.is_complex()
    if parameter.requires_grad != flag and (is_differentiable or not flag):
        parameter.requires_grad_(flag)


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """After the block every buffer is the same tensor as before, with the same shape and values."""
    before = [(part, dict(part._buffers.items())) for part in module.modules()]
    tensors = {id(tensor): tensor for _part, buffers in before for tensor in buffers.values() if tensor is not None}
    saved = [(tensor, same_layout(tensor.detach())) for tensor in tensors.values()]
    try:
        yield
    finally:
        for part, buffers in before:
            for name in [name for name in part._buffers.keys() if name not in buffers]:  # noqa: SIM118  # that of TorchScript is no dict
                del part._buffers[name]
            for name, tensor in buffers.items():
                if part._buffers[name] is not tensor:
                    part._buffers[name] = tensor
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


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Within the block autocast does not cache cast weights: the cache, with their graph, lives until the model's own autocast ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def no_warning_of_checkpoints() -> Iterator[None]:
    """Within the block ``torch.utils.checkpoint`` does not warn that no input needs a gradient: no gradient is computed.

    ``warnings.catch_warnings`` is not used: it makes Python forget which warnings of the program were shown before.
    """
    own: Any = ("ignore", re.compile("None of the inputs have requires_grad=True"), UserWarning, None, 0)
    filters: Any = warnings.filters  # declared as a sequence
    filters.insert(0, own)
    try:
        yield
    finally:
        if own in filters:
            filters.remove(own)


def saving_nothing() -> saved_tensors_hooks:
    """Within the block no tensor is saved for a backward pass, which then cannot be run."""

    def not_saved(_nothing: None) -> Tensor:
        raise RuntimeError("no tensors are kept for a backward pass")

    return saved_tensors_hooks(lambda _tensor: None, not_saved)


def drop_graphs(module: nn.Module) -> None:
    """Detach the tensors that a run has left in attributes of a module and its parts: they keep its graph alive."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in OF_TORCH and type(value) not in _PLAIN:
                with suppress(Exception):  # a value that contains itself
                    if any(tensor.grad_fn is not None for _path, tensor in named_tensors(value)):
                        vars(part)[name] = with_tensors(value, Tensor.detach)
