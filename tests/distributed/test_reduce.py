"""Whatever each rank has seen: together it is what one process would have seen, on every rank, for two collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import Meeting, ThreadRank
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_module_monitor import STATISTICS, Statistic
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.statistics.accumulator import SeriesState, StepAccumulator
from lightning_module_monitor.statistics.functions import Function, Value
from lightning_module_monitor.statistics.registry import HistogramStatistic
from lightning_module_monitor.statistics.stream import Output, Stream

NUM_WATCHES = 5
PLAIN = {name: one for name, one in STATISTICS.items() if isinstance(one, Statistic) and not one.paired and not one.relative}
RELATIVE = {name: one for name, one in STATISTICS.items() if isinstance(one, Statistic) and (one.paired or one.relative)}
HISTOGRAM: dict[str, Output] = {"hist": HistogramStatistic()}


def quartiles(values: Tensor) -> dict[str, Tensor]:
    """An aggregate of the user's, of all values of a step."""
    return {"low": values.quantile(0.25), "high": values.quantile(0.75)}


def wishes() -> list[Stream]:
    """The plan of a rank: every rank makes its own, alike."""
    functions: dict[str, Output] = {
        "average": Function("mean", function=torch.mean),
        "total": Function("sum", function=torch.sum),
        "least": Function("min", function=torch.min),
        "most": Function("max", function=torch.max),
        "spread": Function(quartiles, function=torch.flatten),
    }
    return [
        Stream("activation", "a", {**PLAIN, **HISTOGRAM}),
        Stream("activation", "b", {**PLAIN, **functions}),
        Stream("activation", "c", functions),
        Stream("activation_difference", "d", {**PLAIN, **RELATIVE}),
        Stream("activation", "e", {"norm": PLAIN["norm"], **HISTOGRAM}),
    ]


class Seen:
    """A tensor that a rank sees, and of what: one of the planned watches, or a further output of one."""

    def __init__(self, watch: int, further: int, seed: int) -> None:
        self.watch, self.further = watch, further
        self.tensor = torch.randn(2 + seed % 4, 3, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)

    def show(self, observation: StepAccumulator, plan: list[Stream]) -> None:
        watch = plan[self.watch]
        watch = watch if not self.further else watch.at(f"{watch.site}.output_{self.further}")
        if watch.kind == "activation_difference":
            observation.observe_pair(watch, self.tensor, self.tensor.flip(0))
        else:
            observation.observe(watch, self.tensor)


def no_trouble(watch: Stream, name: str, seen: str, error: Exception) -> None:
    """Nothing fails here."""
    raise AssertionError(f"{watch.kind} {watch.site} {name}, {seen}") from error


seen_tensors = st.builds(Seen, st.integers(0, NUM_WATCHES - 1), st.integers(0, 2), st.integers(0, 50))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(seen_tensors, max_size=6), min_size=2, max_size=4),
    st.lists(st.lists(seen_tensors, max_size=3), min_size=4, max_size=4),
)
def test_any_shares_give_what_one_process_would_have(first: list[list[Seen]], second: list[list[Seen]]) -> None:
    """Two steps: in the second the directory has been learnt, and only what is new costs more than two collectives."""
    steps = [first, second[: len(first)]]
    expected = []
    for step in steps:
        alone, plan = StepAccumulator(no_trouble), wishes()
        for seen in (one for of_rank in step for one in of_rank):
            seen.show(alone, plan)
        expected.append((alone.collect(), alone.histograms))

    def work(rank: ThreadRank) -> list[Any]:
        plan = wishes()
        state, found = SeriesState(plan), []
        for step in steps:
            observation = StepAccumulator(no_trouble, state)
            for seen in step[rank.index]:
                seen.show(observation, plan)
            found.append((observation.collect(rank), observation.histograms))
        return found

    meeting: Meeting[list[Any]] = Meeting(len(first))
    for of_rank in meeting.run(work):
        for (values, histograms), (true_values, true_histograms) in zip(of_rank, expected, strict=True):
            assert values.keys() == true_values.keys()
            for key, value in true_values.items():
                assert values[key] == pytest.approx(value, rel=1e-6, abs=1e-9 * abs(value) + 1e-12, nan_ok=True), key
            assert histograms == true_histograms
    known = {(one.watch, one.further) for of_rank in first for one in of_rank if one.further}
    new = {(one.watch, one.further) for of_rank in steps[1] for one in of_rank if one.further} - known
    maxima = meeting.calls.count("max")
    assert maxima == meeting.calls.count("sum") == 2 + bool(known) + bool(new)


