"""Figures of a store: they have the recorded values, with legible labels."""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.stores import write_store
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, LogNorm, Normalize
from matplotlib.figure import Figure

from lightning_module_monitor import Histogram, load_store
from lightning_module_monitor.histogram import LABELS, NUM_COUNTS
from lightning_module_monitor.record import UNDEFINED
from lightning_module_monitor.sinks.store.reader import StoreReader

SERIES: dict[str, list[float | None]] = {
    "activation/a/rms": [1.0, 10.0, 1000.0],
    "activation/b/rms": [2.0, None, math.inf],
    "activation/c/rms": [0.0, 3.0, UNDEFINED],
    "activation/a/mean": [-1.0, 0.5, 2.0],
    "activation/a/zero_fraction": [0.25, 0.5, 0.75],
    "gradient/a.weight/norm": [1.0, 2.0, 3.0],
    "gradient/a.bias/norm": [0.5, 0.6, 0.7],
    "gradient/b.weight/norm": [4.0, 5.0, math.nan],
    "attention_entropy/one.attn.head_0/mean": [0.1, 0.2, 0.3],
    "attention_entropy/one.attn.head_1/mean": [0.4, 0.5, 0.6],
    "attention_entropy/two.attn.head_1/mean": [0.7, 0.8, 0.9],
    "loss": [3.0, 2.0, 1.0],
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreReader]:
    """Three steps, 0, 10 and 20."""
    rows = np.zeros((3, NUM_COUNTS), np.int64)
    rows[:, LABELS.index("[2^0, 2^1)")] = [3, 1, 0]
    rows[:, LABELS.index("0")] = [1, 1, 4]
    rows[1, LABELS.index("nan")] = 7
    histograms = {"gradient/a.weight/hist": [Histogram(row) for row in rows]}
    yield load_store(write_store(tmp_path / "monitor.h5", SERIES, histograms=histograms))
    plt.close("all")


def labels(axis: Any) -> list[str]:
    """The texts at an axis."""
    return [text.get_text() for text in axis.get_ticklabels()]


def bar(axes: Axes) -> Any:
    """The colour bar of an image."""
    return axes.images[0].colorbar


def test_a_heat_map_has_a_row_for_each_site(store: StoreReader) -> None:
    """In the model's order, a column for each step; cells without a value are empty, non-finite cells are red."""
    axes = store.plot.heatmap("activation", "rms")
    image = axes.images[0].get_array()
    assert image is not None
    np.testing.assert_array_equal(np.ma.getmaskarray(image), [[0, 0, 0], [0, 1, 1], [0, 0, 1]])
    assert image[0].tolist() == [1.0, 10.0, 1000.0]
    assert (labels(axes.yaxis), labels(axes.xaxis)) == (["a", "b", "c"], ["0", "10", "20"])
    assert (axes.get_title(), axes.get_xlabel()) == ("activation: rms", "optimizer step")
    red = axes.images[1].get_array()
    assert red is not None
    assert np.argwhere(red[..., 3] > 0).tolist() == [[1, 2]]
    assert bar(axes).ax.get_ylabel() == "rms (red: not finite)"
    norm = axes.images[0].norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax, bar(axes).extend) == (1.0, 1000.0, "min")  # the smallest value that is not zero; zero lies below
    assert axes.images[0].to_rgba(image)[2, 0].tolist() == [0, 0, 0, 1]


def test_the_scale_is_that_of_the_values(store: StoreReader) -> None:
    """Zero is in the middle for values of both signs; a magnitude within a decade is linear; the unit is named."""
    signed, fraction = store.plot.heatmap("activation", "mean"), store.plot.heatmap("activation", "zero_fraction")
    norm = signed.images[0].norm
    assert isinstance(norm, CenteredNorm)
    assert (norm.vmin, norm.vmax) == (-2.0, 2.0)
    assert type(fraction.images[0].norm) is Normalize
    assert bar(fraction).ax.get_ylabel() == "zero_fraction [0 to 1]"


