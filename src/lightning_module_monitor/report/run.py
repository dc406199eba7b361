"""A store as input of the report: for each kind and statistic one table, sites by steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.record import CONTEXT_KIND, OWN_KIND, SUMMARY_SITE, TRAIN, Facts, Finding, Key, ModuleInfo
from lightning_module_monitor.report.stored_verdict import verdict_on
from lightning_module_monitor.sinks.store.matrices import Matrix, Table
from lightning_module_monitor.sinks.store.reader import StoreReader

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Run:
    """The content of one store."""

    path: str
    attributes: Mapping[str, Any]
    """Versions, start, configurations."""
    tables: list[Table]
    """Tables of sites, kind by kind."""
    figures: list[Table]
    """Series without a site, each with one row: the monitor's own figures, summaries over sites, values that a user logs."""
    findings: list[Finding]
    """The findings of training."""
    facts: list[tuple[int, Facts]]
    """What is known of training besides numbers, each with its first step."""
    watched: frozenset[str]
    """The detectors that the training judged, by name."""
    histograms: list[Key]
    """Keys of its histograms, which are read one by one."""
    modules: list[ModuleInfo]
    """The model's modules; empty for a store of an earlier version."""

    def verdict(self) -> Verdict:
        """The verdict on the run."""
        return verdict_on(self.tables, self.figures, self.findings, self.watched, self.facts, self.modules)

    @property
    def sites(self) -> set[str]:
        """All sites with numbers or histograms."""
        return {site for table in self.tables for site in table.sites} | {key.site for key in self.histograms}

    @property
    def context(self) -> list[Table]:
        """The figures that are the loss, learning rates, and logged values."""
        return [table for table in self.figures if table.name.kind == CONTEXT_KIND]

    @property
    def series(self) -> dict[str, tuple[Table, int]]:
        """Table and row of every number, by key."""
        return {table.key(row): (table, row) for table in (*self.tables, *self.figures) for row in range(len(table.sites))}

    @property
    def steps(self) -> list[int]:
        """All monitored steps, ascending."""
        arrays = [table.steps for table in (*self.tables, *self.figures)]
        steps: list[int] = np.unique(np.concatenate(arrays)).tolist() if arrays else []
        return steps

    @property
    def extent(self) -> str:
        """The number of monitored steps, the first and the last one, and the number of sites, in words."""
        steps = self.steps
        if not steps:
            return "nothing recorded yet"
        return f"{counted(len(steps), 'monitored step')}, {steps[0]} to {steps[-1]}; {counted(len(self.sites), 'site')}"


def read_run(store: StoreReader) -> Run:
    """Read all numbers of a store, whose run may be going on."""
    tables: list[Table] = []
    figures: list[Table] = []
    modules = store.modules()
    for kind in store.kinds():
        for table in _tables_of(store.matrix(kind), modules):
            (figures if table.sites[0] in ("", SUMMARY_SITE) or table.name.kind == OWN_KIND else tables).append(table)
    histograms = [Key.parse(key) for key in store.histogram_keys()]
    attributes: dict[str, Any] = store.attributes
    runs = attributes["configurations"]
    watched = frozenset(map(str, (runs[-1]["configuration"].get("watched") if runs else None) or ()))
    return Run(str(store.path), attributes, tables, figures, store.findings(), store.facts(), watched, histograms, modules)


def _tables_of(matrix: Matrix, modules: Sequence[ModuleInfo]) -> Iterator[Table]:
    """A table for each statistic of a kind, with the sites in the order of the model, and one for each figure."""
    columns: dict[tuple[Key, bool], list[int]] = {}
    for column in _in_models_order(matrix.keys, modules):
        key = matrix.keys[column]
        columns.setdefault((key._replace(site=""), key.site == SUMMARY_SITE), []).append(column)
    yield from map(matrix.table, columns.values())


def _in_models_order(keys: Sequence[Key], modules: Sequence[ModuleInfo]) -> list[int]:
    """Columns in the order of the model: the store has late sites, such as heads of attention, at the end."""
    sites = dict.fromkeys(key.site for key in keys)
    order = {name: place for place, name in enumerate([one.name for one in modules] or (site for site in sites if ".head_" not in site))}

    def place_of(site: str) -> int:
        parts = site.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((order[name] for name in names if name in order), len(order))

    places = {site: place_of(site) for site in sites}
    return sorted(range(len(keys)), key=lambda column: places[keys[column].site])


def of_training(tables: Iterable[Table], kind: str, statistic: str) -> list[Table]:
    """The tables of a kind and statistic in training, one for each prefix that there is."""
    return [table for table in tables if (table.name.kind, table.statistic, table.name.stage) == (kind, statistic, TRAIN)]


def early(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """The first quarter of the records, at least one; ``(..., steps)`` to ``(..., some)``."""
    return values[..., : max(1, values.shape[-1] // 4)]


def late(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """The last quarter of the records, at least one; ``(..., steps)`` to ``(..., some)``."""
    return values[..., -max(1, values.shape[-1] // 4) :]


def typical(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of the finite values along the last dimension, ``(..., steps)`` to ``(...)``; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a row without any
        return np.asarray(np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=-1))
