"""What modules and parameters are called: names without wrappers, fit for every logger, and their selection by pattern."""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torchmetrics import Metric

from lightning_module_monitor.record import MAX_SITE_LENGTH, fit_for_loggers

ROOT = "_root_"
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")

UNWATCHED = (Metric, torch.jit.ScriptModule)
"""A torchmetrics object measures and is not a layer; compiled TorchScript has neither hooks nor parameters of Python."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They hold modules and parameters for others to use."""

NameFormat = Callable[[str], str]


@dataclass(frozen=True)
class ModuleSite:
    """A module to observe."""

    name: str
    """Its first name, without wrappers and fit for every logger."""
    aliases: tuple[str, ...]
    """Every name a pattern may match, without wrappers: a shared module has several."""
    module: nn.Module

    @property
    def runs(self) -> bool:
        """Whether it can be called: one of :data:`CONTAINERS` cannot, unless it has a ``forward`` of its own."""
        has_forward = type(self.module).forward is not nn.Module.forward or "forward" in vars(self.module)
        return has_forward or not isinstance(self.module, CONTAINERS)


@dataclass(frozen=True)
class ParameterSite:
    """A parameter to observe. It is looked up anew each time, because strategies replace parameters."""

    name: str
    aliases: tuple[str, ...]
    owner: nn.Module
    attribute: str

    def tensor(self) -> Tensor | None:
        """The parameter as it is now; ``None`` if it is gone or has no shape yet (lazy modules before the first batch)."""
        parameter = self.owner._parameters.get(self.attribute)
        if type(parameter) is nn.Parameter:  # quicker than what it is to be an instance of one
            return parameter
        return None if isinstance(parameter, UninitializedParameter) else parameter

    def has(self, kind: str) -> bool:
        """Whether there are values of a kind: of real floating parameters, and gradients of those that are trained."""
        parameter = self.tensor()
        if parameter is None:
            return True  # not yet
        return parameter.is_floating_point() and (parameter.requires_grad or not kind.startswith("gradient"))


def tensors_of(sites: Collection[ParameterSite]) -> list[Tensor | None]:
    """:meth:`ParameterSite.tensor` of several, by functions of C alone where none of them is out of the ordinary."""
    tables = [*map(_parameters_of, map(_owner_of, sites))]
    if set(map(type, tables)) <= _PLAIN_TABLES:  # another may fetch what it is asked for from elsewhere
        parameters = [*map(_member, tables, map(_attribute_of, sites))]
        if set(map(type, parameters)) <= {nn.Parameter}:
            return parameters
    return [site.tensor() for site in sites]


_PLAIN_TABLES = {dict, OrderedDict}
_owner_of, _attribute_of = operator.attrgetter("owner"), operator.attrgetter("attribute")
_parameters_of = operator.attrgetter("_parameters")
_member: Callable[..., Tensor | None] = dict.get


def without_wrappers(name: str) -> str:
    """A name as if ``torch.compile``, Fabric, FSDP and activation checkpointing had not wrapped anything; the root is ``_root_``.

    >>> without_wrappers("_forward_module.blocks.0._orig_mod.fc")
    'blocks.0.fc'
    """
    return _WRAPPERS.sub("", name).rstrip(".") or ROOT


class Namer:
    """Gives every module and parameter one name: fit for loggers, no two alike."""

    def __init__(self, format_name: NameFormat = without_wrappers) -> None:
        self._format = format_name
        self._taken: set[str] = set()
        self.changed: dict[str, str] = {}
        """New name by old name, of those that could not stay as they were."""

    def name(self, preferred: str) -> str:
        """The name for a new site: the preferred one, or the nearest that is fit and free."""
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
        """Every module of ``root``, itself first; but those of :data:`UNWATCHED`."""
        names: dict[nn.Module, list[str]] = {}
        outermost: dict[str, nn.Module] = {}
        for raw, module in root.named_modules(remove_duplicate=False):
            # A wrapper and what it wraps are one layer; the wrapper, which comes first, stands for both.
            layer = outermost.setdefault(without_wrappers(raw), module)
            if not isinstance(module, UNWATCHED):
                names.setdefault(layer, []).append(self._format(raw))
        return [ModuleSite(self.name(known[0]), tuple(dict.fromkeys(known)), module) for module, known in names.items()]

    def parameter_sites(self, root: nn.Module) -> list[ParameterSite]:
        """Every parameter of ``root``; a tied one once, under its first name."""
        names: dict[int, list[str]] = {}
        places: dict[int, tuple[nn.Module, str]] = {}
        for module_name, module in root.named_modules(remove_duplicate=False):
            for attribute, parameter in module._parameters.items():
                if parameter is not None and not isinstance(module, UNWATCHED):
                    raw = f"{module_name}.{attribute}" if module_name else attribute
                    names.setdefault(id(parameter), []).append(self._format(raw))
                    places.setdefault(id(parameter), (module, attribute))
        return [ParameterSite(self.name(known[0]), tuple(dict.fromkeys(known)), *places[identity]) for identity, known in names.items()]


Site = ModuleSite | ParameterSite


def matches(aliases: Iterable[str], patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether any pattern matches any of the names as a whole."""
    return any(pattern.fullmatch(alias) for alias in aliases for pattern in patterns)


def and_insides(aliases: Iterable[str]) -> Iterator[str]:
    """The names and those of every module around them: what is inside an excluded module is excluded with it.

    >>> list(and_insides(["a.b.weight"]))
    ['a.b.weight', 'a.b', 'a']
    """
    for alias in aliases:
        parts = alias.split(".")
        yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))
