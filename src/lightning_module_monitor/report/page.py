"""The page: one HTML file with the runs' numbers, plotly's script, and the page's own, that needs no network."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightning_module_monitor.errors import in_bytes, package_version, require
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.verdict import (
    NOT_APPLICABLE,
    NOT_COMPUTED,
    NOT_FOUND,
    NOT_RECORDED,
    PASSED_OVER,
    TOO_FEW,
    Verdict,
)
from lightning_module_monitor.record import OVERHEAD_FRACTION, OWN_KIND, TRAIN, Finding, Key, ModuleInfo
from lightning_module_monitor.report.comparison import Change, as_text, differing_options, largest_changes, match
from lightning_module_monitor.report.payload import Payload
from lightning_module_monitor.report.run import Run, read_run
from lightning_module_monitor.sinks.files import whole_file
from lightning_module_monitor.sinks.store.matrices import Table
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store

SCRIPTS = ("data.js", "charts.js", "controls.js", "heat.js", "profiles.js", "heads.js", "histograms.js", "page.js")
"""In this order: each uses those before it."""
SECTIONS = {
    "verdict": "Verdict",
    "match": "Comparison",
    "heat": "Heat maps",
    "profiles": "Profiles",
    "updates": "Update ratios",
    "rcc": "Coordinate check",
    "attention": "Attention",
    "histograms": "Histograms",
    "modules": "Modules",
    "run": "Run",
}


OneStore: TypeAlias = str | os.PathLike[str] | StoreReader
"""A store: its path, the folder of its run, a log directory (see :func:`~lightning_module_monitor.load_store`), or its reader."""


def write_report(stores: OneStore | Sequence[OneStore], path: str | os.PathLike[str] | None = None) -> Path:
    """Write the page about one run, or about several side by side.

    Args:
        stores: The run's store, or several; the runs may be going on. Differences are to the first.
        path: The HTML file; missing folders are made, and what is there is replaced once the page is whole. Default: beside the store,
            as ``monitor.html``; of several runs ``compare.html`` in the current folder.

    Returns:
        The path of the HTML file.

    Raises:
        FileNotFoundError: If there is no such store.
        ValueError: If a file is no store that this version can read.
        ImportError: If the extra ``report`` is not installed.
        OSError: If the file cannot be written.

    Example::

        write_report("lightning_logs/version_0")
    """
    plotly = require("plotly.offline", "report")
    jinja2 = require("jinja2", "report")
    given = [stores] if isinstance(stores, str | os.PathLike | StoreReader) else stores
    readers = [one if isinstance(one, StoreReader) else load_store(one) for one in given]
    if path is None:
        path = "compare.html" if len(readers) > 1 else readers[0].path.with_suffix(".html")
    path = Path(path)
    runs = [read_run(store) for store in readers]
    payload = _payload(readers, runs)
    scripts = [plotly.get_plotlyjs(), "\n".join(_asset(name) for name in SCRIPTS)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    safe = environment.filters["safe"]
    html: str = environment.from_string(_asset("page.html")).render(
        **_context(runs, payload),
        style=safe(_asset("page.css")),
        scripts=[safe(script) for script in scripts],
        # No browser takes it for markup.
        payload=safe(json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")),
        policy=_policy(scripts),
    )
    with whole_file(path) as temporary:
        temporary.write_text(html, encoding="utf-8", newline="\n")
    return path


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy: the page loads nothing, and runs these scripts only, whatever a name or an option holds."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {hashes}; {rest}"


def _payload(stores: Sequence[StoreReader], runs: Sequence[Run]) -> dict[str, Any]:
    num_histograms = sum(len(run.histograms) for run in runs)
    payload = Payload(sum(len(table.sites) for run in runs for table in run.tables), num_histograms)
    content = [
        {
            "name": name,
            "tables": [payload.table(table) for table in run.tables],
            "context": [payload.table(table) for table in run.context],
            "modules": {one.name: _in_words(one) for one in run.modules},
            "histograms": [one for kind in store.histogram_kinds() for one in payload.histograms(store, kind)],
        }
        for name, store, run in zip(distinct_names([run.path for run in runs]), stores, runs, strict=True)
    ]
    return {"runs": content, "lists": payload.lists()}


def _in_words(module: ModuleInfo) -> str:
    """A module in a line: ``Linear, output [32, 64] float32``."""
    return module.type + (f", output {[*module.output_shape]} {module.output_dtype}" if module.output_shape is not None else "")


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The parts of paths that differ, without common beginnings and ends.

    >>> distinct_names(["runs/a/version_0/monitor.h5", "runs/b/version_0/monitor.h5"])
    ['a', 'b']
    """
    parts = [Path(path).with_suffix("").parts for path in paths]
    if len(paths) == 1:
        return [Path(paths[0]).name]

    def num_common(parts: Sequence[Sequence[str]]) -> int:
        return len([*itertools.takewhile(lambda alike: len(set(alike)) == 1, zip(*parts, strict=False))])

    start, end = num_common(parts), num_common([part[::-1] for part in parts])
    for stop in (-end or None, None):  # one path may be the beginning of another
        names = ["/".join(part[start:stop]) for part in parts]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{number}: {Path(path).stem}" for number, path in enumerate(paths, 1)]


