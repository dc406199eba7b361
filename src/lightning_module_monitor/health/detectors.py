"""The table of detectors: the values that each judges, its limits, their source, and the cure.

Those with a ``rule`` are judged record by record, while training and later on a store, by the same code. The others need the whole run: the
report judges them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.alerts import Action, AlertRule, Figures, has_fallen
from lightning_module_monitor.record import CONTEXT_KIND, LOSS, OWN_KIND, STEP_SKIPPED, TRAIN, Key, Severity

FINITE_STATISTICS = ("nonfinite_count", "norm", "rms", "abs_max", "abs_mean", "mean", "min", "max", "token_norm", "token_rms")
"""Statistics that show a non-finite element: the number of such elements, and those that are finite for finite tensors, unlike the ``std``
of one element or a ratio to a zero."""

Sources = Sequence[tuple[Sequence[str], Sequence[str]]]
"""Kinds and statistics. In each entry the first one that was recorded is judged, in the order of kinds, then of statistics."""


@dataclass(frozen=True)
class Detector:
    """A frequent problem of training, and its condition on recorded values."""

    name: str
    sources: Sources
    """The values of training that it judges."""
    formula: str
    limit: str
    """The limit in words; ``rule`` or ``limits`` has the number."""
    source: str
    cure: str
    severity: Severity = "warning"
    """Severity of the findings of a detector with a rule."""
    rule: AlertRule | None = None
    """Without name and keys, which the other fields give."""
    limits: Mapping[Severity, float] = field(default_factory=dict)
    """Limits of a detector without a rule."""
    unless_loss_falls: float = math.inf
    """Without a rule: a run whose loss has fallen by more than this part of the first one is not judged."""
    recorded_by: str = ""
    """The options that record the values, beside ``health.watch``; empty if they are recorded wherever they exist."""

    @property
    def needs(self) -> str:
        """The options that record the values that it judges."""
        return f"health: {{watch: {self.name}}}" if self.rule is not None else self.recorded_by

    @property
    def is_known_later(self) -> bool:
        """Whether a store has all that it needs: which parameters an optimizer has is not recorded."""
        return self.rule is None or self.rule.parameters != "untrained"

    def is_silenced_by(self, first_loss: float, loss: float) -> bool:
        """Whether it does not judge where the loss has fallen so far."""
        return has_fallen(first_loss, loss, self.unless_loss_falls if self.rule is None else self.rule.unless_loss_falls)

    @property
    def is_of_monitor(self) -> bool:
        """Whether it looks at figures that have no sites: the monitor's own, and the loss."""
        return self.sources[0][0][0] in (OWN_KIND, CONTEXT_KIND)

    def alert(self, then: tuple[Action, ...] = ("warn",)) -> AlertRule:
        """The detector as a rule on the values that are recorded for it."""
        assert self.rule is not None, f"{self.name} needs the whole run"
        words = f"{self.limit} Try: {self.cure}."
        return replace(self.rule, name=self.name, concerns=self._concerns, then=then, severity=self.severity, words=words)

    def _concerns(self, parts: Key, _key: str) -> bool:
        return parts.stage == TRAIN and any(
            (parts.kind, parts.statistic) == (kinds[0], statistics[0]) for kinds, statistics in self.sources
        )

    def severity_of(self, value: float) -> Severity:
        """The severity of a value that is at least the limit of a warning."""
        return "error" if value >= self.limits.get("error", math.inf) else "warning"


NUM_BEFORE = 3
"""So many weights before one, in the order of the model, show whether its gradient alone is small."""


