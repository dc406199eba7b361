"""The reduction of a step: every rank gets the values of a single process with all tensors, by two collectives."""

from __future__ import annotations

import itertools
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
from lightning_module_monitor.statistics.functions import Function, Value
from lightning_module_monitor.statistics.registry import HistogramStatistic
from lightning_module_monitor.statistics.stream import Output, Stream
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.step.state import SeriesState

NUM_STREAMS = 6
PLAIN = {name: item for name, item in STATISTICS.items() if isinstance(item, Statistic) and not (item.compared_with or item.relative)}
RELATIVE = {name: item for name, item in STATISTICS.items() if isinstance(item, Statistic) and item.relative}
COSINES = {name: STATISTICS[name] for name in ("cosine_to_gradient", "cosine_to_previous")}
HISTOGRAM: dict[str, Output] = {"hist": HistogramStatistic()}


def quartiles(values: Tensor) -> dict[str, Tensor]:
    """An aggregate function of all values of a step."""
    return {"low": values.quantile(0.25), "high": values.quantile(0.75)}


def planned() -> list[Stream]:
    """The planned streams; each rank makes equal ones."""
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
        Stream("activation_difference", "d", {**PLAIN, **RELATIVE, "cosine": STATISTICS["cosine"]}),
        Stream("activation", "e", {"norm": PLAIN["norm"], **HISTOGRAM}),
        Stream("update", "f", {**PLAIN, **RELATIVE, **COSINES}),
    ]


class ObservedTensor:
    """A tensor of a planned stream, or of a further output of its module."""

    def __init__(self, stream: int, further: int, seed: int) -> None:
        self.stream, self.further = stream, further
        self.tensor = torch.randn(2 + seed % 4, 3, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)

    def observe_in(self, accumulator: StepAccumulator, plan: list[Stream]) -> None:
        stream = plan[self.stream]
        stream = stream if not self.further else stream.at(f"{stream.site}.output_{self.further}")
        if stream.kind == "activation_difference":
            accumulator.observe_pair(stream, self.tensor, self.tensor.flip(0))
        elif stream.kind == "update":
            if self.further:  # of some outputs of the planned stream
                stream = plan[self.stream].at(stream.site, ["norm", "cosine_to_previous"])
            accumulator.observe(stream, self.tensor)
            accumulator.measure_all([(stream, self.tensor + 1)], are_bases=True)
            for name in stream.compared_with:
                accumulator.measure_comparison(stream, name, self.tensor, self.tensor.flip(0), is_negated=name == "gradient")
        else:
            accumulator.observe(stream, self.tensor)


def no_error(stream: Stream, name: str, description: str, error: Exception) -> None:
    """Nothing fails here."""
    raise AssertionError(f"{stream.kind} {stream.site} {name}, {description}") from error


observations = st.builds(ObservedTensor, st.integers(0, NUM_STREAMS - 1), st.integers(0, 2), st.integers(0, 50))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(observations, max_size=6), min_size=2, max_size=4),
    st.lists(st.lists(observations, max_size=3), min_size=4, max_size=4),
)
def test_any_shares_give_what_one_process_would_have(first: list[list[ObservedTensor]], second: list[list[ObservedTensor]]) -> None:
    """Two steps: in the second the streams of the first are known, and only new streams need more than two collectives."""
    steps = [first, second[: len(first)]]
    expected = []
    for step in steps:
        alone, plan = StepAccumulator(no_error), planned()
        for observed in itertools.chain.from_iterable(step):
            observed.observe_in(alone, plan)
        expected.append((alone.collect().values, alone.histograms))

    def work(rank: ThreadRank) -> list[Any]:
        plan = planned()
        state, collected = SeriesState(plan), []
        for step in steps:
            accumulator = StepAccumulator(no_error, state)
            for observed in step[rank.index]:
                observed.observe_in(accumulator, plan)
            collected.append((accumulator.collect(rank).values, accumulator.histograms))
        return collected

    meeting: Meeting[list[Any]] = Meeting(len(first))
    for rank_results in meeting.run(work):
        for (values, histograms), (true_values, true_histograms) in zip(rank_results, expected, strict=True):
            assert values.keys() == true_values.keys()
            for key, value in true_values.items():
                assert values[key] == pytest.approx(value, rel=1e-6, abs=1e-9 * abs(value) + 1e-12, nan_ok=True), key
            assert histograms == true_histograms
    known = {(observed.stream, observed.further) for observed in itertools.chain.from_iterable(first) if observed.further}
    new = {(observed.stream, observed.further) for observed in itertools.chain.from_iterable(steps[1]) if observed.further} - known
    maxima = meeting.calls.count("max")
    assert maxima == meeting.calls.count("sum") == 2 + bool(known) + bool(new)


