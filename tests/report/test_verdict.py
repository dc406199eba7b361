"""The verdict: every check finds the sick site and leaves its healthy neighbours alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from lightning_module_monitor.record import Finding, Key
from lightning_module_monitor.report.checks import growth
from lightning_module_monitor.report.run import early, late, typical
from lightning_module_monitor.report.verdict import LEVELS, Verdict, verdict_on
from lightning_module_monitor.sinks.store.matrices import Table

STEPS = 16
FLAT = [1.0] * STEPS


def table(name: str, rows: Mapping[str, Sequence[float]], absent: float = -777.0) -> Table:
    """A table of a kind and statistic; one number stands for nothing recorded."""
    values = np.array(list(rows.values()), dtype=np.float64)
    is_recorded = values != absent
    key = Key.parse(name.replace("/", "/-/") if name.count("/") == 1 and not name.startswith("monitor") else name)._replace(site="")
    return Table(key, tuple(rows), np.arange(values.shape[1]) * 10, np.where(is_recorded, values, np.nan), is_recorded)


def of(problem: str, verdict: Verdict) -> list[Finding]:
    """The findings of a problem."""
    return [finding for finding in verdict.findings if finding.name == problem]


def then(value: float, before: float = 1.0, at: int = 8) -> list[float]:
    """A series that changes once."""
    return [before] * at + [value] * (STEPS - at)


CASES = {
    "all zero, by its share": (
        "activation/zero_fraction",
        then(1.0, 0.4),
        "sick",
        "outputs that are zero",
        80,
        "since step 80 (8 records)",
    ),
    "all zero, by its size": ("activation/rms", then(0.0), "sick", "outputs that are zero", 80, "every element is zero since step 80"),
    "mostly zero": (
        "activation/zero_fraction",
        then(0.995, 0.4),
        "watch",
        "outputs that are zero",
        80,
        "99.500% of the elements are zero",
    ),
    "all but zero": (
        "activation/zero_fraction",
        then(0.9999, 0.4),
        "sick",
        "outputs that are zero",
        80,
        "99.990% of the elements are zero",
    ),
    "zero now and then": (
        "gradient/norm",
        [0.4, 0.0, 0.0] * 5 + [0.0],
        "watch",
        "gradients that are zero",
        10,
        "norm is 0 in half of",
    ),
    "no gradient": (
        "gradient/norm",
        [0.0] * STEPS,
        "sick",
        "gradients that are zero",
        0,
        "norm is 0 in all of the run (16 records)",
    ),
    "growing": (
        "activation/rms",
        then(200.0),
        "watch",
        "activations that explode",
        80,
        "grew 2e+02 times from step 80 on, from 1 to 2e+02",
    ),
    "exploding": ("activation/norm", then(1e5), "sick", "activations that explode", 80, "grew 1e+05 times"),
    "exploding at once": (
        "activation/rms",
        [1.0, *[5e4] * (STEPS - 1)],
        "sick",
        "activations that explode",
        10,
        "grew 5e+04 times from step 10",
    ),
    "exploding backward": ("activation_gradient/rms", then(1e5), "sick", "gradients that explode", 80, "grew 1e+05 times"),
    "a spike": ("gradient/norm", [*FLAT[:9], 500.0, *FLAT[10:]], "watch", "spikes of the gradient", 90, "norm 5e+02 at step 90"),
    "large updates": (
        "update/ratio",
        then(0.1, 1e-3),
        "watch",
        "updates that are large",
        80,
        "moves it by 0.1 of its norm (steps 120 to 150)",
    ),
    "leaps": ("update/ratio", then(0.5, 1e-3), "sick", "updates that are large", 80, "moves it by 0.5 of its norm"),
    "stuck": ("update/ratio", [0.0] * STEPS, "sick", "weights that do not move", 0, "it has never moved"),
    "stuck later": ("update/ratio", then(0.0, 1e-3), "watch", "weights that do not move", 80, "a step moves it by 0 of its norm"),
    "amplified": ("gradient_flow/gain", then(20.0), "watch", "gain of the gradient between blocks", 80, "20 times larger"),
    "damped": ("gradient_flow/gain", then(1e-4), "sick", "gain of the gradient between blocks", 80, "1e+04 times smaller"),
    "vanished": ("gradient_flow/gain", then(0.0), "sick", "gain of the gradient between blocks", 80, "becomes zero here"),
    "large logits": ("attention_max_logit/max", then(2e4), "sick", "large logits of attention", 80, "largest logit 2e+04"),
}


def test_what_begins_small_has_not_exploded_when_it_is_as_large_as_others() -> None:
    """An adapter that begins at zero, say, and is there after a few steps."""
    sites = {"good": [0.4] * STEPS, "adapter": [0.0, 1e-6, *[2.0] * (STEPS - 2)]}
    assert not verdict_on([table("activation/rms", sites)]).findings


@pytest.mark.parametrize("case", CASES)
def test_a_sick_site_is_found_and_its_neighbours_are_not(case: str) -> None:
    """Site, level, step and evidence are those of the series; healthy series beside it are not named."""
    name, series, level, problem, step, evidence = CASES[case]
    healthy = 1e-3 if name.startswith("update") else 0.4
    verdict = verdict_on([table(name, {"good": [healthy] * STEPS, "bad": series, "fine": [healthy] * STEPS})])
    (finding,) = of(problem, verdict)
    kind, statistic = name.split("/")
    assert (finding.site, LEVELS[finding.severity], finding.kind, finding.statistic, finding.step) == ("bad", level, kind, statistic, step)
    assert evidence in finding.words
    assert {one.site for one in verdict.findings} == {"bad"}
    assert verdict.is_sick == any(LEVELS[one.severity] == "sick" for one in verdict.findings)


def test_a_healthy_run_is_called_so() -> None:
    """Each check says in how many series it looked, and what it would need."""
    tables = [
        table("activation/rms", {"a": FLAT, "b": list(np.linspace(1, 9, STEPS))}),
        table("gradient/norm", {"a.weight": list(np.geomspace(3, 0.3, STEPS))}),
        table("update/ratio", {"a.weight": [1e-3] * STEPS}),
        table("validation/activation/-/rms", {"a": [math.nan] * STEPS}),  # training is looked at
    ]
    verdict = verdict_on(tables)
    assert not verdict.findings
    assert not verdict.is_sick
    assert verdict.beginning is None
    assert verdict.headline == "no check found anything"
    num_series = {check.name: check.num_series for check in verdict.checks}
    assert num_series["values that are not finite"] == 3
    assert num_series["updates that are large"] == 1
    assert num_series["entropy_collapse"] == 0
    assert (verdict_on([]).level, verdict_on([]).headline) == (
        "not looked at",
        "not enough was recorded to judge: 0 of 19 checks had values to look at",
    )


def test_the_first_that_is_not_finite_is_the_first_in_the_order_of_events() -> None:
    """Of one step: parameters before activations, forward in the model's order, backward against it, gradients after them."""
    bad = then(math.nan, at=5)
    tables = [
        table("gradient/norm", {"a.weight": bad}),
        table("activation_gradient/rms", {"a": bad, "b": bad}),
        table("activation/nonfinite_count", {"a": [0.0] * STEPS, "b": then(3.0, 0.0, at=5), "c": then(9.0, 0.0, at=4 + 2)}),
        table("activation/rms", {"b": bad}),  # tells less than the count
    ]
    found = of("values that are not finite", verdict_on(tables))
    assert [(one.kind, one.site, one.step) for one in found] == [
        ("activation", "b", 50),
        ("activation_gradient", "b", 50),
        ("activation_gradient", "a", 50),
        ("gradient", "a.weight", 50),
        ("activation", "c", 60),
    ]
    assert found[0].words == "the first: 3 elements at step 50, of 4 series at that step and 5 in all"
    assert all(LEVELS[one.severity] == "sick" for one in found)


