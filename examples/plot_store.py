"""A picture of a store: one heat map, layers x steps, for each kind and statistic that is asked for.

Works on the store of any run, also while it is written::

    python examples/plot_store.py demo_output/digits/version_0/monitor.h5
    python examples/plot_store.py monitor.h5 activation/rms update/ratio --output picture.png

In a notebook ``load_store(path).plot.heatmap("activation", "rms")`` shows one of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lightning_module_monitor import Key, load_store

DEFAULT_PANELS = ["activation/rms", "activation_gradient/rms", "update/ratio", "gradient/norm"]
"""Shown where the store has them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Draw what a store holds as heat maps, layers x steps.")
    parser.add_argument("store", type=Path, help="path of monitor.h5, or of a run's folder")
    parser.add_argument("panels", nargs="*", help=f"kind/statistic; default: those of {', '.join(DEFAULT_PANELS)} that are there")
    parser.add_argument("--output", type=Path, help="path of the picture; default: monitor.png beside the store")
    options = parser.parse_args(arguments)

    store = load_store(options.store)
    sites_by_panel: dict[str, int] = {}
    for key in map(Key.parse, store):
        if key.site:  # the monitor's own figures have none
            panel = key._replace(site="").format()
            sites_by_panel[panel] = sites_by_panel.get(panel, 0) + 1
    # With what stands before them in this store: run1/activation/rms, validation/activation/rms.
    defaults = [panel for default in DEFAULT_PANELS for panel in sites_by_panel if f"/{panel}".endswith(f"/{default}")]
    chosen = options.panels or defaults
    unknown = [panel for panel in chosen if panel not in sites_by_panel]
    if unknown or not chosen:
        parser.error(f"the store has no {' '.join(unknown or DEFAULT_PANELS)}; expected some of {' '.join(sites_by_panel)}")

    inches = [1.0 + 0.19 * sites_by_panel[panel] for panel in chosen]
    figure = Figure(figsize=(9, sum(inches)), layout="constrained")
    all_axes = figure.subplots(len(chosen), squeeze=False, height_ratios=inches)[:, 0]
    for axes, panel in zip(all_axes, chosen, strict=True):
        kind, _, statistic = panel.rpartition("/")
        store.plot.heatmap(kind, statistic, ax=axes)
    output = options.output or store.path.with_suffix(".png")
    figure.savefig(output, dpi=110)
    print(f"{output}: {', '.join(chosen)}")


if __name__ == "__main__":
    main()
