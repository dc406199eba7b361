"""Finds the module that made the first non-finite value: the one with finite inputs and weights, not those that the value spread to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.probes.nonfinite import NOBODY, Call, Gradient, Seen
from lightning_module_monitor.statistics.magnitudes import UNKNOWN


@dataclass(frozen=True)
class Producer:
    """What made the first non-finite value, as one rank observed it."""

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


def producer(seen: Seen) -> Producer | None:
    """Find the first non-finite value of a step, and what made it.

    Args:
        seen: What was observed in the step.

    Returns:
        The producer. ``None`` if no non-finite value was passed on: the infinities of a mask end in a softmax, say.
    """
    for micro_batch in range(len(seen.passes)):
        found = _forward(seen, micro_batch) or _backward(seen, micro_batch)
        if found is not None:
            return found
    return None


# Forward


def _forward(seen: Seen, micro_batch: int) -> Producer | None:
    """The first call with finite inputs and a non-finite output that later modules did not mask."""
    calls = seen.passes[micro_batch].calls
    suspect = None  # its infinities were masked, but code may have used them elsewhere too
    for place, call in enumerate(calls):
        given = _given(seen, call)
        if given != UNKNOWN and _is_passed_on(seen, calls, place):
            return suspect or _code_before(seen, micro_batch, place, given)
        if not seen.is_bad(call.output) or _stays_within(seen, calls, place):
            continue
        mask = next(filter(seen.is_bad, call.others), UNKNOWN)
        found = _own(seen, micro_batch, place) if mask == UNKNOWN else _code_before(seen, micro_batch, place, mask)
        if _is_taken_out(seen, calls, place):
            suspect = suspect or found
            continue
        is_certain = call.entered == NOBODY and call.input != UNKNOWN and not seen.is_bad(call.input) and mask == UNKNOWN
        return found if is_certain else suspect or found
    loss = seen.passes[micro_batch].loss
    if seen.is_bad(loss):
        kind = kind_of(seen.values[loss])
        words = (
            f"All modules' outputs are finite, and the loss is {kind}: the LightningModule's own code has made that of them and the batch."
        )
        return suspect or Producer(ROOT, True, micro_batch, len(calls), words)
    return None


def _given(seen: Seen, call: Call) -> int:
    """Place of a non-finite input that code made; infinities beside the first tensor may be a mask. ``UNKNOWN``: there is none."""
    nans = (place for place in call.others if math.isnan(seen.values[place]))
    return call.input if call.is_new and seen.is_bad(call.input) else next(nans, UNKNOWN)


def _stays_within(seen: Seen, calls: Sequence[Call], place: int) -> bool:
    """Whether a call returned infinities, and the module that called it returned finite values."""
    caller = calls[place].caller
    if caller == NOBODY or math.isnan(seen.values[calls[place].output]):
        return False
    starts = (number for number in reversed(range(place)) if calls[number].site == caller and calls[number].output == UNKNOWN)
    start = next(starts, None)
    returns = [call for call in calls if start is not None and call.entered == start]
    return bool(returns) and not any(seen.is_bad(call.output) for call in returns)


def _is_taken_out(seen: Seen, calls: Sequence[Call], place: int) -> bool:
    """Whether a call returned infinities, and the next one with infinite inputs returned finite values."""
    if math.isnan(seen.values[calls[place].output]):
        return False
    users = (number for number in range(place + 1, len(calls)) if seen.is_bad(calls[number].input))
    user = next(users, None)
    return user is not None and not _is_passed_on(seen, calls, user)


def _is_passed_on(seen: Seen, calls: Sequence[Call], place: int) -> bool:
    """Whether a call with a non-finite input has a non-finite output."""
    if calls[place].output != UNKNOWN:
        return seen.is_bad(calls[place].output)
    returns = [call for call in calls if call.entered == place]
    return not returns or any(seen.is_bad(call.output) for call in returns)


def _code_before(seen: Seen, micro_batch: int, place: int, given: int) -> Producer:
    """Code between modules, or the batch, made the input of a call at the place ``given``."""
    calls = seen.passes[micro_batch].calls
    call = calls[place]
    kind, name = kind_of(seen.values[given]), seen.sites[call.site].name
    before = _last_output(seen, calls[:place])
    if call.caller == NOBODY:
        origin = (
            f"{name} was given {kind}, and all before it is finite{before}"
            if place
            else f"The first module of the pass, {name}, was given {kind}"
        )
        words = f"{origin}: the batch has it, or the LightningModule's own code before it."
        return Producer(ROOT, True, micro_batch, place, words)
    where = seen.sites[call.caller].name
    words = f"Code in the forward of {where}, between its modules, has made {kind} of what is finite{before}, and gives it to {name}."
    return Producer(where, True, micro_batch, place, words + _weights_in_words(seen, where), _calls_before(calls, place, call.caller, seen))


def _own(seen: Seen, micro_batch: int, place: int) -> Producer:
    """A module with finite inputs returned a non-finite output."""
    calls = seen.passes[micro_batch].calls
    call, name = calls[place], seen.sites[calls[place].site].name
    kind = kind_of(seen.values[call.output])
    bad = {key: value for key, value in _weights_of(seen, name).items() if not math.isfinite(value)}
    if bad:
        listed = ", ".join(f"{key} has {kind_of(value)}" for key, value in bad.items())
        words = f"Its weights are not finite ({listed}), so that its output has {kind}: they were so when the step began."
    elif call.entered != NOBODY:
        words = f"Its own code, after its modules, has made {kind} of what is finite{_last_output(seen, calls[:place])}."
    else:
        got = f" (the largest magnitude is {seen.values[call.input]:.4g})" if call.input != UNKNOWN else ""
        words = f"Its input is finite{got}, and its output has {kind}."
    return Producer(name, True, micro_batch, place, words + _weights_in_words(seen, name), _calls_before(calls, place, call.site, seen))


def _calls_before(calls: Sequence[Call], place: int, site: int, seen: Seen) -> int:
    """How often a module was called before this call, in its micro-batch."""
    is_leaf = site != NOBODY and next(seen.sites[site].module.children(), None) is None
    starts = [call for call in calls[: place + 1] if call.site == site and not call.is_further and (is_leaf or call.entered == NOBODY)]
    return max(len(starts) - 1, 0)


def _last_output(seen: Seen, calls: Sequence[Call]) -> str:
    last = next((call for call in reversed(calls) if call.output != UNKNOWN), None)
    return (
        f" (last the output of {seen.sites[last.site].name}, its largest magnitude {seen.values[last.output]:.4g})"
        if last is not None
        else ""
    )


# Backward


def _backward(seen: Seen, micro_batch: int) -> Producer | None:
    """The module whose backward pass made the first non-finite gradient of finite ones."""
    calls, gradients = seen.passes[micro_batch].calls, seen.passes[micro_batch].gradients
    place, first = next(((place, one) for place, one in enumerate(gradients) if seen.is_bad(one.place)), (0, None))
    if first is None:
        return None
    call, kind = calls[first.call], kind_of(seen.values[first.place])
    name = seen.sites[call.site].name
    behind = first.call if first.of_input else _user_of(calls, first.call)
    if behind is not None:
        name = seen.sites[calls[behind].site].name
        words = f"The gradient that arrives at its output is finite, and that at its input has {kind}{_arrived(seen, gradients, behind)}."
        number = _calls_before(calls, behind, calls[behind].site, seen)
        return Producer(name, False, micro_batch, place, words + _weights_in_words(seen, name), number)
    after = next((one for one in calls[first.call + 1 :] if one.is_new or one.entered != NOBODY), None)
    if after is None:
        words = f"The loss is finite, and the gradient that it hands to {name} has {kind}."
        return Producer(ROOT, False, micro_batch, place, words)
    owner = after.site if after.entered != NOBODY else after.caller
    where = ROOT if owner == NOBODY else seen.sites[owner].name
    words = f"Code of its own between its modules gets a gradient that is finite, and hands {kind} back to {name}."
    return Producer(where, False, micro_batch, place, words + _weights_in_words(seen, where))


def _user_of(calls: Sequence[Call], place: int) -> int | None:
    """The call of a module without submodules whose input is a call's output, unchanged; ``None`` if code used it."""
    users = (number for number, call in enumerate(calls) if number > place and call.input == calls[place].output and call.output != UNKNOWN)
    return next(users, None)


def _arrived(seen: Seen, gradients: Sequence[Gradient], place: int) -> str:
    at_output = next((one for one in gradients if one.call == place and not one.of_input), None)
    return f" (the largest magnitude at the output is {seen.values[at_output.place]:.4g})" if at_output is not None else ""


# Words


def _weights_of(seen: Seen, name: str) -> dict[str, float]:
    """Largest magnitudes of the parameters of a module, and of those within it."""
    return {key: value for key, value in seen.weights.items() if name != ROOT and key.startswith(f"{name}.")}


def _weights_in_words(seen: Seen, name: str) -> str:
    finite = {key: value for key, value in _weights_of(seen, name).items() if math.isfinite(value)}
    return f" The largest magnitude of its weights is {max(finite.values()):.4g}." if finite else ""


def kind_of(value: float) -> str:
    """A non-finite largest magnitude in a word."""
    return "NaN" if math.isnan(value) else "infinity"
