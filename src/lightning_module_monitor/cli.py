"""The command line ``lightning-module-monitor``: one subcommand for each of the modules in ``COMMANDS``."""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.width_check import command as coordinate_check

WRONG_USAGE = 2
FAILED = 3


class Command(Protocol):
    """What a module holds that is a subcommand."""

    NAME: str
    HELP: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add what it takes."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run it; returns the exit status. A ``ConfigError`` or ``ImportError`` becomes one line."""
        ...


COMMANDS: Sequence[Command] = (coordinate_check,)


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
    # A console script finds no modules in the current folder by itself, as "python -m" does: there the user's classes are.
    sys.path.insert(0, str(Path.cwd()))
    # What a small run on purpose does, and what Lightning calls of torch.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    try:
        status: int = options.run(options)
    except (ConfigError, ImportError) as error:
        print(f"lightning-module-monitor {options.command}: error: {error}", file=sys.stderr)
        return WRONG_USAGE
    except Exception:
        traceback.print_exc()
        return FAILED
    return status
