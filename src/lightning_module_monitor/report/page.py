"""The page: an HTML file with the runs' numbers, plotly's script and the page's own scripts; it needs no network."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightning_module_monitor.errors import in_bytes, package_version, require
from lightning_module_monitor.health.checks import WITHOUT_FINDING
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.keys import Key, is_of_spectrum
from lightning_module_monitor.kinds import OVERHEAD_FRACTION, OWN_KIND, TRAIN
from lightning_module_monitor.record import Finding, ModuleInfo
from lightning_module_monitor.report.comparison import Change, as_text, differing_options, largest_changes, match_sites
from lightning_module_monitor.report.formats import HEADINGS, as_cells, figures_text, format_fits
from lightning_module_monitor.report.glance import MAX_ROWS, at_a_glance, length_of, names_of_groups, noise_scales_of, norms_of
from lightning_module_monitor.report.payload import Payload
from lightning_module_monitor.report.stored_run import StoredRun, read_run
from lightning_module_monitor.sinks.store.matrices import Table
from lightning_module_monitor.sinks.store.paths import whole_file
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store
from lightning_module_monitor.statistics.registry import QUANTILES

SCRIPTS = (
    *("data.js", "charts.js", "controls.js", "heat.js", "profiles.js", "heads.js"),
    *("histograms.js", "quantiles.js", "spectra.js", "glance.js", "noise.js", "page.js"),
)
"""In this order: each uses the scripts before it."""
SECTIONS = {
    "verdict": "Verdict",
    "glance": "At a glance",
    "match": "Comparison",
    "heat": "Heat maps",
    "profiles": "Profiles",
    "updates": "Update ratios",
    "noise": "Gradient noise",
    "rcc": "Coordinate check",
    "attention": "Attention",
    "histograms": "Histograms",
    "quantiles": "Quantiles",
    "spectra": "Singular values",
    "formats": "Formats",
    "modules": "Modules",
    "run": "Run",
}


OneStore: TypeAlias = str | os.PathLike[str] | StoreReader
"""A store: its path, the folder of its run, a log directory (see :func:`~lightning_module_monitor.load_store`), or its reader."""


def write_report(stores: OneStore | Sequence[OneStore], path: str | os.PathLike[str] | None = None) -> Path:
    """Write the page about a run, or about several runs side by side.

    Args:
        stores: The store of the run, or several stores; runs may still be writing. Differences are relative to the first.
        path: The HTML file. Missing folders are made, and an existing file is replaced once the page is complete. Default:
            ``monitor.html`` beside the store; for several runs ``compare.html`` in the current folder.

    Returns:
        The path of the HTML file.

    Raises:
        FileNotFoundError: If a store does not exist.
        ValueError: If this version cannot read a file as a store.
        ImportError: If the extra ``report`` is not installed.
        OSError: If the file cannot be written.

    Example::

        write_report("lightning_logs/version_0")
    """
    plotly = require("plotly.offline", "report")
    jinja2 = require("jinja2", "report")
    sources = [stores] if isinstance(stores, str | os.PathLike | StoreReader) else stores
    readers = [source if isinstance(source, StoreReader) else load_store(source) for source in sources]
    if path is None:
        path = "compare.html" if len(readers) > 1 else readers[0].default_path(".html")
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
        # Without "<" no browser reads it as markup.
        payload=safe(json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c")),
        policy=_policy(scripts),
    )
    with whole_file(path) as temporary:
        temporary.write_text(html, encoding="utf-8", newline="\n")
    return path


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy: the page loads nothing and runs only these scripts, also if a name or an option contains one."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {hashes}; {rest}"


def _payload(stores: Sequence[StoreReader], runs: Sequence[StoredRun]) -> dict[str, Any]:
    num_histograms = sum(len(run.histograms) for run in runs)
    payload = Payload(sum(len(table.sites) for run in runs for table in run.tables), num_histograms)
    content = [
        {
            "name": name,
            "tables": [payload.table(table) for table in run.tables if not is_of_spectrum(table.name)],
            "spectra": [payload.table(table) for table in run.tables if is_of_spectrum(table.name)],
            "context": [payload.table(table) for table in run.context],
            "norms": [payload.table(table) for table in norms_of(run)],
            "noise": [payload.table(table) for table in noise_scales_of(run)],
            "groups": names_of_groups(run),
            "modules": {module.name: _type_and_output(module) for module in run.modules},
            "histograms": [table for kind in store.histogram_kinds() for table in payload.histograms(store, kind)],
        }
        for name, store, run in zip(distinct_names([run.path for run in runs]), stores, runs, strict=True)
    ]
    return {"runs": content, "lists": payload.lists()}


def _type_and_output(module: ModuleInfo) -> str:
    """A line such as ``Linear, output [32, 64] float32``."""
    return module.type + (f", output {[*module.output_shape]} {module.output_dtype}" if module.output_shape is not None else "")


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The parts in which paths differ, without common beginnings and ends.

    >>> distinct_names(["runs/a/version_0/monitor.h5", "runs/b/version_0/monitor.h5"])
    ['a', 'b']
    """
    parts = [Path(path).with_suffix("").parts for path in paths]
    if len(paths) == 1:
        return [Path(paths[0]).name]

    def num_common(parts: Sequence[Sequence[str]]) -> int:
        return len([*itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))])

    start, end = num_common(parts), num_common([part[::-1] for part in parts])
    for stop in (-end or None, None):  # one path may be the beginning of another
        names = ["/".join(part[start:stop]) for part in parts]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{number}: {Path(path).stem}" for number, path in enumerate(paths, 1)]


