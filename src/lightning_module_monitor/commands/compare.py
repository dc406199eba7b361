"""The command ``compare``: one page about several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_module_monitor.commands.stores import open_store, output_path, size_of, writing
from lightning_module_monitor.errors import ConfigError

NAME = "compare"
HELP = "write one HTML page about several runs, side by side and with their differences"
EPILOG = """\
examples:
  lightning-module-monitor compare before/monitor.h5 after/monitor.h5
  lightning-module-monitor compare seed1.h5 seed2.h5 seed3.h5 -o seeds.html

Sites are matched by name; the page says what matched and what did not. Differences are to the first run.

exit status:
  0  it was written
  2  the command is wrong, a STORE cannot be read, or an extra is not installed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("stores", metavar="STORE", type=Path, nargs="+", help="paths of the runs' monitor.h5, two or more")
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, default=Path("compare.html"), help="default: compare.html")


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    if len(arguments.stores) < 2:
        raise ConfigError("one STORE is given; expected two or more. For one run there is the command report.")
    stores = [open_store(path) for path in arguments.stores]
    for store in stores:
        path = output_path(arguments.output, store.path, ".html")
    from lightning_module_monitor.report.page import write_report

    with writing(path):
        write_report(stores, path)
    print(f"{path}: {size_of(path)}")
    return 0
