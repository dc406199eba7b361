"""The files of one run: the store, and beside it that of the raw tensors; and how other files are written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store.rewrite import temporary_path, tensors_path
from lightning_module_monitor.sinks.store.tensors import TensorStore
from lightning_module_monitor.sinks.store.writer import Store


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` for the block to write, which then takes its place; after an error ``path`` is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunFiles(Store):
    """Writes the records of one run: values to the store, raw tensors to their own file. An error of one file leaves the other alone.

    Arguments are those of :class:`~lightning_module_monitor.sinks.store.writer.Store`.
    """

    def __init__(self, path: str | os.PathLike[str], *, resumed: Path | None = None, **options: Any) -> None:
        super().__init__(path, resumed=resumed, **options)
        self._tensors: TensorStore | None = None
        self._options = {name: value for name, value in options.items() if name not in ("keys", "histogram_keys")}
        self._options["resumed"] = None if resumed is None else tensors_path(resumed)

    def write(self, record: Record) -> None:
        """Append a record. Never raises."""
        super().write(record)
        if self._tensors is None and self.has_begun:  # now the store's final name is known
            self._tensors = TensorStore(tensors_path(self.path), **self._options)
        if self._tensors is not None:
            self._tensors.write(record)

    def close(self) -> None:
        """Close the files. Never raises; twice does no harm."""
        super().close()
        if self._tensors is not None:
            self._tensors.close()
