"""The terms of the coordinate check for one module: of what parts each is made, and who wishes for it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_module_monitor.probes.checked_modules import EFFECTIVE, INPUT, INPUT_CHANGE, OUTPUT, PROPAGATING, REFERENCE_OUTPUT
from lightning_module_monitor.probes.layers import layer_of
from lightning_module_monitor.probes.probe import WatchedModule
from lightning_module_monitor.random_states import RandomStates
from lightning_module_monitor.statistics.difference import Difference
from lightning_module_monitor.statistics.watch import BASE, OWN, Watch, Wish


class Part(enum.IntEnum):
    """What terms are made of."""

    OUTPUT = 0
    """``W x``, as the model's module gave it."""
    AGAIN = 1
    """``W0 x``, as the reference's gives it for the same input."""
    REFERENCE_OUTPUT = 2
    """``W0 x0``."""
    BIAS = 3
    REFERENCE_BIAS = 4
    BIAS_CHANGE = 5
    INPUT = 6
    """``x``."""
    REFERENCE_INPUT = 7
    """``x0``."""
    APPLIED = 8
    """What the weight is applied to, of ``x``, where it is not that."""
    REFERENCE_APPLIED = 9
    WEIGHT = 10
    REFERENCE_WEIGHT = 11
    NOTHING = 12
    """Zero."""


@dataclass(frozen=True)
class Term:
    """``tensor - other - shift``, and who wishes for it."""

    tensor: Part
    other: Part
    shift: Part
    wishes: list[Wish]
    of_vectors: list[Wish] = field(default_factory=list)
    """Wishes for the norm of all vectors that the weight is applied to, where that is not the norm of the term."""

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        """What it is made of."""
        return self.tensor, self.other, self.shift


