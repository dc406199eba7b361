"""Reads a store as series, a tidy frame or an xarray dataset: while it grows, after a kill, or when it is done."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from lightning_module_monitor.display import Described, Description, Findings, description_of_file
from lightning_module_monitor.errors import require, shortened
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import Finding
from lightning_module_monitor.sinks.store import paths, remote, schema, tensors
from lightning_module_monitor.sinks.store.content import Content
from lightning_module_monitor.sinks.store.matrices import read_numbers
from lightning_module_monitor.sinks.store.plot import StorePlots
from lightning_module_monitor.sinks.store.read_access import AbsentKeyError, find_store, open_store
from lightning_module_monitor.sinks.store.repair import repair
from lightning_module_monitor.sinks.store.series import StoredSeries
from lightning_module_monitor.sinks.store.tensor_paths import StoredTensor, read_tensors, tensor_path
from lightning_module_monitor.suggestions import nearest

if TYPE_CHECKING:
    import pandas
    import xarray
    from torch import Tensor


def load_store(path: str | os.PathLike[str]) -> StoreReader:
    """Open the file of a run, at any time: while it is written, after a ``kill -9``, after a clean end.

    Args:
        path: The ``.h5`` file; or the folder of a run or a log directory, whose newest run is used. A warning lists the others. Or the URL
            of a file, which is copied now: later records of a live run are not in the copy.

    Returns:
        Its reader.

    Raises:
        FileNotFoundError: If there is no file, or none in the folder.
        ValueError: If the file is not HDF5, not a store, damaged, of a newer format, or refers to data outside of itself (links,
            external storage, virtual datasets), which no run writes.

    Example::

        steps, values = load_store("monitor.h5").series("activation/fc/rms")
    """
    reader = StoreReader(remote.fetched(os.fspath(path)), os.fspath(path)) if remote.is_url(path) else StoreReader(find_store(Path(path)))
    with open_store(reader.path, is_checked=False):
        return reader


class StoreReader(StoredSeries, Described):
    """The content of a store. Each call opens the file, reads the newest records, and closes it.

    :func:`load_store` returns it. All methods raise the errors of ``load_store`` if the file is missing or damaged, and ``KeyError``
    for a key, a kind or a tensor that was not recorded; the message names the nearest.
    It is a mapping from :meth:`keys` to :meth:`series`: ``store["loss"]``, ``"loss" in store``, ``len(store)``, ``for key in store``.
    ``with load_store(path) as store`` works, too; no file stays open.
    """

    def __init__(self, path: Path, url: str | None = None) -> None:
        super().__init__(path, url)
        self._has_checked_tensors = False
        if url is not None:
            weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)

    def default_path(self, suffix: str) -> Path:
        """The path of a file about this store: beside it or, for a URL, in the current folder."""
        return self.path.with_suffix(suffix) if self.location == str(self.path) else Path(self.path.with_suffix(suffix).name)

    @property
    def plot(self) -> StorePlots:
        """Figures: ``store.plot.heatmap("activation", "rms")``. Needs the extra ``plot``."""
        return StorePlots(self)

    def _describe(self) -> Description:
        def cells() -> list[tuple[str, ...]]:
            recorded = {**self._recorded_columns(histograms=False), **self._recorded_columns(histograms=True)}
            with self._open() as content:
                return [_cells(content, group, columns) for group, columns in recorded.items()]

        return description_of_file(self.location, "table", ("kind", "sites", "statistics", "records", "steps"), cells)

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_error: object) -> None:
        """No file stays open between two calls."""

    # -------------------------------------------------------------- the whole store

    def findings(self) -> list[Finding]:
        """The findings of training, in their order; a notebook shows them as a table."""
        with self._open() as content:
            return Findings(content.findings())

    def facts(self) -> list[tuple[int, Facts]]:
        """Facts about training besides numbers, each with the first step that it holds for."""
        with self._open() as content:
            return content.facts()

    @property
    def attributes(self) -> dict[str, object]:
        """The attributes of the file.

        ``format_version`` (int), ``package_version``, ``started`` (ISO 8601, UTC), and ``configurations``: a list with one
        ``{"started", "last_record", "first_step", "configuration"}`` for each run that wrote to the file. Stores of
        earlier versions have no ``last_record``, the time of the run's last record.
        """
        with self._open() as content:
            return {"format_version": int(content.file.attrs["format_version"]), **vars(content.attributes())}

    def to_frame(self) -> pandas.DataFrame:
        """All numbers as a tidy frame with a row for each recorded value.

        Returns:
            Columns ``step``, ``stage`` (``train``, ``validation``, ...), ``kind`` (with its prefix, if the run had one:
            ``run1/activation``), ``site``, ``statistic``, ``value``.

        Raises:
            ImportError: If pandas is not installed.
        """
        pd = require("pandas", "pandas")
        with self._open() as content:
            matrices = [read_numbers(content, group) for group in content.columns(histograms=False)]
        parts = []
        for matrix in matrices:
            row, column = np.nonzero(matrix.is_recorded)
            texts = [(key.stage, f"{key.prefix}/{key.kind}" if key.prefix else key.kind, key.site, key.statistic) for key in matrix.keys]
            named = dict(zip(("stage", "kind", "site", "statistic"), np.array(texts, dtype=object).reshape(-1, 4)[column].T, strict=True))
            parts.append(pd.DataFrame({"step": matrix.steps[row], **named, "value": matrix.values[row, column]}))
        frame: pandas.DataFrame = pd.concat(parts, ignore_index=True)
        return frame

    def to_xarray(self, kind: str) -> xarray.Dataset:
        """The numbers of a kind as an xarray dataset.

        Args:
            kind: The part of a key before site and statistic: ``"activation"``, ``"validation/activation"``.

        Returns:
            A float64 variable for each statistic, with dimensions ``(step, site)``, or ``(step,)`` if keys have no site. NaN where
            nothing was recorded.

        Raises:
            ImportError: If xarray is not installed.
        """
        xr, matrix = require("xarray", "xarray"), self.matrix(kind)
        sites = list(dict.fromkeys(key.site for key in matrix.keys))
        tables = {key.statistic: np.full((len(matrix.steps), len(sites)), np.nan) for key in matrix.keys}
        index_by_site = {site: index for index, site in enumerate(sites)}
        for column, key in enumerate(matrix.keys):
            tables[key.statistic][:, index_by_site[key.site]] = matrix.values[:, column]
        variables = {statistic: (("step", "site"), table) for statistic, table in tables.items()}
        dataset: xarray.Dataset = xr.Dataset(variables, coords={"step": matrix.steps, "site": sites})
        return dataset.squeeze("site", drop=True) if sites == [""] else dataset

    # -------------------------------------------------------------- raw tensors

    def tensor(self, kind: str, site: str, step: int, call: int = 0) -> Tensor:
        """A raw tensor that the callback's ``capture`` wrote, bit for bit.

        Under a ``GradScaler``, gradients of the scaled loss are divided by the scale, in float32.

        Args:
            kind: ``activation``, ``activation_gradient``, ``parameter``, ``gradient``, ``gradient_before_clip`` or ``update``.
            site: Name of the module (``fc``; a further output of it: ``fc.output_1``) or of the parameter.
            step: Number of the optimizer step.
            call: Number of the module's call in this step, 0, 1, ... in the order of the forward passes of all micro-batches; for a
                gradient, the call that returned the output.

        Returns:
            A tensor on the CPU, with its dtype and shape.

        Raises:
            FileNotFoundError: If no tensor was captured.
        """
        with self._open_tensors() as file:
            value = tensors.find_tensor(file, tensor_path(kind, site, step, call))
            if value is None:
                request: dict[str, str | int] = {"kind": kind, "site": site, "step": step, "call": call}
                raise AbsentKeyError(f"{str(self.path)!r} has no raw tensor of {_not_captured(read_tensors(file), request)}")
            return value

    def tensors(self, kind: str | None = None, site: str | None = None, step: int | None = None) -> list[StoredTensor]:
        """The raw tensors that the callback's ``capture`` wrote: ``store.tensor(*entry[:4])`` gives the tensor of an entry.

        Args:
            kind: Only tensors of this kind.
            site: Only tensors of this site.
            step: Only tensors of this step.

        Returns:
            Kind, site, step, call, dtype (a name) and shape of each, in the order of capture. Empty if nothing was captured.
        """
        try:
            with self._open_tensors() as file:
                stored = read_tensors(file)
        except FileNotFoundError:
            return []
        return [entry for entry in stored if kind in (None, entry.kind) and site in (None, entry.site) and step in (None, entry.step)]

    @contextmanager
    def _open_tensors(self) -> Iterator[h5py.File]:
        # If a run could not continue the file beside the store, its tensors are in a numbered file, which is opened by its path.
        beside = paths.tensors_path(self.path)
        with open_store(beside if beside.exists() else self.path, is_checked=self._has_checked_tensors) as content:
            self._has_checked_tensors = True
            if not schema.has_tensors(content.file):
                message = f"{str(self.path)!r} has no raw tensors: there is no {beside.name!r}. The callback's option capture writes them."
                raise FileNotFoundError(message)
            yield content.file

    def repair(self) -> bool:
        """Take the journal that a killed run left into the file, so that every HDF5 program reads all of it. Atomic.

        Returns:
            Whether there was such a journal.

        Raises:
            RuntimeError: If a run is still writing to it.
        """
        return repair(self.path.resolve())


def _cells(content: Content, group: str, columns: list[str]) -> tuple[str, ...]:
    """Kind, number of sites, statistics, number of records, and steps of a table."""
    keys, steps = [Key.parse(schema.join(group, column)) for column in columns], content.table(group).steps
    statistics = ", ".join(dict.fromkeys(key.statistic for key in keys))
    num_sites = len({key.site for key in keys if key.site})
    return schema.kind_of(group), str(num_sites or ""), statistics, str(len(steps)), f"{steps.min()} to {steps.max()}"


def _not_captured(stored: list[StoredTensor], request: dict[str, str | int]) -> str:
    """The request, with its first field that matches no tensor, and the nearest value that does."""
    for name, value in request.items():
        known = dict.fromkeys(getattr(entry, name) for entry in stored)
        if value not in known:
            break
        stored = [entry for entry in stored if getattr(entry, name) == value]
    near = nearest(value, known) if isinstance(value, str) else f"; captured: {shortened([*map(str, known)])}"
    return f"{', '.join(f'{field} {wanted!r}' for field, wanted in request.items())}: there is no such {name}{near}"
