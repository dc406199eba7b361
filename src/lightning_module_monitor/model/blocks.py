"""Which modules are the blocks of a model, one after the other, by a container's name, a list of names, or a pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_module_monitor.errors import ConfigError, nearest
from lightning_module_monitor.model.names import ROOT

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(wish: str | Sequence[str], by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    """The names of the blocks, in the order of the forward pass.

    Args:
        wish: Name of a container, whose children are the blocks; or a pattern (``re.fullmatch``) of names, in the model's
            order; or names in the order that is meant. A module that stands at several places has several names.
        by_name: Every module by every name that it has, in the model's order.
        label: Path of the option, for messages.

    Returns:
        At least two names.

    Raises:
        ConfigError: If there are none such; names the nearest right name.
    """
    found = _by_text(wish, by_name, label) if isinstance(wish, str) else _listed(wish, by_name, label)
    if len(found) < 2:
        names = ", ".join(map(repr, found)) or "none"
        raise ConfigError(f"{label} {wish!r} gives {len(found)} blocks ({names}); expected at least two, for a gain is between two.")
    return found


def _by_text(wish: str, by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    if wish in by_name:
        return _children(wish, by_name, label)
    try:
        found = [name for name in by_name if re.fullmatch(wish, name)]
    except re.error as error:
        message = f"{label} {wish!r} is no module's name, and not a regular expression ({error}); expected 'model.blocks' or the like"
        raise ConfigError(message + nearest(wish, by_name)) from error
    if not found:
        message = f"{label} {wish!r} is none of the {len(by_name)} module names, and as a pattern matches none"
        raise ConfigError(message + nearest(wish, by_name))
    return found


def _children(name: str, by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    """The names of what is in a container, less what is never watched."""
    module = by_name[name]
    if not isinstance(module, CONTAINERS):
        containers = [other for other, one in by_name.items() if isinstance(one, CONTAINERS)]
        expected = "expected a ModuleList, Sequential or ModuleDict of blocks, a list of names, or a pattern"
        raise ConfigError(f"{label} {name!r} is a {type(module).__name__}; {expected}{nearest(name, containers)}")
    return [child for child in by_name if child != ROOT and (child.rpartition(".")[0] or ROOT) == name]


def _listed(wish: Sequence[str], by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    for name in wish:
        if name not in by_name:
            raise ConfigError(f"{label} {name!r} is none of the {len(by_name)} module names{nearest(name, by_name)}")
    return list(wish)
