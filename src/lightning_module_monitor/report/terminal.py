"""The verdict in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from lightning_module_monitor.errors import printable
from lightning_module_monitor.report.run import Run
from lightning_module_monitor.report.verdict import NOT_APPLICABLE, NOT_FOUND, NOT_RECORDED, TOO_FEW, Verdict

MAX_KEYS = 5
"""Limit of the keys that are shown of one check; the page has all."""
STYLES = {"sick": "bold red", "watch": "yellow", "healthy": "green", "unknown": "dim"}


def print_verdict(run: Run, verdict: Verdict) -> None:
    """Print the causes, the findings with their keys, the checks that found nothing and those that could not judge; the verdict last."""
    console = Console()

    def show(text: str, indent: int = 0) -> None:
        # A key or path is never broken.
        console.print(Padding(text, (0, 0, 0, indent)) if indent else text, highlight=False, soft_wrap=not indent, overflow="ignore")

    show(f"[bold]{_text(run.path)}[/bold]: {run.extent}")
    for number, cause in enumerate(verdict.diagnoses, 1):
        show(f"[bold]{number}. {_text(cause.title)}[/bold]")
        for line in (*cause.evidence, *([f"What follows: {', '.join(cause.consequences)}."] if cause.consequences else [])):
            show(_text(line), indent=3)
        show(_text(f"Try {cause.advice}."), indent=3)
    fired = {check.name: check.fired for check in verdict.checks}
    for level, name, findings in verdict.problems:
        show(f"[{STYLES[level]}]{level}[/] {_text(name)}")
        for finding in findings:
            show(_text(f"step {finding.step}: {finding.message}"), indent=3)
        keys = [one.key for one in fired.get(name, ())]
        for key in keys[:MAX_KEYS] if len(keys) > 1 else ():
            show(f"   {_text(key)}")
        if len(keys) > MAX_KEYS:
            show(f"   and {len(keys) - MAX_KEYS} more")
    passed = ", ".join(check.name for check in verdict.checks_with(NOT_FOUND))
    if passed:
        show("[green]not found[/]")
        show(passed, indent=3)
    for status in (TOO_FEW, NOT_RECORDED, NOT_APPLICABLE):
        checks = verdict.checks_with(status)
        if checks:
            show(f"[dim]{status}[/]")
        for check in checks:
            show(_text(f"{check.name}: {check.reason}"), indent=3)
    word = {"watch": "to watch"}.get(verdict.level, verdict.level)
    show(f"[{STYLES[verdict.level]}]{word}[/]: {_text(verdict.headline)}")


def _text(text: str) -> str:
    return escape(printable(text))
