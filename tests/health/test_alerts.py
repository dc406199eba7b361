"""Rules on recorded values fire when they should, once, and in words that are true."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from lightning_module_monitor.health.alerts import AlertRule, matching
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.facts import Facts, ParameterFacts, Training
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import Record

KEY = "gradient/fc/norm"


def fired(values: Sequence[float], **options: Any) -> list[int]:
    """The steps in which a rule on one key fires."""
    alerts = Judge([AlertRule("test", matching([re.compile(KEY)]), **options)])
    return [step for step, value in enumerate(values) if alerts.observe(Record.of(step, {KEY: value, "gradient/other/norm": 1e9}))]


@pytest.mark.parametrize(
    ("options", "values", "steps"),
    [
        ({"above": 10.0}, [1, 10, 11, 12, 9, 11], [2]),  # once, until it was well for ten records
        ({"above": 10.0}, [11, *[1] * 9, 11], [0]),
        ({"above": 10.0}, [11, *[1] * 10, 11], [0, 11]),
        ({"above": 10.0, "for_steps": 3}, [11, 11, 9, 11, 11, 11, 11], [5]),
        ({"below": 1.0}, [1, 0.5], [1]),
        ({"above": 10.0, "below": 1.0}, [5, 0.5], [1]),
        ({"above": 10.0}, [float("nan"), float("inf")], [1]),
        ({"above": 10.0, "for_steps": 2}, [11, float("nan"), 11, 11], [3]),
        ({"above": 10.0, "relative_to": "median"}, [*[2] * 9, 50, 19, 21], [11]),  # ten values first; the median is 2
        ({"above": 100.0, "relative_to": "first"}, [1, 3, 2, 100, 299, 301], [5]),
        ({"above": 10.0, "relative_to": "median"}, [*[-2] * 10, -20, 21], [11]),  # nor do they count here
        ({"above": 10.0, "relative_to": "median"}, [*[0] * 10, 0, 1e-9], [11]),
        ({"is_unchanged": True, "for_steps": 2}, [1, 1, 2, 2, 2, 2], [4]),
    ],
)
def test_when_a_rule_fires(options: dict[str, Any], values: list[float], steps: list[int]) -> None:
    """Limits, their bases, for how long, and not again."""
    assert fired(values, **options) == steps


def test_a_finding_names_keys_and_figures() -> None:
    """One finding for all keys that fire together, in words with their values, at the first one's site."""
    rule = AlertRule("large", matching([re.compile("gradient/.*/norm")]), above=10.0, for_steps=2, then=("stop",))
    alerts = Judge([rule])
    record = {f"gradient/fc{number}/norm": 11.0 + number for number in range(5)}
    assert alerts.observe(Record.of(6, record)) == []
    [(finding, then, _fired)] = alerts.observe(Record.of(8, record))
    assert then == ("stop",)
    assert (finding.step, finding.name, finding.site, finding.key, finding.severity) == (8, "large", "fc0", "gradient/fc0/norm", "warning")
    figures = "gradient/fc0/norm: 11; gradient/fc1/norm: 12; gradient/fc2/norm: 13; and 2 more"
    assert finding.words == f"{figures}; above 10 in 2 records from step 6 to 8."


def test_the_words_of_an_alert_have_its_limits() -> None:
    """Both, and what they are multiples of."""
    alerts = Judge([AlertRule("far", matching([re.compile(".*")]), above=10.0, below=0.5, relative_to="median")])
    found = [alarm.finding for step in range(11) for alarm in alerts.observe(Record.of(step, {KEY: 2.0 if step < 10 else 50.0}))]
    condition = "above 10 times the median of earlier records or below 0.5 times the median of earlier records"
    assert [finding.message for finding in found] == [f"{KEY}: 50 (25 times its median); {condition} in step 10."]


RULES = [
    AlertRule("a", matching([re.compile(".*")]), above=10.0, relative_to="median", for_steps=2),
    AlertRule("a", matching([re.compile(".*")]), below=0.5, relative_to="median"),
    AlertRule("a", matching([re.compile(".*")]), above=5.0, relative_to="first"),
    AlertRule("a", matching([re.compile(".*")]), is_unchanged=True, for_steps=3),
]


