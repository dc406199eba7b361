"""Names of modules, parameters, outputs, heads and blocks in keys: valid for every logger, and selected by patterns."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torchmetrics import Metric

from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.keys import MAX_SITE_LENGTH, fit_for_loggers
from lightning_module_monitor.kinds import KINDS, ROOT_SITE
from lightning_module_monitor.model.compiled import NOT_COMPILED, CompiledParts
from lightning_module_monitor.model.outputs import Path, suffix
from lightning_module_monitor.suggestions import nearest, nearest_pattern, or_examples

ROOT = ROOT_SITE
_WRAPPED = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = re.compile(rf"(?<![^.])({'|'.join(_WRAPPED)})(\.|$)")

UNWATCHED = (Metric, torch.jit.ScriptModule)
"""A torchmetrics object is not a layer; compiled TorchScript has no Python hooks or parameters."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that only hold modules and parameters."""

NameFormat = Callable[[str], str]


@dataclass(frozen=True)
class ModuleSite:
    """A module to observe."""

    name: str
    """Its first name, without wrappers and valid for every logger."""
    aliases: tuple[str, ...]
    """All names that a pattern may match, without wrappers: a shared module has several."""
    module: nn.Module
    is_compiled: bool = False
    """Whether its call runs compiled code, so that no module inside is observed."""

    @property
    def is_leaf(self) -> bool:
        """Whether no module inside can be observed."""
        return self.is_compiled or is_leaf(self.module)

    @property
    def runs(self) -> bool:
        """Whether it can be called: a module of :data:`CONTAINERS` cannot unless it defines ``forward``."""
        return has_forward(self.module) or not isinstance(self.module, CONTAINERS)


@dataclass(frozen=True)
class ParameterSite:
    """A parameter to observe. It is looked up each time, because strategies replace parameters."""

    name: str
    aliases: tuple[str, ...]
    owner: nn.Module
    attribute: str
    layer: nn.Module
    """The module to which it belongs: the owner, or the layer of which the owner computes an attribute, as weight norm does."""

    @property
    def is_leaf(self) -> bool:
        """Whether its layer has no module inside."""
        return is_leaf(self.layer)

    def tensor(self) -> Tensor | None:
        """The current parameter; ``None`` if it was removed or has no shape yet (lazy modules before the first batch)."""
        parameter = self.owner._parameters.get(self.attribute)
        if type(parameter) is nn.Parameter:  # quicker than isinstance and is_lazy
            return parameter
        parameter = self.registered()
        return None if parameter is None or is_lazy(parameter) else parameter

    def registered(self) -> nn.Parameter | None:
        """The current parameter, also one without a shape; ``None`` if it was removed."""
        parameters = self.owner._parameters
        parameter = parameters.get(self.attribute)
        # Pruning (torch.nn.utils.prune) gives the parameter this name, and computes a tensor of the former name from it.
        return parameters.get(f"{self.attribute}_orig") if parameter is None else parameter

    def has(self, kind: str) -> bool:
        """Whether a parameter can have values of a kind: it is floating-point and, for gradients, trained. True before it has a shape."""
        parameter = self.tensor()
        is_of_trained = kind.startswith("gradient") or KINDS[kind].of_states
        return parameter is None or (parameter.is_floating_point() and (parameter.requires_grad or not is_of_trained))


def has_forward(module: nn.Module) -> bool:
    """Whether a module, or its class, defines ``forward``: some only hold modules and parameters."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def without_wrappers(name: str) -> str:
    """A name without the wrappers of ``torch.compile``, Fabric, FSDP and activation checkpointing; the root is ``_root_``.

    >>> without_wrappers("_forward_module.blocks.0._orig_mod.fc")
    'blocks.0.fc'
    """
    return _WRAPPERS.sub("", name).rstrip(".") or ROOT


def unwrapped_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without parametrizations and the wrappers of ``torch.compile``, Fabric, FSDP and activation checkpointing."""
    inner = next((wrapped for name in _WRAPPED if (wrapped := module._modules.get(name)) is not None), None)
    return type_before_parametrizations(module) if inner is None else unwrapped_class(inner)


def parametrizations_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules (of ``torch.nn.utils.parametrize``) whose parameters stand for a module's own: its weight is computed from them."""
    return tuple(module.get_submodule("parametrizations").children()) if is_parametrized(module) else ()


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no module inside, other than those that compute its parameters."""
    computing = module.parametrizations if is_parametrized(module) else None
    return all(child is computing for child in module.children())


def is_fsdp_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper of FSDP1. The wrapped module is observed: its parameters are whole when its forward returns."""
    return "_fsdp_wrapped_module" in module._modules