@dataclass
class Unit:
    """A module that is checked.

    Attributes:
        watched: The module, and what is wanted of it.
        twin: Its sibling in the reference.
        alignment: A watch for each alignment, of the ratio of the norms of term and input.
    """

    watched: WatchedModule
    twin: nn.Module
    alignment: Mapping[str, Watch]
    begun: list[tuple[Any, Any, RandomStates]] = field(default_factory=list)
    """Arguments and random states of calls that are not over, of a module that may draw numbers or overwrite its input."""
    called: list[tuple[Any, Any, RandomStates]] = field(default_factory=list)
    """The same as before any hook has seen them, where the sibling has hooks of its own that may change arguments."""

    def __post_init__(self) -> None:
        self.layer = layer_of(self.watched.site.module)
        has_own_forward = any("forward" in vars(one) for one in (self.watched.site.module, self.twin))
        self.may_draw = self.layer is None or is_parametrized(self.twin) or has_own_forward
        """Whether it may draw numbers: it is of no known type, has a ``forward`` of its own, or its weight is computed from others."""
        self.terms_of_output = self.of_output()
        self.terms_of_input = self.of_input()
        self.is_run_again = any(Part.AGAIN in term.parts for term in self.terms_of_output)
        """Whether any term is of what the reference's module gives for the model's input."""

    def of_output(self, site: str | None = None) -> list[Term]:
        """The terms that are made of an output.

        Args:
            site: That of a further output.
        """
        has_bias = self.layer is not None and self.layer.has_bias(self.watched.site.module)
        # By kind: what the term is made of, the bias in it, and the alignment that its norm is for.
        terms = (
            (OUTPUT, Part.OUTPUT, Part.NOTHING, Part.BIAS, None),
            (REFERENCE_OUTPUT, Part.REFERENCE_OUTPUT, Part.NOTHING, Part.REFERENCE_BIAS, None),
            (EFFECTIVE, Part.OUTPUT, Part.AGAIN, Part.BIAS_CHANGE, "effective"),
            # The bias is in both, so that the term is the weight's own.
            (PROPAGATING, Part.AGAIN, Part.REFERENCE_OUTPUT, Part.NOTHING, "propagating"),
        )
        found: list[Term] = []
        for kind, tensor, other, bias, alignment in terms:
            wishes, of_weight = self._wish(kind, site), self._wish_for_weight(kind)
            if alignment is not None and alignment in self.alignment:
                of_weight.append((self.alignment[alignment], OWN))
            if has_bias and bias is not Part.NOTHING:
                found += [Term(tensor, other, Part.NOTHING, wishes), Term(tensor, other, bias, of_weight)]
            else:
                found.append(Term(tensor, other, Part.NOTHING, wishes + of_weight))
        return [term for term in found if term.wishes]

    def of_input(self, site: str | None = None) -> list[Term]:
        """The terms that are made of an input; argument as for :meth:`of_output`."""
        wishes, wishes_change = self._wish(INPUT, site), self._wish(INPUT_CHANGE, site)
        own, change = (Part.INPUT, Part.NOTHING), (Part.INPUT, Part.REFERENCE_INPUT)
        if self.layer is None or site is not None:
            terms = [Term(*own, Part.NOTHING, wishes), Term(*change, Part.NOTHING, wishes_change)]
        elif self.layer.is_applied_to_input:
            terms = [
                self._applied(*own, wishes + self._wish_for_weight(INPUT), "effective"),
                self._applied(*change, wishes_change + self._wish_for_weight(INPUT_CHANGE), "propagating"),
            ]
        else:
            terms = [
                Term(*own, Part.NOTHING, wishes),
                Term(*change, Part.NOTHING, wishes_change),
                self._applied(Part.APPLIED, Part.NOTHING, self._wish_for_weight(INPUT), "effective"),
                self._applied(Part.APPLIED, Part.REFERENCE_APPLIED, self._wish_for_weight(INPUT_CHANGE), "propagating"),
            ]
        return [term for term in terms if term.wishes or term.of_vectors]

    def _applied(self, tensor: Part, other: Part, wishes: list[Wish], alignment: str) -> Term:
        """What the weight is applied to, and the norm of all vectors that it is applied to."""
        assert self.layer is not None
        aligned = [(self.alignment[alignment], BASE)] if alignment in self.alignment else []
        if self.layer.is_applied_once:
            return Term(tensor, other, Part.NOTHING, wishes + aligned)
        return Term(tensor, other, Part.NOTHING, wishes, aligned)

    def _wish(self, kind: str, site: str | None) -> list[Wish]:
        """The wish for a term, at the module's own site or a further output's or input's."""
        watch = self.watched.watches.get(kind)
        return [] if watch is None else [(watch if site is None else watch.at(site), OWN)]

    def _wish_for_weight(self, kind: str) -> list[Wish]:
        """The wish for a term of the weight alone."""
        watch = self.watched.watches.get(kind)
        return [] if watch is None or watch.alone is None else [(watch.alone, OWN)]


class Parts:
    """Tensors that terms are made of; what is made of others is made when it is asked for.

    Args:
        unit: The module.
        given: What is known: output and what belongs to it, or input.
    """

    def __init__(self, unit: Unit, given: Mapping[Part, Tensor | None]) -> None:
        self._unit = unit
        self._known: dict[Part, Tensor | None] = {**given, Part.NOTHING: None}

    def difference(self, term: Term) -> Difference | None:
        """The term; ``None`` where a part is missing."""
        tensor, *subtracted = (self._part(part) for part in term.parts)
        is_missing = any(one is None and part is not Part.NOTHING for one, part in zip(subtracted, term.parts[1:], strict=True))
        return None if tensor is None or is_missing else Difference(tensor, *subtracted)

    def _part(self, part: Part) -> Tensor | None:
        if part not in self._known:
            self._known[part] = self._made(part)
        return self._known[part]

    def _made(self, part: Part) -> Tensor | None:
        layer, module, twin = self._unit.layer, self._unit.watched.site.module, self._unit.twin
        if layer is None:
            return None
        if part is Part.BIAS_CHANGE:
            own, reference = self._part(Part.BIAS), self._part(Part.REFERENCE_BIAS)
            return None if own is None or reference is None else Difference(own, reference).computed()
        if part in (Part.BIAS, Part.REFERENCE_BIAS):
            output = self._known[Part.OUTPUT]
            return None if output is None else layer.bias(module if part is Part.BIAS else twin, output)
        of_model = part is Part.APPLIED
        x = self._known[Part.INPUT if of_model else Part.REFERENCE_INPUT]
        return None if x is None else layer.applied_to(module if of_model else twin, x)
