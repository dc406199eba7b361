"""Raw tensors of a few forward and backward passes: outputs of modules and their gradients, in a list.

Names and their meaning follow Graphcore's tensor-tracker.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_module_monitor.errors import ConfigError, require
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.hooks import (
    HookSet,
    UncopiedHook,
    Unobserved,
    as_torch_itself,
    backward_pass,
    is_in_backward,
    is_tracing,
    register_gradient_hook,
    requires_gradient,
)
from lightning_module_monitor.model.outputs import map_leaves, named_tensors, parts
from lightning_module_monitor.suggestions import nearest

if TYPE_CHECKING:
    import pandas

_messages = logging.getLogger(__name__)


@dataclass
class Event:
    """A module has returned, or the gradient of its output has arrived."""

    name: str
    """The module's name in ``named_modules``; the root's is empty."""
    type: type[nn.Module]
    """The module's class."""
    grad: bool
    """Whether this is the gradient."""
    value: Any
    """Forward: the output, not copied: it may be overwritten later. Backward: the same structure with the gradient of each tensor, or
    ``None`` if no gradient arrived; for an output that is a tensor, a tuple with its gradient."""
    args: tuple[Any, ...]
    """Positional arguments of the module's forward; empty for a gradient."""
    kwargs: dict[str, Any]
    """Keyword arguments of the module's forward; empty for a gradient."""


@dataclass
class Stash:
    """The stored part of an event."""

    name: str
    """As in :class:`Event`."""
    type: type[nn.Module]
    """As in :class:`Event`."""
    grad: bool
    """As in :class:`Event`."""
    value: Any
    """The event's value, with each tensor replaced by the result of ``stash_value``."""

    @property
    def first_value(self) -> Any:  # noqa: ANN401  # the result of a user's function
        """The first part of :attr:`value` that is not ``None``, at any depth; the value itself if it has no parts."""
        return _first(self.value)


StashFn = Callable[[Event], Stash]
"""Returns the stash of an event."""

StashValueFn = Callable[[Tensor], Any]
"""Returns the stored value of a tensor."""

NamePattern = str | re.Pattern[str] | None
"""For ``re.search`` in a module's name; ``None`` for every module."""


def rmap_tensor(value: Any, fn: Callable[[Tensor], Any]) -> Any:  # noqa: ANN401  # any output of any module
    """Apply a function to every tensor in tuples, named tuples, lists, dicts and dataclasses, nested at will.

    Args:
        value: A module's output, arguments, or a tensor.
        fn: Called with each tensor.

    Returns:
        The same structure with each tensor replaced by its result; other leaves stay.

    Example:
        >>> rmap_tensor({"a": torch.ones(2), "b": "text"}, torch.sum)
        {'a': tensor(2.), 'b': 'text'}
    """
    return map_leaves(value, lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf)


def default_stash_value(tensor: Tensor) -> Tensor:
    """A detached copy of the tensor on the CPU; the program waits for an accelerator."""
    return plain(tensor).detach().to("cpu", copy=True)


def default_stash(event: Event, stash_value: StashValueFn) -> Stash:
    """Keep name, class and value of an event, with each tensor replaced by the result of ``stash_value``."""
    return Stash(event.name, event.type, event.grad, rmap_tensor(event.value, stash_value))


def get_stash_fn(stash_value: StashValueFn | None = None, stash: StashFn | None = None) -> StashFn:
    """The function to apply to events: ``stash``, or :func:`default_stash` with ``stash_value`` (by default a copy of each tensor).

    Raises:
        ValueError: If both are given.
    """
    if stash_value is not None and stash is not None:
        cure = "A stash can call rmap_tensor(event.value, stash_value)."
        raise ValueError(f"Both stash_value and stash are given; expected one of them. {cure}")
    return stash or functools.partial(default_stash, stash_value=stash_value or default_stash_value)


