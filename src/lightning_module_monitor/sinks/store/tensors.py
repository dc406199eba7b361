"""Raw tensors in a separate file beside the store: a dataset for each, ``/kind/site/step``, that any HDF5 program shows.

The tensors of a step are added to a copy of the file, which then replaces it. So at every moment, also after a kill, the file is closed
and has every step up to the last written step. The cost is a copy of the file for each captured step.

A dataset has the dtype and shape of the tensor. A dtype that HDF5 does not have (bfloat16, float8) is stored as unsigned integers with the
same bits. The attribute ``dtype`` is torch's name of the dtype; ``index`` counts the tensors of the step. The second call of a module in a
step is ``/kind/site/step.call_1``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.store import paths, schema
from lightning_module_monitor.sinks.store.file_writer import Entry, Writer
from lightning_module_monitor.sinks.store.read_access import open_store
from lightning_module_monitor.sinks.store.schema import Version
from lightning_module_monitor.sinks.store.successor import successor
from lightning_module_monitor.sinks.store.tensor_paths import read_tensors, tensor_path
from lightning_module_monitor.sinks.store.writer import Store

if TYPE_CHECKING:  # numbers are read without torch
    from torch import Tensor


class TensorStore(Writer):
    """Writes the raw tensors of the records of one run; read them with ``load_store(path).tensor``.

    Arguments are those of :class:`~lightning_module_monitor.sinks.store.writer.Writer`. The first record of a resumed run supersedes or
    copies the earlier run's tensors, even if the record has no tensors.
    """

    _HAS_TENSORS = True

    def _concerns(self, entry: Entry) -> bool:
        return bool(entry.record.tensors) or (self._lock is None and self._has_to_resume)

    @functools.cached_property
    def _has_to_resume(self) -> bool:
        """Whether the file of the resumed run has tensors to supersede or to copy."""
        if self._resumed is None or self._resume_from is None or not paths.has_content(self._resumed):
            return False
        try:
            with open_store(self._resumed) as content:
                stored = read_tensors(content.file)
                return any((tensor.step >= self._resume_from) is (self._resumed == self.path) for tensor in stored)
        except Exception:  # the damage is logged once there are tensors to write
            return False

    def _finish(self) -> None:
        """Do nothing: the file has every record."""

    def _append(self, entry: Entry) -> None:
        if entry.record.tensors:
            with successor(self.path, self.path) as file:
                _write(file, entry.record)

    def _fill(self, file: h5py.File, entry: Entry, version: Version) -> None:
        _write(file, entry.record)


class RunFiles(Store):
    """Writes the records of one run: values to the store, raw tensors to another file. An error of one file does not affect the other.

    Arguments are those of :class:`~lightning_module_monitor.sinks.store.writer.Store`.
    """

    def __init__(self, path: str | os.PathLike[str], *, resumed: Path | None = None, **options: Any) -> None:
        super().__init__(path, resumed=resumed, **options)
        self._tensors: TensorStore | None = None
        self._options = {name: value for name, value in options.items() if name not in ("keys", "histogram_keys")}
        self._options["resumed"] = None if resumed is None else paths.tensors_path(resumed)

    def write(self, record: Record, findings: Sequence[Finding] = (), facts: Facts | None = None) -> None:
        """Append a record, what was found with it, and the facts of its step. Never raises."""
        super().write(record, findings, facts)
        if self._tensors is None and self.has_begun:  # the store's final name is known from here on
            self._tensors = TensorStore(paths.tensors_path(self.path), **self._options)
        if self._tensors is not None:
            self._tensors.write(record)

    def close(self) -> None:
        """Close the files. Never raises; a second call does nothing."""
        super().close()
        if self._tensors is not None:
            self._tensors.close()


def _write(file: h5py.File, record: Record) -> None:
    for index, raw in enumerate(record.tensors):
        path = tensor_path(raw.kind, raw.site, record.step, raw.call)
        if path in file:  # a second record of the step replaces the first, as in the store
            del file[path]
        dataset = file.create_dataset(path, data=_to_array(raw.value))
        dataset.attrs["dtype"] = schema.fixed(str(raw.value.dtype).removeprefix("torch."))
        dataset.attrs["index"] = index


def find_tensor(file: h5py.File, path: str) -> Tensor | None:
    """A tensor of a file, on the CPU, bit for bit as it was; ``None`` if the file does not have it."""
    import torch

    dataset = file.get(path)
    if not isinstance(dataset, h5py.Dataset):
        return None
    value = torch.empty(dataset.shape, dtype=getattr(torch, schema.text_of(dataset.attrs["dtype"])))
    if value.numel():
        dataset.read_direct(_to_array(value))
    return value


def _to_array(tensor: Tensor) -> NDArray[np.generic]:
    """The elements of a tensor on the CPU; a plain tensor shares its memory."""
    import torch

    plain = tensor.resolve_conj().resolve_neg().contiguous()
    try:
        array: NDArray[np.generic] = plain.numpy()
    except TypeError:  # numpy has no such dtype
        unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[plain.element_size()]
        array = plain.view(unsigned).numpy()
    return array
