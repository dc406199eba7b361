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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.modules.hooks import HookSet, UncopiedHook
from lightning_module_monitor.modules.names import UNWATCHED
from lightning_module_monitor.modules.outputs import Path, copied, is_first, named_tensors
from lightning_module_monitor.probes.layers import Layer, layer_of
from lightning_module_monitor.probes.linear_again import LinearAgain
from lightning_module_monitor.probes.operator_norms import OperatorNorms, operator_norms
from lightning_module_monitor.probes.probe import Probe, WatchedModule
from lightning_module_monitor.probes.reference import Call, ReferenceProbe, named_inputs
from lightning_module_monitor.random_states import RandomStates, unchanged_random_states
from lightning_module_monitor.statistics.difference import Difference
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.moments import Moments, Need
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.watch import BASE, OWN, Watch

EFFECTIVE, PROPAGATING = "rcc_effective_update", "rcc_propagating_update"
OUTPUT, REFERENCE_OUTPUT = "rcc_output", "rcc_reference_output"
INPUT, INPUT_CHANGE = "rcc_input", "rcc_input_change"
OPERATOR_NORM, ALIGNMENT = "rcc_operator_norm", "rcc_alignment"

TERMS = (EFFECTIVE, PROPAGATING, OUTPUT, REFERENCE_OUTPUT, INPUT, INPUT_CHANGE)
"""The kinds that are tensors."""

KINDS = (*TERMS, OPERATOR_NORM, ALIGNMENT)
"""The kinds that this probe sees to."""

_NAME = "rcc"
_OF_INPUTS = (PROPAGATING, INPUT, INPUT_CHANGE)
_ALIGNED = {"effective": "update", "propagating": "reference"}
"""The operator norm of an alignment by the alignment's name."""


def units(root: nn.Module) -> set[nn.Module]:
    """The modules that are checked: those that own weights, each as a whole.

    What is inside of a layer of a known type, or of ``torch.nn.MultiheadAttention``, is part of that. Of any other module
    that owns weights, the parts are checked too.
    """
    found: set[nn.Module] = set()
    seen: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module in seen or isinstance(module, UNWATCHED):
            continue
        seen.add(module)
        is_whole = layer_of(module) is not None or isinstance(module, nn.MultiheadAttention)
        if is_whole or any(one is not None and one.is_floating_point() for one in module._parameters.values()):
            found.add(module)
        if not is_whole:
            waiting += module.children()
    return found


def has_kind(module: nn.Module, kind: str) -> bool:
    """Whether there is such a kind of a module that is checked."""
    layer = layer_of(module)
    if kind in (OPERATOR_NORM, ALIGNMENT):
        return layer is not None
    return kind not in _OF_INPUTS or not isinstance(module, nn.Embedding | nn.EmbeddingBag)


def has_weight_site(module: nn.Module, kind: str) -> bool:
    """Whether the weight of a module that is checked, without the bias, is a site of its own."""
    layer = layer_of(module)
    return kind in TERMS and layer is not None and layer.weight_is_site and has_kind(module, kind)


_NOTHING = -1.0
"""Stands for no alignment, where the input is zero or there is no norm of it; not a NaN, which tells of values that are not finite."""


def _ratio_of_norms(moments: Moments, base: Moments) -> Tensor:
    return torch.where(base.squares == 0, _NOTHING, (moments.squares / base.squares).sqrt())


_RATIO_OF_NORMS = Statistic(Need.SQUARES, _ratio_of_norms, relative=True)

Wish = tuple[Watch, int]
"""A watch, and the row of it that a tensor is for."""


_Wished = tuple[Difference, list[Wish]]
"""A term, and what it is for."""


@dataclass
class _Unit:
    """A module that is checked."""

    watched: WatchedModule
    twin: nn.Module
    layer: Layer | None
    alignment: dict[str, Watch] = field(default_factory=dict)
    """A watch for each alignment, of the ratio of the norms of term and input."""
    begun: list[tuple[Any, Any, RandomStates]] = field(default_factory=list)
    """Arguments and random states of calls that are not over, of a module that may draw numbers or overwrite its input."""

    def __post_init__(self) -> None:
        self.may_draw = self.layer is None or is_parametrized(self.twin)
        """Whether it may draw numbers: it is of no known type, or its weight is computed from others."""

    def wish(self, kind: str, site: str | None = None) -> list[Wish]:
        """The wish for a term, at the module's own site or a further output's or input's."""
        watch = self.watched.watches.get(kind)
        return [] if watch is None else [(watch if site is None else watch.at(site), OWN)]

    def wish_for_weight(self, kind: str) -> list[Wish]:
        """The wish for a term of the weight alone."""
        watch = self.watched.watches.get(kind)
        return [] if watch is None or watch.alone is None else [(watch.alone, OWN)]

    def wish_for_alignment(self, name: str, row: int) -> list[Wish]:
        """The wish for a term, or an input, whose norm an alignment is made of."""
        return [(self.alignment[name], row)] if name in self.alignment else []