def _context(runs: Sequence[Run], payload: Mapping[str, Any]) -> dict[str, Any]:
    several = len(runs) > 1
    names = {"verdict", "run", *(["match"] if several else []), *_filled_sections(runs, payload)}
    shown = [_shown(run, content["name"]) for run, content in zip(runs, payload["runs"], strict=True)]
    # The folders identify the run, and the file's name does not: digits/version_0/monitor.h5.
    title = " and ".join(run["name"] for run in shown) if several else "/".join(Path(runs[0].path).resolve().parts[-3:])
    return {
        "title": title,
        "version": package_version(),
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "several": several,
        "names": names,
        "sections": [(id_, name) for id_, name in SECTIONS.items() if id_ in names],
        "runs": shown,
        "matches": match(runs) if several else [],
        "changes": [
            {"name": one["name"], "rows": [_shown_change(change) for change in largest_changes(runs[0], run)]}
            for run, one in zip(runs[1:], shown[1:], strict=True)
        ],
        "first": next((run["series_of_beginning"] for run in shown if run["series_of_beginning"]), ""),
        "above": sorted({table.statistic for run in runs for table in run.context}, key=lambda name: name != "loss"),
        "options_that_differ": differing_options(runs) if several else [],
    }


def _filled_sections(runs: Sequence[Run], payload: Mapping[str, Any]) -> set[str]:
    """The sections that there are numbers for."""
    in_training = {(table.name.kind, table.statistic) for run in runs for table in run.tables if table.name.stage == TRAIN}
    kinds = {kind for kind, _statistic in in_training}
    of_sizes = {"rms", "norm", "abs_max", "abs_mean"}
    filled = {
        "heat": any(run.tables for run in runs),
        "profiles": any(statistic in of_sizes for _kind, statistic in in_training) or ("gradient_flow", "gain") in in_training,
        "updates": ("update", "ratio") in in_training,
        "rcc": bool(kinds & {"rcc_effective_update", "rcc_propagating_update", "rcc_alignment"}),
        "attention": any(table.name.kind.startswith("attention_") for run in runs for table in run.tables),
        "histograms": any(run["histograms"] for run in payload["runs"]),
        "modules": any(run.modules for run in runs),
    }
    return {name for name, is_filled in filled.items() if is_filled}


