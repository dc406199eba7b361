"""Values of ``per_module`` are no tensors of single parameters: who judges them, and who does not."""

from __future__ import annotations

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
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.record import Facts, Key, ParameterFacts, Record

TOTAL = "gradient/_root_/norm"
FACTS = Facts({"fc.weight": ParameterFacts("trained", 0, 4), "head.weight": ParameterFacts("trained", 0, 4)})


def judged(name: str, series: dict[str, list[float]], facts: Facts | None = FACTS, losses: float = 1.0) -> list[Any]:
    """The alarms of a detector in records of these series."""
    judge = Judge([DETECTORS[name].alert()], ["fc", "fc.weight", "head.weight"], ["_root_", "fc", "head"])
    alarms = []
    for step in range(len(next(iter(series.values())))):
        values = {key: values[step] for key, values in series.items() if not np.isnan(values[step])}
        alarms += judge.observe(Record(step, {**values, "context/loss": losses}, facts=facts))
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
    """A pattern of any parameter leaves totals out; one that matches a module and no parameter takes it."""
    key = Key("gradient", site, "norm")
    assert naming(parse_patterns(pattern, "keys"))(key, key.format()) is is_named


def test_alerts_of_a_run(tmp_path: Path) -> None:
    """Of two alerts in one run each fires for its keys alone."""
    rules = [Rule(kinds="gradient", statistics="norm"), Rule(kinds="gradient", statistics="norm", per_module=["_root_", r"model\.\d"])]
    alerts = [
        Alert(keys="gradient/.*/norm", above=0.0, name="each"),
        Alert(keys=TOTAL, above=0.0, name="whole"),
        Alert(keys=r"gradient/model\.\d/norm", above=0.0, name="layer"),
    ]
    callback = ModuleMonitorCallback(1, rules=rules, alerts=alerts, health=False)
    fit(tmp_path, [callback], max_steps=1)
    words = {finding.name: finding.words for finding in callback.findings}
    found = {name: set(re.findall(r"gradient/([\w.]+)/norm", text)) for name, text in words.items()}
    assert found["each"] == {"model.0.weight", "model.0.bias", "model.2.weight"}  # and one more
    assert "and 1 more" in words["each"]
    assert found["whole"] == {"_root_"}
    assert found["layer"] == {"model.0", "model.2"}


def test_a_spike_of_the_whole_gradient_is_found_by_its_norm_alone() -> None:
    """Without norms of single parameters it names no place."""
    [alarm] = judged("gradient_spike", {TOTAL: [1.0] * 12 + [500.0]})
    assert alarm.finding.key == TOTAL
    assert alarm.finding.words == "Total gradient norm: 500 times its median, since step 12 at the latest."


def test_a_spike_is_of_the_whole_and_shown_by_the_largest_part() -> None:
    """Where both are recorded: parts that a rule picks may be small beside the whole."""
    series = {TOTAL: [1.0] * 12 + [500.0], "gradient/fc.weight/norm": [1e-3] * 12 + [2e-3], "gradient/head.weight/norm": [1e-4] * 13}
    [alarm] = judged("gradient_spike", series)
    assert alarm.finding.key == "gradient/fc.weight/norm"
    assert alarm.finding.words.startswith("Total gradient norm: 500 times its median, most of it in fc.weight")
    assert judged("gradient_spike", {**series, TOTAL: [1.0] * 13}) == []


def test_records_that_have_only_one_of_both_are_not_mixed() -> None:
    """Of rules with schedules of their own: a part is no fall, and the whole no spike."""
    parts = [1e-3 if step % 2 else np.nan for step in range(30)]
    whole = [np.nan if step % 2 else 1.0 for step in range(30)]
    assert judged("gradient_spike", {TOTAL: whole, "gradient/fc.weight/norm": parts}) == []


def test_frozen_weights_do_not_hide_that_trained_ones_grow() -> None:
    """The norm of all parameters counts where all are trained; else those of the trained ones are put together."""
    series = {
        "parameter/_root_/norm": [100.0, 100.18, 100.18, 100.18],
        "parameter/fc.weight/norm": [1.0, 6.0, 6.0, 6.0],
        "parameter/head.weight/norm": [100.0] * 4,
    }
    frozen = Facts({**FACTS.parameters, "head.weight": ParameterFacts("frozen", -1, 4)})
    assert judged("growing_weights", series) == []
    [alarm] = judged("growing_weights", series, frozen)
    assert alarm.finding.site == "fc.weight"


@pytest.mark.parametrize("site", ["_root_", "fc"])
@pytest.mark.parametrize(
    "name", [name for name, detector in DETECTORS.items() if "totals" not in str(detector.rule and detector.rule.figures)]
)
def test_no_other_detector_judges_totals(name: str, site: str) -> None:
    """Whatever their values are: zero, not finite, unchanged, above and below every limit."""
    detector = DETECTORS[name]
    if detector.rule is None:
        return
    for kinds, statistics in detector.sources:
        for kind in kinds:
            for statistic in statistics:
                key = f"{kind}/{site}/{statistic}"
                if kind in ("gradient", "parameter", "update", "gradient_before_clip"):
                    for value in (0.0, np.inf, 1e30, 1e-30):
                        assert judged(name, {key: [value] * 25}) == [], key


def test_a_module_s_total_is_no_norm_of_the_whole() -> None:
    """The total of a part of the model is judged by no detector."""
    assert judged("gradient_spike", {"gradient/fc/norm": [1.0] * 12 + [500.0]}) == []


def test_the_history_counts_the_whole_gradient_once(tmp_path: Path) -> None:
    """Norms of single parameters and of all together are not added."""
    first = []
    for rules in (None, [Rule(kinds=["gradient", "parameter"], statistics="norm")]):
        callback = ModuleMonitorCallback(1, rules=rules)
        fit(tmp_path / str(len(first)), [callback], max_steps=2)
        first.append(callback._latest.results.history.first["gradient"])
    assert first[0] == pytest.approx(first[1], rel=1e-6)
