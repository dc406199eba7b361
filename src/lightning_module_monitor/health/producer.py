"""Finds the module that made the first non-finite value: the one with finite inputs and weights, not those that the value spread to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.probes.nonfinite import NO_CALL, Call, Observed
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
    call: int = 0
    """Number of the module's call in this micro-batch."""
    is_known: bool = True
    """Whether it was ``site``; else the words give the reason why it is not known."""
    cause: str = ""
    """The name of the diagnosis that the evidence itself shows; empty where there is none."""


HUGE = 1e5
"""Magnitudes beyond this, next to a value that is not finite, have grown there."""


class _Evidence(NamedTuple):
    """A part of the evidence: words, and the magnitude that they name."""

    words: str = ""
    magnitude: float = 0.0


def _cause(*parts: _Evidence) -> str:
    return "learning_rate" if any(part.magnitude > HUGE for part in parts) else ""


def producer(observed: Observed | None) -> Producer | None:
    """The module that made the first non-finite value of a step (``observed``; ``None`` if all of it was finite).

    ``None`` if no non-finite value was passed on: the infinities of a mask end in a softmax, for example.
    """
    if observed is None:
        return None
    candidates = (_forward(observed, number) or _backward(observed, number) for number in range(len(observed.passes)))
    return next(filter(None, candidates), None)


# Forward


def _forward(observed: Observed, micro_batch: int) -> Producer | None:
    """The first call with finite inputs and a non-finite output that later modules did not mask."""
    calls = observed.passes[micro_batch].calls
    suspect = None  # its infinities were masked, but code may have used them elsewhere too
    for place, call in enumerate(calls):
        nans = (one for one in call.others if math.isnan(observed.values[one]))
        # A non-finite input that code made; infinities beside the first tensor may be a mask.
        given = call.input if call.is_new and observed.is_bad(call.input) else next(nans, UNKNOWN)
        if given != UNKNOWN and _is_passed_on(observed, calls, place):
            return suspect or _code_before(observed, micro_batch, place, given)
        if not observed.is_bad(call.output) or _stays_within(observed, calls, place):
            continue
        mask = next(filter(observed.is_bad, call.others), UNKNOWN)
        found = _own(observed, micro_batch, place) if mask == UNKNOWN else _code_before(observed, micro_batch, place, mask)
        if _is_taken_out(observed, calls, place):
            suspect = suspect or found
            continue
        is_certain = call.entered == NO_CALL and call.input != UNKNOWN and not observed.is_bad(call.input) and mask == UNKNOWN
        return found if is_certain else suspect or found
    loss = observed.passes[micro_batch].loss
    if observed.is_bad(loss):
        outcome = f"All modules' outputs are finite, and the loss is {kind_of(observed.values[loss])}"
        words = f"{outcome}: the LightningModule's own code has made that of them and the batch."
        return suspect or Producer(ROOT, True, micro_batch, len(calls), words)
    return None


def _stays_within(observed: Observed, calls: Sequence[Call], place: int) -> bool:
    """Whether a call returned infinities, and the module that called it returned finite values."""
    caller = calls[place].caller
    if caller == NO_CALL or math.isnan(observed.values[calls[place].output]):
        return False
    start = next((number for number in reversed(range(place)) if calls[number].site == caller and calls[number].output == UNKNOWN), None)
    returns = [call for call in calls if start is not None and call.entered == start]
    return bool(returns) and not any(observed.is_bad(call.output) for call in returns)


def _is_taken_out(observed: Observed, calls: Sequence[Call], place: int) -> bool:
    """Whether a call returned infinities, and the next one with infinite inputs returned finite values."""
    if math.isnan(observed.values[calls[place].output]):
        return False
    user = next((number for number in range(place + 1, len(calls)) if observed.is_bad(calls[number].input)), None)
    return user is not None and not _is_passed_on(observed, calls, user)


def _is_passed_on(observed: Observed, calls: Sequence[Call], place: int) -> bool:
    """Whether a call with a non-finite input has a non-finite output."""
    if calls[place].output != UNKNOWN:
        return observed.is_bad(calls[place].output)
    returns = [call for call in calls if call.entered == place]
    return not returns or any(observed.is_bad(call.output) for call in returns)


def _code_before(observed: Observed, micro_batch: int, place: int, given: int) -> Producer:
    """Code between modules, or the batch, made the input of a call at the place ``given``."""
    calls = observed.passes[micro_batch].calls
    call = calls[place]
    kind, name = kind_of(observed.values[given]), observed.sites[call.site].name
    before = _last_output(observed, calls[:place])
    if call.caller == NO_CALL:
        origin = (
            f"{name} was given {kind}, and all before it is finite{before.words}"
            if place
            else f"The first module of the pass, {name}, was given {kind}"
        )
        words = f"{origin}: the batch has it, or the LightningModule's own code before it."
        return Producer(ROOT, True, micro_batch, place, words, cause=_cause(before))
    where = observed.sites[call.caller].name
    words = f"Code in the forward of {where}, between its modules, has made {kind} of what is finite{before.words}, and gives it to {name}."
    weights, number = _weights_named(observed, where), _calls_before(calls, place, call.caller, observed)
    return Producer(where, True, micro_batch, place, words + weights.words, number, cause=_cause(before, weights))


