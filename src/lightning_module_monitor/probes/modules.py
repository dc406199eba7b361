"""Type, parameters and output shape of the modules of a model: observed until each has run once in a monitored step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.nn.parameter import UninitializedParameter

from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.probes.base import ModuleProbe
from lightning_module_monitor.record import ModuleInfo


class ModuleTable:
    """What is known of the modules of a model."""

    def __init__(self, sites: Iterable[ModuleSite]) -> None:
        self._sites = list(sites)
        self._waiting = [site for site in self._sites if site.runs]
        """Those that have not run yet."""
        self._outputs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype, by name."""
        self._modules: tuple[ModuleInfo, ...] = ()
        self._num_known = 0
        """Number of outputs that are in ``_modules``."""

    def probe(self) -> OutputShapeProbe | None:
        """A probe for the modules that have not run yet; ``None`` if all of them have."""
        self._waiting = [site for site in self._waiting if site.name not in self._outputs]
        return OutputShapeProbe(self._waiting, self._outputs) if self._waiting else None

    def modules(self) -> Sequence[ModuleInfo]:
        """All modules; the same object until more is known."""
        if not self._modules:  # not before the first step: parameters of lazy modules have no size
            self._modules = tuple(ModuleInfo(site.name, type(site.module).__name__, _num_parameters(site)) for site in self._sites)
        if self._num_known != len(self._outputs):
            self._num_known = len(self._outputs)
            self._modules = tuple(ModuleInfo(*one[:3], *self._outputs.get(one.name, (None, ""))) for one in self._modules)
        return self._modules


class OutputShapeProbe(ModuleProbe[str]):
    """Notes shape and dtype of the first tensor that a module returns in ``outputs``, by name; no element is read."""

    def __init__(self, sites: Iterable[ModuleSite], outputs: dict[str, tuple[tuple[int, ...], str]]) -> None:
        super().__init__((site.module, site.name) for site in sites)
        self._outputs = outputs

    def observe_call(self, target: str, _args: object, output: object) -> None:
        """Note what a module has returned, if it is the first time."""
        tensor = None if target in self._outputs else next((tensor for _path, tensor in named_tensors(output)), None)
        if tensor is not None:
            self._outputs[target] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def fail(self, target: str, output: object, error: Exception) -> None:
        """An output that cannot be taken apart has no shape."""


def _num_parameters(site: ModuleSite) -> int:
    return sum(one.numel() for one in site.module.parameters() if not isinstance(one, UninitializedParameter))
