"""Stores at a URL (``s3://``, ``gs://``, ``memory://``): written in a local folder whose files are copied, and read from a copy."""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_module_monitor.errors import ConfigError, Log
from lightning_module_monitor.sinks.store import paths

_PERIOD_S = 600.0


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL that is not of a local file."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


class RemoteFolder:
    """A folder at a URL, and a local folder, whose files are copied to it.

    Args:
        url: The folder.
        log: Gets a warning, once, if it cannot be written.
    """

    def __init__(self, url: str, log: Log) -> None:
        self._url, self._log = url, log
        self.local = Path(tempfile.mkdtemp(prefix="lightning-module-monitor-")).resolve()
        """The local folder."""
        self._copied: dict[Path, tuple[int, int]] = {}
        """Signature of each file when it was copied."""
        self._tried: tuple[int, int] = (0, 0)
        """Signature of the store at the last attempt to copy it."""
        self._tried_at = time.monotonic()
        self._has_failed = False
        self._is_reachable = True

    def prepare(self, name: str, resumed: str | None) -> Path | None:
        """Get the local folder ready for a store of this name.

        Args:
            name: Name of the store's file.
            resumed: URL of the store of the resumed run; it is copied here, with what is beside it.

        Returns:
            The local copy of the resumed run's store; ``None`` without one.
        """
        try:
            file_system = _file_system(self._url)
            listed = file_system.ls(self._url, detail=False) if file_system.exists(self._url) else []
            there = {posixpath.basename(path) for path in listed}
            own = resumed is not None and posixpath.dirname(resumed) == self._url
            if resumed is not None and not own:
                (self.local / "resumed").mkdir()
            fetched = None if resumed is None else _fetch(resumed, self.local if own else self.local / "resumed")
        except Exception as error:  # file systems raise their own types of errors
            self._is_reachable = False
            self._report(error)
            return None
        wanted = Path(name)
        for other in there:
            taken = self.local / other
            if not taken.exists() and paths.is_numbered_path_of(Path(other.replace(".tensors.h5", ".h5")), wanted):
                taken.write_text(f"{self._url}/{other}\n")  # takes the name
        self._copied = {path: _signature(path) for path in self.local.iterdir()}
        return fetched

    def url_of(self, path: Path) -> str:
        """The URL of a local file."""
        return f"{self._url}/{path.name}"

    def copy_if_due(self, store: Path) -> None:
        """Copy the files if the store's file was replaced, or every ten minutes, even after a failure. Never raises."""
        with suppress(OSError):  # a file that was removed is reported by its writer
            signature = _signature(store)
            if signature != self._tried or time.monotonic() - self._tried_at >= _PERIOD_S:
                self._tried = signature
                self.copy()

    def copy(self) -> bool:
        """Copy the files that changed; returns whether all are there. Never raises."""
        if not self._is_reachable:
            return False
        self._tried_at = time.monotonic()
        try:
            file_system = _file_system(self._url)
            file_system.makedirs(self._url, exist_ok=True)
            present = {path: _signature(path) for path in sorted(self.local.glob("[!.]*")) if path.is_file()}
            for path, signature in present.items():  # the store before its journal, as they are written here
                if self._copied.get(path) != signature:
                    file_system.put_file(str(path), self.url_of(path))
                    self._copied[path] = signature
            for path in [path for path in self._copied if path not in present and path.suffix == ".journal"]:
                file_system.rm_file(self.url_of(path))
                del self._copied[path]
        except Exception as error:  # file systems raise their own types of errors
            self._report(error)
            return False
        return True

    def close(self) -> bool:
        """Copy the files for the last time, and remove the local folder; returns whether all files are at the URL."""
        is_copied = self.copy()
        if is_copied:
            shutil.rmtree(self.local, ignore_errors=True)
        return is_copied

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            message = "%s cannot be written (%s: %s). Training goes on; the files of this run are in %s."
            self._log.warning(message, self._url, type(error).__name__, error, self.local)
        self._has_failed = True


def fetched(url: str) -> Path:
    """A local copy of the store at a URL, with what is beside it, in a folder of its own.

    Raises:
        FileNotFoundError: If there is no file.
        ConfigError: If it cannot be read.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightning-module-monitor-"))
    try:
        path = _fetch(url, folder)
    except Exception as error:  # file systems raise their own types of errors
        message = f"{url!r} cannot be read ({type(error).__name__}: {error}). Check the URL, the network and the credentials."
        raise ConfigError(message) from error
    if path is None:
        raise FileNotFoundError(f"There is no store at {url!r}.")
    return path


def _fetch(url: str, folder: Path) -> Path | None:
    """Copy a store, its journal and its raw tensors into a folder: the journal first, as a reader opens them."""
    file_system, path = _file_system(url), folder / posixpath.basename(url)
    for local in (paths.journal_path(path), path, paths.tensors_path(path)):
        remote = f"{posixpath.dirname(url)}/{local.name}"
        if file_system.exists(remote):
            file_system.get_file(remote, str(local))
    return path if path.exists() else None


def first_free_url(url: str) -> str:
    """The first of ``name``, ``name-2``, ... that does not exist; the name itself if that cannot be found out."""
    stem, suffix = posixpath.splitext(url)
    try:
        file_system, number = _file_system(url), 1
        while file_system.exists(url):
            number += 1
            url = f"{stem}-{number}{suffix}"
    except Exception:  # file systems raise their own types of errors; what writes the file reports them
        return url
    return url


def _file_system(url: str) -> Any:  # noqa: ANN401  # fsspec has no types
    from fsspec.core import url_to_fs

    return url_to_fs(url)[0]


def _signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
