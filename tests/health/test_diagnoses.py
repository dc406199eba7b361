"""Causes come before their symptoms: which of several findings a diagnosis names, and what follows from it."""

from __future__ import annotations

import re

import pytest
from helpers.documents import generated

from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import CAUSES, MAX_DIAGNOSES, NONFINITE, diagnose
from lightning_module_monitor.record import RANK_DISAGREEMENT, Finding


def finding(name: str, step: int, steps_before: int = 0, cause: str = "") -> Finding:
    """A finding of a detector; what follows it is for how many steps it was there before, and the cause that its evidence shows."""
    return Finding(step, name, "", "", "", steps_before=steps_before, cause=cause)


def names(*findings: tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]) -> list[tuple[str, int, int]]:
    """Name, first step and number of consequences of every diagnosis."""
    return [(one.name, one.first_step, one.num_consequences) for one in diagnose(finding(*one) for one in findings)]


def test_nothing_is_wrong() -> None:
    """No finding, no diagnosis; a user's alert is none either."""
    assert diagnose([]) == []
    assert names(("loss is large", 3)) == []


def test_what_follows_is_counted_and_not_named() -> None:
    """Sizes explode, then units die, weights stand still, and a NaN comes."""
    assert names(("nonfinite", 90), ("dead_units", 80), ("exploding", 50), ("frozen_updates", 80)) == [("learning_rate", 50, 3)]
    assert names(("nonfinite", 90), ("dead_units", 80), ("diverging", 50)) == [("diverging", 50, 2)]


def test_what_was_there_before_is_a_cause_of_its_own() -> None:
    """A layer that no optimizer has does not make a loss diverge, nor does what diverges later kill units at the start."""
    assert names(("exploding", 50), ("growing_over_depth", 0)) == [("missing_normalization", 0, 1)]
    assert names(("exploding", 50), ("growing_over_depth", 50)) == [("learning_rate", 50, 0)]
    assert names(("diverging", 50), ("no_optimizer", 0)) == [("no_optimizer", 0, 0), ("diverging", 50, 0)]
    dead = ("dead_units", 450, 450)
    assert names(("diverging", 500), dead) == [("dead_from_start", 0, 0), ("diverging", 500, 0)]


def test_the_first_record_of_a_condition_counts() -> None:
    """And not the one in which it had been met for long enough: units that died while training were alive before."""
    assert names(("dead_units", 450, 450)) == [("dead_from_start", 0, 0)]
    assert names(("dead_units", 500, 450)) == [("dead_units", 50, 0)]


@pytest.mark.parametrize("cause", ["data", "overflow", "learning_rate", "update"])
def test_a_finding_may_show_its_cause(cause: str) -> None:
    """Bad data, half precision, magnitudes that have grown, spoilt weights; else it is the module's own code."""
    for name in NONFINITE:
        assert names((name, 7, 0, cause)) == [(cause, 7, 0)]
        assert names((name, 7)) == [("nonfinite", 7, 0)]


def test_a_notebook_shows_a_table() -> None:
    """With what is wrong, where, and what to try; texts are escaped."""
    html = diagnose([Finding(5, "dead_units", "<relu>", "", "0.9 of the units")])._repr_html_()
    assert "1 diagnosis" in html
    assert "&lt;relu&gt;" in html
    assert "a lower learning rate" in html
    assert "0 diagnoses" in diagnose([])._repr_html_()


def test_there_are_at_most_three() -> None:
    """Those that began first."""
    dead = ("dead_units", 450, 450)
    many = [("diverging", 7), ("saturation", 2), ("no_optimizer", 0), dead]
    assert [name for name, *_ in names(*many)] == ["no_optimizer", "dead_from_start", "saturation"]
    assert len(names(*many)) == MAX_DIAGNOSES


def test_every_finding_of_the_model_leads_to_a_diagnosis() -> None:
    """Each detector but those of one batch and of the monitor's own errors, alone; causes name detectors that there are."""
    for name in (*NONFINITE, RANK_DISAGREEMENT, *DETECTORS):
        assert len(names((name, 5))) == (name not in ("what could not be measured", "spikes of the gradient")), name
    known = {*NONFINITE, RANK_DISAGREEMENT, *DETECTORS}
    for cause in CAUSES:
        assert {*cause.shown_by, *cause.explains} <= known


def test_every_diagnosis_is_documented() -> None:
    """In the order of causality, with the findings that show it and the advice."""
    rows = [row.split(" | ") for row in generated("diagnoses").splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| {cause.headline} (`{cause.name}`)" for cause in CAUSES]
    assert [re.findall(r"`([^`]+)`", row[1]) for row in rows] == [[*cause.shown_by] for cause in CAUSES]
    assert [row[2] for row in rows] == [f"{cause.advice} |" for cause in CAUSES]
