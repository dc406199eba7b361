"""Tables of a store as pandas and xarray have them."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import Key
from lightning_module_monitor.sinks.store import layout

if TYPE_CHECKING:
    import xarray

    from lightning_module_monitor.sinks.store.reader import Matrix


def tidy(keys: list[Key], steps: NDArray[np.int64], values: NDArray[np.float64]) -> dict[str, NDArray[np.generic] | list[str]]:
    """The recorded values of a table, one after the other, each with the parts of its key."""
    row, column = np.nonzero(~layout.is_absent(values))
    parts = {
        "stage": [key.stage for key in keys],
        "kind": [f"{key.prefix}/{key.kind}" if key.prefix else key.kind for key in keys],
        "site": [key.site for key in keys],
        "statistic": [key.statistic for key in keys],
    }
    named = {name: np.array(texts, dtype=object)[column] for name, texts in parts.items()}
    return {"step": steps[row], **named, "value": values[row, column]}


def to_dataset(xr: ModuleType, matrix: Matrix) -> xarray.Dataset:
    """A variable for each statistic of a kind, by step and site."""
    keys, steps = matrix.keys, matrix.steps
    sites = list(dict.fromkeys(key.site for key in keys))
    place = {site: index for index, site in enumerate(sites)}
    statistics = dict.fromkeys(key.statistic for key in keys)
    cubes = {statistic: np.full((len(sites), len(steps)), np.nan) for statistic in statistics}
    for column, key in enumerate(keys):
        cubes[key.statistic][place[key.site]] = matrix.values[:, column]
    dataset: xarray.Dataset = xr.Dataset(
        {name: (("step", "site"), cube.T) for name, cube in cubes.items()}, coords={"step": steps, "site": sites}
    )
    return dataset.squeeze("site", drop=True) if sites == [""] else dataset
