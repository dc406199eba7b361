"""Streams: the outputs of one kind at one site."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from lightning_module_monitor.kernels.bins_of_floats import Bins, needed_bins
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.keys import MAX_STATISTIC_LENGTH, Key, fit_for_loggers
from lightning_module_monitor.kinds import TRAIN
from lightning_module_monitor.statistics.channels import ChannelStatistic, ChannelSums
from lightning_module_monitor.statistics.functions import Function, Value
from lightning_module_monitor.statistics.registry import HistogramStatistic, Statistic
from lightning_module_monitor.statistics.spectral_statistics import Source, SpectralStatistic
from lightning_module_monitor.statistics.units import UNITS, UnitCounts, UnitStatistic

OWN, BASE, OTHER, PRODUCT, PREVIOUS, PREVIOUS_PRODUCT = range(6)
"""Row offsets of a stream in the table: the tensor; the tensor that it is relative to (of a difference the reference); the tensor that it
is compared with (the gradient; of a difference the model's tensor), and the product of both; the tensor of the previous monitored step, and
the product with that."""

COMPARED_ROWS = {"reference": (OTHER, BASE, PRODUCT), "gradient": (OWN, OTHER, PRODUCT), "previous": (OWN, PREVIOUS, PREVIOUS_PRODUCT)}
"""The rows of two tensors and of their product, by what a statistic compares with."""

Output: TypeAlias = Statistic | HistogramStatistic | ChannelStatistic | UnitStatistic | Value
"""An output of a stream: a number made of moments, counts of bins, sums of channels, units, the result of a function, or a value."""


Sums: TypeAlias = Bins | ChannelSums | UnitCounts
"""The content of a row of numbers that are added over ranks."""


class Identity(NamedTuple):
    """A name of a stream that is unique among streams, and equal on every rank."""

    kind: str
    site: str
    stage: str
    prefix: str
    outputs: tuple[str, ...]
    """Names of the outputs."""


@dataclass(frozen=True, eq=False)
class Stream:
    """The outputs that all rules together record for one kind at one site. Streams are compared by identity.

    Attributes:
        kind: A key of ``KINDS``.
        site: Name of the module or parameter.
        outputs: What is recorded, by the name in the key.
        stage: ``train``, ``validation``, ``test`` or ``predict``.
        prefix: Put before every key.
        is_compared: Whether ranks that share their input compare their tensors; equal ones count once.
        is_replicated: Whether the tensor is expected to be equal on every rank; it then counts once.
        is_nonnegative: Whether no element of the tensor is negative, as of a ReLU.
        origin: The stream of the module, if this one is for a further site of it; that of the output, if this one is of a part of it.
        members: For a total, the streams whose moments are merged into its own; no probe observes a total.
        shared: The outputs of totals that this stream is a member of. They need its moments, and have no keys here.
    """

    kind: str
    site: str
    outputs: Mapping[str, Output] = field(default_factory=dict)
    stage: str = TRAIN
    prefix: str = ""
    is_compared: bool = False
    is_replicated: bool = False
    is_nonnegative: bool = False
    origin: Stream | None = None
    members: tuple[Stream, ...] = ()
    shared: Mapping[str, Output] = field(default_factory=dict)
    _derived: dict[object, Stream] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def identity(self) -> Identity:
        """Its name among streams."""
        return Identity(self.kind, self.site, self.stage, self.prefix, tuple(self.outputs))

    @functools.cached_property
    def statistics(self) -> dict[str, Statistic]:
        """The outputs that are made of moments."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, Statistic)}

    @functools.cached_property
    def channels(self) -> dict[str, ChannelStatistic]:
        """The outputs that are made of sums over channels."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, ChannelStatistic)}

    @functools.cached_property
    def units(self) -> dict[str, UnitStatistic]:
        """The outputs that are of units which are alive or not."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, UnitStatistic)}

    @functools.cached_property
    def values(self) -> dict[str, Value]:
        """The outputs that are results of functions, or are computed elsewhere."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, Value)}

    @functools.cached_property
    def spectral(self) -> dict[str, SpectralStatistic]:
        """The values that are statistics of singular values."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, SpectralStatistic)}

    @functools.cached_property
    def sources(self) -> frozenset[Source]:
        """The sources of these."""
        return frozenset(statistic.source(self.kind) for statistic in self.spectral.values())

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        """The functions that get the stream's tensors."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, Function)}

    @functools.cached_property
    def needs(self) -> int:
        """The moments and counts that its statistics are computed from, bits of ``Need``."""
        needs = functools.reduce(operator.or_, (output.needs for output in self._finished()), Need.NOTHING)
        # Shards that differ can have equal histograms or results. These moments distinguish them.
        compared = Need.MEAN | Need.SQUARES | Need.EXTREMES if self.is_compared else 0
        is_counted = any(isinstance(output, HistogramStatistic) for output in (*self.outputs.values(), *self.shared.values()))
        return needs | (Need.HISTOGRAM if is_counted else 0) | compared | (Need.MEAN | Need.SQUARES if self.is_replicated else 0)

    @functools.cached_property
    def counted_bins(self) -> tuple[Bins, ...]:
        """The sets of bins in which its elements are counted."""
        return needed_bins(self.needs)

    @functools.cached_property
    def channel_sums(self) -> tuple[ChannelSums, ...]:
        """The sums from which the statistics of channels are computed."""
        return tuple(dict.fromkeys(statistic.sums for statistic in self.channels.values()))

    @functools.cached_property
    def rows_of_sums(self) -> tuple[Sums, ...]:
        """The rows of its numbers that are added over ranks: counts, sums of channels, and units."""
        return (*self.counted_bins, *self.channel_sums, *([UNITS] if self.units else []))

    @functools.cached_property
    def base_needs(self) -> int:
        """The moments of the base that relative statistics need; 0 without such a statistic."""
        needs = functools.reduce(operator.or_, (output.needs for output in self._finished() if output.relative), 0)
        return needs | (Need.SQUARES if "reference" in self.compared_with else 0)

    @functools.cached_property
    def compared_with(self) -> frozenset[str]:
        """The names of the tensors that statistics compare with."""
        return frozenset(output.compared_with for output in self._finished() if output.compared_with)

    def _finished(self) -> Iterator[Statistic]:
        """The statistics that are computed from its moments."""
        return (output for output in (*self.outputs.values(), *self.shared.values()) if isinstance(output, Statistic))

    @functools.cached_property
    def depends_on_features(self) -> bool:
        """Whether an output depends on the dimension of the features: norms of tokens, units, channels, the user's functions."""
        return bool(self.needs & Need.TOKENS or self.functions or self.channel_sums or self.units or self.sources)

    @functools.cached_property
    def num_rows(self) -> int:
        """Number of its rows in the table."""
        last = max((row for name in self.compared_with for row in COMPARED_ROWS[name]), default=OWN)
        return max(last, BASE if self.base_needs else OWN) + 1

    @functools.cached_property
    def series(self) -> dict[str, Key]:
        """The key of every output, by its name; a function that returns a dict has a key for each part instead."""
        fit = {name: fit_for_loggers(name, MAX_STATISTIC_LENGTH) for name in self.outputs}
        return {name: Key(self.kind, self.site, short, self.stage, self.prefix) for name, short in fit.items()}

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """These keys as loggers and the store know them."""
        return {name: key.format() for name, key in self.series.items()}

    @functools.cached_property
    def histogram_keys(self) -> list[str]:
        """Keys of the histograms."""
        return [self.keys[name] for name, output in self.outputs.items() if isinstance(output, HistogramStatistic)]

    @functools.cached_property
    def numbers(self) -> list[Key]:
        """Keys of the numbers: of statistics, functions, values, channels and units, in this order."""
        return [self.series[name] for name in (*self.statistics, *self.values, *self.channels, *self.units)]

    @functools.cached_property
    def number_keys(self) -> list[str]:
        """These keys as loggers and the store know them."""
        return [key.format() for key in self.numbers]

    @functools.cached_property
    def planned_keys(self) -> list[str]:
        """The keys of numbers that are known before the first step; a result that may be a dict has none."""
        unknown = {self.keys[name] for name, output in self.values.items() if not (output.is_merged_by_name or name in self.spectral)}
        return [key for key in self.number_keys if key not in unknown]

    def part(self, name: str, part: object) -> tuple[Stream, str]:
        """The stream of one part of an output that is a dict, and the part's name there; ``""`` is the output itself."""
        if part == "":
            return self, name
        part_name, value = f"{name}.{part}", Value(self.values[name].aggregate)
        # The functions of a parameter are called on one rank alone: no other rank has to have the value.
        return self.derive(("part", part_name), outputs={part_name: value}, shared={}, origin=self, is_replicated=False), part_name

    def derived(self, site: str, names: Sequence[str]) -> Stream:
        """The stream that another rank has derived: for a further site with these outputs, or of a part of an output."""
        if site != self.site:
            return self.at(site, names)
        [part_name] = names
        name = max((name for name in self.values if part_name.startswith(f"{name}.")), key=len)
        return self.part(name, part_name.removeprefix(f"{name}."))[0]

    def at(self, site: str, names: Iterable[str] | None = None) -> Stream:
        """The same for a further site, as a further output of the module; with ``names`` only these of its outputs.

        For one site and the same names always the same object.
        """
        chosen = (*self.outputs,) if names is None else (*names,)
        if len(chosen) == len(self.outputs):
            return self.derive(site, site=site, origin=self)
        return self.derive((site, chosen), site=site, outputs={name: self.outputs[name] for name in chosen}, origin=self)

    def derive(self, name: object, **changes: Any) -> Stream:  # values of fields
        """The stream with other values of some fields: for one name always the same object."""
        stream = self._derived.get(name)
        if stream is None:
            stream = self._derived[name] = replace(self, **changes)
        return stream
