"""The schema of a run's HDF5 files, shared by writer, reader and rewrite.

The store has one group per kind; in it ``values`` (steps x columns, float64), ``steps`` (int64) and ``columns`` (``site/statistic``). A
row of ``values`` is one chunk: it is compressed and written once, and never rewritten while others read.

The histograms of a kind are a table of the same form, in the group ``histograms`` of the kind: ``values`` are steps x columns x ``bins``
(int64 counts), ``bins`` is a text for each bin, and the attribute ``edges`` has the edges of the bins.

``findings`` has a row for each finding. ``facts`` has the JSON of what is known of the steps from one on, in parts of 500 bytes.

``module table`` has a row for each module: its name in keys, type, number of parameters, and the shape (``[32, 64]``) and dtype of what it
returned first. All rows exist from the start; shape and dtype are written in place once they are known.

``superseded/1``, ``superseded/2``, ... hold the rows that a resumed run has run again, in groups like those above. Readers skip them.

A file of raw tensors has a dataset for each tensor instead, see ``tensors.py``; the attribute ``content`` marks it.
"""

from __future__ import annotations

import json
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
"""Raise it whenever a reader has to know."""

ABSENT_BITS = 0x7FF8_6162_7365_6E74
"""A quiet NaN that spells "absent": a value that was never recorded, as opposed to a recorded NaN."""

ABSENT: float = np.uint64(ABSENT_BITS).view(np.float64)

NOT_COUNTED = -1
"""In place of the counts of a histogram that was never recorded."""

SITELESS = "logged"
"""Group of keys without a kind (one part, as a user logs ``loss``)."""

HISTOGRAMS = "histograms"
SUPERSEDED = "superseded"
FINDINGS = "findings"
FACTS = "facts"
MODULES = "module table"
"""With a space, which no kind has."""

_RESERVED = {"", ".", SITELESS, HISTOGRAMS, SUPERSEDED, FINDINGS, FACTS, "values", "steps", "columns"}
_STEPS_PER_CHUNK = 256
_TEXTS_OF_FINDING = [("name", "S40"), ("site", "S128"), ("key", "S250"), ("severity", "S8"), ("words", "S1600"), ("cause", "S40")]
_FINDING = np.dtype([("step", "<i8"), *_TEXTS_OF_FINDING, ("steps_before", "<i8")])
_FACTS = np.dtype([("step", "<i8"), ("text", "S500")])
"""A part of the JSON of a step's facts."""
_ROWS_PER_CHUNK = 4
_ROWS = {FINDINGS: _FINDING, FACTS: _FACTS}
"""Datasets whose rows have a step."""
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
    # A part that HDF5 or this schema uses itself gets a "_", one more if it ends in "_" already: undone by `join`.
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
    """The kind of a group as a user knows it, with prefix and stage: ``validation/activation``."""
    return join(group, "").removesuffix("/") or group


def has_histograms(group: str) -> bool:
    """Whether the values of a group are the counts of histograms."""
    return group.endswith(f"/{HISTOGRAMS}")


def columns_by_group(keys: Iterable[str], histogram_keys: Iterable[str] = ()) -> dict[str, list[str]]:
    """The tables that these keys need, in their order, each column once."""
    tables: dict[str, dict[str, None]] = {}
    for group, column in (*map(split, keys), *map(split_histogram, histogram_keys)):
        tables.setdefault(group, {})[column] = None
    return {group: list(columns) for group, columns in tables.items()}


def is_recorded(values: Values) -> NDArray[np.bool_]:
    """Which numbers, or histograms, were recorded; shape ``(..., columns)``."""
    recorded: NDArray[np.bool_]
    recorded = values[..., 0] != NOT_COUNTED if values.dtype.kind == "i" else values.view(np.uint64) != np.uint64(ABSENT_BITS)
    return recorded


def is_superseded(name: str) -> bool:
    """Whether a group or dataset has rows that a resumed run has superseded."""
    return name.startswith(f"{SUPERSEDED}/")


def has_rows(name: str) -> bool:
    """Whether a dataset has findings or facts: those of the file, or those that are superseded."""
    return name.rpartition("/")[2] in _ROWS


