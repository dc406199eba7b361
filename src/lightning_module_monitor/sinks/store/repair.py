"""Takes the journal that a killed run left into its file."""

from __future__ import annotations

from pathlib import Path

from lightning_module_monitor.sinks.store import journal, lock, owner, paths, schema
from lightning_module_monitor.sinks.store.read_access import open_store
from lightning_module_monitor.sinks.store.successor import successor, take_in


def repair(path: Path) -> bool:
    """Do what ``StoreReader.repair`` describes; returns whether there was something to do."""
    held, beside = lock.acquire(path, needs_lock=False), paths.journal_path(path)
    try:
        if held is None or not (held.is_exclusive or owner.has_ended(beside, held.file, resumed_run="")):
            message = f"{str(path)!r} is being written by a live run. Repair it after the run's end; load_store reads it at any time."
            raise RuntimeError(message)
        with open_store(path, is_checked=False) as content:
            records, version = content.journal, content.version
            if records is not None:
                with successor(path, path) as file:
                    take_in(file, records)
                    schema.write_version(file, version._replace(generation=version.generation + 1))
        journal.remove(beside, version.lineage)
    finally:
        if held is not None:
            lock.release(held)
    return records is not None
