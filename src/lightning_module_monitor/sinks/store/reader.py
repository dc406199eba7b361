"""Reading a store: as a series, a tidy frame, or an xarray dataset, while it grows, after a kill, or when it is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import Described, Description, Findings, counted
from lightning_module_monitor.errors import nearest, require
from lightning_module_monitor.histogram import EDGES, FINITE, NOT_FINITE
from lightning_module_monitor.record import Facts, Finding, Key, ModuleInfo
from lightning_module_monitor.sinks import files
from lightning_module_monitor.sinks.store import rewrite, schema, tensors
from lightning_module_monitor.sinks.store.matrices import HistogramMatrix, Matrix, filled_columns, read_histograms, read_numbers
from lightning_module_monitor.sinks.store.plot import StorePlots
from lightning_module_monitor.sinks.store.read_access import AbsentKeyError, find_store, open_store
from lightning_module_monitor.sinks.store.schema import StoredTensor

if TYPE_CHECKING:
    import pandas
    import xarray
    from torch import Tensor


def load_store(path: str | os.PathLike[str]) -> StoreReader:
    """Open the file of a run, at any time: while it is written, after a ``kill -9``, after a clean end.

    Args:
        path: The ``.h5`` file; or a run's folder or a log directory, in which the newest run is used. Several are listed in a warning.

    Returns:
        A reader of it.

    Raises:
        FileNotFoundError: If there is no file, or none in the folder.
        ValueError: If the file is not HDF5, not a monitor's store, damaged, or of a newer format; or if it has data outside of itself
            (links, external storage, virtual datasets), which no run writes.

    Example::

        steps, values = load_store("monitor.h5").series("activation/fc/rms")
    """
    reader = StoreReader(find_store(Path(path)))
    with open_store(reader.path, is_checked=False):
        return reader


class StoreReader(Described):
    """The content of a store. Each call opens the file anew and closes it again, so that it has the newest records.

    Get one from :func:`load_store`. All methods raise what ``load_store`` raises, if the file is missing or damaged, and ``KeyError``
    for a key, a kind or a tensor that was not recorded; the message names the nearest.
    It is a mapping from :meth:`keys` to :meth:`series`: ``store["loss"]``, ``"loss" in store``, ``len(store)``, ``for key in store``.
    ``with load_store(path) as store`` works, too; there is nothing to close.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """The file."""
        self._has_checked_tensors = False

    @property
    def plot(self) -> StorePlots:
        """Figures: ``store.plot.heatmap("activation", "rms")``. Needs the extra ``plot``."""
        return StorePlots(self)

    def _describe(self) -> Description:
        try:
            recorded = {**self._recorded(of_histograms=False), **self._recorded(of_histograms=True)}
            with open_store(self.path) as file:
                rows = [_cells(file, group, columns) for group, columns in recorded.items()]
        except (OSError, ValueError) as error:  # for example, the file is missing: a display is no place for an error
            return Description(f"{str(self.path)!r}, which cannot be read: {error}", (), ())
        return Description(f"{str(self.path)!r}: {counted(len(rows), 'table')}", ("kind", "sites", "statistics", "records", "steps"), rows)

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_error: object) -> None:
        """No file stays open between two calls."""

    # -------------------------------------------------------------- one key

    def __getitem__(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return self.series(key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """The keys of all numbers that were recorded, which :meth:`series` takes, group by group, in the order of the columns."""
        return [schema.join(group, column) for group, columns in self._recorded(of_histograms=False).items() for column in columns]

    def histogram_keys(self) -> list[str]:
        """The keys of all histograms that were recorded, which :meth:`histogram` takes, group by group, in the order of the columns."""
        return [schema.join(group, column) for group, columns in self._recorded(of_histograms=True).items() for column in columns]

    def series(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """One key's values.

        Args:
            key: One of :meth:`keys`.

        Returns:
            Steps (int64) and values (float64), both of shape ``(rows,)``: the rows in which the key was recorded. A NaN among
            the values was recorded as such.
        """
        found = self._column(*schema.split(key))
        if found is not None:
            return found[0], np.asarray(found[1], np.float64)
        if key in self.histogram_keys():
            message = f"{key!r} in {str(self.path)!r} is a histogram, and no series of numbers; read it with histogram({key!r})."
            raise AbsentKeyError(message)
        raise AbsentKeyError(f"{str(self.path)!r} has no key {key!r}{nearest(key, self.keys())}")

    def histogram(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """One key's histograms.

        Args:
            key: One of :meth:`histogram_keys`.

        Returns:
            Steps (int64, shape ``(rows,)``) in which it was recorded; counts of the finite elements (int64, shape ``(rows,
            bins)``); the edges of the bins (float64, shape ``(bins + 1,)``, see ``Histogram.edges``).
        """
        steps, rows = self._histogram_rows(key)
        return steps, rows[:, FINITE], EDGES.copy()

    def nonfinite(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Counts of the elements of one key's histograms that are not finite.

        Args:
            key: One of :meth:`histogram_keys`.

        Returns:
            Steps, shape ``(rows,)``, and counts of ``-inf``, ``inf`` and ``nan``, shape ``(rows, 3)``, both int64.
        """
        steps, rows = self._histogram_rows(key)
        return steps, rows[:, NOT_FINITE]

    def _histogram_rows(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._column(*schema.split_histogram(key))
        if found is None:
            raise AbsentKeyError(f"{str(self.path)!r} has no histogram {key!r}{nearest(key, self.histogram_keys())}")
        return found[0], np.asarray(found[1], np.int64)

    def _column(self, group: str, column: str) -> tuple[NDArray[np.int64], schema.Values] | None:
        """Steps and rows in which a column was recorded; ``None`` if there is no such column."""
        with open_store(self.path) as file:
            columns = schema.read_columns_of(file, group)
            if column not in columns:
                return None
            steps, place = schema.read_steps(file[group]), columns.index(column)
            rows: schema.Values = file[group]["values"][: len(steps), place : place + 1]
        recorded = schema.is_recorded(rows)[:, 0]
        return steps[recorded], rows[recorded, 0]

    # -------------------------------------------------------------- one kind

    def kinds(self) -> list[str]:
        """The parts of keys before site and statistic, which :meth:`matrix` takes: ``activation``, ``validation/activation``.

        Keys without a kind, such as ``loss``, are those of ``logged``.
        """
        return list(dict.fromkeys(map(schema.kind_of, self._recorded(of_histograms=False))))

    def histogram_kinds(self) -> list[str]:
        """The kinds that have histograms, which :meth:`histogram_matrix` takes."""
        return list(dict.fromkeys(map(schema.kind_of, self._recorded(of_histograms=True))))

    def matrix(self, kind: str) -> Matrix:
        """All numbers of one kind, in one read.

        Args:
            kind: One of :meth:`kinds`.

        Returns:
            Steps, keys and values.
        """
        with open_store(self.path) as file:
            return read_numbers(file, self._group_of(file, kind, of_histograms=False))

    def histogram_matrix(self, kind: str, max_rows: int | None = None) -> HistogramMatrix:
        """The histograms of one kind, in one read.

        Args:
            kind: One of :meth:`histogram_kinds`.
            max_rows: Of more records than that read so many, evenly spaced: histograms take far more memory than numbers.

        Returns:
            Steps, keys and counts.
        """
        with open_store(self.path) as file:
            return read_histograms(file, self._group_of(file, kind, of_histograms=True), max_rows)

    def _group_of(self, file: h5py.File, kind: str, *, of_histograms: bool) -> str:
        groups = (group for group in schema.read_columns(file) if schema.has_histograms(group) is of_histograms)
        group_by_kind = {schema.kind_of(group): group for group in groups}
        if kind not in group_by_kind:
            raise AbsentKeyError(f"{str(self.path)!r} has no kind {kind!r}{nearest(kind, group_by_kind)}")
        return group_by_kind[kind]

    def _recorded(self, *, of_histograms: bool) -> dict[str, list[str]]:
        """The columns of numbers, or of histograms, by group, that were ever recorded: a planned site may never run."""
        with open_store(self.path) as file:
            found = {
                group: [column for column, is_filled in zip(columns, filled_columns(file[group]), strict=True) if is_filled]
                for group, columns in schema.read_columns(file).items()
                if schema.has_histograms(group) is of_histograms
            }
        return {group: columns for group, columns in found.items() if columns}

    # -------------------------------------------------------------- all of it

    def findings(self) -> list[Finding]:
        """The findings of training, in their order; a notebook shows a table."""
        with open_store(self.path) as file:
            return Findings(schema.read_findings(file))

    def facts(self) -> list[tuple[int, Facts]]:
        """What is known of training besides numbers, each with the first step that it is true of."""
        with open_store(self.path) as file:
            return schema.read_facts(file)

    def modules(self) -> list[ModuleInfo]:
        """The modules of the model, in its order: name, type, number of parameters, and shape and dtype of what each returned first.

        Empty for a store of an earlier version, and where no module was monitored.
        """
        with open_store(self.path) as file:
            return schema.read_modules(file)

    @property
    def attributes(self) -> dict[str, object]:
        """The attributes of the file.

        ``format_version`` (int), ``package_version``, ``started`` (ISO 8601, UTC), and ``configurations``: a list with one
        ``{"started", "first_step", "configuration"}`` for each run that wrote to the file.
        """
        with open_store(self.path) as file:
            return {"format_version": int(file.attrs["format_version"]), **vars(schema.read_attributes(file))}

    def to_frame(self) -> pandas.DataFrame:
        """Every number as a tidy frame, a row per recorded value.

        Returns:
            Columns ``step``, ``stage`` (``train``, ``validation``, ...), ``kind`` (with its prefix, if the run had one:
            ``run1/activation``), ``site``, ``statistic``, ``value``.

        Raises:
            ImportError: If pandas is not installed.
        """
        pd = require("pandas", "pandas")
        with open_store(self.path) as file:
            matrices = [read_numbers(file, group) for group in schema.read_columns(file) if not schema.has_histograms(group)]
        parts = []
        for matrix in matrices:
            row, column = np.nonzero(matrix.is_recorded)
            texts = [(key.stage, f"{key.prefix}/{key.kind}" if key.prefix else key.kind, key.site, key.statistic) for key in matrix.keys]
            named = dict(zip(("stage", "kind", "site", "statistic"), np.array(texts, dtype=object).reshape(-1, 4)[column].T, strict=True))
            parts.append(pd.DataFrame({"step": matrix.steps[row], **named, "value": matrix.values[row, column]}))
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
            ImportError: If xarray is not installed.
        """
        xr, matrix = require("xarray", "xarray"), self.matrix(kind)
        place = {site: index for index, site in enumerate(dict.fromkeys(key.site for key in matrix.keys))}
        tables = {key.statistic: np.full((len(matrix.steps), len(place)), np.nan) for key in matrix.keys}
        for column, key in enumerate(matrix.keys):
            tables[key.statistic][:, place[key.site]] = matrix.values[:, column]
        variables = {statistic: (("step", "site"), table) for statistic, table in tables.items()}
        dataset: xarray.Dataset = xr.Dataset(variables, coords={"step": matrix.steps, "site": list(place)})
        return dataset.squeeze("site", drop=True) if list(place) == [""] else dataset

    # -------------------------------------------------------------- raw tensors

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
            FileNotFoundError: If no tensor was captured.
        """
        with self._open_tensors() as file:
            value = tensors.find_tensor(file, schema.tensor_path(kind, site, step, call))
            if value is None:
                wanted = StoredTensor(kind, site, step, call, "", ())
                raise AbsentKeyError(f"{str(self.path)!r} has no raw tensor of {_not_captured(schema.read_tensors(file), wanted)}")
            return value

    def tensors(self, kind: str | None = None, site: str | None = None, step: int | None = None) -> list[StoredTensor]:
        """The raw tensors that the callback's ``capture`` wrote: ``store.tensor(*found[:4])`` gives the tensor of an entry.

        Args:
            kind: Only those of this kind.
            site: Only those of this site.
            step: Only those of this step.

        Returns:
            Kind, site, step, call, dtype (a name) and shape of each, in the order in which they were captured. Empty if nothing was.
        """
        try:
            with self._open_tensors() as file:
                found = schema.read_tensors(file)
        except FileNotFoundError:
            return []
        return [one for one in found if kind in (None, one.kind) and site in (None, one.site) and step in (None, one.step)]

    @contextmanager
    def _open_tensors(self) -> Iterator[h5py.File]:
        # If a run could not continue the file beside the store, its tensors are in a numbered file, which is opened by its own path.
        beside = files.tensors_path(self.path)
        with open_store(beside if beside.exists() else self.path, is_checked=self._has_checked_tensors) as file:
            self._has_checked_tensors = True
            if not schema.has_tensors(file):
                message = f"{str(self.path)!r} has no raw tensors: there is no {beside.name!r}. The callback's option capture writes them."
                raise FileNotFoundError(message)
            yield file

    def repair(self) -> None:
        """Make a store that a kill left half open readable for every HDF5 program; its content stays. Atomic.

        A file that was closed is left as it is, and so are the raw tensors beside it, whose file is always closed.

        Raises:
            RuntimeError: If a run is still writing to it.
        """
        rewrite.repair(self.path.resolve())


def _cells(file: h5py.File, group: str, columns: list[str]) -> tuple[str, ...]:
    """Kind, number of sites, statistics, number of records, and steps of a table."""
    keys, steps = [Key.parse(schema.join(group, column)) for column in columns], schema.read_steps(file[group])
    statistics = ", ".join(dict.fromkeys(key.statistic for key in keys))
    num_sites = len({key.site for key in keys if key.site})
    return schema.kind_of(group), str(num_sites or ""), statistics, str(len(steps)), f"{steps.min()} to {steps.max()}"


def _not_captured(found: list[StoredTensor], wanted: StoredTensor) -> str:
    """The part of a request that matches no tensor, with the nearest one that does."""
    fields = StoredTensor._fields[:4]
    for name, value in zip(fields, wanted, strict=False):
        known = dict.fromkeys(getattr(one, name) for one in found)
        if value not in known:
            break
        found = [one for one in found if getattr(one, name) == value]
    near = nearest(value, known) if isinstance(value, str) else f"; captured: {', '.join(map(str, known))}"
    given = ", ".join(f"{name} {value!r}" for name, value in zip(fields, wanted, strict=False))
    return f"{given}: there is no such {name}{near}"
