"""A detector: a frequent problem of training, and its condition on recorded values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_module_monitor.health.alerts import Action, AlertRule, nothing
from lightning_module_monitor.health.figures import totals
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import CONTEXT_KIND, FACT_KIND, OWN_KIND, ROOT_SITE, TRAIN
from lightning_module_monitor.record import Severity

HEURISTIC, ARITHMETIC = "a heuristic", "plain arithmetic"
"""Sources of limits."""
NO_LOSS = "no loss was recorded"
NORMS_OF_PARAMETERS = ((("parameter",), ("norm",)),)
NORMS_OF_GRADIENTS = ((("gradient",), ("norm",)),)
NORMS = (*NORMS_OF_PARAMETERS, *NORMS_OF_GRADIENTS)

condition = functools.partial(AlertRule, "", nothing)
"""The condition of a detector, which :meth:`Detector.alert` gives its name and keys."""


NO_GRADIENT = "no trained parameter has a gradient"


@dataclass(frozen=True)
class Detector:
    """A frequent problem of training, and its condition on recorded values."""

    name: str
    sources: Sequence[tuple[Sequence[str], Sequence[str]]]
    """The values of training that it judges: pairs of kinds and their statistics."""
    formula: str
    limit: str
    """The limit in words; ``rule`` has the number."""
    source: str
    severity: Severity = "warning"
    rule: AlertRule | None = None
    """The condition, without name and keys, which other fields give. ``None``: it is judged once, at the end of a run."""
    min_records: int = 0
    """Number of records that it needs, if it has no rule or needs more than its rule."""
    types: tuple[str, ...] = ()
    """Names of the classes of modules that it judges; empty: all."""
    is_by_default: bool = True
    """Whether the default rules record what it needs."""
    without: str = NO_GRADIENT
    """Why there may be no values where a run records what it needs."""
    recorded_by: str = ""
    """The option that records the values, where ``health.watch`` does not."""

    def alert(self, then: tuple[Action, ...] = ("warn",)) -> AlertRule:
        """The detector as a rule on the values that are recorded for it."""
        assert self.rule is not None, f"{self.name} needs the whole run"
        concerns, concerns_total = self.concerns, self.concerns_total
        return replace(self.rule, name=self.name, concerns=concerns, concerns_total=concerns_total, then=then, severity=self.severity)

    @property
    def num_needed(self) -> int:
        """Number of records below which it cannot find anything."""
        return max(self.min_records, 0 if self.rule is None else self.rule.min_records)

    def concerns(self, parts: Key, _key: str = "") -> bool:
        """Whether it judges a value of training."""
        return parts.stage == TRAIN and any(parts.kind in kinds and parts.statistic in statistics for kinds, statistics in self.sources)

    def concerns_total(self, parts: Key, key: str = "") -> bool:
        """Whether it judges a value of all parameters inside a module together: the norm of all that are monitored, where it has a use."""
        is_of_all = self.rule is not None and self.rule.figures is totals
        return is_of_all and parts.site == ROOT_SITE and self.concerns(parts, key)

    @property
    def needs_rate(self) -> bool:
        """Whether it judges parameters only while their learning rate is not 0."""
        return self.rule is not None and self.rule.needs_rate

    @property
    def main_kinds(self) -> Sequence[str]:
        """The kinds of the values that it judges first; it may use values of other kinds besides."""
        return self.sources[0][0]

    @property
    def judges_facts(self) -> bool:
        """Whether it judges facts about a Trainer's run, and not only numbers."""
        return FACT_KIND in self.main_kinds or (self.rule is not None and self.rule.is_of_facts)

    @property
    def is_always_recorded(self) -> bool:
        """Whether every run records its values if there are any: figures without a site, and facts."""
        return self.main_kinds[0] in (OWN_KIND, CONTEXT_KIND, FACT_KIND)
