"""The verdict: levels, headlines, and what is known of each check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from lightning_module_monitor.health.detector import NO_GRADIENT
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.facts import Facts, GroupFacts, ParameterFacts
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.judgement import Verdict, verdict_of
from lightning_module_monitor.health.loss_tests import rank_test
from lightning_module_monitor.health.losses import Losses
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import Finding, ModuleInfo
from lightning_module_monitor.report.stored_run import early, late, median_of_finite
from lightning_module_monitor.report.stored_verdict import verdict_on
from lightning_module_monitor.sinks.store.matrices import Table

STEPS = 16
FLAT = [1.0] * STEPS
FALLING = [*np.linspace(2.0, 0.5, STEPS)]


def table(name: str, rows: Mapping[str, Sequence[float]], absent: float = -777.0, spacing: int = 10) -> Table:
    """A table of a kind and statistic, with a record every so many steps; one number stands for nothing recorded."""
    values = np.array(list(rows.values()), dtype=np.float64)
    is_recorded = values != absent
    siteless = name.startswith(("monitor", "context"))
    key = Key.parse(name.replace("/", "/-/") if name.count("/") == 1 and not siteless else name)._replace(site="")
    return Table(key, tuple(rows), np.arange(values.shape[1]) * spacing, np.where(is_recorded, values, np.nan), is_recorded)


def loss(values: Sequence[float]) -> Table:
    """The training loss."""
    return table("context/loss", {"": values})


def healthy_tables(num: int = STEPS) -> list[Table]:
    """Sizes that stay."""
    moving = list(np.linspace(1.0, 1.1, num))
    return [
        table("activation/rms", {"fc": [0.5] * num}),
        table("gradient/norm", {"fc.weight": moving}),
        table("parameter/norm", {"fc.weight": moving}),
    ]


def status_of(verdict: Verdict, name: str) -> tuple[str, str]:
    """Status and reason of a check."""
    [check] = [check for check in verdict.checks if check.name == name]
    return check.status, check.reason


def test_gradients_of_whole_modules_alone_are_not_those_of_parameters() -> None:
    """What needs each gradient was not recorded; without any gradient it does not apply."""
    total = table("gradient/norm", {"_root_": [1.0] * STEPS})
    verdict = verdict_on(healthy_tables()[2:], [loss(FALLING), total], watched=("frozen_updates",))
    assert status_of(verdict, "frozen_updates") == ("not recorded", "add health: {watch: frozen_updates}")
    with_total = {check.name: (check.status, check.reason) for check in verdict.checks}
    verdict = verdict_on(healthy_tables()[2:], [loss(FALLING)], watched=("frozen_updates",))
    assert status_of(verdict, "frozen_updates") == ("does not apply", "no trained parameter has a gradient")
    others = {check.name for check in verdict.checks if DETECTORS.get(check.name) and DETECTORS[check.name].without != NO_GRADIENT}
    assert len(others) > 5
    assert {name: with_total[name] for name in others} == {name: status_of(verdict, name) for name in others}


def test_a_healthy_run_says_what_was_looked_at() -> None:
    """In words with figures, and no list of checks."""
    verdict = verdict_on(healthy_tables(), [loss(FALLING)])
    assert (verdict.level, verdict.findings) == ("healthy", [])
    assert (
        verdict.headline
        == "loss 2 to 0.7; 15 of 23 checks could judge, and found nothing in gradients, activations, weights of 2 sites at 16 records"
    )
    assert verdict.beginning is None


@pytest.mark.parametrize("num", [1, 5, 9])
def test_too_few_records_are_not_healthy(num: int) -> None:
    """A check below the records that it needs says so, and the run is unknown."""
    verdict = verdict_on(healthy_tables(num), [loss(FALLING[:num])])
    assert verdict.level == "unknown"
    assert verdict.headline.startswith(f"too few losses ({num} of 10), use a smaller every_n_steps; ")
    assert status_of(verdict, "zero_gradients") == ("too few records", f"{num} of 10")
    assert verdict_on([]).level == "unknown"


def test_a_check_with_too_few_records_is_not_green() -> None:
    """Seven records of units of which most are dead, beside enough losses."""
    dead = table("activation/dead_fraction", {"relu": [0.75] * 7})
    verdict = verdict_on([*healthy_tables(), dead], [loss(FALLING)])
    assert verdict.level == "unknown"
    assert verdict.headline.startswith("too few records for dead_units (7 of 10), use a smaller every_n_steps; ")
    assert status_of(verdict, "dead_units") == ("too few records", "7 of 10")


def learned(losses: Sequence[float], facts: Facts | None = None) -> str:
    """Level of a run with such losses."""
    return verdict_on(healthy_tables(len(losses)), [loss(losses)], facts=[] if facts is None else [(0, facts)]).level


def test_a_loss_that_does_not_fall_is_no_health() -> None:
    """By ranks: noise around one level is found, a slow fall in noise is not, and what is between is unknown."""
    noise = np.random.default_rng(0).normal(0, 0.02, 30)
    assert learned([*(2.3 + noise)]) == "watch"
    assert learned([*(2.3 + noise - np.linspace(0, 0.1, 30))]) == "healthy"
    assert learned([5, 4, 3, 2, 1, 4.5, 0.9, 0.8, 0.5, 0.4]) == "unknown"
    assert learned([2.8, *(0.8 + noise)]) == "healthy"  # it fell at once, and stayed
    assert learned([*FALLING[:-1], -0.1]) == "healthy"  # by its ranks alone
    assert learned([*(-2.3 + noise)]) == "unknown"
    assert learned([*(-2.3 + noise - np.linspace(0, 0.1, 30))]) == "healthy"
    assert learned([2.0, *(-1.0 + noise)]) == "healthy"
    assert learned([*FALLING[:-1], 0.0]) == "healthy"  # as a hinge loss is now and then
    assert learned([0.0] * 30) == "sick"  # nothing is left of it
    assert learned([*FALLING], Facts(is_manual=True)) == "unknown"


@pytest.mark.parametrize("num", [40, 60])
def test_a_loss_that_comes_down_from_a_peak_has_not_fallen(num: int) -> None:
    """Where it ends above its start, or is not finite in the end, whatever its ranks say; back at its start it has fallen."""
    flat, peak = table("activation/mean", {"fc": [0.5] * num}), [7.0, *np.geomspace(1e6, 60.0, num - 1)]
    verdict = verdict_on([flat], [loss(peak)])
    assert (verdict.level, verdict.findings) == ("unknown", [])
    reason = f"loss 7 to {np.median(verdict.history.losses.ends[1]):.3g}, which is above its start"
    assert verdict.headline.startswith(f"{reason}; ")
    assert status_of(verdict, "not_learning") == ("unclear", reason)
    assert verdict_on([flat], [loss([7.0, *np.geomspace(1e6, 1e-6, num - 1)])]).level == "healthy"
    assert learned([*np.linspace(7.0, 3.0, num), *[math.nan] * 5]) == "unknown"
    assert learned([*np.linspace(7.0, 3.0, num - 1), math.nan, 2.9]) == "healthy"


def test_a_loss_that_is_low_at_once() -> None:
    """Ranks of thirds do not show a fall between the first two records: it may be the lowest loss there is, or that of the mean alone."""
    noise = np.random.default_rng(0).normal(0, 0.02, 29)
    verdict = verdict_on(healthy_tables(30), [loss([2.93, *(2.58 + noise)])])
    assert (verdict.level, verdict.findings) == ("unknown", [])
    assert verdict.headline.startswith("loss 2.93 to 2.58 within the first records, without a clear fall since; ")
    assert status_of(verdict, "not_learning")[0] == "unclear"
    assert learned([4.2, *(2.58 + noise)]) == "unknown", "a third is not enough where all of it is in one record: it has stalled"
    assert learned([2.62, *(2.58 + noise)]) == "watch", "the first record is within the noise"
    # Guessing among ten classes, from a start above it, is not learning.
    assert learned([2.5, *(math.log(10) + noise)], Facts(is_classification=True, num_classes=10)) == "watch"
    # Noise in which a fall from the first record by a fifth cannot be seen.
    assert learned([4.0, *(5.0 + 30 * noise)]) == "unknown"


def test_what_does_not_fall_is_said_with_its_figures() -> None:
    """Medians may differ by less than their noise."""
    noise = np.random.default_rng(1).normal(0, 0.02, 30)
    [finding] = verdict_on(healthy_tables(30), [loss([*(2.3 + noise)])]).findings
    first, last = np.median(2.3 + noise[:10]), np.median(2.3 + noise[-10:])
    assert finding.words == (
        f"The loss does not fall by more than its noise: its median is {first:.4g} in the first 10 records and {last:.4g} in the last 10."
    )


@pytest.mark.parametrize("num", [12, 16, 30])
def test_a_loss_that_stalls_is_not_called_healthy(num: int) -> None:
    """It fell at the start, and then no more; a loss that goes on to fall and one near 0 are healthy."""
    noise = np.random.default_rng(0).normal(0, 1, num - 1)
    losses = 2.7 + 0.05 * noise
    verdict = verdict_on(healthy_tables(num), [loss([5.0, *losses])])
    begin = 10 * (num - 2 * (num // 3))
    last = np.median(losses[-(num // (2 if num < 15 else 3)) :])
    assert verdict.headline.startswith(f"loss 5 to {last:.3g}, without a clear fall since step {begin}; ")
    assert (verdict.level, verdict.findings) == ("unknown", [])
    assert status_of(verdict, "not_learning") == ("unclear", verdict.headline.partition(";")[0])
    assert learned([5.0, *np.linspace(3.7, 1.7, num - 1)]) == "healthy"
    assert learned([5.0, *(0.5 + 0.01 * noise)]) == "healthy"
    assert learned([5.0, *losses[:10]]) == "healthy", "11 records are too few to tell"


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_noise_does_not_diverge(spread: float) -> None:
    """Losses without a trend, as of batches of one, whose first ones may be low by luck; a rise beyond the noise does."""
    random = np.random.default_rng(0)
    for num in (12, 30, 200):
        noise = np.exp(spread * random.standard_normal(num))
        names = {one.name for one in verdict_on(healthy_tables(num), [loss([0.01, *noise[1:]])]).findings}
        assert "diverging" not in names
        risen = [*noise[:8], *(noise[8:] * max(noise[:5]) * np.exp(6 * spread))]
        found = verdict_on(healthy_tables(num), [loss(risen)]).findings
        assert "diverging" in {one.name for one in found}


def test_losses_that_are_not_finite_do_not_diverge() -> None:
    """They are a finding of their own, and no start either."""
    for losses in ([1.0, *[math.nan] * 4, *[9.0] * 9], [1.0] * 6 + [math.inf] * 8, [math.inf, *[1e30] * 13]):
        assert "diverging" not in {one.name for one in verdict_on(healthy_tables(14), [loss(losses)]).findings}


def test_a_fall_that_noise_may_hide_is_unknown() -> None:
    """The losses exclude at 5 % that they fell by 20 %, else it is not known that they do not fall."""
    noise = np.random.default_rng(0).normal(0, 1, 30)
    assert learned([*np.exp(0.05 * noise)]) == "watch"
    assert learned([*np.exp(1.0 * noise)]) == "unknown"


def test_a_cross_entropy_below_chance_may_stay_there() -> None:
    """As that of trained weights does; other losses have no such level."""
    flat = [*(0.2 + np.random.default_rng(0).normal(0, 0.005, 30))]
    verdict = verdict_on(healthy_tables(30), [loss(flat)], facts=[(0, Facts(is_classification=True))])
    assert verdict.sentence.startswith("unknown: the loss hardly changes, as that of trained weights may; ")
    assert learned(flat) == "watch"
    assert learned([one + 2 for one in flat], Facts(is_classification=True)) == "watch"


@pytest.mark.parametrize("num_classes", [0, 10, 12])
def test_a_cross_entropy_that_comes_down_to_chance_has_learned_nothing(num_classes: int) -> None:
    """A new network may begin above the logarithm of the number of classes: log 10 is 2.30, and log 12 is 2.48."""
    losses = [*np.linspace(2.9, 2.2, 30)]
    verdict = verdict_on(healthy_tables(30), [loss(losses)], facts=[(0, Facts(is_classification=True, num_classes=num_classes))])
    if num_classes == 10:
        reason = "loss 2.9 to 2.31, which is no better than guessing among 10 classes"
        assert verdict.sentence.startswith(f"unknown: {reason}; ")
        assert status_of(verdict, "not_learning") == ("unclear", reason)
    else:
        assert verdict.level == "healthy"


def test_a_check_that_waits_while_the_loss_falls_says_so() -> None:
    """It found nothing because it did not look."""
    verdict = verdict_on([*healthy_tables(), table("activation/dead_fraction", {"relu": [0.6] * STEPS})], [loss([2.0, *[0.5] * 15])])
    assert status_of(verdict, "dead_units") == ("skipped: the loss has fallen", "")
    assert status_of(verdict, "frozen_updates") == ("not found", "")


def test_a_loss_that_is_not_judged_has_its_reason() -> None:
    """Which is not that there is none; a loss below 0 has no factor by which it grows."""
    verdict = verdict_on(healthy_tables(), [loss(FALLING)], facts=[(0, Facts(is_manual=True))])
    reason = "a loss is not judged under manual optimization"
    assert status_of(verdict, "diverging") == status_of(verdict, "not_learning") == ("does not apply", reason)
    verdict = verdict_on(healthy_tables(), [loss([*FALLING[:-1], -0.1])])
    assert status_of(verdict, "diverging") == ("does not apply", "a loss below 0 has no factor by which it grows")
    assert status_of(verdict, "not_learning") == ("not found", "")


def test_the_rank_test_is_that_of_the_textbook() -> None:
    """U and its deviation by a count of pairs."""
    random = np.random.default_rng(1)
    for _ in range(20):
        one, other = random.integers(0, 9, 7).tolist(), random.integers(0, 9, 5).tolist()
        pairs = sum((a > b) + 0.5 * (a == b) for a in one for b in other)
        assert rank_test(one, other) == pytest.approx((pairs - 17.5) / math.sqrt(35 * 13 / 12))


def parameter_facts(**options: float) -> Facts:
    """One weight of 100 elements in one group."""
    return Facts({"fc.weight": ParameterFacts("trained", 0, 100)}, (GroupFacts("Adam", 0.0, 0.0, **options),))  # type: ignore[arg-type]


@pytest.mark.parametrize("losses", [[2.31] * STEPS, [*np.linspace(2.31, 2.30, STEPS)], [-1.0] * STEPS])
def test_rates_of_next_to_nothing_are_found_by_themselves(losses: list[float]) -> None:
    """Whether or not the loss creeps, and whatever its sign; not where it falls."""
    rates = table("context/lr", {"": [*np.linspace(1e-9, 1e-7, STEPS)]})
    found = verdict_on(healthy_tables(), [loss(losses), rates], facts=[(0, parameter_facts())])
    assert [one.name for one in found.diagnoses] == ["small_rate"]
    assert "its warm-up is longer than the run" in str(found.diagnoses[0])
    falling = verdict_on(healthy_tables(), [loss(FALLING), rates], facts=[(0, parameter_facts())])
    assert falling.diagnoses == []


@pytest.mark.parametrize(("rate", "name"), [(1e-6, "small_rate"), (1e-2, "not_learning"), (0.0, "zero_rate")])
def test_why_the_loss_does_not_fall(rate: float, name: str) -> None:
    """Rates that move no weight, a rate of 0, or neither."""
    figures = [loss([2.3, 2.31] * 8), table("context/lr", {"": [rate] * STEPS})]
    verdict = verdict_on(healthy_tables(), figures, facts=[(0, parameter_facts())])
    assert [one.name for one in verdict.diagnoses] == [name]
    assert verdict.level == ("sick" if name == "zero_rate" else "watch")


@pytest.mark.parametrize(("spacing", "level"), [(5, "unknown"), (10, "watch")])
@pytest.mark.parametrize("losses", [[2.31] * STEPS, [2.3, 2.31] * (STEPS // 2)])
def test_a_few_small_steps_need_not_show_in_the_loss(losses: list[float], spacing: int, level: str) -> None:
    """Below 100 steps, as of a warm-up; larger steps show."""
    sizes = [table(f"{kind}/norm", {"fc.weight": [1.0, 1.01] * (STEPS // 2)}, spacing=spacing) for kind in ("gradient", "parameter")]
    for rate, expected in ((1e-6, level), (1e-2, "watch")):
        figures = [table(f"context/{name}", {"": one}, spacing=spacing) for name, one in (("loss", losses), ("lr", [rate] * STEPS))]
        verdict = verdict_on(sizes, figures, facts=[(0, parameter_facts())])
        assert verdict.level == expected
        if expected == "unknown":
            assert verdict.headline.startswith("75 steps, too few or too small to show in the loss; ")


@pytest.mark.parametrize(("eps", "name"), [(1e-8, "not_learning"), (1.0, "not_learning"), (1e3, "small_rate")])
def test_a_large_eps_makes_adam_s_steps_small(eps: float, name: str) -> None:
    """The elements of a gradient of norm 1 have a size of 0.1: an eps of 1 divides the steps by 11, and one of 1000 by 10,001."""
    figures = [loss([2.3, 2.31] * 8), table("context/lr", {"": [0.01] * STEPS})]
    verdict = verdict_on(healthy_tables(), figures, facts=[(0, parameter_facts(eps=eps))])
    assert [one.name for one in verdict.diagnoses] == [name]
    assert ("eps, which is 1e+03" in str(verdict.diagnoses[0])) == (name == "small_rate")
    # 151 steps of 0.01 * 10 / (1 + 10 eps), the weight's norm is 1 to 1.1.
    assert verdict.history.max_relative_change == pytest.approx(15.1 / (1 + 10 * eps), rel=0.1)


def test_a_rate_of_zero_by_schedule_is_no_fault() -> None:
    """A weight stands still while its rate is 0, and not otherwise; what moves again later was no fault either."""
    moves = [*np.linspace(1, 2, 8)]
    tables = {
        name: [table("gradient/norm", {"fc.weight": [0.5] * STEPS}), table("parameter/norm", {"fc.weight": norms})]
        for name, norms in (("first", [1.0] * 8 + moves), ("later", [*moves, *[2.0] * 8]))
    }
    facts = [(0, parameter_facts())]
    rates = {"first": table("context/lr", {"": [0.0] * 8 + [0.1] * 8}), "later": table("context/lr", {"": [0.1] * 8 + [0.0] * 8})}
    for name, of_weight in tables.items():
        assert verdict_on(of_weight, [loss(FALLING), rates[name]], facts=facts).findings == []
    constant = table("context/lr", {"": [0.1] * STEPS})
    assert verdict_on(tables["first"], [loss(FALLING), constant], facts=facts).findings == []
    assert [one.name for one in verdict_on(tables["later"], [loss(FALLING), constant], facts=facts).findings] == ["frozen_updates"]


def test_a_weight_that_is_clamped_is_not_judged() -> None:
    """Under manual optimization, while others of its group move; all of a group that stand still are."""
    facts = Facts(
        {name: ParameterFacts("trained", 0, 4) for name in ("a.weight", "b.weight")}, (GroupFacts("RMSprop", 0, 0),), is_manual=True
    )
    gradients = table("gradient/norm", {"a.weight": [0.5] * STEPS, "b.weight": [0.5] * STEPS})
    for other, names in ((list(np.linspace(1, 2, STEPS)), []), ([3.0] * STEPS, ["frozen_updates"])):
        norms = table("parameter/norm", {"a.weight": [0.02] * STEPS, "b.weight": other})
        assert [one.name for one in verdict_on([gradients, norms], facts=[(0, facts)]).findings] == names


def test_a_loss_that_crosses_zero_does_not_diverge() -> None:
    """It has no factor by which it grows; one that stays above 0 does."""
    rising = [0.2 * 1.5**step for step in range(STEPS)]
    for first, names in ((-0.1, set()), (0.1, {"diverging"})):
        found = {one.name for one in verdict_on(healthy_tables(), [loss([first, *rising[1:]])]).findings}
        assert found & {"diverging"} == names


def test_a_rate_that_a_schedule_has_brought_to_nothing() -> None:
    """Weights that stop moving are explained by it, and not by code that cuts the graph."""
    still = [*np.linspace(1, 2, 4), *[2.0] * 12]
    tables = [table("gradient/norm", {"fc.weight": [0.5] * STEPS}), table("parameter/norm", {"fc.weight": still})]
    for last, name in ((1e-12, "decayed_rate"), (1e-3, "frozen")):
        rates = table("context/lr", {"": [1e-2] * 4 + [last] * 12})
        assert [one.name for one in verdict_on(tables, [loss(FALLING), rates], facts=[(0, parameter_facts())]).diagnoses] == [name]


@pytest.mark.parametrize(("low", "last", "level"), [(1e-7, 3.0, "watch"), (1e-3, 3.0, "unknown"), (1e-7, 1.0, "healthy")])
def test_a_loss_that_stalls_where_a_schedule_ends_has_a_cause(low: float, last: float, level: str) -> None:
    """If the steps since then can move no weight by 2 %: 200 of 1e-6 cannot, those of 0.01 can. A loss below a third has converged."""
    losses = [5.0, *np.linspace(4.5, last + 0.1, 9), *(last + 0.01 * np.random.default_rng(0).normal(0, 1, 20))]
    rates = table("context/lr", {"": [1e-2] * 10 + [low] * 20})
    verdict = verdict_on(healthy_tables(30), [loss(losses), rates], facts=[(0, parameter_facts())])
    assert verdict.level == level
    assert [(one.name, one.first_step) for one in verdict.diagnoses] == ([("decayed_rate", 100)] if level == "watch" else [])
    assert level != "watch" or "The largest learning rate was 0.01, and 1e-07 at the end." in verdict.diagnoses[0].evidence


@pytest.mark.parametrize("last", [0.5, 1.9])
def test_dead_units_of_a_network_that_learns_are_no_fault(last: float) -> None:
    """About half of the ReLU units are zero for every input of one dimension."""
    verdict = verdict_on([*healthy_tables(), table("activation/dead_fraction", {"relu": [0.6] * STEPS})], [loss([2.0, *[last] * 15])])
    assert ("dead_units" in {one.name for one in verdict.findings}) == (last == 1.9)


def test_a_nan_stands_in_the_headline_whatever_explains_it() -> None:
    """With its place and cause, also if another diagnosis is surer."""
    nan = Finding(16, "nonfinite", "model.half_block", "", "Infinity in model.half_block, in the forward pass.", "error", cause="overflow")
    verdict = verdict_on(healthy_tables(), [loss(FALLING)], [nan], ["nonfinite"], [(0, Facts(softmax_twice=True))])
    assert [one.name for one in verdict.diagnoses] == ["softmax_twice", "overflow"]
    assert verdict.headline == "Infinity in model.half_block at step 16: values overflow float16"


def test_a_late_nan_keeps_its_cause() -> None:
    """Also if much else has grown before it."""
    names = ("growing_weights", "exploding", "growing_over_depth")
    grown = [Finding(10, name, "fc", "", f"{name} began.") for name in names]
    nan = Finding(17, "nonfinite", "_root_", "", "Infinity in training_step, forward.", "error", cause="learning_rate")
    risen = Judge([])
    risen.history.losses = Losses([0, 10], [1.0, 9.0])
    verdict = verdict_of(risen, (), [*grown, nan], watched=["nonfinite"], types=())
    assert verdict.headline == "Infinity in training_step at step 17: the learning rate is too high"


def test_what_is_not_finite_is_judged_where_training_did_not() -> None:
    """Of one step: parameters before activations, forward in the model's order, backward against it; skipped steps do not count."""
    bad = [1.0] * 5 + [math.nan] * 11
    tables = [
        table("gradient/norm", {"a.weight": bad}),
        table("activation/nonfinite_count", {"a": [0.0] * STEPS, "b": [0.0] * 5 + [3.0] * 11}),
    ]
    [found] = [one for one in verdict_on(tables).findings if one.name == "nonfinite"]
    assert (found.site, found.step, found.severity) == ("b", 50, "error")
    assert not [one for one in verdict_on(tables, watched=["nonfinite"]).findings if one.name == "nonfinite"]
    skipped = table("monitor/step_skipped", {"": [0.0] * 5 + [1.0] * 11})
    assert verdict_on(tables, [skipped]).findings == []