def _context(runs: Sequence[StoredRun], payload: Mapping[str, Any]) -> dict[str, Any]:
    several = len(runs) > 1
    names = {"verdict", "run", *(["match"] if several else []), *_filled_sections(runs, payload)}
    shown = [_shown(run, content["name"]) for run, content in zip(runs, payload["runs"], strict=True)]
    # The folders identify the run, not the file's name: digits/version_0/monitor.h5.
    title = " and ".join(run["name"] for run in shown) if several else "/".join(Path(runs[0].path).resolve().parts[-3:])
    return {
        "title": title,
        "version": package_version(),
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "several": several,
        "format_headings": HEADINGS,
        "names": names,
        "sections": [(id_, name) for id_, name in SECTIONS.items() if id_ in names],
        "runs": shown,
        "groups": at_a_glance(runs),
        "max_rows": MAX_ROWS,
        "matches": match_sites(runs) if several else [],
        "changes": [
            {"name": content["name"], "rows": [_shown_change(change) for change in largest_changes(runs[0], run)]}
            for run, content in zip(runs[1:], shown[1:], strict=True)
        ],
        "first": next((run["first_series"] for run in shown if run["first_series"]), ""),
        "above": sorted({table.statistic for run in runs for table in run.context}, key=lambda name: name != "loss"),
        "options_that_differ": differing_options(runs) if several else [],
    }


def _filled_sections(runs: Sequence[StoredRun], payload: Mapping[str, Any]) -> set[str]:
    in_training = {(table.name.kind, table.statistic) for run in runs for table in run.tables if table.name.stage == TRAIN}
    kinds = {kind for kind, _statistic in in_training}
    sizes = {"rms", "norm", "abs_max", "abs_mean"}
    filled = {
        "glance": any(run.steps for run in runs),
        "heat": any(run["tables"] for run in payload["runs"]),
        "profiles": any(statistic in sizes for _kind, statistic in in_training) or ("gradient_flow", "gain") in in_training,
        "updates": ("update", "ratio") in in_training,
        "noise": any(noise_scales_of(run) for run in runs),
        "rcc": bool(kinds & {"rcc_effective_update", "rcc_propagating_update", "rcc_alignment"}),
        "attention": any(table.name.kind.startswith("attention_") for run in runs for table in run.tables),
        "histograms": any(run["histograms"] for run in payload["runs"]),
        "quantiles": any(statistic in QUANTILES for statistic in {table.statistic for run in runs for table in run.tables}),
        "spectra": any(run["spectra"] for run in payload["runs"]),
        "formats": any(map(format_fits, runs)),
        "modules": any(run.modules for run in runs),
    }
    return {name for name, is_filled in filled.items() if is_filled}


