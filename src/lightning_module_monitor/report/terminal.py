"""The verdict as a table in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_module_monitor.errors import printable
from lightning_module_monitor.record import Finding
from lightning_module_monitor.report.run import Run
from lightning_module_monitor.report.verdict import Verdict

MAX_SITES = 12
"""Limit of the sites that are shown of one problem; the page has all."""
STYLES = {"sick": "bold red", "watch": "yellow", "ok": "green", "not looked at": "dim"}


def print_verdict(run: Run, verdict: Verdict) -> None:
    """Print the findings, the checks without findings, and those without recorded values."""
    console = Console()
    console.print(f"[bold]{_text(run.path)}[/bold]: {run.extent}", highlight=False, soft_wrap=True)
    for number, one in enumerate(verdict.diagnoses, 1):
        console.print(f"[bold]{number}.[/bold] {_text(str(one))}", highlight=False, soft_wrap=True)
    console.print(_table(verdict))
    word = {"watch": "to watch", "ok": "healthy"}.get(verdict.level, verdict.level)
    first = verdict.beginning
    begins = f"; it begins at step {first.first_step}: {first.name}, {_place(first)}" if first else ""
    console.print(f"[{STYLES[verdict.level]}]{word}[/]: {_text(verdict.headline)}{_text(begins)}", highlight=False, soft_wrap=True)


def _table(verdict: Verdict) -> Table:
    table = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in ("verdict", "problem", "site", "evidence"):
        table.add_column(column, overflow="fold")
    for level, name, findings in verdict.problems:
        for number, finding in enumerate(findings[:MAX_SITES]):
            heading = (f"[{STYLES[level]}]{level}", _text(name)) if number == 0 else ("", "")
            table.add_row(*heading, _text(_place(finding)), _text(finding.words))
        if len(findings) > MAX_SITES:
            table.add_row("", "", f"and {len(findings) - MAX_SITES} more", "")
    for check in verdict.passed:
        table.add_row(f"[{STYLES['ok']}]ok", check.name, "", f"none in {check.num_series} series")
    for check in verdict.blind:
        table.add_row(f"[{STYLES['not looked at']}]not looked at", check.name, "", _text(check.obstacle))
    return table


def _place(finding: Finding) -> str:
    return f"{finding.site} ({finding.kind})" if finding.site and finding.kind else finding.site or finding.kind


def _text(text: str) -> str:
    return escape(printable(text))
