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
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import EDGES, LABELS
from lightning_module_monitor.record import Facts, Finding, Key, ModuleInfo

FORMAT_VERSION = 1
"""Increase it with each change that a reader must handle."""

ABSENT_BITS = 0x7FF8_6162_7365_6E74
"""A quiet NaN that spells "absent": a value that was never recorded, unlike a recorded NaN."""

ABSENT: float = np.uint64(ABSENT_BITS).view(np.float64)

NOT_COUNTED = -1
"""Every count of a histogram that was never recorded."""

SITELESS = "logged"
"""Group of keys without a kind, such as ``loss``."""

HISTOGRAMS = "histograms"
SUPERSEDED = "superseded"
FINDINGS = "findings"
FACTS = "facts"
MODULES = "module table"
LAST_RECORD = "last record"
"""Names with a space, unlike any kind."""

_RESERVED = {"", ".", SITELESS, HISTOGRAMS, SUPERSEDED, FINDINGS, FACTS, "values", "steps", "columns"}
_STEPS_PER_CHUNK = 256
_TEXTS_OF_FINDING = [("name", "S40"), ("site", "S128"), ("key", "S250"), ("severity", "S8"), ("words", "S1600"), ("cause", "S40")]
_FINDING = np.dtype([("step", "<i8"), *_TEXTS_OF_FINDING, ("steps_before", "<i8")])
_FACTS = np.dtype([("step", "<i8"), ("text", "S500")])
"""Part of the JSON of facts."""
_ROWS_PER_CHUNK = 4
_ROWS = {FINDINGS: _FINDING, FACTS: _FACTS}
"""dtype of the datasets whose rows have a step, by name."""
_TIME = np.dtype("S25")
_MODULE = np.dtype([("name", "S128"), ("type", "S80"), ("num_parameters", "<i8"), ("output_shape", "S80"), ("output_dtype", "S20")])
_CALL = ".call_"
_RAW_TENSORS = "raw tensors"

Values = NDArray[np.float64] | NDArray[np.int64]
"""Numbers, shape ``(..., columns)``; or counts, shape ``(..., columns, bins)``."""


# ------------------------------------------------------------------ keys and groups


def split(key: str) -> tuple[str, str]:
    """Group and column of a key, e.g. ``("validation/activation", "model.fc/rms")``."""
    parsed = Key.parse(key)
    column = f"{parsed.site}/{parsed.statistic}" if parsed.site else parsed.statistic
    if column == key:
        return SITELESS, column
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
    if group == SITELESS:
        return column
    parts = (part[:-1] if part.rstrip("_") in _RESERVED else part for part in group.split("/"))
    return "/".join((*parts, column))


def kind_of(group: str) -> str:
    """The kind of a group in keys, with prefix and stage: ``validation/activation``."""
    return join(group, "").removesuffix("/") or group


def has_histograms(group: str) -> bool:
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


def has_rows(name: str) -> bool:
    """Whether a dataset has findings or facts, also superseded ones."""
    return name.rpartition("/")[2] in _ROWS


# ------------------------------------------------------------------ reading


def walk(group: h5py.Group, path: str = "", visited: set[h5py.Group] | None = None) -> Iterator[tuple[str, object]]:
    """Every path below a group, in the order of names, with its object; ``None`` for a link that is not a hard link.

    Each group is entered once: a link can lead back to it. h5py's visitors replace each exception of their callback, also a
    ``KeyboardInterrupt``, by a ``SystemError``.
    """
    visited = {group} if visited is None else visited
    for name in group:
        is_inside = group.id.links.get_info(name.encode(errors="surrogateescape")).type == h5py.h5l.TYPE_HARD
        item = group[name] if is_inside else None
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


def changed_options(run: Mapping[str, Any], configuration: Mapping[str, object]) -> list[str]:
    """A text for each option with another value than in a run of ``Attributes.configurations``."""
    before, now = run["configuration"], json.loads(json.dumps(dict(configuration), default=str))
    texts = {name: [textwrap.shorten(json.dumps(options.get(name)), 100) for options in (before, now)] for name in {**before, **now}}
    return [f"{name} was {was}, is {is_now}" for name, (was, is_now) in texts.items() if before.get(name) != now.get(name)]


def read_columns(file: h5py.File, *, with_superseded: bool = False) -> dict[str, list[str]]:
    """The columns of every table in a file, also of histograms, by group."""
    return {
        name.removesuffix("/columns"): [column.decode() for column in dataset[...].tolist()]
        for name, dataset in datasets(file)
        if name.endswith("/columns") and (with_superseded or not is_superseded(name))
    }


def read_columns_of(file: h5py.File, group: str) -> list[str]:
    """The columns of one table; none if there is no such table."""
    columns = file.get(f"{group}/columns")
    return [column.decode() for column in columns[...].tolist()] if isinstance(columns, h5py.Dataset) else []


def read_steps(group: h5py.Group) -> NDArray[np.int64]:
    """The steps of the complete rows of a table, shape ``(rows,)``: a row is complete once its step is written."""
    return np.asarray(group["steps"][: len(group["values"])], np.int64)


def read_findings(group: h5py.Group) -> list[Finding]:
    """The findings in a file or in a group ``superseded``, in the order in which they were written; old files have none."""
    if FINDINGS not in group:
        return []
    # A kill can leave a row without a name.
    rows = group[FINDINGS][...]
    complete = ([value.decode() if isinstance(value, bytes) else value for value in row.tolist()] for row in rows if row["name"])
    return [Finding(**dict(zip(rows.dtype.names, values, strict=True))) for values in complete]


