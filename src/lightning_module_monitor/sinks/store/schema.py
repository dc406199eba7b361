"""The schema of a run's HDF5 files, for writers, reader and copies.

The store has a group for each kind, with ``values`` (steps x columns, float64), ``steps`` (int64) and ``columns`` (``site/statistic``).
Rows and columns are added at the ends.

The histograms of a kind are a table of the same form, in the group ``histograms`` of the kind: ``values`` are steps x columns x ``bins``
(int64 counts), ``bins`` is a text for each bin, and the attribute ``edges`` has the edges of the bins.

``findings`` has a row for each finding. ``facts`` has the JSON of facts, each with the first step they hold for, in parts of 500 bytes.

``module table`` has a row for each module: its name in keys, type, number of parameters, and the shape (``[32, 64]``) and dtype of its
first output.

``last record`` is the time of the last record (ISO 8601, UTC). The attribute ``lineage`` is a random identifier of the file, and
``generation`` counts how often the run replaced it: so its journal is known, see ``journal.py``.

``superseded/1``, ``superseded/2``, ... have the rows of steps that a resumed run has repeated, in groups like those above. Readers skip
them.

A file of raw tensors has a dataset for each tensor, see ``tensors.py``; the attribute ``content`` marks it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
_NUMBERS_PER_CHUNK, _HISTOGRAMS_PER_CHUNK = (16, 512), (4, 32)
"""Rows, and the most columns."""
_FEWEST_COLUMNS = 8
_BYTES_PER_BLOCK = 1 << 22
_ROWS_PER_CHUNK = 4
_TIME = np.dtype("S25")
_RAW_TENSORS = "raw tensors"

Values = NDArray[np.float64] | NDArray[np.int64]
"""Numbers, shape ``(..., columns)``; or counts, shape ``(..., columns, bins)``."""


# ------------------------------------------------------------------ keys and groups


@functools.lru_cache(maxsize=1 << 16)
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


def is_group(name: str) -> bool:
    """Whether a name is that of a table that is not superseded."""
    group = name.removesuffix(f"/{HISTOGRAMS}")
    return group == WITHOUT_KIND or split(join(group, "site/statistic")) == (group, "site/statistic")


def order_of(group: str) -> list[str]:
    """Sorts tables as :func:`walk` finds them."""
    return f"{group}/columns".split("/")


def is_recorded(values: Values) -> NDArray[np.bool_]:
    """Which numbers, or histograms, were recorded; shape ``(..., columns)``."""
    is_histogram = values.dtype.kind == "i"
    recorded: NDArray[np.bool_] = values[..., 0] != NOT_COUNTED if is_histogram else values.view(np.uint64) != np.uint64(ABSENT_BITS)
    return recorded


def is_superseded(name: str) -> bool:
    """Whether a group or dataset has superseded rows."""
    return name.startswith(f"{SUPERSEDED}/")


def has_findings_or_facts(name: str) -> bool:
    """Whether a dataset has findings or facts, superseded ones included."""
    return name.rpartition("/")[2] in DTYPES


def empty_rows(group: str, num_rows: int, num_columns: int) -> Values:
    """Rows of a table in which nothing was recorded."""
    if is_of_histograms(group):
        return np.full((num_rows, num_columns, len(LABELS)), NOT_COUNTED, np.int64)
    return np.full((num_rows, num_columns), ABSENT)


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


def fixed(text: str) -> np.bytes_:
    """A text of fixed length. HDF5 keeps texts of variable length in a heap, and reading a damaged heap never ends."""
    encoded: np.bytes_ = np.bytes_(text.encode())
    return encoded


def text_of(value: object) -> str:
    """An attribute that is a text, of fixed or, in a file of an earlier version, of variable length; or a ``TypeError``."""
    if not isinstance(value, bytes | str):
        raise TypeError(f"an attribute is {value!r}, and not a text")
    text = value.decode() if isinstance(value, bytes) else value
    text.encode()  # fails for what is not a text
    return text


class Version(NamedTuple):
    """Identifies the file of a store."""

    lineage: str
    """Random identifier of the file; copies that begin another file have another."""
    generation: int
    """Number of its replacements."""
    run: str
    """Random identifier of the run that wrote it last."""


def read_version(file: h5py.File) -> Version:
    """The version; without a lineage for files that never had a journal."""
    lineage, run = (text_of(file.attrs.get(name, b"")) for name in ("lineage", "run"))
    return Version(lineage, int(file.attrs.get("generation", 0)), run)


def read_attributes(file: h5py.File) -> Attributes:
    """The attributes of a file, checked for their types."""
    texts = {name: text_of(file.attrs[name]) for name in ("package_version", "started", "configurations")}
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
    """The steps of the rows of a table, shape ``(rows,)``; a kill could leave a row without a step in files of earlier versions."""
    return np.asarray(group["steps"][: len(group["values"])], np.int64)


def rows_per_block(dataset: h5py.Dataset) -> int:
    """Number of rows, in whole chunks, to read or write at a time: a store can be larger than memory."""
    num_rows: int = dataset.chunks[0]
    bytes_per_row = dataset.dtype.itemsize * math.prod(dataset.shape[1:])
    num_chunks: int = max(1, _BYTES_PER_BLOCK // (num_rows * max(1, bytes_per_row)))
    return num_rows * num_chunks


# ------------------------------------------------------------------ writing


def create(file: h5py.File, *, of_tensors: bool) -> None:
    """Fill a new file with what every store, or every file of raw tensors, has."""
    file.attrs["format_version"] = FORMAT_VERSION
    if of_tensors:
        file.attrs["content"] = fixed(_RAW_TENSORS)
        return
    file.create_dataset(LAST_RECORD, data=np.bytes_(""), dtype=_TIME)
    for name in (FINDINGS, FACTS):
        create_rows(file, name)


def write_attributes(file: h5py.File, attributes: Attributes) -> None:
    """Write the attributes."""
    file.attrs["package_version"] = fixed(attributes.package_version)
    file.attrs["started"] = fixed(attributes.started)
    file.attrs["configurations"] = fixed(json.dumps(attributes.configurations, default=str))


def write_version(file: h5py.File, version: Version) -> None:
    """Write which file it is."""
    file.attrs.update({"lineage": fixed(version.lineage), "generation": version.generation, "run": fixed(version.run)})


def write_modules(file: h5py.File, modules: Sequence[ModuleInfo]) -> None:
    """Write the table of modules."""
    if modules:
        if MODULES in file:
            del file[MODULES]
        file.create_dataset(MODULES, data=module_rows(modules)).make_scale(MODULES)


def create_rows(file: h5py.File, name: str) -> h5py.Dataset:
    """Add an empty dataset for findings or facts."""
    last = name.rpartition("/")[2]
    dataset = file.create_dataset(name, (0,), DTYPES[last], maxshape=(None,), chunks=(_ROWS_PER_CHUNK,))
    dataset.make_scale(last)  # xarray requires a dimension for each axis
    return dataset


def require_table(file: h5py.File, name: str, columns: Sequence[str]) -> h5py.Group:
    """The table of this name, with these columns, of which it may have only the first ones, or be absent."""
    # The group may exist without a table: "validation/activation" lies in "validation", the group of a user's "validation/loss".
    group = file.require_group(name)
    if "values" not in group:
        _create_table(group, columns, is_of_histograms(name))
    elif len(columns) > len(group["columns"]):
        values, names = group["values"], group["columns"]
        values.resize(len(columns), axis=1)
        values.dims[1].detach_scale(names)
        del group["columns"]
        _attach(values, 1, _texts(group, "columns", columns))
    return group


def _create_table(group: h5py.Group, columns: Sequence[str], histograms: bool) -> None:
    bins = (len(LABELS),) if histograms else ()
    num_rows, most_columns = _HISTOGRAMS_PER_CHUNK if histograms else _NUMBERS_PER_CHUNK
    values = group.create_dataset(
        "values",
        (0, len(columns), *bins),
        "i8" if histograms else "f8",
        maxshape=(None, None, *bins),
        # A column of a wide table is read without the others.
        chunks=(num_rows, min(most_columns, max(len(columns), _FEWEST_COLUMNS)), *bins),
        # Most counts are zero; the bits of numbers are random, and compressing them takes twenty times as long as writing them.
        **({"shuffle": True, "compression": "gzip", "compression_opts": 1} if histograms else {}),
        fillvalue=NOT_COUNTED if histograms else ABSENT,
    )
    scales = [group.create_dataset("steps", (0,), "i8", maxshape=(None,), chunks=(_STEPS_PER_CHUNK,)), _texts(group, "columns", columns)]
    if histograms:
        scales.append(_texts(group, "bins", LABELS))
        values.attrs["edges"] = EDGES
    for axis, scale in enumerate(scales):
        _attach(values, axis, scale)


def _attach(values: h5py.Dataset, axis: int, scale: h5py.Dataset) -> None:
    scale.make_scale(scale.name.rpartition("/")[2])
    values.dims[axis].attach_scale(scale)


def _texts(group: h5py.Group, name: str, texts: Sequence[str]) -> h5py.Dataset:
    return group.create_dataset(name, data=np.array([text.encode() for text in texts], dtype=np.bytes_))


def has_tensors(file: h5py.File) -> bool:
    """Whether a file has raw tensors."""
    return file.attrs.get("content") in (_RAW_TENSORS, _RAW_TENSORS.encode())
