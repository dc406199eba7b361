"""Tensors as kernels can read them (no subclass, no wrapper of a transform, dense, with memory), and their transfer to the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
"""Types whose elements lie in their storage."""


def plain(tensor: Tensor) -> Tensor:
    """The tensor without a subclass such as one for metadata, whose ``__torch_function__`` would run in every operation.

    Args:
        tensor: Any tensor. A subclass with ``__torch_dispatch__`` and a lazy parameter are returned unchanged.

    Returns:
        A tensor with the same elements; a new one has no graph.
    """
    kind = type(tensor)
    if kind in PLAIN or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
        return tensor
    with torch.no_grad():
        return Tensor.as_subclass(tensor, Tensor)  # not the method, which a subclass may override


def in_memory(tensor: Tensor) -> Tensor:
    """The :func:`plain` tensor after a check of its memory: torch operations on a storage that was shrunk crash the process.

    Raises:
        ValueError: If not all elements lie in the storage.
    """
    if type(tensor) not in PLAIN:
        tensor = plain(tensor)
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    if is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not has_memory(tensor):
        raise ValueError("its memory was given back")
    return tensor


def own_elements(tensor: Tensor) -> Tensor:
    """The tensor, or the plain tensor that a wrapper (a subclass with ``__torch_dispatch__``, a functional tensor) computes.

    Raises:
        ValueError: If operations on it return no plain tensor.
    """
    if _is_plain(tensor):
        return tensor
    result = tensor.detach() * 1  # exact, also for signs of zeros, infinities and NaN
    if not _is_plain(result):
        raise ValueError(f"operations on a {type(tensor).__name__} return no plain tensor, and its elements cannot be read")
    return result


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not torch._is_functional_tensor(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements of a plain tensor lie in its storage, which a program that streams weights may have shrunk."""
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last) * tensor.itemsize <= tensor.untyped_storage().nbytes() or not tensor.numel()


def strided(tensor: Tensor) -> Tensor:
    """The tensor as a dense one: a sparse tensor with its zeros, or the elements of all parts of a nested tensor.

    Raises:
        ValueError: If it has no data, or its elements cannot be read.
    """
    tensor = plain(tensor)
    if tensor.is_meta:
        raise ValueError("it is on the meta device, and has no data")
    if tensor.is_nested:
        return torch.cat([part.flatten(0, -2) if part.dim() > 1 else part for part in tensor.unbind()])
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    return in_memory(own_elements(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """The :func:`plain` tensor inside the wrappers of functorch transforms, which it outlives.

    Returns:
        The tensor itself if it is not wrapped. Under ``vmap`` the tensor of all samples, shape ``(samples, ...)`` for each ``vmap``,
        the outermost first.
    """
    if type(tensor) is not Tensor:
        tensor = plain(tensor)
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        inside: Tensor = functorch.get_unwrapped(tensor)
        tensor = inside.movedim(functorch.maybe_get_bdim(tensor), 0) if functorch.is_batchedtensor(tensor) else inside
    return tensor


def to_host(shares: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copy the results of a step to the host, by one transfer per device.

    Args:
        shares: As :meth:`~lightning_module_monitor.kernels.table.MomentTable.collect` returns them.
        others: Float64 tensors of any shape, on any device.

    Returns:
        The shares, and the elements of all others in order, shape ``(elements,)``, float64, on the CPU.
    """
    if len(shares) == 1 and not others:
        # The usual case, a tenth of a millisecond faster.
        return [transfer(shares[0])], torch.empty(0, dtype=torch.float64, device="cpu")
    flat = [tensor.reshape(-1) for tensor in (*shares, *others)]
    indices_by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(flat):
        indices_by_device[tensor.device].append(index)
    for indices in indices_by_device.values():
        parcel = flat[indices[0]] if len(indices) == 1 else torch.cat([flat[index] for index in indices])
        for index, values in zip(indices, transfer(parcel).split([flat[index].numel() for index in indices]), strict=True):
            flat[index] = values
    moments = [values.view(share.shape) for values, share in zip(flat, shares, strict=False)]
    return moments, torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *flat[len(shares) :]])


def parts_of(array: NDArray[np.float64]) -> Callable[[int], NDArray[np.float64]]:
    """Returns the next elements of an array, as many as it is asked for."""
    start = 0

    def following(num: int) -> NDArray[np.float64]:
        nonlocal start
        start += num
        return array[start - num : start]

    return following


def transfer(tensor: Tensor) -> Tensor:
    """Copy the results of a step to the host. Tests count the calls."""
    return tensor if is_on_host(tensor) else tensor.to("cpu")


def is_on_host(tensor: Tensor) -> bool:
    """Whether a value is read without a transfer."""
    return tensor.is_cpu


def in_words(value: object) -> str:
    """Type or shape of a value for messages; not every kind of tensor has a shape."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    try:
        return f"tensor of shape {tuple(value.shape)}"
    except RuntimeError:
        return f"a {type(value).__name__} without a shape"