def track(  # noqa: PLR0917  # in the order that the original has them
    module: nn.Module,
    grad: bool = True,
    include: NamePattern = None,
    exclude: NamePattern = None,
    stash_value: StashValueFn | None = None,
    stash: StashFn | None = None,
    max_bytes: int | None = None,
) -> Tracker:
    """Keep the outputs of a module and its submodules, and their gradients, until the ``with`` block ends.

    Args:
        module: The outermost module.
        grad: Whether to keep gradients, too.
        include: Pattern of the names to keep; by default all. It matches any part of a name (``re.search``), unlike the patterns of
            rules, which match whole names.
        exclude: Pattern of names not to keep, likewise.
        stash_value: Returns the stored value of a tensor; by default a copy on the CPU.
        stash: Returns the stash of an event; replaces ``stash_value``.
        max_bytes: Limit for the bytes of all kept tensors; by default unlimited.

    Returns:
        A list-like :class:`Tracker` of stashes: in the order of the forward pass, then of the backward pass.

    Raises:
        ValueError: If both ``stash_value`` and ``stash`` are given, or ``max_bytes`` is not a positive number.
        ConfigError: If the patterns match no module.

    Example::

        with track(model, include="attention", stash_value=torch.std) as tracker:
            loss_fn(model(x), y).backward()
        print(tracker.to_frame())
    """
    tracker = Tracker(get_stash_fn(stash_value=stash_value, stash=stash), max_bytes=max_bytes)
    tracker.register_all(module, grad=grad, include=include, exclude=exclude)
    return tracker


