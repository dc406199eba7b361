"""The journal of a store: what a run recorded since the file was written, in checked frames.

A frame is appended by one write: the length of its payload, the CRC-32 of its type and payload, the type, the payload. A kill can leave a
part of the last frame, which readers ignore and the next write cuts off. The types:

- ``H``, the first frame: JSON with the lineage and the generation of the file that the journal goes on from, and the process that writes.
- ``R``, a record: the length of its JSON (uint32), the JSON, and a row for each table, float64 or int64, in the JSON's order. The JSON has
  the new columns by table, the width of each row, and findings, facts and modules.
- ``E``, the end of a run that could not take the journal into the file.

All numbers are little-endian. Nothing of a journal is executed, and no length is trusted before it was compared with the file's.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.record import Finding, ModuleInfo
from lightning_module_monitor.sinks.store import paths, schema

_FORMAT = 1
_FRAME = struct.Struct("<QIc")
_LENGTH = struct.Struct("<I")
_HEAD, _RECORD, _END = b"H", b"R", b"E"
_NUMBER, _COUNTS = np.dtype("<f8"), np.dtype(("<i8", (NUM_COUNTS,)))
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)


class Head(NamedTuple):
    """The first frame."""

    lineage: str
    """Identifier of the file that the journal goes on from."""
    generation: int
    """Number of replacements of that file; the file contains the journals of older generations."""
    run: str
    """Identifier of the run that writes."""
    host: str
    pid: int
    process_start: float
    """When the process started, by the host's own clock; 0 if the system does not report it."""


class Part(NamedTuple):
    """The content of a record besides its rows."""

    step: int
    time: str
    """When it was recorded: ISO 8601, UTC."""
    findings: Sequence[Finding] = ()
    facts: Facts | None = None
    modules: Sequence[ModuleInfo] = ()


def head_frame(head: Head) -> bytes:
    """The frame of a head."""
    return _frame(_HEAD, json.dumps({"format": _FORMAT, **head._asdict()}).encode())


def record_frame(part: Part, columns: Mapping[str, Sequence[str]], rows: Mapping[str, schema.Values]) -> bytes:
    """The frame of a record: its new columns and its rows by table, each row of shape ``(columns,)`` or ``(columns, bins)``."""
    content = {
        **{"step": part.step, "time": part.time, "columns": columns, "rows": {group: len(row) for group, row in rows.items()}},
        "findings": [vars(finding) for finding in part.findings],
        "facts": None if part.facts is None else asdict(part.facts),
        "modules": part.modules,
    }
    text = json.dumps(content, ensure_ascii=False, default=_as_number).encode()  # fails for what is not a text
    return _frame(_RECORD, _LENGTH.pack(len(text)), text, *(np.ascontiguousarray(row) for row in rows.values()))


def _as_number(number: np.generic) -> int | float:
    plain: int | float = number.item()
    return plain


def _frame(kind: bytes, *parts: Any) -> bytes:
    views = [memoryview(part).cast("B") for part in parts]
    checksum = zlib.crc32(kind)
    for view in views:
        checksum = zlib.crc32(view, checksum)
    return b"".join([_FRAME.pack(sum(map(len, views)), checksum, kind), *views])


END_FRAME = _frame(_END)
"""The frame of the end."""


# ------------------------------------------------------------------ writing