def test_what_a_run_has_recorded_is_not_advised_again() -> None:
    """A check that a run recorded for has its reason instead, and another option stays advice."""
    gradients = table("gradient/norm", {"lora.bias": [0.5] * STEPS})
    watched = ["vanishing", "zero_gradients", "large_logits"]
    verdict = verdict_on([gradients], [loss(FALLING)], watched=watched)
    for name in ("vanishing", "zero_gradients"):
        assert status_of(verdict, name) == ("does not apply", "no trained parameter, other than biases, has a gradient")
    assert status_of(verdict, "large_logits") == ("does not apply", "no attention ran")
    assert status_of(verdict, "growing_over_depth") == ("not recorded", "add health: {watch: growing_over_depth}")


def test_without_a_learning_rate_weights_are_not_judged_by_their_movement() -> None:
    """With this reason, and not that there are no values."""
    rates = table("context/lr", {"": [0.0] * STEPS})
    verdict = verdict_on(healthy_tables(), [loss(FLAT), rates], facts=[(0, parameter_facts())], watched=["frozen_updates"])
    assert status_of(verdict, "frozen_updates") == ("does not apply", "all learning rates are 0")
    assert "interval: step" in verdict.diagnoses[0].advice


def test_checks_that_do_not_judge_say_why() -> None:
    """What does not apply has its reason, what is not recorded the option that adds it."""
    modules = [ModuleInfo("fc", "Linear", 4)]
    verdict = verdict_on(healthy_tables(), [loss(FALLING)], modules=modules)
    assert status_of(verdict, "saturation") == ("does not apply", "no Sigmoid, Tanh or Softmax module")
    reason = "batches have no tensor of two or more samples, or also objects of other classes, such as NumPy arrays"
    assert status_of(verdict, "constant_input") == ("does not apply", reason)
    assert status_of(verdict, "large_logits") == ("not recorded", "add health: {watch: large_logits}")
    assert verdict.level == "healthy"


