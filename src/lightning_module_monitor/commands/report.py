"""The command ``report``: one page about one run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_module_monitor.commands.stores import add_store, open_store, output_path, size_of, writing

NAME = "report"
HELP = "write one HTML page about a run: a verdict, heat maps, profiles over depth, histograms, the configuration"
EPILOG = """\
examples:
  lightning-module-monitor report monitor.h5
  lightning-module-monitor report monitor.h5 -o report.html

The page is one file that needs no network. The run may still be going on: the page shows what there is by then.

exit status:
  0  it was written
  2  the command is wrong, STORE cannot be read, or an extra is not installed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_store(parser)
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help="default: beside the store, as monitor.html")


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    store = open_store(arguments.store)
    path = output_path(arguments.output, store.path, ".html")
    from lightning_module_monitor.report.page import write_report

    with writing(path):
        write_report([store], path)
    print(f"{path}: {size_of(path)}")
    return 0
