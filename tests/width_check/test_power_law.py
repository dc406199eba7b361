"""Verdicts on made-up values, and their table, frame and figure."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lightning_module_monitor import WidthCheck
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.width_check.power_law import Row, judge
from lightning_module_monitor.width_check.settings import Settings

WIDTHS = np.array([128, 256, 512, 1024])
DEFAULTS: dict[str, Any] = {
    "widths": WIDTHS.tolist(),
    "seeds": 4,
    "steps": 1,
    "parametrization": "mup",
    "terms": ["effective_update", "propagating_update"],
    "tolerance": 0.25,
    "trainer": None,
}
SETTINGS = Settings.parse(**DEFAULTS)


def power(exponent: float, scatter: float = 0.0) -> np.ndarray:
    """Values of shape (widths, seeds), whose scatter is the same around every width's mean: it moves no slope."""
    noise = np.random.default_rng(0).normal(0, 1, (4, 4))
    return WIDTHS[:, None] ** exponent * np.exp(scatter * (noise - noise.mean(1, keepdims=True)))


def row(values: np.ndarray, expected: float | None = 0.0, module: str = "fc", term: str = "effective_update") -> Row:
    """Judge values."""
    return judge(module, "hidden", term, values=values, expected=expected, settings=SETTINGS)


@pytest.mark.parametrize(
    ("exponent", "scatter", "expected", "verdict"),
    [
        (0.0, 0.1, 0.0, "ok"),
        (0.2, 0.0, 0.0, "ok"),
        (0.5, 0.1, 0.0, "grows"),
        (-0.5, 0.1, 0.0, "vanishes"),
        (0.5, 0.1, 0.5, "ok"),
        (0.5, 0.1, 1.0, "vanishes"),
        (0.25, 0.1, 0.0, "unclear"),  # on the edge of the tolerance
        (0.5, 3.0, 0.0, "unclear"),  # scatters too much to tell
        (0.0, 3.0, 0.0, "unclear"),  # as above
        (0.5, 0.1, None, "unclear"),
    ],
)
def test_verdict_by_the_interval(exponent: float, scatter: float, expected: float | None, verdict: str) -> None:
    """The whole interval has to be within the tolerance, or outside of it; else the verdict is unclear."""
    judged = row(power(exponent, scatter), expected)
    assert judged.verdict == verdict
    assert judged.exponent == pytest.approx(exponent)
    assert judged.lower <= judged.exponent <= judged.upper
    assert judged.is_offending == (verdict in ("grows", "vanishes"))


def test_zero_at_every_width() -> None:
    """Right where nothing can change, and of the input of a layer, as of the first; unclear where weights should change."""
    right, wrong = row(np.zeros((4, 4)), -math.inf), row(np.zeros((4, 4)), 0.0)
    assert (right.verdict, right.exponent, right.note) == ("ok", -math.inf, "")
    first = row(np.zeros((4, 4)), 0.0, term="propagating_update")
    assert (first.verdict, first.exponent, first.note) == ("ok", -math.inf, "")
    assert row(np.zeros((4, 4)), 0.5, term="propagating_update").verdict == "unclear"
    assert (wrong.verdict, wrong.exponent) == ("unclear", -math.inf)
    assert wrong.note == "zero at every width: is it trained, and has it a gradient in these steps?"


def test_zero_in_some_runs() -> None:
    """They have no logarithm: they are left out with a note, and the verdict is open."""
    values = power(0.5)
    values[0, :2] = 0
    judged = row(values)
    assert (judged.verdict, judged.note) == ("unclear", "zero in 2 of 16 runs, which are left out")
    assert judged.exponent == pytest.approx(0.5)
    values[1:] = 0
    judged = row(values)
    assert (judged.verdict, judged.note) == ("unclear", "zero at all widths but 128")
    assert math.isnan(judged.exponent)