@pytest.mark.parametrize(
    ("name", "series", "check"),
    [
        ("gradient/norm", [0.0] * STEPS, "zero_gradients"),
        ("activation/rms", [1.0] * 8 + [1e5] * 8, "growing_over_depth"),
        ("activation/dead_fraction", [0.6] * STEPS, "dead_units"),
        ("attention_max_logit/max", [2e4] * STEPS, "large_logits"),
    ],
)
def test_a_site_is_found_and_its_neighbours_are_not(name: str, series: list[float], check: str) -> None:
    """Healthy series beside it are not named; the first values of what begins at zero are no fault."""
    rows = {"good.weight": [0.4] * STEPS, "bad.weight": series, "fine.weight": [0.4] * STEPS}
    verdict = verdict_on([table(name, rows)])
    assert [(one.name, one.site) for one in verdict.findings] == [(check, "bad.weight")]
    [found] = [one for one in verdict.checks if one.name == check]
    assert [Key.parse(one.key).site for one in found.fired] == ["bad.weight"]


@pytest.mark.parametrize("is_partly", [False, True])
def test_a_check_without_a_value_could_not_judge(is_partly: bool) -> None:
    """Where every value is NaN a check says so, and the run is not called healthy; a site with values is judged beside one without."""
    nothing = [math.nan] * STEPS
    rows = {"a": nothing, "b": nothing, **({"c": [0.1] * STEPS} if is_partly else {})}
    verdict = verdict_on([table("activation/rms", rows), *healthy_tables()[1:]], [loss(FALLING)], watched=["nonfinite"])
    expected = ("skipped: the loss has fallen", "") if is_partly else ("not computed", "no value could be computed: NaN in all of 2 series")
    assert status_of(verdict, "growing_over_depth") == expected
    assert next(check.num_series for check in verdict.checks if check.name == "growing_over_depth") == int(is_partly)
    assert verdict.level == ("healthy" if is_partly else "unknown")
    assert is_partly or verdict.headline.startswith("no value could be computed for ")


