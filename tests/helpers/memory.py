"""Memory of tensors, counted by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that tensors took at any moment of a run, beyond what there was before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
