r"""The refined coordinate check: how much of a change is the weight's own, and how much comes in with the input.

For a module with weights, of the model ``W`` with input ``x``, of the reference ``W0`` with input ``x0``::

    W x - W0 x0  =  (W - W0) x       +  W0 (x - x0)
                    effective update    propagating update

M. Haas et al., "On the Surprising Effectiveness of Large Learning Rates under Standard Width Scaling", 2025,
arXiv 2505.22491. ``W x`` is what the model gives and ``W0 x0`` what the reference gave; for ``W0 x`` the reference's module
is run once more, right behind the model's own, when ``x`` is still there and the optimizer has not stepped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.modules.hooks import ForwardHook, HookSet, UncopiedHook, runs_forward_alone
from lightning_module_monitor.modules.outputs import Path, copied, is_first, named_tensors
from lightning_module_monitor.probes.checked_modules import ALIGNMENT, INPUT_CHANGE, KINDS, OPERATOR_NORM
from lightning_module_monitor.probes.layers import layer_of
from lightning_module_monitor.probes.linear_again import LinearAgain
from lightning_module_monitor.probes.operator_norms import OperatorNorms, operator_norms
from lightning_module_monitor.probes.probe import Probe, WatchedModule
from lightning_module_monitor.probes.reference import Call, Reference, ReferenceProbe, named_inputs
from lightning_module_monitor.probes.terms import Part, Parts, Term, Unit
from lightning_module_monitor.probes.terms_in_place import TermsInPlace, is_plain
from lightning_module_monitor.random_states import RandomStates, unchanged_random_states
from lightning_module_monitor.statistics.difference import Difference
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.moments import Array, HostMoments, Need
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.watch import Watch, Wish

_NAME = "rcc"
_ALIGNED = {"effective": "update", "propagating": "reference"}
"""The operator norm of an alignment by the alignment's name."""

_UPDATE, _REFERENCE = UserFunction("update", float, "mean"), UserFunction("reference", float, "mean")
"""What was computed, as an observation takes it."""

MOST_WAITING_SECONDS = 1.0
"""For another thread that checks a layer."""

_NOTHING = -1.0
"""Stands for no alignment, where the input is zero or there is no norm of it; not a NaN, which tells of values that are not finite."""


def _ratio_of_norms(moments: HostMoments, base: HostMoments) -> Array:
    return np.where(base.squares == 0, _NOTHING, np.sqrt(moments.squares / base.squares))


_RATIO_OF_NORMS = Statistic(Need.SQUARES, _ratio_of_norms, relative=True)

_Wished = tuple[Difference, list[Wish]]
"""A term, and what it is for."""


class Units:
    """The modules that are checked, with what is prepared for them: it lives from step to step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[WatchedModule], Reference, list[CheckedUnit]]] = {}
        """By the identity of what is watched."""
        self.linear_again = LinearAgain()

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self.linear_again.clear()

    def __reduce__(self) -> tuple[type[Units], tuple[()]]:
        """A copy knows nothing: what is prepared are addresses."""
        return Units, ()

    def of(self, watched: Sequence[WatchedModule], reference: Reference) -> list[CheckedUnit]:
        """Those of what is watched that have a sibling.

        Args:
            watched: Modules. It is the same object as long as it is the same modules and wishes.
            reference: What has the siblings.
        """
        known = self._known.get(id(watched))
        if known is None or known[1] is not reference or any(not one.is_as_it_was() for one in known[2]):
            pairs = ((one, reference.twin(one.site.module)) for one in watched if not one.watches.keys().isdisjoint(KINDS))
            units = [CheckedUnit(_unit(one, twin)) for one, twin in pairs if twin is not None]
            known = self._known[id(watched)] = watched, reference, units
        return known[2]


class CheckedUnit:
    """A module that is checked, and how.

    Attributes:
        unit: The module.
        in_place: Reads its terms in the quicker way, where that can be done.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.in_place = TermsInPlace(unit) if is_plain(unit) else None
        self._made = self._structure()

    def is_as_it_was(self) -> bool:
        """Whether the module is what it was: it may get or lose a parametrization, or a parameter, or normalize otherwise."""
        return self._made == self._structure()

    def _structure(self) -> list[object]:
        return [_structure(one) for one in (self.unit.watched.site.module, self.unit.twin)]


