"""Finds the module that made the first non-finite value: the one with finite inputs and weights, not those that the value spread to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_module_monitor.errors import shortened
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.nonfinite.magnitudes import UNKNOWN
from lightning_module_monitor.nonfinite.probe import NO_CALL, Call, Event, Number, ObservedPasses


@dataclass(frozen=True)
class Producer:
    """The source of the first non-finite value, as one rank observed it."""

    site: str
    """The module; ``_root_`` for the LightningModule's own code, and for the batch."""
    is_forward: bool
    micro_batch: int
    """The number of the micro-batch in the step; ``UNKNOWN`` if the step is known and no more."""
    position: int
    """Position of the call in the micro-batch. Among ranks, the earliest position is the cause."""
    words: str
    """The evidence, in a sentence; or the reason why the source is not known."""
    value: str = ""
    """``NaN`` or ``infinity``; empty if the source is not known."""
    cause: str = ""
    """The name of the diagnosis that the evidence itself shows; empty where there is none."""
    location: str = ""
    """The source in words, such as ``the batch``; of a module its name."""


HUGE = 1e5
"""A magnitude above this next to a non-finite value shows that values have grown there."""


def producer(observed: ObservedPasses | None) -> Producer | None:
    """The module that made the first non-finite value of a step (``observed``; ``None`` if all values were finite).

    ``None`` if no non-finite value was passed on: the infinities of a mask end in a softmax, for example.
    """
    if observed is None:
        return None
    searches = (_MicroBatchSearch(observed, micro_batch) for micro_batch in range(len(observed.passes)))
    return next(filter(None, (search.forward() or search.backward() for search in searches)), None)


def kind_of(value: float) -> str:
    """A non-finite largest magnitude in a word."""
    return "NaN" if math.isnan(value) else "infinity"


