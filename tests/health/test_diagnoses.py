"""Causes come before their symptoms: which of several findings a diagnosis names, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import CAUSES, MAX_DIAGNOSES, NONFINITE, Symptom, diagnose
from lightning_module_monitor.record import RANK_DISAGREEMENT

PAGE = (Path(__file__).parents[2] / "docs" / "health.md").read_text()


def names(*symptoms: tuple[str, int] | tuple[str, int, str]) -> list[tuple[str, int, int]]:
    """Name, first step and number of consequences of every diagnosis."""
    found = diagnose(Symptom(name, step, "", words[0] if words else "") for name, step, *words in symptoms)
    return [(one.name, one.first_step, one.num_consequences) for one in found]


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
    dead = ("dead_units", 450, "in 10 records from step 0 to 450")
    assert names(("diverging", 500), dead) == [("dead_from_start", 0, 0), ("diverging", 500, 0)]


def test_the_first_record_of_a_condition_counts() -> None:
    """And not the one in which it had been met for long enough: units that died while training were alive before."""
    assert names(("dead_units", 450, "in 10 records from step 0 to 450")) == [("dead_from_start", 0, 0)]
    assert names(("dead_units", 500, "in 10 records from step 50 to 500")) == [("dead_units", 50, 0)]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("its output has NaN. The batch has NaN.", "data"),
        ("its output has infinity. what is above 65504 is infinite in float16.", "overflow"),
        ("Its input is finite (the largest magnitude is 3.2e+19), and its output has NaN.", "learning_rate"),
        ("Its input is finite (the largest magnitude is 1000001), and its output has NaN.", "learning_rate"),
        ("The largest magnitude of its weights is 0.4072.", "nonfinite"),
        ("Its weights are not finite (fc.weight has NaN), so that its output has NaN.", "update"),
        ("", "nonfinite"),
    ],
)
def test_the_words_of_a_nan_tell_its_cause(words: str, cause: str) -> None:
    """Bad data, half precision, magnitudes that have grown; else the module's own code."""
    for name in NONFINITE:
        assert names((name, 7, words)) == [(cause, 7, 0)]


def test_a_notebook_shows_a_table() -> None:
    """With what is wrong, where, and what to try; texts are escaped."""
    html = diagnose([Symptom("dead_units", 5, "<relu>", "0.9 of the units")])._repr_html_()
    assert "1 diagnosis" in html
    assert "&lt;relu&gt;" in html
    assert "a lower learning rate" in html
    assert "0 diagnoses" in diagnose([])._repr_html_()


def test_there_are_at_most_three() -> None:
    """Those that began first."""
    dead = ("dead_units", 450, "in 10 records from step 0 to 450")
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
        listed = ", ".join(dict.fromkeys(cause.explains)) or "-"
        assert f"| {cause.headline} (`{cause.name}`) | {', '.join(cause.shown_by)} | {listed} | {cause.advice} |" in PAGE
