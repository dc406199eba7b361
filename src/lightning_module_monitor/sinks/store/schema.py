"""The schema of a run's HDF5 files, for writers, reader and copies.

The store has a group for each kind, with ``values`` (steps x columns, float64), ``steps`` (int64) and ``columns`` (``site/statistic``). A
row of ``values`` is a chunk: it is compressed and written once, and never rewritten while others read.

The histograms of a kind are a table of the same form, in the group ``histograms`` of the kind: ``values`` are steps x columns x ``bins``
(int64 counts), ``bins`` is a text for each bin, and the attribute ``edges`` has the edges of the bins.

``findings`` has a row for each finding. ``facts`` has the JSON of facts, each with the first step they hold for, in parts of 500 bytes.

``module table`` has a row for each module: its name in keys, type, number of parameters, and the shape (``[32, 64]``) and dtype of its
first output. All rows exist from the start; shape and dtype are written in place once they are known.

``last record`` is the time of the last record (ISO 8601, UTC), written in place with each record.

``superseded/1``, ``superseded/2``, ... have the rows of steps that a resumed run has repeated, in groups like those above. Readers skip
them.

A file of raw tensors has a dataset for each tensor, see ``tensors.py``; the attribute ``content`` marks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import EDGES, LABELS
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import ABSENT, ABSENT_BITS, ModuleInfo
from lightning_module_monitor.sinks.store.rows import DTYPES, FACTS, FINDINGS, MODULES, module_rows

FORMAT_VERSION = 1
"""Increase it with each change that a reader must handle."""

NOT_COUNTED = -1
"""Every count of a histogram that was never recorded."""

WITHOUT_KIND = "logged"
"""Group of the keys without a kind, such as ``loss``."""

HISTOGRAMS = "histograms"
SUPERSEDED = "superseded"
LAST_RECORD = "last record"
"""Name of a dataset; no kind has a space."""

_RESERVED = {"", ".", WITHOUT_KIND, HISTOGRAMS, SUPERSEDED, FINDINGS, FACTS, "values", "steps", "columns"}
_STEPS_PER_CHUNK = 256
_ROWS_PER_CHUNK = 4
_TIME = np.dtype("S25")
_RAW_TENSORS = "raw tensors"

Values = NDArray[np.float64] | NDArray[np.int64]
"""Numbers, shape ``(..., columns)``; or counts, shape ``(..., columns, bins)``."""


# ------------------------------------------------------------------ keys and groups


def split(key: str) -> tuple[str, str]:
    """Group and column of a key, e.g. ``("validation/activation", "model.fc/rms")``."""
    parsed = Key.parse(key)
    column = f"{parsed.site}/{parsed.statistic}" if parsed.site else parsed.statistic
    if column == key:
        return WITHOUT_KIND, column
    head = key[: -len(column) - 1]
    # A reserved part gets a "_", and one more if it ends in "_"; `join` removes it.
    return "/".join(part + "_" if part.rstrip("_") in _RESERVED else part for part in head.split("/")), column


def split_histogram(key: str) -> tuple[str, str]:
    """Group and column of a histogram, e.g. ``("activation/histograms", "model.fc/hist")``."""
    group, column = split(key)
    return f"{group}/{HISTOGRAMS}", column


def join(group: str, column: str) -> str:
    """The key of a group and a column; the inverse of :func:`split` and :func:`split_histogram`."""
    group = group.removesuffix(f"/{HISTOGRAMS}")
    if group == WITHOUT_KIND:
        return column
    parts = (part[:-1] if part.rstrip("_") in _RESERVED else part for part in group.split("/"))
    return "/".join((*parts, column))


def kind_of(group: str) -> str:
    """The kind of a group in keys, with prefix and stage: ``validation/activation``."""
    return join(group, "").removesuffix("/") or group


def is_of_histograms(group: str) -> bool:
    """Whether the values of a group are the counts of histograms."""
    return group.endswith(f"/{HISTOGRAMS}")


def columns_by_group(keys: Iterable[str], histogram_keys: Iterable[str] = ()) -> dict[str, list[str]]:
    """Columns by group for these keys, in their order, each column once."""
    tables: dict[str, dict[str, None]] = {}
    for group, column in (*map(split, keys), *map(split_histogram, histogram_keys)):
        tables.setdefault(group, {})[column] = None
    return {group: list(columns) for group, columns in tables.items()}


def is_recorded(values: Values) -> NDArray[np.bool_]:
    """Which numbers, or histograms, were recorded; shape ``(..., columns)``."""
    is_histogram = values.dtype.kind == "i"
    recorded: NDArray[np.bool_] = values[..., 0] != NOT_COUNTED if is_histogram else values.view(np.uint64) != np.uint64(ABSENT_BITS)
    return recorded


def is_superseded(name: str) -> bool:
    """Whether a group or dataset has superseded rows."""
    return name.startswith(f"{SUPERSEDED}/")


def has_findings_or_facts(name: str) -> bool:
    """Whether a dataset has findings or facts, also superseded ones."""
    return name.rpartition("/")[2] in DTYPES


# ------------------------------------------------------------------ reading


def walk(group: h5py.Group, path: str = "", visited: set[h5py.Group] | None = None) -> Iterator[tuple[str, object]]:
    """Every path below a group, in the order of names, with its object; ``None`` for a link that is not a hard link.

    Each group is entered once: a link can lead back to it. h5py's visitors replace each exception of their callback, also a
    ``KeyboardInterrupt``, by a ``SystemError``.
    """
    visited = {group} if visited is None else visited
    for name in group:
        is_hard_link = group.id.links.get_info(name.encode(errors="surrogateescape")).type == h5py.h5l.TYPE_HARD
        item = group[name] if is_hard_link else None
        yield path + name, item
        if isinstance(item, h5py.Group) and item not in visited:
            visited.add(item)
            yield from walk(item, f"{path}{name}/", visited)


def datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """All datasets of a file by path, in the order of names."""
    return ((name, item) for name, item in walk(file) if isinstance(item, h5py.Dataset))


@dataclass
class Attributes:
    """The attributes of a file."""

    package_version: str
    started: str
    """ISO 8601, UTC."""

    configurations: list[dict[str, object]]
    """One ``{"started", "first_step", "configuration"}`` per run, oldest first. ``"last_record"`` is the time of its last record, which
    earlier versions did not write; ``"copied_from"`` the path of the file with the rows of earlier runs, if they were copied."""


def read_attributes(file: h5py.File) -> Attributes:
    """The attributes of a file, checked for their types."""
    texts = {name: file.attrs[name] for name in ("package_version", "started", "configurations")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name!r} is {text!r}")
        text.encode()  # fails for bytes that are not a text
    runs = json.loads(texts["configurations"])
    if not isinstance(runs, list):
        raise TypeError(f"'configurations' is {runs!r}")
    for run in runs:
        if not isinstance(run["started"], str) or not isinstance(run["first_step"], int) or not isinstance(run["configuration"], dict):
            raise TypeError(f"'configurations' has the run {run!r}")
    if LAST_RECORD in file and (last_record := file[LAST_RECORD][()].decode()):
        runs[-1]["last_record"] = last_record
    return Attributes(texts["package_version"], texts["started"], runs)


def read_columns(file: h5py.File, *, histograms: bool | None = None, with_superseded: bool = False) -> dict[str, list[str]]:
    """The columns of every table, of those of histograms, or of the others, by group."""
    groups = [name.removesuffix("/columns") for name, _dataset in datasets(file) if name.endswith("/columns")]
    return {
        group: read_columns_of(file, group)
        for group in groups
        if (with_superseded or not is_superseded(group)) and histograms in (None, is_of_histograms(group))
    }


def read_columns_of(file: h5py.File, group: str) -> list[str]:
    """The columns of one table; none if there is no such table."""
    columns = file.get(f"{group}/columns")
    return [column.decode() for column in columns[...].tolist()] if isinstance(columns, h5py.Dataset) else []


def read_steps(group: h5py.Group) -> NDArray[np.int64]:
    """The steps of the complete rows of a table, shape ``(rows,)``: a row is complete once its step is written."""
    return np.asarray(group["steps"][: len(group["values"])], np.int64)


# ------------------------------------------------------------------ writing


def create(file: h5py.File, attributes: Attributes, tables: Mapping[str, Sequence[str]] | None, modules: Sequence[ModuleInfo] = ()) -> None:
    """Fill a new file with every group and dataset: readers with SWMR do not find those that are created later.

    ``tables`` are columns by group, or ``None`` for a file of raw tensors; ``superseded/1/findings`` and ``superseded/1/facts`` are
    datasets without columns.
    """
    file.attrs["format_version"] = FORMAT_VERSION
    file.attrs["package_version"] = attributes.package_version
    file.attrs["started"] = attributes.started
    file.attrs["configurations"] = json.dumps(attributes.configurations, default=str)
    if tables is None:
        file.attrs["content"] = _RAW_TENSORS
        return
    last_record = attributes.configurations[-1].get("last_record", "") if attributes.configurations else ""
    file.create_dataset(LAST_RECORD, data=np.bytes_(str(last_record)), dtype=_TIME)
    if modules:
        file.create_dataset(MODULES, data=module_rows(modules)).make_scale(MODULES)
    for name, columns in {FINDINGS: (), FACTS: (), **tables}.items():
        if has_findings_or_facts(name):
            last = name.rpartition("/")[2]
            # Not compressed: a partly filled chunk would be compressed again, and move while others read it.
            rows = file.create_dataset(name, (0,), DTYPES[last], maxshape=(None,), chunks=(_ROWS_PER_CHUNK,))
            rows.make_scale(last)  # xarray requires a dimension for each axis
        else:
            # The group may exist: "validation/activation" lies in "validation", the group of a user's "validation/loss".
            _create_table(file.require_group(name), columns, is_of_histograms(name))


def _create_table(group: h5py.Group, columns: Sequence[str], histograms: bool) -> None:
    shape = (len(columns), len(LABELS)) if histograms else (len(columns),)
    values = group.create_dataset(
        "values",
        (0, *shape),
        "i8" if histograms else "f8",
        maxshape=(None, *shape),
        chunks=(1, *shape),
        shuffle=True,
        compression="gzip",
        compression_opts=1,
        fillvalue=NOT_COUNTED if histograms else ABSENT,
    )
    scales = [group.create_dataset("steps", (0,), "i8", maxshape=(None,), chunks=(_STEPS_PER_CHUNK,)), _texts(group, "columns", columns)]
    if histograms:
        scales.append(_texts(group, "bins", LABELS))
        values.attrs["edges"] = EDGES
    for axis, scale in enumerate(scales):
        scale.make_scale(scale.name.rpartition("/")[2])
        values.dims[axis].attach_scale(scale)


def _texts(group: h5py.Group, name: str, texts: Sequence[str]) -> h5py.Dataset:
    # Of fixed length: SWMR does not support variable length.
    encoded = [text.encode() for text in texts]
    return group.create_dataset(name, data=np.array(encoded, dtype=f"S{max(1, *map(len, encoded))}"))


def has_tensors(file: h5py.File) -> bool:
    """Whether a file has raw tensors."""
    return bool(file.attrs.get("content") == _RAW_TENSORS)
