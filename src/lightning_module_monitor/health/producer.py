"""Finds the module that made the first non-finite value: the one with finite inputs and weights, not those that the value spread to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.probes.nonfinite import NO_CALL, Observed
from lightning_module_monitor.statistics.magnitudes import UNKNOWN


@dataclass(frozen=True)
class Producer:
    """The source of the first non-finite value, as one rank observed it."""

    site: str
    """The module; ``_root_`` for the LightningModule's own code, and for the batch."""
    is_forward: bool
    micro_batch: int
    """Its number in the step; ``UNKNOWN`` where only that there is such a value is known."""
    place: int
    """Its position in the order of the micro-batch: of two ranks' the earlier one is the cause."""
    words: str
    """The evidence, in a sentence."""
    is_known: bool = True
    """Whether it was ``site``; else the words give the reason why it is not known."""
    value: str = ""
    """``NaN`` or ``infinity``."""
    cause: str = ""
    """The name of the diagnosis that the evidence itself shows; empty where there is none."""
    place_in_words: str = ""
    """Where it was, if not in ``site``."""


HUGE = 1e5
"""Magnitudes beyond this, next to a value that is not finite, have grown there."""


class _Evidence(NamedTuple):
    """A part of the evidence: words, and the magnitude that they name."""

    words: str = ""
    magnitude: float = 0.0


def producer(observed: Observed | None) -> Producer | None:
    """The module that made the first non-finite value of a step (``observed``; ``None`` if all of it was finite).

    ``None`` if no non-finite value was passed on: the infinities of a mask end in a softmax, for example.
    """
    if observed is None:
        return None
    searches = (_Search(observed, micro_batch) for micro_batch in range(len(observed.passes)))
    return next(filter(None, (search.forward() or search.backward() for search in searches)), None)


def kind_of(value: float) -> str:
    """A non-finite largest magnitude in a word."""
    return "NaN" if math.isnan(value) else "infinity"


