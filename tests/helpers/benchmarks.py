"""The programs under benchmarks/, which are no package: tests import them by name, from a folder that they add to the path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Import = Callable[[str], ModuleType]


def tiny_workload(module: Import) -> object:
    """Two layers of width 8."""
    workloads = module("workloads")
    return workloads.Workload("W2", "", lambda: workloads.make_mlp(2, 8), lambda: (torch.randn(4, 8), torch.zeros(4).long()), 0.0)


def variant(module: Import, name: str) -> object:
    """The first variant of that name."""
    return next(known for known in module("variants").VARIANTS if known.name == name)
