"""Causes come before their symptoms: which of several findings a diagnosis names, and what follows from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import pytest
from helpers.documents import generated

from lightning_module_monitor.health.causes import CAUSES
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import MAX_DIAGNOSES, diagnose
from lightning_module_monitor.health.facts import Facts, GroupFacts, ParameterFacts
from lightning_module_monitor.health.finding_names import NONFINITE
from lightning_module_monitor.health.kept_columns import KeptColumns
from lightning_module_monitor.health.losses import Losses
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import RANK_DISAGREEMENT
from lightning_module_monitor.record import Finding


def finding(name: str, step: int, steps_before: int = 0, cause: str = "") -> Finding:
    """A finding of a detector; what follows it is for how many steps it was there before, and the cause that its evidence shows."""
    return Finding(step, name, "", "", "", steps_before=steps_before, cause=cause)


def add(history: History, step: int, values: Mapping[Key, float]) -> None:
    """Add a record with these values, and the NaN that a judge puts behind them."""
    history.add(step, np.array([*values.values(), math.nan]), KeptColumns(dict(enumerate(values)), history.facts))


RISEN = History()
RISEN.losses = Losses([0, 10], [1.0, 9.0])


def names(*findings: tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]) -> list[tuple[str, int, int]]:
    """Name, first step and number of consequences of every diagnosis."""
    return [(one.name, one.first_step, len(one.consequences)) for one in diagnose([finding(*one) for one in findings], RISEN)]


@pytest.mark.parametrize(("optimizer", "is_large"), [("Adam", True), ("AdamW", True), ("DAdaptAdam", False), ("SGD", False)])
def test_a_rate_of_1_is_large_for_adam_and_a_factor_for_optimizers_that_find_their_own(optimizer: str, is_large: bool) -> None:
    """Steps of 1 move weights by four times of their norm."""
    history = History()
    history.facts = Facts({"a.weight": ParameterFacts("trained", 0, 16)}, (GroupFacts(optimizer, 0.0, 0.0),))
    values = {Key("parameter", "a.weight", "norm"): 1.0, Key("gradient", "a.weight", "norm"): 0.5, Key("context", "", "lr"): 1.0}
    for step in range(6):
        add(history, step, values)
    assert history.has_large_steps == is_large


def test_nothing_is_wrong() -> None:
    """No finding, no diagnosis; a user's alert is none either."""
    assert diagnose([]) == []
    assert names(("loss is large", 3)) == []


def test_what_follows_is_counted_and_not_named() -> None:
    """Sizes explode, then units die, weights stand still, and a NaN comes."""
    assert names(("nonfinite", 90), ("dead_units", 80), ("exploding", 50), ("frozen_updates", 80)) == [("learning_rate", 50, 3)]
    assert names(("nonfinite", 90), ("dead_units", 80), ("diverging", 50)) == [("learning_rate", 50, 2)]


def test_what_was_there_before_is_a_cause_of_its_own() -> None:
    """A layer that no optimizer has does not make a loss diverge, nor does what diverges later kill units at the start."""
    assert names(("exploding", 50), ("growing_over_depth", 0)) == [("missing_normalization", 0, 1)]
    assert names(("diverging", 50), ("no_optimizer", 0)) == [("no_optimizer", 0, 0), ("learning_rate", 50, 0)]
    assert names(("diverging", 500), ("dead_units", 450, 450)) == [("learning_rate", 500, 0), ("dead_from_start", 0, 0)]


def test_a_rate_is_not_too_high_while_the_loss_has_not_risen() -> None:
    """Then the diagnosis is that sizes grow."""
    flat = History()
    flat.losses = Losses([0, 10, 20], [1.0, 0.98, 0.97])
    assert [one.name for one in diagnose([finding("growing_weights", 20)], flat)] == ["growth"]
    flat.losses.values[-1] = 1.5
    assert [one.name for one in diagnose([finding("growing_weights", 20)], flat)] == ["learning_rate"]


@pytest.mark.parametrize(
    ("step", "cause", "expected"),
    [(17, "", ["learning_rate"]), (17, "infinite_slope", ["infinite_slope"]), (7, "", ["learning_rate", "nonfinite"])],
)
def test_an_explosion_between_two_records_explains_an_infinity(step: int, cause: str, expected: list[str]) -> None:
    """A record shows what began after the record before it. A value with a cause of its own, and one before, has another."""
    found = [finding(NONFINITE, step, cause=cause), finding("exploding", 50)]
    assert [one.name for one in diagnose(found, RISEN)] == expected


