"""The version of this package, from its metadata: pyproject.toml alone has the number."""

from __future__ import annotations

import importlib.metadata


def _installed() -> str:
    try:
        return importlib.metadata.version("lightning-module-monitor")
    except importlib.metadata.PackageNotFoundError:  # a folder of sources on the path
        return "unknown"


__version__ = _installed()