def _own(observed: Observed, micro_batch: int, place: int) -> Producer:
    """A module with finite inputs returned a non-finite output."""
    calls = observed.passes[micro_batch].calls
    call, name = calls[place], observed.sites[calls[place].site].name
    kind = kind_of(observed.values[call.output])
    bad = {key: value for key, value in _weights_of(observed, name).items() if not math.isfinite(value)}
    given = _Evidence()
    if bad:
        listed = ", ".join(f"{key} has {kind_of(value)}" for key, value in bad.items())
        words = f"Its weights are not finite ({listed}), so that its output has {kind}: they were so when the step began."
    elif call.entered != NO_CALL:
        given = _last_output(observed, calls[:place])
        words = f"Its own code, after its modules, has made {kind} of what is finite{given.words}."
    else:
        given = _largest_magnitude(observed, call.input, "") if call.input != UNKNOWN else given
        words = f"Its input is finite{given.words}, and its output has {kind}."
    weights, number = _weights_named(observed, name), _calls_before(calls, place, call.site, observed)
    cause = _cause(given, weights) or ("update" if bad else "")
    return Producer(name, True, micro_batch, place, words + weights.words, number, cause=cause)


def _calls_before(calls: Sequence[Call], place: int, site: int, observed: Observed) -> int:
    """How often a module was called before this call, in its micro-batch."""
    is_leaf = site != NO_CALL and next(observed.sites[site].module.children(), None) is None
    starts = [call for call in calls[: place + 1] if call.site == site and not call.is_further and (is_leaf or call.entered == NO_CALL)]
    return max(len(starts) - 1, 0)


def _last_output(observed: Observed, calls: Sequence[Call]) -> _Evidence:
    last = next((call for call in reversed(calls) if call.output != UNKNOWN), None)
    if last is None:
        return _Evidence()
    magnitude = observed.values[last.output]
    return _Evidence(f" (last the output of {observed.sites[last.site].name}, its largest magnitude {magnitude:.4g})", magnitude)


def _largest_magnitude(observed: Observed, place: int, where: str) -> _Evidence:
    magnitude = observed.values[place]
    return _Evidence(f" (the largest magnitude{where} is {magnitude:.4g})", magnitude)


# Backward


def _backward(observed: Observed, micro_batch: int) -> Producer | None:
    """The module whose backward pass made the first non-finite gradient of finite ones."""
    calls, gradients = observed.passes[micro_batch].calls, observed.passes[micro_batch].gradients
    place, first = next(((place, one) for place, one in enumerate(gradients) if observed.is_bad(one.place)), (0, None))
    if first is None:
        return None
    call, kind = calls[first.call], kind_of(observed.values[first.place])
    name = observed.sites[call.site].name
    users = (number for number, one in enumerate(calls) if number > first.call and one.input == call.output and one.output != UNKNOWN)
    behind = first.call if first.of_input else next(users, None)  # the call whose input it is, unchanged; none if code used it
    if behind is not None:
        name = observed.sites[calls[behind].site].name
        at_output = next((one for one in gradients if one.call == behind and not one.of_input), None)
        arrived = _Evidence() if at_output is None else _largest_magnitude(observed, at_output.place, " at the output")
        weights = _weights_named(observed, name)
        words = f"The gradient that arrives at its output is finite, and that at its input has {kind}{arrived.words}.{weights.words}"
        number = _calls_before(calls, behind, calls[behind].site, observed)
        return Producer(name, False, micro_batch, place, words, number, cause=_cause(arrived, weights))
    after = next((one for one in calls[first.call + 1 :] if one.is_new or one.entered != NO_CALL), None)
    if after is None:
        words = f"The loss is finite, and the gradient that it hands to {name} has {kind}."
        return Producer(ROOT, False, micro_batch, place, words)
    owner = after.site if after.entered != NO_CALL else after.caller
    where = ROOT if owner == NO_CALL else observed.sites[owner].name
    words = f"Code of its own between its modules gets a gradient that is finite, and hands {kind} back to {name}."
    weights = _weights_named(observed, where)
    return Producer(where, False, micro_batch, place, words + weights.words, cause=_cause(weights))


# Words


def _weights_of(observed: Observed, name: str) -> dict[str, float]:
    """Largest magnitudes of the parameters of a module, and of those within it."""
    return {key: value for key, value in observed.weights.items() if name != ROOT and key.startswith(f"{name}.")}


def _weights_named(observed: Observed, name: str) -> _Evidence:
    largest = max((value for value in _weights_of(observed, name).values() if math.isfinite(value)), default=None)
    return _Evidence() if largest is None else _Evidence(f" The largest magnitude of its weights is {largest:.4g}.", largest)


def kind_of(value: float) -> str:
    """A non-finite largest magnitude in a word."""
    return "NaN" if math.isnan(value) else "infinity"
