"""The raw tensors of a file: the path of each, and what the file has."""

from __future__ import annotations

from typing import NamedTuple

import h5py

from lightning_module_monitor.sinks.store import schema

_CALL = ".call_"


class StoredTensor(NamedTuple):
    """Description of a raw tensor in a file."""

    kind: str
    site: str
    step: int
    call: int
    """As in :class:`~lightning_module_monitor.record.RawTensor`."""
    dtype: str
    """Name in torch, such as ``bfloat16``."""
    shape: tuple[int, ...]


def tensor_path(kind: str, site: str, step: int, call: int) -> str:
    """Path of a tensor in the file."""
    return f"{kind}/{site}/{step}" + (f"{_CALL}{call}" if call else "")


def step_of(path: str) -> int:
    """The step of a tensor."""
    return int(path.rpartition("/")[2].partition(_CALL)[0])


def read_tensors(file: h5py.File) -> list[StoredTensor]:
    """The tensors of a file, in the order in which they were captured."""
    tensors = {}
    for path, dataset in schema.datasets(file):
        if not schema.is_superseded(path):
            kind, _, rest = path.partition("/")
            site, _, last = rest.rpartition("/")
            call = int(last.partition(_CALL)[2] or 0)
            stored = StoredTensor(kind, site, step_of(path), call, schema.text_of(dataset.attrs["dtype"]), dataset.shape)
            tensors[stored] = int(dataset.attrs["index"])
    return sorted(tensors, key=lambda stored: (stored.step, tensors[stored]))
