"""The command ``summary``: the verdict on a run, in the terminal."""

from __future__ import annotations

import argparse

from lightning_module_monitor.commands.stores import add_store, open_store
from lightning_module_monitor.errors import require

NAME = "summary"
HELP = "say what is healthy in a run and what is not, with the evidence, as a table"
EPILOG = """\
example:
  lightning-module-monitor summary monitor.h5

exit status:
  0  nothing is sick
  1  something is
  2  the command is wrong, or STORE cannot be read
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict."""
    from lightning_module_monitor.report.run import read_run
    from lightning_module_monitor.report.verdict import verdict_on

    store = open_store(arguments.store)
    require("rich", "report")
    from lightning_module_monitor.report.terminal import print_verdict

    run_read = read_run(store)
    verdict = verdict_on(run_read.tables, run_read.figures, run_read.said)
    print_verdict(run_read, verdict)
    return 1 if verdict.is_sick else 0
