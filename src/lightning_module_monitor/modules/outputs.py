"""Any module's output (tensor, tuple, dict, dataclass, nested) as named tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor


def named_tensors(output: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in an output, with the suffix that tells it from the others.

    Args:
        output: What a module returned: a tensor, or tuples, lists, mappings, named tuples and dataclasses of such, nested
            at will. Anything else in it is passed over.

    Yields:
        Suffix and tensor. The suffix is empty for the tensor itself and for the first element of a tuple, ``output_1`` for
        the second, ``output_hidden_states`` for an entry or attribute of that name, ``output_1_0`` for the first element of
        the second.
    """
    for path, tensor in _walk(output, ()):
        is_first = all(part == 0 for part in path)
        yield "" if is_first else "_".join(("output", *map(str, path))), tensor


def _walk(output: object, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Tensor]]:
    if isinstance(output, Tensor):
        yield path, output
        return
    for name, part in _parts(output):
        yield from _walk(part, (*path, name))


def _parts(output: object) -> Iterator[tuple[str | int, object]]:
    if isinstance(output, Mapping):
        yield from ((str(name), part) for name, part in output.items())
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output, strict=True)
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from ((field.name, getattr(output, field.name)) for field in dataclasses.fields(output))
