"""Converts options to plain lists and dicts, from containers of any package."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

OptionsT = TypeVar("OptionsT", bound="PlainFields")


def plain(value: Any) -> Any:  # noqa: ANN401  # any value of any option
    """A value with plain containers at every depth: a dict of any mapping or namespace, a list of any other collection or array.

    Lists and mappings of Hydra (``ListConfig``, ``DictConfig``), jsonargparse and NumPy are no ``list`` and no ``dict``. Modules and
    other callables stay as they are, although some can be iterated.

    >>> plain({"steps": range(3), "kinds": ("gradient", "update")})
    {'steps': [0, 1, 2], 'kinds': ['gradient', 'update']}
    """
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in value}
    if isinstance(value, str | bytes) or callable(value):
        return value
    if hasattr(value, "as_dict"):  # a namespace of jsonargparse
        return plain(value.as_dict())
    if hasattr(value, "tolist"):  # arrays and tensors, and their scalars
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, Collection) else value


@dataclasses.dataclass(frozen=True)  # jsonargparse takes a mapping for a dataclass only if all its bases are dataclasses
class PlainFields:
    """Base of dataclasses whose fields hold plain containers. ``None``, the ``null`` of YAML, stands for the default of a field."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = plain(getattr(self, field.name))
            if value is None and field.default is not dataclasses.MISSING:
                value = field.default
            elif value is None and field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            object.__setattr__(self, field.name, value)


def any_hints(options: type[OptionsT]) -> type[OptionsT]:
    """Make the type hints of a dataclass ``Any`` at run time; type checkers read the source, and jsonargparse ``__init__``.

    OmegaConf keeps a dataclass in a list by its type hints, and refuses unions with a list (a ``Rule`` that Hydra has made).
    """
    options.__annotations__ = dict.fromkeys(options.__annotations__, Any)
    return options
