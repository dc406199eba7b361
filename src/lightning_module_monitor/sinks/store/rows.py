"""The rows of a run's file besides its tables of numbers: findings, facts of training and modules, written and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.record import Finding, ModuleInfo

FINDINGS, FACTS = "findings", "facts"
"""Names of the datasets to which a run appends rows, each with its step."""
MODULES = "module table"
"""Name of the dataset of modules; no kind has a space."""

_TEXTS_OF_FINDING = [("name", "S40"), ("site", "S128"), ("key", "S250"), ("severity", "S8"), ("words", "S1600"), ("cause", "S40")]
_FACTS = np.dtype([("step", "<i8"), ("text", "S500")])
"""Part of the JSON of facts."""
DTYPES = {FINDINGS: np.dtype([("step", "<i8"), *_TEXTS_OF_FINDING, ("steps_before", "<i8")]), FACTS: _FACTS}
"""dtype by name of the dataset."""
_MODULE = np.dtype([("name", "S128"), ("type", "S80"), ("num_parameters", "<i8"), ("output_shape", "S80"), ("output_dtype", "S20")])


def read_findings(group: h5py.Group) -> list[Finding]:
    """The findings in a file or in a group ``superseded``, in the order in which they were written; old files have none."""
    if FINDINGS not in group:
        return []
    # In a file of an earlier version a kill could leave a row without a name.
    rows = group[FINDINGS][...]
    complete = ([value.decode() if isinstance(value, bytes) else value for value in row.tolist()] for row in rows if row["name"])
    return [Finding(**dict(zip(rows.dtype.names, values, strict=True))) for values in complete]


def finding_rows(findings: Sequence[Finding]) -> NDArray[np.void]:
    """Findings as rows of the dataset."""
    return _rows(DTYPES[FINDINGS], map(vars, findings))


def read_facts(file: h5py.File) -> list[tuple[int, Facts]]:
    """The facts of training, each with the first step that they hold for; old files have none."""
    texts: dict[int, bytes] = {}
    for step, text in file[FACTS][...].tolist() if FACTS in file else ():
        texts[step] = texts.get(step, b"") + text
    facts = []
    for step, text in texts.items():
        with suppress(ValueError):  # in a file of an earlier version a kill could leave an incomplete text
            facts.append((step, Facts.of_json(json.loads(text))))
    return facts


def fact_rows(step: int, facts: Facts) -> NDArray[np.void]:
    """Facts as rows of the dataset."""
    text, size = json.dumps(asdict(facts)).encode(), _FACTS["text"].itemsize
    return np.array([(step, text[first : first + size]) for first in range(0, len(text), size)], dtype=_FACTS)


def read_modules(file: h5py.File) -> list[ModuleInfo]:
    """The modules of the model, in its order; old files have none."""
    rows = [] if MODULES not in file else file[MODULES][...].tolist()
    texts = ((name.decode(), type_.decode(), size, shape.decode(), dtype.decode()) for name, type_, size, shape, dtype in rows)
    return [ModuleInfo(name, type_, size, tuple(json.loads(shape)) if shape else None, dtype) for name, type_, size, shape, dtype in texts]


def module_rows(modules: Sequence[ModuleInfo]) -> NDArray[np.void]:
    """Modules as rows of the dataset; a shape that is too long is left out."""
    size = _MODULE["output_shape"].itemsize
    shapes = ["" if module.output_shape is None else json.dumps(module.output_shape) for module in modules]
    rows = ({**module._asdict(), "output_shape": text if len(text) <= size else ""} for module, text in zip(modules, shapes, strict=True))
    return _rows(_MODULE, rows)


def merged_modules(before: Iterable[ModuleInfo], more: Iterable[ModuleInfo]) -> list[ModuleInfo]:
    """Modules updated by later descriptions; a known output is replaced only by another."""
    by_name = {module.name: module for module in before}
    by_name |= {module.name: module for module in more if module.output_shape is not None or module.name not in by_name}
    return [*by_name.values()]


def _rows(dtype: np.dtype[np.void], items: Iterable[Mapping[str, Any]]) -> NDArray[np.void]:
    """Rows of a dataset from values by field; a text that is too long is cut between characters."""
    fields = [(name, dtype[name].itemsize) for name in dtype.names or ()]
    rows = [tuple(_fitting(item[name], size) if isinstance(item[name], str) else item[name] for name, size in fields) for item in items]
    return np.array(rows, dtype=dtype)


def _fitting(text: str, size: int) -> bytes:
    data = text.encode()
    return data if len(data) <= size else data[: size - 3].decode(errors="ignore").encode() + b"..."
