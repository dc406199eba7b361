"""The same engine without a Trainer."""

from lightning_module_monitor.standalone.tracker import (
    Event,
    Stash,
    Tracker,
    default_stash,
    default_stash_value,
    get_stash_fn,
    rmap_tensor,
    track,
)

__all__ = ["Event", "Stash", "Tracker", "default_stash", "default_stash_value", "get_stash_fn", "rmap_tensor", "track"]