class CoordinateCheckProbe(Probe):
    """Takes the terms of the check as the model's modules run.

    Args:
        watched: The modules.
        observation: Where the terms go.
        twins: What the reference gave.
        operator_norms: The reference's, which live from step to step.
        further_name: Names further outputs and inputs, from the module's site, the path, and which of both it is.
        say: Takes a sentence for the user.
    """

    def __init__(  # noqa: PLR0917  # told by the monitor, once
        self,
        watched: Sequence[WatchedModule],
        observation: Observation,
        twins: ReferenceProbe,
        operator_norms: OperatorNorms,
        further_name: Callable[[str, Path, str], str],
        say: Callable[[str], None],
    ) -> None:
        self._observation = observation
        self._twins = twins
        self._operator_norms = operator_norms
        self._further_name = further_name
        self._say = say
        self._device = twins.reference.device()
        self._linear_again = LinearAgain()
        self._hooks = HookSet()
        pairs = ((one, twins.reference.twin(one.site.module)) for one in watched if not one.watches.keys().isdisjoint(KINDS))
        self._units = [self._unit(one, twin) for one, twin in pairs if twin is not None]
        for unit in self._units:
            kinds = unit.watched.watches.keys()
            twins.want(unit.twin, _NAME, inputs=INPUT_CHANGE in kinds or ALIGNMENT in kinds)

    def attach(self) -> None:
        """Put the hooks on."""
        for unit in self._units:
            module = unit.watched.site.module
            if unit.may_draw:
                before = UncopiedHook(functools.partial(self._before_forward, unit))
                self._hooks.add(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.add(module.register_forward_hook(UncopiedHook(functools.partial(self._after_forward, unit)), with_kwargs=True))
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

    def close(self) -> None:
        """Take every hook off, and forget everything."""
        self._hooks.close()
        self.end_micro_batch()

    def derive(self, values: dict[str, float]) -> None:
        """Make alignments of the ratios of norms; where neither weight nor input has changed there is none."""
        for unit in self._units:
            for name, watch in unit.alignment.items():
                asked, norm = self._operator_norm_watch(unit)
                key, norm_key = watch.statistic_keys[0], norm.key(_ALIGNED[name])
                if key in values and (values[key] == _NOTHING or values.get(norm_key) == 0):
                    del values[key]
                elif key in values:
                    values[key] /= values.get(norm_key, float("nan"))
                if _ALIGNED[name] not in asked:
                    values.pop(norm_key, None)

    def _unit(self, watched: WatchedModule, twin: nn.Module) -> _Unit:
        wish = watched.watches.get(ALIGNMENT)
        alignment = {} if wish is None else {
            name: wish.made_of.setdefault(name, Watch(wish.kind, wish.site, wish.stage, wish.prefix, {name: _RATIO_OF_NORMS}))
            for name in wish.functions
        }  # fmt: skip
        return _Unit(watched, twin, layer_of(watched.site.module), alignment)

    def _before_forward(self, unit: _Unit, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_counted():
            unit.begun.append((*copied((args, kwargs)), RandomStates.now(self._device)))

    def _after_forward(self, unit: _Unit, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if not self._is_counted():
            return
        try:
            states = None
            if unit.may_draw:
                args, kwargs, states = unit.begun.pop()
            call = self._twins.take(unit.twin, _NAME)
            if call is None:
                self._say(f"{unit.watched.site.name}: the reference has not run for this call of it; no change of its input is seen.")
            with torch.no_grad():
                again = self._run_again(unit, args, kwargs, states)
                with _exactly(self._device):
                    self._observation.observe_for(
                        [
                            *self._of_outputs(unit, output, again, call),
                            *self._of_inputs(unit, named_inputs(args, kwargs), call),
                        ]
                    )
        except MonitorError:
            raise
        except Exception as error:
            for kind in KINDS:
                if kind in unit.watched.watches:
                    self._observation.fail(unit.watched.watches[kind], output, error)

    def _is_counted(self) -> bool:
        # A forward pass within a backward pass is the recomputation of a checkpointed one, which was counted.
        return self.is_open and torch._C._current_graph_task_id() == -1

    def _run_again(
        self, unit: _Unit, args: tuple[Any, ...], kwargs: Mapping[str, Any], states: RandomStates | None
    ) -> dict[Path, Tensor] | None:
        """The reference's module on the model's input, with the random numbers that the model's module has drawn."""
        watches = unit.watched.watches
        if watches.keys().isdisjoint((EFFECTIVE, PROPAGATING, ALIGNMENT)):
            return None
        plain = None if kwargs or states is not None else self._linear_again(unit.twin, args)
        if plain is not None:
            return {(): plain}
        with ExitStack() as stack:
            if states is not None:
                stack.enter_context(unchanged_random_states(self._device))
                states.restore()
            stack.enter_context(self._twins.replaying(unit.watched.site.module))
            return dict(named_tensors(unit.twin(*args, **kwargs)))

    def _of_outputs(self, unit: _Unit, output: object, again: Mapping[Path, Tensor] | None, call: Call | None) -> Iterator[_Wished]:
        """The terms that are made of outputs."""
        references = {} if call is None else dict(call.outputs)
        for path, tensor in named_tensors(output):
            if tensor.is_floating_point():
                site = None if is_first(path) else self._further_name(unit.watched.site.name, path, "output")
                yield from self._of_output(unit, site, tensor.detach(), None if again is None else again.get(path), references.get(path))

    def _of_output(
        self, unit: _Unit, site: str | None, output: Tensor, again: Tensor | None, reference: Tensor | None
    ) -> Iterator[_Wished]:
        bias, bias_change = self._biases(unit, output, again)
        yield from self._term(unit, Difference(output), unit.wish(OUTPUT, site), unit.wish_for_weight(OUTPUT), bias)
        if reference is not None:
            own_bias = None if unit.layer is None else unit.layer.bias(unit.twin, reference)
            of_weight = unit.wish_for_weight(REFERENCE_OUTPUT)
            yield from self._term(unit, Difference(reference), unit.wish(REFERENCE_OUTPUT, site), of_weight, own_bias)
        if again is None:
            return
        of_weight = unit.wish_for_weight(EFFECTIVE) + unit.wish_for_alignment("effective", OWN)
        if unit.wish(EFFECTIVE) or of_weight:
            yield from self._term(unit, Difference(output, again), unit.wish(EFFECTIVE, site), of_weight, bias_change)
        of_weight = unit.wish_for_weight(PROPAGATING) + unit.wish_for_alignment("propagating", OWN)
        if reference is not None and (unit.wish(PROPAGATING) or of_weight):
            # The bias is in both, so that the term is the weight's own.
            yield from self._term(unit, Difference(again, reference), unit.wish(PROPAGATING, site), of_weight, None)

    def _biases(self, unit: _Unit, output: Tensor, again: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The bias, and what it has changed by, in the shape of the output."""
        if unit.layer is None:
            return None, None
        bias = unit.layer.bias(unit.watched.site.module, output)
        own = unit.layer.bias(unit.twin, output)
        return bias, None if bias is None or own is None else Difference(bias, own).computed()

    def _term(self, unit: _Unit, term: Difference, wishes: list[Wish], of_weight: list[Wish], bias: Tensor | None) -> Iterator[_Wished]:
        """A term, and without the bias for the weight alone."""
        if bias is None:
            yield from self._laid_out(unit, term, wishes + of_weight)
            return
        yield from self._laid_out(unit, term, wishes)
        yield from self._laid_out(unit, Difference(term.tensor, term.other, bias), of_weight)

    def _of_inputs(self, unit: _Unit, inputs: list[tuple[Path, Tensor]], call: Call | None) -> Iterator[_Wished]:
        """The terms that are made of inputs."""
        references = {} if call is None else dict(call.inputs)
        for index, (path, x) in enumerate(inputs):
            site = None if index == 0 else self._further_name(unit.watched.site.name, path, "input")
            yield from self._of_input(unit, site, x.detach(), references.get(path))

    def _of_input(self, unit: _Unit, site: str | None, x: Tensor, x0: Tensor | None) -> Iterator[_Wished]:
        module, layer = unit.watched.site.module, unit.layer
        of_weight, of_weight_change = unit.wish_for_weight(INPUT), unit.wish_for_weight(INPUT_CHANGE)
        aligned, aligned_change = unit.wish_for_alignment("effective", BASE), unit.wish_for_alignment("propagating", BASE)
        wishes, wishes_change = unit.wish(INPUT, site), unit.wish(INPUT_CHANGE, site)
        is_measured = wishes or of_weight or aligned or wishes_change or of_weight_change or aligned_change
        applied = None if layer is None or site is not None or not is_measured else layer.applied_to(module, x)
        if applied is x:
            yield from self._vectors(unit, Difference(x), wishes + of_weight, aligned)
        else:
            yield from self._laid_out(unit, Difference(x), wishes)
            if applied is not None:
                yield from self._vectors(unit, Difference(applied), of_weight, aligned)
        if x0 is None or not (wishes_change or of_weight_change or aligned_change):
            return
        change = Difference(x, x0)
        if applied is x:
            yield from self._vectors(unit, change, wishes_change + of_weight_change, aligned_change)
            return
        yield from self._laid_out(unit, change, wishes_change)
        if applied is not None and layer is not None and (of_weight_change or aligned_change):
            applied0 = layer.applied_to(unit.twin, x0)
            assert applied0 is not None
            yield from self._vectors(unit, Difference(applied, applied0), of_weight_change, aligned_change)

    def _vectors(self, unit: _Unit, x: Difference, wishes: list[Wish], aligned: list[Wish]) -> Iterator[_Wished]:
        """What a weight is applied to, and the norm of all vectors that it is applied to."""
        assert unit.layer is not None
        if not aligned or unit.layer.is_applied_once:
            yield from self._laid_out(unit, x, wishes + aligned)
            return
        tensor = x.written()
        yield from self._laid_out(unit, Difference(tensor), wishes)
        vectors = unit.layer.vectors(unit.watched.site.module, tensor)
        if vectors is not None:
            yield Difference(vectors), aligned

    @torch.no_grad()
    def _see_weights(self) -> None:
        """Take the operator norms: before the step's first forward pass, with the weights that it will use."""
        updates: dict[str, Difference] = {}
        references: dict[str, Tensor] = {}
        watches: dict[str, Watch] = {}
        for unit in self._units:
            asked, watch = self._operator_norm_watch(unit)
            names = set(asked) | {_ALIGNED[name] for name in unit.alignment}
            if unit.layer is None or not names:
                continue
            site, own = unit.watched.site.name, unit.layer.weight(unit.twin)
            watches[site] = watch
            if "reference" in names:
                references[site] = own
            if "update" in names:
                updates[site] = Difference(unit.layer.weight(unit.watched.site.module), own)
        for name, norms in (("update", operator_norms(updates)), ("reference", self._operator_norms.of_reference(references))):
            for site, norm in norms.items():
                self._observation.add_result(watches[site], UserFunction(name, float, "mean"), norm, 1)

    def _operator_norm_watch(self, unit: _Unit) -> tuple[Iterable[str], Watch]:
        """The norms that are asked for, and the watch of them; one of its own where only alignments are."""
        wish = unit.watched.watches.get(OPERATOR_NORM)
        if wish is not None:
            return wish.functions, wish
        other = unit.watched.watches.get(ALIGNMENT)
        if other is None:
            return (), Watch(OPERATOR_NORM, unit.watched.site.name)
        return (), other.made_of.setdefault(OPERATOR_NORM, Watch(OPERATOR_NORM, other.site, other.stage, other.prefix))

    def _laid_out(self, unit: _Unit, term: Difference, wishes: list[Wish]) -> Iterator[_Wished]:
        """A term with its features last, where anybody looks at them; nothing where nobody wishes for it."""
        if not wishes:
            return
        if any([watch.looks_at_features for watch, _row in wishes]):
            tensor = term.written()
            term = Difference(tensor if unit.layer is None else tensor.movedim(unit.layer.channels(unit.watched.site.module, tensor), -1))
        yield term, wishes


def _exactly(device: torch.device) -> AbstractContextManager[object]:
    """What the monitor itself computes it does not compute in half precision."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