def test_what_was_found_in_training_stands_beside() -> None:
    """Alerts of the user are shown; a detector's findings are judged again, and stand once."""
    findings = [Finding(20, "loss is large", "", "train_loss", "It is 7."), Finding(40, "zero_gradients", "a.weight", "", "before")]
    verdict = verdict_on([table("gradient/norm", {"a.weight": [0.0] * STEPS, "b.weight": FLAT})], findings=findings)
    assert [(one.name, one.site, one.step) for one in verdict.findings] == [("loss is large", "", 20), ("zero_gradients", "a.weight", 90)]


def test_a_finding_of_an_earlier_version_stands_as_it_was_found() -> None:
    """Its detector is gone, and no cause explains it; the file was written before."""
    kept = Finding(40, "zero_outputs", "a", "activation/a/rms", "a: 100% of the output is zero.")
    verdict = verdict_on(healthy_tables(), [loss(FALLING)], findings=[kept])
    assert (verdict.level, verdict.findings, verdict.diagnoses) == ("watch", [kept], [])
    assert verdict.headline == "a: 100% of the output is zero"


def test_arrays() -> None:
    """Quarters and medians of what is finite: by hand."""
    values = np.array([[1.0, 1.0, 4.0, 4.0, 9.0, 9.0, 6.0, 10.0], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf]])
    np.testing.assert_array_equal(early(values), values[:, :2])
    np.testing.assert_array_equal(late(values), values[:, 6:])
    assert late(values[:, :1]).shape == (2, 1)
    np.testing.assert_array_equal(median_of_finite(np.array([[1.0, math.inf, 3.0], [math.nan] * 3])), [2.0, math.nan])


