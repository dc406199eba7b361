"""The files of one run: the store, and beside it that of the raw tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store.hdf5 import Store
from lightning_module_monitor.sinks.store.layout import tensors_path
from lightning_module_monitor.sinks.store.tensors import TensorStore


class RunFiles:
    """Writes the records of one run: values to the store, raw tensors to their own file. Either goes on where the other has to stop.

    Arguments are those of :class:`~lightning_module_monitor.sinks.store.hdf5.Store`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        keys: Iterable[str] = (),
        histogram_keys: Iterable[str] = (),
        resumed: Path | None = None,
        resume_from: int | None = None,
        logger: logging.Logger,
    ) -> None:
        self._options: dict[str, Any] = {"configuration": configuration, "resume_from": resume_from, "logger": logger}
        self._resumed = resumed
        self._store = Store(path, keys=keys, histogram_keys=histogram_keys, resumed=resumed, **self._options)
        self._tensors: TensorStore | None = None

    @property
    def path(self) -> Path:
        """The store; the name it really has is known when the first record is written."""
        return self._store.path

    @property
    def has_begun(self) -> bool:
        """Whether there is a store by now."""
        return self._store.has_begun

    def write(self, record: Record) -> None:
        """Append a record. Never raises."""
        self._store.write(record)
        if self._tensors is None:
            if not self.has_begun:
                return  # its name is not known yet
            resumed = None if self._resumed is None else tensors_path(self._resumed)
            self._tensors = TensorStore(tensors_path(self.path), resumed=resumed, **self._options)
        self._tensors.write(record)

    def close(self) -> None:
        """Close the files. Never raises; twice does no harm."""
        self._store.close()
        if self._tensors is not None:
            self._tensors.close()