@pytest.mark.parametrize("cut", [1, 4, 12, 13, 20])
def test_alerts_go_on_where_they_were(cut: int) -> None:
    """State and values of a median, a streak and what was said: whoever goes on from it finds what it would have found."""
    values = [1.0, 2.0, 1.5, 1.5, 1.5, 1.5, *[2.0, 1.0] * 3, 30.0, 30.0, *[1.0] * 11, 0.0, 40.0, 40.0]
    records = [Record.of(step, {KEY: value, "b": -value}) for step, value in enumerate(values)]
    whole, first, second = (Judge(RULES) for _ in range(3))
    expected = [whole.observe(record) for record in records]
    assert sum(map(len, expected)) >= 6
    found = [first.observe(record) for record in records[:cut]]
    second.load(pickle.loads(pickle.dumps(first.state())))  # our own bytes
    assert found + [second.observe(record) for record in records[cut:]] == expected
    np.testing.assert_equal(second.state(), whole.state())  # NaN is equal to NaN
    rules = [AlertRule("a", matching([re.compile(".*")]), above=5.0)]
    other = Judge(rules)
    other.load(whole.state())
    anew = Judge(rules).state()
    assert {name: one for name, one in other.state().items() if name != "history"} == {
        name: one for name, one in anew.items() if name != "history"
    }


def concerned(name: str, *keys: str) -> list[str]:
    """The keys that a built-in watch is about."""
    rule = DETECTORS[name].alert(("warn",))
    return [key for key in keys if rule.concerns(Key.parse(key), key)]


def test_watches_are_about_training() -> None:
    """And of any prefix; a validation's dead units are those of a validation."""
    keys = ["activation/a/dead_fraction", "run1/activation/a/dead_fraction", "validation/activation/a/dead_fraction", "activation/a/rms"]
    assert concerned("dead_units", *keys) == keys[:2]


def alarms(name: str, records: Sequence[dict[str, float]], parameters: Mapping[str, Training] | None = None) -> list[tuple[int, str]]:
    """Step and site of what a built-in watch finds."""
    alerts = Judge([DETECTORS[name].alert(("warn",))])
    facts = Facts({site: ParameterFacts(training, -1, 1) for site, training in (parameters or {}).items()})
    found = [(step, alerts.observe(Record.of(step, record), facts)) for step, record in enumerate(records)]
    return [(step, alarm.finding.site) for step, several in found for alarm in several]


def test_what_has_faded_is_told_from_what_has_no_gradient() -> None:
    """Zero to the last bit is not vanishing; a millionth is."""
    record = {"gradient/a.weight/rms": 0.0, "gradient/b.weight/rms": 0.9e-6, "gradient/c.weight/rms": 1.1e-6, "gradient/d.weight/rms": 1.0}
    assert alarms("vanishing", [record] * 4) == [(2, "b.weight")]


def test_the_order_of_a_record_does_not_matter() -> None:
    """A record groups keys by what is recorded of them; what is before a weight is so in the model."""
    sites = [f"blocks.{block}.{name}.weight" for block in range(4) for name in ("q", "k", "v", "o")]
    sizes = {f"gradient/{site}/rms": 5e-7 if site.endswith(("q.weight", "k.weight")) else 1.0 for site in sites}
    grouped = dict(sorted(sizes.items(), key=lambda item: item[1]))
    assert [*grouped] != [*sizes]
    found = []
    for record in (sizes, grouped):
        alerts = Judge([DETECTORS["vanishing"].alert(("warn",))], sites)
        [alarm] = [alarm for step in range(3) for alarm in alerts.observe(Record.of(step, record))]
        found.append((alarm.finding.site, alarm.finding.words))
    assert found[0] == found[1]
    # q and k; those of further blocks are behind weights that learn
    assert found[0] == ("blocks.0.q.weight", "blocks.0.q.weight and 1 more: the gradient is 5.0e-07 of the largest one, since step 0.")


def test_all_gradients_together_explode() -> None:
    """By the root of the sum of squares, against the largest of three records; one layer alone may grow."""
    quiet, loud = ({"gradient/a/norm": a, "gradient/b/norm": b} for a, b in ((3.0, 4.0), (400.0, 301.0)))
    assert alarms("exploding", [quiet, quiet, {"gradient/a/norm": 400.0, "gradient/b/norm": 299.0}]) == []
    assert alarms("exploding", [quiet, quiet, loud]) == [(2, "a")]
    assert alarms("exploding", [quiet, quiet, loud | {"monitor/step_skipped": 1.0}, quiet]) == []