def _shown(run: StoredRun, name: str) -> dict[str, Any]:
    verdict = run.verdict()
    problems = _problems(verdict)
    causes = []
    explained: set[str] = set()
    for diagnosis in verdict.diagnoses:
        symptoms = dict.fromkeys(finding.name for finding in verdict.findings if finding.words in diagnosis.evidence)
        consequences = dict.fromkeys(diagnosis.consequences)
        explained |= {*symptoms, *consequences}
        causes.append((diagnosis, *([problems[name] for name in names if name in problems] for names in (symptoms, consequences))))
    return {
        "name": name,
        "path": run.path,
        "extent": run.extent,
        "formats": [(as_cells(fit), [(site.site, figures_text(site)) for site in fit.worst()]) for fit in format_fits(run)],
        "verdict": verdict,
        "first_series": _series_of(verdict.beginning) if verdict.beginning else "",
        "causes": causes,
        "others": [problem for name, problem in problems.items() if name not in explained],
        "checks": [(status, verdict.checks_with(status)) for status in WITHOUT_FINDING],
        "facts": _facts(run),
        "length": length_of(run),
        "figures": [_figure_row(table) for table in run.figures],
        "modules": [
            {**module._asdict(), "depth": module.name.count("."), "last": module.name.rpartition(".")[2]} for module in run.modules
        ],
        "configurations": [
            {**part, "options": [(option, as_text(value)) for option, value in part["configuration"].items()]}
            for part in reversed(run.attributes["configurations"])
        ],
    }


def _problems(verdict: Verdict) -> dict[str, dict[str, Any]]:
    """The findings of each check by its name, with its definition and other sites, the largest values first; a site stands once."""
    fired = {check.name: check.fired for check in verdict.checks}
    problems: dict[str, dict[str, Any]] = {}
    for level, name, findings in verdict.problems:
        definition = DETECTORS[name].formula if name in DETECTORS else ""
        problem = problems.setdefault(name, {"level": level, "name": name, "definition": definition, "findings": [], "sites": {}})
        problem["findings"] += [(finding, _series_of(finding), *_around_site(finding)) for finding in findings]
        in_words = {finding.site for finding, _series, _before, after in problem["findings"] if after is not None}
        figures = sorted(fired.get(name, ()), key=lambda figure: -abs(figure.value))
        sites = [(finding.site, _series_of(finding)) for finding in findings]
        sites += [(key.site, _series(key)) for key in (Key.parse(figure.key) for figure in figures)]
        for site, series in sites:
            if site and site not in in_words:
                problem["sites"].setdefault(site, series)
    return problems


def _around_site(finding: Finding) -> tuple[str, str | None]:
    """The words before and after the name of the finding's site; all words and ``None`` where they do not have it."""
    place = re.search(rf"(?<![\w.]){re.escape(finding.site)}(?!\w|\.\w)", finding.words) if finding.site else None
    return (finding.words, None) if place is None else (finding.words[: place.start()], finding.words[place.end() :])


def _shown_change(change: Change) -> dict[str, str]:
    numbers = {"before": change.before.median, "after": change.after.median, "factor": change.factor}
    names = {"site": change.key.site, "kind": change.key.full_kind, "statistic": change.key.statistic, "series": _series(change.key)}
    return names | {name: f"{number:.3g}" for name, number in numbers.items()}


def _series_of(finding: Finding) -> str:
    """The series of a finding at its site; empty without a series."""
    return _series(Key.parse(finding.key)._replace(site=finding.site)) if finding.key else ""


def _series(key: Key) -> str:
    """The series that the page's script shows when the site's name is pressed."""
    return json.dumps({"kind": key.full_kind, "statistic": key.statistic, "site": key.site})


def _facts(run: StoredRun) -> list[tuple[str, str]]:
    """Facts about the run, and the cost of monitoring it."""
    attributes, steps = run.attributes, run.steps
    facts = [
        ("store", run.path),
        ("started", str(attributes["started"])),
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
            facts.append(("cost of monitoring", f"{shares.mean():.2%} of the time of training, on average"))
    return facts


def _figure_row(table: Table) -> tuple[str, ...]:
    """Key, and first, last, smallest, largest and mean value."""
    values = table.values[0][table.is_recorded[0]]
    finite = values[np.isfinite(values)]
    numbers = [values[0], values[-1], *((finite.min(), finite.max(), finite.mean()) if finite.size else (np.nan,) * 3)]
    return (table.key(0), *(f"{number:.4g}" for number in numbers))