def test_a_profile_has_a_line_for_each_step_and_role(store: StoreReader) -> None:
    """Sites from top to bottom; weights are not connected with biases; non-finite values are gaps."""
    axes = store.plot.profile("gradient", "norm", steps=[0, 20])
    assert labels(axes.yaxis) == ["a.weight", "a.bias", "b.weight"]
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    assert list(lines) == ["weight, step 0", "bias, step 0", "weight, step 20", "bias, step 20"]
    assert lines["weight, step 0"] == [[1.0, 0.0], [4.0, 2.0]]
    assert lines["bias, step 20"] == [[0.7, 1.0]]
    assert lines["weight, step 20"][0] == [3.0, 0.0]
    assert math.isnan(lines["weight, step 20"][1][0])
    assert (axes.get_title(), axes.get_xlabel(), axes.yaxis_inverted()) == ("gradient: norm over depth", "norm", True)
    of_modules = store.plot.profile("activation", "rms", sites="[ab]")
    assert [line.get_label() for line in of_modules.get_lines()] == ["step 0", "step 10", "step 20"]
    assert (labels(of_modules.yaxis), of_modules.get_xscale()) == (["a", "b"], "log")


def test_series_are_curves(store: StoreReader) -> None:
    """Of one or several keys; a logarithmic scale if values span decades; red crosses at steps with non-finite values."""
    one = store.plot.series("loss")
    (line,) = one.get_lines()
    assert line.get_xydata().tolist() == [[0, 3], [10, 2], [20, 1]]
    assert (one.get_title(), one.get_xlabel(), one.get_ylabel(), one.get_yscale()) == ("loss", "optimizer step", "loss", "linear")
    several = store.plot.series("activation/a/rms", "activation/b/rms", "attention_entropy/one.attn.head_0/mean")
    assert (several.get_ylabel(), several.get_yscale(), several.get_title()) == ("mean [nats] and rms", "log", "3 series")
    matched = store.plot.series("activation/[ab]/rms")
    assert [line.get_label() for line in matched.get_lines()[:2]] == ["activation/a/rms", "activation/b/rms"]
    assert matched.get_title() == "activation/[ab]/rms"
    twice = store.plot.series("activation/a/rms", "activation/[ab]/rms")
    assert [text.get_text() for text in twice.get_legend().get_texts() if "/" in text.get_text()] == [
        "activation/a/rms",
        "activation/b/rms",
    ]
    assert twice.get_title() == "2 series"
    curves = {str(line.get_label()): line.get_xydata() for line in several.get_lines()}
    assert list(curves) == ["activation/a/rms", "activation/b/rms", "not finite", "attention_entropy/one.attn.head_0/mean"]
    assert curves["not finite"][:, 0].tolist() == [20]
    [gap] = store.plot.series("activation/c/rms").get_lines()  # a value that a finite tensor does not have is no cross
    np.testing.assert_array_equal(gap.get_ydata(), [0.0, 3.0, math.nan])


def test_a_histogram_is_shares_of_bins_over_steps(store: StoreReader) -> None:
    """The largest values on top; bins that are always empty are left out; steps with non-finite elements are marked."""
    axes = store.plot.histogram("gradient/a.weight/hist")
    image = axes.images[0].get_array()
    assert image is not None
    assert dict(zip(labels(axes.yaxis), image.filled(0).tolist(), strict=True)) == {"[2^0, 2^1)": [0.75, 0.5, 0.0], "0": [0.25, 0.5, 1.0]}
    assert axes.get_lines()[0].get_xdata().tolist() == [1]
    assert (axes.get_title(), bar(axes).ax.get_ylabel()) == ("gradient/a.weight/hist", "share of the finite elements")
    nothing = {"gradient/w/hist": [Histogram(np.zeros(NUM_COUNTS, np.int64))] * 2}
    empty = load_store(write_store(store.path.with_name("empty.h5"), {}, histograms=nothing)).plot.histogram("gradient/w/hist")
    assert labels(empty.yaxis) == ["0"]