def test_what_is_not_to_be_searched_is_not_judged() -> None:
    """A run with ``nonfinite: ignore`` has no finding of NaN in its store either; records of another origin have."""
    bad = [table("activation/rms", {"fc": [1.0] * 5 + [math.nan] * 11})]
    assert [one.name for one in verdict_on(bad, watched=["exploding"]).findings] == []
    assert [one.name for one in verdict_on(bad).findings] == ["nonfinite"]


@pytest.mark.parametrize(
    ("labels", "is_sorted"),
    [
        ([0] * 6 + [1] * 6 + [2] * 6, True),
        ([0] * 5 + [None] + [1] * 5 + [None] + [2] * 5, True),
        ([0, 1] * 10, True),
        ([0] * 20, False),  # one class alone may be all that there is
        ([0] * 20 + [None] * 10, False),  # as 95 of 100 give
        ([0] * 20 + [1], True),  # eight of a class of 5 % would be one in 10 ** 10
        ([0, 1] + [None] * 28, False),  # as two classes give now and then: 1 of 128 batches of eight
        ([None] * 30, False),
    ],
)
def test_batches_of_one_class(labels: list[int | None], is_sorted: bool) -> None:
    """More of them than a random order gives with the frequencies of classes for which they are most likely."""
    least = [0.0 if label is None else float(label) for label in labels]
    largest = [1.0 if label is None else float(label) for label in labels]
    figures = [
        loss([*np.linspace(2.0, 1.0, len(labels))]),
        table("context/target_min", {"": least}),
        table("context/target_max", {"": largest}),
    ]
    verdict = verdict_on(healthy_tables(len(labels)), figures)
    assert [one.name for one in verdict.findings] == (["constant_target"] if is_sorted else [])
    assert verdict.level == ("sick" if is_sorted else "unknown" if labels == [0] * 20 else "healthy")


