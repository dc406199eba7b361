"""What is checked of a file before anything in it is read: it may be damaged, or come from a stranger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.record import EDGES, LABELS
from lightning_module_monitor.sinks.store import findings, layout

_MAX_COMPRESSION = 1032
"""What deflate, the one filter that the store uses, compresses by at most (zlib's own figure)."""


def inspect(file: h5py.File, path: Path) -> None:
    """Check that a file holds all of its data itself, and that its parts fit each other.

    HDF5 follows what points out of a file: to any file of the machine, whose content would be exported as if it were recorded.

    Args:
        file: The file.
        path: Where it is.

    Raises:
        ConfigError: If data is elsewhere.
        ValueError: If a part is not as the store writes it.
    """
    # h5py's visitors stop at the first result that is not None, and do not stand an exception.
    outside = file.visititems_links(lambda name, link: None if isinstance(link, h5py.HardLink) else name)
    outside = outside or file.visititems(lambda name, item: name if _is_kept_elsewhere(item) else None)
    if outside:
        message = f"{str(path)!r} has data outside of itself, at {outside!r}. A store holds all of its data; do not trust this file."
        raise ConfigError(message)
    names: list[str] = []
    file.visit(names.append)
    num_bytes = path.stat().st_size
    for name in names:
        name.encode()  # a name that is no text fails here
        if isinstance(file[name], h5py.Dataset):
            _check_size(name, file[name], num_bytes)
    layout.read_attributes(file)
    for group, columns in layout.read_all_columns(file).items():
        _check_table(file[group], columns, layout.has_histograms(group))
    for group in ("/", *layout.superseded_groups(file)):
        findings.read(file[group])


def _is_kept_elsewhere(item: object) -> bool:
    return isinstance(item, h5py.Dataset) and bool(item.external or item.is_virtual)


def _check_size(name: str, dataset: h5py.Dataset, num_bytes: int) -> None:
    """Check that a dataset is no larger than the file can hold: memory is asked for by its shape."""
    size = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    if size > num_bytes * (_MAX_COMPRESSION if dataset.compression else 1):
        message = f"{name!r} has the shape {dataset.shape}, of {size} bytes; the file has {num_bytes}"
        raise ValueError(message)


def _check_table(group: h5py.Group, columns: list[str], has_histograms: bool) -> None:
    values, steps = group["values"], group["steps"]
    shape = (len(columns), len(LABELS)) if has_histograms else (len(columns),)
    dtype = np.int64 if has_histograms else np.float64
    expected: Mapping[str, bool] = {
        "columns": len(columns) > 0,
        "values": values.shape[1:] == shape and values.dtype == dtype,
        "steps": steps.ndim == 1 and steps.dtype == np.int64,
        "edges": not has_histograms or np.array_equal(values.attrs["edges"], EDGES),
    }
    for name, is_as_expected in expected.items():
        if not is_as_expected:
            message = f"{name!r} of {group.name!r} is not as the store writes it"
            raise ValueError(message)