class Namer:
    """Gives every module and parameter a unique name that is valid for loggers."""

    def __init__(self, format_name: NameFormat = without_wrappers) -> None:
        self._format = format_name
        self._taken: set[str] = set()
        self.changed: dict[str, str] = {}
        """New name by preferred name, for names that had to be changed."""

    def name(self, preferred: str) -> str:
        """The name for a new site: the preferred name, or the nearest one that is valid and free."""
        fit = base = fit_for_loggers(preferred)
        number = 1
        while fit in self._taken:
            number += 1
            fit = f"{base[: MAX_SITE_LENGTH - 8]}_{number}"
        self._taken.add(fit)
        if fit != preferred:
            self.changed[preferred] = fit
        return fit

    def module_sites(self, root: nn.Module) -> list[ModuleSite]:
        """Every module of ``root``, itself first, without those of :data:`UNWATCHED`."""
        names: dict[nn.Module, list[str]] = {}
        outermost: dict[str, nn.Module] = {}
        for raw, module in root.named_modules(remove_duplicate=False):
            if is_fsdp_wrapper(module):
                continue
            # A wrapper and the wrapped module are the same layer; the wrapper, which comes first, is observed.
            layer = outermost.setdefault(without_wrappers(raw), module)
            if not isinstance(module, UNWATCHED):
                names.setdefault(layer, []).append(self._format(raw))
        return [ModuleSite(self.name(aliases[0]), tuple(dict.fromkeys(aliases)), module) for module, aliases in names.items()]

    def parameter_sites(self, root: nn.Module) -> list[ParameterSite]:
        """Every parameter of ``root``; a tied parameter once, under its first name."""
        layers = {part: module for module in root.modules() for part in parametrizations_of(module)}
        parameters: dict[int, tuple[tuple[nn.Module, str, nn.Module], list[str]]] = {}
        for module_name, module in root.named_modules(remove_duplicate=False):
            for attribute, parameter in module._parameters.items():
                if parameter is not None and not isinstance(module, UNWATCHED):
                    raw = f"{module_name}.{attribute}" if module_name else attribute
                    parameters.setdefault(id(parameter), ((module, attribute, layers.get(module, module)), []))[1].append(self._format(raw))
        return [ParameterSite(self.name(names[0]), tuple(dict.fromkeys(names)), *owner) for owner, names in parameters.values()]


Site = ModuleSite | ParameterSite


