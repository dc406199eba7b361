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
    modules = list(_aliases_of_modules(index))
    for pattern in rule.per_module:
        if not _matching_modules(index, (pattern,)):
            near = nearest_pattern(pattern.pattern, modules)
            raise ConfigError(f"{rule.label}.per_module {pattern.pattern!r} matches none of {len(modules)} module names{near}")
    if not any(parameters_by_module(rule, kind, index) for kind in rule.kinds):
        matched = shortened([*_matching_modules(index, rule.per_module)])
        expected = f"expected a module with such parameters inside, or {ROOT} for all"
        raise ConfigError(f"{rule.label}.per_module matches only modules without a parameter that the rule picks ({matched}); {expected}.")


def per_module_phrase(rule: ParsedRule) -> str:
    """The end of a phrase about a rule's sites: the modules whose parameters count as one tensor; empty without ``per_module``."""
    return f" together, of {shortened([pattern.pattern for pattern in rule.per_module])}" if rule.per_module else ""


def parameters_by_module(rule: ParsedRule, kind: str, index: ModelIndex) -> dict[str, list[str]]:
    """The parameters that a rule picks inside each module of its ``per_module``: names by the name of the module.

    A parameter is inside a module if any of its names is. A module without such a parameter is left out.
    """
    sites = (site for site in matching(rule, kind, index) if isinstance(site, ParameterSite))
    enclosing_by_parameter = {site.name: {ROOT, *and_insides(site.aliases)} for site in sites}
    parameters_of = {
        module: [name for name, enclosing in enclosing_by_parameter.items() if not enclosing.isdisjoint(aliases)]
        for module, aliases in _matching_modules(index, rule.per_module).items()
    }
    return {module: parameters for module, parameters in parameters_of.items() if parameters}


def _matching_modules(index: ModelIndex, patterns: Sequence[re.Pattern[str]]) -> dict[str, Sequence[str]]:
    """The entries of :func:`_aliases_of_modules` with a name, in keys or in the model, that matches a pattern."""
    return {name: aliases for name, aliases in _aliases_of_modules(index).items() if matches((name, *aliases), patterns)}


def _aliases_of_modules(index: ModelIndex) -> dict[str, Sequence[str]]:
    """The names of each module in the model, by its name in keys, also inside compiled code. ``_root_`` is all that is monitored."""
    return {ROOT: (ROOT,), **{site.name: site.aliases for site in index.whole.modules if site.name != ROOT}}


_Patterns = tuple[tuple[re.Pattern[str], ...], ...]


class Totals:
    """The totals of rules: each is of one kind, and of some parameters of a module."""

    def __init__(self) -> None:
        self._rules_by_total: defaultdict[tuple[str, str, tuple[str, ...], _Patterns], list[ParsedRule]] = defaultdict(list)
        """By kind, module and parameters, and for states by the patterns that select some of their names."""
        self.rule_by_total: dict[Stream, ParsedRule] = {}
        """The first rule of each total, by the total's stream, kind by kind; filled by :meth:`plan`."""

    def add(self, rule: ParsedRule, kind: str, index: ModelIndex) -> None:
        """Add the totals of a rule and a kind."""
        for module, parameters in parameters_by_module(rule, kind, index).items():
            patterns = (rule.sites, rule.exclude) if KINDS[kind].of_states else ()
            self._rules_by_total[kind, module, tuple(parameters), patterns].append(rule)

    def outputs_of_members(self) -> dict[str, dict[str, dict[str, Output]]]:
        """The outputs of the totals that a parameter is a member of, by the name of the parameter and by kind."""
        shared: defaultdict[str, defaultdict[str, dict[str, Output]]] = defaultdict(lambda: defaultdict(dict))
        for (kind, module, parameters, _patterns), rules in self._rules_by_total.items():
            outputs = joined_outputs(rules, kind, module)
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
        for (kind, module, parameters, _patterns), rules in sorted(self._rules_by_total.items(), key=lambda item: order.index(item[0][0])):
            members = tuple(by_name[name][kind] for name in parameters)
            total = Stream(kind, module, joined_outputs(rules, kind, module), stage, prefix, members=members)
            common = keys & {*total.keys.values()}
            if common:
                why = f"another rule has {min(common)!r} of other parameters"
                raise ConfigError(f"{rules[0].label}.per_module: {why}; expected the same sites, or another statistic.")
            keys.update(total.keys.values())
            self.rule_by_total[total] = rules[0]


def joined_outputs(rules: Sequence[ParsedRule], kind: str, site: str) -> Mapping[str, Output]:
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