# ------------------------------------------------------------------ reading


def walk(group: h5py.Group, path: str = "", visited: set[h5py.Group] | None = None) -> Iterator[tuple[str, object]]:
    """Every path below a group, in the order of names, with the object there; ``None`` where it is no hard link.

    Each group is entered once: a link can lead back to it. The visitors of h5py would replace whatever their callback raises, also a
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
    """One ``{"started", "first_step", "configuration"}`` per run, oldest first. ``"copied_from"`` is the path of the file that the rows of
    earlier runs were copied from."""


def read_attributes(file: h5py.File) -> Attributes:
    """The attributes of a file, checked for their types."""
    texts = {name: file.attrs[name] for name in ("package_version", "started", "configurations")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name!r} is {text!r}")
        text.encode()  # fails for bytes that are no text
    runs = json.loads(texts["configurations"])
    if not isinstance(runs, list):
        raise TypeError(f"'configurations' is {runs!r}")
    for run in runs:
        if not isinstance(run["started"], str) or not isinstance(run["first_step"], int) or not isinstance(run["configuration"], dict):
            raise TypeError(f"'configurations' has the run {run!r}")
    return Attributes(texts["package_version"], texts["started"], runs)


def read_columns(file: h5py.File, *, with_superseded: bool = False) -> dict[str, list[str]]:
    """The columns of every table in a file, of numbers and of histograms, by group."""
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
    steps: NDArray[np.int64] = group["steps"][: len(group["values"])]
    return steps


def read_findings(group: h5py.Group) -> list[Finding]:
    """The findings in a file or in a group ``superseded``, in the order in which they were written; old files have none."""
    if FINDINGS not in group:
        return []
    # A row without a name was not written whole: a kill came in between.
    rows = group[FINDINGS][...]
    whole = ([value.decode() if isinstance(value, bytes) else value for value in row.tolist()] for row in rows if row["name"])
    return [Finding(**dict(zip(rows.dtype.names, values, strict=True))) for values in whole]


def read_facts(file: h5py.File) -> list[tuple[int, Facts]]:
    """The facts of training, each with the first step that they are true of; old files have none."""
    texts: dict[int, bytes] = {}
    for step, text in file[FACTS][...].tolist() if FACTS in file else ():
        texts[step] = texts.get(step, b"") + text
    found = []
    for step, text in texts.items():
        with suppress(ValueError):  # not written whole: a kill came in between
            found.append((step, Facts.of_json(json.loads(text))))
    return found


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
    """Modules updated by later descriptions; an output stays until there is another."""
    by_name = {one.name: one for one in before}
    by_name |= {one.name: one for one in more if one.output_shape is not None or one.name not in by_name}
    return [*by_name.values()]


# ------------------------------------------------------------------ writing


def create(file: h5py.File, attributes: Attributes, tables: Mapping[str, Sequence[str]] | None, modules: Sequence[ModuleInfo] = ()) -> None:
    """Fill a new file with every group and dataset: readers with SWMR do not find those that are created later.

    ``tables`` are columns by group; a group ``superseded/1/findings`` or ``superseded/1/facts`` makes room for those. ``None``: the file
    is for raw tensors.
    """
    file.attrs["format_version"] = FORMAT_VERSION
    file.attrs["package_version"] = attributes.package_version
    file.attrs["started"] = attributes.started
    file.attrs["configurations"] = json.dumps(attributes.configurations, default=str)
    if tables is None:
        file.attrs["content"] = _RAW_TENSORS
        return
    if modules:
        file.create_dataset(MODULES, data=module_rows(modules)).make_scale(MODULES)
    for name, columns in {FINDINGS: (), FACTS: (), **tables}.items():
        if has_rows(name):
            last = name.rpartition("/")[2]
            # Not compressed: a chunk that is compressed again as it fills would move while others read it.
            rows = file.create_dataset(name, (0,), _ROWS[last], maxshape=(None,), chunks=(_ROWS_PER_CHUNK,))
            rows.make_scale(last)  # a dimension of its own, as below: xarray requires one
        else:
            # It can be there already: "validation/activation" lies in "validation", which holds a user's "validation/loss".
            _create_table(file.require_group(name), columns, has_histograms(name))


def _create_table(group: h5py.Group, columns: Sequence[str], of_histograms: bool) -> None:
    shape = (len(columns), len(LABELS)) if of_histograms else (len(columns),)
    values = group.create_dataset(
        "values",
        (0, *shape),
        "i8" if of_histograms else "f8",
        maxshape=(None, *shape),
        chunks=(1, *shape),
        shuffle=True,
        compression="gzip",
        compression_opts=1,
        fillvalue=NOT_COUNTED if of_histograms else ABSENT,
    )
    scales = [group.create_dataset("steps", (0,), "i8", maxshape=(None,), chunks=(_STEPS_PER_CHUNK,)), _texts(group, "columns", columns)]
    if of_histograms:
        scales.append(_texts(group, "bins", LABELS))
        values.attrs["edges"] = EDGES
    for axis, scale in enumerate(scales):
        scale.make_scale(scale.name.rpartition("/")[2])
        values.dims[axis].attach_scale(scale)


def _texts(group: h5py.Group, name: str, texts: Sequence[str]) -> h5py.Dataset:
    # Fixed-length: SWMR cannot do variable length.
    encoded = [text.encode() for text in texts]
    return group.create_dataset(name, data=np.array(encoded, dtype=f"S{max(1, *map(len, encoded))}"))


def finding_rows(findings: Sequence[Finding]) -> NDArray[np.void]:
    """Findings as rows of the dataset."""
    return _rows(_FINDING, map(vars, findings))


def module_rows(modules: Sequence[ModuleInfo]) -> NDArray[np.void]:
    """Modules as rows of the dataset; a shape that is too long is left out."""
    shapes = ["" if one.output_shape is None else json.dumps(one.output_shape) for one in modules]
    longest = _MODULE["output_shape"].itemsize
    fitting = [shape if len(shape) <= longest else "" for shape in shapes]
    return _rows(_MODULE, ({**one._asdict(), "output_shape": shape} for one, shape in zip(modules, fitting, strict=True)))


def _rows(dtype: np.dtype[np.void], items: Iterable[Mapping[str, Any]]) -> NDArray[np.void]:
    """Rows of a dataset from values by field; texts that are too long are cut between characters."""
    sizes = {name: dtype[name].itemsize for name in dtype.names or ()}
    rows = [tuple(_fitting(one[name], size) if isinstance(one[name], str) else one[name] for name, size in sizes.items()) for one in items]
    return np.array(rows, dtype=dtype)


def _fitting(text: str, size: int) -> bytes:
    data = text.encode()
    return data if len(data) <= size else data[: size - 3].decode(errors="ignore").encode() + b"..."


# ------------------------------------------------------------------ raw tensors


class StoredTensor(NamedTuple):
    """Description of a tensor of a file."""

    kind: str
    site: str
    step: int
    call: int
    """As in :class:`~lightning_module_monitor.record.RawTensor`."""
    dtype: str
    """As torch calls it: ``bfloat16``."""
    shape: tuple[int, ...]


def has_tensors(file: h5py.File) -> bool:
    """Whether a file is one of raw tensors."""
    return bool(file.attrs.get("content") == _RAW_TENSORS)


def tensor_path(kind: str, site: str, step: int, call: int) -> str:
    """Path of a tensor in the file."""
    return f"{kind}/{site}/{step}" + (f"{_CALL}{call}" if call else "")


def step_of(path: str) -> int:
    """The step of a tensor."""
    return int(path.rpartition("/")[2].partition(_CALL)[0])


def read_tensors(file: h5py.File) -> list[StoredTensor]:
    """The tensors of a file, in the order in which they were captured."""
    found = []
    for path, dataset in datasets(file):
        if not is_superseded(path):
            kind, _, rest = path.partition("/")
            site, _, last = rest.rpartition("/")
            call = int(last.partition(_CALL)[2] or 0)
            stored = StoredTensor(kind, site, step_of(path), call, dataset.attrs["dtype"], dataset.shape)
            found.append((stored.step, int(dataset.attrs["index"]), stored))
    return [stored for _step, _index, stored in sorted(found, key=lambda one: one[:2])]
