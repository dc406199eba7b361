"""The command ``export``: every number of a store as one table."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_module_monitor.commands.stores import add_store, open_store, output_path, size_of, writing
from lightning_module_monitor.errors import require

NAME = "export"
HELP = "write every number of a store into a CSV or Parquet file"
EPILOG = """\
examples:
  lightning-module-monitor export monitor.h5 --format csv
  lightning-module-monitor export monitor.h5 --format parquet -o run.parquet

The columns are step, stage, kind, site, statistic and value; a row is a recorded value. Histograms are left out. In CSV a text that begins
with =, +, - or @ gets a ' before it: a spreadsheet would run it as a formula.

exit status:
  0  it was written
  2  the command is wrong, STORE cannot be read, or an extra is not installed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_store(parser)
    parser.add_argument("--format", choices=("csv", "parquet"), default="csv", help="default: csv")
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help="default: beside the store, as monitor.csv or monitor.parquet")


def run(arguments: argparse.Namespace) -> int:
    """Write the table."""
    store = open_store(arguments.store)
    path = output_path(arguments.output, store.path, f".{arguments.format}")
    require("pandas", "pandas")
    if arguments.format == "parquet":
        require("pyarrow", "parquet")
    frame = store.to_frame()
    with writing(path):
        if arguments.format == "parquet":
            frame.to_parquet(path, index=False)
        else:
            texts = {name: frame[name].map(_no_formula) for name in ("stage", "kind", "site", "statistic")}
            frame.assign(**texts).to_csv(path, index=False)
    print(f"{path}: {len(frame):,} values, {size_of(path)}")
    return 0


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
