"""Reading a store: as a series, a tidy frame, or an xarray dataset, while it grows, after a kill, or when it is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import nearest, require
from lightning_module_monitor.record import FINITE, NOT_FINITE, Finding, Key
from lightning_module_monitor.sinks.store import findings, frames, layout, lock, tensors
from lightning_module_monitor.sinks.store.inspection import inspect
from lightning_module_monitor.sinks.store.killed import is_in_use
from lightning_module_monitor.sinks.store.rewrite import rewrite
from lightning_module_monitor.sinks.store.tensors import StoredTensor

if TYPE_CHECKING:
    import pandas
    import xarray
    from torch import Tensor

_BYTES_PER_READ = 1 << 20


def load_store(path: str | os.PathLike[str]) -> StoreReader:
    """Open the file of a run, at any time: while it is written, after a ``kill -9``, after a clean end.

    Args:
        path: The ``.h5`` file.

    Returns:
        A reader of it.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If the file is not HDF5, not a monitor's store, damaged, or of a newer format; or if it has data outside of itself
            (links, external storage, virtual datasets), which no run writes.

    Example::

        steps, values = load_store("monitor.h5").series("activation/fc/rms")
    """
    reader = StoreReader(Path(path))
    with layout.open_store(reader.path) as file:
        inspect(file, reader.path)
    return reader


@dataclass(frozen=True, eq=False)
class Matrix:
    """All numbers of one kind: a row for each of its records, a column for each of its keys."""

    keys: list[Key]
    """Of the columns, each of which has a value in one row at least."""
    steps: NDArray[np.int64]
    """Of the rows, ascending; shape ``(rows,)``."""
    values: NDArray[np.float64]
    """Shape ``(rows, columns)``; NaN where nothing was recorded."""
    is_recorded: NDArray[np.bool_]
    """Where something was, be it a NaN; shape ``(rows, columns)``."""


@dataclass(frozen=True, eq=False)
class HistogramMatrix:
    """Histograms of one kind: a row for each of its records, a column for each of its keys."""

    keys: list[Key]
    """Of the columns, each of which has a histogram in one of the rows at least."""
    steps: NDArray[np.int64]
    """Of the rows, ascending; shape ``(rows,)``."""
    counts: NDArray[np.int64]
    """Of the finite elements, shape ``(rows, columns, bins)``; 0 where nothing was recorded."""
    nonfinite: NDArray[np.int64]
    """Number of elements that are ``-inf``, ``inf`` and ``nan``, shape ``(rows, columns, 3)``; 0 where nothing was recorded."""
    edges: NDArray[np.float64]
    """Of the bins, shape ``(bins + 1,)``."""


class StoreReader:
    """A store's content. Each call opens the file anew and closes it again, so that it always tells the newest.

    Get one from :func:`load_store`. All methods raise what ``load_store`` raises, if the file is gone or spoiled by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """The file."""
        self._has_inspected_tensors = False

    def keys(self) -> list[str]:
        """The keys of all numbers that were recorded, which :meth:`series` takes, group by group, in the order of the columns."""
        return self._keys(of_histograms=False)

    def histogram_keys(self) -> list[str]:
        """The keys of all histograms that were recorded, which :meth:`histogram` takes, group by group, in the order of the columns."""
        return self._keys(of_histograms=True)

    def _keys(self, of_histograms: bool) -> list[str]:
        with layout.open_store(self.path) as file:
            tables = _columns(file, of_histograms)
            return [
                layout.join(group, column)
                for group, columns in tables.items()
                for column, is_filled in zip(columns, _filled(file[group], np.all), strict=True)
                if is_filled
            ]

    def series(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """One key's values.

        Args:
            key: One of :meth:`keys`.

        Returns:
            Steps (int64) and values (float64), both of shape ``(rows,)``: the rows in which the key was recorded. A NaN among
            the values was recorded as such.

        Raises:
            KeyError: If there is no such key; the message names the nearest.
        """
        group, column = layout.split(key)
        with layout.open_store(self.path) as file:
            columns = layout.read_columns_of(file, group)
            if column in columns:
                steps = layout.read_steps(file[group])
                values: NDArray[np.float64] = file[group]["values"][: len(steps), columns.index(column)]
                present = ~layout.is_absent(values)
                return steps[present], values[present]
        if key in self.histogram_keys():
            message = f"{key!r} in {str(self.path)!r} is a histogram, and no series of numbers; read it with histogram({key!r})."
            raise layout.AbsentKeyError(message)
        message = f"{str(self.path)!r} has no key {key!r}{nearest(key, self.keys())}"
        raise layout.AbsentKeyError(message)

    def kinds(self) -> list[str]:
        """What comes before site and statistic in keys, which :meth:`matrix` takes: ``activation``, ``validation/activation``.

        Keys without a kind, such as ``loss``, are those of ``logged``.
        """
        with layout.open_store(self.path) as file:
            return list(_group_by_kind(_recorded(file)))

    def matrix(self, kind: str) -> Matrix:
        """All numbers of one kind, in one read.

        Args:
            kind: One of :meth:`kinds`.

        Returns:
            Steps, keys and values.

        Raises:
            KeyError: If there is no such kind; the message names the nearest.
        """
        with layout.open_store(self.path) as file:
            group, columns = self._table_of(kind, _columns(file))
            steps, values = _read_table(file[group])
        is_recorded = ~layout.is_absent(values)
        values[~is_recorded] = np.nan
        filled = np.flatnonzero(is_recorded.any(axis=0))
        keys = _keys_of(group, [columns[place] for place in filled])
        return Matrix(keys, steps, values[:, filled], is_recorded[:, filled])

    def histogram_kinds(self) -> list[str]:
        """The kinds that have histograms, which :meth:`histogram_matrix` takes."""
        with layout.open_store(self.path) as file:
            return list(_group_by_kind(_recorded(file, of_histograms=True)))

    def histogram_matrix(self, kind: str, max_rows: int | None = None) -> HistogramMatrix:
        """The histograms of one kind, in one read.

        Args:
            kind: One of :meth:`histogram_kinds`.
            max_rows: Of more records than that read so many, evenly spaced: histograms take far more memory than numbers.

        Returns:
            Steps, keys and counts.

        Raises:
            KeyError: If there is no such kind; the message names the nearest.
        """
        with layout.open_store(self.path) as file:
            group, columns = self._table_of(kind, _columns(file, of_histograms=True))
            steps, values = layout.read_steps(file[group]), file[group]["values"]
            num_rows = len(steps) if max_rows is None else min(len(steps), max_rows)
            rows = np.linspace(0, max(0, len(steps) - 1), num_rows).round().astype(np.int64)
            read = [values[row] for row in rows]
            counts: NDArray[np.int64] = np.array(read, np.int64).reshape(len(rows), *values.shape[1:])
            edges: NDArray[np.float64] = values.attrs["edges"]
        is_absent = layout.is_absent(counts[..., 0])
        counts[is_absent] = 0
        filled = np.flatnonzero(~is_absent.all(axis=0))
        keys, counts = _keys_of(group, [columns[place] for place in filled]), counts[:, filled]
        return HistogramMatrix(keys, steps[rows], counts[..., FINITE], counts[..., NOT_FINITE], edges)

    def _table_of(self, kind: str, tables: dict[str, list[str]]) -> tuple[str, list[str]]:
        """The group and the columns of a kind."""
        group_by_kind = _group_by_kind(tables)
        if kind not in group_by_kind:
            message = f"{str(self.path)!r} has no kind {kind!r}{nearest(kind, group_by_kind)}"
            raise layout.AbsentKeyError(message)
        return group_by_kind[kind], tables[group_by_kind[kind]]

    def histogram(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """One key's histograms.

        Args:
            key: One of :meth:`histogram_keys`.

        Returns:
            Steps (int64, shape ``(rows,)``) in which it was recorded; counts of the finite elements (int64, shape ``(rows,
            bins)``); the edges of the bins (float64, shape ``(bins + 1,)``, see ``Histogram.edges``).

        Raises:
            KeyError: If there is no such key; the message names the nearest.
        """
        steps, rows, edges = self._histogram_rows(key)
        return steps, rows[:, FINITE], edges

    def nonfinite(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What is no finite element of one key's histograms.

        Args:
            key: One of :meth:`histogram_keys`.

        Returns:
            Steps, shape ``(rows,)``, and counts of ``-inf``, ``inf`` and ``nan``, shape ``(rows, 3)``, both int64.

        Raises:
            KeyError: If there is no such key; the message names the nearest.
        """
        steps, rows, _edges = self._histogram_rows(key)
        return steps, rows[:, NOT_FINITE]

    def _histogram_rows(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Steps, rows of counts, and edges."""
        group, column = layout.split_histogram(key)
        with layout.open_store(self.path) as file:
            columns = layout.read_columns_of(file, group)
            if column in columns:
                steps, values = layout.read_steps(file[group]), file[group]["values"]
                rows: NDArray[np.int64] = values[: len(steps), columns.index(column)]
                present = ~layout.is_absent(rows[:, 0])
                return steps[present], rows[present], values.attrs["edges"]
        message = f"{str(self.path)!r} has no histogram {key!r}{nearest(key, self.histogram_keys())}"
        raise layout.AbsentKeyError(message)

    def findings(self) -> list[Finding]:
        """What was found to be wrong with the model, in the order in which it was found."""
        with layout.open_store(self.path) as file:
            return findings.read(file)

    @property
    def attributes(self) -> dict[str, object]:
        """What the file says of itself.

        ``format_version`` (int), ``package_version``, ``started`` (ISO 8601, UTC), and ``configurations``: a list with one
        ``{"started", "first_step", "configuration"}`` for each run that wrote to the file.
        """
        with layout.open_store(self.path) as file:
            return {"format_version": int(file.attrs["format_version"]), **vars(layout.read_attributes(file))}

    def to_frame(self) -> pandas.DataFrame:
        """Every number as a tidy frame, a row per recorded value.

        Returns:
            Columns ``step``, ``stage`` (``train``, ``validation``, ...), ``kind`` (with its prefix, if the run had one:
            ``run1/activation``), ``site``, ``statistic``, ``value``.

        Raises:
            ImportError: If pandas is not installed.
        """
        pd = require("pandas", "pandas")
        with layout.open_store(self.path) as file:
            tables = [(_keys_of(group, columns), *_read_table(file[group])) for group, columns in _columns(file).items()]
        names = ["step", "stage", "kind", "site", "statistic", "value"]
        parts = [pd.DataFrame(frames.tidy(*table), columns=names) for table in tables]
        frame: pandas.DataFrame = pd.concat(parts, ignore_index=True)
        return frame

    def to_xarray(self, kind: str) -> xarray.Dataset:
        """One kind's numbers as an xarray dataset.

        Args:
            kind: What comes before site and statistic in a key: ``"activation"``, ``"validation/activation"``.

        Returns:
            One float64 variable per statistic, dimensions ``(step, site)``, or ``(step,)`` where keys have no site. NaN where
            nothing was recorded.

        Raises:
            KeyError: If there is no such kind; the message names the nearest.
            ImportError: If xarray is not installed.
        """
        return frames.to_dataset(require("xarray", "xarray"), self.matrix(kind))

    def tensor(self, kind: str, site: str, step: int, call: int = 0) -> Tensor:
        """A raw tensor that the callback's ``capture`` wrote, bit for bit as it was.

        Under a ``GradScaler`` a gradient is that of the loss without its scale: where it had one, divided by it, in float32.

        Args:
            kind: ``activation``, ``activation_gradient``, ``parameter``, ``gradient``, ``gradient_before_clip`` or ``update``.
            site: Name of the module (``fc``; a further output of it: ``fc.output_1``) or of the parameter.
            step: Number of the optimizer step.
            call: Of a module, which of its calls in this step: 0, 1, ... in the order of the forward passes, over all micro-batches. A
                gradient has the number of the output that it is of.

        Returns:
            A tensor on the CPU, of its own dtype and shape.

        Raises:
            KeyError: If it was not captured; the message names the nearest that was.
            FileNotFoundError: If nothing was.
        """
        with self._open_tensors() as file:
            value = tensors.find_tensor(file, kind, site, step, call)
            if value is None:
                raise layout.AbsentKeyError(
                    self._not_captured(tensors.read_tensors(file), {"kind": kind, "site": site, "step": step, "call": call})
                )
            return value

    def _not_captured(self, found: list[StoredTensor], wanted: Mapping[str, str | int]) -> str:
        """Which part of what is wanted is wrong, with the nearest right one."""
        for name, value in wanted.items():
            known = dict.fromkeys(getattr(one, name) for one in found)
            if value not in known:
                break
            found = [one for one in found if getattr(one, name) == value]
        near = nearest(value, known) if isinstance(value, str) else f"; captured: {', '.join(map(str, known))}"
        given = ", ".join(f"{name} {value!r}" for name, value in wanted.items())
        return f"{str(self.path)!r} has no raw tensor of {given}: there is no such {name}{near}"

    def tensors(self, kind: str | None = None, site: str | None = None, step: int | None = None) -> list[StoredTensor]:
        """What the callback's ``capture`` wrote: ``store.tensor(*found[:4])`` gives the tensor of an entry.

        Args:
            kind: Only those of this kind.
            site: Only those of this site.
            step: Only those of this step.

        Returns:
            Kind, site, step, call, dtype (a name) and shape of each, in the order in which they were captured. Empty if nothing was.
        """
        try:
            with self._open_tensors() as file:
                found = tensors.read_tensors(file)
        except FileNotFoundError:
            return []
        return [one for one in found if kind in (None, one.kind) and site in (None, one.site) and step in (None, one.step)]

    def repair(self) -> None:
        """Make a store that a kill left half open readable for every HDF5 program; its content stays. Atomic.

        A file that was closed is left as it is, and so are the raw tensors beside it, whose file is always closed.

        Raises:
            RuntimeError: If a run is still writing to it.
        """
        path = self.path.resolve()
        held = lock.acquire(path)
        if held is None:
            message = f"{str(path)!r} is being written by a live run. Repair it after the run's end; load_store reads it at any time."
            raise RuntimeError(message)
        try:
            temporary = layout.temporary_path(path)
            with layout.open_store(path, has_writer=False) as source:
                if not is_in_use(path):
                    return
                rewrite(source, temporary)
            layout.replace(temporary, path)
        finally:
            lock.release(held)

    @contextmanager
    def _open_tensors(self) -> Iterator[h5py.File]:
        # Where the file beside the store could not be gone on in, a run writes to a numbered one, which is opened by itself.
        beside = layout.tensors_path(self.path)
        path = beside if beside.exists() else self.path
        with layout.open_store(path) as file:
            if not self._has_inspected_tensors:
                inspect(file, path)
                self._has_inspected_tensors = True
            if not tensors.has_tensors(file):
                message = f"{str(self.path)!r} has no raw tensors: there is no {beside.name!r}. The callback's option capture writes them."
                raise FileNotFoundError(message)
            yield file


def _columns(file: h5py.File, of_histograms: bool = False) -> dict[str, list[str]]:
    """The columns of the tables of numbers, or of those of histograms, by group."""
    return {group: columns for group, columns in layout.read_columns(file).items() if layout.has_histograms(group) is of_histograms}


def _recorded(file: h5py.File, of_histograms: bool = False) -> dict[str, list[str]]:
    """Those of :func:`_columns` of tables in which anything was recorded."""
    tables = _columns(file, of_histograms)
    return {group: columns for group, columns in tables.items() if _filled(file[group], np.any).any()}


def _filled(group: h5py.Group, is_enough: Callable[[NDArray[np.bool_]], np.bool_]) -> NDArray[np.bool_]:
    """Which columns of a table were ever recorded: a planned site may never run. Shape ``(columns,)``.

    Args:
        group: The table.
        is_enough: Takes what is known so far; true if no further row needs to be read: ``np.all`` or ``np.any``.
    """
    values, num_rows = group["values"], len(layout.read_steps(group))
    filled = np.zeros(values.shape[1], dtype=np.bool_)
    rows_per_read = max(1, _BYTES_PER_READ // (8 * max(1, int(np.prod(values.shape[1:])))))
    for first in range(0, num_rows, rows_per_read):
        if is_enough(filled):
            break
        block = values[first : min(first + rows_per_read, num_rows)]
        filled |= ~layout.is_absent(block[..., 0] if block.ndim > 2 else block).all(axis=0)
    return filled


def _read_table(group: h5py.Group) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps, shape ``(rows,)``, and values, shape ``(rows, columns)``."""
    steps = layout.read_steps(group)
    return steps, group["values"][: len(steps)]


def _keys_of(group: str, columns: list[str]) -> list[Key]:
    return [Key.parse(layout.join(group, column)) for column in columns]


def _group_by_kind(tables: dict[str, list[str]]) -> dict[str, str]:
    return {_head(group, columns): group for group, columns in tables.items()}


def _head(group: str, columns: list[str]) -> str:
    """A group's kind as a user knows it."""
    return layout.join(group, columns[0])[: -len(columns[0])].removesuffix("/") or group
