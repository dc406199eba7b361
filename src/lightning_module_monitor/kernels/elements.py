"""Tensors as kernels can read them (no subclass, dense, with memory), and their transfer to the host."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Sequence

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
    if is_plain and not has_memory(tensor, tensor.untyped_storage()):
        raise ValueError("its memory was given back")
    return tensor


def own_elements(tensor: Tensor) -> Tensor:
    """The tensor, or the plain tensor that a subclass with ``__torch_dispatch__`` stands for.

    Returns:
        What the subclass's own ``dequantize`` returns, as torchao's have one, or else the tensor times 1.

    Raises:
        ValueError: If neither is a plain tensor.
    """
    if _is_plain(tensor):
        return tensor
    kind = type(tensor)
    if kind.dequantize is not Tensor.dequantize and not isinstance(inspect.getattr_static(kind, "dequantize"), staticmethod):
        result = tensor.dequantize().detach()
    else:
        result = tensor.detach() * 1  # exact, also for signs of zeros, infinities and NaN
    if not _is_plain(result):
        raise ValueError(f"operations on a {type(tensor).__name__} return no plain tensor, and its elements cannot be read")
    return result


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def has_memory(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether all elements of a plain tensor lie in its storage, which a program that streams weights may have shrunk."""
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last) * tensor.itemsize <= storage.nbytes() or not tensor.numel()


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


WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes that need no conversion before a computation."""


def widened(tensor: Tensor) -> Tensor:
    """A tensor of a narrower dtype in float32 or complex64; any other tensor unchanged."""
    if tensor.dtype in WIDE:
        return tensor
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)


def to_host(tensors: Sequence[Tensor]) -> list[NDArray[np.float64]]:
    """Copy the results of a step to the host, by one transfer per device: in their order and shapes, float64."""
    arrived: list[NDArray[np.float64]] = [np.empty(0)] * len(tensors)
    alike: defaultdict[torch.device, defaultdict[torch.dtype, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, tensor in enumerate(tensors):
        alike[tensor.device][tensor.dtype].append(index)
    for indices_by_dtype in alike.values():
        # First those of one dtype: a concatenation of several dtypes casts each of its tensors by itself.
        parcels = [_concatenated([tensors[index] for index in indices]) for indices in indices_by_dtype.values()]
        values = transfer(_concatenated(parcels)).double().numpy().reshape(-1)
        start = 0
        for index in itertools.chain(*indices_by_dtype.values()):  # by numpy: each operation of torch counts at the end of a step
            end = start + tensors[index].numel()
            arrived[index] = values[start:end].reshape(tensors[index].shape)
            start = end
    return arrived


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors, in order; a single tensor unchanged."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def transfer(tensor: Tensor) -> Tensor:
    """Copy the results of a step to the host. Tests count the calls."""
    return tensor if is_on_host(tensor) else tensor.to("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device. The host does not wait; torch keeps the pinned memory until it has been read."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is read without a transfer."""
    return tensor.is_cpu


def in_words(value: object) -> str:
    """Type or shape of a value for messages; not every kind of tensor has a shape."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    try:
        return f"tensor of shape {tuple(value.shape)}"
    except RuntimeError:
        return f"a {type(value).__name__} without a shape"
