"""Facts of a step that detectors need beside its values: states of parameters, optimizers and modules, and the form of the loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd as _Dropout  # the base of all; there is no public one
from torch.optim import Optimizer

from lightning_module_monitor.health.facts import CallFacts, Facts, GroupFacts, ParameterFacts, Training
from lightning_module_monitor.health.run_history import NO_FACTS
from lightning_module_monitor.trainer.loss_facts import LossFacts, LossReader
from lightning_module_monitor.trainer.optimizers import parameter_ids
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import can_run_again

_OPTIONS = ("momentum", "weight_decay", "eps", "name", "maximize", "betas")
"""Options of a group that are among the facts."""


_Group = tuple[Optimizer, Mapping[str, Any]]
"""A parameter group of an optimizer."""


class FactsReader:
    """Reads the facts of a run. They are read anew where something changes, and are the same object otherwise."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._facts = NO_FACTS
        self._fingerprint: object = None
        """Fingerprint of the model and optimizers when the facts were read; see :meth:`_fingerprint_of`."""
        self._parameters: Sequence[Tensor] = ()
        """The parameters that the model had then."""
        self._dropouts = [site.module for site in run.planner.index.modules if isinstance(site.module, _Dropout)]
        self._normalizations = [site.module for site in run.planner.index.modules if getattr(site.module, "running_mean", None) is not None]
        self._losses = LossReader(self._num_registered)
        self._loss, self._has_loss = LossFacts(), False
        self._has_gradient: bool | None = None
        """Whether an optimizer that stepped had a gradient; ``None`` if none stepped."""

    def begin_step(self) -> None:
        """A monitored step begins."""
        self._loss, self._has_loss, self._has_gradient = LossFacts(), False, None

    def note_loss(self, loss: Tensor, tokens: Tensor | None, *, is_scaled: bool) -> int:
        """Note one of the losses of the step, which may be scaled by a ``GradScaler``; returns the number of its targets, 0 if unknown.

        ``tokens`` is the input, if it is of integers.
        """
        self._has_loss = True
        facts, num_targets = self._losses.read(loss, is_scaled=is_scaled)
        is_of_tokens = tokens is not None and tokens.dim() > 1 and num_targets in (tokens.numel(), tokens.numel() - len(tokens))
        self._loss = self._loss.joined(facts._replace(of_tokens=is_of_tokens))
        return num_targets

    def _num_registered(self, weights: Sequence[Tensor]) -> int:
        """Number of leaves of the graph that belong to the module or an optimizer. Sharded strategies have other leaves; all count."""
        if not can_run_again(self._run.trainer):
            return len(weights)
        optimized = parameter_ids([optimizer for optimizer in self._run.trainer.optimizers if isinstance(optimizer, Optimizer)])
        registered = optimized | {*map(id, self._run.module.parameters())}
        return sum(id(weight) in registered for weight in weights)

    def note_gradients(self, optimizer: Optimizer, *, moves_elsewhere: bool) -> None:
        """An optimizer is about to step; where other code moves parameters, it may get no gradient."""
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        self._has_gradient = self._has_gradient or moves_elsewhere or any(gradient is not None for gradient in gradients)

    def read(self, optimizers: Sequence[Optimizer], calls: CallFacts, elsewhere: Set[int]) -> Facts:
        """The facts of the step, when it is over, with those of the calls of modules; other code moves the parameters ``elsewhere``."""
        fingerprint = (calls, elsewhere, self._fingerprint_of(optimizers))
        if fingerprint != self._fingerprint:
            sites = self._run.planner.index.parameters
            self._parameters = [tensor for site in sites if (tensor := site.tensor()) is not None]
            numbered = self._run.groups.numbered(self._run.trainer.optimizers)
            groups = [(optimizer, optimizer.param_groups[group]) for optimizer, group in numbered if optimizer in optimizers]
            parameters = _parameters(self._run, groups, elsewhere)
            facts = facts_of(self._run, groups, parameters, self._loss, calls, no_gradient=self._has_loss and self._has_gradient is False)
            self._facts = self._facts if facts == self._facts else facts
            self._fingerprint = (calls, elsewhere, self._fingerprint_of(optimizers))
        return self._facts

    def _fingerprint_of(self, optimizers: Sequence[Optimizer]) -> object:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return (
            [(id(group["params"]), len(group["params"]), *map(group.get, _OPTIONS)) for group in groups],
            [parameter.requires_grad for parameter in self._parameters],
            [module.training for module in self._normalizations],
            [module.p for module in self._dropouts],
            self._has_loss,
            self._has_gradient,
            len(self._run.planner.index.parameters),
            self._run.trainer.current_epoch,
            self._run.module.automatic_optimization,
            self._loss,
        )


