"""The content of a store, as input of reports: a table of sites by steps for each kind and statistic."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.keys import Key, is_total
from lightning_module_monitor.kinds import CONTEXT_KIND, OWN_KIND, ROOT_SITE, SUMMARY_SITE
from lightning_module_monitor.record import Finding, ModuleInfo
from lightning_module_monitor.report.stored_verdict import verdict_on
from lightning_module_monitor.sinks.store.matrices import Table
from lightning_module_monitor.sinks.store.reader import StoreReader

Scalar = TypeVar("Scalar", bound=np.generic)

_ALL = "/"
"""Stands for all sites of a statistic; no site has a slash."""


@dataclass(frozen=True, eq=False)
class StoredRun:
    """The content of one store."""

    path: str
    attributes: Mapping[str, Any]
    """Versions, start, configurations."""
    tables: list[Table]
    """Tables of sites, kind by kind."""
    figures: list[Table]
    """Tables of one row: series without a site, as the monitor's own figures, summaries over sites, logged values, and totals."""
    findings: list[Finding]
    """The findings of training."""
    facts: list[tuple[int, Facts]]
    """Facts about training besides numbers, each with its first step."""
    watched: frozenset[str]
    """Names of the detectors that judged while training."""
    histograms: list[Key]
    """Keys of the histograms."""
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
        """Figures of the training loop: the loss, learning rates, logged values."""
        return [table for table in self.figures if table.name.kind == CONTEXT_KIND]

    @property
    def totals(self) -> list[Table]:
        """Values of all parameters inside a module together, those of ``_root_`` first, a table of one row for each."""
        names = [module.name for module in self.modules]
        totals = [table for table in self.figures if is_total(table.name._replace(site=table.sites[0]), names)]
        return sorted(totals, key=lambda table: table.sites[0] != ROOT_SITE)

    @property
    def series(self) -> dict[str, tuple[Table, int]]:
        """Table and row of every series of numbers, by key."""
        return {table.key(row): (table, row) for table in (*self.tables, *self.figures) for row in range(len(table.sites))}

    @property
    def steps(self) -> list[int]:
        """All monitored steps, ascending; what is logged after the last of them is of none, and counts where there is nothing else."""
        monitored = [table for table in (*self.tables, *self.figures) if table.name.kind != CONTEXT_KIND]
        arrays = [table.steps for table in monitored or self.context]
        steps: list[int] = np.unique(np.concatenate(arrays)).tolist() if arrays else []
        return steps

    @property
    def extent(self) -> str:
        """A phrase with the number of monitored steps, the first and last step, and the number of sites."""
        steps = self.steps
        if not steps:
            return "nothing recorded yet"
        return f"{counted(len(steps), 'monitored step')}, {steps[0]} to {steps[-1]}; {counted(len(self.sites), 'site')}"


def read_run(store: StoreReader) -> StoredRun:
    """Read all numbers of a store; its run may still be writing."""
    tables: list[Table] = []
    figures: list[Table] = []
    modules = store.modules()
    names = [module.name for module in modules]
    for kind in store.kinds():
        matrix = store.matrix(kind)
        columns_by_key: dict[Key, list[int]] = {}
        for column in _columns_in_order(matrix.keys, modules):
            key = matrix.keys[column]
            is_figure = key.site in ("", SUMMARY_SITE) or key.kind == OWN_KIND or is_total(key, names)
            columns_by_key.setdefault(key if is_figure else key._replace(site=_ALL), []).append(column)
        for key, columns in columns_by_key.items():
            table = matrix.table(columns)
            if key.site == _ALL:
                tables.append(table)
            elif table.is_recorded.any():  # a ratio of zero to zero in every record has no value
                figures.append(table)
    histograms = [Key.parse(key) for key in store.histogram_keys()]
    attributes: dict[str, Any] = store.attributes
    configurations = attributes["configurations"]
    watched = frozenset(map(str, (configurations[-1]["configuration"].get("watched") if configurations else None) or ()))
    return StoredRun(store.location, attributes, tables, figures, store.findings(), store.facts(), watched, histograms, modules)


def _columns_in_order(keys: Sequence[Key], modules: Sequence[ModuleInfo]) -> list[int]:
    """Columns in the model's order: the store has late sites, such as heads of attention, at the end."""
    sites = dict.fromkeys(key.site for key in keys)
    names = [module.name for module in modules] or [site for site in sites if ".head_" not in site]
    index_by_name = {name: index for index, name in enumerate(names)}

    def index_of(site: str) -> int:
        while site and site not in index_by_name:
            site = site.rpartition(".")[0]
        return index_by_name.get(site, len(names))

    indices = {site: index_of(site) for site in sites}
    return sorted(range(len(keys)), key=lambda column: indices[keys[column].site])


def early(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """The first quarter of the records, at least one record: ``(..., steps)`` to ``(..., steps // 4)``."""
    return values[..., : max(1, values.shape[-1] // 4)]


def late(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """The last quarter of the records, at least one record: ``(..., steps)`` to ``(..., steps // 4)``."""
    return values[..., -max(1, values.shape[-1] // 4) :]


def median_of_finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of the finite values along the last dimension, ``(..., steps)`` to ``(...)``; NaN without a finite value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row without a finite value
        return np.asarray(np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=-1))