def test_targets_that_are_too_large_come_before_the_rate() -> None:
    """A first loss of 4e10 with outputs of 0.1, of no cross-entropy."""
    house = History()
    house.losses, house.first = Losses([0, 10], [4e10, 5e10]), {"output": 0.1}
    [diagnosis] = diagnose([finding("growing_weights", 20)], house)
    assert (diagnosis.name, diagnosis.first_step) == ("unscaled_targets", 0)  # the first record shows it


@pytest.mark.parametrize(("first_step", "expected"), [(10, "unscaled_input"), (0, "zero_gradient")])
def test_units_that_an_input_of_thousands_kills(first_step: int, expected: str) -> None:
    """Zeros that begin in training are of units that died; a module that is zero before any update is not used."""
    history = History()
    history.first, history.losses.steps = {"input_abs_max": 1600.0}, [0, 10]
    [diagnosis] = diagnose([finding("zero_gradients", 100, 100 - first_step)], history)
    assert (diagnosis.name, diagnosis.first_step) == (expected, 0)


def test_what_the_first_record_shows_is_there_from_its_step_on() -> None:
    """Whenever its findings come, also in a run that does not begin at step 0; without records it is there from its finding on."""
    history = History()
    history.first, history.losses.steps = {"input_abs_max": 1.0, "output": 1e-9}, [50, 100]
    [diagnosis] = diagnose([Finding(100, "dead_units", "relu", "activation/relu/dead_fraction", "")], history)
    assert diagnosis.title == (
        "Outputs are next to nothing before any update: they shrink from layer to layer, from step 50 at the latest, first at relu"
    )
    history.losses.steps = []
    assert diagnose([finding("dead_units", 100)], history)[0].first_step == 100


def test_what_is_certain_comes_first() -> None:
    """Whatever began earlier."""
    found = [finding("diverging", 5), finding("in_eval", 20), finding("stale_gradients", 30)]
    assert [one.name for one in diagnose(found, RISEN)][:2] == ["stale_gradients", "in_eval"]


def test_units_were_zero_for_ten_records_before_they_count_as_dead() -> None:
    """So zeros of that time follow from it; earlier ones do not."""
    history = History()
    history.losses.steps = [*range(0, 2000, 50)]
    for step, expected in ((50, ["dead_units"]), (0, ["dead_units", "zero_gradient"])):
        found = [finding("dead_units", 950, 400), finding("zero_gradients", 500, 500 - step)]
        assert [one.name for one in diagnose(found, history)] == expected


@pytest.mark.parametrize(("gradient", "expected"), [({}, "no_gradient"), ({"w": 0.0}, "zero_gradient"), ({"w": 0.1}, "frozen")])
def test_what_gets_no_gradient_and_what_does_not_move(gradient: dict[str, float], expected: str) -> None:
    """Where gradients are not recorded, it is not known."""
    history = History()
    stands_still = Finding(30, "frozen_updates", "w", "", "")
    assert [one.name for one in diagnose([stands_still], history)] == ["frozen"]
    add(history, 0, {Key("gradient", site, "norm"): norm for site, norm in ({"other": 1.0} | gradient).items()})
    assert [one.name for one in diagnose([stands_still], history)] == [expected]


@pytest.mark.parametrize(
    ("gradient", "expected"), [({}, "no_gradient"), ({"extra.w": 0.0}, "zero_gradient"), ({"extra.w": 0.1}, "small_rate")]
)
def test_small_steps_are_no_reason_where_a_layer_gets_no_gradient(gradient: dict[str, float], expected: str) -> None:
    """As in the first steps of SGD, which can move no weight by much: a layer that is never called would not move with any rate."""
    history = History()
    history.facts = Facts(parameters={"w": ParameterFacts("trained", 0, 4)}, groups=(GroupFacts("SGD", 0.0, 0.0),))
    for step in range(4):
        norms = {Key("gradient", site, "norm"): norm for site, norm in ({"w": 0.1} | gradient).items()}
        add(history, step, norms | {Key("parameter", "w", "norm"): 1.0, Key("context", "", "lr"): 1e-4, Key("context", "", "loss"): 1.0})
    assert history.max_relative_change < 0.01
    assert diagnose([Finding(3, "frozen_updates", "extra.w", "", "")], history)[0].name == expected


