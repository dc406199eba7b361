"""Findings in the store: a row for each, appended to while training, read while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import h5py
import numpy as np

from lightning_module_monitor.record import Finding, Severity
from lightning_module_monitor.sinks.store import space

NAME = "findings"
"""The dataset. It has to be there before anybody appends to the file: what is new in a file that others read they never see."""

_ROW = np.dtype([("step", "<i8"), ("name", "S40"), ("site", "S128"), ("key", "S250"), ("severity", "S8"), ("words", "S1600")])
_ROWS_PER_CHUNK = 4


def create(file: h5py.Group) -> None:
    """An empty dataset of them, if there is none."""
    if NAME in file:
        return
    # Not compressed: a chunk that is compressed again as it fills would move while others read it.
    rows = file.create_dataset(NAME, (0,), _ROW, maxshape=(None,), chunks=(_ROWS_PER_CHUNK,))
    rows.make_scale(NAME)  # a dimension of its own: xarray asks for one


def append(file: h5py.Group, findings: Sequence[Finding]) -> None:
    """Write findings behind the others."""
    if findings:
        rows, start = np.array([_described(one) for one in findings], dtype=_ROW), file[NAME].shape[0]
        file[NAME].resize(start + len(rows), axis=0)
        file[NAME][start:] = rows


def read(file: h5py.Group) -> list[Finding]:
    """What is in a file, in the order in which it was written. A file of a version that had no findings has none."""
    # A row without a name was not written whole: a kill came in between.
    return [_parsed(row) for row in file[NAME][...] if row["name"]] if NAME in file else []


def num_bytes(findings: Sequence[Finding]) -> int:
    """What they take in the file at most, with the rest of a chunk."""
    return (len(findings) + _ROWS_PER_CHUNK) * _ROW.itemsize + space.index_bytes(0, len(findings)) if findings else 0


def _described(finding: Finding) -> tuple[object, ...]:
    texts = (finding.name, finding.site, finding.key, finding.severity, finding.words)
    fields = ("name", "site", "key", "severity", "words")
    return (finding.step, *(_fitting(text, _ROW[field].itemsize) for text, field in zip(texts, fields, strict=True)))


def _fitting(text: str, size: int) -> bytes:
    """A text in UTF-8, cut between characters if it is too long."""
    data = text.encode()
    return data if len(data) <= size else data[: size - 3].decode(errors="ignore").encode() + b"..."


def _parsed(row: np.void) -> Finding:
    name, site, key, severity, words = (row[field].decode() for field in ("name", "site", "key", "severity", "words"))
    return Finding(int(row["step"]), name, site, key, words, cast("Severity", severity))
