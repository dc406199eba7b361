"""The command ``keys``: what a store holds."""

from __future__ import annotations

import argparse
import re

from lightning_module_monitor.commands.stores import add_store, open_store
from lightning_module_monitor.errors import ConfigError, printable

NAME = "keys"
HELP = "list the keys of a store"
EPILOG = """\
examples:
  lightning-module-monitor keys monitor.h5
  lightning-module-monitor keys monitor.h5 'gradient/.*/norm'

exit status:
  0  there are such keys
  1  there are none
  2  the command is wrong, or STORE cannot be read
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_store(parser)
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default=".*", help="regular expression that matches the whole key")


def run(arguments: argparse.Namespace) -> int:
    """Print them, one a line: those of numbers first, then those of histograms."""
    store = open_store(arguments.store)
    try:
        pattern = re.compile(arguments.pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"PATTERN is {arguments.pattern!r}; expected a regular expression ({error}).") from error
    found = [key for key in (*store.keys(), *store.histogram_keys()) if pattern.fullmatch(key)]
    for key in found:
        print(printable(key))
    return 0 if found else 1
