"""A store copied into a new file: the one way to repair, to widen, to cut, and to begin with the rows of another run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import Finding
from lightning_module_monitor.sinks.store import findings, layout, space

_BYTES_PER_COPY = 1 << 22


class Count(NamedTuple):
    """Number of rows (of all tables together), or of raw tensors, that a copy has of its source."""

    kept: int
    superseded: int
    """Since this copy."""


def rewrite(
    source: h5py.File,
    target: Path,
    *,
    attributes: layout.Attributes | None = None,
    more: Mapping[str, Sequence[str]] | None = None,
    before_step: int | None = None,
    with_superseded: bool = True,
) -> Count:
    """Copy a store into a new, plain file at ``target``.

    Args:
        source: The store, open in any mode.
        target: Path of the copy; not the source's own.
        attributes: Replaces the source's own.
        more: Columns by group that the copy has besides the source's.
        before_step: Rows and findings of this step and later ones are superseded.
        with_superseded: Whether the copy has rows and findings that are superseded, by this step or before.

    Returns:
        Number of rows.
    """
    more, until = more or {}, sys.maxsize if before_step is None else before_step
    parts = [part for part in _parts(source, more, until) if with_superseded or not layout.is_superseded(part.target)]
    found = [(group, some) for group, some in _findings(source, until) if with_superseded or not layout.is_superseded(group)]
    with layout.new_file(target, attributes or layout.read_attributes(source)) as copy:
        layout.create_tables(copy, {**more, **{part.target: part.columns for part in parts}})
        for group, _some in found:
            findings.create(copy.require_group(group))
    with layout.changes(target) as copy:
        for part in parts:
            _copy_rows(source[part.source], copy, part)
        for group, some in found:
            with space.room(copy, findings.num_bytes(some)):
                findings.append(copy[group], some)
    kept = sum(len(part.rows) for part in parts if not layout.is_superseded(part.target))
    return Count(kept, sum(len(part.rows) for part in parts if part.source != part.target))


class _Part(NamedTuple):
    """Rows of a table that go to one table of the copy."""

    source: str
    target: str
    columns: Sequence[str]
    rows: NDArray[np.int64]


def _parts(source: h5py.File, more: Mapping[str, Sequence[str]], until: int) -> Iterator[_Part]:
    for group, columns in layout.read_all_columns(source).items():
        is_kept = (layout.read_steps(source[group]) < until) | layout.is_superseded(group)
        yield _Part(group, group, list(dict.fromkeys((*columns, *more.get(group, ())))), np.flatnonzero(is_kept))
        if not is_kept.all():
            yield _Part(group, f"{layout.next_superseded(source)}/{group}", columns, np.flatnonzero(~is_kept))


def _findings(source: h5py.File, until: int) -> Iterator[tuple[str, list[Finding]]]:
    """Findings, and the group of the copy that they go to."""
    found = findings.read(source)
    yield "/", [one for one in found if one.step < until]
    later = [one for one in found if one.step >= until]
    if later:
        yield layout.next_superseded(source), later
    for group in layout.superseded_groups(source):
        yield group, findings.read(source[group])


def _copy_rows(source: h5py.Group, copy: h5py.File, part: _Part) -> None:
    target, rows = copy[part.target], part.rows
    row_shape = target["values"].shape[1:]
    rows_per_copy = max(1, _BYTES_PER_COPY // (8 * int(np.prod(row_shape))))
    with space.room(copy, 8 * len(rows) + space.index_bytes(len(rows), len(rows))):
        for name in ("values", "steps"):
            target[name].resize(len(rows), axis=0)
        target["steps"][...] = layout.read_steps(source)[rows]
    # A wider table begins with the source's own columns, in their order; in blocks, because a store can be larger than memory.
    for first in range(0, len(rows), rows_per_copy):
        some = rows[first : first + rows_per_copy]
        block = source["values"][some[0] : some[-1] + 1][some - some[0]]
        wide = np.full((len(some), *row_shape), target["values"].fillvalue, target["values"].dtype)
        wide[:, : block.shape[1]] = block
        with space.room(copy, wide.nbytes + space.index_bytes(len(rows), len(some))):
            target["values"][first : first + len(some)] = wide
