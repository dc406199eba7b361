"""A store as input of the report: for each kind and statistic one table, sites by steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import CONTEXT_KIND, OWN_KIND, SUMMARY_SITE, TRAIN, Finding, Key, ModuleInfo, Severity, is_undefined
from lightning_module_monitor.sinks.store.matrices import Matrix
from lightning_module_monitor.sinks.store.reader import StoreReader


@dataclass(frozen=True, eq=False)
class Table:
    """One statistic of one kind."""

    name: Key
    """The common part of its keys; its site is empty."""
    sites: tuple[str, ...]
    """In the order of the store, which is the model's."""
    steps: NDArray[np.int64]
    """Ascending, shape ``(steps,)``; each has a value of one site at least."""
    values: NDArray[np.float64]
    """Shape ``(sites, steps)``; NaN where nothing was recorded."""
    is_recorded: NDArray[np.bool_]
    """Where a value was recorded, which may be NaN; shape ``(sites, steps)``."""

    @property
    def kind(self) -> str:
        """The kind with prefix and stage: ``validation/activation``."""
        return self.name._replace(statistic="").format()

    @property
    def statistic(self) -> str:
        """Name of the statistic."""
        return self.name.statistic

    def finding(self, row: int, name: str, step: int, words: str, severity: Severity) -> Finding:
        """A finding that a row shows."""
        site = self.sites[row]
        return Finding(step, name, site, self.name._replace(site=site).format(), words, severity)


@dataclass(frozen=True, eq=False)
class Run:
    """The content of one store."""

    path: str
    attributes: Mapping[str, Any]
    """Versions, start, configurations."""
    tables: list[Table]
    """Of sites, kind by kind."""
    figures: list[Table]
    """Series without a site, each with one row: the monitor's own figures, summaries over sites, values that a user logs."""
    findings: list[Finding]
    """The findings of training."""
    watched: frozenset[str]
    """The detectors that the training judged, by name."""
    histograms: list[Key]
    """Keys of its histograms, which are read one by one."""
    modules: list[ModuleInfo]
    """What is known of the model's modules."""

    @property
    def sites(self) -> set[str]:
        """All sites with numbers or histograms."""
        return {site for table in self.tables for site in table.sites} | {key.site for key in self.histograms}

    @property
    def context(self) -> list[Table]:
        """Of its figures the loss, learning rates, and what was logged."""
        return [table for table in self.figures if table.name.kind == CONTEXT_KIND]

    @property
    def steps(self) -> list[int]:
        """All monitored steps, ascending."""
        arrays = [table.steps for table in (*self.tables, *self.figures)]
        steps: list[int] = np.unique(np.concatenate(arrays)).tolist() if arrays else []
        return steps


def read_run(store: StoreReader) -> Run:
    """Read all numbers of a store, of which the run may be going on."""
    tables: list[Table] = []
    figures: list[Table] = []
    modules = store.modules()
    for kind in store.kinds():
        for table in _split(_in_models_order(store.matrix(kind), modules)):
            (tables if table.sites[0] and table.name.kind != OWN_KIND else figures).append(table)
    histograms = [Key.parse(key) for key in store.histogram_keys()]
    configurations: list[dict[str, Any]] = store.attributes["configurations"]  # type: ignore[assignment]  # objects of JSON
    watched = configurations[-1]["configuration"].get("watched") if configurations else None
    return Run(
        str(store.path), store.attributes, tables, figures, store.findings(), frozenset(map(str, watched or ())), histograms, modules
    )


def _in_models_order(matrix: Matrix, modules: Sequence[ModuleInfo]) -> Matrix:
    """Columns in the order of the model: the store has what turned up late, as heads of attention do, at the end."""
    sites = dict.fromkeys(key.site for key in matrix.keys)
    order = {name: place for place, name in enumerate([one.name for one in modules] or (site for site in sites if ".head_" not in site))}

    def place_of(site: str) -> int:
        parts = site.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((order[name] for name in names if name in order), len(order))

    places = {site: place_of(site) for site in sites}
    columns = sorted(range(len(matrix.keys)), key=lambda column: places[matrix.keys[column].site])
    return Matrix([matrix.keys[column] for column in columns], matrix.steps, matrix.values[:, columns], matrix.is_recorded[:, columns])


def _split(matrix: Matrix) -> list[Table]:
    """A table for each statistic of a kind, and one for each figure."""
    columns: dict[tuple[Key, str], list[int]] = {}
    for index, key in enumerate(matrix.keys):
        alone = key.site if key.site == SUMMARY_SITE else ""
        columns.setdefault((key._replace(site=""), alone), []).append(index)
    tables = []
    for (name, alone), places in columns.items():
        rows = matrix.is_recorded[:, places].any(axis=1)
        sites = ("",) if alone else tuple(matrix.keys[place].site for place in places)
        values = np.ascontiguousarray(matrix.values[rows][:, places].T)
        is_recorded = matrix.is_recorded[rows][:, places].T & ~is_undefined(values)
        tables.append(Table(name, sites, matrix.steps[rows], values, is_recorded))
    return tables


def of_training(tables: Iterable[Table], kind: str, statistic: str) -> list[Table]:
    """The tables of a kind and statistic in training, one for each prefix that there is."""
    return [table for table in tables if (table.name.kind, table.statistic, table.name.stage) == (kind, statistic, TRAIN)]