def matches(aliases: Iterable[str], patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether any pattern matches any of the names as a whole."""
    return any(pattern.fullmatch(alias) for alias in aliases for pattern in patterns)


def beginning_with(regex: str) -> str:
    """A pattern for ``re.fullmatch`` that matches what ``re.match`` matches with ``regex``."""
    return f"(?:{regex})(?s:.*)"


def and_insides(aliases: Iterable[str]) -> Iterator[str]:
    """The names and their enclosing modules' names: modules inside an excluded module are excluded with it.

    >>> list(and_insides(["a.b.weight"]))
    ['a.b.weight', 'a.b', 'a']
    """
    for alias in aliases:
        parts = alias.split(".")
        yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


class ModelIndex:
    """The names of a model.

    Args:
        root: The model; names are relative to it.
        within: Name of the only submodule that is observed; ``None`` for the whole model.
        exclude: Patterns of names that are not observed, together with the modules inside.
        format_name: Makes a name of a name of ``named_modules``.
        compiled: The compiled parts of the model; modules inside of compiled code are not observed.

    Raises:
        ConfigError: If there is no submodule of the name ``within``.
    """

    def __init__(
        self,
        root: nn.Module,
        within: str | None,
        exclude: Sequence[re.Pattern[str]],
        format_name: NameFormat,
        compiled: CompiledParts = NOT_COMPILED,
    ) -> None:
        self.compiled = compiled
        self.whole = ModelIndex(root, within, exclude, format_name) if compiled != NOT_COMPILED else self
        """The names including those inside of compiled code."""
        self.namer = Namer(format_name)
        self._format_name = format_name
        self.exclude = exclude
        modules, parameters = self.namer.module_sites(root), self.namer.parameter_sites(root)
        outermost = root if within is None else next((site.module for site in modules if within in (*site.aliases, site.name)), None)
        if outermost is None:
            known = [site.name for site in modules]
            near = or_examples(nearest(str(within), known), known)
            raise ConfigError(f"module {within!r} is none of the model's {len(modules)} modules{near}")
        self.within = outermost
        """The only module that is observed, with the modules inside."""
        selected = [site for site in modules if _is_within(site, within) and not is_excluded(site, exclude)]
        outside = [site for site in selected if site.module not in compiled.inside]
        # By name, because a wrapper with the name of a compiled module is observed in its place.
        names_of_compiled = {format_name(raw) for raw, module in root.named_modules() if module in compiled.outermost}
        self.modules = [replace(site, is_compiled=not names_of_compiled.isdisjoint(site.aliases)) for site in outside]
        self.parameters = [site for site in parameters if _is_within(site, within) and not is_excluded(site, exclude)]
        sites: list[Site] = [*modules, *parameters]
        self.excluded = [site for site in sites if _is_within(site, within) and is_excluded(site, exclude)]
        """The modules and parameters that ``exclude`` leaves out."""
        if any(pattern.pattern == ROOT for pattern in exclude):
            raise ConfigError(f"exclude {ROOT!r} is the whole model; expected names inside of it, as module: NAME is for a part of it.")
        if modules and not selected:
            patterns = shortened([repr(pattern.pattern) for pattern in exclude])
            raise ConfigError(f"exclude {patterns} leaves none of the model's {len(modules)} modules; expected at least one to be left.")
        by_alias = {alias: site.module for site in self.modules for alias in site.aliases}
        names = (format_name(raw) for raw, _module in root.named_modules(remove_duplicate=False))
        self.module_by_name = {name: by_alias[name] for name in names if name in by_alias}
        """Every module by each of its names, in the model's order."""
        self._root = root
        self._known = {id(module): weakref.ref(module) for module in root.modules()}
        """The modules of which the names were read, by identity: some define ``__eq__``."""
        self._names_of_parameters = _names_of_parameters(root)
        self._names_of_parts: dict[tuple[object, ...], str] = {}
        """Names of outputs, inputs and heads of modules."""

    def refusal(self, what: str, inside: Sequence[str]) -> ConfigError:
        """The error for an option that concerns only modules ``inside`` of compiled code."""
        compiled = shortened([without_wrappers(name) for name in self.compiled.names])
        why = f"compiled: keep observes nothing inside compiled code ({compiled}), and nothing else matches ({shortened(inside)})"
        return ConfigError(f"{what}: {why}; expected modules outside of it, or compiled: uncompiled.")

    def blocks(self, blocks: str | Sequence[str]) -> list[str]:
        """The names of blocks; see :func:`find_blocks`.

        Raises:
            ConfigError: If there are no such blocks, or only inside compiled code.
        """
        try:
            return find_blocks(blocks, self.module_by_name)
        except ConfigError:
            # Unless compiled code is the reason, this call raises too, with the nearest name.
            raise self.refusal("gradient_flow.blocks", find_blocks(blocks, self.whole.module_by_name)) from None

    def is_complete(self) -> bool:
        """Whether the model has no modules and parameters that it did not have when the names were read, other than wrappers of these."""
        layers = [module for module in self._root.modules() if not any(name in module._modules for name in _WRAPPED)]
        are_known = all(id(layer) in self._known and self._known[id(layer)]() is layer for layer in layers)
        return are_known and _names_of_parameters(self._root) <= self._names_of_parameters

    def forget_removed_modules(self) -> list[str]:
        """Forget modules that are no longer part of the model, and their parameters; returns the names of the modules."""
        current = set(self._root.modules())
        removed = [site.name for site in self.modules if site.module not in current]
        if removed:
            self.modules = [site for site in self.modules if site.module in current]
            self.parameters = [site for site in self.parameters if site.owner in current]
        return removed

    def names(self) -> dict[nn.Module, str]:
        """The name of every module: the name in keys if it is observed, otherwise the formatted name."""
        in_keys = {alias: site.name for site in self.modules for alias in site.aliases}
        formatted = ((module, self._format_name(raw)) for raw, module in self._root.named_modules())
        return {module: in_keys.get(name, name) for module, name in formatted} | {site.module: site.name for site in self.modules}

    def with_wrapped(self, root: nn.Module) -> frozenset[nn.Module]:
        """Every module that has the name of a site: the module of the site, and the module that it wraps."""
        names = {alias for site in self.modules for alias in site.aliases}
        return frozenset(module for raw, module in root.named_modules(remove_duplicate=False) if self._format_name(raw) in names)

    def output_name(self, site: str, path: Path, of: str = "output") -> str:
        """The name of a further output of a module, or ``of`` its input: the same in every call."""
        return self.part_name(site, suffix(path, of), path)

    def part_name(self, site: str, part: str, path: Path = ()) -> str:
        """The name of an attention head (``head_0``), of its tensor (``head_0.query``) or of a parameter's state, always the same.

        With a ``path`` two parts of equal names, as the entries ``1`` and ``"1"`` of a mapping, get two names.
        """
        key = (site, part, path)
        if key not in self._names_of_parts:
            self._names_of_parts[key] = self.namer.name(f"{site}.{part}")
        return self._names_of_parts[key]

    def module_site(self, module: nn.Module | str) -> ModuleSite | None:
        """The site of a module or of any of its names; ``None`` if it is not observed."""
        return next((site for site in self.modules if site.module is module or module in (site.name, *site.aliases)), None)


def is_excluded(site: Site, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether a pattern matches any name of a site or of an enclosing module."""
    return matches(and_insides(site.aliases), patterns)


def _names_of_parameters(root: nn.Module) -> set[str]:
    """The names of parameters without wrappers, and without the flat ones in which a strategy keeps them (FSDP1)."""
    return {without_wrappers(name) for name, _parameter in root.named_parameters() if not name.endswith("_flat_param")}


def _is_within(site: Site, within: str | None) -> bool:
    return within is None or any(within in and_insides([alias]) for alias in site.aliases)


_HOLDS_BLOCKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(blocks: str | Sequence[str], by_name: Mapping[str, nn.Module]) -> list[str]:
    """The names of the blocks, in the order of the forward pass.

    Args:
        blocks: Name of a container, whose children are the blocks; or a pattern (``re.fullmatch``) of names, in the model's
            order; or names in order. A shared module has several names.
        by_name: Every module by each of its names, in the model's order.

    Returns:
        At least two names.

    Raises:
        ConfigError: If there are fewer, with the nearest name.
    """
    if isinstance(blocks, str):
        names = _children(blocks, by_name) if blocks in by_name else _matching(blocks, by_name)
    else:
        names = list(blocks)
        for name in names:
            if name not in by_name:
                near = or_examples(nearest(name, by_name), by_name)
                raise ConfigError(f"gradient_flow.blocks {name!r} is none of the {len(by_name)} module names{near}")
    if len(names) < 2:
        listed = ", ".join(map(repr, names)) or "none"
        raise ConfigError(
            f"gradient_flow.blocks {blocks!r} gives {len(names)} blocks ({listed}); expected at least two, for a gain is between two."
        )
    return names


def _matching(blocks: str, by_name: Mapping[str, nn.Module]) -> list[str]:
    try:
        names = [name for name in by_name if re.fullmatch(blocks, name)]
    except re.error as error:
        wrong = f"gradient_flow.blocks {blocks!r} is no module's name, and not a regular expression ({error})"
        raise ConfigError(f"{wrong}; expected 'model.blocks' or the like{nearest(blocks, by_name)}") from error
    if not names:
        message = f"gradient_flow.blocks {blocks!r} is none of the {len(by_name)} module names, and as a pattern matches none"
        raise ConfigError(message + or_examples(nearest_pattern(blocks, by_name), by_name))
    return names


def _children(name: str, by_name: Mapping[str, nn.Module]) -> list[str]:
    module = by_name[name]
    if not isinstance(module, _HOLDS_BLOCKS):
        containers = [other for other, candidate in by_name.items() if isinstance(candidate, _HOLDS_BLOCKS)]
        expected = "expected a ModuleList, Sequential or ModuleDict of blocks, a list of names, or a pattern"
        raise ConfigError(f"gradient_flow.blocks {name!r} is a {type(module).__name__}; {expected}{nearest(name, containers)}")
    return children_of_containers(by_name, *_HOLDS_BLOCKS)[name]


def children_of_containers(by_name: Mapping[str, nn.Module], *types: type[nn.Module]) -> dict[str, list[str]]:
    """The names of the children of each container of some types, in the model's order.

    Args:
        by_name: Every module by each of its names, in the model's order.
        types: Classes of containers.
    """
    children: dict[str, list[str]] = {name: [] for name, module in by_name.items() if isinstance(module, types)}
    for name in by_name:
        container = name.rpartition(".")[0] or ROOT
        if name != ROOT and container in children:
            children[container].append(name)
    return children
