"""From the rules and the model's names to what is watched in a step."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from lightning_module_monitor.config import ParsedGradientFlow, ParsedRule
from lightning_module_monitor.errors import ConfigError, nearest, shortened
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.blocks import find_blocks
from lightning_module_monitor.model.names import UNWATCHED, ModuleSite, NameFormat, Namer, ParameterSite, and_insides, matches
from lightning_module_monitor.model.outputs import Path, suffix
from lightning_module_monitor.probes import activations, rcc_layers
from lightning_module_monitor.probes.base import ParametersOfKind, Watched, WatchedModule, WatchedParameter
from lightning_module_monitor.probes.gradient_flow import Chain, norm_watch
from lightning_module_monitor.record import TRAIN
from lightning_module_monitor.schedule import Listed
from lightning_module_monitor.statistics.rows import Rows
from lightning_module_monitor.statistics.watch import Watch


@dataclass(frozen=True)
class Plan:
    """What is watched in one step: by the rules that are due in it."""

    modules: list[WatchedModule]
    parameters: list[WatchedParameter]
    chain: Chain | None
    """The blocks whose gradient flow is watched."""
    rows: Rows = field(default_factory=Rows, compare=False, repr=False)
    """Where what is seen of them is gathered, step by step."""

    @functools.cached_property
    def outputs(self) -> list[WatchedModule]:
        """The modules of which an output, or the gradient that arrives at one, is watched."""
        return [one for one in self.modules if not one.watches.keys().isdisjoint(activations.KINDS)]

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
            for kind in one.watches:
                by_kind[kind].append(one)
        return {
            kind: ParametersOfKind([one.site for one in members], [one.watches[kind] for one in members])
            for kind, members in by_kind.items()
        }

    def watches(self) -> list[Watch]:
        """Every watch of a rule, modules first, in the model's order."""
        of_modules = [watch for one in self.modules for watch in one.watches.values()]
        of_modules = [one for watch in of_modules for one in (watch.parts.values() or [watch])]
        return of_modules + [watch for one in self.parameters for watch in one.watches.values()]

    def all_watches(self) -> list[Watch]:
        """Those of the rules, and of the gradient flow."""
        return self.watches() + ([] if self.chain is None else list(self.chain.watches))

    def knows_all_keys(self, kind: str = "") -> bool:
        """Whether there is no function, of a kind or of any, whose keys are not known before its first result, and no head of attention."""
        if self.has_heads() and (kind in ("", "activation") or (kind in KINDS and KINDS[kind].of_heads)):
            return False
        return all(len(watch.planned_keys()) == len(watch.keys()) for watch in self.watches() if kind in ("", watch.kind))

    def has_coordinate_check(self) -> bool:
        """Whether anything of the refined coordinate check is watched."""
        return any(watch.kind in rcc_layers.KINDS for watch in self.watches())

    def has_heads(self) -> bool:
        """Whether heads of attention are watched, whose number is not known before they run, nor are their keys."""
        return any(KINDS[watch.kind].of_heads for watch in self.watches())

    def keys(self) -> list[str]:
        """Every key of a number that is known beforehand, kind by kind."""
        of_rules = [key for watch in self.expected() if not KINDS[watch.kind].of_heads for key in watch.planned_keys()]
        return of_rules + (self.chain.keys() if self.chain is not None else [])

    def histogram_keys(self) -> list[str]:
        """Every key of a histogram, kind by kind."""
        return [key for watch in self.expected() if not KINDS[watch.kind].of_heads for key in watch.histogram_keys]

    def expected(self) -> list[Watch]:
        """The watches that values are expected of, kind by kind: a container never runs, and a frozen parameter has no gradient."""
        of_modules = [one for watched in self.modules for kind, one in watched.watches.items() if _can_occur(watched.site, kind)]
        of_modules = [one for watch in of_modules for one in (watch.parts.values() or [watch])]
        of_parameters = [one for watched in self.parameters for kind, one in watched.watches.items() if watched.site.has(kind)]
        order = {kind: place for place, kind in enumerate(KINDS)}
        return sorted(of_modules + of_parameters, key=lambda watch: order[watch.kind])


