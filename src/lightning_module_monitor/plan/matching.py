"""Which sites of a model a rule picks, and the check of rules against a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.distributed.shards import is_flattened, is_sharded
from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.compiled import NOT_COMPILED, names_used
from lightning_module_monitor.model.names import (
    ModelIndex,
    ParameterSite,
    Site,
    is_excluded,
    matches,
    unwrapped_class,
)
from lightning_module_monitor.probes import rcc_layers
from lightning_module_monitor.probes.base import ErrorReporter
from lightning_module_monitor.probes.parameters import matrices_of
from lightning_module_monitor.statistics.effective_rank import MOST_FEATURES
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.spectral_statistics import SpectralStatistic
from lightning_module_monitor.suggestions import nearest, unmatched

_ANY = (re.compile("(?s).*"),)

WATCH_LABEL = "health.watch"
"""The label of rules that record what the built-in detectors judge."""


def matching(rule: ParsedRule, kind: str, index: ModelIndex) -> Sequence[Site]:
    """The sites that a rule picks for a kind."""
    if KINDS[kind].site == "parameter":
        # The name of a state is not known yet, and any pattern may match it.
        rule = replace(rule, sites=_ANY) if KINDS[kind].of_states else rule
        return [site for site in index.parameters if is_picked(site, rule)]
    modules = [site for site in index.modules if not KINDS[kind].of_layers or layer_sites(site, kind)]
    return [site for site in modules if is_picked(site, rule)]


def layer_sites(site: Site, kind: str) -> list[str]:
    """The sites of a kind that is of the linear maps within a module: ``fc``, ``fc.weight``, ``attn.q_proj``; none of any other kind."""
    if isinstance(site, ParameterSite) or not KINDS[kind].of_layers:
        return []
    return [f"{site.name}{suffix}" for suffix in rcc_layers.layer_sites(site.module, kind)]


def idle_kinds(rule: ParsedRule, index: ModelIndex) -> list[str]:
    """The kinds for which a rule picks nothing, if it picks something for others.

    Raises:
        ConfigError: If it picks nothing at all, names the nearest right name; or only what is inside compiled code.
    """
    sites_of = {kind: matching(rule, kind, index) for kind in rule.kinds}
    idle = [kind for kind, sites in sites_of.items() if not any(_can_occur(site, kind, index) for site in sites)]
    if len(idle) < len(rule.kinds):
        return idle
    if index.whole is not index:
        idle_kinds(rule, index.whole)  # fails, with the nearest right name, if nothing matches inside compiled code either
        inside = [site.name for kind in rule.kinds for site in matching(rule, kind, index.whole)]
        raise index.refusal(f"{rule.label}.kinds {', '.join(rule.kinds)}", inside)
    never_run = [site.name for sites in sites_of.values() for site in sites]
    if never_run:
        expected = f"expected modules that are called, e.g. '{never_run[0].replace('.', '[.]')}[.].*'"
        raise ConfigError(f"{rule.label}.sites matches only containers, which are never called ({shortened(never_run)}); {expected}.")
    sites_by_type: dict[str, Sequence[Site]] = {"module": index.modules, "parameter": index.parameters}
    site_types = [name for name in sites_by_type if any(KINDS[kind].site == name for kind in rule.kinds)]
    what, candidates = " and ".join(site_types), [site for name in site_types for site in sites_by_type[name]]
    if not (any(KINDS[kind].of_states for kind in rule.kinds) or any(matches(site.aliases, rule.sites) for site in candidates)):
        patterns, names = [pattern.pattern for pattern in rule.sites], [site.name for site in candidates]
        raise ConfigError(f"{rule.label}.sites {unmatched(patterns, names, f'{what} names')}")
    types = [kind if isinstance(kind, str) else kind.__name__ for kind in rule.types or ()]
    options = {"exclude": [pattern.pattern for pattern in rule.exclude], "types": types}
    limits = [f"{name} {shortened(values)}" for name, values in options.items() if values]
    limits += ["leaf_modules"] if rule.leaf_modules else []
    if not limits:
        layer = "a layer that the coordinate check knows (Linear, convolution, embedding, normalization)"
        why = f"none of {len(index.modules)} modules is {layer}"
        raise ConfigError(f"{rule.label}.kinds {', '.join(rule.kinds)}: {why}; expected another kind.")
    expected = "expected at least one site; loosen one of them"
    raise ConfigError(f"{rule.label}: {' and '.join(limits)} leave nothing of the {what} names that its sites match; {expected}.")


def report_unmatched(option: str, patterns: Iterable[re.Pattern[str]], sites: Sequence[Site], reporter: ErrorReporter) -> None:
    """Warn, in one line, of the patterns of an option that match none of the names of some sites, with the nearest names."""
    aliases = {alias for site in sites for alias in site.aliases}
    without_match = [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, aliases))]
    if without_match:
        reporter.log_once(f"{option} {unmatched(without_match, [site.name for site in sites])}", logging.WARNING)


def _can_occur(site: Site, kind: str, index: ModelIndex) -> bool:
    """Whether a site can have values of a kind. A container that is never called may report attention by hand, from another method."""
    if isinstance(site, ParameterSite) or not KINDS[kind].of_heads:
        return isinstance(site, ParameterSite) or site.runs
    compiled, of = index.compiled, type(site.module)
    if compiled == NOT_COMPILED:
        return True
    # Outside of the model's compiled code: a module around that may call attention if its own code shows it.
    if site.is_compiled or site.module in compiled.callers or of.forward.__module__.startswith("torch.nn."):
        return not site.is_compiled and isinstance(site.module, nn.MultiheadAttention)
    is_around = any(module in compiled.outermost for module in site.module.modules())
    return not is_around or not names_used(of.forward, of).isdisjoint(_ATTENTION)


_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward", "monitor_scaled_dot_product_attention")


def is_picked(site: Site, rule: ParsedRule) -> bool:
    """Whether a rule picks a site."""
    module = site.layer if isinstance(site, ParameterSite) else site.module
    if rule.types is not None and not any(_is_of(module, cls) for cls in rule.types):
        return False
    if rule.leaf_modules and not site.is_leaf:
        return False
    return matches((site.name, *site.aliases), rule.sites) and not is_excluded(site, rule.exclude)


def check_rule(rule: ParsedRule, index: ModelIndex, reporter: ErrorReporter, *, shares_input: bool) -> None:
    """Check a rule against a model's names, and report in which part it matches nothing; an optional one may match nothing at all.

    Args:
        rule: The rule.
        index: The names.
        reporter: Reports it.
        shares_input: Whether other ranks have the same input as this one.

    Raises:
        ConfigError: If it matches nothing, names a class that the model lacks, or needs what parts of tensors do not show.
    """
    if shares_input:
        check_tensor_parallel(rule)
    _check_matrices(rule, index)
    for name in rule.types or ():
        if isinstance(name, str) and not any(_is_of(site.module, name) for site in index.whole.modules):
            classes = sorted({unwrapped_class(site.module).__name__ for site in index.whole.modules})
            expected = f"expected e.g. {shortened(classes)}, or an import path{nearest(name, classes)}"
            raise ConfigError(f"{rule.label}.types {name!r} is the class of none of {len(index.whole.modules)} modules; {expected}")
    for kind in () if rule.is_optional else idle_kinds(rule, index):
        where = " outside of compiled code" if index.whole is not index and KINDS[kind].site == "module" else ""
        names = [site.name for site in index.whole.parameters] if KINDS[kind].site == "parameter" else []
        example = f"; its sites are parameters, such as {names[0]!r}" if names else ""
        reporter.log_once(f"{rule.label} matches nothing of kind {kind!r}{where}{example}.", logging.WARNING)
    if not (rule.is_optional or any(KINDS[kind].of_states for kind in rule.kinds)):  # names of states come later
        known: list[Site] = [*index.whole.modules, *index.whole.parameters]
        report_unmatched(f"{rule.label}.sites", rule.sites, known, reporter)
        report_unmatched(f"{rule.label}.exclude", rule.exclude, [*known, *index.whole.excluded], reporter)
    if rcc_layers.OUTPUT not in rule.kinds:
        return
    with_weights = [site for site in index.modules if rcc_layers.has_own_weights(site.module) and is_picked(site, rule)]
    unknown = [site for site in with_weights if not rcc_layers.layer_parts(site.module)]
    left_out = [f"{site.name} ({_class_name(unwrapped_class(site.module))})" for site in unknown]
    if left_out:
        why = "rcc leaves out modules whose type is not in its table, or whose weight is quantized or computed from others"
        reporter.log_once(f"{why}: {shortened(left_out, 10)}. register_rcc_layer(type, function) adds a type.")


def _class_name(of: type) -> str:
    """The name of a class; with its import path if it is not of torch, as other libraries have a ``Linear``, too."""
    return of.__name__ if of.__module__.partition(".")[0] == "torch" else f"{of.__module__}.{of.__qualname__}"


def _is_of(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    """Whether a module, or what it wraps, is an instance of a class, which may be given by its name."""
    of = unwrapped_class(module)
    return any(base.__name__ == wanted for base in of.__mro__) if isinstance(wanted, str) else issubclass(of, wanted)


def token_statistics(rule: ParsedRule) -> list[str]:
    """The names of a rule's statistics that are of the norms of tokens."""
    return [name for name, output in rule.outputs.items() if isinstance(output, Statistic) and output.needs & Need.TOKENS]


