"""What the store's file looks like: one schema for the writer, the reader, and the rewrite that connects files.

One group per kind; in it ``values`` (steps x columns, float64), ``steps`` (int64) and ``columns`` (``site/statistic``). A row of
``values`` is one chunk: it is compressed and written once, and never rewritten while others read.

A kind's histograms are a table of the same sort, in the group ``histograms`` inside the kind's: there ``values`` are steps x columns x
``bins`` (int64 counts), ``bins`` says in words what is counted at each place, and the attribute ``edges`` has the bins' edges.

``findings`` has a row for each thing that was found to be wrong.

``superseded/1``, ``superseded/2``, ... hold the rows that a resumed run has run again, in groups like those above. Readers pass them by.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.record import EDGES, LABELS, Key
from lightning_module_monitor.sinks.store import findings, space
from lightning_module_monitor.sinks.store.killed import ClosedView, is_cut_short, is_in_use

FORMAT_VERSION = 1
"""Raise it whenever a reader has to know."""

ABSENT_BITS = 0x7FF8_6162_7365_6E74
"""A quiet NaN that spells "absent": a value that was never recorded, as opposed to a recorded NaN."""

ABSENT: float = np.uint64(ABSENT_BITS).view(np.float64)

NOT_COUNTED = -1
"""What stands in place of the counts of a histogram that was never recorded."""

SITELESS = "logged"
"""Group of keys without a kind (one part, as a user logs ``loss``)."""

HISTOGRAMS = "histograms"
"""Group of a kind's histograms, inside the kind's own."""

SUPERSEDED = "superseded"
"""Group of the rows that resumed runs have run again, with a numbered group for each of these runs."""

_RESERVED = {"", ".", SITELESS, HISTOGRAMS, SUPERSEDED, findings.NAME, "values", "steps", "columns"}
_STEPS_PER_CHUNK = 256
_ATTEMPTS = 3
"""A run can begin or end between the look at a file and its opening."""
# The oldest format that knows SWMR, so that older HDF5 tools read the files, too.
_LIBVER = ("v110", "v110")


Values = NDArray[np.float64] | NDArray[np.int64]
"""Numbers, or counts."""


class AbsentKeyError(KeyError):
    """A file does not have what was asked for; it is whole."""


@dataclass
class Attributes:
    """What a file says of itself: the versions, and every run that wrote to it."""

    package_version: str
    started: str
    """ISO 8601, UTC."""

    configurations: list[dict[str, object]]
    """One ``{"started", "first_step", "configuration"}`` per run, oldest first. ``"copied_from"`` is the path of the file that the rows of
    earlier runs were copied from."""


def split(key: str) -> tuple[str, str]:
    """Where a key lives: its group and its column, e.g. ``("validation/activation", "model.fc/rms")``."""
    parsed = Key.parse(key)
    column = f"{parsed.site}/{parsed.statistic}" if parsed.site else parsed.statistic
    if column == key:
        return SITELESS, column
    head = key[: -len(column) - 1]
    # A part that HDF5 or this layout uses itself gets a "_", one more if it ends in "_" already: undone by `join`.
    return "/".join(part + "_" if part.rstrip("_") in _RESERVED else part for part in head.split("/")), column


def join(group: str, column: str) -> str:
    """The key of a group and a column; the inverse of :func:`split` and :func:`split_histogram`."""
    group = group.removesuffix(f"/{HISTOGRAMS}")
    if group == SITELESS:
        return column
    parts = (part[:-1] if part.rstrip("_") in _RESERVED else part for part in group.split("/"))
    return "/".join((*parts, column))


def split_histogram(key: str) -> tuple[str, str]:
    """Where a histogram lives, e.g. ``("activation/histograms", "model.fc/hist")``."""
    group, column = split(key)
    return f"{group}/{HISTOGRAMS}", column


def has_histograms(group: str) -> bool:
    """Whether a group's values are the counts of histograms, and not numbers."""
    return group.endswith(f"/{HISTOGRAMS}")