class Sites:
    """The names of a model, and which of them the rules pick.

    Args:
        root: The model; names are from here.
        within: Name of the submodule outside of which nothing is watched; ``None`` for all.
        exclude: Names that are never watched, with what is inside of such a module.
        format_name: Makes a name of what ``named_modules`` gives.

    Raises:
        ConfigError: If there is no submodule of the name ``within``.
    """

    def __init__(self, root: nn.Module, within: str | None, exclude: Sequence[re.Pattern[str]], format_name: NameFormat) -> None:
        self._namer = Namer(format_name)
        self._format_name = format_name
        modules, parameters = self._namer.module_sites(root), self._namer.parameter_sites(root)
        if within is not None and not any(within in (*site.aliases, site.name) for site in modules):
            raise ConfigError(f"module {within!r} is none of the model's {len(modules)} modules{nearest(within, _names(modules))}")
        self.within = next((site.module for site in modules if within in (*site.aliases, site.name)), root)
        """Outside of this nothing is watched."""
        self.modules = [site for site in modules if _is_within(site, within) and not _is_excluded(site, exclude)]
        self.parameters = [site for site in parameters if _is_within(site, within) and not _is_excluded(site, exclude)]
        if modules and not self.modules:
            patterns = ", ".join(repr(pattern.pattern) for pattern in exclude)
            raise ConfigError(f"exclude {patterns} leaves none of the model's {len(modules)} modules; expected at least one to be left.")
        by_alias = {alias: site.module for site in self.modules for alias in site.aliases}
        names = (format_name(raw) for raw, _module in root.named_modules(remove_duplicate=False))
        self._module_by_name = {name: by_alias[name] for name in names if name in by_alias}
        """Every module by every name that it has, in the model's order."""
        self._root = root
        self._note_parts()
        self._further_names: dict[tuple[str, Path, str], str] = {}
        self._head_names: dict[tuple[str, str], str] = {}

    @property
    def renamed(self) -> dict[str, str]:
        """New name by old name, of what loggers would not have taken."""
        return self._namer.changed

    def leave_out_what_is_gone(self) -> list[str]:
        """Forget modules that were taken out of the model since its names were read, and their parameters: nobody trains these any more.

        Returns:
            The names of such modules.
        """
        if all([get(name) is part for get, name, part in self._parts]):  # a list: a generator takes longer
            return []
        there = set(self._root.modules())
        gone = [site.name for site in self.modules if site.module not in there]
        self.modules = [site for site in self.modules if site.module in there]
        self.parameters = [site for site in self.parameters if site.owner in there]
        self._note_parts()
        return gone

    def _note_parts(self) -> None:
        """Note every part of every module: where it stands, under which name, and what it is. What is inside of TorchScript stays."""
        around = (module._modules for module in self._root.modules() if not isinstance(module, UNWATCHED))
        self._parts = [(parts.get, name, part) for parts in around for name, part in parts.items()]

    def with_wrapped(self, root: nn.Module) -> frozenset[nn.Module]:
        """Every module that has the name of a site: the site's own, and what that wraps."""
        names = {alias for site in self.modules for alias in site.aliases}
        return frozenset(module for raw, module in root.named_modules(remove_duplicate=False) if self._format_name(raw) in names)

    def further_name(self, site: str, path: Path, of: str = "output") -> str:
        """The name of a further output, or input, of a module, always the same for the same one."""
        key = (site, path, of)
        if key not in self._further_names:
            self._further_names[key] = self._namer.name(f"{site}.{suffix(path, of)}")
        return self._further_names[key]

    def chain(self, flow: ParsedGradientFlow, prefix: str = "", *, is_compared: bool = False) -> Chain:
        """The blocks whose gradient flow is asked for. To be called once, for names must differ. As for :meth:`plan`.

        Raises:
            ConfigError: If the model has no such blocks; names the nearest right name.
        """
        names = find_blocks(flow.blocks, self._module_by_name, "gradient_flow.blocks")
        of_norms = Namer()  # apart from the sites': a block's norm has no key that anybody sees
        return Chain(
            blocks=[self._module_by_name[name] for name in names],
            watches=[norm_watch(of_norms.name(name), flow.norm, is_compared=is_compared) for name in names],
            transitions=[self._namer.name(f"{one}-{other}") for one, other in pairwise(names)],
            thresholds=flow.thresholds,
            prefix=prefix,
        )

    def head_name(self, site: str, head: str) -> str:
        """The name of a head of a module's attention, or of a tensor of it: ``head_0``, ``head_0.query``. Always the same for the same."""
        key = (site, head)
        if key not in self._head_names:
            self._head_names[key] = self._namer.name(f"{site}.{head}")
        return self._head_names[key]

    def module_site(self, module: nn.Module | str) -> ModuleSite | None:
        """The site of a module, which may be given by any of its names; ``None`` if it is not watched."""
        return next((site for site in self.modules if site.module is module or module in (site.name, *site.aliases)), None)

    def matching(self, rule: ParsedRule, kind: str) -> list[ModuleSite] | list[ParameterSite]:
        """The sites that a rule picks for a kind."""
        if KINDS[kind].site == "module":
            return [site for site in self.modules if self._has_kind(site, kind) and _is_picked(site, site.module, rule)]
        return [site for site in self.parameters if _is_picked(site, site.owner, rule)]

    def _has_kind(self, site: ModuleSite, kind: str) -> bool:
        return kind not in rcc_layers.KINDS or bool(rcc_layers.layer_sites(site.module, kind))

    def left_out_of_coordinate_check(self, rule: ParsedRule) -> list[str]:
        """The modules that a rule picks and that own weights, but are of no type that the coordinate check knows: name and type."""
        if rcc_layers.OUTPUT not in rule.kinds:
            return []
        unchecked = rcc_layers.unchecked_modules(self.within)
        picked = [site for site in self.modules if site.module in unchecked and _is_picked(site, site.module, rule)]
        return [f"{site.name} ({type(site.module).__name__})" for site in picked]

    def check(self, rule: ParsedRule) -> list[str]:
        """Check that a rule picks anything.

        Returns:
            The kinds for which it picks nothing, if it picks something for others.

        Raises:
            ConfigError: If it picks nothing at all; names the nearest right name.
        """
        matching = {kind: self.matching(rule, kind) for kind in rule.kinds}
        idle = [kind for kind, found in matching.items() if not any(_can_occur(site, kind) for site in found)]
        if len(idle) < len(rule.kinds):
            return idle
        never_run = [site.name for found in matching.values() for site in found]
        if never_run:
            expected = f"expected modules that are called, e.g. '{never_run[0].replace('.', '[.]')}[.].*'"
            raise ConfigError(f"{rule.label}.sites matches only containers, which are never called ({shortened(never_run)}); {expected}.")
        what = "module" if any(KINDS[kind].site == "module" for kind in rule.kinds) else "parameter"
        sites: Sequence[ModuleSite | ParameterSite] = self.modules if what == "module" else self.parameters
        if not any(matches(site.aliases, rule.sites) for site in sites):
            patterns = ", ".join(repr(pattern.pattern) for pattern in rule.sites)
            raise ConfigError(f"{rule.label}.sites {patterns} matches none of {len(sites)} {what} names{nearest(patterns, _names(sites))}")
        options = {"exclude": [pattern.pattern for pattern in rule.exclude], "types": [one.__name__ for one in rule.types or ()]}
        limits = [f"{name} {', '.join(values)}" for name, values in options.items() if values]
        limits += ["leaf_modules"] if rule.leaf_modules else []
        if not limits:
            why = f"none of {len(sites)} modules is a layer that the coordinate check knows (Linear, convolution, embedding, normalization)"
            raise ConfigError(f"{rule.label}.kinds {', '.join(rule.kinds)}: {why}; expected another kind.")
        expected = "expected at least one site; loosen one of them"
        raise ConfigError(f"{rule.label}: {' and '.join(limits)} leave nothing of the {what} names that its sites match; {expected}.")

    def wishes(self, rules: Iterable[ParsedRule], chain: Chain | None) -> Iterator[str]:
        """All that is wanted, and when, one by one: what has to be alike wherever this is monitored by several ranks."""
        for rule in rules:
            when = f"at steps {sorted(rule.schedule.steps)}" if isinstance(rule.schedule, Listed) else str(rule.schedule)
            for watch in self.plan([rule]).watches():
                yield f"{_one_by_one(watch)} {when}"
        for watch in [] if chain is None else chain.watches:
            yield _one_by_one(watch)

    def plan(
        self, rules: Iterable[ParsedRule], chain: Chain | None = None, stage: str = TRAIN, prefix: str = "", *, is_compared: bool = False
    ) -> Plan:
        """What is watched when these rules, and the gradient flow of a chain, are due. Outside of training there are only activations.

        Args:
            rules: Those that are due.
            chain: Where gradient flow is due.
            stage: ``train``, ``validation``, ``test`` or ``predict``.
            prefix: Put before every key.
            is_compared: Whether ranks share their input, and may have the same of a module.
        """
        watches: defaultdict[str, dict[str, Watch]] = defaultdict(dict)  # a module and a parameter never have one name
        for rule in rules:
            for kind in rule.kinds if stage == TRAIN else [kind for kind in rule.kinds if KINDS[kind].in_every_stage]:
                for site in self.matching(rule, kind):
                    compared = is_compared and KINDS[kind].site == "module"
                    watch = watches[site.name].setdefault(kind, Watch(kind, site.name, stage, prefix, is_compared=compared))
                    if isinstance(site, ModuleSite) and kind in rcc_layers.KINDS:
                        suffixes = rcc_layers.layer_sites(site.module, kind)
                        watch.parts = {one: watch.at(f"{site.name}{one}") if one else watch for one in suffixes}
                    _join(watch, rule)
        return Plan(
            [Watched(site, watches[site.name]) for site in self.modules if site.name in watches],
            [Watched(site, watches[site.name]) for site in self.parameters if site.name in watches],
            chain if stage == TRAIN else None,
        )


