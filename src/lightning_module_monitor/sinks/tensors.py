"""Raw tensors in a file of their own, beside the store: appended to while training, whole after a kill, as the store is.

``data`` has the bytes of all tensors, one after the other, each in C order and little-endian. ``tensors`` has a row for each: what it is,
where its bytes are, its dtype as torch calls it, its shape. A row counts once it names its kind: bytes that no row points to, which a kill
or a Ctrl-C left, are no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import MAX_SITE_LENGTH, MAX_STATISTIC_LENGTH, RawTensor, Record
from lightning_module_monitor.sinks import layout, writer

if TYPE_CHECKING:  # who reads numbers only does without torch
    from torch import Tensor

_MAX_DIMENSIONS = 64  # torch's own limit
_ROW = np.dtype(
    [
        ("kind", f"S{MAX_STATISTIC_LENGTH}"),
        ("site", f"S{MAX_SITE_LENGTH}"),
        ("step", "<i8"),
        ("call", "<i8"),
        ("start", "<i8"),
        ("num_bytes", "<i8"),
        ("dtype", "S24"),
        ("num_dimensions", "<i8"),
        ("shape", "<i8", (_MAX_DIMENSIONS,)),
    ]
)
_ROWS_PER_CHUNK = 64
_BYTES_PER_CHUNK = 1 << 18
_BYTES_PER_COPY = 1 << 26


class StoredTensor(NamedTuple):
    """What a file says of one of its tensors."""

    kind: str
    site: str
    step: int
    call: int
    """As in :class:`~lightning_module_monitor.record.RawTensor`."""
    dtype: str
    """As torch calls it: ``bfloat16``."""
    shape: tuple[int, ...]
    start: int
    """Index of its first byte in ``data``."""
    num_bytes: int


class TensorStore(writer.Writer):
    """Writes the raw tensors of the records of one run; read them with ``load_store(path).tensor``.

    Arguments are those of :class:`~lightning_module_monitor.sinks.writer.Writer`. In a resumed run, tensors of steps that are run again are
    taken out with its first record, whether that has tensors or not.
    """

    _is_first = True
    _num_rows = 0
    _num_bytes = 0

    def _concerns(self, record: Record) -> bool:
        is_first, self._is_first = self._is_first, False
        return bool(record.tensors) or (is_first and self._has_steps_that_run_again())

    def _has_steps_that_run_again(self) -> bool:
        if self._resume_from is None or not self.path.exists():
            return False
        try:
            with layout.open_store(self.path) as file:
                return any(stored.step >= self._resume_from for stored in read_tensors(file))
        except Exception:  # what is wrong with it is said when there are tensors to write
            return False

    def _create_content(self, file: h5py.File, record: Record) -> None:
        _create_datasets(file)

    def _rewrite(self, source: h5py.File, target: Path, attributes: layout.Attributes | None = None, record: Record | None = None) -> None:
        rewrite(source, target, attributes, None if record is None else self._resume_from)

    def _adopt(self, file: h5py.File) -> None:
        self._file = file
        stored = read_tensors(file)
        self._num_rows, self._num_bytes = len(stored), max((one.start + one.num_bytes for one in stored), default=0)

    def _append(self, record: Record) -> None:
        if not record.tensors:
            return
        assert self._file is not None
        writer.require_space(self.path.parent, sum(_size(raw.value) for raw in record.tensors) + len(record.tensors) * _ROW.itemsize)
        rows, end = [], self._num_bytes
        for raw in record.tensors:
            data = _to_bytes(raw.value)
            _write(self._file["data"], end, data)
            rows.append(_described(raw, record.step, end, len(data)))
            end += len(data)
        # The rows last, for what is named there is read. Those of a step come all at once.
        self._file.flush()
        _write(self._file["tensors"], self._num_rows, _as_rows(rows))
        self._file.flush()
        self._num_rows, self._num_bytes = self._num_rows + len(rows), end


def read_tensors(file: h5py.File) -> list[StoredTensor]:
    """What is in a file, in the order in which it was written."""
    return [_parsed(row) for row in file["tensors"][...] if row["kind"]]


def read_tensor(file: h5py.File, stored: StoredTensor) -> Tensor:
    """One tensor of a file, on the CPU, bit for bit as it was."""
    import torch

    value = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if stored.num_bytes:
        file["data"].read_direct(_to_bytes(value), np.s_[stored.start : stored.start + stored.num_bytes])
    return value


def rewrite(source: h5py.File, target: Path, attributes: layout.Attributes | None = None, before_step: int | None = None) -> None:
    """Copy a file of tensors into a new, plain one at ``target``: the one way to repair and to cut.

    Args:
        source: The file, open in any mode.
        target: Path of the copy; not the source's own.
        attributes: Replaces the source's own.
        before_step: Only tensors of earlier steps are copied.
    """
    kept = [stored for stored in read_tensors(source) if before_step is None or stored.step < before_step]
    with layout.new_file(target, attributes or layout.read_attributes(source)) as copy:
        _create_datasets(copy)
        moved, end = [], 0
        for stored in kept:
            for first in range(0, stored.num_bytes, _BYTES_PER_COPY):
                last = min(first + _BYTES_PER_COPY, stored.num_bytes)
                _write(copy["data"], end + first, source["data"][stored.start + first : stored.start + last])
            moved.append(stored._replace(start=end))
            end += stored.num_bytes
        _write(copy["tensors"], 0, _as_rows(moved))


def _create_datasets(file: h5py.File) -> None:
    # Not compressed: a chunk that is compressed again as it fills would move while others read it. And noise does not shrink.
    file.create_dataset("data", (0,), "u1", maxshape=(None,), chunks=(_BYTES_PER_CHUNK,))
    file.create_dataset("tensors", (0,), _ROW, maxshape=(None,), chunks=(_ROWS_PER_CHUNK,))


def _write(dataset: h5py.Dataset, start: int, items: NDArray[np.generic]) -> None:
    if len(items):
        dataset.resize(max(len(dataset), start + len(items)), axis=0)
        dataset[start : start + len(items)] = items


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _to_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The elements of a tensor on the CPU in C order, shape ``(bytes,)``; of a plain one its own memory."""
    import torch

    data: NDArray[np.uint8] = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _described(raw: RawTensor, step: int, start: int, num_bytes: int) -> StoredTensor:
    dtype = str(raw.value.dtype).removeprefix("torch.")
    return StoredTensor(raw.kind, raw.site, step, raw.call, dtype, tuple(raw.value.shape), start, num_bytes)


def _as_rows(tensors: Iterable[StoredTensor]) -> NDArray[np.void]:
    return np.array(
        [
            (
                *(one.kind.encode(), one.site.encode(), one.step, one.call, one.start, one.num_bytes, one.dtype.encode()),
                *(len(one.shape), one.shape + (0,) * (_MAX_DIMENSIONS - len(one.shape))),
            )
            for one in tensors
        ],
        dtype=_ROW,
    )


def _parsed(row: np.void) -> StoredTensor:
    return StoredTensor(
        kind=row["kind"].decode(),
        site=row["site"].decode(),
        step=int(row["step"]),
        call=int(row["call"]),
        dtype=row["dtype"].decode(),
        shape=tuple(row["shape"][: row["num_dimensions"]].tolist()),
        start=int(row["start"]),
        num_bytes=int(row["num_bytes"]),
    )