def test_a_gradient_that_no_optimizer_uses() -> None:
    """It is found where it is not zero. It accumulates, which is no explosion. A frozen parameter is not judged."""
    grows = [{"gradient/a/norm": 10.0**step, "gradient/b/norm": 1.0} for step in range(6)]
    assert alarms("exploding", grows) == [(5, "a")]
    assert alarms("exploding", grows, {"a": "untrained"}) == []
    assert alarms("no_optimizer", grows, {"a": "untrained", "b": "trained"}) == [(0, "a")]
    assert alarms("no_optimizer", grows, {"a": "frozen"}) == []
    assert alarms("no_optimizer", [{"gradient/a/norm": 0.0}] * 3, {"a": "untrained"}) == []


def test_what_stands_still_has_to_be_trained_and_to_have_a_reason() -> None:
    """A frozen parameter may; so may one with next to no gradient, and a step that a scaler skipped does not count."""
    still = {"parameter/a/norm": 1.0, "parameter/b/norm": 2.0, "gradient/b/norm": 1e-5, "gradient/c/norm": 1.0}
    assert alarms("frozen_updates", [still] * 5) == [(3, "a")]
    assert alarms("frozen_updates", [still] * 5, parameters={"a": "frozen", "b": "frozen", "c": "trained"}) == []
    assert alarms("frozen_updates", [still] * 5, parameters={"a": "untrained"}) == []
    assert alarms("frozen_updates", [still | {"monitor/step_skipped": 1.0}] * 9) == []
    assert alarms("frozen_updates", [{key: value for key, value in still.items() if "gradient" not in key}] * 9) == []  # a batch left out
    once = still | {"parameter/a/norm": 0.9, "gradient/a/norm": 1.0}
    assert alarms("frozen_updates", [once, *[still] * 9]) == []  # it is not its turn
    assert alarms("frozen_updates", [still | {"gradient/a/norm": 1.0}] * 5) == [(3, "a")]


def test_rules_can_be_pickled() -> None:
    """A callback has them."""
    rules = [one.alert(("warn",)) for one in DETECTORS.values() if one.rule is not None]
    revived = pickle.loads(pickle.dumps([*rules, AlertRule("test", matching([re.compile(KEY)]), above=1.0)]))  # our own bytes
    assert revived[-1].concerns(Key.parse(KEY), KEY)
    assert [rule.name for rule in revived[:-1]] == [rule.name for rule in rules]


@pytest.mark.parametrize(("num", "names"), [(2, []), (3, ["zero_rate"])])
def test_a_rate_of_zero_needs_the_records_of_its_detector(num: int, names: list[str]) -> None:
    """The limit is that of the table."""
    assert DETECTORS["zero_rate"].min_records == 3
    judge = Judge([])
    facts = Facts({"w.weight": ParameterFacts("trained", 0, 4)})
    for step in range(num):
        judge.observe(Record.of(step, {"context/loss": 1.0, "context/lr": 0.0, "gradient/w.weight/norm": 1.0}), facts)
    assert [alarm.finding.name for alarm in judge.alarms_of_whole_run()] == names


@pytest.mark.parametrize(("late", "is_manual", "num_alarms"), [(1.0, False, 1), (1.0, True, 0), (-1.0, False, 0)])
def test_only_a_loss_with_a_factor_rises(late: float, is_manual: bool, num_alarms: int) -> None:
    """A loss that diverges is found under automatic optimization, while none was below 0; else no record is judged."""
    judge = Judge([DETECTORS["diverging"].alert()])
    losses = [*[1.0] * 6, late, *[50.0 * 2**step for step in range(6)]]
    alarms = [judge.observe(Record.of(step, {"context/loss": loss}), Facts(is_manual=is_manual)) for step, loss in enumerate(losses)]
    assert sum(map(len, alarms)) == num_alarms
    assert judge.states[0].num_records == (0 if is_manual else len(losses) if late > 0 else 6)


def test_records_whose_facts_are_known_count_without_figures() -> None:
    """A detector of facts has looked at a record in which nothing is wrong; without facts it knows nothing."""
    judge = Judge([DETECTORS["in_eval"].alert()])
    judge.observe(Record.of(0, {"context/loss": 1.0}))
    assert judge.states[0].num_records == 0
    for step in (1, 2):
        judge.observe(Record.of(step, {"context/loss": 1.0}), Facts(is_classification=True))
    assert judge.states[0].num_records == 2
