"""``python -m lightning_module_monitor``: the command line."""

from __future__ import annotations

import sys

from lightning_module_monitor.cli import main

if __name__ == "__main__":
    sys.exit(main())