def test_what_moves_again_is_not_frozen() -> None:
    """A head whose gradients are withheld in the first epoch, as for DINO: the finding stays, without a diagnosis."""
    history, stood_still = History(), Finding(30, "frozen_updates", "w", "", "")
    names = {}
    for step, norm in ((0, 1.0), (10, 1.0), (20, 1.5)):
        add(history, step, {Key("parameter", "w", "norm"): norm, Key("gradient", "w", "norm"): 1.0})
        names[step] = [one.name for one in diagnose([stood_still], history)]
    assert names == {0: ["frozen"], 10: ["frozen"], 20: []}


def test_losses_that_are_not_finite_are_no_losses_of_a_run_that_does_not_learn() -> None:
    """Four losses before a NaN are too few, however many follow."""
    history = History()
    sizes = {Key("update", "w.weight", "ratio"): 1e-6, Key("parameter", "w.weight", "norm"): 1.0, Key("gradient", "w.weight", "norm"): 1.0}
    history.facts = Facts(parameters={"w.weight": ParameterFacts("trained", 0, 4)}, groups=(GroupFacts("SGD", 0.0, 0.0),))
    for step, loss in enumerate([0.9, 1.4, 1.1, 1.3, *[math.nan] * 12]):
        add(history, step, sizes | {Key("context", "", "loss"): loss})
    assert history.learning == "too few"


def test_what_gradients_of_zeros_do_not_move_is_no_case_of_its_own() -> None:
    """One diagnosis has both findings."""
    history = History()
    add(history, 0, {Key("gradient", "w.weight", "norm"): 0.0, Key("gradient", "other", "norm"): 1.0})
    found = [Finding(90, name, "w.weight", "", "", steps_before=90) for name in ("zero_gradients", "frozen_updates")]
    [shown] = diagnose(found, history)
    assert (shown.name, shown.headline) == ("zero_gradient", "A part of the model gets gradients of nothing but zeros")


def test_the_first_record_of_a_condition_counts() -> None:
    """And not the one in which it had been met for long enough: units that died while training were alive before."""
    assert names(("dead_units", 450, 450)) == [("dead_from_start", 0, 0)]
    assert names(("dead_units", 500, 450)) == [("dead_units", 50, 0)]


@pytest.mark.parametrize("cause", ["data", "overflow", "learning_rate", "update", "masked_row"])
def test_a_finding_may_show_its_cause(cause: str) -> None:
    """Bad data, half precision, magnitudes that have grown, spoilt weights; else it is the module's own code."""
    assert names((NONFINITE, 7, 0, cause)) == [(cause, 7, 0)]
    assert names((NONFINITE, 7)) == [("nonfinite", 7, 0)]


def test_a_notebook_shows_a_table() -> None:
    """With what is wrong, where, and what to try; texts are escaped."""
    html = diagnose([Finding(5, "dead_units", "<relu>", "", "0.9 of the units")])._repr_html_()
    assert "1 diagnosis" in html
    assert "&lt;relu&gt;" in html
    assert "a lower learning rate" in html
    assert "0 diagnoses" in diagnose([])._repr_html_()


def test_there_are_at_most_three() -> None:
    """The surest."""
    many = [("diverging", 7), ("saturation", 2), ("no_optimizer", 0), ("dead_units", 450, 450)]
    assert [name for name, *_ in names(*many)] == ["no_optimizer", "learning_rate", "dead_from_start"]
    assert len(names(*many)) == MAX_DIAGNOSES


def test_every_finding_of_the_model_leads_to_a_diagnosis() -> None:
    """Each detector, alone; causes name detectors that there are."""
    known = {RANK_DISAGREEMENT, *DETECTORS}
    for name in known:
        assert len(names((name, 5))) == 1, name
    for cause in CAUSES:
        assert {*cause.evidence_for, *cause.explains} <= known
        assert len(cause.headline) <= 100, "the verdict's line in the log has at most 160"


def test_every_diagnosis_is_documented() -> None:
    """In the order in which they are tried, with the evidence for and against, and the advice."""
    rows = [row.split(" | ") for row in generated("diagnoses").splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| {cause.headline} (`{cause.name}`)" for cause in CAUSES]
    assert [tuple(re.findall(r"`([^`]+)`", row[1])) for row in rows] == [cause.evidence_for for cause in CAUSES]
    assert [row[3] for row in rows] == [f"{cause.advice} |" for cause in CAUSES]
