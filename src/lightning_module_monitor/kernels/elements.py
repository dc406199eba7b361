"""Whether and where a tensor has elements that can be read, and the transfer to the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
"""The types whose elements are where their storage is."""


def plain(tensor: Tensor) -> Tensor:
    """The tensor without the class that a program gave it, e.g. for metadata, whose code every operation on it would run.

    Args:
        tensor: Any tensor. One of a class with operations of its own (``__torch_dispatch__``), or without values yet, is returned as it is.

    Returns:
        A tensor with the same elements, and without a graph if it is another.
    """
    kind = type(tensor)
    if kind in PLAIN or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
        return tensor
    with torch.no_grad():
        return Tensor.as_subclass(tensor, Tensor)  # which no class can override


def in_memory(tensor: Tensor) -> Tensor:
    """The :func:`plain` tensor, to be read by operations of torch, which would end the process where a program gave its memory back.

    Raises:
        ValueError: If not all of its elements lie in its storage: a program that streams weights may have shrunk it.
    """
    if type(tensor) not in PLAIN:
        tensor = plain(tensor)
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    if is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not has_memory(tensor):
        raise ValueError("its memory was given back")
    return tensor


def own_elements(tensor: Tensor) -> Tensor:
    """The tensor itself; of one that wraps another (of a class with operations of its own, or functional), the plain one it stands for.

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
    """Whether all elements of a plain tensor lie in its storage: a program that streams weights may have shrunk it."""
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last) * tensor.itemsize <= tensor.untyped_storage().nbytes() or not tensor.numel()


def strided(tensor: Tensor) -> Tensor:
    """The tensor with the zeros that a sparse one leaves out; of a nested one the elements of all parts.

    Raises:
        ValueError: If it has no data, or no elements of its own.
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
    """The :func:`plain` tensor that functorch transforms wrap, which outlives them: of one that ``vmap`` maps over, that of all samples.

    Args:
        tensor: Any tensor; a plain one that is not wrapped is returned as it is.

    Returns:
        Shape ``(samples, ...)`` for each ``vmap``, the outermost first, then the shape that the tensor seems to have.
    """
    if type(tensor) is not Tensor:
        tensor = plain(tensor)
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        inside: Tensor = functorch.get_unwrapped(tensor)
        tensor = inside.movedim(functorch.maybe_get_bdim(tensor), 0) if functorch.is_batchedtensor(tensor) else inside
    return tensor


def to_host(shares: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copy everything that a step found to the host, with one transfer per device.

    Args:
        shares: What :meth:`MomentTable.collect` gives.
        others: Float64 tensors of any shape, on any device.

    Returns:
        The shares, and the elements of the others, one tensor after the other, as one of shape ``(elements,)``, float64, both
        on the CPU.
    """
    if len(shares) == 1 and not others:
        # As nearly always, and a tenth of a millisecond less.
        return [transfer(shares[0])], torch.empty(0, dtype=torch.float64, device="cpu")
    flat = [tensor.reshape(-1) for tensor in (*shares, *others)]
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(flat):
        by_device[tensor.device].append(index)
    arrived: dict[int, Tensor] = {}
    for indices in by_device.values():
        parcel = flat[indices[0]] if len(indices) == 1 else torch.cat([flat[index] for index in indices])
        arrived |= zip(indices, transfer(parcel).split([flat[index].numel() for index in indices]), strict=True)
    moments = [arrived[index].view(share.shape) for index, share in enumerate(shares)]
    rest = [arrived[index] for index in range(len(shares), len(flat))]
    return moments, torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *rest])


def transfer(tensor: Tensor) -> Tensor:
    """The one place where a value leaves its device."""
    return tensor if is_on_host(tensor) else tensor.to("cpu")


def is_on_host(tensor: Tensor) -> bool:
    """Whether a value is read without a transfer."""
    return tensor.is_cpu