def test_what_is_not_a_number_is_not_lost_on_the_way() -> None:
    """A NaN result of one rank is NaN in every aggregate; an infinite one is infinite."""

    def work(rank: ThreadRank) -> dict[str, float]:
        observation = StepAccumulator(no_trouble, SeriesState(wishes()))
        value = {0: 1.0, 1: float("nan"), 2: float("inf")}[rank.index]
        for name, aggregate in (("nan", "max"), ("least", "min"), ("total", "sum"), ("average", "mean")):
            shown = value if name == "nan" or rank.index != 1 else 2.0
            observation.add_result(Stream("own", name, {name: Value(aggregate)}), name, shown, 1)
        return observation.collect(rank)

    for values in Meeting[dict[str, float]](3).run(work):
        assert np.isnan(values["own/nan/nan"])
        assert (values["own/least/least"], values["own/total/total"], values["own/average/average"]) == (1.0, np.inf, np.inf)


def test_errors_and_lost_steps_are_everybodys() -> None:
    """Errors add up, what failed on one rank is NaN on all, and a step that one has lost all have lost."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], int, bool, bool]:
        plan = wishes()
        said: list[str] = []
        observation = StepAccumulator(lambda watch, name, seen, error: said.append(name), SeriesState(plan))
        observation.observe(plan[0], torch.ones(2, 3))
        if rank.index == 1:
            observation.fail(plan[0], torch.ones(2), ValueError("on purpose"))
        values = observation.collect(rank)
        lost = StepAccumulator(no_trouble, SeriesState(plan))
        lost.is_lost = rank.index == 2
        lost.collect(rank)
        return values, observation.num_errors, bool(said), lost.is_lost

    for index, (values, num_errors, has_said, is_lost) in enumerate(Meeting[Any](3).run(work)):
        assert all(np.isnan(values[f"activation/a/{name}"]) for name in PLAIN)
        assert (num_errors, has_said, is_lost) == (1, index == 1, True)


def test_an_aggregate_that_one_rank_alone_has_is_nan_elsewhere() -> None:
    """What a user records on one rank only, with an aggregate of their own, that rank computes."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], list[str]]:
        said: list[str] = []
        observation = StepAccumulator(lambda watch, name, seen, error: said.append(str(error)), SeriesState(wishes()))
        if rank.index == 0:
            stream = Stream("own", "site", {"mine": Value(lambda values: values.max())})
            observation.add_result(stream, "mine", torch.tensor([1.0, 5.0]), 2)
        return observation.collect(rank), said

    (first, nothing), (other, said) = Meeting[Any](2).run(work)
    assert first["own/site/mine"] == 5.0
    assert nothing == []
    assert np.isnan(other["own/site/mine"])
    assert said == ["its aggregate is not known on this rank; expected every rank to record it"]


def test_values_of_one_site_that_come_in_different_steps() -> None:
    """Each is told of when it comes."""

    def work(rank: ThreadRank) -> list[dict[str, float]]:
        state, found = SeriesState(wishes()), []
        for step in range(3):
            observation = StepAccumulator(no_trouble, state)
            for name in ("early", "late")[: 1 + (step > 0)]:
                observation.add_result(Stream("own", "site", {name: Value("sum")}), name, float(rank.index + step), 1)
            found.append(observation.collect(rank))
        return found

    for values in Meeting[Any](2).run(work):
        assert values == [
            {"own/site/early": 1.0},
            {"own/site/early": 3.0, "own/site/late": 3.0},
            {"own/site/early": 5.0, "own/site/late": 5.0},
        ]


