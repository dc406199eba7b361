"""A file that a kill left in SWMR mode, read as the plain file it would be if it had been closed.

HDF5 opens such a file only as if its writer were alive: metadata that it cannot make sense of it reads again and again, and waits twice as
long each time, for the writer to mend it. If the writer is dead and the machine went down with it, that never ends.
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

# Superblock version 3: signature, version, sizes of offsets and lengths, flags; base address, extension's address, end of file,
# root group's address; then a checksum. HDF5 File Format Specification, section II.A.
_SUPERBLOCK = struct.Struct("<11sBQQQQ")
_SIZE = _SUPERBLOCK.size + 4
_SIGNATURE_3 = b"\x89HDF\r\n\x1a\n\x03"
_WORD = 0xFFFF_FFFF


class ClosedView(io.FileIO):
    """A file of the store as its close would have left it: not in use, and as long as it is. For ``h5py.File``; for reading only."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "r")
        self._head = _closed(super().read(_SIZE), os.fstat(self.fileno()).st_size)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # h5py hands over a memoryview
        """Read from the current position; the superblock is that of a closed file."""
        position = self.tell()
        count = super().readinto(buffer)
        if position < len(self._head):
            end = min(count, len(self._head) - position)
            buffer[:end] = self._head[position : position + end]
        return count


def is_in_use(path: Path) -> bool:
    """Whether a file is marked as being written: by a live writer, or by one that was killed."""
    fields = _superblock(path)
    return fields is not None and fields[1] != 0


def is_cut_short(path: Path) -> bool:
    """Whether a file of the store is shorter than its superblock states, as a copy that was broken off: no writer will mend it."""
    fields = _superblock(path)
    return fields is not None and fields[4] > path.stat().st_size


def _superblock(path: Path) -> tuple[int, ...] | None:
    with path.open("rb") as file:
        head = file.read(_SIZE)
    return _SUPERBLOCK.unpack_from(head) if len(head) == _SIZE and head.startswith(_SIGNATURE_3) else None


def _closed(head: bytes, num_bytes: int) -> bytes:
    """A superblock with no flag set and this end of file; what is none is left to HDF5 to complain about."""
    # A damaged superblock must not get a checksum that makes it look sound.
    if len(head) < _SIZE or _lookup3(head[:-4]) != int.from_bytes(head[-4:], "little"):
        return head
    constants, _, base, extension, _, root = _SUPERBLOCK.unpack_from(head)
    mended = _SUPERBLOCK.pack(constants, 0, base, extension, num_bytes, root)
    return mended + _lookup3(mended).to_bytes(4, "little")


def _lookup3(data: bytes) -> int:
    """HDF5's checksum of metadata: Bob Jenkins' ``lookup3``, ``hashlittle`` with start value 0; 1 byte at least."""
    a = b = c = (0xDEAD_BEEF + len(data)) & _WORD
    blocks: list[tuple[int, ...]] = list(struct.iter_unpack("<III", data + bytes(-len(data) % 12)))
    for x, y, z in blocks[:-1]:
        a, b, c = (a + x) & _WORD, (b + y) & _WORD, (c + z) & _WORD
        for bits in (4, 6, 8, 16, 19, 4):
            # One line of the original, after which the three change places.
            a, c = ((a - c) & _WORD) ^ _rotate(c, bits), (c + b) & _WORD
            a, b, c = b, c, a
    a, b, c = ((word + more) & _WORD for word, more in zip((a, b, c), blocks[-1], strict=True))
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate(b, bits)) & _WORD
        a, b, c = b, c, a
    return b


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
