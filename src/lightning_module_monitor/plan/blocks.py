"""Values by block of a model: where loggers get roll-ups of all sites, these stay beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.names import ModelIndex, and_insides, children_of_containers, is_leaf
from lightning_module_monitor.plan.matching import OF_WATCHES, matching
from lightning_module_monitor.statistics.registry import Statistic

OF_BLOCKS = "max_logged_keys"
"""The label of rules that record values by block."""


def blocks_of(index: ModelIndex) -> list[str]:
    """The children with parameters of the ``ModuleList`` or ``Sequential`` that has the most; at least two.

    Children that are single layers count only where no list has others: a list of heads is not what a model is made of.
    """
    with_parameters = {name for site in index.parameters for name in and_insides(site.aliases)}
    modules, names = index.whole.module_by_name, index.whole.names()
    lists: dict[bool, list[list[str]]] = {False: [], True: []}
    """The children of each list, those that are single layers apart."""
    for children in children_of_containers(modules, nn.ModuleList, nn.Sequential).values():
        for are_layers, several in lists.items():
            picked = (child for child in children if child in with_parameters and are_layers is is_leaf(modules[child]))
            several.append(list(dict.fromkeys(names[modules[child]] for child in picked)))
    longest = (max(several, key=len, default=[]) for several in lists.values())  # the outermost of several
    return next((blocks for blocks in longest if len(blocks) > 1), [])


def block_rules(rules: Sequence[ParsedRule], index: ModelIndex, blocks: Sequence[str]) -> list[ParsedRule]:
    """Rules that record of all parameters of each block together what the rules of the user record of each parameter.

    A statistic that has no total, or that the user's rules record per module or with several schedules, is left out.
    """
    if not blocks:
        return []
    rules_of: defaultdict[tuple[str, str], list[ParsedRule]] = defaultdict(list)
    for rule in rules:
        for kind in rule.kinds if rule.label != OF_WATCHES else ():
            for name in rule.outputs if KINDS[kind].site == "parameter" else ():
                rules_of[kind, name].append(rule)
    per_module = re.compile("|".join(map(re.escape, blocks)))
    added = []
    for (kind, name), users in rules_of.items():
        plain = [user for user in users if not user.per_module]
        is_recorded = any(pattern.fullmatch(block) for user in users for pattern in user.per_module for block in blocks)
        if not plain or is_recorded or any(user.schedule != plain[0].schedule for user in plain):
            continue
        output = plain[0].outputs[name]
        if not isinstance(output, Statistic) or output.needs & Need.TOKENS:
            continue
        sites = {site.name: None for user in plain for site in matching(user, kind, index)}
        pattern = re.compile("|".join(map(re.escape, sites)))
        rule = ParsedRule(label=OF_BLOCKS, kinds=(kind,), sites=(pattern,), schedule=plain[0].schedule, is_optional=True)
        added.append(replace(rule, outputs={name: output}, per_module=(per_module,)))
    return added