def test_parts_of_a_dict_that_a_function_returns_count_on_all_ranks() -> None:
    """Each part merges over ranks as a single result, also where one rank alone has it: the functions of a parameter run on rank 0."""

    def work(rank: ThreadRank) -> list[dict[str, float]]:
        functions: dict[str, Output] = {
            name: Function(name, function=lambda x: {"all": x.flatten(), "rows": len(x)} | ({"first": x[0]} if len(x) == 2 else {}))
            for name in ("mean", "sum", "max")
        }
        own_aggregate = Function(quartiles, function=lambda x: {"all": x.flatten()})
        streams = [
            Stream("activation", "a", functions),
            Stream("parameter", "a", {"sum": functions["sum"], "own": own_aggregate}, is_replicated=True),
        ]
        state, collected = SeriesState(streams), []
        for _step in range(2):
            accumulator = StepAccumulator(no_error, state)
            accumulator.observe(streams[0], torch.arange(2.0 + rank.index))
            if rank.index == 0:
                accumulator.observe(streams[1], torch.tensor([3.0, 4.0]))
            collected.append(accumulator.collect(rank).values)
        return collected

    expected = {"activation/a/mean.all": 4 / 5, "activation/a/sum.all": 4.0, "activation/a/max.all": 2.0}
    expected |= {"activation/a/mean.rows": (2 * 2 + 3 * 3) / 5, "activation/a/sum.rows": 5.0, "activation/a/max.rows": 3.0}
    expected |= dict.fromkeys((f"activation/a/{name}.first" for name in ("mean", "sum", "max")), 0.0)
    expected |= {"parameter/a/own.all.low": 3.25, "parameter/a/own.all.high": 3.75}
    expected |= {"parameter/a/sum.all": 7.0, "parameter/a/sum.rows": 2.0, "parameter/a/sum.first": 3.0}
    for values in Meeting[list[dict[str, float]]](2).run(work):
        assert values == [expected, expected]


def test_non_finite_results_are_kept() -> None:
    """A NaN result of one rank is NaN in every aggregate; an infinite one is infinite."""

    def work(rank: ThreadRank) -> dict[str, float]:
        accumulator = StepAccumulator(no_error, SeriesState(planned()))
        value = {0: 1.0, 1: float("nan"), 2: float("inf")}[rank.index]
        for name, aggregate in (("nan", "max"), ("least", "min"), ("total", "sum"), ("average", "mean")):
            shown = value if name == "nan" or rank.index != 1 else 2.0
            accumulator.add_result(Stream("own", name, {name: Value(aggregate)}), name, shown, 1)
        return accumulator.collect(rank).values

    for values in Meeting[dict[str, float]](3).run(work):
        assert np.isnan(values["own/nan/nan"])
        assert (values["own/least/least"], values["own/total/total"], values["own/average/average"]) == (1.0, np.inf, np.inf)


