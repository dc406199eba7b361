"""Raw tensors in a file of their own, beside the store: a dataset each, ``/kind/site/step``, that any HDF5 program shows.

The tensors of a step are added to a copy of the file, which then replaces it. So at every moment, also after a kill, the file is closed
and holds every step up to the last one written. The price is a copy of the file for each captured step.

A dataset has the tensor's own dtype and shape. A dtype that HDF5 does not have (bfloat16, float8) is stored as unsigned integers with the
same bits. The attribute ``dtype`` is torch's name of the dtype; ``index`` is the place among the tensors of the step. The second call of a
module in a step is ``/kind/site/step.call_1``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import RawTensor, Record
from lightning_module_monitor.sinks.store import layout, lock, space, writer
from lightning_module_monitor.sinks.store.rewrite import Count

if TYPE_CHECKING:  # who reads numbers only does without torch
    from torch import Tensor

_CALL = ".call_"
_MARK = "content"
_CONTENT = "raw tensors"


class StoredTensor(NamedTuple):
    """One of the tensors of a file."""

    kind: str
    site: str
    step: int
    call: int
    """As in :class:`~lightning_module_monitor.record.RawTensor`."""
    dtype: str
    """As torch calls it: ``bfloat16``."""
    shape: tuple[int, ...]


class TensorStore(writer.Writer):
    """Writes the raw tensors of the records of one run; read them with ``load_store(path).tensor``.

    Arguments are those of :class:`~lightning_module_monitor.sinks.store.writer.Writer`. A resumed run supersedes tensors, or begins
    with a copy of them, with its first record, whether that has tensors or not.
    """

    _ITEMS = "tensors"

    def _concerns(self, record: Record) -> bool:
        return bool(record.tensors) or (self._lock is None and self._has_to_resume)

    @functools.cached_property
    def _has_to_resume(self) -> bool:
        """Whether the file of the resumed run has tensors to supersede, or to copy."""
        if self._resumed is None or self._resume_from is None or not layout.is_there(self._resumed):
            return False
        try:
            with layout.open_store(self._resumed, has_writer=lock.has_holder(self._resumed)) as file:
                return any((stored.step >= self._resume_from) is (self._resumed == self.path) for stored in read_tensors(file))
        except Exception:  # what is wrong with it is reported when there are tensors to write
            return False

    def _create_content(self, file: h5py.File, record: Record) -> None:
        file.attrs[_MARK] = _CONTENT

    def _copy(self, source: h5py.File, target: Path, attributes: layout.Attributes, record: Record, *, with_superseded: bool) -> Count:
        stored = read_tensors(source)
        kept = [_name(*one[:4]) for one in stored if self._resume_from is None or one.step < self._resume_from]
        moved = {name: name for name in kept}
        if with_superseded:
            later, cut = [name for one in stored if (name := _name(*one[:4])) not in moved], layout.next_superseded(source)
            moved |= {name: f"{cut}/{name}" for name in later} | {name: name for name in _names(source, is_superseded=True)}
        with layout.new_file(target, attributes) as copy:
            self._create_content(copy, record)
        with layout.changes(target) as copy:
            for name, new_name in moved.items():
                with space.room(copy, source[name].nbytes + _overhead(1)):
                    source.copy(name, copy, new_name)
        return Count(len(kept), len(stored) - len(kept))

    def _put_in_place(self, temporary: Path) -> None:
        layout.replace(temporary, self.path)

    def _finish(self) -> None:
        """The file is closed already."""

    def _append(self, record: Record) -> None:
        if record.tensors:
            num_bytes = sum(raw.value.numel() * raw.value.element_size() for raw in record.tensors)
            with layout.successor(self.path) as file, space.room(file, num_bytes + _overhead(len(record.tensors))):
                _add(file, record.step, record.tensors)


def has_tensors(file: h5py.File) -> bool:
    """Whether a file is one of raw tensors."""
    return bool(file.attrs.get(_MARK) == _CONTENT)


def read_tensors(file: h5py.File) -> list[StoredTensor]:
    """The tensors of a file, in the order in which they were captured."""
    found = [(_described(name, file[name]), int(file[name].attrs["index"])) for name in _names(file, is_superseded=False)]
    return [stored for stored, _index in sorted(found, key=lambda one: (one[0].step, one[1]))]


def find_tensor(file: h5py.File, kind: str, site: str, step: int, call: int) -> Tensor | None:
    """One tensor of a file, on the CPU, bit for bit as it was; ``None`` if it is not there."""
    import torch

    dataset = file.get(_name(kind, site, step, call))
    if not isinstance(dataset, h5py.Dataset):
        return None
    value = torch.empty(dataset.shape, dtype=getattr(torch, dataset.attrs["dtype"]))
    if value.numel():
        dataset.read_direct(_to_array(value))
    return value


def _names(file: h5py.File, *, is_superseded: bool) -> list[str]:
    """Of all datasets, without or with only those that are superseded."""
    names: list[str] = []

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset) and layout.is_superseded(name) is is_superseded:
            names.append(name)

    file.visititems(visit)
    return names


def _overhead(num_tensors: int) -> int:
    """What HDF5's own bookkeeping for new tensors takes at most; measured: 14 KB for one."""
    return (1 << 16) + (1 << 14) * num_tensors


def _add(file: h5py.File, step: int, tensors: Sequence[RawTensor]) -> None:
    for index, raw in enumerate(tensors):
        name = _name(raw.kind, raw.site, step, raw.call)
        if name in file:  # a second record of the step; the later one counts, as it does in the store
            del file[name]
        dataset = file.create_dataset(name, data=_to_array(raw.value))
        dataset.attrs["dtype"] = str(raw.value.dtype).removeprefix("torch.")
        dataset.attrs["index"] = index


def _to_array(tensor: Tensor) -> NDArray[np.generic]:
    """The elements of a tensor on the CPU; of a plain one its own memory."""
    import torch

    plain = tensor.resolve_conj().resolve_neg().contiguous()
    try:
        array: NDArray[np.generic] = plain.numpy()
    except TypeError:  # numpy has no such dtype
        unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[plain.element_size()]
        array = plain.view(unsigned).numpy()
    return array


def _name(kind: str, site: str, step: int, call: int) -> str:
    """Where a tensor is in the file."""
    return f"{kind}/{site}/{step}" + (f"{_CALL}{call}" if call else "")


def _described(name: str, dataset: h5py.Dataset) -> StoredTensor:
    """The inverse of :func:`_name`, with what the dataset is."""
    kind, _, rest = name.partition("/")
    site, _, last = rest.rpartition("/")
    step, _, call = last.partition(_CALL)
    return StoredTensor(kind, site, int(step), int(call or 0), dataset.attrs["dtype"], dataset.shape)
