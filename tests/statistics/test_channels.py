"""Channels that stand out: more than six times the rms of the median channel, over all calls, micro-batches and ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.casts import recorded
from helpers.ranks import Meeting, ThreadRank
from torch import Tensor, nn

from lightning_module_monitor import STATISTICS, ModuleMonitor, Rule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.statistics import channels
from lightning_module_monitor.statistics.stream import Output, Stream
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.step.state import SeriesState


def outliers(tensors: list[Tensor]) -> float:
    """The recorded number of outlying channels of all tensors together."""
    return recorded(tensors, ["outlier_channels"])["outlier_channels"]


def with_outliers(*numbers: int, shape: tuple[int, ...] = (4, 7, 32), dimension: int = -1, scale: float = 100.0) -> Tensor:
    """Normal numbers, in some channels a hundred times as large."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    x.movedim(dimension, 0)[list(numbers)] *= scale
    return x


def textbook(tensors: list[Tensor]) -> int:
    """By the formula, of tensors with features in the last dimension."""
    whole = np.concatenate([x.double().numpy().reshape(-1, x.shape[-1]) for x in tensors])
    rms = np.sqrt((whole**2).mean(0))
    return int((rms > 6 * np.median(rms)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "dimension"), [((40, 32), 1), ((4, 7, 32), 2), ((3, 32, 4, 5), 1), ((2, 32, 3, 4, 2), 1)])
def test_the_dimension_of_channels(shape: tuple[int, ...], dimension: int, dtype: torch.dtype) -> None:
    """That of ``dead_fraction``: channels of images and volumes, else features."""
    x = with_outliers(3, 17, 31, shape=shape, dimension=dimension).to(dtype)
    assert outliers([x]) == 3
    assert outliers([x * 1e-30]) == (3 if dtype != torch.float16 else 0)
    assert outliers([1e25 * x]) == 3


def test_all_calls_count_together() -> None:
    """A channel that stands out in one of many calls may be no outlier over all; calls of different numbers of elements are weighted."""
    calls = [with_outliers(5, shape=(9, 16), scale=8.0), *[with_outliers(2, shape=(rows, 16), scale=7.9) for rows in (5, 50, 500)]]
    assert outliers(calls[:1]) == textbook(calls[:1]) == 1
    assert outliers(calls) == textbook(calls) == 1
    assert outliers([*calls, torch.empty(0, 16)]) == 1
    narrow = torch.ones(10, 4)
    assert outliers([narrow, torch.full((10, 8), 2.0)]) == 0
    assert outliers([torch.ones(1000, 8), 1e4 * torch.ones(1, 2)]) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_element_that_is_not_finite(bad: float) -> None:
    """The number is NaN: a fault is never hidden. Zeros have no outliers."""
    x = with_outliers(1)
    x[0, 0, 9] = bad
    assert math.isnan(outliers([x]))
    assert outliers([torch.zeros(3, 5)]) == 0
    assert outliers([torch.tensor(3.0)]) == 0


def test_evenly_spaced_channels_of_a_large_layer() -> None:
    """Every third of 12,000."""
    x = torch.ones(2, 12_000)
    x[:, [0, 1, 3, 6, 7]] = 50.0
    assert outliers([x]) == 3


def test_ranks_together_are_as_one() -> None:
    """Two ranks with different numbers of elements, of which one observes nothing in the end; no collective more."""
    outputs: dict[str, Output] = {"outlier_channels": STATISTICS["outlier_channels"], "median": STATISTICS["median"]}  # type: ignore[dict-item]
    calls = [with_outliers(4, shape=(3, 16), scale=50.0), with_outliers(7, shape=(30, 16), scale=5.0), with_outliers(7, shape=(90, 16))]

    def work(rank: ThreadRank) -> list[float]:
        stream = Stream("activation", "fc", outputs)
        state, values = SeriesState([stream]), []
        for tensors in ([calls[:1], calls[1:2], calls[2:]][rank.index], [calls[0]] if rank.index == 1 else []):
            accumulator = StepAccumulator(lambda *_error: None, state)
            for tensor in tensors:
                accumulator.observe(stream, tensor)
            values.append(accumulator.collect(rank).values["activation/fc/outlier_channels"])
        return values

    meeting: Meeting[list[float]] = Meeting(3)
    assert meeting.run(work) == [[textbook(calls), textbook(calls[:1])]] * 3
    assert sorted(meeting.calls) == ["max", "max", "sum", "sum"]


def test_a_monitored_module() -> None:
    """Over the micro-batches of a step; only kinds whose tensors have channels have it."""
    model = nn.Identity()
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics=["outlier_channels"])]) as monitor:
        monitor.set_module(model)
        for step, numbers in enumerate([(1, 2), ()]):
            monitor.begin_step(step)
            for _micro_batch in range(2):
                model(with_outliers(*numbers))
                monitor.after_micro_batch()
            record = monitor.end_step()
            assert record is not None
            assert record.values["activation/_root_/outlier_channels"] == len(numbers)
    with pytest.raises(ConfigError, match="'outlier_channels' is of the units of a layer, and 'parameter' has none"):
        ModuleMonitor(rules=[Rule(kinds="parameter", statistics="outlier_channels")])


@pytest.mark.parametrize("shape", [(50, 7, 32), (60, 32), (9, 32, 4, 5), (32,)])
def test_a_large_tensor_is_widened_in_portions(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same sums as at once, and without a change of a float64 tensor."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, at_once = x.clone(), channels.channel_sums(x)
    monkeypatch.setattr(channels, "CPU_PORTION", 100)
    torch.testing.assert_close(channels.channel_sums(x), at_once)
    torch.testing.assert_close(channels.channel_sums(x)[:, :32].sum(1), torch.stack([x.square().sum(), torch.tensor(x.numel())]))
    assert torch.equal(x, before)
