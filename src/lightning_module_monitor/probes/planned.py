"""What is recorded in one step, by the rules that are due in it."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

from lightning_module_monitor.probes import activations, rcc_layers
from lightning_module_monitor.probes.base import ParametersOfKind, WatchedModule, WatchedParameter
from lightning_module_monitor.probes.gradient_flow import Chain
from lightning_module_monitor.probes.matching import can_occur
from lightning_module_monitor.record import KINDS
from lightning_module_monitor.statistics.spec import MetricSpec


@dataclass(frozen=True)
class Plan:
    """What is watched in one step: by the rules that are due in it."""

    modules: list[WatchedModule]
    parameters: list[WatchedParameter]
    chain: Chain | None
    """The blocks whose gradient flow is watched."""

    @functools.cached_property
    def outputs(self) -> list[WatchedModule]:
        """The modules of which an output, or the gradient that arrives at one, is watched."""
        return [one for one in self.modules if not one.specs.keys().isdisjoint(activations.KINDS)]

    @functools.cached_property
    def modules_with_heads(self) -> list[WatchedModule]:
        """The modules of which something of heads of attention is watched."""
        return [one for one in self.modules if one.is_of_heads]

    @functools.cached_property
    def parameters_with_functions(self) -> list[WatchedParameter]:
        """The parameters that a function of the user's is to get anything of."""
        return [one for one in self.parameters if one.has_functions]

    @functools.cached_property
    def parameters_by_kind(self) -> dict[str, ParametersOfKind]:
        """The parameters again, of each kind that is watched."""
        by_kind: defaultdict[str, list[WatchedParameter]] = defaultdict(list)
        for one in self.parameters:
            for kind in one.specs:
                by_kind[kind].append(one)
        return {
            kind: ParametersOfKind([one.site for one in members], [one.specs[kind] for one in members]) for kind, members in by_kind.items()
        }

    def specs(self) -> list[MetricSpec]:
        """Every specification of a rule, modules first, in the model's order."""
        of_modules = [spec for one in self.modules for spec in one.specs.values()]
        of_modules = [one for spec in of_modules for one in (spec.by_layer.values() or [spec])]
        return of_modules + [spec for one in self.parameters for spec in one.specs.values()]

    def all_specs(self) -> list[MetricSpec]:
        """Those of the rules, and of the gradient flow."""
        return self.specs() + ([] if self.chain is None else list(self.chain.specs))

    def knows_all_keys(self, kind: str = "") -> bool:
        """Whether there is no function, of a kind or of any, whose keys are not known before its first result, and no head of attention."""
        if self.has_heads() and (kind in ("", "activation") or (kind in KINDS and KINDS[kind].of_heads)):
            return False
        return all(len(spec.planned_keys()) == len(spec.keys()) for spec in self.specs() if kind in ("", spec.kind))

    def has_coordinate_check(self) -> bool:
        """Whether anything of the refined coordinate check is watched."""
        return any(spec.kind in rcc_layers.KINDS for spec in self.specs())

    def has_heads(self) -> bool:
        """Whether heads of attention are watched, whose number is not known before they run, nor are their keys."""
        return any(KINDS[spec.kind].of_heads for spec in self.specs())

    def keys(self) -> list[str]:
        """Every key of a number that is known beforehand, kind by kind."""
        of_rules = [key for spec in self.expected() if not KINDS[spec.kind].of_heads for key in spec.planned_keys()]
        return of_rules + (self.chain.keys() if self.chain is not None else [])

    def histogram_keys(self) -> list[str]:
        """Every key of a histogram, kind by kind."""
        return [key for spec in self.expected() if not KINDS[spec.kind].of_heads for key in spec.histogram_keys]

    def expected(self) -> list[MetricSpec]:
        """The specifications that values are expected of, kind by kind: a container never runs, and a frozen parameter has no gradient."""
        of_modules = [one for watched in self.modules for kind, one in watched.specs.items() if can_occur(watched.site, kind)]
        of_modules = [one for spec in of_modules for one in (spec.by_layer.values() or [spec])]
        of_parameters = [one for watched in self.parameters for kind, one in watched.specs.items() if watched.site.has(kind)]
        order = {kind: place for place, kind in enumerate(KINDS)}
        return sorted(of_modules + of_parameters, key=lambda spec: order[spec.kind])