def _check_matrices(rule: ParsedRule, index: ModelIndex) -> None:
    """Refuse statistics of singular values of what is too large, or where no rank has the matrix, unless it is to be assembled."""
    named = {name: output for name, output in rule.outputs.items() if isinstance(output, SpectralStatistic)}
    kinds = [KINDS[kind] for kind in rule.kinds if KINDS[kind].has_matrices]
    for site in index.parameters if named and kinds else ():
        tensor = site.tensor()
        if tensor is None or is_lazy(tensor) or not is_picked(site, rule):
            continue
        (name, statistic), *_others = named.items()
        what = f"{rule.label}: {name!r} of {site.name!r}"
        if is_sharded(tensor) or is_flattened(tensor):
            why = "it is laid out over ranks (FSDP or tensor parallel), and no rank has the matrix"
            if any(kind.of_states for kind in kinds):
                raise ConfigError(f"{what}: {why}; expected kinds without optimizer_state.")
            if not statistic.gathers:
                raise ConfigError(f"{what}: {why}; gather: true assembles it, by one collective for each.")
        side = min(matrices_of(site, torch.empty(tensor.shape, device="meta")).shape[1:])
        name_of_all = next((name for name, output in named.items() if output.is_of_all and side > output.max_features), None)
        if name_of_all is not None:
            why = f"needs all {side} singular values, and max_features is {named[name_of_all].max_features}"
            expected = f"exclude: {re.escape(site.name)}, or max_features up to {MOST_FEATURES}, which takes seconds"
            raise ConfigError(f"{rule.label}: {name_of_all!r} of {site.name!r} {why}; expected {expected}.")


def check_tensor_parallel(rule: ParsedRule) -> None:
    """Refuse what cannot be computed from parts of a tensor, where it is not known which part a rank has.

    Raises:
        ConfigError: Names the rule.
    """
    names = token_statistics(rule)
    if names:
        why = "in tensor parallel training a rank may have parts of the tokens"
        raise ConfigError(f"{rule.label}.statistics {names[0]!r}: {why}; expected statistics without {' and '.join(names)}.")
    spectral = [name for name, output in rule.outputs.items() if isinstance(output, SpectralStatistic)]
    if spectral and any(KINDS[kind].has_units for kind in rule.kinds):
        why = "in tensor parallel training a rank may have parts of the features"
        raise ConfigError(f"{rule.label}.statistics {spectral[0]!r}: {why}; expected kinds of parameters.")
    head_kinds = [kind for kind in rule.kinds if KINDS[kind].of_heads]
    if head_kinds:
        why = "in tensor parallel training a rank may have some of the heads, and does not know which"
        raise ConfigError(f"{rule.label}.kinds {head_kinds[0]!r}: {why}; expected kinds of whole modules, or of parameters.")