class Tracker:
    """A list of stashes that grows while registered modules run; see :func:`track`.

    Gradients come from hooks on the output tensors, which do not disturb in-place layers. A recomputation of activation
    checkpointing is not kept.

    Args:
        stash: Returns the stash of an event; by default with copies.
        max_bytes: Limit for the bytes of all kept tensors. A tensor that does not fit raises ``MemoryError`` in the forward or backward
            pass; earlier stashes stay.
    """

    def __init__(self, stash: StashFn | None = None, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1):
            raise ValueError(f"max_bytes is {max_bytes!r}; expected a number of bytes >= 1, or None for no limit.")
        self._stash = get_stash_fn(stash=stash)
        self._max_bytes = max_bytes
        self._num_unobserved = Unobserved.number
        self._num_bytes = 0
        self._module_hooks = HookSet()
        self._tensor_hooks = HookSet()
        self._outputs = WeakTensorKeyDictionary()
        """Version and number of each output: modules that return the same tensor share its number."""
        self._num_outputs = 0
        self._first_by_output: dict[tuple[int, int], Stash] = {}
        """The first stash of a gradient, by backward pass and number of the output."""
        self.stashes: list[Stash] = []
        """The stashes, in order."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_error: object) -> None:
        self.unregister()

    def register(self, module: nn.Module, name: str = "", grad: bool = True) -> None:
        """Keep the outputs of one module from now on.

        Args:
            module: The module.
            name: Its name in stashes.
            grad: Whether to keep gradients, too.
        """

        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            event = Event(name, type(module), False, output, args, kwargs)
            # A forward pass within a backward pass recomputes a checkpointed forward pass. Its outputs get hooks, too: under
            # reentrant checkpointing only they have a gradient.
            if not is_in_backward():
                self._first_by_output.clear()
                self.stashes.append(self._stashed(event))
            if grad:
                self._await_gradient(event)

        # The hook has no reference to the module, which the tracker may outlive.
        self._module_hooks.add_forward(module, UncopiedHook(observe), with_kwargs=True)

    def register_all(self, module: nn.Module, grad: bool = True, include: NamePattern = None, exclude: NamePattern = None) -> None:
        """Keep the outputs of a module and its submodules from now on; arguments as for :func:`track`.

        Raises:
            ConfigError: If the patterns match no module.
        """
        children = dict(module.named_modules())
        names = [name for name in children if (not include or re.search(include, name)) and not (exclude and re.search(exclude, name))]
        if not names:
            near = nearest(str(getattr(include, "pattern", include or "")), children)
            selection = f"include {include!r} and exclude {exclude!r} select none of {len(children)} modules"
            raise ConfigError(f"{selection}; expected a name that include matches (re.search) and exclude does not{near}")
        for name in names:
            self.register(children[name], name, grad)

    def unregister(self) -> None:
        """Remove every hook; stashes stay. If torch traced or transformed a module, a warning reports that its tensors are missing."""
        self._module_hooks.close()
        self._tensor_hooks.close()
        if Unobserved.number > self._num_unobserved:
            self._num_unobserved = Unobserved.number
            _messages.warning(Unobserved.message)

    def clear(self) -> None:
        """Remove all stashes; hooks stay."""
        self.stashes.clear()
        self._first_by_output.clear()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self.stashes)

    def __getitem__(self, index: int) -> Stash:
        return self.stashes[index]

    def __iter__(self) -> Iterator[Stash]:
        return iter(self.stashes)

    def __str__(self) -> str:
        return f"Tracker(stashes={len(self)}, tracking={len(self._module_hooks)})"

    def to_frame(self, stat: Callable[[Tensor], Tensor] = torch.std, stat_name: str | None = None) -> pandas.DataFrame:
        """A table with a row for each stash.

        Args:
            stat: Function of the stash's :attr:`~Stash.first_value` that returns a tensor with one element. Integers are converted to
                float64 before.
            stat_name: Name of its column; by default that of the function, or ``value`` if it has none.

        Returns:
            Columns ``name``, ``type`` (import path of the class), ``grad``, and the statistic, which is missing if the first
            value is not a tensor.

        Raises:
            ImportError: If pandas is not installed.
        """
        pd = require("pandas", "pandas")
        name = getattr(stat, "__name__", "<no name>") if stat_name is None else stat_name
        column = "value" if name.startswith("<") else name

        def statistic(value: Any) -> float | None:  # noqa: ANN401  # as `first_value`
            if not isinstance(value, Tensor):
                return None
            return float(stat(value if value.is_floating_point() or value.is_complex() else value.double()))

        rows = [(item.name, f"{item.type.__module__}.{item.type.__qualname__}", item.grad, statistic(item.first_value)) for item in self]
        frame: pandas.DataFrame = pd.DataFrame(rows, columns=["name", "type", "grad", column])
        return frame

    def _await_gradient(self, event: Event) -> None:
        tensors: dict[int, Tensor] = {id(tensor): tensor for _path, tensor in named_tensors(event.value) if requires_gradient(tensor)}
        if not tensors:
            return
        indices = {identity: _GradientIndex(index) for index, identity in enumerate(tensors)}
        # Indices instead of the output, whose memory may be freed before the backward pass.
        value = map_leaves(event.value, lambda leaf: indices.get(id(leaf)) if isinstance(leaf, Tensor) else leaf)
        awaited = Event(event.name, event.type, True, (value,) if isinstance(event.value, Tensor) else value, (), {})
        take = functools.partial(self._observe_gradient, awaited, [self._number(tensor) for tensor in tensors.values()])
        if len(tensors) == 1:
            (tensor,) = tensors.values()
            # None: a function has several outputs (``chunk``), and this output was not used.
            hook = register_gradient_hook(tensor, lambda gradient: take([gradient]) if gradient is not None else None)
            self._tensor_hooks.add(hook)
        else:
            self._tensor_hooks.add(as_torch_itself(register_multi_grad_hook, list(tensors.values()), take))

    def _observe_gradient(self, awaited: Event, numbers: list[int], gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of an output, before those of an inner module that returned the same tensor."""
        if is_tracing():
            return
        value = map_leaves(awaited.value, lambda leaf: gradients[leaf] if isinstance(leaf, _GradientIndex) else leaf)
        stash = self._stashed(Event(awaited.name, awaited.type, True, value, (), {}))
        outputs = [(backward_pass(), number) for number in numbers]
        inner = {id(self._first_by_output[output]) for output in outputs if output in self._first_by_output}
        is_inner = (index for index, earlier in enumerate(self.stashes) if id(earlier) in inner)
        self.stashes.insert(next(is_inner, len(self.stashes)) if inner else len(self.stashes), stash)
        self._first_by_output.update(dict.fromkeys(outputs, stash))

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor, until it is overwritten."""
        version, number = cast("tuple[int, int]", self._outputs.get(tensor, (-1, -1)))
        if version != plain(tensor)._version:
            self._num_outputs += 1
            number = self._num_outputs
            self._outputs[tensor] = (plain(tensor)._version, number)
        return number

    def _stashed(self, event: Event) -> Stash:
        with torch.no_grad():
            stash = self._stash(event)
        if self._max_bytes is not None:
            size = sum(tensor.numel() * tensor.element_size() for _path, tensor in named_tensors(vars(stash)))
            if self._num_bytes + size > self._max_bytes:
                noun = "gradient" if event.grad else "output"
                raise MemoryError(
                    f"The tracker holds {self._num_bytes} bytes in {len(self)} stashes, and the {noun} of {event.name!r} has {size} more; "
                    f"expected at most max_bytes={self._max_bytes}. Track fewer modules (include, exclude), keep less of each tensor "
                    f"(stash_value=torch.std), call clear() between steps, or allow more."
                )
            self._num_bytes += size
        return stash


class _GradientIndex(int):
    """Replaces a tensor in the structure of an output by the index of its gradient."""


def _first(value: object) -> Any:  # noqa: ANN401  # see Stash.first_value
    leaves = [_first(part) for _name, part in parts(value)]
    return next((leaf for leaf in leaves if leaf is not None), None) if leaves else value