def _join(watch: Watch, rule: ParsedRule) -> None:
    watch.statistics.update(rule.statistics)
    watch.histograms.update(dict.fromkeys(rule.histograms))
    watch.units.update(dict.fromkeys(rule.units))
    watch.functions.update({function.name: function for function in rule.functions})


def _can_occur(site: ModuleSite | ParameterSite, kind: str) -> bool:
    """Whether a site can have values of a kind. A container that is never called may report attention by hand, from another method."""
    return isinstance(site, ParameterSite) or site.runs or KINDS[kind].of_heads


def _one_by_one(watch: Watch) -> str:
    return "/".join(filter(None, watch.identity))


def _names(sites: Iterable[ModuleSite | ParameterSite]) -> list[str]:
    return [site.name for site in sites]


def _is_within(site: ModuleSite | ParameterSite, within: str | None) -> bool:
    return within is None or any(within in and_insides([alias]) for alias in site.aliases)


def _is_excluded(site: ModuleSite | ParameterSite, patterns: Sequence[re.Pattern[str]]) -> bool:
    return matches(and_insides(site.aliases), patterns)


def _is_picked(site: ModuleSite | ParameterSite, module: nn.Module, rule: ParsedRule) -> bool:
    if rule.types is not None and not isinstance(module, rule.types):
        return False
    if rule.leaf_modules and next(module.children(), None) is not None:
        return False
    return matches((site.name, *site.aliases), rule.sites) and not _is_excluded(site, rule.exclude)
