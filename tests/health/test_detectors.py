"""One table of detectors: while training and on the stored run the same names, limits, sites and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import is_withdrawn
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import UNDEFINED_BITS, Record
from lightning_module_monitor.report.stored_verdict import verdict_on
from lightning_module_monitor.sinks.store.matrices import Table

Rows = dict[str, list[float]]
ABSENT = -777.0
SKIPPED = "monitor/step_skipped"


def tables(rows: Rows) -> list[Table]:
    """Series as the report reads them, a table for each kind and statistic; the n-th record is of step 10 n."""
    grouped: dict[Key, Rows] = {}
    for key, values in rows.items():
        parts = Key.parse(key)
        grouped.setdefault(parts._replace(site=""), {})[parts.site] = values
    found = []
    for name, sites in grouped.items():
        values = np.array(list(sites.values()))
        is_recorded = values != ABSENT
        steps = np.flatnonzero(is_recorded.any(axis=0))
        found.append(Table(name, tuple(sites), steps * 10, np.where(is_recorded, values, np.nan)[:, steps], is_recorded[:, steps]))
    return found


def while_training(names: Sequence[str], rows: Rows) -> list[tuple[str, str, int]]:
    """Name, first site and step of what is found while training, and not withdrawn in the end."""
    judge = Judge([DETECTORS[name].alert() for name in names])
    num = len(next(iter(rows.values())))
    records = [Record.of(step * 10, {key: values[step] for key, values in rows.items() if values[step] != ABSENT}) for step in range(num)]
    found = [alarm.finding for record in records for alarm in judge.observe(record)]
    return [(one.name, one.site, one.step) for one in found if not is_withdrawn(one, judge.history)]


def on_the_store(names: Sequence[str], rows: Rows) -> list[tuple[str, str, int]]:
    """The same of the verdict on what was stored."""
    figures = tables({key: values for key, values in rows.items() if not Key.parse(key).site})
    sites = tables({key: values for key, values in rows.items() if Key.parse(key).site})
    return [(one.name, one.site, one.step) for one in verdict_on(sites, figures).findings if one.name in names]


FINE = [1.0, 1.1, 0.9, 1.2, 0.8, 1.3, 0.7, 1.4]
CASES: dict[str, tuple[Rows, int]] = {
    "dead_units": ({"activation/a/dead_fraction": [0.0] * 12, "activation/b/dead_fraction": [0.1, *[0.6] * 11]}, 100),
    "saturation": ({"activation/b/saturated_fraction": [0.95, math.nan, 0.95, 0.95, ABSENT, 0.95]}, 50),
    "vanishing": (
        {"gradient/b.weight/rms": [1, 1, *[3e-7] * 6], "gradient/a.weight/rms": FINE, SKIPPED: [0, 0, 0, 1, 0, 0, 0, 0]},
        50,
    ),
    "exploding": ({"gradient/a/norm": FINE, "gradient/b/norm": [1, 2, 1, 40, 400, 900, 1, 1]}, 40),
    "growing_weights": ({"parameter/a/norm": FINE, "parameter/b/norm": [1, 2, 12, 1, 13, 14, 1, 1]}, 50),
    "frozen_updates": (
        {
            "parameter/a/norm": FINE,
            "parameter/b/norm": [1, 2, 2, ABSENT, 2, 2, 2, 2],
            "gradient/a/norm": FINE,
            "gradient/b/norm": [1, 1, 1, ABSENT, 1, 1, 1, 1],
        },
        50,
    ),
    "diverging": ({"context/loss": [1.0, 1.2, 1.1, 1.0, 1.3, ABSENT, 4.0, 3.8, 4.0, ABSENT, 5.0, 9.0]}, 110),
    "growing_over_depth": ({"activation/a/rms": [2.0] * 8, "activation/b/rms": [1.9e4, 2.1e4, 1e4, *[3e4] * 5]}, 50),
    "large_logits": ({"attention_max_logit/b/max": [10.0, 10.0, 900.0, 1100.0, 2e3, 3e3, 3e3]}, 50),
}


@pytest.mark.parametrize("name", CASES)
def test_the_store_shows_what_training_showed(name: str) -> None:
    """Site and step are those by hand, from the same records, with gaps and skipped steps."""
    rows, step = CASES[name]
    [(found, site, at)] = while_training([name], rows)
    assert (found, site, at) in [(name, shown_by, step) for shown_by in ("b", "b.weight", "" if name == "diverging" else "b")]
    assert on_the_store([name], rows) == while_training([name], rows)


def test_any_records_give_the_same_in_both_places() -> None:
    """Random series that cross their limits now and then, some of them absent or not finite: of each site the first finding."""
    random = np.random.default_rng(0)
    names = ("vanishing", "exploding", "frozen_updates")
    num_found = 0
    for _ in range(20):
        rows: Rows = {}
        for site in ("a.weight", "b.weight", "c.bias"):
            for kind, statistic in (("gradient", "rms"), ("gradient", "norm"), ("parameter", "norm")):
                series = 10.0 ** random.choice([-8, 0, 0, 3], size=40)
                series = np.repeat(series[::4], 4) if random.random() < 0.5 else series
                series[random.random(40) < 0.05] = random.choice([math.nan, math.inf, 0.0])
                rows[f"{kind}/{site}/{statistic}"] = series.tolist()
        for absent in np.flatnonzero(random.random(40) < 0.1).tolist():
            for values in rows.values():
                values[absent] = ABSENT
        live = while_training(names, rows)
        assert sorted(on_the_store(names, rows)) == sorted(live)
        num_found += len(live)
    assert num_found > 20


def test_a_further_output_is_no_layer_that_grows() -> None:
    """T5 returns the mask of its attention, with the lowest number that there is."""
    rows = {"activation/a/rms": [1.0] * 4, "activation/a.output_1/rms": [9.8e37] * 4, "activation/b/rms": [2.0] * 4}
    assert while_training(["growing_over_depth"], rows) == []
    rows["activation/c/rms"] = [3e4] * 4
    assert while_training(["growing_over_depth"], rows) == [("growing_over_depth", "c", 20)]


@pytest.mark.parametrize("name", [name for name, detector in DETECTORS.items() if detector.rule is not None])
def test_a_record_in_which_no_value_is_defined(name: str) -> None:
    """The ratio of an update of a weight of zeros is 0 / 0: such a record is passed over, by every detector."""
    (kinds, statistics), *_ = DETECTORS[name].sources
    key = Key(kinds[0], "" if kinds[0] in ("context", "monitor") else "a.weight", statistics[0]).format()
    undefined = float(np.uint64(UNDEFINED_BITS).view(np.float64))
    assert while_training([name], {key: [undefined] * 12}) == []


def test_the_state_of_a_detector_that_is_gone_is_passed_over() -> None:
    """A checkpoint of an earlier version resumes: the other rules go on where they were."""
    record = {"activation/a/rms": 1.0, "activation/b/rms": 3e4}
    before, after = (Judge([DETECTORS["growing_over_depth"].alert()]) for _ in range(2))
    for step in (0, 1):
        assert before.observe(Record.of(step, record)) == []
    gone = {"zero_outputs above=0.99 for_steps=10": (2, 0, {"activation/b/rms": ([], [], 2, 0, 3, False)})}
    history = before.state()["history"] | {"first_gradients": {"b.weight": 1.0}}
    after.load(before.state() | gone | {"history": history})
    [alarm] = after.observe(Record.of(2, record))
    assert (alarm.finding.name, alarm.finding.first_step) == ("growing_over_depth", 0)


def test_a_bias_is_no_weight_whatever_its_module_is_called() -> None:
    """The weight of a parametrization is one."""
    rows = {f"gradient/{site}/norm": [1.0] * 12 for site in ("weights.0.bias", "a.weight")}
    rows |= {f"gradient/{site}/norm": [0.0] * 12 for site in ("weight_network.bias", "b.parametrizations.weight.original0")}
    assert while_training(["zero_gradients"], rows) == [("zero_gradients", "b.parametrizations.weight.original0", 90)]


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([*[1.0] * 6, *[0.3] * 9], []),  # the gate opens, and the loss falls
        ([1.0, 0.3, *[1.0] * 4, *[0.3] * 9], [("saturation", "a", 40)]),  # a relapse, from which the run has recovered
        ([*[1.0] * 6, *[0.6] * 9], [("saturation", "a", 40)]),  # not by half
        ([*[1.0] * 6, *[-3.0] * 9], [("saturation", "a", 40)]),  # a loss below 0 shows nothing
    ],
)
def test_what_a_loss_that_falls_contradicts_is_withdrawn(losses: list[float], found: list[tuple[str, str, int]]) -> None:
    """Of checks that leave out such records: where the loss has fallen in the end, and had not before the finding."""
    rows = {"activation/a/saturated_fraction": [0.0, 0.0, *[0.95] * 13], "context/loss": losses}
    assert while_training(["saturation"], rows) == on_the_store(["saturation"], rows) == found


def test_a_loss_that_ends_a_little_below_its_start_contradicts_no_explosion() -> None:
    """Without the explosion this run reaches a fifteenth of its first loss."""
    rows = {"gradient/a.weight/norm": [*[1.0] * 5, 500.0, 800.0, *[1.0] * 8], "context/loss": [*[2.3] * 5, 240.0, 90.0, *[1.87] * 8]}
    assert while_training(["exploding"], rows) == on_the_store(["exploding"], rows) == [("exploding", "a.weight", 50)]


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([1.0] * 4, [("no_gradients", "a.weight", 20)]),
        ([0.0] * 4, []),
        ([1.0, 0.0, 0.0, 0.0], []),
        ([1.0, 0.0, 1.0, 0.0, 1.0], [("no_gradients", "a.weight", 40)]),
    ],
)
def test_gradients_of_a_loss_of_0_are_0(losses: list[float], found: list[tuple[str, str, int]]) -> None:
    """As of margins that are satisfied: such records are passed over."""
    rows = {"gradient/a.weight/norm": [0.0] * len(losses), "context/loss": losses}
    assert while_training(["no_gradients"], rows) == on_the_store(["no_gradients"], rows) == found


def test_gradients_of_parameters_that_no_optimizer_has_contradict_nothing() -> None:
    """As of an optimizer that has the parameters of a copy."""
    judge, values = Judge([DETECTORS["no_gradients"].alert()]), {"gradient/a.weight/norm": 1.0, "context/loss": 1.0}
    [found] = [alarm.finding for step in range(4) for alarm in judge.observe(Record.of(step, values), Facts(no_gradient=True))]
    assert not is_withdrawn(found, judge.history)
    judge.observe(Record.of(4, values), Facts())
    assert is_withdrawn(found, judge.history)


def test_gradients_that_come_later_contradict_that_there_are_none() -> None:
    """As where the first rewards come late."""
    rows = {"gradient/a.weight/norm": [*[0.0] * 4, 2.0], "context/loss": [1.0] * 5}
    assert while_training(["no_gradients"], rows) == on_the_store(["no_gradients"], rows) == []


@pytest.mark.parametrize(
    ("outputs", "loss", "found"),
    [
        ({"b": 3e4, "c": 1.0}, 2.0, []),  # a mask, such as the lowest number of a dtype, goes no further
        ({"b": 3e4, "c": 3e4}, 2.0, []),  # a module that returns what the one before it does is that one
        ({"b": 3e4, "c": 2e4}, 2.0, [("growing_over_depth", "b", 20)]),
        ({"b": 3e4, "c": 1.0}, 5e4, [("growing_over_depth", "b", 20)]),
        ({"b": 3e4, "c": 3e4}, math.inf, [("growing_over_depth", "b", 20)]),
    ],
)
def test_an_explosion_reaches_the_next_module_or_the_loss(
    outputs: dict[str, float], loss: float, found: list[tuple[str, str, int]]
) -> None:
    """Or it is no explosion."""
    rows = {f"activation/{site}/rms": [size] * 3 for site, size in ({"a": 1.0} | outputs).items()}
    assert while_training(["growing_over_depth"], rows | {"context/loss": [loss] * 3}) == found


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([float(number) for number in range(1, 11)], ["growing_input"]),
        ([1.0, 1.1, 0.9, 1.0, 1.05, 1.4, 0.8, 1.5, 0.9, 1.45], []),  # a larger median, and no surely larger numbers
        ([1.0, 1.1, 0.9, 1.0, 1.05, 1.3, 1.2, 1.3, 1.25, 1.35], []),  # surely larger numbers, by less than a quarter
    ],
)
def test_an_input_that_surely_grows(sizes: list[float], found: list[str]) -> None:
    """By its median, and by ranks."""
    figures = tables({"context/loss": [1.0] * 10, "context/input_abs_max": sizes})
    assert [one.name for one in verdict_on([], figures).findings if one.name == "growing_input"] == found


FALLS_A_LITTLE = [3.610, 3.566, 3.592, 3.643, 3.426, 3.419, 3.388, 3.406, 3.269, 3.387, 3.384, 3.268]


@pytest.mark.parametrize(
    ("logged", "is_named"),
    [
        (FALLS_A_LITTLE, False),
        ([loss / 2 for loss in FALLS_A_LITTLE], False),  # it falls by ranks, as the loss does
        ([1.0 + 0.01 * (number % 5) + 0.001 * number for number in range(12)], True),
    ],
)
def test_a_logged_loss_that_does_not_fall(logged: list[float], is_named: bool) -> None:
    """The loss itself is none, and one that falls by ranks is none."""
    headline = verdict_on([], tables({"context/loss": FALLS_A_LITTLE, "context/train_loss": logged})).headline
    assert ("the loss falls, and train_loss, which is logged, does not" in headline) is is_named
