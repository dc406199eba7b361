"""The command line ``lightning-module-monitor``: one subcommand for each of the modules in ``COMMANDS``."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Protocol

from lightning_module_monitor.commands import compare, export, keys, repair, replay, report, summary
from lightning_module_monitor.errors import ConfigError, printable
from lightning_module_monitor.width_check import command as coordinate_check

WRONG_USAGE = 2
FAILED = 3


class Command(Protocol):
    """What a module holds that is a subcommand. It imports what takes long to import when it runs: all of them are imported for one."""

    NAME: str
    HELP: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add what it takes."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run it; returns the exit status. A ``ConfigError`` or ``ImportError`` becomes one line."""
        ...


COMMANDS: Sequence[Command] = (report, compare, summary, keys, export, repair, replay, coordinate_check)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.

    Returns:
        Exit status: that of the subcommand; 2 for wrong usage, 3 if something else went wrong.
    """
    parser = argparse.ArgumentParser(prog="lightning-module-monitor", description=__doc__.partition(":")[0] + ".")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ConfigError, ImportError) as error:
        print(f"lightning-module-monitor {options.command}: error: {printable(str(error))}", file=sys.stderr)
        return WRONG_USAGE
    except BrokenPipeError:  # who reads what is printed has seen enough, as in "keys monitor.h5 | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        return FAILED
    return status