def test_what_the_loss_scale_skipped_is_no_sickness() -> None:
    """Gradients overflow where the scale is too large; the step is not made. Many such steps are to be watched."""
    overflow = [1.0, math.inf, *FLAT[2:]]
    skipped = table("monitor/step_skipped", {"": [0.0, 1.0, *[0.0] * (STEPS - 2)]})
    assert not verdict_on([table("gradient/norm", {"w": overflow})], [skipped]).findings
    assert verdict_on([table("gradient/norm", {"w": overflow})]).is_sick
    (often,) = verdict_on([], [table("monitor/step_skipped", {"": then(1.0, 0.0)})]).findings
    assert (LEVELS[often.severity], often.step, often.words) == ("watch", 80, "the loss scale skipped 50% of steps")
    (errors,) = verdict_on([], [table("monitor/errors", {"": then(2.0, 0.0, at=15)})]).findings
    assert (errors.name, errors.step) == ("what could not be measured", 150)


def test_what_is_infinite_by_its_formula_is_no_sickness() -> None:
    """The ratio of an update to a zero, the deviation of one element, the logarithm of a gain of zero."""
    tables = [
        table("update/ratio", {"bias": [math.inf, *[1e-3] * (STEPS - 1)]}),
        table("gradient/std", {"bias": [math.nan] * STEPS}),
        table("gradient_flow/log_gain", {"a-b": [-math.inf] * STEPS}),
    ]
    assert not verdict_on(tables).findings


