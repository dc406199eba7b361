"""The series of a store: the numbers and the histograms of each key, and of each kind in one read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import Modules
from lightning_module_monitor.histogram import EDGES, FINITE, NOT_FINITE
from lightning_module_monitor.kinds import RESIDUALS, SINGULAR_VALUES
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.sinks.store import schema
from lightning_module_monitor.sinks.store.content import Content
from lightning_module_monitor.sinks.store.journal import Journal
from lightning_module_monitor.sinks.store.matrices import HistogramMatrix, Matrix, filled_columns, read_histograms, read_numbers
from lightning_module_monitor.sinks.store.read_access import AbsentKeyError, open_store
from lightning_module_monitor.suggestions import nearest, nearest_pattern, or_examples


class StoredSeries:
    """The numbers and histograms of a store, by key and by kind."""

    def __init__(self, path: Path, url: str | None = None) -> None:
        self.path = path
        """The file."""
        self.location = str(path) if url is None else url
        """The path, or the URL that the file was copied from."""
        self._journal: Journal | None = None
        """As it was last read."""

    @contextmanager
    def _open(self) -> Iterator[Content]:
        with open_store(self.path, known=self._journal) as content:
            self._journal = content.journal
            yield content

    # -------------------------------------------------------------- by key

    def __getitem__(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return self.series(key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self, pattern: str | None = None) -> list[str]:
        """The keys of recorded numbers, for :meth:`series`, group by group in the order of the columns.

        Args:
            pattern: Only keys that this pattern matches as a whole (``re.fullmatch``).

        Raises:
            KeyError: If it matches none.
        """
        keys = self._recorded_keys(histograms=False)
        if pattern is None:
            return keys
        try:
            matched = [key for key in keys if re.fullmatch(pattern, key)]
        except re.error:
            raise AbsentKeyError(f"{str(self.path)!r} has no key {pattern!r}{or_examples(nearest(pattern, keys), keys)}") from None
        if not matched:
            near = or_examples(nearest_pattern(pattern, keys), keys)
            raise AbsentKeyError(f"{str(self.path)!r} has no key {pattern!r}, and as a pattern it matches none of {len(keys)} keys{near}")
        return matched

    def histogram_keys(self) -> list[str]:
        """The keys of all recorded histograms, for :meth:`histogram`, group by group in the order of the columns."""
        return self._recorded_keys(histograms=True)

    def _recorded_keys(self, *, histograms: bool) -> list[str]:
        recorded = self._recorded_columns(histograms=histograms)
        return [schema.join(group, column) for group, columns in recorded.items() for column in columns]

    def series(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The values of a key, or of all keys that a pattern matches.

        Args:
            key: One of :meth:`keys`; or a pattern (``re.fullmatch``).

        Returns:
            Steps (int64) and values (float64), both of shape ``(rows,)``: the rows in which the key was recorded. A NaN among
            the values was recorded as such. With a pattern values have the shape ``(rows, keys)``, with the columns ``keys(pattern)``, and
            are also NaN where a key was not recorded.
        """
        column = self._column(*schema.split(key))
        if column is not None:
            return column[0], np.asarray(column[1], np.float64)
        if key in self.histogram_keys():
            message = f"{key!r} in {str(self.path)!r} is a histogram, not a series of numbers; read it with histogram({key!r})."
            raise AbsentKeyError(message)
        return self._joined(self.keys(key))

    def _joined(self, keys: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The steps in which any of the keys was recorded, and the values, with a column for each key."""
        by_key = {}
        with self._open() as content:
            for group in dict.fromkeys(schema.split(key)[0] for key in keys):
                matrix = read_numbers(content, group)
                for parts, numbers, recorded in zip(matrix.keys, matrix.values.T, matrix.is_recorded.T, strict=True):
                    by_key[parts.format()] = matrix.steps[recorded], numbers[recorded]
        steps = np.unique(np.concatenate([by_key[key][0] for key in keys]))
        values = np.full((len(steps), len(keys)), np.nan)
        for column, key in enumerate(keys):
            steps_of_key, numbers = by_key[key]
            values[np.searchsorted(steps, steps_of_key), column] = numbers
        return steps, values

    def singular_values(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """The largest singular values of a matrix, as a rule with ``singular_values`` records them.

        Args:
            name: The beginning of their keys, kind and site: ``parameter/encoder.weight``.

        Returns:
            Steps (int64, shape ``(rows,)``) of its records; the values from the largest on, and their residuals, how far each is from a
            singular value at most (both float64, shape ``(rows, values)``). A value that has not converged, or that a small matrix does
            not have, is NaN.
        """
        keys = self.keys()
        count = sum(f"{name}/{value}" in keys for value in SINGULAR_VALUES)
        if not count:
            first = f"/{SINGULAR_VALUES[0]}"
            near = nearest(name, [key.removesuffix(first) for key in keys if key.endswith(first)])
            raise AbsentKeyError(f"{str(self.path)!r} has no singular values of {name!r}{near}")
        steps, numbers = self._joined([f"{name}/{part}" for part in (*SINGULAR_VALUES[:count], *RESIDUALS[:count])])
        return steps, numbers[:, :count], numbers[:, count:]

    def histogram(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """The histograms of a key.

        Args:
            key: One of :meth:`histogram_keys`.

        Returns:
            Steps (int64, shape ``(rows,)``) of its records; counts of the finite elements (int64, shape ``(rows, bins)``); the edges
            of the bins (float64, shape ``(bins + 1,)``, see ``Histogram.edges``).
        """
        steps, rows = self._histogram_rows(key)
        return steps, rows[:, FINITE], EDGES.copy()

    def nonfinite(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Counts of the non-finite elements in the histograms of a key.

        Args:
            key: One of :meth:`histogram_keys`.

        Returns:
            Steps, shape ``(rows,)``, and counts of ``-inf``, ``inf`` and ``nan``, shape ``(rows, 3)``, both int64.
        """
        steps, rows = self._histogram_rows(key)
        return steps, rows[:, NOT_FINITE]

    def _histogram_rows(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        column = self._column(*schema.split_histogram(key))
        if column is None:
            raise AbsentKeyError(f"{str(self.path)!r} has no histogram {key!r}{nearest(key, self.histogram_keys())}")
        return column[0], np.asarray(column[1], np.int64)

    def _column(self, group: str, column: str) -> tuple[NDArray[np.int64], schema.Values] | None:
        """The recorded rows of a column, with their steps; ``None`` if there is no such column."""
        with self._open() as content:
            table = content.table(group)
            if column not in table.columns:
                return None
            index = table.columns.index(column)
            rows = table.read(columns=slice(index, index + 1))
        recorded = schema.is_recorded(rows)[:, 0]
        return table.steps[recorded], rows[recorded, 0]

    # -------------------------------------------------------------- by kind

    def modules(self) -> list[ModuleInfo]:
        """The modules of the model, in its order: name, type, number of parameters, and shape and dtype of the first output.

        A notebook shows them as a table. Empty for a store of an earlier version, and if no module was monitored.
        """
        with self._open() as content:
            return Modules(content.modules())

    def kinds(self) -> list[str]:
        """The parts of keys before site and statistic, for :meth:`matrix`: ``activation``, ``validation/activation``.

        Keys without a kind, such as ``loss``, belong to ``logged``.
        """
        return list(dict.fromkeys(map(schema.kind_of, self._recorded_columns(histograms=False))))

    def histogram_kinds(self) -> list[str]:
        """The kinds with histograms, for :meth:`histogram_matrix`."""
        return list(dict.fromkeys(map(schema.kind_of, self._recorded_columns(histograms=True))))

    def matrix(self, kind: str) -> Matrix:
        """All numbers of a kind, in one read.

        Args:
            kind: One of :meth:`kinds`.

        Returns:
            Steps, keys and values.
        """
        with self._open() as content:
            return read_numbers(content, self._group(content, kind, histograms=False))

    def histogram_matrix(self, kind: str, max_rows: int | None = None) -> HistogramMatrix:
        """The histograms of a kind, in one read.

        Args:
            kind: One of :meth:`histogram_kinds`.
            max_rows: The most records to read, evenly spaced: histograms take far more memory than numbers. By default all.

        Returns:
            Steps, keys and counts.
        """
        with self._open() as content:
            return read_histograms(content, self._group(content, kind, histograms=True), max_rows)

    def _group(self, content: Content, kind: str, *, histograms: bool) -> str:
        group_by_kind = {schema.kind_of(group): group for group in content.columns(histograms=histograms)}
        if kind not in group_by_kind:
            raise AbsentKeyError(f"{str(self.path)!r} has no kind {kind!r}{nearest(kind, group_by_kind)}")
        return group_by_kind[kind]

    def _recorded_columns(self, *, histograms: bool) -> dict[str, list[str]]:
        """The columns of numbers, or of histograms, by group, that were ever recorded: a planned site may never run."""
        recorded = {}
        with self._open() as content:
            for group, columns in content.columns(histograms=histograms).items():
                recorded[group] = [columns[index] for index in np.flatnonzero(filled_columns(content.table(group)))]
        return {group: columns for group, columns in recorded.items() if columns}
