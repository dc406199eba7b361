"""A picture of a store: one heat map, layers x steps, for each kind and statistic that is asked for.

Works on the store of any run, also while it is written::

    python examples/plot_store.py demo_output/digits/version_0/monitor.h5
    python examples/plot_store.py monitor.h5 activation/rms update/ratio --output picture.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from lightning_module_monitor import load_store
from lightning_module_monitor.record import Key

DEFAULT_PANELS = ["activation/rms", "activation_gradient/rms", "update/ratio", "gradient/norm"]
"""Shown where the store has them."""


def read_panels(store_path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Read a store.

    Args:
        store_path: Path of ``monitor.h5``.

    Returns:
        Value by step, by site (in the order of the model), by panel: ``activation/rms``, ``validation/activation/rms``.
    """
    store = load_store(store_path)
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for text in store:
        key = Key.parse(text)
        if key.site:  # the monitor's own figures have none
            steps, values = store.series(text)
            panel = panels.setdefault(key._replace(site="").format(), {})
            panel[key.site] = dict(zip(steps.tolist(), values.tolist(), strict=True))
    return panels


def as_matrix(value_by_site: dict[str, dict[int, float]]) -> tuple[list[str], list[int], NDArray[np.float64]]:
    """Sites, steps, and the values of shape ``(sites, steps)``, NaN where a site has none."""
    steps = sorted({step for series in value_by_site.values() for step in series})
    rows = [[series.get(step, np.nan) for step in steps] for series in value_by_site.values()]
    return list(value_by_site), steps, np.array(rows)


def draw_panel(axes: Axes, title: str, value_by_site: dict[str, dict[int, float]]) -> None:
    """One heat map. What is not finite, and where colours are logarithmic also zero, stays grey."""
    sites, steps, values = as_matrix(value_by_site)
    finite = values[np.isfinite(values)]
    # Layers differ by orders of magnitude: only a logarithm shows all of them. It takes no negative values.
    is_log = finite.size > 0 and finite.min() >= 0 and finite.max() > 0
    norm = LogNorm(finite[finite > 0].min(), finite.max()) if is_log else Normalize()
    axes.set_facecolor("lightgrey")
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_yticks(range(len(sites)), sites, fontsize=8)
    # Columns are records, of which some schedules have more early than late; the labels say their steps.
    ticks = range(0, len(steps), -(-len(steps) // 10))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set_xlabel("optimizer step")
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, label=title.rpartition("/")[2])
    if is_log:
        bar.ax.yaxis.set_major_formatter(LogFormatter())
        bar.ax.yaxis.set_minor_formatter(LogFormatter())


def draw(panels: dict[str, dict[str, dict[int, float]]]) -> Figure:
    """All panels, one below the other."""
    inches = [1.0 + 0.19 * len(value_by_site) for value_by_site in panels.values()]
    figure = Figure(figsize=(9, sum(inches)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=inches)[:, 0]
    for axes, (title, value_by_site) in zip(all_axes, panels.items(), strict=True):
        draw_panel(axes, title, value_by_site)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Draw what a store holds as heat maps, layers x steps.")
    parser.add_argument("store", type=Path, help="path of monitor.h5")
    parser.add_argument("panels", nargs="*", help=f"kind/statistic; default: those of {', '.join(DEFAULT_PANELS)} that are there")
    parser.add_argument("--output", type=Path, help="path of the picture; default: monitor.png beside the store")
    options = parser.parse_args(arguments)

    there = read_panels(options.store)
    # With what stands before them in this store: run1/activation/rms, validation/activation/rms.
    defaults = [panel for default in DEFAULT_PANELS for panel in there if f"/{panel}".endswith(f"/{default}")]
    chosen = options.panels or defaults
    unknown = [panel for panel in chosen if panel not in there]
    if unknown or not chosen:
        parser.error(f"the store has no {' '.join(unknown or DEFAULT_PANELS)}; expected some of {' '.join(there)}")
    output = options.output or options.store.with_suffix(".png")
    draw({panel: there[panel] for panel in chosen}).savefig(output, dpi=110)
    print(f"{output}: {', '.join(chosen)}")


if __name__ == "__main__":
    main()
