"""The blocks of a model, in order: by a container's name, a list of names, or a pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_module_monitor.errors import ConfigError, nearest, nearest_pattern
from lightning_module_monitor.model.names import ROOT

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(blocks: str | Sequence[str], by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    """The names of the blocks, in the order of the forward pass.

    Args:
        blocks: Name of a container, whose children are the blocks; or a pattern (``re.fullmatch``) of names, in the model's
            order; or names in order. A module that stands at several places has several names.
        by_name: Every module by each of its names, in the model's order.
        label: Path of the option, for messages.

    Returns:
        At least two names.

    Raises:
        ConfigError: If there are fewer; names the nearest right name.
    """
    found = _by_text(blocks, by_name, label) if isinstance(blocks, str) else _listed(blocks, by_name, label)
    if len(found) < 2:
        names = ", ".join(map(repr, found)) or "none"
        raise ConfigError(f"{label} {blocks!r} gives {len(found)} blocks ({names}); expected at least two, for a gain is between two.")
    return found


def _by_text(blocks: str, by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    if blocks in by_name:
        return _children(blocks, by_name, label)
    try:
        found = [name for name in by_name if re.fullmatch(blocks, name)]
    except re.error as error:
        message = f"{label} {blocks!r} is no module's name, and not a regular expression ({error}); expected 'model.blocks' or the like"
        raise ConfigError(message + nearest(blocks, by_name)) from error
    if not found:
        message = f"{label} {blocks!r} is none of the {len(by_name)} module names, and as a pattern matches none"
        raise ConfigError(message + nearest_pattern(blocks, by_name))
    return found


def _children(name: str, by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    """The names of the watched children of a container."""
    module = by_name[name]
    if not isinstance(module, CONTAINERS):
        containers = [other for other, one in by_name.items() if isinstance(one, CONTAINERS)]
        expected = "expected a ModuleList, Sequential or ModuleDict of blocks, a list of names, or a pattern"
        raise ConfigError(f"{label} {name!r} is a {type(module).__name__}; {expected}{nearest(name, containers)}")
    return [child for child in by_name if child != ROOT and (child.rpartition(".")[0] or ROOT) == name]


def _listed(blocks: Sequence[str], by_name: Mapping[str, nn.Module], label: str) -> list[str]:
    for name in blocks:
        if name not in by_name:
            raise ConfigError(f"{label} {name!r} is none of the {len(by_name)} module names{nearest(name, by_name)}")
    return list(blocks)
