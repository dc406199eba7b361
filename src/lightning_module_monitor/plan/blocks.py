"""Values by block of a model: where loggers get roll-ups of all sites, these stay beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.names import ModelIndex, and_insides, children_of_containers, is_leaf
from lightning_module_monitor.plan.matching import WATCH_LABEL, matching
from lightning_module_monitor.statistics.registry import Statistic

BLOCK_LABEL = "max_logged_keys"
"""The label of rules that record values by block."""


def blocks_of(index: ModelIndex) -> list[str]:
    """The children with parameters of the ``ModuleList`` or ``Sequential`` that has the most; at least two.

    Children that are single layers count only where no list has others: a list of heads is not what a model is made of.
    """
    module_by_name, site_names = index.whole.module_by_name, index.whole.names()
    with_parameters = {name for site in index.parameters for name in and_insides(site.aliases)}
    lists = [
        [module_by_name[child] for child in children if child in with_parameters]
        for children in children_of_containers(module_by_name, nn.ModuleList, nn.Sequential).values()
    ]
    for are_layers in (False, True):
        candidates = [_distinct(site_names[child] for child in children if is_leaf(child) is are_layers) for children in lists]
        longest = max(candidates, key=len, default=[])  # of several the outermost, which comes first
        if len(longest) > 1:
            return longest
    return []


def block_rules(rules: Sequence[ParsedRule], index: ModelIndex, blocks: Sequence[str]) -> list[ParsedRule]:
    """Rules that record of all parameters of each block together what the rules of the user record of each parameter.

    A statistic that has no total, or that the user's rules record per module or with several schedules, is left out.
    """
    if not blocks:
        return []
    rules_by_output: defaultdict[tuple[str, str], list[ParsedRule]] = defaultdict(list)
    for rule in (rule for rule in rules if rule.label != WATCH_LABEL):
        for kind in (kind for kind in rule.kinds if KINDS[kind].site == "parameter"):
            for name in rule.outputs:
                rules_by_output[kind, name].append(rule)
    added = (_block_rule(kind, name, users, index, blocks) for (kind, name), users in rules_by_output.items())
    return [rule for rule in added if rule is not None]


def _block_rule(kind: str, name: str, rules: Sequence[ParsedRule], index: ModelIndex, blocks: Sequence[str]) -> ParsedRule | None:
    """The rule for one output by block, where ``rules`` are those of the user that have it; ``None`` if it is left out."""
    by_parameter = [rule for rule in rules if not rule.per_module]
    is_recorded = any(pattern.fullmatch(block) for rule in rules for pattern in rule.per_module for block in blocks)
    if not by_parameter or is_recorded:
        return None
    output, schedule = by_parameter[0].outputs[name], by_parameter[0].schedule
    has_total = isinstance(output, Statistic) and not output.needs & Need.TOKENS
    if not has_total or any(rule.schedule != schedule for rule in by_parameter):
        return None
    parameters = _distinct(site.name for rule in by_parameter for site in matching(rule, kind, index))
    return ParsedRule(
        label=BLOCK_LABEL,
        kinds=(kind,),
        sites=(_any_of(parameters),),
        schedule=schedule,
        outputs={name: output},
        per_module=(_any_of(blocks),),
        is_optional=True,
    )


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))