class _Search:
    """The search in one micro-batch. ``place`` is the index of a call."""

    def __init__(self, observed: Observed, micro_batch: int) -> None:
        self._sites, self._values, self._weights = observed.sites, observed.values, observed.weights
        self._is_bad = observed.is_bad
        self._micro_batch = micro_batch
        self._calls, self._gradients = observed.passes[micro_batch].calls, observed.passes[micro_batch].gradients
        self._loss = observed.passes[micro_batch].loss

    # Forward

    def forward(self) -> Producer | None:
        """The first call with finite inputs and a non-finite output that later modules did not mask."""
        suspect = None  # its infinities were masked, but code may have used them elsewhere too
        for place, call in enumerate(self._calls):
            nans = (one for one in call.others if math.isnan(self._values[one]))
            # A non-finite input that code made; infinities beside the first tensor may be a mask.
            given = call.input if call.is_new and self._is_bad(call.input) else next(nans, UNKNOWN)
            if given != UNKNOWN and self._is_passed_on(place):
                return suspect or self._code_before(place, given)
            if not self._is_bad(call.output) or self._stays_within(place):
                continue
            mask = next(filter(self._is_bad, call.others), UNKNOWN)
            found = self._module(place) if mask == UNKNOWN else self._code_before(place, mask)
            if self._is_masked(place):
                suspect = suspect or found
                continue
            is_certain = call.entered == NO_CALL and call.input != UNKNOWN and not self._is_bad(call.input) and mask == UNKNOWN
            return found if is_certain else suspect or found
        if self._is_bad(self._loss):
            kind = kind_of(self._values[self._loss])
            outcome = f"All modules' outputs are finite, and the loss is {kind}"
            words = f"{outcome}: the LightningModule's own code has made that of them and the batch."
            before = self._last_output(len(self._calls))
            return suspect or self._producer(ROOT, len(self._calls), kind, f"{words.removesuffix('.')}{before.words}.", before)
        return None

    def _stays_within(self, place: int) -> bool:
        """Whether a call returned infinities, and the module that called it returned finite values."""
        call, calls = self._calls[place], self._calls
        if call.caller == NO_CALL or math.isnan(self._values[call.output]):
            return False
        starts = (number for number in reversed(range(place)) if calls[number].site == call.caller and calls[number].output == UNKNOWN)
        start = next(starts, None)
        returns = [one for one in calls if start is not None and one.entered == start]
        return bool(returns) and not any(self._is_bad(one.output) for one in returns)

    def _is_masked(self, place: int) -> bool:
        """Whether a call returned infinities, and the next one with infinite inputs returned finite values."""
        if math.isnan(self._values[self._calls[place].output]):
            return False
        user = next((number for number in range(place + 1, len(self._calls)) if self._is_bad(self._calls[number].input)), None)
        return user is not None and not self._is_passed_on(user)

    def _is_passed_on(self, place: int) -> bool:
        """Whether a call with a non-finite input has a non-finite output."""
        if self._calls[place].output != UNKNOWN:
            return self._is_bad(self._calls[place].output)
        returns = [call for call in self._calls if call.entered == place]
        return not returns or any(self._is_bad(call.output) for call in returns)

    def _code_before(self, place: int, given: int) -> Producer:
        """Code between modules, or the batch, made the input of a call that is at the place ``given`` of the values."""
        call = self._calls[place]
        kind, name, before = kind_of(self._values[given]), self._sites[call.site].name, self._last_output(place)
        if call.caller == NO_CALL:
            first = f"The first module of the pass, {name}, was given {kind}"
            origin = f"{name} was given {kind}, and all before it is finite{before.words}" if place else first
            return self._producer(ROOT, place, kind, f"{origin}: the batch has it, or the LightningModule's own code before it.", before)
        where = self._sites[call.caller].name
        code = f"Code in the forward of {where}, between its modules"
        words = f"{code}, has made {kind} of what is finite{before.words}, and gives it to {name}."
        return self._producer(where, place, kind, words, before)

    def _module(self, place: int) -> Producer:
        """A module with finite inputs returned a non-finite output."""
        call, name = self._calls[place], self._sites[self._calls[place].site].name
        kind = kind_of(self._values[call.output])
        bad = {key: value for key, value in self._weights_of(name).items() if not math.isfinite(value)}
        given = _Evidence()
        if bad:
            listed = ", ".join(f"{key} has {kind_of(value)}" for key, value in bad.items())
            words = f"Its weights are not finite ({listed}), so that its output has {kind}."
        elif call.entered != NO_CALL:
            given = self._last_output(place)
            words = f"Its own code, after its modules, has made {kind} of what is finite{given.words}."
        else:
            given = self._largest_magnitude(call.input, "") if call.input != UNKNOWN else given
            words = f"Its input is finite{given.words}, and its output has {kind}."
        return self._producer(name, place, kind, words, given, cause="update" if bad else self._recurrent(call.site))

    # Backward

    def backward(self) -> Producer | None:
        """The module whose backward pass made the first non-finite gradient of finite ones."""
        place, first = next(((place, one) for place, one in enumerate(self._gradients) if self._is_bad(one.magnitude)), (0, None))
        if first is None:
            return None
        call, kind = self._calls[first.call], kind_of(self._values[first.magnitude])
        # The call whose input it is, unchanged; none if code used it.
        later = range(first.call + 1, len(self._calls))
        users = (number for number in later if self._calls[number].input == call.output and self._calls[number].output != UNKNOWN)
        behind = first.call if first.at_input else next(users, None)
        if behind is not None:
            site = self._calls[behind].site
            at_output = next((one for one in self._gradients if one.call == behind and not one.at_input), None)
            arrived = _Evidence() if at_output is None else self._largest_magnitude(at_output.magnitude, " at the output")
            words = f"The gradient that arrives at its output is finite, and that at its input has {kind}{arrived.words}."
            return self._producer(self._sites[site].name, place, kind, words, arrived, is_forward=False, cause=self._recurrent(site))
        name = self._sites[call.site].name
        # A container that returns what its last part has returned, unchanged, has no code there.
        after = next(
            (one for one in self._calls[first.call + 1 :] if one.is_new or (one.entered != NO_CALL and one.output != call.output)), None
        )
        if after is None:
            before = self._last_output(len(self._calls))
            words = f"The loss is finite, and the gradient that it hands to {name} has {kind}{before.words}."
            return replace(
                self._producer(ROOT, place, kind, words, before, is_forward=False), place_in_words="the backward pass of the loss"
            )
        owner = after.site if after.entered != NO_CALL else after.caller
        where = ROOT if owner == NO_CALL else self._sites[owner].name
        words = f"Code of its own between its modules gets a gradient that is finite, and hands {kind} back to {name}."
        return self._producer(where, place, kind, words, is_forward=False)

    # Evidence

    def _producer(
        self, site: str, place: int, kind: str, words: str, *evidence: _Evidence, is_forward: bool = True, cause: str = ""
    ) -> Producer:
        largest = max((value for value in self._weights_of(site).values() if math.isfinite(value)), default=None)
        if largest is not None:
            words += f" The largest magnitude of its weights is {largest:.4g}."
        if any(part.magnitude > HUGE for part in evidence) or (largest or 0.0) > HUGE:
            cause = "learning_rate"
        elif not is_forward:
            cause = cause or "infinite_slope"
        in_words = "the batch or training_step" if site == ROOT else site
        return Producer(site, is_forward, self._micro_batch, place, words, value=kind, cause=cause, place_in_words=in_words)

    def _recurrent(self, site: int) -> str:
        """The cause that a recurrent module shows: it multiplies by one matrix for every token."""
        return "recurrent" if hasattr(self._sites[site].module, "weight_hh_l0") else ""

    def _weights_of(self, name: str) -> dict[str, float]:
        """Largest magnitudes of the parameters of a module, and of those within it."""
        return {key: value for key, value in self._weights.items() if name != ROOT and key.startswith(f"{name}.")}

    def _last_output(self, place: int) -> _Evidence:
        last = next((call for call in reversed(self._calls[:place]) if call.output != UNKNOWN), None)
        if last is None:
            return _Evidence()
        magnitude = self._values[last.output]
        return _Evidence(f" (last the output of {self._sites[last.site].name}, its largest magnitude {magnitude:.4g})", magnitude)

    def _largest_magnitude(self, place: int, where: str) -> _Evidence:
        magnitude = self._values[place]
        return _Evidence(f" (the largest magnitude{where} is {magnitude:.4g})", magnitude)
