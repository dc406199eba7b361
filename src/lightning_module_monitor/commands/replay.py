"""The command ``replay``: the module of a snapshot once more, by itself."""

from __future__ import annotations

import argparse

NAME = "replay"
HELP = "run the module that made the first NaN or infinity again, with what it was called with"
EPILOG = """\
example:
  lightning-module-monitor replay --trust lightning_logs/version_0/monitor.snapshot-step=120.pt

A snapshot with a whole module in it is a pickle, which runs code when it is read: --trust only your own. One that has nothing but
tensors and plain containers is read without.

exit status:
  0  all is finite this time
  1  something is not
  2  there is no such snapshot, or wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--trust", action="store_true", help="read a whole module, whatever code the file runs")
    parser.add_argument("snapshot", help="file that the callback's health.snapshot has written")


def run(arguments: argparse.Namespace) -> int:
    """Run the module again; returns the exit status.

    Raises:
        ConfigError: If there is no snapshot.
    """
    from lightning_module_monitor.health.replay import show

    return show(arguments.snapshot, trust=arguments.trust)