def facts_of(
    run: Run,
    groups: Sequence[_Group],
    parameters: dict[str, ParameterFacts],
    loss: LossFacts,
    calls: CallFacts,
    *,
    no_gradient: bool,
) -> Facts:
    """The facts of a step, when it is over."""
    optimizers = [*dict.fromkeys(optimizer for optimizer, _group in groups)]
    dropouts = (site.module for site in run.planner.index.modules if isinstance(site.module, _Dropout) and site.module.training)
    return Facts(
        parameters=parameters,
        groups=tuple(_group(optimizers.index(optimizer), optimizer, group) for optimizer, group in groups),
        in_eval=tuple(_in_eval(run, parameters)),
        softmax_twice=loss.softmax_twice,
        is_classification=loss.is_classification,
        is_manual=not run.module.automatic_optimization,
        clip=float(run.trainer.gradient_clip_val or 0.0),
        clips_values=run.trainer.gradient_clip_algorithm == "value",
        num_classes=loss.num_classes,
        is_summed=loss.is_summed,
        is_broadcast=loss.is_broadcast,
        compares_outputs=loss.compares_outputs,
        is_linear=loss.is_linear,
        of_tokens=loss.of_tokens,
        num_unregistered=loss.num_unregistered,
        has_swapped_betas=any(_are_swapped(group.get("betas")) for _optimizer, group in groups),
        in_two_optimizers=tuple(_in_two(parameters, run, optimizers)),
        dropout=max((float(module.p) for module in dropouts), default=0.0),
        no_gradient=no_gradient,
        maximizes=any(bool(group.get("maximize")) for _optimizer, group in groups),
        computes_targets=calls.without_gradient,
        mixes_samples=calls.mixes_samples,
        of_two_values=calls.of_two_values,
        order=calls.order,
    )


def _group(number: int, optimizer: Optimizer, group: Mapping[str, Any]) -> GroupFacts:
    name = group.get("name")
    momentum, weight_decay, eps = (_number(group.get(option)) for option in ("momentum", "weight_decay", "eps"))
    dtype = next((str(parameter.dtype).removeprefix("torch.") for parameter in group["params"]), "")
    return GroupFacts(type(optimizer).__name__, momentum, weight_decay, name if isinstance(name, str) else "", eps, number, dtype)


def _are_swapped(betas: object) -> bool:
    """Whether the two betas of an optimizer average squares over fewer steps than gradients."""
    if not (isinstance(betas, tuple | list) and len(betas) == 2):
        return False
    return all(isinstance(beta, float) for beta in betas) and bool(betas[0] > betas[1])


def _in_two(parameters: Iterable[str], run: Run, optimizers: Sequence[Optimizer]) -> Iterable[str]:
    """Names of the parameters that a second optimizer also holds, beside others."""
    held = [parameter_ids([optimizer]) for optimizer in optimizers]
    twice = frozenset().union(*(some for some, more in itertools.permutations(held, 2) if some < more))
    tensors = {site.name: site.tensor() for site in run.planner.index.parameters} if twice else {}
    return (name for name in parameters if id(tensors.get(name)) in twice)


def _number(option: object) -> float:
    """An option of an optimizer; 0 if it is absent or no number, as the pair that Adafactor has for ``eps``."""
    return float(option) if isinstance(option, int | float) else 0.0


def _in_eval(run: Run, parameters: dict[str, ParameterFacts]) -> Iterable[str]:
    """Names of modules with running statistics that are in eval mode although their weight or bias is trained."""
    for site in run.planner.index.modules:
        if not site.module.training and getattr(site.module, "running_mean", None) is not None:
            affine = (parameters.get(f"{site.name}.{name}") for name in ("weight", "bias"))
            if any(parameter is not None and parameter.training == "trained" for parameter in affine):
                yield site.name


def _parameters(run: Run, groups: Sequence[_Group], elsewhere: Set[int]) -> dict[str, ParameterFacts]:
    """Facts of each parameter, by the name of its site. Optimizers that hold none of the parameters hold copies: all are trained.

    What other code moves (``elsewhere``) is trained, too.
    """
    group_by_id = {id(parameter): number for number, (_optimizer, group) in enumerate(groups) for parameter in group["params"]}
    optimized = group_by_id.keys() | elsewhere
    parameters = {site.name: site.tensor() for site in run.planner.index.parameters}
    has_copies = not any(id(parameter) in optimized for parameter in parameters.values())

    def training_of(parameter: Tensor | None) -> Training:
        if parameter is None or not parameter.requires_grad or run.monitor.access.is_empty(parameter) or not groups:
            return "frozen"
        return "trained" if has_copies or id(parameter) in optimized else "untrained"

    return {
        name: ParameterFacts(training_of(parameter), group_by_id.get(id(parameter), -1), 0 if parameter is None else parameter.numel())
        for name, parameter in parameters.items()
    }


def first_gradient(optimizer: Optimizer) -> Tensor | None:
    """The first gradient with elements of an optimizer's parameters."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return next((grad for grad in gradients if grad is not None and grad.layout is torch.strided and grad.numel()), None)