def test_a_part_of_the_loss_that_does_not_fall() -> None:
    """What is logged as a loss: the sum falls, one part does not; a metric of an epoch, which stands still, does not count."""
    noise = np.random.default_rng(0).normal(0, 0.02, STEPS)
    parts = {"still_loss": 2.3 + noise, "other_loss": np.linspace(2.0, 0.5, STEPS), "loss_epoch": np.full(STEPS, 1.0)}
    figures = [loss(FALLING), *(table(f"context/{name}", {"": [*values]}) for name, values in parts.items())]
    verdict = verdict_on(healthy_tables(), figures)
    assert verdict.sentence.startswith("unknown: the loss falls, and still_loss, which is logged, does not; ")
    del figures[1]
    assert verdict_on(healthy_tables(), figures).level == "healthy"


@pytest.mark.parametrize(
    ("losses", "facts", "name"),
    [
        ([-(4.0**number) for number in range(STEPS)], Facts(), "unbounded_loss"),
        ([-3.0 - 0.1 * number for number in range(STEPS)], Facts(), ""),
        ([30.0, *FALLING[1:]], Facts(is_classification=True, num_classes=10), "large_start"),
        ([8.0, *FALLING[1:]], Facts(is_classification=True, num_classes=10), ""),
    ],
)
def test_losses_that_are_no_losses_of_learning(losses: list[float], facts: Facts, name: str) -> None:
    """One without a lower bound, and one that begins far above guessing."""
    assert [one.name for one in verdict_on(healthy_tables(), [loss(losses)], facts=[(0, facts)]).findings] == ([name] if name else [])
