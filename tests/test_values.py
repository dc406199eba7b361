"""Values by key, of which those of a table share their keys."""

from __future__ import annotations

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_module_monitor.record import Record, Values
from lightning_module_monitor.sinks.history import StorageManager

KEYS = [f"activation/layer{number}/norm" for number in range(5)]
PLACES = {key: place for place, key in enumerate(KEYS[:3])}


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.floats(allow_nan=False))))
def test_they_are_those_of_a_dict(changes: list[tuple[str, float]]) -> None:
    """Whatever is set, in whatever order: of a table's keys in their place, of others behind them."""
    values, expected = Values(PLACES, np.array([1.0, 2.0, 3.0])), dict(zip(PLACES, [1.0, 2.0, 3.0], strict=True))
    for key, value in changes:
        values[key] = value
        expected[key] = value
    assert values == expected
    assert list(values) == list(expected)
    assert list(values.items()) == list(expected.items())
    assert list(values.values()) == list(expected.values())
    assert len(values) == len(values.items()) == len(expected)
    assert [values.get(key) for key in KEYS] == [expected.get(key) for key in KEYS]
    assert [key in values for key in KEYS] == [key in expected for key in KEYS]
    assert {**values} == dict(values) == copy.deepcopy(values) == expected
    assert all(type(value) is float for value in values.values())
    assert repr(values) == f"Values({expected})"
    assert list(PLACES) == KEYS[:3], "keys are shared, and were changed"


def test_several_are_set_at_once_and_what_is_not_there_is_an_error() -> None:
    """As with a dict."""
    values = Values()
    assert not values
    values.update({"b": 1.0, "a": 2.0})
    assert dict(values) == {"b": 1.0, "a": 2.0}
    with pytest.raises(KeyError, match="'c'"):
        values["c"]


def test_copies_are_changed_apart() -> None:
    """Copied, pickled, kept in memory: what is set in one is not in the other."""
    for values in (Values(), Values(PLACES, np.array([1.0, 2.0, 3.0]))):
        values["own"] = 4.0
        storage, expected = StorageManager(), dict(values)
        storage.add(Record(0, values))
        copies = [values.copy(), copy.copy(values), copy.deepcopy(values), pickle.loads(pickle.dumps(values))]
        for key in (*values, "new"):
            values[key] = -1.0
        assert all(one == expected for one in copies)
        assert storage.get_step_metrics(0) == expected
        assert set(values.values()) == {-1.0}


def test_a_history_is_as_large_as_its_numbers() -> None:
    """8 bytes each, where a dict of floats takes 60."""
    num_keys, num_records, storage = 1000, 200, StorageManager()
    places = {f"activation/layer{number}/norm": number for number in range(num_keys)}
    tracemalloc.start()
    try:
        for step in range(num_records):
            values = Values(places, np.full(num_keys, float(step)))
            values["monitor/errors"] = 0.0
            storage.add(Record(step, values))
        held, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * 8 * num_keys * num_records
    assert storage.get_step_metrics(7) == {**dict.fromkeys(places, 7.0), "monitor/errors": 0.0}
