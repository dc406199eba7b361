"""The command ``repair``: a store that a kill left half open becomes a plain HDF5 file."""

from __future__ import annotations

import argparse

from lightning_module_monitor.commands.stores import add_store, open_store
from lightning_module_monitor.errors import ConfigError

NAME = "repair"
HELP = "make the store of a run that was killed readable for every HDF5 program"
EPILOG = """\
example:
  lightning-module-monitor repair monitor.h5

The other commands, and load_store, read such a store without it. The file of raw tensors beside it needs none: it is always closed.

exit status:
  0  every HDF5 program can read it
  2  the command is wrong, STORE cannot be read, or a run is writing to it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Repair it."""
    from lightning_module_monitor.sinks.store.killed import is_in_use

    store = open_store(arguments.store)
    was_open = is_in_use(store.path)
    try:
        store.repair()
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    print(f"{store.path}: {'repaired' if was_open else 'was closed; nothing to repair'}")
    return 0
