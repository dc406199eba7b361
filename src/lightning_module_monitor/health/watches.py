"""The built-in watches, as data: what each looks at, from where on it speaks, who found that, and what to try."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_module_monitor.health.alerts import Action, AlertRule, Figure, Figures, each
from lightning_module_monitor.record import TRAIN, Key


@dataclass(frozen=True)
class BuiltInWatch:
    """Something that is often wrong with a model, and how it shows."""

    name: str
    kinds: tuple[str, ...]
    statistic: str
    """The values that it is about, of training."""
    formula: str
    limit: str
    """From where on it speaks, in words; ``rule`` says it in numbers."""
    source: str
    cure: str
    rule: AlertRule
    """Without its name, and what it concerns: the rest says that."""

    def alert(self, then: tuple[Action, ...]) -> AlertRule:
        """It as a rule."""
        return replace(self.rule, name=self.name, concerns=self._concerns, then=then, words=f"{self.limit} Try: {self.cure}.")

    def _concerns(self, parts: Key, _key: str) -> bool:
        return parts.stage == TRAIN and parts.kind in self.kinds and parts.statistic == self.statistic


def relative_to_largest(values: Mapping[str, float]) -> dict[str, Figure]:
    """Every value of a weight over the largest of them. Zeros are left out: what gets no gradient at all is not one that has faded.

    So are biases, for in front of BatchNorm one gets no more than what rounding leaves.
    """
    of_weights = {key: value for key, value in values.items() if "weight" in Key.parse(key).site}
    finite = {key: value for key, value in of_weights.items() if value > 0 and math.isfinite(value)}
    largest = max(finite.values(), default=0.0)
    in_order = sorted(finite.items(), key=lambda item: item[1])
    return {key: Figure(value / largest, key) for key, value in in_order}


def totals(values: Mapping[str, float]) -> dict[str, Figure]:
    """The norm of all tensors of a kind together, where it is finite; it shows best where most of it is."""
    by_kind: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, value in values.items():
        by_kind[Key.parse(key).kind][key] = value
    norms = {kind: Figure(math.hypot(*norms.values()), max(norms, key=norms.__getitem__)) for kind, norms in by_kind.items()}
    return {kind: figure for kind, figure in norms.items() if math.isfinite(figure.value)}


NEXT_TO_NONE = 1e-4
"""A gradient whose norm is below this part of the largest one moves little: that it moves nothing is no wonder."""


def moved_by_gradients(values: Mapping[str, float]) -> dict[str, Figure]:
    """The norm of every parameter but those that have a gradient, and next to none; nothing of a step in which there was no gradient."""
    gradients = {_site(key): value for key, value in values.items() if Key.parse(key).kind == "gradient"}
    if not gradients:
        return {}  # a batch that training_step has left out, which moves nothing
    least = NEXT_TO_NONE * max((value for value in gradients.values() if math.isfinite(value)), default=0.0)
    parameters = {key: value for key, value in values.items() if Key.parse(key).kind == "parameter"}
    moved = {key: value for key, value in parameters.items() if gradients.get(_site(key), math.inf) > least}
    return {key: Figure(value, key, is_idle=_site(key) not in gradients) for key, value in moved.items()}


def _site(key: str) -> tuple[str, str]:
    parts = Key.parse(key)
    return parts.prefix, parts.site


def _rule(figures: Figures = each, **options: object) -> AlertRule:
    return replace(AlertRule("", _nothing), figures=figures, **options)  # type: ignore[arg-type]  # fields of the rule


def _nothing(_parts: Key, _key: str) -> bool:
    """Stands where a watch puts what it concerns."""
    return False


BUILT_IN = {
    watch.name: watch
    for watch in (
        BuiltInWatch(
            "dead_units",
            ("activation",),
            "dead_fraction",
            formula="the fraction of a ReLU's units (channels where an output has four or five dimensions, else the last one) that were "
            "zero for every input in the last 10 records, in all micro-batches and on all ranks",
            limit="More than half of the units were zero for every input of 10 records, on all ranks: they get no gradient, and stay dead.",
            source="L. Lu, Y. Shin, Y. Su, G. Karniadakis, Dying ReLU and Initialization, arXiv 1903.06733; the limit is a heuristic",
            cure="a lower learning rate, biases that start at 0 or above, LeakyReLU or GELU, a normalization layer in front",
            rule=_rule(above=0.5, for_steps=10),
        ),
        BuiltInWatch(
            "saturation",
            ("activation",),
            "saturated_fraction",
            formula="the fraction of the outputs of a Sigmoid or Tanh where its slope is below 4 % of its largest; of a Softmax, of its "
            "distributions the fraction with a probability above 0.99",
            limit="More than 90 % of the outputs were in the flat part in 3 records: next to no gradient comes through.",
            source="X. Glorot, Y. Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010; "
            "the limit is a heuristic",
            cure="a smaller initialization or learning rate, a normalization layer in front; for a softmax a scale of 1 / sqrt(d), "
            "or a temperature",
            rule=_rule(above=0.9, for_steps=3),
        ),
        BuiltInWatch(
            "vanishing",
            ("gradient",),
            "rms",
            formula="the rms of a weight's gradient over the largest one of all weights; gradients that are exactly zero are left out",
            limit="Its gradient was below a millionth of the largest weight gradient's rms in 3 records: it hardly learns.",
            source="S. Hochreiter, Untersuchungen zu dynamischen neuronalen Netzen, 1991; Y. Bengio, P. Simard, P. Frasconi, "
            "Learning Long-Term Dependencies with Gradient Descent is Difficult, 1994; the limit is a heuristic",
            cure="residual connections, normalization layers, an initialization that keeps the scale (He, orthogonal), fewer layers",
            rule=_rule(relative_to_largest, below=1e-6, for_steps=3, needs_step=True),
        ),
        BuiltInWatch(
            "exploding",
            ("gradient", "parameter"),
            "norm",
            formula="the norm of all gradients together, and that of all parameters, over the largest one of the first 3 records",
            limit="All of that kind together are more than 100 times what they were in the first records, and this has most of it.",
            source="R. Pascanu, T. Mikolov, Y. Bengio, On the difficulty of training recurrent neural networks, arXiv 1211.5063; "
            "the limit is a heuristic",
            cure="a lower learning rate, warm-up, clipping of gradients",
            rule=_rule(totals, above=100.0, relative_to="first", needs_step=True),
        ),
        BuiltInWatch(
            "frozen_updates",
            ("parameter", "gradient"),
            "norm",
            formula="the norm of a parameter that requires a gradient is the same to the last bit as in the record before; "
            "where its gradient is there, and its norm below 1e-4 of the largest one, it says nothing, nor where it has none and had one "
            "before, as an expert that was not chosen",
            limit="It requires a gradient, and has not moved from record to record, 3 times.",
            source="plain arithmetic: what moves changes its norm",
            cure="look whether the optimizer has it, whether a detach() or no_grad() is in its way, whether its learning rate is 0, "
            "and, in half precision, whether its updates are rounded away",
            rule=_rule(moved_by_gradients, is_unchanged=True, for_steps=3, needs_step=True),
        ),
        BuiltInWatch(
            "entropy_collapse",
            ("attention_relative_entropy",),
            "mean",
            formula="the entropy of a head's attention weights over the logarithm of the number of visible keys, mean over query tokens",
            limit="The head looked at a single key for nearly every token in 3 records (relative entropy below 0.01).",
            source="S. Zhai and others, Stabilizing Transformer Training by Preventing Attention Entropy Collapse, arXiv 2303.06296; "
            "the limit is a heuristic",
            cure="a lower learning rate or longer warm-up, a normalization of queries and keys, a smaller scale of the logits",
            rule=_rule(below=0.01, for_steps=3),
        ),
    )
}
"""Watch by name."""
