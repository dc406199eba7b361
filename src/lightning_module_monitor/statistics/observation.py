"""All that is seen in one monitored step (or one validation loop), until it is finished into values by key."""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.distributed.exchange import Exchange, Share, Together
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.kernels.elements import strided
from lightning_module_monitor.kernels.moments import Moments, Need, merged
from lightning_module_monitor.kernels.rows_of_matrix import moments_of_rows
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.kernels.transfer import to_host
from lightning_module_monitor.record import NUM_COUNTS, Histogram, Values
from lightning_module_monitor.statistics.difference import Difference
from lightning_module_monitor.statistics.functions import Results, UserFunction, by_part, undisturbed
from lightning_module_monitor.statistics.rows import Form, Rows
from lightning_module_monitor.statistics.units import MAX_UNITS, dead_fraction, signs_of_life
from lightning_module_monitor.statistics.watch import BASE, CURRENT, OWN, PRODUCT, Identity, Watch, Wish

Trouble = Callable[[Watch, str, str, Exception], None]
"""Takes what could not be computed: watch, statistic or function, of what, cause."""


class Observation:
    """Takes tensors in while a step runs, without a host read, and gives their values at its end.

    Args:
        on_trouble: Told of every error of a user's function; the value becomes NaN.
        rows: Numbers of the rows of what is watched, which live from step to step.
    """

    def __init__(self, on_trouble: Trouble, rows: Rows | None = None) -> None:
        self._on_trouble = on_trouble
        self._numbers = Rows() if rows is None else rows
        self._table = MomentTable()
        self._rows: dict[int, int] = {}
        """First row of what was seen, by the identity of its watch."""
        self._results: dict[str, tuple[Watch, str, Results]] = {}
        self._metrics: dict[str, tuple[Watch, str, Metric]] = {}
        self._units: dict[Identity, tuple[Watch, Tensor]] = {}
        """What the units of a site did, on their device."""
        self._failed: set[str] = set()
        self._uncounted: set[str] = set()
        """Keys of histograms that some elements are missing from."""
        self.num_errors = 0
        self.is_lost = False
        """Whether an error has ended the monitoring of this step, on any rank once :meth:`collect` was called."""
        self.histograms: dict[str, Histogram] = {}
        """Histogram by key, once :meth:`collect` was called; one that could not be counted is absent."""

    def observe(self, watch: Watch, tensor: Tensor) -> None:
        """Take one tensor in; it may be overwritten as soon as this returns. One that cannot be read is reported.

        Args:
            watch: What is recorded of it.
            tensor: Any shape, any real floating dtype; may be part of a graph, which is left as it is.

        Raises:
            MonitorError: If errors are to be raised.
        """
        try:
            if watch.needs:
                self._table.add((self._row(watch),), tensor, watch.needs)
            if watch.units and tensor.numel():
                signs = signs_of_life(strided(tensor).detach())
                before = self._units.get(watch.identity)
                self._units[watch.identity] = (watch, signs if before is None else torch.maximum(before[1], signs))
            if watch.functions:
                self._call_functions(watch, tensor)
        except MonitorError:
            raise
        except Exception as error:
            self.fail(watch, tensor, error)

    def observe_for(self, terms: Iterable[tuple[Difference, Sequence[Wish]]]) -> None:
        """Take tensors in, each for several rows, and measure it once where they need no more than another of them does.

        Args:
            terms: Differences of tensors as :meth:`observe` takes them, each with watches, and for each watch the row that it is
                for: ``OWN`` or ``BASE``.
        """
        for term, wishes in terms:
            rows: dict[int, list[int]] = {}
            for watch, part in wishes:
                needs = watch.base_needs if part == BASE else watch.needs
                # A row without a histogram gets none of another's.
                enough = (one for one in rows if not needs & ~one and not (needs ^ one) & Need.HISTOGRAM)
                if needs:
                    rows.setdefault(next(enough, needs), []).append(self._row(watch) + part)
                if watch.functions and part == OWN:
                    self._call_functions(watch, strided(term.written()))
            for needs, of_needs in rows.items():
                self._add(of_needs, term, needs)

    def observe_pair(self, watch: Watch, current: Tensor, reference: Tensor) -> None:
        """Take in the difference of two tensors, and what its statistics need of either.

        Args:
            watch: What is wanted of them.
            current: The model's, as :meth:`observe` takes it.
            reference: The reference's, of the same shape.

        Raises:
            ValueError: If their shapes differ.
        """
        self.measure_pair(watch, current, reference)
        self.call_functions(watch, current, reference)

    def measure_pair(self, watch: Watch, current: Tensor, reference: Tensor) -> None:
        """:meth:`observe_pair` without the functions: of tensors that are parts of what a function is to get."""
        current, reference = strided(current), strided(reference)
        difference = Difference(current, reference)
        if watch.statistics or watch.histograms:
            row = self._row(watch)
            if watch.needs:
                self._add([row + OWN], difference, watch.needs)
            if watch.base_needs:
                self._table.add((row + BASE,), reference, watch.base_needs)
            if watch.is_paired:
                self._table.add((row + CURRENT,), current, Need.SQUARES)
                # In float64, where a product neither rounds nor leaves the range: its mean is the inner product's.
                self._table.add((row + PRODUCT,), current.double() * reference, Need.MEAN)

    def observe_all(self, pairs: Iterable[tuple[Watch, Tensor]]) -> None:
        """Like :meth:`observe` for many tensors that exist at the same time, which is cheaper. What cannot be read fails alone."""
        seen = list(pairs)
        self.measure_all(seen)
        for watch, tensor in seen:
            self.call_functions(watch, tensor)

    def measure_all(self, pairs: Iterable[tuple[Watch, Tensor]]) -> None:
        """:meth:`observe_all` without the functions: of tensors that are parts of what a function is to get."""
        seen = [(watch, tensor) for watch, tensor in pairs if watch.needs]
        rows = [self._row(watch) for watch, _tensor in seen]
        try:
            failed = self._table.add_all(rows, [tensor for _watch, tensor in seen], [watch.needs for watch, _tensor in seen])
        except Exception:
            for watch, _tensor in seen:  # it is not known how many were added
                self._give_up(watch)
            raise
        for place, error in failed:
            self.fail(*seen[place], error)

    def _add(self, rows: Sequence[int], term: Difference, needs: int) -> None:
        if term.other is None and term.shift is None:
            self._table.add(rows, term.tensor, needs)
        else:
            self._table.add_difference(rows, term.tensor, term.other, term.shift, needs)

    def call_functions(self, watch: Watch, *tensors: Tensor) -> None:
        """Give a tensor, or both of a pair, to the functions, and to nothing else."""
        self._call_functions(watch, *tensors)

    def observe_rows(self, watches: Sequence[Watch], values: Tensor, counts: Tensor) -> None:
        """Take in a short tensor for each of several watches, of which not every element has to count.

        Args:
            watches: What is wanted of each row.
            values: Shape ``(watches, elements)``, any real floating dtype, detached. Every element is a token of its own.
            counts: Which elements count, of the same shape. A function gets NaN in place of those that do not.
        """
        values = strided(values)
        measured = [place for place, watch in enumerate(watches) if watch.needs & Need.EVERYTHING]
        if measured:
            needs = functools.reduce(operator.or_, (watches[place].needs for place in measured))
            moments = moments_of_rows(values, counts, needs)
            if len(measured) < len(watches):
                moments = moments.rows(torch.tensor(measured, device=values.device))
            self._table.add_moments([self._row(watches[place]) for place in measured], moments)
        for watch, row, of_row in zip(watches, values, counts, strict=True):
            if watch.histograms:
                self._table.add_counts(self._row(watch), row, of_row)
            if watch.functions:
                self._call_functions(watch, torch.where(of_row, row, torch.nan))

    def observe_base(self, pairs: Iterable[tuple[Watch, Tensor]]) -> None:
        """Take in what relative statistics are relative to, for watches that have one."""
        for watch, tensor in pairs:
            if watch.base_needs:
                try:
                    self._table.add((self._row(watch) + BASE,), tensor, watch.base_needs)
                except Exception as error:
                    self.fail(watch, tensor, error)

    def add_result(self, watch: Watch, function: UserFunction, result: object, num_elements: int) -> None:
        """Take in a result that somebody else computed.

        Args:
            watch: Kind and site that it belongs to.
            function: Its name and aggregate.
            result: A real tensor of any shape or a number.
            num_elements: Number of elements it was computed from.

        Raises:
            TypeError: If it is neither tensor nor number.
        """
        key = watch.key(function.name)
        watch.functions.setdefault(function.name, function)
        if key not in self._results:
            self._results[key] = (watch, function.name, Results(function.aggregate))
        self._results[key][2].add(result, num_elements)

    def drop_overwriting(self, told: Collection[Watch]) -> list[str]:
        """Forget results of some watches whose keys are those of what was seen.

        Args:
            told: The watches.

        Returns:
            The keys.
        """
        if not self._results:
            return []
        own = set(map(id, told))
        results = [key for key, (watch, *_rest) in self._results.items() if id(watch) in own]
        seen = set(itertools.chain.from_iterable(self._numbers.watches[row].keys() for row in self._rows.values() if results))
        dropped = [key for key in results if key in seen]
        for key in dropped:
            del self._results[key]
        return dropped

    def collect(self, exchange: Exchange | None = None) -> Values:
        """Finish everything, :attr:`histograms` too: one transfer per device.

        Args:
            exchange: Brings what all ranks have seen together, on each of which this is called; ``None`` where there is one.

        Returns:
            Value by key. A site that was not seen is absent; what could not be computed is NaN.
        """
        return self._collect() if exchange is None else self._collect_together(exchange)

    def _collect(self) -> Values:
        parts = self._finished_parts()
        num_rows, form = len(self._numbers.watches), self._numbers.form([*self._rows.values()])
        counted = form.counted
        counts = self._table.collect_counts(counted)
        scalars = [value for _key, part in parts for value in part.values]
        units = [signs for _watch, signs in self._units.values()]
        shares, others = to_host(self._table.collect(num_rows), scalars + counts + units)
        values = form.finish(merged(shares, num_rows, torch.device("cpu")), self._fail_to_finish)
        arrived = others[: len(scalars)].tolist()
        start = 0
        for key, part in parts:
            end = start + len(part.values)
            # A single result is what it is merged to, unless it was computed from nothing.
            values[key] = arrived[start] if end == start + 1 and part.weights != [0] else part.merge(others[start:end])
            start = end
        end = len(others) - len(units) * MAX_UNITS
        if units:
            arrived_units = others[end:].view(-1, MAX_UNITS)
            values.update(_of_units((watch, signs) for (watch, _signs), signs in zip(self._units.values(), arrived_units, strict=True)))
        if counted:
            rows = others[start:end].view(len(counts), len(counted), NUM_COUNTS).sum(0).long()
            self._set_histograms((self._numbers.watches[i], row) for i, row in zip(counted, rows, strict=True))
        values.update(dict.fromkeys(self._failed, float("nan")))
        return values

    def _collect_together(self, exchange: Exchange) -> Values:
        try:
            together = exchange.bring_together(functools.partial(self._share, exchange.ranks.device), self._could_not_tell)
        except Exception:
            self.is_lost = True
            raise
        for watch in together.failed:
            self._give_up(watch)
        self._failed.update(together.failed_keys)
        self.num_errors, self.is_lost = together.num_errors, together.is_lost
        if self.is_lost:
            # No rank goes on: the one that lost it may have nothing to go on with.
            return Values()
        # What takes more collectives first: an error in what follows keeps this rank from none.
        parts = self._parts_together(together, exchange.ranks)
        values = Form(together.rows).finish(torch.stack(together.moments), self._fail_to_finish)
        values.update(together.values | _of_units(together.units))
        for key, part in parts:
            values[key] = part.merge(torch.stack([value.to("cpu") for value in part.values]))
        self._set_histograms(together.counted)
        values.update(dict.fromkeys(self._failed, float("nan")))
        return values

    def _share(self, device: torch.device) -> Share:
        """What this rank has seen, on the device where the ranks meet."""
        num_rows, form = len(self._numbers.watches), self._numbers.form([*self._rows.values()])
        moments = Moments(*merged([share.to(device) for share in self._table.collect(num_rows)], num_rows, device))
        counted = form.counted
        counts = torch.zeros(len(counted) + 1, NUM_COUNTS, dtype=torch.float64, device=device)
        for share in self._table.collect_counts(counted):
            counts[:-1] += share.to(device)
        return Share(
            watches=[*(watch for watch, _row in form.watches), *self._watches_besides()],
            rows={watch.identity: row for watch, row in form.watches},
            moments=Moments(*(torch.cat(fields) for fields in zip(moments, Moments.of_nothing(1).to(device), strict=True))),
            counted={self._numbers.watches[row].identity: place for place, row in enumerate(counted)},
            counts=counts,
            results={key: results for key, (_watch, _name, results) in self._results.items()},
            metrics={key: metric for key, (_watch, _name, metric) in self._metrics.items()},
            units={identity: signs.to(device) for identity, (_watch, signs) in self._units.items()},
            failed=frozenset(self._failed | self._uncounted),
            num_errors=self.num_errors,
            is_lost=self.is_lost,
        )

    def _watches_besides(self) -> list[Watch]:
        """Those of what is not in the table."""
        return [one[0] for one in (*self._results.values(), *self._metrics.values())] + [watch for watch, _signs in self._units.values()]

    def _set_histograms(self, counted: Iterable[tuple[Watch, Tensor]]) -> None:
        by_key = {key: Histogram(row.numpy()) for watch, row in counted for key in watch.histogram_keys}
        self.histograms = {key: histogram for key, histogram in by_key.items() if key not in self._uncounted}

    def _row(self, watch: Watch) -> int:
        """First row of a watch in the table."""
        row = self._rows.get(id(watch))
        if row is None:
            row = self._rows[id(watch)] = self._numbers.first(watch)
        return row

    def _call_functions(self, watch: Watch, *tensors: Tensor) -> None:
        """Call every function with one tensor, or with both of a pair."""
        for function in watch.functions.values():
            try:
                with undisturbed(tensors[0].device):
                    # Copies, without their graph: the function may write into them, and a torchmetrics object may keep them,
                    # while the layer after this one overwrites the original.
                    copies = [strided(tensor).detach().clone() for tensor in tensors]
                    if isinstance(function.function, Metric):
                        self._update_metric(watch, function.function, function.name, copies)
                    else:
                        self.add_result(watch, function, function.function(*copies), tensors[0].numel())
            except Exception as error:
                self._fail(watch, function.name, tensors[0], error)

    def _update_metric(self, watch: Watch, metric: Metric, name: str, tensors: Sequence[Tensor]) -> None:
        own = watch.metrics.get(name)
        if own is None:
            own = watch.metrics[name] = metric.clone().to(tensors[0].device)
        key = watch.key(name)
        if key not in self._metrics:
            own.reset()
            self._metrics[key] = (watch, name, own)
        own.update(*(tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).float() for tensor in tensors))

    def _finished_parts(self) -> list[tuple[str, Results]]:
        """Function results by key, ready for the transfer: aggregates of the user's and torchmetrics objects are computed."""
        parts: list[tuple[str, Results]] = []
        for watch, name, results in self._results.values():
            parts += self._parts(watch, name, functools.partial(results.parts, name))
        for watch, name, metric in self._metrics.values():
            with undisturbed(metric.device):
                parts += self._parts(watch, name, functools.partial(_computed, name, metric))
                metric.reset()
        return parts

    def _parts_together(self, together: Together, ranks: Ranks) -> list[tuple[str, Results]]:
        """As :meth:`_finished_parts`, of what all ranks have; on every rank, in the same order, whatever this one has."""
        is_gathered = any(not isinstance(function.function, Metric) for _watch, function in together.unfinished)
        gathered = ranks.gather(self._own_results(together.copied if ranks.place > 0 else ())) if is_gathered else []
        parts: list[tuple[str, Results]] = []
        for watch, function in together.unfinished:
            name, key = function.name, watch.key(function.name)
            if isinstance(function.function, Metric):
                with undisturbed(ranks.device):
                    metric = self._metrics[key][2] if key in self._metrics else function.function.clone().to(ranks.device)
                    parts += self._parts(watch, name, functools.partial(_computed, name, metric))
                    metric.reset()
            else:
                results = Results(function.aggregate, [values[key] for values in gathered if key in values])
                parts += self._parts(watch, name, functools.partial(results.parts, name))
        return parts

    def _own_results(self, copied: Collection[Identity]) -> dict[str, Tensor]:
        """What an aggregate of the user's is to get of this rank, by key."""
        own = {}
        for key, (watch, name, results) in self._results.items():
            if isinstance(results.aggregate, str) or watch.identity in copied:
                continue
            try:
                own[key] = torch.cat(results.values).cpu()
            except Exception as error:
                # The others are waiting for the rest.
                self._fail(watch, name, None, error)
        return own

    def _could_not_tell(self, watch: Watch, error: Exception) -> None:
        self._give_up(watch)
        self._on_trouble(watch, "telling other ranks", "what turned up on this one", error)

    def _parts(self, watch: Watch, name: str, compute: Callable[[], Mapping[str, Results]]) -> list[tuple[str, Results]]:
        try:
            return [(watch.key(part), results) for part, results in compute().items()]
        except Exception as error:
            self._fail(watch, name, None, error)
            return []

    def fail(self, watch: Watch, seen: object, error: Exception) -> None:
        """Note that nothing of a watch could be computed of what was seen."""
        self.num_errors += 1
        self._give_up(watch)
        self._on_trouble(watch, ", ".join((*watch.statistics, *watch.histograms, *watch.functions, *watch.units)), _describe(seen), error)

    def _give_up(self, watch: Watch) -> None:
        self._failed.update(watch.keys())
        self._uncounted.update(watch.histogram_keys)

    def _fail_to_finish(self, watch: Watch, name: str, error: Exception) -> None:
        self.num_errors += 1
        self._on_trouble(watch, name, "its moments", error)

    def _fail(self, watch: Watch, name: str, tensor: Tensor | None, error: Exception) -> None:
        self.num_errors += 1
        self._failed.add(watch.key(name))
        self._on_trouble(watch, name, "its results" if tensor is None else _describe(tensor), error)


def _of_units(units: Iterable[tuple[Watch, Tensor]]) -> dict[str, float]:
    """Statistics of units by key, of this step's and those that came before it."""
    values = {}
    for watch, signs in units:
        # A copy: what arrived with it is large.
        watch.recent_units.append(signs.clone())
        values.update(dict.fromkeys([watch.key(name) for name in watch.units], dead_fraction(watch.recent_units)))
    return values


def _computed(name: str, metric: Metric) -> dict[str, Results]:
    with warnings.catch_warnings():
        # Of several ranks only some may have had tensors for it.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
        return by_part(name, metric.compute())


def _describe(seen: object) -> str:
    """What a tensor is, in words; not every kind of tensor has a shape."""
    if not isinstance(seen, Tensor):
        return f"a {type(seen).__name__}"
    try:
        return f"tensor of shape {tuple(seen.shape)}"
    except RuntimeError:
        return f"a {type(seen).__name__} without a shape"
