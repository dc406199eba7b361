"""All that is observed in one monitored step (or one validation loop), until it is finished into values by key."""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_module_monitor.distributed.reduce import DistributedReducer
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.kernels.elements import strided
from lightning_module_monitor.kernels.moments import Moments, Need, merged, moments_of_rows
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.kernels.torch_kernel import has_float64
from lightning_module_monitor.kernels.transfer import to_host
from lightning_module_monitor.statistics.functions import Results, UserFunction, by_part, undisturbed
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.registry import dead_fraction, in_either, is_alive
from lightning_module_monitor.statistics.results import GlobalResult, LocalResult, SeriesState
from lightning_module_monitor.statistics.spec import BASE, CURRENT, OWN, PRODUCT, Identity, MetricSpec

OnError = Callable[[MetricSpec, str, str, Exception], None]
"""Receives what could not be computed: specification, statistic or function, of what, cause."""


class StepAccumulator:
    """Takes tensors while a step runs, without a host read, and returns their values at its end."""

    def __init__(self, on_error: OnError, state: SeriesState | None = None) -> None:
        self._on_error = on_error
        self._state = SeriesState() if state is None else state
        self._table = MomentTable()
        self._rows: dict[MetricSpec, int] = {}
        """First row of what was observed."""
        self._results: dict[str, tuple[MetricSpec, str, Results]] = {}
        self._metrics: dict[str, tuple[MetricSpec, str, Metric]] = {}
        self._units: dict[MetricSpec, Tensor] = {}
        """Which units of a site were alive, on their device."""
        self.whole_tokens: set[MetricSpec] = set()
        """Those whose tensor is a single token that several ranks have parts of; its norm is that of all elements."""
        self.parts: set[MetricSpec] = set()
        """Those of whose tensor this rank has a part that no other rank counts."""
        self._failed: set[str] = set()
        self._uncounted: set[str] = set()
        """Keys of histograms that some elements are missing from."""
        self.num_errors = 0
        self.is_lost = False
        """Whether an error has ended the monitoring of this step, on any rank once :meth:`collect` was called."""
        self.differing: Sequence[MetricSpec] = ()
        """Of what ranks have different values, and should have the same, once :meth:`collect` was called."""
        self.histograms: dict[str, Histogram] = {}
        """Histogram by key, once :meth:`collect` was called; one that could not be counted is absent."""

    def observe(self, spec: MetricSpec, tensor: Tensor) -> None:
        """Take one tensor; it may be overwritten as soon as this returns. One that cannot be read is reported.

        Args:
            spec: What is recorded of it.
            tensor: Any shape, any real floating dtype; may be part of a graph, which is left as it is.
        """
        try:
            if spec.needs:
                self._table.add((self._row(spec),), tensor, spec.needs)
            if spec.units and tensor.numel():
                units = is_alive(strided(tensor).detach())
                self._units[spec] = in_either(self._units[spec], units) if spec in self._units else units
            if spec.functions:
                self.call_functions(spec, tensor)
        except MonitorError:
            raise
        except Exception as error:
            self.fail(spec, tensor, error)

    def observe_for(self, terms: Iterable[tuple[Difference, Sequence[tuple[MetricSpec, int]]]]) -> None:
        """Take tensors, each for several rows, and measure it once where they need no more than another of them does.

        Args:
            terms: Differences of tensors as :meth:`observe` takes them, each with specifications, and for each of these the row that it
                is for: ``OWN`` or ``BASE``.
        """
        for term, targets in terms:
            rows: dict[int, list[int]] = {}
            for spec, part in targets:
                needs = spec.base_needs if part == BASE else spec.needs
                # A row without a histogram gets none of another's.
                enough = (one for one in rows if not needs & ~one and not (needs ^ one) & Need.HISTOGRAM)
                if needs:
                    rows.setdefault(next(enough, needs), []).append(self._row(spec) + part)
                if spec.functions and part == OWN:
                    self.call_functions(spec, strided(term.written()))
            for needs, of_needs in rows.items():
                self._table.add(of_needs, term.tensor, needs, term.other, term.shift)

    def observe_pair(self, spec: MetricSpec, current: Tensor, reference: Tensor) -> None:
        """Take the difference of two tensors, the model's and the reference's, and what its statistics need of either.

        Raises:
            ValueError: If their shapes differ.
        """
        self.measure_pair(spec, current, reference)
        self.call_functions(spec, current, reference)

    def measure_pair(self, spec: MetricSpec, current: Tensor, reference: Tensor) -> None:
        """:meth:`observe_pair` without the functions: of tensors that are parts of what a function receives."""
        current, reference = strided(current), strided(reference)
        difference = Difference(current, reference)
        if spec.statistics or spec.histograms:
            row = self._row(spec)
            if spec.needs:
                self._table.add((row + OWN,), difference.tensor, spec.needs, difference.other)
            if spec.base_needs:
                self._table.add((row + BASE,), reference, spec.base_needs)
            if spec.is_paired:
                self._table.add((row + CURRENT,), current, Need.SQUARES)
                # In float64, where a product neither rounds nor leaves the range: its mean is the inner product's.
                wide = torch.float64 if has_float64(current.device) else torch.float32
                self._table.add((row + PRODUCT,), current.to(wide) * reference, Need.MEAN)

    def observe_all(self, pairs: Iterable[tuple[MetricSpec, Tensor]]) -> None:
        """Like :meth:`observe` for many tensors that exist at the same time, which is cheaper. What cannot be read fails alone."""
        pairs = list(pairs)
        self.measure_all(pairs)
        for spec, tensor in pairs:
            self.call_functions(spec, tensor)

    def measure_all(self, pairs: Iterable[tuple[MetricSpec, Tensor]]) -> None:
        """:meth:`observe_all` without the functions: of tensors that are parts of what a function receives."""
        measured = [(spec, tensor) for spec, tensor in pairs if spec.needs]
        rows, needs = [self._row(spec) for spec, _tensor in measured], [spec.needs for spec, _tensor in measured]
        try:
            failed = self._table.add_all(rows, [tensor for _spec, tensor in measured], needs)
        except Exception:
            for spec, _tensor in measured:  # it is not known how many were added
                self._give_up(spec)
            raise
        for place, error in failed:
            self.fail(*measured[place], error)

    def observe_rows(self, specs: Sequence[MetricSpec], values: Tensor, counts: Tensor) -> None:
        """Take a short tensor for each of several specifications, of which not every element has to count.

        Args:
            specs: What is recorded of each row.
            values: Shape ``(specifications, elements)``, any real floating dtype, detached. Every element is a token of its own.
            counts: Which elements count, of the same shape. A function gets NaN in place of those that do not.
        """
        values = strided(values)
        measured = [place for place, spec in enumerate(specs) if spec.needs & Need.EVERYTHING]
        if measured:
            needs = functools.reduce(operator.or_, (specs[place].needs for place in measured))
            moments = moments_of_rows(values, counts, needs)
            if len(measured) < len(specs):
                moments = moments.rows(torch.tensor(measured, device=values.device))
            self._table.add_moments([self._row(specs[place]) for place in measured], moments)
        for spec, row, of_row in zip(specs, values, counts, strict=True):
            if spec.histograms:
                self._table.add_counts(self._row(spec), row, of_row)
            if spec.functions:
                self.call_functions(spec, torch.where(of_row, row, torch.nan))

    def observe_base(self, pairs: Iterable[tuple[MetricSpec, Tensor]]) -> None:
        """Take what relative statistics are relative to, for specifications that have one."""
        for spec, tensor in pairs:
            if spec.base_needs:
                try:
                    self._table.add((self._row(spec) + BASE,), tensor, spec.base_needs)
                except Exception as error:
                    self.fail(spec, tensor, error)

    def call_functions(self, spec: MetricSpec, *tensors: Tensor) -> None:
        """Give a tensor, or both of a pair, to the user's functions, and to nothing else."""
        for function in spec.functions.values():
            try:
                with undisturbed(tensors[0].device):
                    # Copies, without their graph: the function may write into them, and a torchmetrics object may keep them,
                    # while the layer after this one overwrites the original.
                    copies = [strided(tensor).detach().clone() for tensor in tensors]
                    if isinstance(function.function, Metric):
                        self._update_metric(spec, function.function, function.name, copies)
                    else:
                        self.add_result(spec, function, function.function(*copies), tensors[0].numel())
            except Exception as error:
                self._fail(spec, function.name, _describe(tensors[0]), error)

    def add_result(self, spec: MetricSpec, function: UserFunction, result: object, num_elements: int) -> None:
        """Take a result that was computed elsewhere: a real tensor of any shape or a number, from so many elements.

        Raises:
            TypeError: If it is neither tensor nor number.
        """
        key = spec.key(function.name)
        if key not in self._results:
            self._results[key] = (spec.with_function(function), function.name, Results(function.aggregate))
        self._results[key][2].add(result, num_elements)

    def drop_overwriting(self, logged: Collection[MetricSpec]) -> list[str]:
        """Discard the results of some specifications whose keys are those of what was measured; returns the keys."""
        results = [key for key, (spec, *_rest) in self._results.items() if spec.origin in logged]
        measured = set(itertools.chain.from_iterable(spec.keys() for spec in self._rows if results))
        dropped = [key for key in results if key in measured]
        for key in dropped:
            del self._results[key]
        return dropped

    def fail(self, spec: MetricSpec, observed: object, error: Exception) -> None:
        """Note that nothing of a specification could be computed of what was observed."""
        self.num_errors += 1
        self._give_up(spec)
        self._on_error(spec, ", ".join((*spec.statistics, *spec.histograms, *spec.functions, *spec.units)), _describe(observed), error)

    # The end of the step

    def collect(self, reducer: DistributedReducer | None = None) -> dict[str, float]:
        """Finish everything, :attr:`histograms` too: one transfer per device.

        Args:
            reducer: Reduces what all ranks have observed, on each of which this is called; ``None`` where there is one.

        Returns:
            Value by key. A site that was not observed is absent; what could not be computed is NaN.
        """
        result = self._on_host() if reducer is None else self._reduced(reducer)
        if self.is_lost:
            # No rank goes on: the one that lost the step may have nothing to go on with.
            return {}
        whole_tokens = {row for spec, row in result.rows if spec in self.whole_tokens} if self.whole_tokens else ()
        values = self._state.layout(result.rows).finish(result.moments, whole_tokens, self._fail)
        values.update(result.values)
        for spec, units in result.units:
            for key in map(spec.key, spec.units):
                self._state.units[key].append(units.numpy())
                values[key] = dead_fraction(self._state.units[key])
        by_key = {key: Histogram(row.numpy()) for spec, row in result.counted for key in spec.histogram_keys}
        self.histograms = {key: histogram for key, histogram in by_key.items() if key not in self._uncounted}
        values.update(dict.fromkeys(self._failed, float("nan")))
        return values

    def _on_host(self) -> GlobalResult:
        """What this process has observed, where there is no other."""
        parts = self._finished_parts()
        moments, counts, units, scalars = self._transferred([value for _key, part in parts for value in part.values])
        counted, sizes = [spec for spec in self._rows if spec.histograms], [*map(len, self._units.values())]
        of_part = scalars.split([len(part.values) for _key, part in parts]) if parts else ()
        return GlobalResult(
            rows=[*self._rows.items()],
            moments=moments,
            counted=[*zip(counted, counts.long(), strict=True)] if counted else [],
            units=[*zip(self._units, (units > 0).split(sizes), strict=True)] if sizes else [],
            values={key: part.merge(one) for (key, part), one in zip(parts, of_part, strict=True)},
        )

    def _transferred(self, scalars: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copy moments, counts of histograms, units and some scalars to the host by one transfer per device; all float64.

        Returns:
            Moments, shape ``(NUM_FIELDS, rows)``; counts, shape ``(counted rows, NUM_COUNTS)``; units and scalars, one after the other.
        """
        num_rows, counted = len(self._state.specs), [row for spec, row in self._rows.items() if spec.histograms]
        counts, units = self._table.collect_counts(counted), [*self._units.values()]
        shares, others = to_host(self._table.collect(num_rows), scalars + counts + units)
        sizes = [len(scalars), len(counts) * len(counted) * NUM_COUNTS, sum(map(len, units))]
        # Each operation of torch counts at the end of a step, and nearly always there is nothing but moments.
        of_scalars, of_counts, of_units = others.split(sizes) if len(others) else (others, others, others)
        if counted:
            of_counts = of_counts.view(len(counts), len(counted), NUM_COUNTS).sum(0)
        return merged(shares, num_rows, torch.device("cpu")), of_counts, of_units, of_scalars

    def _reduced(self, reducer: DistributedReducer) -> GlobalResult:
        """What all ranks have observed."""
        try:
            result = reducer.reduce(self._local, self._cannot_send)
        except Exception:
            self.is_lost = True
            raise
        for spec in result.failed:
            self._give_up(spec)
        self._failed.update(result.failed_keys)
        self.num_errors, self.is_lost, self.differing = result.num_errors, result.is_lost, result.differing
        if not self.is_lost:
            # What takes more collectives comes before all that may fail: an error keeps this rank from none of them.
            for key, part in self._reduced_parts(result, reducer):
                result.values[key] = part.merge(torch.stack([value.to("cpu") for value in part.values]))
        return result

    def _local(self) -> LocalResult:
        """What this rank has observed, on the host."""
        moments, counts, units, _no_scalars = self._transferred([])
        counted = [spec.identity for spec in self._rows if spec.histograms]
        of_units = units.split([*map(len, self._units.values())])
        return LocalResult(
            specs=[*self._rows, *(one[0] for one in (*self._results.values(), *self._metrics.values())), *self._units],
            rows={spec.identity: row for spec, row in self._rows.items()},
            moments=Moments.joined([Moments(*moments), Moments.of_nothing(1)]),
            counted={identity: place for place, identity in enumerate(counted)},
            counts=nn.functional.pad(counts.view(-1, NUM_COUNTS), (0, 0, 0, 1)),
            results={key: results for key, (_spec, _name, results) in self._results.items()},
            metrics={key: metric for key, (_spec, _name, metric) in self._metrics.items()},
            units=dict(zip((spec.identity for spec in self._units), of_units, strict=True)),
            parts=frozenset(spec.identity for spec in self.parts),
            failed=frozenset(self._failed | self._uncounted),
            num_errors=self.num_errors,
            is_lost=self.is_lost,
        )

    def _row(self, spec: MetricSpec) -> int:
        """First row of a specification in the table."""
        row = self._rows.get(spec)
        if row is None:
            row = self._rows[spec] = self._state.first_row(spec)
        return row

    def _update_metric(self, spec: MetricSpec, metric: Metric, name: str, tensors: Sequence[Tensor]) -> None:
        key = spec.key(name)
        if key not in self._state.metrics:
            self._state.metrics[key] = metric.clone()
        own = self._state.metrics[key]
        if key not in self._metrics:
            own.to(tensors[0].device).reset()
            self._metrics[key] = (spec, name, own)
        own.update(*(tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).float() for tensor in tensors))

    def _finished_parts(self) -> list[tuple[str, Results]]:
        """Function results by key, ready for the transfer: aggregates of the user's and torchmetrics objects are computed."""
        parts: list[tuple[str, Results]] = []
        for spec, name, results in self._results.values():
            parts += self._parts(spec, name, functools.partial(results.parts, name))
        for spec, name, metric in self._metrics.values():
            parts += self._parts(spec, name, functools.partial(_computed, name, metric))
        return parts

    def _reduced_parts(self, result: GlobalResult, reducer: DistributedReducer) -> list[tuple[str, Results]]:
        """As :meth:`_finished_parts`, of what all ranks have; on every rank, in the same order, whatever this one has."""
        is_gathered = any(not isinstance(function.function, Metric) for _spec, function in result.unfinished)
        gathered = reducer.ranks.gather(self._own_results(() if reducer.ranks.place == 0 else result.copied)) if is_gathered else []
        parts: list[tuple[str, Results]] = []
        for spec, function in result.unfinished:
            name, key = function.name, spec.key(function.name)
            if isinstance(function.function, Metric):
                metric = self._metrics[key][2] if key in self._metrics else function.function.clone()
                metric.process_group = reducer.ranks.group  # where its collectives meet none of training's
                metric.to("cpu")  # the group is one of the host
                parts += self._parts(spec, name, functools.partial(_computed, name, metric))
            else:
                results = Results(function.aggregate, [values[key] for values in gathered if key in values])
                parts += self._parts(spec, name, functools.partial(results.parts, name))
        return parts

    def _own_results(self, copied: Collection[Identity]) -> dict[str, Tensor]:
        """What an aggregate of the user's receives of this rank, by key."""
        own = {}
        for key, (spec, name, results) in self._results.items():
            if isinstance(results.aggregate, str) or spec.identity in copied:
                continue
            try:
                own[key] = torch.cat(results.values).cpu()
            except Exception as error:
                # The other ranks wait for the rest.
                self._fail(spec, name, "its results", error)
        return own

    def _parts(self, spec: MetricSpec, name: str, compute: Callable[[], Mapping[str, Results]]) -> list[tuple[str, Results]]:
        try:
            return [(spec.key(part), results) for part, results in compute().items()]
        except Exception as error:
            self._fail(spec, name, "its results", error)
            return []

    def _give_up(self, spec: MetricSpec) -> None:
        self._failed.update(spec.keys())
        self._uncounted.update(spec.histogram_keys)

    def _cannot_send(self, spec: MetricSpec, error: Exception) -> None:
        self._give_up(spec)
        self._on_error(spec, "sending to other ranks", "what was observed on this one alone", error)

    def _fail(self, spec: MetricSpec, name: str, source: str, error: Exception) -> None:
        """Note that a statistic or function could not be computed; ``source`` describes what from."""
        self.num_errors += 1
        self._failed.add(spec.key(name))
        self._on_error(spec, name, source, error)


def _computed(name: str, metric: Metric) -> dict[str, Results]:
    with undisturbed(metric.device), warnings.catch_warnings():
        # Of several ranks only some may have had tensors for it.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
        try:
            return by_part(name, metric.compute())
        finally:
            metric.reset()


def _describe(value: object) -> str:
    """Type or shape of a value for messages; not every kind of tensor has a shape."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    try:
        return f"tensor of shape {tuple(value.shape)}"
    except RuntimeError:
        return f"a {type(value).__name__} without a shape"