class JournalFile:
    """A journal that is open for appending. It replaces the one at the path."""

    def __init__(self, path: Path, head: Head) -> None:
        frame = head_frame(head)
        with paths.whole_file(path) as temporary:
            temporary.write_bytes(frame)
        self._path, self._descriptor = path, os.open(path, _FLAGS)
        self.size = self._size_of_head = len(frame)
        """Length up to the end of the last whole frame."""
        self._num_pending = 0
        """Length of the frame that is being written."""

    @property
    def has_records(self) -> bool:
        """Whether there is more than the head."""
        return self.size > self._size_of_head

    def append(self, frame: bytes) -> None:
        """Append a frame, or nothing if this raises ``OSError``."""
        self._cut()
        self._num_pending = len(frame)
        rest = memoryview(frame)
        try:
            while rest:  # more than once at the end of the space: the second write tells the reason
                rest = rest[os.write(self._descriptor, rest) :]
        finally:
            self._cut()

    def _cut(self) -> None:
        """Cut off a part of a frame, also after an interrupt at any place of the last :meth:`append`; this needs no space."""
        size = os.fstat(self._descriptor).st_size
        if self._num_pending and size == self.size + self._num_pending:
            self.size = size
        elif size != self.size:
            os.ftruncate(self._descriptor, self.size)
        self._num_pending = 0

    def is_at_path(self) -> bool:
        """Whether it is still the file at its path; true if the folder does not allow to look."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError as error:
            return not isinstance(error, FileNotFoundError | NotADirectoryError)

    def opened(self) -> BinaryIO:
        """The file opened for reading, even if it has no name any more."""
        return os.fdopen(os.dup(self._descriptor), "rb")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def set_aside(path: Path, lineage: str) -> Path | None:
    """Give a journal that is not of this lineage another name, if it has records; returns the name."""
    try:
        with path.open("rb") as file:
            index = Journal(file).index
            is_kept = index.head.lineage != lineage and bool(index.tables)
    except FileNotFoundError:
        return None
    except Exception:  # it is damaged, or something else
        is_kept = path.stat().st_size > 0
    return path.rename(paths.first_free_path(path)) if is_kept else None


def remove(path: Path, lineage: str) -> None:
    """Remove a journal, all of which is in the file of this lineage."""
    # Windows removes no open file. A journal of an earlier generation does no harm, nor does one that cannot be read.
    with suppress(OSError, ValueError, TypeError):
        with path.open("rb") as file:
            is_of_file = read_head(file).lineage == lineage
        if is_of_file:
            path.unlink()


# ------------------------------------------------------------------ reading


def read_head(file: BinaryIO) -> Head:
    """The head of a journal that is opened for reading; raises the errors of :class:`Journal`."""
    return _head_of(next(_frames(file), _NONE))


@dataclass
class JournalRows:
    """The rows of a table, in the order in which they were recorded: where each is, 24 bytes for a row."""

    new_columns: list[str] = field(default_factory=list)
    """Columns behind those of the file."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    widths: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of columns."""


