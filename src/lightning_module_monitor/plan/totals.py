"""Totals: all parameters of a module count as one tensor, whose moments are merged from those of the parameters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.names import ROOT, ModelIndex, ParameterSite, and_insides, matches
from lightning_module_monitor.plan.matching import matching
from lightning_module_monitor.probes.base import WatchedParameter
from lightning_module_monitor.statistics.stream import Output, Stream
from lightning_module_monitor.suggestions import nearest_pattern


def check_per_module(rule: ParsedRule, index: ModelIndex) -> None:
    """Check that each pattern of a rule's ``per_module`` matches a module, and that one has a parameter that the rule picks.

    Raises:
        ConfigError: If not, and the rule is not optional; names the nearest module.
    """
    if rule.is_optional or not rule.per_module:
        return
    modules = _names_of_modules(index)
    for pattern in rule.per_module:
        if not any(matches(names, (pattern,)) for names in modules.values()):
            near = nearest_pattern(pattern.pattern, list(modules))
            raise ConfigError(f"{rule.label}.per_module {pattern.pattern!r} matches none of {len(modules)} module names{near}")
    if not any(parameters_by_module(rule, kind, index) for kind in rule.kinds):
        matched = shortened([name for name, names in modules.items() if matches(names, rule.per_module)])
        expected = f"expected a module with such parameters inside, or {ROOT} for all"
        raise ConfigError(f"{rule.label}.per_module matches only modules without a parameter that the rule picks ({matched}); {expected}.")


def of_modules(rule: ParsedRule) -> str:
    """The end of a phrase about a rule's sites: the modules whose parameters it counts together; empty without such modules."""
    return f" together, of {shortened([pattern.pattern for pattern in rule.per_module])}" if rule.per_module else ""


def parameters_by_module(rule: ParsedRule, kind: str, index: ModelIndex) -> dict[str, list[str]]:
    """The parameters that a rule picks inside each module of its ``per_module``: names by the name of the module.

    A parameter is inside of a module if any of its names is. A module without such a parameter is left out.
    """
    sites = (site for site in matching(rule, kind, index) if isinstance(site, ParameterSite))
    modules_of = {site.name: {ROOT, *and_insides(site.aliases)} for site in sites}
    parameters_of = {
        module: [name for name, modules in modules_of.items() if not modules.isdisjoint(names[1:])]
        for module, names in _names_of_modules(index).items()
        if matches(names, rule.per_module)
    }
    return {module: parameters for module, parameters in parameters_of.items() if parameters}


def _names_of_modules(index: ModelIndex) -> dict[str, tuple[str, ...]]:
    """The name in keys and all other names of every module, also of those inside compiled code; ``_root_`` is all that is monitored."""
    inner = {site.name: (site.name, *site.aliases) for site in index.whole.modules if site.name != ROOT}
    return {ROOT: (ROOT, ROOT), **inner}


_Patterns = tuple[tuple[re.Pattern[str], ...], ...]


class Totals:
    """The totals of rules: each is of one kind, and of some parameters of a module."""

    def __init__(self) -> None:
        self._rules: defaultdict[tuple[str, str, tuple[str, ...], _Patterns], list[ParsedRule]] = defaultdict(list)
        """By kind, module and parameters, and for states by the patterns that select some of their names."""
        self.rules: dict[Stream, ParsedRule] = {}
        """The stream of every total, kind by kind, each with a rule that has its patterns, once they are planned."""

    def add(self, rule: ParsedRule, kind: str, index: ModelIndex) -> None:
        """Add the totals of a rule and a kind."""
        for module, parameters in parameters_by_module(rule, kind, index).items():
            patterns = (rule.sites, rule.exclude) if KINDS[kind].of_states else ()
            self._rules[kind, module, tuple(parameters), patterns].append(rule)

    def outputs_of_members(self) -> dict[str, dict[str, dict[str, Output]]]:
        """The outputs of the totals of which each parameter is a member, by its name and by kind."""
        shared: defaultdict[str, defaultdict[str, dict[str, Output]]] = defaultdict(lambda: defaultdict(dict))
        for (kind, module, parameters, _patterns), rules in self._rules.items():
            outputs = joined(rules, kind, module)
            for name in parameters:
                shared[name][kind].update(outputs)
        return {name: dict(by_kind) for name, by_kind in shared.items()}

    def plan(self, watched: Iterable[WatchedParameter], stage: str, prefix: str) -> None:
        """Make the streams of all totals; their members are streams of the watched parameters.

        Raises:
            ConfigError: If two totals of different parameters have one key.
        """
        by_name = {target.site.name: target.streams for target in watched}
        order, keys = list(KINDS), set[str]()
        for (kind, module, parameters, _patterns), rules in sorted(self._rules.items(), key=lambda item: order.index(item[0][0])):
            members = tuple(by_name[name][kind] for name in parameters)
            total = Stream(kind, module, joined(rules, kind, module), stage, prefix, members=members)
            common = keys & {*total.keys.values()}
            if common:
                why = f"another rule has {min(common)!r} of other parameters"
                raise ConfigError(f"{rules[0].label}.per_module: {why}; expected the same sites, or another statistic.")
            keys.update(total.keys.values())
            self.rules[total] = rules[0]


def joined(rules: Sequence[ParsedRule], kind: str, site: str) -> Mapping[str, Output]:
    """The outputs of several rules for a kind at a site.

    Raises:
        ConfigError: If two different things have one name.
    """
    outputs: dict[str, Output] = {}
    for rule in rules:
        for name, output in rule.outputs.items():
            if outputs.setdefault(name, output) != output:
                why = f"another rule records something else as {name!r} of kind {kind!r} at {site!r}"
                raise ConfigError(f"{rule.label}: {why}; expected names that differ.")
    return outputs
