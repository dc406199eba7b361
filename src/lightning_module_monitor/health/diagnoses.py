"""Diagnoses: the causes that explain findings, at most three."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_module_monitor.display import Described, Description, counted
from lightning_module_monitor.health.alerts import CURE
from lightning_module_monitor.record import RANK_DISAGREEMENT, Finding

MAX_DIAGNOSES = 3


@dataclass(frozen=True)
class Diagnosis:
    """A likely cause of findings, and what to try.

    Attributes:
        name: Of the cause, e.g. ``learning_rate``.
        headline: The cause in a sentence.
        first_step: The first step that shows it.
        site: The first module or parameter that shows it; empty where it is about none.
        evidence: What was found, in sentences with figures.
        num_consequences: How many other findings it explains.
        advice: What to try.
        key: The key of the series that shows it first; empty where there is none.
    """

    name: str
    headline: str
    first_step: int
    site: str
    evidence: tuple[str, ...]
    num_consequences: int
    advice: str
    key: str = ""

    def __str__(self) -> str:
        where = f", first at {self.site}" if self.site else ""
        num = self.num_consequences
        more = f" {counted(num, 'other finding')} follow{'s' if num == 1 else ''} from it." if num else ""
        return f"{self.headline} (from step {self.first_step} on{where}). {self.evidence[0]}{more} Try: {self.advice}."


class Diagnoses(Described, list[Diagnosis]):
    """Diagnoses in their order."""

    def _describe(self) -> Description:
        rows = [(str(one.first_step), one.headline, one.site, one.evidence[0], one.advice) for one in self]
        return Description(counted(len(self), "diagnosis", "diagnoses"), ("from step", "what", "where", "evidence", "try"), rows)

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"


@dataclass(frozen=True)
class Cause:
    """An entry of the table of causes."""

    name: str
    headline: str
    shown_by: tuple[str, ...]
    """Names of the findings that show it."""
    explains: tuple[str, ...]
    """Names of the findings that may follow from it, where they do not begin earlier."""
    advice: str
    shows: Callable[[Finding], bool] = lambda _finding: True
    """Whether a finding of such a name does show it."""


NONFINITE = ("nonfinite", "values that are not finite")
_ZERO = ("outputs that are zero", "gradients that are zero")
_STILL = ("frozen_updates", "weights that do not move")
_GROWTH = (
    "exploding",
    "growing_weights",
    "diverging",
    "activations that explode",
    "gradients that explode",
    "updates that are large",
    "spikes of the gradient",
)
_FLAT = ("saturation", "vanishing", "entropy_collapse", "large logits of attention")

CAUSES = (
    Cause(
        "data",
        "The data has NaN or infinity",
        NONFINITE,
        (*NONFINITE, *_GROWTH, *_FLAT, *_ZERO, *_STILL, "dead_units"),
        "look at the batch of that step, and drop or clip what is not finite in the data set",
        lambda one: one.cause == "data",
    ),
    Cause(
        RANK_DISAGREEMENT,
        "Ranks have come apart: copies of one parameter differ",
        (RANK_DISAGREEMENT,),
        _GROWTH,
        CURE,
    ),
    Cause(
        "no_optimizer",
        "No optimizer has some parameters that get a gradient",
        ("no_optimizer",),
        (*_STILL, "exploding", "gradients that explode"),
        "give them to the optimizer in configure_optimizers, or set requires_grad to False where they are to stay as they are",
    ),
    Cause(
        "missing_normalization",
        "Activations grow from layer to layer",
        ("growing_over_depth",),
        (*NONFINITE, *_GROWTH, *_FLAT, *_STILL),
        "normalization layers, an initialization that keeps the scale (He for ReLU, Xavier for tanh), residual connections",
        lambda one: one.first_step == 0,
    ),
    Cause(
        "overflow",
        "Magnitudes leave float16",
        (*NONFINITE, "skipped steps"),
        (*NONFINITE, "skipped steps"),
        "precision: bf16-mixed, which has the range of float32; or smaller weights, inputs or losses",
        lambda one: one.name == "skipped steps" or one.cause == "overflow",
    ),
    Cause(
        "learning_rate",
        "The learning rate is too high",
        ("exploding", "growing_weights", "updates that are large", "growing_over_depth", *NONFINITE),
        (*NONFINITE, *_GROWTH, *_FLAT, *_ZERO, *_STILL, "growing_over_depth", "dead_units", "skipped steps"),
        "a learning rate that is ten times lower, warm-up, clipping of gradients",
        lambda one: one.name not in NONFINITE or one.cause == "learning_rate",
    ),
    Cause(
        "diverging",
        "The training loss has grown: if it is meant to fall, the learning rate is too high",
        ("diverging",),
        (*NONFINITE, *_GROWTH, *_FLAT, *_ZERO, *_STILL, "growing_over_depth", "dead_units"),
        "a learning rate that is ten times lower, warm-up, clipping of gradients; look at the data of the first step",
    ),
    Cause(
        "attention",
        "Attention is saturated: heads look at a single key",
        ("entropy_collapse", "large logits of attention"),
        ("saturation", "vanishing", *_ZERO),
        "a normalization of queries and keys, a scale of 1 / sqrt(d), a lower learning rate, longer warm-up",
    ),
    Cause(
        "dead_from_start",
        "ReLU units are dead from the start: the initialization kills them",
        ("dead_units",),
        (*_ZERO, *_STILL, "vanishing"),
        "biases that start at 0, He initialization, LeakyReLU or GELU, a normalization layer in front",
        lambda one: one.first_step == 0,
    ),
    Cause(
        "dead_units",
        "ReLU units have died while training: updates were too large",
        ("dead_units", "outputs that are zero"),
        (*_ZERO, *_STILL, "vanishing"),
        "a lower learning rate, warm-up, LeakyReLU or GELU, a normalization layer in front",
        lambda one: one.name == "dead_units" or one.first_step > 0,
    ),
    Cause(
        "saturation",
        "Activation functions are saturated: next to no gradient comes through",
        ("saturation",),
        ("vanishing", *_ZERO, *_STILL),
        "a smaller initialization, a normalization layer in front, ReLU or GELU; for a softmax a scale of 1 / sqrt(d)",
    ),
    Cause(
        "vanishing",
        "Gradients vanish on their way back",
        ("vanishing", "gain of the gradient between blocks"),
        (*_ZERO, *_STILL),
        "residual connections, normalization layers, an initialization that keeps the scale, fewer layers",
        lambda one: one.first_step == 0 or one.name != "vanishing",
    ),
    Cause(
        "vanished",
        "Gradients have come to vanish while training: updates were too large",
        ("vanishing",),
        (*_ZERO, *_STILL),
        "a lower learning rate, warm-up; a normalization layer",
    ),
    Cause(
        "frozen",
        "Parameters that are to be trained do not move",
        _STILL,
        _ZERO,
        "where the model does not use them, as the mask token of a checkpoint, set requires_grad to False; else look for a detach() or "
        "no_grad() in their way, a learning rate of 0, and, in half precision, updates that are rounded away",
    ),
    Cause(
        "update",
        "Weights are not finite: the update of the step before has made them so, or code of the model that writes into them",
        NONFINITE,
        (*NONFINITE, *_GROWTH, *_ZERO, *_STILL, *_FLAT),
        "health: {nonfinite: always}, which names the module whose gradient was not finite",
        lambda one: one.cause == "update",
    ),
    Cause(
        "nonfinite",
        "A value is not finite",
        NONFINITE,
        (*NONFINITE, *_GROWTH, *_ZERO, *_STILL, *_FLAT),
        "look at the code of the module that is named: logarithms and roots of 0, divisions by 0, overflow of exp",
    ),
    Cause(
        "zero",
        "A part of the model passes on zeros alone",
        _ZERO,
        (),
        "look whether it is meant to be idle, for a detach() or no_grad(), and for dead units",
    ),
    Cause(
        "growth",
        "Sizes grow over the run",
        tuple(name for name in _GROWTH if name != "spikes of the gradient"),  # one batch may make one, and the first step does
        (),
        "a lower learning rate, clipping of gradients, a normalization layer",
    ),
)
"""In the order of causality: of two that begin in the same step, the earlier one may explain the later one."""


def diagnose(findings: Iterable[Finding]) -> Diagnoses:
    """The causes that no other one explains, in the order of their first steps; at most ``MAX_DIAGNOSES``."""
    rest = sorted(findings, key=lambda one: one.first_step)
    diagnoses = Diagnoses()
    while rest and len(diagnoses) < MAX_DIAGNOSES:
        candidates = [
            (cause, found) for cause in CAUSES if (found := [one for one in rest if one.name in cause.shown_by and cause.shows(one)])
        ]
        if not candidates:
            break
        cause, found = _root(candidates)
        first = found[0].first_step
        explained = [one for one in rest if one in found or (one.name in cause.explains and one.first_step >= first)]
        evidence = tuple(one.words for one in found[:3])
        num_others = len(explained) - len(found)
        diagnoses.append(Diagnosis(cause.name, cause.headline, first, found[0].site, evidence, num_others, cause.advice, found[0].key))
        rest = [one for one in rest if one not in explained]
    return diagnoses


def _root(candidates: Sequence[tuple[Cause, list[Finding]]]) -> tuple[Cause, list[Finding]]:
    """The first of the candidates that no other one explains; an error precedes a warning of the same step."""

    def is_explained(place: int) -> bool:
        shown = candidates[place][1][0]
        return any(
            shown.name in cause.explains
            and (found[0].first_step < shown.first_step or (found[0].first_step == shown.first_step and number < place))
            for number, (cause, found) in enumerate(candidates)
            if number != place
        )

    roots = [one for place, one in enumerate(candidates) if not is_explained(place)]
    return min(roots, key=lambda one: (one[1][0].first_step, one[1][0].severity != "error"))
