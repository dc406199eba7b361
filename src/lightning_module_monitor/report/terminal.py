"""The verdict in the terminal."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.markup import escape

from lightning_module_monitor.errors import printable
from lightning_module_monitor.health.checks import NOT_FOUND, WITHOUT_FINDING
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.report.glance import as_lines
from lightning_module_monitor.report.stored_run import StoredRun

MAX_KEYS = 5
"""Largest number of keys printed for a check; the page has all."""
STYLES = {"sick": "bold red", "watch": "yellow", "healthy": "green", "unknown": "dim"}


def print_verdict(run: StoredRun, verdict: Verdict) -> None:
    """Print the run at a glance, causes, findings with their keys, and checks by status; the verdict is the last line."""
    console = Console()

    def show(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)  # does not break keys and paths

    def explain(text: str) -> None:
        indent = " " * 3
        wrapper = textwrap.TextWrapper(max(console.width, 40), indent, indent, break_long_words=False, break_on_hyphens=False)
        for line in wrapper.wrap(printable(text)):
            show(escape(line))

    show(f"[bold]{_text(run.path)}[/bold]: {run.extent}")
    for line in as_lines(run):
        show(_text(line))
    for number, cause in enumerate(verdict.diagnoses, 1):
        show(f"[bold]{number}. {_text(cause.title)}[/bold]")
        follows = [f"Consequences: {', '.join(dict.fromkeys(cause.consequences))}."] if cause.consequences else []
        for line in (*cause.evidence, *follows, f"Try: {cause.advice}."):
            explain(line)
    fired = {check.name: check.fired for check in verdict.checks}
    for level, name, findings in verdict.problems:
        show(f"[{STYLES[level]}]{level}[/] {_text(name)}")
        for finding in findings:
            explain(f"step {finding.step}: {finding.message}")
        keys = [figure.key for figure in fired.get(name, ())]
        for key in keys[:MAX_KEYS] if len(keys) > 1 else ():
            show(f"   {_text(key)}")
        if len(keys) > MAX_KEYS:
            show(f"   and {len(keys) - MAX_KEYS} more")
    for status in WITHOUT_FINDING:
        checks = verdict.checks_with(status)
        if checks:
            show(f"[{'green' if status == NOT_FOUND else 'dim'}]{status}[/]")
        explain(", ".join(check.name for check in checks if not check.reason))
        for check in checks:
            if check.reason:
                explain(f"{check.name}: {check.reason}")
    word, _colon, rest = verdict.sentence.partition(":")
    show(f"[{STYLES[verdict.level]}]{word}[/]:{_text(rest)}")


def _text(text: str) -> str:
    return escape(printable(text))
