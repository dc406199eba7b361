"""Totals, the values of ``per_module``: which alerts and detectors judge them, and which judge single parameters only."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny import fit

from lightning_module_monitor import Alert, ModuleMonitorCallback, Rule
from lightning_module_monitor.config.rules import parse_patterns
from lightning_module_monitor.health.alerts import naming
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.facts import Facts, ParameterFacts
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import Record

TOTAL = "gradient/_root_/norm"
FACTS = Facts({"fc.weight": ParameterFacts("trained", 0, 4), "head.weight": ParameterFacts("trained", 0, 4)})


def judged(name: str, series: dict[str, list[float]], facts: Facts = FACTS) -> list[Any]:
    """The alarms of a detector in records of steps 0, 1, ..., from values by key; a NaN is absent from its record."""
    judge = Judge([DETECTORS[name].alert()], ["fc", "fc.weight", "head.weight"], ["_root_", "fc", "head"])
    alarms = []
    for step in range(len(next(iter(series.values())))):
        values = {key: values[step] for key, values in series.items() if not np.isnan(values[step])}
        alarms += judge.observe(Record.of(step, {**values, "context/loss": 1.0}), facts)
    return alarms


@pytest.mark.parametrize(
    ("pattern", "site", "is_named"),
    [
        ("gradient/.*/norm", "_root_", False),
        (".*", "_root_", False),
        ("gradient/[^/]+/norm", "blocks.3", False),
        (r"gradient/\w+/norm", "_root_", False),
        ("gradient/_root_/norm", "_root_", True),
        (".*/_root_/.*", "_root_", True),
        (r"gradient/(_root_|.*weight)/norm", "_root_", True),
        (r"gradient/blocks\.\d+/norm", "blocks.3", True),
        (r"gradient/blocks\.3/norm", "blocks.3", True),
        (r"gradient/blocks\..*/norm", "blocks.3", False),
        ("gradient/.*/norm", "norm", False),
        ("update/_root_/norm", "_root_", False),
    ],
)
def test_an_alert_takes_a_total_that_its_pattern_names(pattern: str, site: str, is_named: bool) -> None:
    """A pattern that also matches parameters leaves totals out; a pattern that names the module of a total takes it."""
    key = Key("gradient", site, "norm")
    assert naming(parse_patterns(pattern, "keys"))(key, key.format()) is is_named


def test_alerts_of_a_run(tmp_path: Path) -> None:
    """Each alert of a run fires for its own keys alone: of single parameters, of the whole model, of its layers."""
    rules = [Rule(kinds="gradient", statistics="norm"), Rule(kinds="gradient", statistics="norm", per_module=["_root_", r"model\.\d"])]
    alerts = [
        Alert(keys="gradient/.*/norm", above=0.0, name="each"),
        Alert(keys=TOTAL, above=0.0, name="whole"),
        Alert(keys=r"gradient/model\.\d/norm", above=0.0, name="layer"),
    ]
    callback = ModuleMonitorCallback(1, rules=rules, alerts=alerts, health=False)
    fit(tmp_path, [callback], max_steps=1)
    words = {finding.name: finding.words for finding in callback.findings}
    sites = {name: set(re.findall(r"gradient/([\w.]+)/norm", text)) for name, text in words.items()}
    assert sites["each"] == {"model.0.weight", "model.0.bias", "model.2.weight"}  # the words name three of the four
    assert "and 1 more" in words["each"]
    assert sites["whole"] == {"_root_"}
    assert sites["layer"] == {"model.0", "model.2"}


def test_the_total_decides_on_an_explosion_and_the_parameter_that_grew_most_is_named() -> None:
    """If both are recorded, the total counts: a rule may have picked parameters with small gradients."""
    series = {TOTAL: [1.0] * 12 + [500.0], "gradient/fc.weight/norm": [1e-3] * 12 + [2e-3], "gradient/head.weight/norm": [1e-4] * 13}
    [alarm] = judged("exploding", series)
    assert alarm.finding.key == "gradient/fc.weight/norm"
    assert alarm.finding.words.startswith("Total gradient norm: 500 times its start, most of it in fc.weight")
    assert judged("exploding", {**series, TOTAL: [1.0] * 13}) == []


def test_frozen_weights_do_not_hide_that_trained_ones_grow() -> None:
    """The norm of all parameters counts if all are trained; otherwise the norms of the trained parameters are joined."""
    series = {
        "parameter/_root_/norm": [100.0, 100.18, 100.18, 100.18],
        "parameter/fc.weight/norm": [1.0, 6.0, 6.0, 6.0],
        "parameter/head.weight/norm": [100.0] * 4,
    }
    frozen = Facts({**FACTS.parameters, "head.weight": ParameterFacts("frozen", -1, 4)})
    assert judged("growing_weights", series) == []
    [alarm] = judged("growing_weights", series, frozen)
    assert alarm.finding.site == "fc.weight"


JUDGE_TOTALS = ("exploding", "growing_weights", "shrinking_weights")
"""The detectors of the norm of all gradients, or of all parameters."""

CASES = [
    (name, f"{kind}/{site}/{statistic}")
    for name, detector in DETECTORS.items()
    if name not in JUDGE_TOTALS and detector.rule is not None
    for kinds, statistics in detector.sources
    for kind, statistic, site in itertools.product(kinds, statistics, ("_root_", "fc"))
    if kind in ("gradient", "parameter", "update", "gradient_before_clip")
]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_no_other_detector_judges_totals(name: str, key: str) -> None:
    """Whatever their values are: zero, infinite, unchanged, above and below every limit."""
    for value in (0.0, np.inf, 1e30, 1e-30):
        assert judged(name, {key: [value] * 25}) == []


@pytest.mark.parametrize("name", JUDGE_TOTALS)
def test_the_total_of_a_part_of_the_model_is_judged_by_no_detector(name: str) -> None:
    """Of a module other than the root; the same values of the root are judged by each of these detectors."""
    [(kinds, statistics)] = DETECTORS[name].sources
    series = [1.0] * 12 + ([1e-3] if name == "shrinking_weights" else [1e9]) * 12
    assert judged(name, {f"{kinds[0]}/_root_/{statistics[0]}": series})
    assert judged(name, {f"{kinds[0]}/fc/{statistics[0]}": series}) == []


def test_the_history_counts_the_whole_gradient_once(tmp_path: Path) -> None:
    """The norms of single parameters and their total are not added."""
    first: list[float] = []
    for rules in (None, [Rule(kinds=["gradient", "parameter"], statistics="norm")]):
        callback = ModuleMonitorCallback(1, rules=rules)
        fit(tmp_path / str(len(first)), [callback], max_steps=2)
        first.append(callback._shown.results.history.first["gradient"])
    assert first[0] == pytest.approx(first[1], rel=1e-6)
