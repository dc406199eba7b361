"""Rows that are brought up to date tensor by tensor, by the compiled kernel: for tensors in a CPU's memory.

Nothing is buffered, and no operation is dispatched: a tensor costs one call, which reads it once.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.statistics import dlpack
from lightning_module_monitor.statistics.moments import Moments, Need

NUM_FIELDS = len(Moments._fields)
ROW_BYTES = 8 * NUM_FIELDS
FIRST_CAPACITY = 256
ELEMENT_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernel's number of every dtype that it reads, for moments and histograms."""
FLOAT32 = frozenset({torch.float32})
"""The dtype that all kernels read."""
PLAIN = (Tensor, nn.Parameter)
"""The types whose storage is where their elements are."""

_messages = logging.getLogger(__name__)


@functools.cache
def kernel() -> ModuleType | None:
    """The compiled kernel; ``None`` where numba is not installed, or does not work."""
    try:
        with _quiet(logging.getLogger("numba")):
            from lightning_module_monitor.statistics import compiled
    except Exception as error:
        # Not installed, which is all right; or no place for its cache, a numpy or a processor that it does not know.
        if not (isinstance(error, ModuleNotFoundError) and error.name in ("numba", "llvmlite")):
            _messages.warning("The compiled kernel is not used (%s: %s); monitoring costs more without it.", type(error).__name__, error)
        return None
    return compiled


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Numba tells each step of its compiler to a program whose root logger wants everything; unless it was asked to, it does not."""
    level = logger.level
    if level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def _compiled(name: str) -> ModuleType | None:
    """One of the further files of machine code, where :func:`kernel` works."""
    return None if kernel() is None else importlib.import_module(f"{__package__}.compiled_{name}")


compiled_histogram = functools.partial(_compiled, "histogram")
"""The compiled kernel of histograms."""
compiled_magnitude = functools.partial(_compiled, "magnitude")
"""That of largest magnitudes."""


def readable_address(tensor: object, dtypes: Container[torch.dtype] = FLOAT32) -> int:
    """Where the elements begin of what a kernel can read where it lies: a tensor of elements, at least one, in order in a CPU's memory.

    This is what nearly every tensor is, and one quick look tells: its dispatch keys are those of a plain one, which nothing has
    that is sparse, nested, negated by a flag, without memory, of another device, or wrapped by a transform of torch.func.

    Args:
        tensor: Anything.
        dtypes: Those that the kernel reads.

    Returns:
        0 if it is something else.
    """
    if type(tensor) not in PLAIN or not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        return 0
    if torch._C._dispatch_keys(tensor).raw_repr() not in _PLAIN_KEYS or not tensor.is_contiguous():
        return 0
    if torch._C._get_tracing_state() is not None or kernel() is None:
        return 0
    size, storage = tensor.numel(), tensor.untyped_storage()
    # A program that streams weights may have given the memory back, or a part of it; reading on would end the process.
    if not size or (tensor.storage_offset() + size) * tensor.itemsize > storage.nbytes():
        return 0
    return address(tensor)


def may_be_readable(tensor: object) -> bool:
    """Whether anything is a plain tensor of a CPU, and the kernel is there."""
    return isinstance(tensor, Tensor) and type(tensor) in PLAIN and tensor.is_cpu and kernel() is not None


def num_features(tensor: Tensor, needs: int) -> int:
    """Size of the last dimension, where it matters to what is needed; else 1."""
    return tensor.shape[-1] if needs & Need.TOKENS and tensor.dim() else 1


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, to be read by operations of torch, which would end the process where a program has given its memory back.

    Raises:
        ValueError: If not all of its elements lie in its storage: a program that streams weights may have shrunk it.
    """
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    if is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not _has_memory(tensor):
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


