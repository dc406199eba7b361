"""How a step is timed and counted, with all variants side by side."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lanes import CPU, NUM_BATCHES, SEED, Lane, LoopLane, make_batches
from lightning_module_monitor.kernels import elements
from observers import Engine, Observer
from variants import CALLBACK, OURS, PLAIN, TIMED, Variant
from workloads import Batch, Workload

WARM_UP_STEPS = 5
NUM_RESAMPLES = 1000
"""How often the rounds are drawn anew, to estimate the uncertainty of a figure."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipModuleLaunchKernel")
"""Beginnings of the names of the calls that launch a kernel; some end in ``ExC`` or ``Ex``."""
WAITS = tuple(f"{prefix}{what}Synchronize" for prefix in ("cuda", "hip") for what in ("Device", "Stream", "Event"))
"""Beginnings of the names of the calls that wait for the device."""
COPIES_TO_HOST, COPIES_TO_DEVICE = "Memcpy DtoH", "Memcpy HtoD"
"""Beginnings of the names of copies, as the device reports them."""


class Times(NamedTuple):
    """What one step takes."""

    seconds: float
    """By the clock that the ratios are made of."""
    wall_seconds: float


class Processor:
    """The CPU: the time is the CPU time of the process."""

    is_gpu = False
    device = CPU

    def time(self, step: Callable[[], object]) -> Times:
        """Take a step."""
        wall, start = time.perf_counter(), time.process_time()
        step()
        seconds = time.process_time() - start
        return Times(seconds, time.perf_counter() - wall)

    def allocated(self) -> int:
        """Bytes of tensors on the device, where that is counted."""
        return 0

    def peak(self, step: Callable[[], object]) -> int:
        """The largest number of bytes on the device in a step, where that is counted."""
        return 0


@dataclass(frozen=True)
class Counts:
    """What one step does, in numbers that are the same on every machine but for the last."""

    dispatches: int
    host_reads: int
    transfers: int
    values: int
    launches: int = 0
    copies_to_host: int = 0
    copies_to_device: int = 0
    waits: int = 0
    """Calls that wait for the device, those of the profiler itself among them."""
    device_seconds: float = 0.0
    """Time of all kernels and copies."""


def profiler(device: torch.device) -> profile:
    """Torch's profiler for the steps of a thread."""
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])])


def set_up_profiler(device: torch.device) -> None:
    """Use the profiler in the main thread: where it is first used in another one it prints an error."""
    with profiler(device):
        pass


def count(lane: Lane, batch: Batch, device: torch.device = CPU) -> Counts:
    """Take one step under torch's profiler and count; under a dispatch mode nothing would be observed."""
    recorded = profiler(device)
    with mock.patch.object(elements, "transfer", wraps=elements.transfer) as transfers:
        values = lane.train_step(batch, recorded)
    events = recorded.events() or []
    operations = [event for event in events if event.name.startswith("aten::")]
    host_reads = sum(event.name == "aten::_local_scalar_dense" for event in operations)

    def called(names: str | tuple[str, ...]) -> int:
        return sum(event.name.startswith(names) for event in events)

    return Counts(
        sum(map(_is_outermost, operations)),
        host_reads,
        transfers.call_count,
        values,
        launches=called(LAUNCHES),
        copies_to_host=called(COPIES_TO_HOST),
        copies_to_device=called(COPIES_TO_DEVICE),
        waits=called(WAITS),
        device_seconds=sum(event.time_range.elapsed_us() for event in events if is_on_device(event)) / 1e6,
    )


def is_on_device(event: FunctionEvent) -> bool:
    """Whether it is a kernel or a copy, and not the span of a name that the host gave to several."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def _is_outermost(operation: FunctionEvent) -> bool:
    """Whether no other operation has called it."""
    caller = operation.cpu_parent
    while caller is not None and not caller.name.startswith("aten::"):
        caller = caller.cpu_parent
    return caller is None


@contextmanager
def exact(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Norm and std of every activation and parameter in float64 by key; activations are added when the block is left."""
    outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str, _module: nn.Module, _args: object, output: Tensor) -> None:
        outputs[f"activation/{name or '_root_'}"].append(output.detach().double().flatten())

    def note(site: str, elements: Tensor) -> None:
        expected[f"{site}/norm"] = elements.square().sum().sqrt()
        expected[f"{site}/std"] = ((elements - elements.mean()).square().sum() / (len(elements) - 1)).sqrt()

    expected: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        note(f"parameter/{name}", parameter.detach().double().flatten())
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()]
    try:
        yield expected
    finally:
        for handle in handles:
            handle.remove()
    for site, calls in outputs.items():
        note(site, torch.cat(calls))


def largest_errors(lane: LoopLane, batch: Batch) -> dict[str, float]:
    """Largest relative error of std and of norm against float64, over the activations and parameters of one step."""
    assert isinstance(lane.observer, Engine)
    with exact(lane.model) as expected:
        lane.train_step(batch)
    found = lane.observer.monitor.get_step_metrics()
    errors = {"std": 0.0, "norm": 0.0}
    for key, tensor in expected.items():
        value, right = found[key], tensor.item()
        # Where the right value is zero (a bias that never moved), only zero is right.
        error = abs(value - right) / right if right else (0.0 if value == 0 else float("inf"))
        statistic = key.rpartition("/")[2]
        errors[statistic] = max(errors[statistic], error)
    return errors


def num_outputs(lane: Lane, batch: Batch) -> int:
    """How many outputs the modules of a model give in a step."""
    calls = []
    handles = [module.register_forward_hook(lambda *_args: calls.append(1)) for module in lane.model.modules()]
    lane.train_step(batch)
    for handle in handles:
        handle.remove()
    return len(calls)