def test_attention_is_modules_by_heads(store: StoreReader) -> None:
    """At the last or another step; the cell of a missing head is empty."""
    axes = store.plot.attention()
    image = axes.images[0].get_array()
    assert image is not None
    assert image.tolist() == [[0.3, 0.6], [None, 0.9]]
    assert (labels(axes.yaxis), labels(axes.xaxis), axes.get_xlabel()) == (["one.attn", "two.attn"], ["0", "1"], "head")
    assert (axes.get_title(), bar(axes).ax.get_ylabel()) == ("attention_entropy: mean at step 20", "mean [nats]")
    earlier = store.plot.attention("attention_entropy", "mean", step=0).images[0].get_array()
    assert earlier is not None
    assert earlier.tolist() == [[0.1, 0.4], [None, 0.7]]


def test_axes_of_the_users_are_drawn_into(store: StoreReader) -> None:
    """Without pyplot; the given axes are returned; two figures of a store have equal pixels."""
    pictures = []
    for _ in range(2):
        figure = Figure(figsize=(8, 20))
        for axes, draw in zip(
            figure.subplots(5),
            [
                lambda ax: store.plot.heatmap("activation", "rms", ax=ax),
                lambda ax: store.plot.profile("activation", "rms", ax=ax),
                lambda ax: store.plot.series("loss", ax=ax),
                lambda ax: store.plot.histogram("gradient/a.weight/hist", ax=ax),
                lambda ax: store.plot.attention(ax=ax),
            ],
            strict=True,
        ):
            assert draw(axes) is axes
        file = io.BytesIO()
        figure.savefig(file, format="png")
        pictures.append(file.getvalue())
    assert plt.get_fignums() == []
    assert pictures[0] == pictures[1]


def test_hundreds_of_sites_and_steps_keep_legible_labels(tmp_path: Path) -> None:
    """Names do not overlap, at most 10 steps are written, and each label is at its row or column."""
    store = load_store(write_store(tmp_path / "m.h5", {f"activation/layer{number}/rms": [1.0 * number] * 99 for number in range(500)}))
    axes = store.plot.heatmap("activation", "rms")
    axes.figure.canvas.draw()
    assert labels(axes.yaxis) == [f"layer{tick}" for tick in axes.get_yticks()]
    boxes = [text.get_window_extent() for text in axes.yaxis.get_ticklabels()]
    assert len(boxes) > 40
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert labels(axes.xaxis) == [str(step) for step in range(0, 990, 100)]
    plt.close("all")


def test_what_was_not_recorded_is_an_error(store: StoreReader) -> None:
    """The error has the nearest kind, statistic, site, step or key."""
    for draw, message in (
        (lambda: store.plot.heatmap("activations", "rms"), "nearest: 'activation'"),
        (lambda: store.plot.heatmap("activation", "rmse"), "has no 'rmse' of 'activation'; nearest: 'rms'"),
        (
            lambda: store.plot.heatmap("activation", "rms", sites="aa"),
            "matches none of 3 sites with .*rms.* of .*activation.*; nearest: .*'a",
        ),
        (lambda: store.plot.profile("activation", "rms", steps=19), "step 19 was not recorded; nearest: 20"),
        (lambda: store.plot.series("los"), "nearest: 'loss'"),
        (lambda: store.plot.histogram("gradient/a/hist"), "nearest: 'gradient/a.weight/hist'"),
    ):
        with pytest.raises(KeyError, match=message):
            draw()
    with pytest.raises(ValueError, match=r"sites is '\('; expected a regular expression"):
        store.plot.heatmap("activation", "rms", sites="(")
    assert plt.get_fignums() == []


def test_without_matplotlib_the_command_that_installs_it_is_named(store: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other methods of the store work without it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert store["loss"][0].tolist() == [0, 10, 20]
    with pytest.raises(ImportError, match=r"matplotlib.* is not installed.*pip install 'lightning-module-monitor\[plot\]'"):
        store.plot.heatmap("activation", "rms")
