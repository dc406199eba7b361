"""Stores with given values, as a run would have written them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.record import ModuleInfo, Record
from lightning_module_monitor.sinks.store.paths import journal_path
from lightning_module_monitor.sinks.store.writer import Store

Series = Mapping[str, Sequence[float | None]]


def open_store(
    path: Path,
    series: Series,
    *,
    every: int = 10,
    histograms: Mapping[str, Sequence[Histogram]] | None = None,
    configuration: Mapping[str, object] | None = None,
    modules: Sequence[ModuleInfo] = (),
) -> Store:
    """A store that is still being written.

    Args:
        path: The file.
        series: Values by key, one for each step; where there is ``None``, nothing is recorded.
        every: Steps are 0, ``every``, ...
        histograms: Histograms by key, one for each step.
        configuration: Of the run.
        modules: What is known of the modules.

    Returns:
        The open store.
    """
    histograms = histograms or {}
    store = Store(path, configuration=configuration or {}, keys=series, histogram_keys=histograms)
    for row in range(max(map(len, [*series.values(), *histograms.values()]))):
        values = {key: value for key, values in series.items() if row < len(values) and (value := values[row]) is not None}
        counts = {key: of_key[row] for key, of_key in histograms.items() if row < len(of_key)}
        store.write(Record.of(row * every, values, counts, modules=modules))
    return store


def write_store(path: Path, series: Series, **options: object) -> Path:
    """A store that was closed; arguments as above. Returns its path."""
    open_store(path, series, **options).close()  # type: ignore[arg-type]
    return path


def digests(*paths: Path) -> list[tuple[str, int]]:
    """Content and modification time of files, which change with every write."""
    return [(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in paths]


def copy_of_killed(path: Path, copy: Path) -> Path:
    """What a kill at this moment would leave of a store that is being written: a copy of the file and its journal, without a lock."""
    shutil.copy(path, copy)
    shutil.copy(journal_path(path), journal_path(copy))
    return copy