def test_one_record_and_gaps_are_enough() -> None:
    """A run of one record, a site that was recorded once, another that is not recorded at the end."""
    (dead,) = verdict_on([table("activation/rms", {"a": [0.0], "b": [1.0]})]).findings
    assert (dead.site, dead.step, dead.words) == ("a", 0, "every element is zero in all of the run (1 record)")
    absent = -777.0
    gaps = {"often": FLAT, "once": [0.0, *[absent] * (STEPS - 1)], "late": [*[absent] * (STEPS - 1), 0.0]}
    assert [one.site for one in verdict_on([table("activation/rms", gaps, absent)]).findings] == ["late"]


def test_the_beginning_is_the_earliest_of_what_is_sick() -> None:
    """Where to look first; the headline counts sites, not findings."""
    verdict = verdict_on(
        [
            table("activation/rms", {"a": then(0.0, at=12), "b": FLAT}),
            table("gradient/norm", {"w": then(1e6, at=6), "v": FLAT, "u": FLAT}),
            table("update/ratio", {"w": then(0.1, 1e-3), "u": then(0.1, 1e-3)}),
        ]
    )
    assert verdict.beginning is not None
    assert (verdict.beginning.site, verdict.beginning.step) == ("w", 60)
    assert verdict.headline == "2 sites sick, 1 site to watch"
    assert [LEVELS[one.severity] for one in verdict.findings] == sorted(LEVELS[one.severity] for one in verdict.findings)


def test_arrays() -> None:
    """Quarters, medians of what is finite, growth: by hand."""
    values = np.array([[1.0, 1.0, 4.0, 4.0, 9.0, 9.0, 6.0, 10.0], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf]])
    np.testing.assert_array_equal(early(values), values[:, :2])
    np.testing.assert_array_equal(late(values), values[:, 6:])
    assert late(values[:, :1]).shape == (2, 1)
    np.testing.assert_array_equal(typical(np.array([[1.0, math.inf, 3.0], [math.nan] * 3])), [2.0, math.nan])
    np.testing.assert_array_equal(growth(values), [8.0, math.nan])


def test_what_was_said_in_training_stands_first() -> None:
    """An error is a sickness; those of one name stand together, and where a series shows it, it is that."""
    findings = [
        Finding(30, "nonfinite", "block.2", "", "It made the first value that is not finite.", "error"),
        Finding(10, "dead_units", "relu", "run1/activation/relu/dead_fraction", "0.9 of the units are dead."),
        Finding(20, "loss is large", "", "train_loss", "It is 7."),
        Finding(40, "dead_units", "relu2", "run1/activation/relu2/dead_fraction", "All are dead."),
    ]
    verdict = verdict_on([table("activation/rms", {"a": [0.0] * STEPS})], findings=findings)
    assert [(LEVELS[one.severity], one.name, one.kind, one.site, one.statistic, one.step) for one in verdict.findings] == [
        ("sick", "nonfinite", "", "block.2", "", 30),
        ("sick", "outputs that are zero", "activation", "a", "rms", 0),
        ("watch", "dead_units", "run1/activation", "relu", "dead_fraction", 10),
        ("watch", "dead_units", "run1/activation", "relu2", "dead_fraction", 40),
        ("watch", "loss is large", "", "", "train_loss", 20),
    ]
    assert verdict.findings[0].words == "It made the first value that is not finite."


@pytest.mark.parametrize("is_partly", [False, True])
def test_a_series_without_a_value_was_not_looked_at(is_partly: bool) -> None:
    """Where no value could be computed a check says so, and not that it found none; an infinite value is one."""
    nothing = [math.nan] * STEPS
    rows = {"a": nothing, "b": nothing, **({"c": FLAT} if is_partly else {})}
    names = ("activation/nonfinite_count", "activation/zero_fraction")
    verdict = verdict_on([table(name, {site: [0.0] * STEPS if row is FLAT else row for site, row in rows.items()}) for name in names])
    for name in ("values that are not finite", "outputs that are zero"):
        [check] = [one for one in verdict.checks if one.name == name]
        assert (check.num_series, check.num_empty) == (int(is_partly), 2)
        assert (check in verdict.passed, check in verdict.blind) == (is_partly, not is_partly)
        assert is_partly or check.obstacle == "no value could be computed: NaN in all of 2 series"
    infinite = verdict_on([table("activation/rms", {"a": [math.inf] * STEPS})])
    assert next(one.num_series for one in infinite.checks if one.name == "values that are not finite") == 1
    assert [one.name for one in infinite.findings] == ["values that are not finite"]