def test_not_zero_where_zero_is_expected() -> None:
    """Its exponent is fitted, with a note."""
    judged = row(power(0.5), -math.inf)
    assert (judged.verdict, judged.note, round(judged.exponent, 6)) == ("unclear", "expected to be zero, and is not", 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_offends(bad: float) -> None:
    """There is no fit; the widths are named."""
    values = power(0.0)
    values[2, 1] = values[3, 0] = bad
    judged = row(values)
    assert (judged.verdict, judged.is_offending, judged.note) == ("nonfinite", True, "not finite at width 512, 1024")
    assert math.isnan(judged.exponent)


@pytest.fixture
def check() -> WidthCheck:
    """Five rows of four modules."""
    broken = power(0.0)
    broken[3, 0] = math.nan
    rows = [
        row(power(0.0), module="a"),
        row(power(0.5, 0.1), module="b"),
        row(power(-1.0), module="c", term="propagating_update"),
        row(broken, module="d"),
        row(np.zeros((4, 4)), -math.inf, module="a", term="propagating_update"),
        row(power(0.3), None, module="e"),
    ]
    return WidthCheck(rows, SETTINGS)


def test_offending_modules_come_first(check: WidthCheck) -> None:
    """Rows that are not finite, then by distance; the rest keeps the model's order."""
    assert [(row.module, row.verdict) for row in check] == [
        *(("d", "nonfinite"), ("c", "vanishes"), ("b", "grows")),
        *(("a", "ok"), ("a", "ok"), ("e", "unclear")),
    ]
    assert check.offending == ("d", "c", "b")
    assert not check.is_sound
    assert len(check) == 6
    assert check["a", "propagating_update"].exponent == -math.inf
    with pytest.raises(KeyError):
        check["a", "nothing"]


def test_unclear_rows_do_not_offend() -> None:
    """A check without an offending row is sound, and its summary has the number of unclear rows."""
    check = WidthCheck([row(power(0.3), None), row(power(0.0), module="ok")], SETTINGS)
    assert check.is_sound
    assert check.summary == "no offending module; 1 of 2 rows unclear"


def test_plain_table(check: WidthCheck) -> None:
    """Every row with its numbers, and a line before and after it; without a note no column for notes."""
    lines = str(check).splitlines()
    assert lines[0] == "Exponents of width against mup: widths 128, 256, 512, 1024; 4 seeds, 1 step"
    assert lines[2].split() == ["module", "role", "term", "exponent", "interval", "expected", "verdict", "note"]
    assert re.split("  +", lines[3]) == ["d", "hidden", "effective_update", "+0.00", "nonfinite", "not finite at width 1024"]
    assert re.split("  +", lines[4]) == ["c", "hidden", "propagating_update", "-1.00", "-1.00 .. -1.00", "+0.00", "vanishes"]
    assert re.split("  +", lines[7]) == ["a", "hidden", "propagating_update", "zero", "zero", "ok"]
    assert lines[-1] == "offending: d, c, b; 1 of 6 rows unclear"
    without_note = str(WidthCheck([row(power(0.3), None)], SETTINGS)).splitlines()
    assert without_note[2].split()[-1] == "verdict"


def test_frame(check: WidthCheck) -> None:
    """The rows in their order, numbers as numbers, NaN for what is not known."""
    frame = check.to_frame()
    assert list(frame.columns) == ["module", "role", "term", "exponent", "lower", "upper", "expected", "verdict", "note"]
    assert frame["module"].tolist() == [row.module for row in check]
    assert frame["exponent"].dtype == frame["expected"].dtype == np.float64
    assert frame["expected"].tolist()[:3] == [0, 0, 0]
    assert math.isnan(frame["expected"].tolist()[-1])


def test_figure(check: WidthCheck, tmp_path: Any) -> None:
    """A panel for every term, a line for every module: the geometric mean of its seeds; what offends is dashed."""
    figure = check.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["effective update", "propagating update"]
    lines = {line.get_label().split(":")[0]: line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}
    assert sorted(lines) == ["a", "b", "e"]
    np.testing.assert_allclose(lines["b"].get_ydata(), np.exp(np.log(check["b", "effective_update"].values).mean(1)))
    assert (lines["a"].get_linestyle(), lines["b"].get_linestyle()) == ("-", "--")
    figure.savefig(tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_one_term(check: WidthCheck) -> None:
    """By default the first one, in new axes; the lines are those of its panel in the figure; axes that are given are drawn into."""
    axes = check.plot()
    panel = check.figure().axes[0]
    assert [line.get_label() for line in axes.get_lines()] == [line.get_label() for line in panel.get_lines()]
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == ("effective update", "width", "root mean square")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    plt.close("all")
    panel = Figure().subplots()
    assert check.plot("propagating_update", ax=panel) is panel
    assert panel.get_title(loc="left") == "propagating update"
    with pytest.raises(ConfigError, match=r"term is 'effective'; expected one of .*; nearest: 'effective_update'"):
        check.plot("effective")
    assert plt.get_fignums() == []


WITH_EXTRAS = [("to_frame", "pandas", "pandas"), ("figure", "matplotlib", "plot"), ("plot", "matplotlib", "plot")]


@pytest.mark.parametrize(("method", "package", "extra"), WITH_EXTRAS)
def test_without_an_extra(check: WidthCheck, method: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    for name in (package, *sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"{package}.* is not installed. Install it with: pip install 'lightning-module-monitor\[{extra}\]'"
    ):
        getattr(check, method)()


@pytest.mark.parametrize(
    ("option", "wrong", "message"),
    [
        ("widths", [128], r"widths is \[128\]; expected at least two"),
        ("widths", 128, "widths is 128; expected at least two"),
        ("widths", [256, 128], r"widths is \[256, 128\]; expected every width once, increasing: \[128, 256\]"),
        ("widths", [128, 128, 256], "expected every width once"),
        ("widths", [0, 128], "expected whole numbers > 0"),
        ("widths", ["128", 256], "expected whole numbers > 0"),
        ("widths", None, "widths is None; expected whole numbers"),
        ("seeds", 0, "seeds is 0; expected a number of seeds >= 1"),
        ("seeds", [1, 1], r"seeds is \[1, 1\]; .* that differ"),
        ("seeds", [-1], "seeds is"),
        ("steps", 0, "steps is 0; expected a whole number >= 1"),
        ("steps", 1.0, "steps is 1.0; expected"),
        ("terms", "effective", "terms 'effective' is not a term; expected .*; nearest: 'effective_update'"),
        ("terms", [], "terms is empty"),
        ("tolerance", 0, "tolerance is 0; expected a number > 0"),
        ("parametrization", "SP", "parametrization is 'SP'; expected mup, or exponents by pattern"),
        ("trainer", ["cpu"], r"trainer is \['cpu'\]; expected options"),
        ("trainer", {"precisions": 16}, "trainer has 'precisions', which is no option of the Trainer; nearest: 'precision'"),
        ("trainer", {"logger": True}, "trainer has 'logger', which the check sets itself; leave it out"),
        ("trainer", {"max_steps": 3}, "trainer has 'max_steps', which the check sets itself"),
    ],
)
def test_wrong_settings(option: str, wrong: object, message: str) -> None:
    """An error before anything is trained, with the value, the expected one and the nearest name."""
    with pytest.raises(ConfigError, match=message):
        Settings.parse(**DEFAULTS | {option: wrong})


def test_settings_in_their_other_forms() -> None:
    """A range of widths, a list of seeds, a single term; numpy's arrays and numbers."""
    settings = Settings.parse(**DEFAULTS | {"widths": range(64, 257, 64), "seeds": [3, 1], "terms": "effective_update"})
    assert (settings.widths, settings.seeds, settings.terms) == ((64, 128, 192, 256), (3, 1), ("effective_update",))
    settings = Settings.parse(**DEFAULTS | {"widths": 2 ** np.arange(6, 9), "seeds": list(np.arange(2)), "steps": 1})
    assert (settings.widths, settings.seeds) == ((64, 128, 256), (0, 1))
    assert {type(number) for number in settings.widths + settings.seeds} == {int}
