"""The CPU time of an observer's own calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class OwnTime:
    """CPU time, added up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is added."""

        def timed(*args: Any, **kwargs: Any) -> object:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


@contextmanager
def own_time(observer: object, methods: Sequence[str], model: nn.Module) -> Iterator[OwnTime]:
    """Time the calls of an observer in one step, and those of the forward hooks on the model.

    This excludes what torch does before and after it calls a hook, and any slowdown of the model's own operations.

    Args:
        observer: The object whose methods are timed.
        methods: Names of these methods. The first one begins a step; the hooks that exist after it are timed.
        model: The module with the observer's forward hooks.
    """
    own = OwnTime()
    begin = own.of(getattr(observer, methods[0]))
    replaced: list[tuple[dict[int, Any], int, Any]] = []

    def begin_step(*args: Any, **kwargs: Any) -> object:
        result = begin(*args, **kwargs)
        for module in model.modules():
            hooks = module._forward_hooks  # torch has no public access to the hooks of another object
            replaced.extend((hooks, number, hook) for number, hook in hooks.items())
            hooks.update({number: own.of(hook) for number, hook in hooks.items()})
        return result

    vars(observer).update({methods[0]: begin_step} | {name: own.of(getattr(observer, name)) for name in methods[1:]})
    try:
        yield own
    finally:
        for name in methods:
            del vars(observer)[name]
        for hooks, number, hook in replaced:
            if number in hooks:
                hooks[number] = hook