def _shown(run: Run, name: str) -> dict[str, Any]:
    verdict = run.verdict()
    problems = _problems(verdict)
    causes = [(one, [problem.name for problem in verdict.findings if problem.words in one.evidence]) for one in verdict.diagnoses]
    causes = [(one, [*dict.fromkeys(own)]) for one, own in causes]
    explained = {problem for one, own in causes for problem in (*own, *one.consequences)}
    return {
        "name": name,
        "path": run.path,
        "extent": run.extent,
        "verdict": verdict,
        "series_of_beginning": _series(verdict.beginning) if verdict.beginning else "",
        "causes": [
            (cause, [problems[one] for one in own if one in problems], [problems[one] for one in dict.fromkeys(cause.consequences)])
            for cause, own in causes
        ],
        "others": [one for problem, one in problems.items() if problem not in explained],
        "checks": [
            ("found nothing", verdict.checks_with(NOT_FOUND)),
            (PASSED_OVER, verdict.checks_with(PASSED_OVER)),
            ("could not judge", verdict.checks_with(TOO_FEW, NOT_COMPUTED, NOT_RECORDED)),
            ("not applicable", verdict.checks_with(NOT_APPLICABLE)),
        ],
        "facts": _facts(run),
        "figures": [_figure_row(table) for table in run.figures],
        "modules": [{**one._asdict(), "depth": one.name.count("."), "last": one.name.rpartition(".")[2]} for one in run.modules],
        "configurations": [
            {**part, "options": [(option, as_text(value)) for option, value in part["configuration"].items()]}
            for part in reversed(run.attributes["configurations"])
        ],
    }


def _problems(verdict: Verdict) -> dict[str, dict[str, Any]]:
    """By name what a check found: the findings, what it looks at, and its sites, the largest values first."""
    fired = {check.name: check.fired for check in verdict.checks}
    problems: dict[str, dict[str, Any]] = {}
    for level, name, findings in verdict.problems:
        worst = sorted(fired.get(name, ()), key=lambda one: -abs(one.value))
        keys = [Key.parse(one.key) for one in worst if Key.parse(one.key).site]
        sites = [(key.site, json.dumps({"kind": key.full_kind, "statistic": key.statistic, "site": key.site})) for key in keys]
        definition = DETECTORS[name].formula if name in DETECTORS else ""
        shown = [(one, _series(one)) for one in findings]
        problems.setdefault(name, {"level": level, "name": name, "definition": definition, "findings": [], "sites": sites})["findings"] += (
            shown
        )
    return problems


def _shown_change(change: Change) -> dict[str, Any]:
    factor = "" if math.isnan(change.factor) else f"{change.factor:.3g}"
    return {**vars(change), "series": _series(change), "before": f"{change.before:.3g}", "after": f"{change.after:.3g}", "factor": factor}


def _series(shown_by: Finding | Change) -> str:
    """The series that the page's script shows when a site's name is pressed; empty if there is none."""
    if not shown_by.statistic:
        return ""
    return json.dumps({"kind": shown_by.kind, "statistic": shown_by.statistic, "site": shown_by.site})


def _facts(run: Run) -> list[tuple[str, str]]:
    """Facts about the run, and the cost of monitoring it."""
    attributes, steps = run.attributes, run.steps
    facts = [
        ("store", run.path),
        ("begun", str(attributes["started"])),
        ("lightning-module-monitor", str(attributes["package_version"])),
        ("format of the store", str(attributes["format_version"])),
        ("monitored steps", f"{len(steps)}" + (f", {steps[0]} to {steps[-1]}" if steps else "")),
        ("numbers a step", f"{sum(len(table.sites) for table in (*run.tables, *run.figures)):,}"),
    ]
    if Path(run.path).exists():
        facts.append(("size of the store", in_bytes(Path(run.path).stat().st_size)))
    for table in run.figures:
        shares = table.values[np.isfinite(table.values)]
        if (table.name.kind, table.statistic) == (OWN_KIND, OVERHEAD_FRACTION) and shares.size:
            facts.append(("cost of monitoring", f"{shares.mean():.2%} of the time of training, on the average"))
    return facts


def _figure_row(table: Table) -> tuple[str, ...]:
    """Key, and first, last, smallest, largest and mean value."""
    values = table.values[0][table.is_recorded[0]]
    finite = values[np.isfinite(values)]
    numbers = [values[0], values[-1], *((finite.min(), finite.max(), finite.mean()) if finite.size else (np.nan,) * 3)]
    return (table.key(0), *(f"{number:.4g}" for number in numbers))
