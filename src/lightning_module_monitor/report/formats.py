"""Which tensors of a run fit into narrower formats, as they are or with a scale, from what a cast would have lost of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_module_monitor.kernels.number_formats import NUMBER_FORMATS
from lightning_module_monitor.report.stored_run import StoredRun
from lightning_module_monitor.sinks.store.matrices import Table

MOST_UNDERFLOW = 1e-3
"""A tensor fits if a cast makes at most this part of its numbers zero, and none infinite."""

NUM_WORST = 3
"""Sites that are listed of a kind and format."""

HOW_TO_RECORD = "record overflow_<format> and underflow_<format> of it, scaled_underflow_<format> and zero_fraction beside them"

FITS, FITS_SCALED, UNFIT, UNKNOWN = "fits", "fits scaled", "does not fit", "no values"


@dataclass(frozen=True)
class SiteFit:
    """The largest values of all records at a site; NaN where there is none."""

    site: str
    underflow: float
    overflow: float
    scaled_underflow: float
    zeros: float

    @property
    def status(self) -> str:
        """Whether the tensor fits."""
        if np.isnan(self.overflow) or (np.isnan(self.underflow) and self.overflow == 0):
            return UNKNOWN
        if self.overflow == 0 and self.underflow <= MOST_UNDERFLOW:
            return FITS
        return FITS_SCALED if self.scaled_underflow <= MOST_UNDERFLOW else UNFIT


@dataclass(frozen=True)
class FormatFit:
    """How the tensors of a kind fit into a format."""

    kind: str
    format: str
    sites: Sequence[SiteFit]

    def num(self, status: str) -> int:
        """Number of sites with a status."""
        return sum(site.status == status for site in self.sites)

    def share(self, status: str) -> float:
        """The part of the sites with values that have a status; NaN without such a site."""
        known = len(self.sites) - self.num(UNKNOWN)
        return self.num(status) / known if known else np.nan

    @property
    def zeros(self) -> float:
        """The mean over sites of the part of elements that are exact zeros, as gradients are that a format has lost already."""
        known = [site.zeros for site in self.sites if not math.isnan(site.zeros)]
        return sum(known) / len(known) if known else math.nan

    def worst(self) -> list[SiteFit]:
        """The sites that do not fit, or only with a scale: those first that lose the most."""
        order = {UNFIT: 0, FITS_SCALED: 1}
        bad = [site for site in self.sites if site.status in order]
        return sorted(bad, key=lambda site: (order[site.status], -np.nansum([site.overflow, site.underflow])))[:NUM_WORST]


def format_fits(run: StoredRun) -> list[FormatFit]:
    """How each kind fits into each format of which underflow and overflow were recorded."""
    tables = {(table.kind, table.statistic): table for table in run.tables}
    fits = []
    for kind in dict.fromkeys(table.kind for table in run.tables):
        zeros = _largest(tables.get((kind, "zero_fraction")))
        for name in NUMBER_FORMATS:
            underflow, overflow, scaled = (
                _largest(tables.get((kind, f"{loss}_{name}"))) for loss in ("underflow", "overflow", "scaled_underflow")
            )
            sites = [
                SiteFit(site, underflow[site], overflow[site], scaled.get(site, np.nan), zeros.get(site, np.nan))
                for site in underflow
                if site in overflow
            ]
            fits += [FormatFit(kind, name, sites)] if sites else []
    return fits


def as_cells(fit: FormatFit) -> list[str]:
    """Kind, format, and figures, as the cells of a table."""
    shares = [_percent(fit.share(status)) for status in (FITS, FITS_SCALED, UNFIT)]
    return [fit.kind, fit.format, str(len(fit.sites)), *shares, _percent(fit.zeros)]


HEADINGS = ("kind", "format", "sites", FITS, FITS_SCALED, UNFIT, "zeros")


def figures_text(site: SiteFit) -> str:
    """A site with its figures."""
    scaled = f", {_percent(site.scaled_underflow)} when scaled" if not np.isnan(site.scaled_underflow) else ""
    return f"{site.status}: underflow {_percent(site.underflow)}{scaled}, overflow {_percent(site.overflow)}"


def as_lines(fits: Sequence[FormatFit]) -> list[str]:
    """The table, and the worst sites, for a terminal."""
    rows = [HEADINGS, *map(as_cells, fits)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    aligned = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)), *map(str.rjust, row[2:], widths[2:])])
        for row in rows
    )
    worst = [f"{fit.kind}/{site.site}, {fit.format}: {figures_text(site)}" for fit in fits for site in fit.worst()]
    lines = [*aligned, *(["", "worst sites (the largest value of all records)"] if worst else []), *(f"  {line}" for line in worst)]
    is_recorded = {
        "scaled_underflow": any(not np.isnan(site.scaled_underflow) for fit in fits for site in fit.sites),
        "zero_fraction": any(not np.isnan(fit.zeros) for fit in fits),
    }
    missing = [name for name, is_known in is_recorded.items() if not is_known]
    note = [f"Not recorded: {', '.join(missing)}."] if missing else []
    return lines + note


def as_json(path: str, fits: Sequence[FormatFit]) -> str:
    """The table, and the worst sites, as JSON."""
    content: list[dict[str, Any]] = [
        {
            "kind": fit.kind,
            "format": fit.format,
            "num_sites": len(fit.sites),
            "num_without_values": fit.num(UNKNOWN),
            **{status.replace(" ", "_"): _number(fit.share(status)) for status in (FITS, FITS_SCALED, UNFIT)},
            "zeros": _number(fit.zeros),
            "worst_sites": [
                {"status": site.status} | {name: value if name == "site" else _number(value) for name, value in vars(site).items()}
                for site in fit.worst()
            ],
        }
        for fit in fits
    ]
    return json.dumps({"path": path, "most_underflow": MOST_UNDERFLOW, "formats": content}, indent=2)


def _largest(table: Table | None) -> dict[str, float]:
    """The largest value of each site over all records; NaN if it never had a number."""
    if table is None:
        return {}
    return dict(zip(table.sites, np.fmax.reduce(table.values, axis=1, initial=np.nan).tolist(), strict=True))


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def _percent(part: float) -> str:
    return "-" if np.isnan(part) else f"{100 * part:.3g} %"