def test_a_stream_that_other_ranks_cannot_make_is_reported_and_left_out() -> None:
    """A statistic of the user's that is in no rule: its rank records NaN, and the streams beside it reach all."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], list[str]]:
        failed: list[str] = []
        accumulator = StepAccumulator(lambda stream, name, seen, error: failed.append(stream.site), SeriesState(wishes()))
        if rank.index == 1:
            odd = Statistic(PLAIN["norm"].needs, lambda moments: moments.mean)
            accumulator.observe(Stream("own", "a", {"odd": odd}), torch.ones(2))
            accumulator.observe(Stream("own", "b", {"norm": PLAIN["norm"]}), torch.ones(4))
        return accumulator.collect(rank), failed

    (values, failed), (own_values, own_failed) = Meeting[Any](2).run(work)
    assert (failed, own_failed) == ([], ["a"])
    assert values == {"own/b/norm": 2.0}
    assert own_values["own/b/norm"] == 2.0
    assert np.isnan(own_values["own/a/odd"])


def compared() -> list[Stream]:
    """What a rank of those that share their input wants: of some sites nothing that tells parts of a tensor apart."""
    positive = Function("sum", function=lambda x: (x > 0).sum())
    everything = Function(lambda values: {"sum": values.sum(), "count": values.numel()}, function=torch.flatten)
    wishes: list[dict[str, Output]] = [
        HISTOGRAM,
        {"positive": positive},
        {"all": everything},
        {"nonfinite_count": PLAIN["nonfinite_count"]},
        {**PLAIN, **HISTOGRAM, "positive": positive},
    ]
    return [
        Stream("activation", f"{site}_{number}", wish, is_compared=True)
        for site in ("copied", "sliced")
        for number, wish in enumerate(wishes)
    ]


def test_of_ranks_that_share_their_input_copies_count_once_and_parts_all() -> None:
    """Two groups of two: a replicated tensor, with NaN, once for each group; parts with one histogram and one count, all of them."""
    copies = [torch.randn(4, 6, generator=torch.Generator().manual_seed(group)) for group in range(2)]
    copies[1][2, 3] = torch.nan
    parts = [torch.tensor([[1.0 + rank / 8, 1.5 + rank / 16, torch.inf, -0.25 - rank / 64]] * 2) for rank in range(4)]

    def show(observation: StepAccumulator, plan: list[Stream], copied: Tensor | None, part: Tensor) -> None:
        for watch in plan:
            tensor = copied if watch.site.startswith("copied") else part
            if tensor is not None:
                observation.observe(watch, tensor)

    def work(rank: ThreadRank) -> tuple[dict[str, float], dict[str, Any]]:
        plan = compared()
        observation = StepAccumulator(no_trouble, SeriesState(plan))
        show(observation, plan, copies[rank.index // 2], parts[rank.index])
        return observation.collect(rank), observation.histograms

    alone, plan = StepAccumulator(no_trouble), compared()
    for index, part in enumerate(parts):
        show(alone, plan, copies[index // 2] if index % 2 == 0 else None, part)
    expected = alone.collect()
    meeting: Meeting[Any] = Meeting(4, num_sharing=2)
    for values, histograms in meeting.run(work):
        assert values == pytest.approx(expected, rel=1e-9, nan_ok=True)
        assert histograms == alone.histograms
    assert meeting.calls == ["max", "sum", "gather"]
    assert expected["activation/copied_1/positive"] == float(sum((one > 0).sum() for one in copies))
    assert expected["activation/sliced_1/positive"] == 24
    assert expected["activation/sliced_2/all.count"] == 32


def test_what_failed_on_one_rank_is_asked_of_none() -> None:
    """Results that an aggregate of the user's cannot have together; the ranks that have others do not wait for them."""

    def work(rank: ThreadRank) -> dict[str, float]:
        plan = wishes()
        observation = StepAccumulator(lambda watch, name, seen, error: None, SeriesState(plan))
        observation.observe(plan[2], torch.arange(4.0))
        if rank.index == 1:
            results = observation._results["activation/c/spread"][2]
            results.values.append("no tensor")  # type: ignore[arg-type]
        return observation.collect(rank)

    first, second = Meeting[Any](2).run(work)
    assert np.isnan(first["activation/c/spread"])
    assert np.isnan(second["activation/c/spread"])
    assert first["activation/c/total"] == second["activation/c/total"] == 12.0


def test_a_rank_that_cannot_say_what_it_has_seen_keeps_nobody_waiting() -> None:
    """Its error is its own, and the step is lost on all; nobody goes on to what takes more collectives."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], bool, str]:
        plan, error = wishes(), ""
        observation = StepAccumulator(no_trouble, SeriesState(plan))
        observation.observe(plan[2], torch.arange(4.0))
        if rank.index == 1:
            observation._table.collect = lambda num_rows: 1 // 0  # type: ignore[assignment,method-assign,return-value]
        values: dict[str, float] = {}
        try:
            values = observation.collect(rank)
        except ZeroDivisionError as caught:
            error = str(caught)
        return values, observation.is_lost, error

    meeting: Meeting[Any] = Meeting(3)
    found = meeting.run(work)
    assert [(values, is_lost, bool(error)) for values, is_lost, error in found] == [({}, True, index == 1) for index in range(3)]
    assert meeting.calls == ["max", "sum"]


def test_an_error_in_sending_comes_after_what_the_others_wait_for() -> None:
    """Where errors are raised, the rank with the stream that cannot be sent raises its own; the others go on."""

    def raises(stream: Stream, _name: str, _seen: str, error: Exception) -> None:
        raise MonitorError(stream.site) from error

    def work(rank: ThreadRank) -> str:
        accumulator = StepAccumulator(raises, SeriesState(wishes()))
        if rank.index == 1:
            odd = Statistic(PLAIN["norm"].needs, lambda moments: moments.mean)
            accumulator.observe(Stream("own", "odd", {"odd": odd}), torch.ones(2))
        try:
            accumulator.collect(rank)
        except MonitorError as error:
            return str(error)
        return ""

    assert Meeting[str](2).run(work) == ["", "odd"]