def columns_by_group(keys: Iterable[str], histogram_keys: Iterable[str] = ()) -> dict[str, list[str]]:
    """The tables that these keys need, in their order, each column once."""
    tables: dict[str, dict[str, None]] = {}
    for group, column in (*map(split, keys), *map(split_histogram, histogram_keys)):
        tables.setdefault(group, {})[column] = None
    return {group: list(columns) for group, columns in tables.items()}


def is_absent(values: Values) -> NDArray[np.bool_]:
    """Which values, or counts, were never recorded; any shape."""
    absent: NDArray[np.bool_]
    absent = values == NOT_COUNTED if values.dtype.kind == "i" else values.view(np.uint64) == np.uint64(ABSENT_BITS)
    return absent


# ------------------------------------------------------------------ reading


@contextmanager
def open_store(path: Path, *, has_writer: bool = True) -> Iterator[h5py.File]:
    """A store's file opened for reading, whether it is being written, was left by a kill, or was closed.

    Args:
        path: The file.
        has_writer: Whether another run may be writing to it. If not, damage done by a crash of the machine is an error at once, where HDF5
            waits for a writer to mend it.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is not a store that this version can read, or if anything in the block fails to be read.
    """
    if not path.is_file():
        message = f"There is no store at {str(path)!r}."
        raise FileNotFoundError(message)
    with _open_hdf5(path, has_writer) as file:
        version = file.attrs.get("format_version")
        if not isinstance(version, int | np.integer) or version < 1 or "configurations" not in file.attrs:
            message = f"{str(path)!r} is an HDF5 file of another program: it has no 'format_version'. Give the path of a monitor's store."
            raise ConfigError(message)
        if version > FORMAT_VERSION:
            remedy = "Update lightning-module-monitor to read it."
            raise ConfigError(f"{str(path)!r} has format version {version}, newer than {FORMAT_VERSION}. {remedy}")
        yield file


@contextmanager
def _open_hdf5(path: Path, has_writer: bool) -> Iterator[h5py.File]:
    # Whether it is in use decides how it is opened: HDF5 would try to read a plain file that was cut short as if it were growing.
    is_cut = is_in_use(path) and is_cut_short(path)
    with ExitStack() as stack:
        is_viewed = is_cut or (is_in_use(path) and not has_writer)
        view = stack.enter_context(ClosedView(path)) if is_viewed else None
        file = stack.enter_context(_opened(path, view))
        try:
            yield file
        except (FileNotFoundError, ConfigError, AbsentKeyError, space.NoSpaceError):
            raise
        except Exception as error:  # h5py, numpy and json have an exception each for a file that is not as it should be
            how = "cut short: what was asked for lies behind its end" if is_cut else "damaged: what was asked for cannot be read"
            what = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            raise ConfigError(f"{str(path)!r} is {how} ({what}). Give a whole copy of it.") from error


def _opened(path: Path, view: ClosedView | None = None) -> h5py.File:
    for _ in range(_ATTEMPTS):
        with suppress(OSError):
            # No HDF5 lock anywhere: a reader's shared lock would make the writer fail. Writers have their own (see lock.py).
            return h5py.File(view, "r") if view else h5py.File(path, "r", swmr=is_in_use(path), locking=False)
    path.open("rb").close()  # says what is wrong if it may not be read at all
    message = f"{str(path)!r} is not a readable HDF5 file: damaged, cut short, or of another kind. Give the path of a monitor's store."
    raise ValueError(message)


def read_attributes(file: h5py.File) -> Attributes:
    """What the file says of itself."""
    package_version, started, configurations = (_read_text(file, name) for name in ("package_version", "started", "configurations"))
    runs = json.loads(configurations)
    for run in runs:
        if not isinstance(run["started"], str) or not isinstance(run["first_step"], int) or not isinstance(run["configuration"], dict):
            message = f"'configurations' has the run {run!r}"
            raise TypeError(message)
    return Attributes(package_version, started, runs)