def test_errors_and_lost_steps_of_any_rank_hold_on_all() -> None:
    """Errors are summed, a stream that failed on any rank is NaN on all, and a step that any rank loses is lost on all."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], int, bool, bool]:
        plan = planned()
        errors: list[str] = []
        accumulator = StepAccumulator(lambda stream, name, description, error: errors.append(name), SeriesState(plan))
        accumulator.observe(plan[0], torch.ones(2, 3))
        if rank.index == 1:
            accumulator.fail(plan[0], torch.ones(2), ValueError("on purpose"))
        values = accumulator.collect(rank).values
        lost = StepAccumulator(no_error, SeriesState(plan))
        lost.is_lost = rank.index == 2
        lost.collect(rank)
        return values, accumulator.num_errors, bool(errors), lost.is_lost

    for index, (values, num_errors, has_errors, is_lost) in enumerate(Meeting[Any](3).run(work)):
        assert all(np.isnan(values[f"activation/a/{name}"]) for name in PLAIN)
        assert "activation/a/hist" not in values  # the key of a histogram is that of no number
        assert (num_errors, has_errors, is_lost) == (1, index == 1, True)


def test_an_aggregate_that_one_rank_alone_has_is_nan_elsewhere() -> None:
    """A value with an aggregate function that is logged on a single rank is computed there."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], list[str]]:
        errors: list[str] = []
        accumulator = StepAccumulator(lambda stream, name, description, error: errors.append(str(error)), SeriesState(planned()))
        if rank.index == 0:
            stream = Stream("own", "site", {"mine": Value(lambda values: values.max())})
            accumulator.add_result(stream, "mine", torch.tensor([1.0, 5.0]), 2)
        return accumulator.collect(rank).values, errors

    (first, nothing), (other, errors) = Meeting[Any](2).run(work)
    assert first["own/site/mine"] == 5.0
    assert nothing == []
    assert np.isnan(other["own/site/mine"])
    assert errors == ["its aggregate is not known on this rank; expected every rank to record it"]


def test_values_of_one_site_that_come_in_different_steps() -> None:
    """Each is sent to the other ranks in the step in which it is first observed."""

    def work(rank: ThreadRank) -> list[dict[str, float]]:
        state, collected = SeriesState(planned()), []
        for step in range(3):
            accumulator = StepAccumulator(no_error, state)
            for name in ("early", "late")[: 1 + (step > 0)]:
                accumulator.add_result(Stream("own", "site", {name: Value("sum")}), name, float(rank.index + step), 1)
            collected.append(accumulator.collect(rank).values)
        return collected

    for values in Meeting[Any](2).run(work):
        assert values == [
            {"own/site/early": 1.0},
            {"own/site/early": 3.0, "own/site/late": 3.0},
            {"own/site/early": 5.0, "own/site/late": 5.0},
        ]