class Index:
    """The content of a journal, with the places of rows instead of rows. It grows with the journal."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.tables: dict[str, JournalRows] = {}
        self.findings: list[Finding] = []
        self.facts: list[tuple[int, Facts]] = []
        self.modules: list[ModuleInfo] = []
        """Descriptions in their order, a later one of the same module after an earlier one."""
        self.last_record = ""
        """Time of the last record: ISO 8601, UTC; empty without one."""
        self.has_ended = False
        """Whether the run that wrote it ended."""
        self.damaged_at: int | None = None
        """Position of a frame in the middle of the file with a wrong checksum; nothing from there on is read."""
        self.is_whole = True
        """Whether the last update came to its end: not after an error or an interrupt, which can leave a part of a record."""
        self._end = 0
        self._lock = threading.Lock()

    def update(self, file: BinaryIO) -> None:
        """Take in the frames that came since."""
        with self._lock:
            self.is_whole = False
            for frame in _frames(file, self._end):
                if not frame.is_whole:
                    self.damaged_at = frame.offset
                elif frame.kind == _RECORD:
                    self._take(frame.payload, frame.offset)
                elif frame.kind == _END:
                    self.has_ended = True
                elif frame.kind != _HEAD or self._end:
                    raise ValueError(f"it has a frame of the unknown type {frame.kind!r}")
                if self.has_ended or not frame.is_whole:
                    break
                self._end = frame.offset + len(frame.payload)
            self.is_whole = True

    def _take(self, payload: bytes, offset: int) -> None:
        (length,) = _LENGTH.unpack_from(payload)
        offset += _LENGTH.size + length
        content = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
        step, self.last_record = int(content["step"]), str(content["time"])
        for group, columns in content["columns"].items():
            self._add_columns(group, columns)
        end = offset - _LENGTH.size - length + len(payload)
        for group, width in content["rows"].items():
            rows = self._rows_of(group)
            rows.steps.append(step)
            rows.offsets.append(offset)
            rows.widths.append(width)
            offset += width * _dtype_of(group).itemsize
            if width < 1 or offset > end:
                raise ValueError(f"its row of {group!r} has {width} columns, more than the frame")
        if offset != end:
            raise ValueError("a frame has more than its rows")
        self.findings += [_finding_of(finding) for finding in content["findings"]]
        if content["facts"] is not None:
            self.facts.append((step, Facts.of_json(content["facts"])))
        self.modules += [_module_of(module) for module in content["modules"]]

    def _rows_of(self, group: str) -> JournalRows:
        if group not in self.tables:
            if not schema.is_group(group):
                raise ValueError(f"it has the table {group!r}, which no run writes")
            self.tables[group] = JournalRows()
        return self.tables[group]

    def _add_columns(self, group: str, columns: list[str]) -> None:
        "".join(columns).encode()  # fails if one is not a text
        self._rows_of(group).new_columns += columns


class Journal:
    """A journal that is open for reading. Its rows are read when they are asked for.

    Args:
        file: The file, which stays open as long as rows are read.
        known: The same journal when it was read before: only what came since is read.

    Raises:
        ValueError: If it is no journal, of a newer format, or has a frame that no run writes.
    """

    def __init__(self, file: BinaryIO, known: Journal | None = None) -> None:
        self._file, head = file, read_head(file)
        is_known = known is not None and known.index.head == head and known.index.is_whole
        self.index: Index = known.index if known is not None and is_known else Index(head)
        self.index.update(file)

    def read(self, group: str, row: int, first: int, last: int) -> schema.Values:
        """The columns from ``first`` to before ``last`` of a row of a table, as many of them as it has."""
        rows, item = self.index.tables[group], _dtype_of(group)
        count = max(0, min(last, rows.widths[row]) - first)
        self._file.seek(rows.offsets[row] + first * item.itemsize)
        return np.frombuffer(_read(self._file, count * item.itemsize), item, count)


class _Frame(NamedTuple):
    kind: bytes
    payload: bytes
    offset: int
    """Place of the payload in the file."""
    is_whole: bool
    """Whether it has its checksum."""


_NONE = _Frame(b"", b"", 0, is_whole=False)


def _frames(file: BinaryIO, at: int = 0) -> Iterator[_Frame]:
    """The frames from a place on, up to the first that has another checksum, or is cut off."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(at)
    while at + _FRAME.size <= num_bytes:
        try:
            length, checksum, kind = _FRAME.unpack(_read(file, _FRAME.size))
            offset = at + _FRAME.size
            at = offset + length
            payload = _read(file, length) if at <= num_bytes else None
        except EOFError:  # the writer has just cut it off
            return
        if payload is None:
            return
        is_whole = zlib.crc32(payload, zlib.crc32(kind)) == checksum
        # On a network file system the end of a frame that is being written may come before its middle.
        if is_whole or at < num_bytes:
            yield _Frame(kind, payload, offset, is_whole)
        if not is_whole:
            return


def _read(file: BinaryIO, count: int) -> bytes:
    parts, missing = [], count
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    if missing:
        raise EOFError("it was cut off while it was read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _dtype_of(group: str) -> np.dtype[Any]:
    return _COUNTS if schema.is_of_histograms(group) else _NUMBER


def _head_of(frame: _Frame) -> Head:
    if frame.kind != _HEAD or not frame.is_whole:
        raise ValueError("it does not begin with the head of a journal")
    content = json.loads(frame.payload)
    version = content.pop("format")
    if version != _FORMAT:
        raise ConfigError(f"a journal has format {version!r}, and not {_FORMAT}. Update lightning-module-monitor to read it.")
    head = Head(**content)
    _check_types(head._asdict(), {"generation": int, "pid": int, "process_start": (int, float)})
    return head


def _finding_of(content: dict[str, Any]) -> Finding:
    finding = Finding(**content)
    _check_types(vars(finding), {"step": int, "steps_before": int})
    return finding


def _module_of(content: list[Any]) -> ModuleInfo:
    name, type_, num_parameters, shape, dtype = content
    module = ModuleInfo(name, type_, num_parameters, None if shape is None else tuple(map(int, shape)), dtype)
    _check_types(module._asdict(), {"num_parameters": int, "output_shape": (tuple, type(None))})
    return module


def _check_types(fields: Mapping[str, object], types: Mapping[str, type | tuple[type, ...]]) -> None:
    """Check the types of fields; those that are not named are texts."""
    for name, value in fields.items():
        if not isinstance(value, types.get(name, str)):
            raise TypeError(f"{name!r} is {value!r}")
        if isinstance(value, str):
            value.encode()  # fails for what is not a text
