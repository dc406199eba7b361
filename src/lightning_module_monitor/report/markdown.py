"""The verdict on a run as a page of Markdown, for logs of continuous integration and language models, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.errors import printable
from lightning_module_monitor.health.judgement import LEVELS, Verdict
from lightning_module_monitor.keys import is_residual
from lightning_module_monitor.kinds import LOSS
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.report.stored_run import StoredRun, early, late, median_of_finite
from lightning_module_monitor.sinks.store.matrices import Table

MAX_SERIES = 12
"""Largest number of series on the page."""
MAX_MODULES = 50
"""Largest number of modules on the page."""
MAX_STEPS = 8
"""Largest number of steps whose values are on the page, besides first steps of diagnoses."""

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


def as_json(run: StoredRun, verdict: Verdict) -> str:
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
        "diagnoses": [dataclasses.asdict(diagnosis) for diagnosis in verdict.diagnoses],
        "findings": [{"level": LEVELS[finding.severity], **dataclasses.asdict(finding)} for finding in verdict.findings],
        "checks": [{**dataclasses.asdict(check), "fired": [figure.key for figure in check.fired]} for check in verdict.checks],
    }
    return json.dumps(content, indent=2)


def as_markdown(run: StoredRun, verdict: Verdict) -> str:
    """The page: verdict, diagnoses, their findings and series, checks, modules, the store's tables, and queries in Python."""
    steps = run.steps
    version = f"lightning-module-monitor {run.attributes['package_version']}"
    parts = [
        f"# Verdict: {verdict.level}",
        f"{_text(verdict.headline)}. Run `{_text(run.path)}`, {version}: {run.extent}.",
        "## Diagnoses",
        *(_diagnoses(verdict) or ["No cause was found."]),
    ]
    if verdict.findings:
        header = ["level", "name", "kind", "site", "step", "evidence"]
        rows = (
            (level, name, item.kind, item.site, str(item.step), item.words) for level, name, items in verdict.problems for item in items
        )
        parts += ["## Findings", _table(header, rows)]
    series = run.series
    candidates = [table.key(0) for table in run.context if table.statistic in (LOSS, "lr")] + [finding.key for finding in verdict.findings]
    keys = [key for key in dict.fromkeys(candidates) if key in series][:MAX_SERIES]
    if keys:
        indices = np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int).tolist()
        columns = sorted({*(steps[index] for index in indices), *(diagnosis.first_step for diagnosis in verdict.diagnoses)})
        values = ((key, *(_value_at(*series[key], step) for step in columns)) for key in keys)
        parts += ["## Series", _table(["key", *(f"step {step}" for step in columns)], values)]
    checks = [(check.name, check.status, str(check.num_series), str(check.num_records), check.reason) for check in verdict.checks]
    parts += ["## Checks", _table(["name", "status", "series", "records", "reason"], checks)]
    if run.modules:
        header = ["module", "type", "parameters", "output shape", "output dtype"]
        parts += [f"## Model: {counted(len(run.modules), 'module')}", _table(header, _module_rows(run.modules))]
    parts += ["## What the store has", "Keys are `[prefix/][stage/]kind/site/statistic`, without a stage those of training."]
    if any(is_residual(table.name) for table in run.tables):
        parts += ["Each `singular_value_1`, ... has a `residual_1`, ...: how far it is from a singular value at most."]
    parts += [_kinds(run)]
    if run.tables:
        first = run.tables[0]
        parts += [QUERIES.format(path=run.path, key=first.key(0), kind=first.kind, statistic=first.statistic)]
    return "\n\n".join(parts)


def _diagnoses(verdict: Verdict) -> list[str]:
    texts = []
    for number, diagnosis in enumerate(verdict.diagnoses, 1):
        num = len(diagnosis.consequences)
        follows = f" {counted(num, 'other finding')} may follow from it." if num else ""
        first = f"{number}. **{_text(diagnosis.title)}**.{follows}"
        texts.append("\n   - ".join([first, *map(_text, diagnosis.evidence), f"Try: {_text(diagnosis.advice)}."]))
    return texts


def _value_at(table: Table, row: int, step: int) -> str:
    """The last value up to a step."""
    recorded = np.flatnonzero(table.is_recorded[row] & (table.steps <= step))
    return f"{table.values[row, recorded[-1]]:.4g}" if len(recorded) else ""


def _module_rows(modules: Sequence[ModuleInfo]) -> Iterator[Sequence[str]]:
    for module in modules[:MAX_MODULES]:
        shape = "" if module.output_shape is None else str(module.output_shape)
        yield module.name, module.type, f"{module.num_parameters:,}", shape, module.output_dtype
    if len(modules) > MAX_MODULES:
        yield f"and {len(modules) - MAX_MODULES} more: `store.modules()`", "", "", "", ""


def _kinds(run: StoredRun) -> str:
    rows, totals = [], {id(table) for table in run.totals}
    for table in (*(table for table in run.tables if not is_residual(table.name)), *run.figures):
        medians = (f"{median_of_finite(median_of_finite(part(table.values))):.4g}" for part in (early, late))
        kind = f"{table.kind}/{table.sites[0]}" if id(table) in totals else table.kind
        rows.append((kind, table.statistic, str(len(table.sites)), str(len(table.steps)), *medians))
    return _table(["kind", "statistic", "sites", "records", "median of all sites, first quarter", "last quarter"], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)


def _text(text: str) -> str:
    return printable(text).replace("|", "\\|")
