"""Totals by block of a model. Loggers that get roll-ups in place of single sites get these totals as well."""

from __future__ import annotations

import itertools
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
"""The label of rules that record totals by block: the option that adds them."""


def blocks_of(index: ModelIndex) -> list[str]:
    """The names of a model's blocks: the children with parameters of the ``ModuleList`` or ``Sequential`` that has the most of them.

    Children with modules inside come first: lists of single layers, such as output heads, count only if no list has two or more of them.
    Empty if no list has two children that count.
    """
    module_by_name, site_names = index.whole.module_by_name, index.whole.names()
    with_parameters = {name for site in index.parameters for name in and_insides(site.aliases)}
    lists = [
        [module_by_name[child] for child in children if child in with_parameters]
        for children in children_of_containers(module_by_name, nn.ModuleList, nn.Sequential).values()
    ]
    for takes_layers in (False, True):
        candidates = [_distinct(site_names[child] for child in children if is_leaf(child) is takes_layers) for children in lists]
        longest = max(candidates, key=len, default=[])  # the outermost of equally long ones, as it comes first
        if len(longest) > 1:
            return longest
    return []


def block_rules(rules: Sequence[ParsedRule], index: ModelIndex, blocks: Sequence[str]) -> list[ParsedRule]:
    """Rules for totals by block: one for each statistic that the user's rules record of single parameters.

    A statistic is left out if it has no total, or if the user's rules already record its totals of a block, or have several schedules.
    """
    if not blocks:
        return []
    rules_by_output: defaultdict[tuple[str, str], list[ParsedRule]] = defaultdict(list)
    for rule in (rule for rule in rules if rule.label != WATCH_LABEL):
        kinds = [kind for kind in rule.kinds if KINDS[kind].site == "parameter"]
        for kind, name in itertools.product(kinds, rule.outputs):
            rules_by_output[kind, name].append(rule)
    added = (_block_rule(kind, name, user_rules, index, blocks) for (kind, name), user_rules in rules_by_output.items())
    return [rule for rule in added if rule is not None]


def _block_rule(kind: str, name: str, user_rules: Sequence[ParsedRule], index: ModelIndex, blocks: Sequence[str]) -> ParsedRule | None:
    """The rule for one output by block; ``None`` if it is left out. The user's rules are those that have this output."""
    by_parameter = [rule for rule in user_rules if not rule.per_module]
    has_user_totals = any(pattern.fullmatch(block) for rule in user_rules for pattern in rule.per_module for block in blocks)
    if not by_parameter or has_user_totals:
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
