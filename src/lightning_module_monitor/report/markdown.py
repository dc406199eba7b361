"""The verdict on a run as one page of Markdown, for a log of continuous integration or a language model, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.errors import printable
from lightning_module_monitor.health.judgement import LEVELS, Verdict
from lightning_module_monitor.record import LOSS, ModuleInfo
from lightning_module_monitor.report.run import Run, early, late, typical
from lightning_module_monitor.sinks.store.matrices import Table

MAX_SERIES = 12
"""Limit of the series that are shown."""
MAX_MODULES = 50
"""Limit of the modules that are shown."""
MAX_STEPS = 8
"""Limit of the steps at which values are shown."""

QUERIES = """\
## Queries

Python, in this order; `pip install lightning-module-monitor` brings `load_store`, which also reads a run that still writes.

The values of one series, by step:

```python
from lightning_module_monitor import load_store

store = load_store({path!r})
steps, values = store.series({key!r})
print(dict(zip(steps.tolist(), values.tolist())))
```

One statistic of all sites in the last record, the largest first:

```python
matrix = store.matrix({kind!r})
last = {{key.site: value for key, value in zip(matrix.keys, matrix.values[-1]) if key.statistic == {statistic!r}}}
for site, value in sorted(last.items(), key=lambda item: -item[1])[:10]:
    print(site, value)
```

What was found while the run trained, and every key:

```python
for finding in store.findings():
    print(finding.step, finding.severity, finding.name, finding.site, finding.words)
print("\\n".join(store.keys()))
```
"""


def as_json(run: Run, verdict: Verdict) -> str:
    """The verdict with its diagnoses, findings and checks."""
    steps = run.steps
    content = {
        "path": run.path,
        "version": run.attributes["package_version"],
        "started": run.attributes["started"],
        "first_step": steps[0] if steps else None,
        "last_step": steps[-1] if steps else None,
        "num_steps": len(steps),
        "num_sites": len(run.sites),
        "level": verdict.level,
        "headline": verdict.headline,
        "diagnoses": [dataclasses.asdict(one) for one in verdict.diagnoses],
        "findings": [{"level": LEVELS[one.severity], **dataclasses.asdict(one)} for one in verdict.findings],
        "checks": [{**dataclasses.asdict(one), "fired": [fired.key for fired in one.fired]} for one in verdict.checks],
    }
    return json.dumps(content, indent=2)


def as_markdown(run: Run, verdict: Verdict) -> str:
    """The page: verdict, diagnoses, the findings and series behind them, checks, what the store has, and queries to go on with."""
    steps = run.steps
    version = f"lightning-module-monitor {run.attributes['package_version']}"
    parts = [
        f"# Verdict: {verdict.level}",
        f"{_text(verdict.headline)}. Run `{_text(run.path)}`, {version}: {run.extent}.",
        "## Diagnoses",
        *(_diagnoses(verdict) or ["No cause was found."]),
    ]
    if verdict.findings:
        parts += ["## Findings", _table(["level", "name", "kind", "site", "step", "evidence"], _findings(verdict))]
    of_context = [table.key(0) for table in run.context if table.statistic in (LOSS, "lr")]
    series = run.series
    shown = [key for key in dict.fromkeys([*of_context, *(one.key for one in verdict.findings)]) if key in series][:MAX_SERIES]
    if shown:
        places = np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int).tolist()
        at = sorted({*(steps[place] for place in places), *(one.first_step for one in verdict.diagnoses)})
        rows = [(key, *(_value_at(*series[key], step) for step in at)) for key in shown]
        parts += ["## Series", _table(["key", *(f"step {step}" for step in at)], rows)]
    checks = [(one.name, one.status, str(one.num_series), str(one.num_records), one.reason) for one in verdict.checks]
    parts += ["## Checks", _table(["name", "status", "series", "records", "reason"], checks)]
    if run.modules:
        header = ["module", "type", "parameters", "output shape", "output dtype"]
        parts += [f"## Model: {counted(len(run.modules), 'module')}", _table(header, _rows_of(run.modules))]
    parts += ["## What the store has", "Keys are `[prefix/][stage/]kind/site/statistic`, without a stage those of training.", _kinds(run)]
    if run.tables:
        first = run.tables[0]
        parts += [QUERIES.format(path=run.path, key=first.key(0), kind=first.kind, statistic=first.statistic)]
    return "\n\n".join(parts)


def _diagnoses(verdict: Verdict) -> list[str]:
    texts = []
    for number, one in enumerate(verdict.diagnoses, 1):
        where = f", first at `{_text(one.site)}`" if one.site else ""
        follows = f" {counted(one.num_consequences, 'other finding')} may follow from it." if one.num_consequences else ""
        lines = [f"{number}. **{_text(one.headline)}**, {one.begin}{where}.{follows}"]
        texts.append("\n   - ".join([*lines, *map(_text, one.evidence), f"Try: {_text(one.advice)}."]))
    return texts


def _findings(verdict: Verdict) -> Iterator[Sequence[str]]:
    for level, name, findings in verdict.problems:
        for one in findings:
            yield level, name, one.kind, one.site, str(one.step), one.words


def _value_at(table: Table, row: int, step: int) -> str:
    """The last value up to a step."""
    recorded = np.flatnonzero(table.is_recorded[row] & (table.steps <= step))
    return f"{table.values[row, recorded[-1]]:.4g}" if len(recorded) else ""


def _rows_of(modules: Sequence[ModuleInfo]) -> Iterator[Sequence[str]]:
    for one in modules[:MAX_MODULES]:
        shape = "" if one.output_shape is None else str(one.output_shape)
        yield one.name, one.type, f"{one.num_parameters:,}", shape, one.output_dtype
    if len(modules) > MAX_MODULES:
        yield f"and {len(modules) - MAX_MODULES} more: `store.modules()`", "", "", "", ""


def _kinds(run: Run) -> str:
    rows = []
    for table in (*run.tables, *run.figures):
        medians = (f"{typical(typical(part(table.values))):.4g}" for part in (early, late))
        rows.append((table.kind, table.statistic, str(len(table.sites)), str(len(table.steps)), *medians))
    return _table(["kind", "statistic", "sites", "records", "median of all sites, first quarter", "last quarter"], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)


def _text(text: str) -> str:
    return printable(text).replace("|", "\\|")