def _structure(module: nn.Module) -> object:
    """What the terms of a module are made of: its type, its forward, its parameters, and how it normalizes."""
    layer = layer_of(module)
    shapes = [(name, parameter.shape) for name, parameter in module._parameters.items() if parameter is not None]
    return type(module), "forward" in vars(module), shapes, None if layer is None else layer.token_normalization(module)


def _unit(watched: WatchedModule, twin: nn.Module) -> Unit:
    wish = watched.watches.get(ALIGNMENT)
    alignment = {} if wish is None else {
        name: wish.made_of.setdefault(name, Watch(wish.kind, wish.site, wish.stage, wish.prefix, {name: _RATIO_OF_NORMS}))
        for name in wish.functions
    }  # fmt: skip
    return Unit(watched, twin, alignment)


class CoordinateCheckProbe(Probe):
    """Takes the terms of the check as the model's modules run.

    Args:
        watched: The modules.
        observation: Where the terms go.
        twins: What the reference gave.
        operator_norms: The reference's, which live from step to step.
        units: What lives from step to step of the modules.
        further_name: Names further outputs and inputs, from the module's site, the path, and which of both it is.
        say: Takes a sentence for the user.
    """

    def __init__(  # noqa: PLR0917  # told by the monitor, once
        self,
        watched: Sequence[WatchedModule],
        observation: Observation,
        twins: ReferenceProbe,
        operator_norms: OperatorNorms,
        units: Units,
        further_name: Callable[[str, Path, str], str],
        say: Callable[[str], None],
    ) -> None:
        self._observation = observation
        self._twins = twins
        self._operator_norms = operator_norms
        self._further_name = further_name
        self._say = say
        self._device = twins.reference.device()
        self._linear_again = units.linear_again
        self._hooks = HookSet()
        self._checked = units.of(watched, twins.reference)
        self._units = [one.unit for one in self._checked]
        for unit in self._units:
            kinds = unit.watched.watches.keys()
            twins.want(unit.twin, _NAME, inputs=INPUT_CHANGE in kinds or ALIGNMENT in kinds)

    def attach(self) -> None:
        """Put the hooks on."""
        for checked in self._checked:
            module = checked.unit.watched.site.module
            if any(not isinstance(hook, ForwardHook) for hook in checked.unit.twin._forward_pre_hooks.values()):
                called = UncopiedHook(functools.partial(self._before_forward, checked.unit.called))
                self._hooks.add(module.register_forward_pre_hook(called, with_kwargs=True, prepend=True))
            if checked.unit.may_draw:
                before = UncopiedHook(functools.partial(self._before_forward, checked.unit.begun))
                self._hooks.add(module.register_forward_pre_hook(before, with_kwargs=True))
            after = UncopiedHook(functools.partial(self._after_forward, checked))
            self._hooks.add_forward(module, after, with_kwargs=True)
        try:
            with _exactly(self._device):
                self._see_weights()
        except MonitorError:
            raise
        except Exception as error:
            for unit in self._units:
                for kind in (OPERATOR_NORM, ALIGNMENT):
                    if kind in unit.watched.watches:
                        self._observation.fail(unit.watched.watches[kind], unit.watched.site.module, error)

    def end_micro_batch(self) -> None:
        """Forget the calls that an error has ended."""
        for unit in self._units:
            unit.begun.clear()
            unit.called.clear()

    def finish(self) -> None:
        """Take in what was read in place."""
        self._observation.add_totals(self._totals())

    def close(self) -> None:
        """Take every hook off, and forget everything."""
        self._hooks.close()
        self.end_micro_batch()
        self._linear_again.release()
        self._totals()

    def derive(self, values: dict[str, float]) -> None:
        """Make alignments of the ratios of norms; where neither weight nor input has changed there is none."""
        for unit in self._units:
            for name, watch in unit.alignment.items():
                asked, norm = self._operator_norm_watch(unit)
                key, norm_key = watch.statistic_keys[0], norm.key(_ALIGNED[name])
                if key in values and (values[key] == _NOTHING or values.get(norm_key) == 0):
                    del values[key]
                elif key in values:
                    # No ratio is above the norm: where it is, the norm was found a little too small, or the ratio is of rounding alone.
                    values[key] = min(values[key] / values.get(norm_key, float("nan")), 1.0)
                if _ALIGNED[name] not in asked:
                    values.pop(norm_key, None)

    def _totals(self) -> list[tuple[list[list[Wish]], np.ndarray]]:
        """What was read in place since the last time."""
        found = [one.in_place.totals() for one in self._checked if one.in_place is not None]
        return [totals for totals in found if totals is not None]

    def _before_forward(
        self, calls: list[tuple[Any, Any, RandomStates]], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_counted():
            calls.append((*copied((args, kwargs)), RandomStates.now(self._device)))

    def _after_forward(  # torch's protocol, behind the module
        self,
        checked: CheckedUnit,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        if not self._is_counted():
            return
        # Of a model that runs its parts in several threads one at a time has it. Who waits in vain, because the other waits for a lock
        # of the program's that is held here, goes the longer way, without memory that both would write.
        turn = self._linear_again.turn
        has_turn = turn.acquire(timeout=MOST_WAITING_SECONDS)
        try:
            self._see_call(checked, args, kwargs, output, self._linear_again if has_turn else None)
        except MonitorError:
            raise
        except Exception as error:
            watches = checked.unit.watched.watches
            for kind in KINDS:
                if kind in watches:
                    self._observation.fail(watches[kind], output, error)
        finally:
            if has_turn:
                turn.release()

    def _see_call(
        self, checked: CheckedUnit, args: tuple[Any, ...], kwargs: dict[str, Any], output: object, linear_again: LinearAgain | None
    ) -> None:
        """Take the terms of one call of a module, which got these arguments and gave this output."""
        unit, in_place = checked.unit, checked.in_place
        states = None
        if unit.may_draw:
            args, kwargs, states = unit.begun.pop()
        # The sibling's hooks are to see what those of the model have seen, and not what these have made of it.
        called = unit.called.pop() if unit.called else (args, kwargs, states)
        call = self._twins.take(unit.twin, _NAME)
        if call is None:
            self._say(f"{unit.watched.site.name}: the reference has not run for this call of it; no change of its input is seen.")
        elif in_place is not None and linear_again is not None and not kwargs and in_place.read(linear_again, args, output, call):
            return
        with torch.no_grad():
            again = self._run_again(unit, linear_again, *called)
            with _exactly(self._device):
                self._observation.observe_for(
                    [
                        *self._of_outputs(unit, output, again, call),
                        *self._of_inputs(unit, named_inputs(args, kwargs), call),
                    ]
                )

    def _is_counted(self) -> bool:
        # A forward pass within a backward pass is the recomputation of a checkpointed one, which was counted.
        return self.is_open and torch._C._current_graph_task_id() == -1

    def _run_again(
        self, unit: Unit, linear_again: LinearAgain | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], states: RandomStates | None
    ) -> dict[Path, Tensor] | None:
        """The reference's module on the model's input, with the random numbers that the model's module has drawn."""
        if not unit.is_run_again:
            return None
        plain = None if kwargs or states is not None or linear_again is None else linear_again.prepare(unit.twin, args)
        if plain is not None:
            return {(): plain.run()}
        if unit.may_draw or not runs_forward_alone(unit.twin):
            # What it writes into its arguments, or a hook of somebody's, it is not to write into the model's.
            args, kwargs = copied((args, kwargs))
        with ExitStack() as stack:
            if states is not None:
                stack.enter_context(unchanged_random_states(self._device))
                states.restore()
            stack.enter_context(self._twins.replaying(unit.watched.site.module))
            return dict(named_tensors(unit.twin(*args, **kwargs)))

    def _of_outputs(self, unit: Unit, output: object, again: Mapping[Path, Tensor] | None, call: Call | None) -> Iterator[_Wished]:
        """The terms that are made of outputs."""
        references = {} if call is None else dict(call.outputs)
        for path, tensor in named_tensors(output):
            if tensor.is_floating_point():
                site = None if is_first(path) else self._further_name(unit.watched.site.name, path, "output")
                given = {
                    Part.OUTPUT: tensor.detach(),
                    Part.AGAIN: None if again is None else again.get(path),
                    Part.REFERENCE_OUTPUT: references.get(path),
                }
                yield from self._wished(unit, unit.terms_of_output if site is None else unit.of_output(site), Parts(unit, given))

    def _of_inputs(self, unit: Unit, inputs: list[tuple[Path, Tensor]], call: Call | None) -> Iterator[_Wished]:
        """The terms that are made of inputs."""
        references = {} if call is None else dict(call.inputs)
        for index, (path, x) in enumerate(inputs):
            site = None if index == 0 else self._further_name(unit.watched.site.name, path, "input")
            given = {Part.INPUT: x.detach(), Part.REFERENCE_INPUT: references.get(path)}
            yield from self._wished(unit, unit.terms_of_input if site is None else unit.of_input(site), Parts(unit, given))

    def _wished(self, unit: Unit, terms: Sequence[Term], parts: Parts) -> Iterator[_Wished]:
        """The terms whose parts there are, with their features last where anybody looks at them."""
        module = unit.watched.site.module
        for term in terms:
            difference = parts.difference(term)
            if difference is None:
                continue
            if term.of_vectors or any([watch.looks_at_features for watch, _row in term.wishes]):
                difference = Difference(difference.written())
            if term.of_vectors and unit.layer is not None:
                vectors = unit.layer.vectors(module, difference.tensor)
                if vectors is not None:
                    yield Difference(vectors), term.of_vectors
            if any([watch.looks_at_features for watch, _row in term.wishes]) and unit.layer is not None:
                difference = Difference(difference.tensor.movedim(unit.layer.channels(module, difference.tensor), -1))
            if term.wishes:
                yield difference, term.wishes

    @torch.no_grad()
    def _see_weights(self) -> None:
        """Take the operator norms: before the step's first forward pass, with the weights that it will use."""
        updates: dict[str, Difference] = {}
        references: dict[str, Callable[[], Tensor]] = {}
        watches: dict[str, Watch] = {}
        for unit in self._units:
            asked, watch = self._operator_norm_watch(unit)
            names = set(asked) | {_ALIGNED[name] for name in unit.alignment}
            if unit.layer is None or not names:
                continue
            site = unit.watched.site.name
            watches[site] = watch
            if "reference" in names:
                references[site] = functools.partial(unit.layer.weight, unit.twin)
            try:
                if "update" in names:
                    updates[site] = Difference(unit.layer.weight(unit.watched.site.module), unit.layer.weight(unit.twin))
            except Exception as error:
                self._observation.fail(watch, unit.watched.site.module, error)
        for norms, function in ((operator_norms(updates), _UPDATE), (self._operator_norms.of_reference(references), _REFERENCE)):
            for site, norm in norms.items():
                self._observation.add_result(watches[site], function, norm, 1)

    def _operator_norm_watch(self, unit: Unit) -> tuple[Iterable[str], Watch]:
        """The norms that are asked for, and the watch of them; one of its own where only alignments are."""
        wish = unit.watched.watches.get(OPERATOR_NORM)
        if wish is not None:
            return wish.functions, wish
        other = unit.watched.watches.get(ALIGNMENT)
        if other is None:
            return (), Watch(OPERATOR_NORM, unit.watched.site.name)
        return (), other.made_of.setdefault(OPERATOR_NORM, Watch(OPERATOR_NORM, other.site, other.stage, other.prefix))


def _exactly(device: torch.device) -> AbstractContextManager[object]:
    """What the monitor itself computes it does not compute in half precision."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
