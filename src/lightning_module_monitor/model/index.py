"""The names of a model: its modules, parameters, outputs and heads, as they stand in keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from lightning_module_monitor.errors import ConfigError, nearest
from lightning_module_monitor.model.names import UNWATCHED, ModuleSite, NameFormat, Namer, ParameterSite, and_insides, matches
from lightning_module_monitor.model.outputs import Path, suffix


class ModelIndex:
    """The names of a model.

    Args:
        root: The model; names are from here.
        within: Name of the submodule outside of which nothing is watched; ``None`` for all.
        exclude: Names that are never watched, with what is inside of such a module.
        format_name: Makes a name of what ``named_modules`` gives.

    Raises:
        ConfigError: If there is no submodule of the name ``within``.
    """

    def __init__(self, root: nn.Module, within: str | None, exclude: Sequence[re.Pattern[str]], format_name: NameFormat) -> None:
        self.namer = Namer(format_name)
        self._format_name = format_name
        modules, parameters = self.namer.module_sites(root), self.namer.parameter_sites(root)
        if within is not None and not any(within in (*site.aliases, site.name) for site in modules):
            raise ConfigError(f"module {within!r} is none of the model's {len(modules)} modules{nearest(within, names_of(modules))}")
        self.within = next((site.module for site in modules if within in (*site.aliases, site.name)), root)
        """Outside of this nothing is watched."""
        self.modules = [site for site in modules if _is_within(site, within) and not is_excluded(site, exclude)]
        self.parameters = [site for site in parameters if _is_within(site, within) and not is_excluded(site, exclude)]
        if modules and not self.modules:
            patterns = ", ".join(repr(pattern.pattern) for pattern in exclude)
            raise ConfigError(f"exclude {patterns} leaves none of the model's {len(modules)} modules; expected at least one to be left.")
        by_alias = {alias: site.module for site in self.modules for alias in site.aliases}
        names = (format_name(raw) for raw, _module in root.named_modules(remove_duplicate=False))
        self.module_by_name = {name: by_alias[name] for name in names if name in by_alias}
        """Every module by every name that it has, in the model's order."""
        self._root = root
        self._note_parts()
        self._further_names: dict[tuple[str, Path, str], str] = {}
        self._head_names: dict[tuple[str, str], str] = {}

    @property
    def renamed(self) -> dict[str, str]:
        """New name by old name, of what loggers would not have taken."""
        return self.namer.changed

    def forget_removed_modules(self) -> list[str]:
        """Forget modules that were taken out of the model since its names were read, and their parameters.

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
            self._further_names[key] = self.namer.name(f"{site}.{suffix(path, of)}")
        return self._further_names[key]

    def head_name(self, site: str, head: str) -> str:
        """The name of a head of a module's attention, or of a tensor of it: ``head_0``, ``head_0.query``. Always the same for the same."""
        key = (site, head)
        if key not in self._head_names:
            self._head_names[key] = self.namer.name(f"{site}.{head}")
        return self._head_names[key]

    def module_site(self, module: nn.Module | str) -> ModuleSite | None:
        """The site of a module, which may be given by any of its names; ``None`` if it is not watched."""
        return next((site for site in self.modules if site.module is module or module in (site.name, *site.aliases)), None)


def names_of(sites: Iterable[ModuleSite | ParameterSite]) -> list[str]:
    """The names of some sites."""
    return [site.name for site in sites]


def is_excluded(site: ModuleSite | ParameterSite, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether a pattern matches any name of a site, or of a module that it is in."""
    return matches(and_insides(site.aliases), patterns)


def _is_within(site: ModuleSite | ParameterSite, within: str | None) -> bool:
    return within is None or any(within in and_insides([alias]) for alias in site.aliases)