class _MicroBatchSearch:
    def __init__(self, observed: ObservedPasses, micro_batch: int) -> None:
        self._values, self._weights = observed.values, observed.weights
        self._micro_batch, observed_pass = micro_batch, observed.passes[micro_batch]
        self._calls, self._gradients, self._loss = observed_pass.calls, observed_pass.gradients, observed_pass.loss

    def _is_bad(self, number: Number) -> bool:
        return not math.isfinite(self._values[number])

    # Forward

    def forward(self) -> Producer | None:
        """The first call with finite inputs and a non-finite output that later modules did not mask."""
        suspect = None  # its infinities were masked, but code may have used them elsewhere too
        for index, call in enumerate(self._calls):
            nans = (tensor for tensor in call.others if math.isnan(self._values[tensor]))
            # A non-finite input that code made; infinities beside the first tensor may be a mask.
            bad_input = call.input if call.is_new and self._is_bad(call.input) else next(nans, UNKNOWN)
            if bad_input != UNKNOWN and self._is_passed_on(index):
                return suspect or self._code_before(index, bad_input)
            if not self._is_bad(call.output) or self._stays_within(index):
                continue
            mask = next(filter(self._is_bad, call.others), UNKNOWN)
            source = self._module(index) if mask == UNKNOWN else self._code_before(index, mask)
            if self._is_masked(index):
                suspect = suspect or source
                continue
            is_certain = call.entered == NO_CALL and call.input != UNKNOWN and not self._is_bad(call.input) and mask == UNKNOWN
            return source if is_certain else suspect or source
        if self._is_bad(self._loss):
            kind = kind_of(self._values[self._loss])
            outcome = f"All modules' outputs are finite, and the loss is {kind}"
            words = f"{outcome}: the LightningModule's own code computed it from them and the batch."
            return suspect or self._producer(ROOT, len(self._calls), kind, words, self._last_output(len(self._calls)))
        return None

    def _stays_within(self, index: Event) -> bool:
        """Whether a call returned infinities, and the module that called it returned finite values."""
        call = self._calls[index]
        is_nan = math.isnan(self._values[call.output])
        return not (call.caller == NO_CALL or is_nan or self._is_passed_on(call.caller))

    def _is_masked(self, index: Event) -> bool:
        """Whether a call returned infinities, and the next one with infinite inputs returned finite values."""
        if math.isnan(self._values[self._calls[index].output]):
            return False
        user = next((number for number in range(index + 1, len(self._calls)) if self._is_bad(self._calls[number].input)), None)
        return user is not None and not self._is_passed_on(user)

    def _is_passed_on(self, index: Event) -> bool:
        """Whether a call with a non-finite input has a non-finite output."""
        if self._calls[index].output != UNKNOWN:
            return self._is_bad(self._calls[index].output)
        returns = [call for call in self._calls if call.entered == index]
        return not returns or any(self._is_bad(call.output) for call in returns)

    def _code_before(self, index: Event, bad_input: Number) -> Producer:
        """Code between modules, or the batch, made a non-finite input of a call."""
        call = self._calls[index]
        kind, name, before = kind_of(self._values[bad_input]), call.site.name, self._last_output(index)
        where = self._caller(call)
        owner = "" if where == ROOT else where
        bad = self._nonfinite_weights({key: value for key, value in self._weights.items() if key.rpartition(".")[0] == owner})
        if call.caller == NO_CALL:
            first = f"The first module of the pass, {name}, was given {kind}"
            origin = f"{name} was given {kind}, and all outputs before it are finite" if index else first
            words = f"{origin}: the batch has it, or the LightningModule's own code before it."
            if bad:
                words = f"{name} was given {kind}, and weights of the LightningModule are not finite ({bad})."
        elif bad:
            passes = f"passes {kind} to {name}, and weights of {where} are not finite ({bad})"
            words = f"Code in the forward of {where}, between its modules, {passes}."
        else:
            words = f"Code in the forward of {where}, between its modules, has made {kind} of finite values, and passes it to {name}."
        return self._producer(where, index, kind, words, before, cause="update" if bad else "")

    def _module(self, index: Event) -> Producer:
        """A module with finite inputs returned a non-finite output."""
        call = self._calls[index]
        name, kind = call.site.name, kind_of(self._values[call.output])
        bad = self._nonfinite_weights(self._weights_of(name))
        largest: dict[str, float] = {}
        if bad:
            words = f"Its weights are not finite ({bad}), so that its output has {kind}."
        elif call.entered != NO_CALL:
            largest = self._last_output(index)
            words = f"Its own code, after its modules, has made {kind} of finite values."
        else:
            largest = {"its input": self._values[call.input]} if call.input != UNKNOWN else {}
            words = f"Its input is finite, and its output has {kind}."
        return self._producer(name, index, kind, words, largest, cause="update" if bad else self._recurrent(call.site))

    # Backward

    def backward(self) -> Producer | None:
        """The module whose backward pass made the first non-finite gradient of finite ones."""
        bad = ((index, gradient) for index, gradient in enumerate(self._gradients) if self._is_bad(gradient.magnitude))
        index, first = next(bad, (0, None))
        if first is None:
            return None
        call, kind = self._calls[first.call], kind_of(self._values[first.magnitude])
        # The call whose input it is, unchanged; none if code used it.
        later = range(first.call + 1, len(self._calls))
        users = (number for number in later if self._calls[number].input == call.output and self._calls[number].output != UNKNOWN)
        behind = first.call if first.at_input else next(users, None)
        if behind is not None:
            site = self._calls[behind].site
            at_output = next((gradient for gradient in self._gradients if gradient.call == behind and not gradient.at_input), None)
            arrived = {} if at_output is None else {"the gradient at its output": self._values[at_output.magnitude]}
            words = f"The gradient that arrives at its output is finite, and that at its input has {kind}."
            return self._producer(site.name, index, kind, words, arrived, is_forward=False, cause=self._recurrent(site))
        name = call.site.name
        # A container that returns the output of its last module unchanged has no code there.
        following = self._calls[first.call + 1 :]
        after = next((later for later in following if later.is_new or (later.entered != NO_CALL and later.output != call.output)), None)
        if after is None:
            words = f"The loss is finite, and its gradient that arrives at {name} has {kind}."
            source = self._producer(ROOT, index, kind, words, self._last_output(len(self._calls)), is_forward=False)
            return replace(source, location="the backward pass of the loss")
        where = self._caller(after) if after.entered == NO_CALL else after.site.name
        words = f"Its own code between its modules receives a finite gradient, and passes {kind} back to {name}."
        return self._producer(where, index, kind, words, {}, is_forward=False)

    # Evidence

    def _producer(
        self, site: str, index: int, kind: str, words: str, largest: Mapping[str, float], *, is_forward: bool = True, cause: str = ""
    ) -> Producer:
        """The result; ``largest`` has largest magnitudes by the name of their tensor."""
        weights = [value for value in self._weights_of(site).values() if math.isfinite(value)]
        largest = {**largest, "its weights": max(weights)} if weights else largest
        words = " ".join([words, *(f"The largest magnitude of {what} is {value:.4g}." for what, value in largest.items())])
        if any(value > HUGE for value in largest.values()):
            cause = "learning_rate"
        elif not is_forward:
            cause = cause or "infinite_slope"
        in_words = "the batch or training_step" if site == ROOT else site
        return Producer(site, is_forward, self._micro_batch, index, words, value=kind, cause=cause, location=in_words)

    def _caller(self, call: Call) -> str:
        return ROOT if call.caller == NO_CALL else self._calls[call.caller].site.name

    def _recurrent(self, site: ModuleSite) -> str:
        """The cause that a recurrent module shows: it multiplies by one matrix for every token."""
        return "recurrent" if hasattr(site.module, "weight_hh_l0") else ""

    def _weights_of(self, name: str) -> dict[str, float]:
        """Largest magnitudes of the parameters of a module, and of those within it."""
        return {key: value for key, value in self._weights.items() if name != ROOT and key.startswith(f"{name}.")}

    def _nonfinite_weights(self, weights: Mapping[str, float]) -> str:
        """The parameters that are not finite, in words; empty if all are."""
        return shortened([f"{key} has {kind_of(value)}" for key, value in weights.items() if not math.isfinite(value)])

    def _last_output(self, index: Event) -> dict[str, float]:
        """The largest magnitude of the last output before a call, if there is one."""
        last = next((call for call in reversed(self._calls[:index]) if call.output != UNKNOWN), None)
        return {} if last is None else {f"the output before it, of {last.site.name},": self._values[last.output]}
