"""The records in memory: what is kept of them, and how much memory they take."""

from __future__ import annotations

import math
import pickle
import tracemalloc

import numpy as np
import pytest

from lightning_module_monitor import StorageManager
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import ABSENT, UNDEFINED, Record, is_undefined

KEYS = [f"activation/layer{number}/norm" for number in range(500)]


def values_of(step: int, num_keys: int = 500) -> dict[str, float]:
    """A record's values: new keys and numbers in each, as a run has them."""
    return {f"{key}": step + number / 1000 for number, key in enumerate(KEYS[:num_keys])}


@pytest.mark.parametrize("cadences", [[500], [500, 300, 400]], ids=["one set of keys", "three sets of keys"])
def test_a_history_is_as_large_as_its_numbers(cadences: list[int]) -> None:
    """8 bytes for each column of 1,000 records, also if rules are due in different steps; dicts of floats take ten times as much."""
    storage, columns = StorageManager(), Columns.of(KEYS)
    tracemalloc.start()
    try:
        for step in range(1000):
            values = np.fromiter(values_of(step, cadences[step % len(cadences)]).values(), np.float64)
            storage.add(Record(step, columns, np.concatenate([values, np.full(len(KEYS) - len(values), ABSENT)])))
        held, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * 8 * 1000 * len(KEYS)
    for step in (0, 7, 998):
        assert storage.get_step_metrics(step) == values_of(step, cadences[step % len(cadences)])


def test_records_are_kept_as_they_were() -> None:
    """Later changes of a record or of a result have no effect; non-finite numbers stay the same."""
    given = {"b": 1.0, "a": math.inf, "c": math.nan, "d": UNDEFINED, "e": -0.0}
    storage = StorageManager()
    storage.add(Record.of(0, given))
    expected = dict(given)
    given["b"] = storage.get_step_metrics(0)["a"] = 7.0
    storage.get_all_metrics()[0]["a"] = 7.0
    found = pickle.loads(pickle.dumps(storage)).get_step_metrics(0)  # our own bytes
    assert [*found] == [*expected]
    np.testing.assert_equal(found, expected)
    assert is_undefined([*found.values()]).tolist() == [False, False, False, True, False]
    assert math.copysign(1.0, found["e"]) == -1.0
    assert all(type(value) is float for value in found.values())


def test_a_further_record_of_a_step_is_merged_and_the_oldest_steps_go() -> None:
    """The later value of a key counts; ``max_records`` steps are kept, with any keys."""
    storage = StorageManager(3)
    storage.add(Record.of(0, {"a": 1.0, "b": 2.0}))
    storage.add(Record.of(0, {"b": 3.0, "c": 4.0}))
    assert storage.get_all_metrics() == {0: {"a": 1.0, "b": 3.0, "c": 4.0}}
    for step in range(1, 6):
        storage.add(Record.of(step, {f"key{step}": float(step)}))
    assert storage.get_all_metrics() == {step: {f"key{step}": float(step)} for step in (3, 4, 5)}
    assert storage.get_step_metrics(0) == {}
    storage.clear()
    assert (storage.last_step(), storage.get_all_metrics()) == (None, {})