def _has_memory(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not tensor.numel() or (tensor.storage_offset() + last) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _plain_keys() -> frozenset[int]:
    """The dispatch keys of plain tensors on the CPU."""
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    return frozenset(torch._C._dispatch_keys(tensor).raw_repr() for tensor in (torch.empty(0, device="cpu"), inference))


_PLAIN_KEYS = _plain_keys()


def takes(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be read here: real memory of a CPU, in a precision that float64 sums are exact for.

    Those of one without a :func:`readable_address` are put :func:`in_order` for it.
    """
    # A subclass, or what a transform of torch.func wraps, may hold its elements elsewhere; while torch.jit traces, sizes are no
    # numbers; a float64's square may leave float64.
    return (
        tensor.is_cpu
        and tensor.dtype in ELEMENT_FORMATS
        and type(tensor) in PLAIN
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch._C._get_tracing_state() is None
        and kernel() is not None
    )


def _kernel() -> ModuleType:
    compiled = kernel()
    assert compiled is not None
    return compiled


class RunningRows:
    """Moments of numbered rows, up to date at any time.

    Takes the same calls as :class:`~lightning_module_monitor.statistics.lanes.Lanes`, for tensors that :func:`takes` is
    true of.

    Args:
        num_rows: How many there will be, as far as is known.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self._hold(_identity(max(num_rows, FIRST_CAPACITY)), np.empty(NUM_FIELDS))

    def _hold(self, rows: np.ndarray, latest: np.ndarray) -> None:
        compiled = _kernel()
        self._rows, self._capacity = rows, len(rows)
        self._latest = latest
        """Moments of the tensor that was added last."""
        # Numbers, which the kernel is called with more quickly than with arrays.
        self._latest_address, self._rows_address = latest.ctypes.data, rows.ctypes.data
        self._add, self._take, self._merge = compiled.add, compiled.take, compiled.merge
        self._can_look = dlpack.description_function() != 0
        """Whether the kernel can look at a tensor itself."""
        tools = [dlpack.description_function(), dlpack.error_clearing_function(), self._rows_address, self._latest_address]
        self._desk = np.array(tools + [0] * (compiled.NUM_WORDS - len(tools)), dtype=np.int64)
        """What it needs for that."""
        self._desk_address = self._desk.ctypes.data

    def __getstate__(self) -> tuple[np.ndarray, np.ndarray]:
        return self._rows, self._latest

    def __setstate__(self, state: tuple[np.ndarray, np.ndarray]) -> None:
        self._hold(*state)

    def clear(self) -> None:
        """Make all rows the moments of empty tensors again."""
        self._rows[:] = _NOTHING

    def add(self, row: int, tensor: Tensor, needs: int) -> None:
        """Merge all elements of a tensor, which has at least one, into a row."""
        ordered = tensor if readable_address(tensor, ELEMENT_FORMATS) else in_order(tensor)
        self.add_at(row, address(ordered), ELEMENT_FORMATS[tensor.dtype], tensor.numel(), num_features(tensor, needs), needs)

    def take(self, row: int, tensor: object, needs: int) -> bool:
        """A quicker :meth:`add`, of anything: whether it is a tensor that can be read where it lies, and was added."""
        if not self._can_look:
            return self._take_slowly(row, tensor, needs)
        # What the kernel cannot see: whether there are other elements than there seem to be.
        if not isinstance(tensor, Tensor) or type(tensor) not in PLAIN or tensor.is_neg():
            return False
        if row >= self._capacity:
            self._grow(row)
        try:
            offset, storage_bytes = tensor.storage_offset(), tensor.untyped_storage().nbytes()
        except RuntimeError:
            return False  # it is sparse, or wrapped by a transform of torch.func
        return bool(self._take(id(tensor), offset, storage_bytes, needs, row, self._desk_address))

    def reserve(self, num_rows: int) -> None:
        """Have as many rows at least."""
        if num_rows > self._capacity:
            self._grow(num_rows - 1)

    def take_all(self, rows: np.ndarray, tensors: Sequence[object], needs: np.ndarray) -> list[int]:
        """:meth:`take` of many things at once, each for a row of its own.

        Args:
            rows: Numbers of the rows, int64, all below what was last given to :meth:`reserve`.
            tensors: As many things.
            needs: What is needed of each, int64.

        Returns:
            Of each whether it was added, 0 or 1. Where one is not plain, or has no place in memory, none is.
        """
        none = [0] * len(tensors)
        # By functions of C alone, as much as that can be: it is what takes time.
        if not self._can_look or not len(rows) or not set(map(type, tensors)).issubset(PLAIN):
            return none
        plain = cast("Sequence[Tensor]", tensors)
        try:
            offsets, sizes = [*map(Tensor.storage_offset, plain)], [storage.nbytes() for storage in map(Tensor.untyped_storage, plain)]
        except RuntimeError:
            return none
        if any(map(Tensor.is_neg, plain)):
            return none
        taken = np.zeros(len(plain), dtype=np.int64)
        _kernel().take_all(np.array([[*map(id, plain)], offsets, sizes], dtype=np.int64), needs, rows, taken, self._desk_address)
        found: list[int] = taken.tolist()
        return found

    def _take_slowly(self, row: int, tensor: object, needs: int) -> bool:
        place = readable_address(tensor, ELEMENT_FORMATS)
        if not place:
            return False
        assert isinstance(tensor, Tensor)
        self.add_at(row, place, ELEMENT_FORMATS[tensor.dtype], tensor.numel(), num_features(tensor, needs), needs)
        return True

    def add_at(  # noqa: PLR0917  # what the kernel is called with, and as quickly
        self, row: int, place: int, element_format: int, num_elements: int, features: int, needs: int
    ) -> None:
        """:meth:`add` of a tensor with a :func:`readable_address`."""
        if row >= self._capacity:
            self._grow(row)
        self._add(place, element_format, num_elements, features, needs, self._rows_address + row * ROW_BYTES, self._latest_address)

    def add_last_again(self, row: int) -> None:
        """Merge the tensor that was added last into one more row, which has the same needs."""
        if row >= self._capacity:
            self._grow(row)
        self._merge(self._latest_address, self._rows_address + row * ROW_BYTES)

    def add_all(self, rows: Iterable[tuple[int, Tensor, int]]) -> None:
        """Like :meth:`add` for many tensors that exist at the same time."""
        for row, tensor, needs in rows:
            self.add(row, tensor, needs)

    def moments(self, num_rows: int) -> Tensor:
        """The first ``num_rows`` rows, shape ``(NUM_FIELDS, num_rows)``; one that nothing was added to has moments of an empty tensor."""
        self.reserve(num_rows)
        return torch.from_numpy(self._rows[:num_rows].T.copy())

    def _grow(self, row: int) -> None:
        self._hold(np.concatenate([self._rows, _identity(max(self._capacity, row + 1 - self._capacity))]), self._latest)


def address(tensor: Tensor | None) -> int:
    """Where the elements begin, to be read; 0 for nothing."""
    if tensor is None:
        return 0
    # Of a part of a storage, versions of torch may not agree what the first of the two functions means.
    return tensor.data_ptr() if tensor.storage_offset() else _address_to_read(tensor)


_address_to_read: Callable[[Tensor], int] = getattr(torch._C, "_data_address", Tensor.data_ptr)
"""``Tensor.data_ptr`` is for whoever may write: it copies a tensor that shares its memory until then. The other is private to torch."""


def _identity(num_rows: int) -> np.ndarray:
    """Moments of empty tensors, shape ``(num_rows, NUM_FIELDS)``, float64."""
    return np.tile(_NOTHING, (num_rows, 1))


# Made once, here: what is made within a transform of torch.func has no memory that numpy could read.
_NOTHING = np.array([float(field) for field in Moments.of_nothing(1)])


def in_order(tensor: Tensor) -> Tensor:
    """A copy whose elements lie in memory one after the other, of a tensor that :func:`takes` is true of.

    What a flag negates is negated in it, and zeros without memory have some.

    Raises:
        ValueError: If torch gives a copy that cannot be read, as a dispatch mode may.
    """
    ordered = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not readable_address(ordered, ELEMENT_FORMATS):
        raise ValueError("operations on it return no plain tensor, and its elements cannot be read")
    return ordered