def read_facts(file: h5py.File) -> list[tuple[int, Facts]]:
    """The facts of training, each with the first step that they hold for; old files have none."""
    texts: dict[int, bytes] = {}
    for step, text in file[FACTS][...].tolist() if FACTS in file else ():
        texts[step] = texts.get(step, b"") + text
    facts = []
    for step, text in texts.items():
        with suppress(ValueError):  # a kill can leave an incomplete text
            facts.append((step, Facts.of_json(json.loads(text))))
    return facts


def fact_rows(step: int, facts: Facts) -> NDArray[np.void]:
    """Facts as rows of the dataset."""
    text, size = json.dumps(asdict(facts)).encode(), _FACTS["text"].itemsize
    return np.array([(step, text[first : first + size]) for first in range(0, len(text), size)], dtype=_FACTS)


def read_modules(file: h5py.File) -> list[ModuleInfo]:
    """The modules of the model, in its order; old files have none."""
    rows = [] if MODULES not in file else file[MODULES][...].tolist()
    texts = ((name.decode(), type_.decode(), size, shape.decode(), dtype.decode()) for name, type_, size, shape, dtype in rows)
    return [ModuleInfo(name, type_, size, tuple(json.loads(shape)) if shape else None, dtype) for name, type_, size, shape, dtype in texts]


def merged_modules(before: Iterable[ModuleInfo], more: Iterable[ModuleInfo]) -> list[ModuleInfo]:
    """Modules updated by later descriptions; a known output is replaced only by another."""
    by_name = {module.name: module for module in before}
    by_name |= {module.name: module for module in more if module.output_shape is not None or module.name not in by_name}
    return [*by_name.values()]


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
        if has_rows(name):
            last = name.rpartition("/")[2]
            # Not compressed: a partly filled chunk would be compressed again, and move while others read it.
            rows = file.create_dataset(name, (0,), _ROWS[last], maxshape=(None,), chunks=(_ROWS_PER_CHUNK,))
            rows.make_scale(last)  # xarray requires a dimension for each axis
        else:
            # The group may exist: "validation/activation" lies in "validation", the group of a user's "validation/loss".
            _create_table(file.require_group(name), columns, has_histograms(name))


def _create_table(group: h5py.Group, columns: Sequence[str], has_histograms: bool) -> None:
    shape = (len(columns), len(LABELS)) if has_histograms else (len(columns),)
    values = group.create_dataset(
        "values",
        (0, *shape),
        "i8" if has_histograms else "f8",
        maxshape=(None, *shape),
        chunks=(1, *shape),
        shuffle=True,
        compression="gzip",
        compression_opts=1,
        fillvalue=NOT_COUNTED if has_histograms else ABSENT,
    )
    scales = [group.create_dataset("steps", (0,), "i8", maxshape=(None,), chunks=(_STEPS_PER_CHUNK,)), _texts(group, "columns", columns)]
    if has_histograms:
        scales.append(_texts(group, "bins", LABELS))
        values.attrs["edges"] = EDGES
    for axis, scale in enumerate(scales):
        scale.make_scale(scale.name.rpartition("/")[2])
        values.dims[axis].attach_scale(scale)


def _texts(group: h5py.Group, name: str, texts: Sequence[str]) -> h5py.Dataset:
    # Of fixed length: SWMR does not support variable length.
    encoded = [text.encode() for text in texts]
    return group.create_dataset(name, data=np.array(encoded, dtype=f"S{max(1, *map(len, encoded))}"))


def finding_rows(findings: Sequence[Finding]) -> NDArray[np.void]:
    """Findings as rows of the dataset."""
    return _rows(_FINDING, map(vars, findings))


def module_rows(modules: Sequence[ModuleInfo]) -> NDArray[np.void]:
    """Modules as rows of the dataset; a shape that is too long is left out."""
    size = _MODULE["output_shape"].itemsize
    shapes = ["" if module.output_shape is None else json.dumps(module.output_shape) for module in modules]
    rows = ({**module._asdict(), "output_shape": text if len(text) <= size else ""} for module, text in zip(modules, shapes, strict=True))
    return _rows(_MODULE, rows)


def _rows(dtype: np.dtype[np.void], items: Iterable[Mapping[str, Any]]) -> NDArray[np.void]:
    """Rows of a dataset from values by field; a text that is too long is cut between characters."""
    fields = [(name, dtype[name].itemsize) for name in dtype.names or ()]
    rows = [tuple(_fitting(item[name], size) if isinstance(item[name], str) else item[name] for name, size in fields) for item in items]
    return np.array(rows, dtype=dtype)


def _fitting(text: str, size: int) -> bytes:
    data = text.encode()
    return data if len(data) <= size else data[: size - 3].decode(errors="ignore").encode() + b"..."


# ------------------------------------------------------------------ raw tensors


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


def has_tensors(file: h5py.File) -> bool:
    """Whether a file has raw tensors."""
    return bool(file.attrs.get("content") == _RAW_TENSORS)


def tensor_path(kind: str, site: str, step: int, call: int) -> str:
    """Path of a tensor in the file."""
    return f"{kind}/{site}/{step}" + (f"{_CALL}{call}" if call else "")


def step_of(path: str) -> int:
    """The step of a tensor."""
    return int(path.rpartition("/")[2].partition(_CALL)[0])


def read_tensors(file: h5py.File) -> list[StoredTensor]:
    """The tensors of a file, in the order in which they were captured."""
    tensors = {}
    for path, dataset in datasets(file):
        if not is_superseded(path):
            kind, _, rest = path.partition("/")
            site, _, last = rest.rpartition("/")
            call = int(last.partition(_CALL)[2] or 0)
            stored = StoredTensor(kind, site, step_of(path), call, dataset.attrs["dtype"], dataset.shape)
            tensors[stored] = int(dataset.attrs["index"])
    return sorted(tensors, key=lambda stored: (stored.step, tensors[stored]))