def test_a_stream_that_other_ranks_cannot_make_is_reported_and_left_out() -> None:
    """An unregistered statistic in no rule: its rank records NaN, and all ranks get the other streams."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], list[str]]:
        failed: list[str] = []
        accumulator = StepAccumulator(lambda stream, name, description, error: failed.append(stream.site), SeriesState(planned()))
        if rank.index == 1:
            odd = Statistic(PLAIN["norm"].needs, lambda moments: moments.mean)
            accumulator.observe(Stream("own", "a", {"odd": odd}), torch.ones(2))
            accumulator.observe(Stream("own", "b", {"norm": PLAIN["norm"]}), torch.ones(4))
        return accumulator.collect(rank).values, failed

    (values, failed), (own_values, own_failed) = Meeting[Any](2).run(work)
    assert (failed, own_failed) == ([], ["a"])
    assert values == {"own/b/norm": 2.0}
    assert own_values["own/b/norm"] == 2.0
    assert np.isnan(own_values["own/a/odd"])


def compared() -> list[Stream]:
    """Streams of ranks that share their input; some have no output that differs between parts of a tensor."""
    positive = Function("sum", function=lambda x: (x > 0).sum())
    everything = Function(lambda values: {"sum": values.sum(), "count": values.numel()}, function=torch.flatten)
    alternatives: list[dict[str, Output]] = [
        HISTOGRAM,
        {"positive": positive},
        {"all": everything},
        {"nonfinite_count": PLAIN["nonfinite_count"]},
        {**PLAIN, **HISTOGRAM, "positive": positive},
    ]
    return [
        Stream("activation", f"{site}_{number}", outputs, is_compared=True)
        for site in ("copied", "sliced")
        for number, outputs in enumerate(alternatives)
    ]


def test_copies_on_ranks_that_share_their_input_count_once() -> None:
    """Two groups of two: a replicated tensor, with NaN, once for each group; parts with one histogram and one count, all of them."""
    copies = [torch.randn(4, 6, generator=torch.Generator().manual_seed(group)) for group in range(2)]
    copies[1][2, 3] = torch.nan
    parts = [torch.tensor([[1.0 + rank / 8, 1.5 + rank / 16, torch.inf, -0.25 - rank / 64]] * 2) for rank in range(4)]

    def observe_in(accumulator: StepAccumulator, plan: list[Stream], copied: Tensor | None, part: Tensor) -> None:
        for stream in plan:
            tensor = copied if stream.site.startswith("copied") else part
            if tensor is not None:
                accumulator.observe(stream, tensor)

    def work(rank: ThreadRank) -> tuple[dict[str, float], dict[str, Any]]:
        plan = compared()
        accumulator = StepAccumulator(no_error, SeriesState(plan))
        observe_in(accumulator, plan, copies[rank.index // 2], parts[rank.index])
        return accumulator.collect(rank).values, accumulator.histograms

    alone, plan = StepAccumulator(no_error), compared()
    for index, part in enumerate(parts):
        observe_in(alone, plan, copies[index // 2] if index % 2 == 0 else None, part)
    expected = alone.collect().values
    meeting: Meeting[Any] = Meeting(4, num_sharing=2)
    for values, histograms in meeting.run(work):
        assert values == pytest.approx(expected, rel=1e-9, nan_ok=True)
        assert histograms == alone.histograms
    assert meeting.calls == ["max", "sum", "gather"]
    assert expected["activation/copied_1/positive"] == float(sum((copied > 0).sum() for copied in copies))
    assert expected["activation/sliced_1/positive"] == 24
    assert expected["activation/sliced_2/all.count"] == 32


def test_results_that_failed_on_a_rank_are_not_gathered() -> None:
    """Results that cannot be concatenated for an aggregate function are NaN on all ranks, and no rank waits for them."""

    def work(rank: ThreadRank) -> dict[str, float]:
        plan = planned()
        accumulator = StepAccumulator(lambda stream, name, description, error: None, SeriesState(plan))
        accumulator.observe(plan[2], torch.arange(4.0))
        if rank.index == 1:
            results = accumulator._results._results["activation/c/spread"][2]
            results.values.append("no tensor")  # type: ignore[arg-type]
        return accumulator.collect(rank).values

    first, second = Meeting[Any](2).run(work)
    assert np.isnan(first["activation/c/spread"])
    assert np.isnan(second["activation/c/spread"])
    assert first["activation/c/total"] == second["activation/c/total"] == 12.0


def test_a_rank_that_cannot_collect_does_not_block_the_others() -> None:
    """It raises its error, and the step is lost on all; no rank begins further collectives."""

    def work(rank: ThreadRank) -> tuple[dict[str, float], bool, str]:
        plan, error = planned(), ""
        accumulator = StepAccumulator(no_error, SeriesState(plan))
        accumulator.observe(plan[2], torch.arange(4.0))
        if rank.index == 1:
            accumulator._table.collect = lambda num_rows: 1 // 0  # type: ignore[assignment,method-assign,return-value]
        values: dict[str, float] = {}
        try:
            values = accumulator.collect(rank).values
        except ZeroDivisionError as caught:
            error = str(caught)
        return values, accumulator.is_lost, error

    meeting: Meeting[Any] = Meeting(3)
    collected = meeting.run(work)
    assert [(values, is_lost, bool(error)) for values, is_lost, error in collected] == [({}, True, index == 1) for index in range(3)]
    assert meeting.calls == ["max", "sum"]


def test_an_error_in_sending_is_raised_after_the_collectives() -> None:
    """With `on_error: raise`, the rank whose stream cannot be sent raises; the other ranks continue."""

    def raises(stream: Stream, _name: str, _description: str, error: Exception) -> None:
        raise MonitorError(stream.site) from error

    def work(rank: ThreadRank) -> str:
        accumulator = StepAccumulator(raises, SeriesState(planned()))
        if rank.index == 1:
            odd = Statistic(PLAIN["norm"].needs, lambda moments: moments.mean)
            accumulator.observe(Stream("own", "odd", {"odd": odd}), torch.ones(2))
        try:
            accumulator.collect(rank)
        except MonitorError as error:
            return str(error)
        return ""

    assert Meeting[str](2).run(work) == ["", "odd"]
