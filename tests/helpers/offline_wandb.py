"""What an offline W&B run wrote to its file."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def history(root: Path) -> list[dict[str, Any]]:
    """The history rows that the one offline run in a folder wrote, as ``wandb sync`` would send them."""
    rows = [dict(_leaves(_items(entry.history.item))) for entry in _entries(root)]
    return [row for row in rows if row]


def config(root: Path) -> dict[str, Any]:
    """Value by path of everything that it wrote to the configuration of the run: ``_wandb/visualize/...``."""
    return {key: value for entry in _entries(root) for key, value in _items(entry.config.update).items()}


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values within dicts, by their path: older versions of wandb write them as one."""
    for key, value in values.items():
        yield from _leaves(value, f"{path}{key}/") if isinstance(value, dict) else [(f"{path}{key}", value)]


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _entries(root: Path) -> list[Any]:
    """All entries of the file of the one offline run in a folder, which is ended."""
    import wandb
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    wandb.finish()
    [path] = root.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    entries: list[WandbRecord] = []
    while not any(entry.HasField("exit") for entry in entries):  # a process of wandb's own writes on after finish()
        assert time.monotonic() < deadline, "wandb did not finish its file"
        with suppress(DecodeError):  # the last entry is being written
            entries = [WandbRecord.FromString(data) for data in _log(path)]
        time.sleep(0.01)
    return entries


def _log(path: Path) -> Iterator[bytes]:
    """The entries of a wandb transaction log: LevelDB's log format after a header of seven bytes."""
    data = path.read_bytes()
    block, header, place = 32768, struct.Struct("<IHB"), 7
    entry = b""
    while place + header.size <= len(data):
        left = block - place % block
        if left < header.size:
            place += left
            continue
        _checksum, size, part = header.unpack_from(data, place)
        place += header.size + size
        entry += data[place - size : place]
        if part in (1, 4):  # whole, or the last part
            yield entry
            entry = b""