@functools.lru_cache(maxsize=64)
def _is_weight(keys: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array(["weight" in Key.parse(key).site for key in keys])


def relative_to_largest(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The largest value of every weight and the three before it, over the largest one of all.

    What reaches a weight reaches those before it: the gradients of queries and keys alone are tiny where attention is still uniform. Zeros
    are left out, as a weight without any gradient has not faded, and biases: in front of BatchNorm one gets no more than what rounding
    leaves.
    """
    is_size = _is_weight(keys) & (values > 0) & np.isfinite(values)
    sizes = values[is_size]
    nearby = np.concatenate([np.zeros(NUM_BEFORE), sizes])
    figures = np.zeros(len(values))
    figures[is_size] = np.max([nearby[place : place + len(sizes)] for place in range(NUM_BEFORE + 1)], axis=0) / sizes.max(initial=0.0)
    return Figures(keys, figures, keys, is_there=is_size)


@functools.lru_cache(maxsize=64)
def _of_kinds(keys: tuple[str, ...]) -> dict[str, NDArray[np.intp]]:
    """Places of the keys of each kind."""
    kinds = np.array([Key.parse(key).kind for key in keys])
    return {kind: np.flatnonzero(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}


def totals(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The norm of all tensors of a kind together, where it is finite and not 0, shown by the largest of them."""
    places = _of_kinds(keys)
    norms = np.array([math.hypot(*values[own]) for own in places.values()])
    largest = [keys[own[values[own].argmax()]] for own in places.values()]
    return Figures(tuple(places), norms, largest, is_there=np.isfinite(norms) & (norms > 0))


NEGLIGIBLE = 1e-4
"""A gradient whose norm is below this part of the largest one moves little: its parameter may stay as it is."""


@functools.lru_cache(maxsize=64)
def _parameters_and_gradients(keys: tuple[str, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp], tuple[str, ...]]:
    """Places of the parameters, of the gradient of each (-1: none), and the parameters' keys."""
    parts = [Key.parse(key) for key in keys]
    gradients = {one.site: place for place, one in enumerate(parts) if one.kind == "gradient"}
    places = [place for place, one in enumerate(parts) if one.kind == "parameter"]
    own = [gradients.get(parts[place].site, -1) for place in places]
    return np.array(places, np.intp), np.array(own, np.intp), tuple(keys[place] for place in places)


def moved_by_gradients(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The norm of every parameter whose gradient is not negligible; no figure for a step without any gradient."""
    places, own, named = _parameters_and_gradients(keys)
    gradients = values[_of_kinds(keys).get("gradient", np.empty(0, np.intp))]
    least = NEGLIGIBLE * gradients[np.isfinite(gradients)].max(initial=0.0)
    # Without any gradient, training_step left the batch out.
    is_there = np.where(own < 0, math.inf, values[own]) > least if len(gradients) else np.zeros(len(places), bool)
    return Figures(named, values[places], named, is_there, is_idle=own < 0)


@functools.lru_cache(maxsize=64)
def _is_further_output(keys: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array(["output_" in Key.parse(key).site.rpartition(".")[2] for key in keys])


def over_the_first(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every size over that of the first module, or over 1 where that is smaller; zero and non-finite sizes are left out.

    Further outputs of modules are left out, too: masks are among them, with the lowest number that there is.
    """
    is_size = ~_is_further_output(keys) & np.isfinite(values) & (values > 0)
    first = max(values[is_size][0], 1.0) if is_size.any() else 1.0
    return Figures(keys, values / first, keys, is_there=is_size)


def positive(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every value above 0: a loss that is a likelihood may be below, and grow in magnitude as it should."""
    return Figures(keys, values, keys, is_there=values > 0)


def _nothing(_parts: Key, _key: str) -> bool:
    """Placeholder for the keys that a detector concerns."""
    return False


_rule = functools.partial(AlertRule, "", _nothing)
_SIZES = ("rms", "norm", "abs_max", "abs_mean")
_OF_PARAMETERS = ((("parameter",), ("norm",)), (("gradient",), ("norm",)))
_HEURISTIC = "a heuristic"
DIVERGING = "diverging"

DETECTORS = {
    detector.name: detector
    for detector in (
        Detector(
            "dead_units",
            [(["activation"], ["dead_fraction"])],
            formula="the fraction of a ReLU's units that were zero for every input of the last 10 records, over all micro-batches and "
            "ranks; a unit is a channel of an output with four or five dimensions, else an index of its last dimension",
            limit="More than half of the units were zero for every input of 10 records, on all ranks: they get no gradient, and stay dead.",
            source="L. Lu, Y. Shin, Y. Su, G. Karniadakis, Dying ReLU and Initialization, arXiv 1903.06733; the limit is a heuristic",
            cure="a lower learning rate, biases that start at 0 or above, LeakyReLU or GELU, a normalization layer in front",
            rule=_rule(above=0.5, for_steps=10),
        ),
        Detector(
            "saturation",
            [(["activation"], ["saturated_fraction"])],
            formula="for a Sigmoid or Tanh, the fraction of its outputs at which its slope is below 4 % of its largest slope; for a "
            "Softmax, the fraction of its distributions with a probability above 0.99",
            limit="More than 90 % of the outputs were in the flat part in 3 records: next to no gradient comes through.",
            source="X. Glorot, Y. Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010; "
            "the limit is a heuristic",
            cure="a smaller initialization or learning rate, a normalization layer in front; for a softmax a scale of 1 / sqrt(d), "
            "or a temperature",
            rule=_rule(above=0.9, for_steps=3, unless_loss_falls=0.5),
        ),
        Detector(
            "vanishing",
            [(["gradient"], ["rms", "norm"])],
            formula="the largest rms among the gradients of a weight and of the three weights before it, over the largest rms of all "
            "weight gradients; gradients that are exactly zero are left out, and a store without rms is judged by norms",
            limit="Its gradient, as those of the weights before it, was below a millionth of the largest weight gradient's rms in 3 "
            "records: it hardly learns.",
            source="S. Hochreiter, Untersuchungen zu dynamischen neuronalen Netzen, 1991; Y. Bengio, P. Simard, P. Frasconi, "
            "Learning Long-Term Dependencies with Gradient Descent is Difficult, 1994; the limit is a heuristic",
            cure="residual connections, normalization layers, an initialization that keeps the scale (He, orthogonal), fewer layers",
            rule=_rule(figures=relative_to_largest, below=1e-6, for_steps=3, needs_step=True, parameters="trained"),
        ),
        Detector(
            "exploding",
            list(reversed(_OF_PARAMETERS)),
            formula="the norm of all gradients of trained parameters together, over the largest such norm of the first 3 records; and the "
            "same for the parameters themselves",
            limit="All of that kind together are more than 100 times what they were in the first records, and this has most of it.",
            source="R. Pascanu, T. Mikolov, Y. Bengio, On the difficulty of training recurrent neural networks, arXiv 1211.5063; "
            "the limit is a heuristic",
            cure="a lower learning rate, warm-up, clipping of gradients",
            severity="error",
            rule=_rule(figures=totals, above=100.0, relative_to="first", needs_step=True, unless_loss_falls=0.1, parameters="trained"),
        ),
        Detector(
            "growing_weights",
            _OF_PARAMETERS[:1],
            formula="the norm of all trained parameters together, over that of the first record",
            limit="All weights together grew to more than 3 times what they were in the first record, within 200 steps; this has most "
            "of it.",
            source=_HEURISTIC,
            cure="a learning rate that is ten times lower, warm-up",
            rule=_rule(
                figures=totals,
                above=3.0,
                relative_to="first",
                num_first=1,
                for_steps=2,
                until_step=200,
                needs_step=True,
                unless_loss_falls=0.5,
                parameters="trained",
            ),
        ),
        Detector(
            "frozen_updates",
            _OF_PARAMETERS,
            formula="whether the norm of a trained parameter equals that of the record before to the last bit; a parameter is passed over "
            "while the norm of its gradient is below 1e-4 of the largest one, and while it has no gradient but had one before, as an "
            "expert that was not chosen",
            limit="It requires a gradient, an optimizer has it, and it has not moved from record to record, 3 times.",
            source="plain arithmetic: what moves changes its norm",
            cure="where the model does not use it, as the mask token of a checkpoint, set requires_grad to False; else look whether a "
            "detach() or no_grad() is in its way, whether its learning rate is 0, and, in half precision, whether its updates are rounded "
            "away",
            rule=_rule(figures=moved_by_gradients, is_unchanged=True, for_steps=3, needs_step=True, parameters="trained"),
        ),
        Detector(
            "no_optimizer",
            [(["gradient"], ["norm"])],
            formula="the norm of the gradient of a parameter that requires a gradient and belongs to no optimizer",
            limit="It gets a gradient, and no optimizer has it: it does not learn, and its gradient may accumulate.",
            source="plain arithmetic",
            cure="give its parameters to the optimizer in configure_optimizers, or set requires_grad to False where it is to stay as it is",
            severity="error",
            rule=_rule(above=0.0, parameters="untrained"),
        ),
        Detector(
            DIVERGING,
            [([CONTEXT_KIND], [LOSS])],
            formula="the training loss over that of the first record, while it is above 0; only under automatic optimization",
            limit="The loss was more than 3 times that of the first record, in 2 records.",
            source=_HEURISTIC,
            cure="a lower learning rate, warm-up, clipping of gradients",
            rule=_rule(figures=positive, above=3.0, relative_to="first", num_first=1, for_steps=2),
        ),
        Detector(
            "growing_over_depth",
            [(["activation"], ["rms"])],
            formula="the rms of a module's first output, over that of the first module or over 1, whichever is larger",
            limit="Outputs grow more than 10,000 times from the first module on, in 3 records: magnitudes multiply from layer to layer.",
            source="K. He, X. Zhang, S. Ren, J. Sun, Delving Deep into Rectifiers, arXiv 1502.01852, on what keeps magnitudes; "
            "the limit is a heuristic",
            cure="normalization layers, an initialization that keeps the scale (He for ReLU), residual connections",
            severity="error",
            rule=_rule(figures=over_the_first, above=1e4, for_steps=3, unless_loss_falls=0.5),
        ),
        Detector(
            "entropy_collapse",
            [(["attention_relative_entropy"], ["mean"])],
            formula="the entropy of a head's attention weights over the logarithm of the number of visible keys, mean over query tokens",
            limit="The head looked at a single key for nearly every token in 3 records (relative entropy below 0.01).",
            source="S. Zhai and others, Stabilizing Transformer Training by Preventing Attention Entropy Collapse, arXiv 2303.06296; "
            "the limit is a heuristic",
            cure="a lower learning rate or longer warm-up, a normalization of queries and keys, a smaller scale of the logits",
            rule=_rule(below=0.01, for_steps=3, unless_loss_falls=0.5),
        ),
        Detector(
            "outputs that are zero",
            [(["activation"], ["zero_fraction", *_SIZES])],
            formula="the fraction of an output's elements that are zero, as the median of the last quarter of the records; without it, "
            "whether the size of the output is 0 in all of these records",
            limit="99 % of the elements are zero (sick: 99.9 %)",
            source=_HEURISTIC,
            cure="check whether the module is meant to be idle; for a ReLU, the advice of dead_units",
            limits={"warning": 0.99, "error": 0.999},
            recorded_by="kinds: activation, statistics: zero_fraction",
        ),
        Detector(
            "gradients that are zero",
            [(["activation_gradient"], _SIZES), (["gradient"], _SIZES)],
            formula="the fraction of the last quarter of the records in which a gradient is exactly zero",
            limit="half of these records (sick: all of them)",
            source="plain arithmetic",
            cure="look for a detach() or no_grad() in its way, and for dead units behind it",
            limits={"warning": 0.5, "error": 1.0},
            recorded_by="kinds: [activation_gradient, gradient], statistics: rms",
        ),
        Detector(
            "activations that explode",
            [(["activation"], _SIZES)],
            formula="the median size of an output in the last quarter of the records, over that in the first quarter; for growth within "
            "the first quarter, over that in the first record",
            limit="100 times (sick: 1000 times); 1000 times over the first record",
            source=_HEURISTIC,
            cure="a lower learning rate, a normalization layer, a smaller initialization",
            limits={"warning": 100.0, "error": 1000.0},
            unless_loss_falls=0.1,
            recorded_by="kinds: activation, statistics: rms",
        ),
        Detector(
            "gradients that explode",
            [(["activation_gradient"], _SIZES)],
            formula="the same figure for the gradients that arrive at outputs",
            limit="100 times (sick: 1000 times); 1000 times over the first record",
            source=_HEURISTIC,
            cure="a lower learning rate, warm-up, clipping of gradients",
            limits={"warning": 100.0, "error": 1000.0},
            unless_loss_falls=0.1,
            recorded_by="kinds: activation_gradient, statistics: rms",
        ),
        Detector(
            "spikes of the gradient",
            [(["gradient_before_clip", "gradient"], _SIZES)],
            formula="the largest size of a gradient over its median in the run, where it does not grow over the run",
            limit="100 times",
            source=_HEURISTIC,
            cure="clipping of gradients; look at the batch of that step",
            limits={"warning": 100.0},
            recorded_by="kinds: gradient, statistics: norm",
        ),
        Detector(
            "updates that are large",
            [(["update"], ["ratio"])],
            formula="the norm of an update over that of its parameter, as the median of the last quarter of the records",
            limit="0.05 (sick: 0.3); 0.001 is customary",
            source='A. Karpathy, "Neural Networks: Zero to Hero", part 4, for the customary value; the limits are a heuristic',
            cure="a lower learning rate",
            limits={"warning": 0.05, "error": 0.3},
            recorded_by="kinds: update, statistics: ratio",
        ),
        Detector(
            "weights that do not move",
            [(["update"], ["ratio"])],
            formula="the norm of an update over that of its parameter, as the median of the last quarter of the records",
            limit="at most 1e-7, the rounding of float32 (sick: 0 in every record)",
            source="plain arithmetic",
            cure="the advice of frozen_updates",
            limits={"warning": 1e-7},
            recorded_by="kinds: update, statistics: ratio",
        ),
        Detector(
            "gain of the gradient between blocks",
            [(["gradient_flow"], ["gain"])],
            formula="the larger of the gain and its inverse, as the median of the last quarter of the records",
            limit="10 (sick: 1000)",
            source=_HEURISTIC,
            cure="residual connections, normalization layers, another initialization",
            limits={"warning": 10.0, "error": 1000.0},
            recorded_by="the option gradient_flow",
        ),
        Detector(
            "large logits of attention",
            [(["attention_max_logit"], ["max"])],
            formula="the largest logit of a head, as the median of the last quarter of the records",
            limit="1e3 (sick: 1e4, near which training tends to fail)",
            source="M. Wortsman and others, Small-scale proxies for large-scale Transformer training instabilities, arXiv 2309.14322",
            cure="a normalization of queries and keys, a lower learning rate",
            limits={"warning": 1e3, "error": 1e4},
            recorded_by="the option attention",
        ),
        Detector(
            "what could not be measured",
            [([OWN_KIND], ["errors"])],
            formula="the share of steps with an error of the monitor",
            limit="above 0",
            source="plain arithmetic",
            cure="the log has each error once",
            limits={"warning": 0.0},
        ),
        Detector(
            "skipped steps",
            [([OWN_KIND], [STEP_SKIPPED])],
            formula="the share of steps that the loss scale skipped",
            limit="10 %; few skipped steps are normal, as a GradScaler tries a larger scale every 2,000 steps",
            source=_HEURISTIC,
            cure="a lower learning rate, bfloat16",
            limits={"warning": 0.1},
        ),
    )
}
"""Detector by name, which is the name of its findings."""

BUILT_IN = {name: one for name, one in DETECTORS.items() if one.rule is not None}
"""Detectors that ``health.watch`` may name."""
