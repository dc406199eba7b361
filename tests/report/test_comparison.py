"""Runs side by side: sites that match by name, and differences."""

from __future__ import annotations

import math
import re
from pathlib import Path

from helpers.stores import write_store

from lightning_module_monitor import load_store
from lightning_module_monitor.report.comparison import as_text, compare_series, differing_options, largest_changes, match_sites
from lightning_module_monitor.report.stored_run import StoredRun, read_run


def run(path: Path, series: dict[str, list[float | None]], **options: object) -> StoredRun:
    """A run with these values."""
    return read_run(load_store(write_store(path, series, configuration=options)))


def test_sites_are_matched_by_name(tmp_path: Path) -> None:
    """For each kind: the number of sites in all runs, the number in each run, and the sites of each that are not in all."""
    a = run(tmp_path / "a.h5", {"activation/x/rms": [1.0], "activation/y/rms": [1.0], "gradient/w/norm": [1.0]})
    b = run(tmp_path / "b.h5", {"activation/y/rms": [1.0], "activation/z/mean": [1.0]})
    by_kind = {matched.kind: matched for matched in match_sites([a, b])}
    assert (by_kind["activation"].num_matched, by_kind["activation"].num_sites, by_kind["activation"].unmatched) == (
        1,
        [2, 2],
        [["x"], ["z"]],
    )
    assert (by_kind["gradient"].num_matched, by_kind["gradient"].num_sites, by_kind["gradient"].unmatched) == (0, [1, 0], [["w"], []])


def test_the_largest_changes_come_first(tmp_path: Path) -> None:
    """By the factor between late medians: zero against a number first, a change of sign last; equal medians are left out."""
    early: list[float | None] = [100.0] * 6
    a = run(
        tmp_path / "a.h5",
        {
            "activation/half/rms": [*early, 4.0, 4.0],
            "activation/half/abs_max": [*early, 5.0, 5.0],
            "activation/same/rms": [*early, 1.0, 1.0],
            "activation/dead/rms": [*early, 3.0, 3.0],
            "activation/flips/mean": [*early, -1.0, -1.0],
            "activation/broken/rms": [*early, 1.0, math.nan],
            "activation/only_here/rms": [1.0],
        },
    )
    b = run(
        tmp_path / "b.h5",
        {
            "activation/half/rms": [*early, 2.0, 2.0],
            "activation/half/abs_max": [*early, 4.0, 4.0],
            "activation/same/rms": [*early, 1.0, 1.0],
            "activation/dead/rms": [*early, 0.0, 0.0],
            "activation/flips/mean": [*early, 1.0, 1.0],
            "activation/broken/rms": [*early, 10.0, 10.0],
        },
    )
    changes = largest_changes(a, b)
    assert [(change.key.site, change.key.statistic, change.before.median, change.after.median) for change in changes] == [
        ("dead", "rms", 3.0, 0.0),
        ("broken", "rms", 1.0, 10.0),
        ("half", "rms", 4.0, 2.0),
        ("flips", "mean", -1.0, 1.0),
    ]
    assert [change.factor for change in changes] == [0.0, 10.0, 0.5, -1.0]
    assert str(changes[1]) == "activation/broken/rms: 1 -> 10 (not finite before)"
    assert [change.factor for change in largest_changes(b, a)] == [math.inf, 0.1, 2.0, -1.0]
    assert len(largest_changes(a, b, most=2)) == 2
    assert largest_changes(a, a)[:1] == []


def test_noise_of_negligible_sites_is_no_change(tmp_path: Path) -> None:
    """A site below a thousandth of the others in both runs is left out, although its factor is the largest; in one run it is not."""
    sites = {f"activation/site{number}/rms": [1.0 + number] for number in range(5)}
    a = run(tmp_path / "a.h5", {**sites, "activation/noise/rms": [1e-9], "activation/none/rms": [0.0], "activation/grows/rms": [1e-5]})
    b = run(tmp_path / "b.h5", {**sites, "activation/noise/rms": [1e-6], "activation/none/rms": [1e-8], "activation/grows/rms": [0.5]})
    assert [(change.key.site, change.before.median, change.after.median) for change in largest_changes(a, b)] == [("grows", 1e-5, 0.5)]


def test_residuals_of_singular_values_are_no_change(tmp_path: Path) -> None:
    """A rounding error may be a billion times another; the values themselves are compared, the one with the largest factor."""
    names = ("singular_value_1", "residual_1", "singular_value_2", "residual_2")
    a, b = (
        run(tmp_path / f"{n}.h5", {f"gradient/w/{name}": [value] for name, value in zip(names, values, strict=True)})
        for n, values in enumerate(((4.0, 1e-20, 2.0, 1e-3), (5.0, 1e-9, 1.0, 1e-3)))
    )
    assert [(change.key.statistic, change.factor) for change in largest_changes(a, b)] == [("singular_value_2", 0.5)]


def test_means_near_zero_have_no_factor(tmp_path: Path) -> None:
    """A site of a statistic of both signs counts if it reaches the median magnitude in one of the runs."""
    means = {"a": (0.5, 0.6), "b": (-0.4, -0.5), "c": (0.3, 0.3), "near zero": (0.0001, 0.01), "appears": (0.001, 0.9)}
    a, b = (run(tmp_path / f"{n}.h5", {f"activation/{site}/mean": [both[n]] for site, both in means.items()}) for n in (0, 1))
    assert [change.key.site for change in largest_changes(a, b)] == ["appears", "b", "a"]


def test_the_last_quarter_is_that_of_each_series(tmp_path: Path) -> None:
    """Also of a site that other sites outlast: 8 of its records, of which 2 count, within 16 steps."""
    values: list[float | None] = [1.0] * 6 + [2.0, 4.0] + [None] * 8
    a = run(tmp_path / "a.h5", {"activation/x/rms": values, "activation/y/rms": [1.0] * 16})
    b = run(tmp_path / "b.h5", {"activation/x/rms": [9.0] * 8, "activation/y/rms": [1.0] * 16})
    (change,) = largest_changes(a, b)
    assert (change.key.site, change.before.median, change.after.median) == ("x", 3.0, 9.0)
    assert change == compare_series(a, b, [re.compile(".*/x/.*")])[0]


def test_options_that_differ(tmp_path: Path) -> None:
    """Options of the newest configurations, as text."""
    a = run(tmp_path / "a.h5", {"activation/x/rms": [1.0]}, every_n_steps=5, prefix="", rules=[{"kinds": "update"}])
    b = run(tmp_path / "b.h5", {"activation/x/rms": [1.0]}, every_n_steps=10, prefix="")
    assert differing_options([a, b]) == [("every_n_steps", "5", "10"), ("rules", '{"kinds": "update"}', "null")]
    assert as_text(["train", "validate"]) == '["train", "validate"]'