def _read_text(file: h5py.File, name: str) -> str:
    text = file.attrs[name]
    if not isinstance(text, str):
        message = f"{name!r} is {text!r}"
        raise TypeError(message)
    text.encode()  # what is no text fails here
    return text


def read_columns(file: h5py.File) -> dict[str, list[str]]:
    """The columns of every table in the file, of numbers and of histograms, by group; without those that are superseded."""
    return {group: columns for group, columns in read_all_columns(file).items() if not is_superseded(group)}


def read_all_columns(file: h5py.File) -> dict[str, list[str]]:
    """The columns of every table in the file, by group, with those that are superseded."""
    groups: list[str] = []

    def visit(name: str) -> None:
        if name.endswith("/columns") and isinstance(file[name], h5py.Dataset):
            groups.append(name.removesuffix("/columns"))

    file.visit(visit)
    return {group: read_columns_of(file, group) for group in groups}


def is_superseded(name: str) -> bool:
    """Whether a group or dataset of a file belongs to what a resumed run has run again."""
    return name.startswith(f"{SUPERSEDED}/")


def superseded_groups(file: h5py.File) -> list[str]:
    """The groups of superseded rows, one for each resumed run: ``superseded/1``, ..."""
    return [f"{SUPERSEDED}/{number}" for number in file.get(SUPERSEDED, ())]


def next_superseded(file: h5py.File) -> str:
    """The group for the rows that are superseded from now on, e.g. ``superseded/2``."""
    return f"{SUPERSEDED}/{len(superseded_groups(file)) + 1}"


def read_columns_of(file: h5py.File, group: str) -> list[str]:
    """The columns of one table; none if there is no such table."""
    columns = file.get(f"{group}/columns")
    return [column.decode() for column in columns[...].tolist()] if isinstance(columns, h5py.Dataset) else []


def read_steps(group: h5py.Group) -> NDArray[np.int64]:
    """The steps of a table's complete rows, shape ``(rows,)``: a row counts from the moment its step is there, too."""
    steps: NDArray[np.int64] = group["steps"][: len(group["values"])]
    return steps


# ------------------------------------------------------------------ writing


@contextmanager
def new_file(path: Path, attributes: Attributes) -> Iterator[h5py.File]:
    """A new file, made in memory; after the block it is written, replacing what is at ``path``, or gone after an error.

    Raises:
        NoSpaceError: If it cannot be written.
    """
    image = io.BytesIO()
    with h5py.File(image, "w", libver=_LIBVER) as file:
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["package_version"] = attributes.package_version
        file.attrs["started"] = attributes.started
        file.attrs["configurations"] = json.dumps(attributes.configurations, default=str)
        yield file
    try:
        with space.refusals():
            path.write_bytes(image.getbuffer())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def changes(path: Path) -> Iterator[h5py.File]:
    """A closed file, open for changes within ``space.room``; afterwards it is closed and on the disk, or gone after an error."""
    file = h5py.File(path, "r+", libver=_LIBVER, locking=False)
    try:
        yield file
        space.close(file)
        with space.refusals():
            _synchronize(path)
    except BaseException:
        abandon(file)
        path.unlink()
        raise


@contextmanager
def successor(path: Path) -> Iterator[h5py.File]:
    """A copy of a closed file, open as by :func:`changes`; it then replaces the file, which after an error stays as it was."""
    temporary = temporary_path(path)
    try:
        with space.refusals():
            shutil.copyfile(path, temporary)
        with changes(temporary) as file:
            yield file
        replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create_tables(file: h5py.File, tables: Mapping[str, Sequence[str]]) -> None:
    """Empty tables with these columns, by group, and a place for findings."""
    findings.create(file)
    for group, columns in tables.items():
        # It can be there already: "validation/activation" lies in "validation", which holds a user's "validation/loss".
        _create_table(file.require_group(group), columns, has_histograms(group))