@dataclass
class Result:
    """What was found on one workload; dicts are by name of the variant."""

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative error of our engine by statistic."""
    own_seconds: dict[str, list[float]] = field(default_factory=dict)
    """CPU time of the own calls of the variants in ``TIMED``, in further rounds."""
    wall_seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Largest memory of a step, with the model, the optimizer and the observer of that variant alone."""
    num_outputs: int = 0
    place: Processor = field(default_factory=Processor)

    def ratios(self, name: str, base: str = PLAIN) -> list[float]:
        """Time of a variant's step, in plain steps of the same round."""
        return [second / plain for second, plain in zip(self.seconds[name], self.seconds[base], strict=True)]

    def added(self, name: str, base: str = PLAIN) -> float:
        """What a variant adds to a plain step, as a fraction of it; the median over the rounds."""
        return statistics.median(self.ratios(name, base)) - 1

    def differences(self, name: str, other: str) -> list[float]:
        """Seconds by which a variant's step takes longer than another's of the same round; what slows a round down is in both."""
        return [second - less for second, less in zip(self.seconds[name], self.seconds[other], strict=True)]

    def beyond(self, name: str, other: str) -> float:
        """The median of these differences."""
        return statistics.median(self.differences(name, other))

    def resampled(self) -> Iterator[Result]:
        """As many of the rounds, drawn with replacement."""
        draw, rounds = random.Random(SEED), range(len(next(iter(self.seconds.values()))))
        for _ in range(NUM_RESAMPLES):
            drawn = draw.choices(rounds, k=len(rounds))
            again = [{name: [seconds[i] for i in drawn] for name, seconds in kind.items()} for kind in (self.seconds, self.own_seconds)]
            yield replace(self, seconds=again[0], own_seconds=again[1])

    def extra(self, name: str, base: str = PLAIN) -> Counts:
        """What a variant's step does beyond a plain one: an optimizer reads values on the host too."""
        own, plain = self.counts[name], self.counts[base]
        return replace(
            own,
            dispatches=own.dispatches - plain.dispatches,
            host_reads=own.host_reads - plain.host_reads,
            launches=own.launches - plain.launches,
        )


def measure(
    workload: Workload,
    variants: Sequence[Variant],
    num_steps: int,
    precision: str,
    *,
    place: Processor | None = None,
    most_seconds: float = math.inf,
) -> Result:
    """Train all variants side by side, one step of each in a round; count in further steps.

    Args:
        workload: The model and its data.
        variants: What is compared; those that are not for this workload are left out.
        num_steps: Number of rounds.
        precision: By Lightning's name, where the workload has none of its own.
        place: Where to train.
        most_seconds: No further round begins after so many seconds of rounds.
    """
    place = place or Processor()
    precision = workload.precision or precision
    batches = make_batches(workload, place.device)
    result = Result(workload, place=place)
    # The first step allocates what libraries keep for the whole process.
    LoopLane(lambda _model: Observer(), workload, precision, place.device).train_step(batches[0])
    set_up_profiler(place.device)
    lanes: dict[str, Lane] = {}
    with ExitStack() as stack:
        for variant in variants:
            if workload.name not in variant.workloads:
                continue
            before = place.allocated()
            lane = lanes[variant.name] = variant.start(workload, precision, place.device)
            stack.callback(lane.close)
            for step in range(WARM_UP_STEPS):
                lane.train_step(batches[step % NUM_BATCHES])
            result.peak_bytes[variant.name] = place.peak(partial(lane.train_step, batches[0])) - before
        time_rounds(lanes, batches, num_steps, result, most_seconds)
        if torch.get_num_threads() == 1 and not place.is_gpu:  # another thread that waits for work in a loop would be counted
            time_own_calls({name: lane for name, lane in lanes.items() if name in TIMED}, batches, num_steps, result)
        for name, lane in lanes.items():
            result.counts[name] = count(lane, batches[0], place.device)
            if name == CALLBACK:
                result.num_outputs = num_outputs(lane, batches[0])
            if name == OURS and isinstance(lane, LoopLane):
                result.errors = largest_errors(lane, batches[0])
    return result


def time_own_calls(lanes: Mapping[str, Lane], batches: Sequence[Batch], num_rounds: int, result: Result) -> None:
    """Time the observers' own calls, in as many rounds again.

    The difference of two steps does not show a hundredth of a step where steps differ by more from round to round.
    """
    result.own_seconds.update({name: [] for name in lanes})
    for step in range(num_rounds):
        for name, lane in lanes.items():
            result.own_seconds[name].append(lane.own_seconds(batches[step % NUM_BATCHES]))


def time_rounds(
    lanes: Mapping[str, Lane], batches: Sequence[Batch], num_rounds: int, result: Result, most_seconds: float = math.inf
) -> None:
    """Time a step of each lane in every round, as long as there is time for another one."""
    shuffle = random.Random(SEED)
    order = list(lanes)
    for name in lanes:
        result.seconds[name], result.wall_seconds[name] = [], []
    gc.collect()
    gc.freeze()  # existing objects are not traversed in a timed step; what a variant leaves behind is its own cost
    end = time.monotonic() + most_seconds
    try:
        for step in itertools.takewhile(lambda _step: time.monotonic() < end, range(num_rounds)):
            shuffle.shuffle(order)  # no variant always follows the one that empties the caches
            for name in order:
                times = result.place.time(partial(lanes[name].train_step, batches[step % NUM_BATCHES]))
                result.seconds[name].append(times.seconds)
                result.wall_seconds[name].append(times.wall_seconds)
    finally:
        gc.unfreeze()