def _create_table(group: h5py.Group, columns: Sequence[str], of_histograms: bool) -> None:
    shape = (len(columns), len(LABELS)) if of_histograms else (len(columns),)
    values = group.create_dataset(
        "values",
        (0, *shape),
        "i8" if of_histograms else "f8",
        maxshape=(None, *shape),
        chunks=(1, *shape),
        shuffle=True,
        compression="gzip",
        compression_opts=1,
        fillvalue=NOT_COUNTED if of_histograms else ABSENT,
    )
    scales = [group.create_dataset("steps", (0,), "i8", maxshape=(None,), chunks=(_STEPS_PER_CHUNK,)), _texts(group, "columns", columns)]
    if of_histograms:
        scales.append(_texts(group, "bins", LABELS))
        values.attrs["edges"] = EDGES
    for axis, scale in enumerate(scales):
        scale.make_scale(scale.name.rpartition("/")[2])
        values.dims[axis].attach_scale(scale)


def _texts(group: h5py.Group, name: str, texts: Sequence[str]) -> h5py.Dataset:
    # Fixed-length: SWMR cannot do variable length.
    encoded = [text.encode() for text in texts]
    return group.create_dataset(name, data=np.array(encoded, dtype=f"S{max(1, *map(len, encoded))}"))


def open_for_appending(path: Path) -> h5py.File:
    """A file opened for its single writer; from here on others can read it, and a kill does no harm."""
    # A flush walks through the cached chunks, and a row is a chunk that nobody asks for again: hardly any are cached.
    file = h5py.File(path, "r+", libver=_LIBVER, locking=False, rdcc_nslots=31, rdcc_nbytes=1 << 16)
    file.swmr_mode = True
    return file


def append_in_place(temporary: Path, path: Path) -> h5py.File:
    """Open a finished file for appending and give it its name.

    In this order: a file at ``path`` can be read at any moment, also if a kill comes in between.
    """
    if os.name == "nt":  # Windows renames no open file; a kill in between needs HDF5's h5clear tool
        replace(temporary, path)
        return open_for_appending(path)
    file = open_for_appending(temporary)
    try:
        replace(temporary, path)
    except BaseException:
        abandon(file)
        raise
    return file


def abandon(file: h5py.File) -> None:
    """Close a file without another byte to its disk, which stays as it was last flushed.

    For errors in the middle of a change. Should the disk itself have failed, HDF5 tries again when it closes the file, fails again, and
    ends the process with SIGSEGV at exit. So what it still has to write goes into memory that is thrown away.
    """
    with suppress(Exception):
        if file and hasattr(os, "memfd_create"):
            nowhere = os.memfd_create("abandoned-store")
            os.dup2(nowhere, file.id.get_vfd_handle())
            os.close(nowhere)
        file.close()


def temporary_path(path: Path) -> Path:
    """Where a file's successor is prepared; a leftover of a killed rewrite is written over by the next."""
    return path.with_name(f".{path.name}.new")


def is_there(path: Path) -> bool:
    """Whether there is anything at a path but an empty file, which holds nothing to lose."""
    return path.exists() and not (path.is_file() and path.stat().st_size == 0)


def tensors_path(path: Path) -> Path:
    """Where the raw tensors of a store's run are: ``monitor.tensors.h5`` beside ``monitor.h5``."""
    return path.with_name(f"{path.name.removesuffix('.h5')}.tensors.h5")


def _synchronize(path: Path) -> None:
    # On the disk before it takes the old file's name: after a power cut the name must not stand for an empty file.
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def replace(temporary: Path, path: Path) -> None:
    """Give a finished file its name, atomically: a kill leaves this file there or the one before, whole."""
    if path.exists():
        shutil.copymode(path, temporary)
    temporary.replace(path)
