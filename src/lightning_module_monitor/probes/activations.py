"""Outputs of modules, the gradients that arrive at them, their differences from those of the reference, and their shapes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.model.hooks import is_in_backward
from lightning_module_monitor.model.names import ModuleSite, unwrapped_class
from lightning_module_monitor.model.outputs import NamedTensors, named_tensors
from lightning_module_monitor.probes.base import StepTools, WatchedModule, failing_alone
from lightning_module_monitor.probes.reference import OTHER_SHAPE, ReferenceProbe
from lightning_module_monitor.probes.tap import Awaited, Consumer, counted_elements
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.statistics.stream import Stream

ACTIVATION, GRADIENT, DIFFERENCE = "activation", "activation_gradient", "activation_difference"


class ActivationProbe(Consumer[WatchedModule]):
    """Measures outputs and their gradients. It keeps no tensor, and reads no value on the host."""

    def __init__(self, watched: Sequence[WatchedModule], tools: StepTools) -> None:
        super().__init__((module.site.module, module) for module in watched if ACTIVATION in module.streams or GRADIENT in module.streams)
        self._tools = tools
        self._accumulator = tools.accumulator
        self._unsupported: defaultdict[torch.dtype | type, list[str]] = defaultdict(list)

    def observe_output(self, watched: WatchedModule, output: object, tensors: NamedTensors, is_repeated: bool) -> Iterator[Awaited]:
        """Measure every tensor."""
        activation, gradient = watched.streams.get(ACTIVATION), watched.streams.get(GRADIENT)
        if not tensors and output is not None:
            self._unsupported[type(output)].append(watched.site.name)
        for path, tensor in tensors:
            elements = plain(tensor)
            if not elements.is_floating_point():
                self._unsupported[elements.dtype].append(watched.site.name)
                continue
            if activation is not None and not is_repeated:
                stream = self._tools.output_stream(activation, path) if path else activation
                self._accumulator.observe(stream, counted_elements(elements))
            # Also of a recomputed output: under reentrant checkpointing no other has a gradient.
            if gradient is not None:
                yield tensor, None, self._tools.output_stream(gradient, path) if path else gradient

    def finish(self) -> None:
        """Log which outputs are not recorded."""
        self._tools.log_unsupported("outputs", self._unsupported)

    def fail(self, watched: WatchedModule, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart."""
        for kind in (ACTIVATION, GRADIENT):
            if kind in watched.streams:
                self._accumulator.fail(watched.streams[kind], output, error)

    def observe_gradient(self, stream: Stream, gradient: Tensor, scale: Scale) -> None:
        """Measure the gradient of an output."""
        self._accumulator.observe(stream, counted_elements(gradient), scale)

    def fail_gradient(self, stream: Stream, gradient: Tensor, error: Exception) -> None:
        """Record NaN for a gradient that cannot be read."""
        self._accumulator.fail(stream, gradient, error)


class _Compared(NamedTuple):
    """A module whose outputs are compared."""

    stream: Stream
    sibling: nn.Module


class DifferenceProbe(Consumer[_Compared]):
    """Compares outputs with the outputs of the reference at the same call."""

    def __init__(self, watched: Sequence[WatchedModule], tools: StepTools, calls: ReferenceProbe) -> None:
        compared = ((module, module.streams.get(DIFFERENCE), calls.reference.sibling(module.site.module)) for module in watched)
        super().__init__(
            (module.site.module, _Compared(stream, sibling)) for module, stream, sibling in compared if stream and sibling is not None
        )
        for _module, target in self.targets:
            calls.wanted[target.sibling, DIFFERENCE] = _floating_outputs, False
        self._tools = tools
        self._accumulator = tools.accumulator
        self._calls = calls

    def observe_output(self, target: _Compared, output: object, tensors: NamedTensors, is_repeated: bool) -> Iterable[Awaited]:
        """Compare every tensor with the same one of the sibling's call."""
        if is_repeated:
            return ()
        stream, sibling = target
        with failing_alone(functools.partial(self._accumulator.fail, stream, output)):
            references = dict(self._calls.take(sibling, DIFFERENCE) or ())
            for path, tensor in tensors:
                elements = plain(tensor).detach()
                if path not in references or not elements.is_floating_point():
                    continue
                if elements.shape != references[path].shape:  # for example, routed experts
                    self._calls.not_compared[OTHER_SHAPE].add(sibling)
                    continue
                output_stream = self._tools.output_stream(stream, path)
                with failing_alone(functools.partial(self._accumulator.fail, output_stream, elements)):
                    self._accumulator.observe_pair(output_stream, elements, references[path])
        return ()

    def fail(self, target: _Compared, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart. The sibling's tensors of this call must not be left for the next one."""
        if not is_in_backward():
            self._calls.take(target.sibling, DIFFERENCE)
        self._accumulator.fail(target.stream, output, error)


def _floating_outputs(_args: object, _kwargs: object, output: object) -> NamedTensors:
    return [(path, tensor) for path, tensor in named_tensors(output) if plain(tensor).is_floating_point()]


_Output = tuple[tuple[int, ...], str]


class ModuleTable:
    """Collects type, size and first output of the modules of a model."""

    def __init__(self, sites: Sequence[ModuleSite], observed: Iterable[ModuleSite]) -> None:
        self._sites = sites
        self._callable = [site for site in observed if site.runs]
        self._outputs: dict[str, _Output] = {}
        """The first output of each module, by name."""
        self._modules: tuple[ModuleInfo, ...] = ()
        self._num_known = -1
        """Number of outputs that are in ``_modules``; -1 before the first step, in which parameters of lazy modules may have no size."""

    def waiting(self) -> list[ModuleSite]:
        """The modules that have not run yet."""
        return [site for site in self._callable if site.name not in self._outputs]

    def probe(self) -> OutputShapeProbe | None:
        """A probe for the modules that have not run yet; ``None`` if all of them have."""
        waiting = self.waiting()
        return OutputShapeProbe(waiting, self._outputs) if waiting else None

    def not_run(self) -> list[ModuleSite]:
        """The modules with trainable weights of their own and without an observed call, except modules that are never called."""
        return [
            site
            for site in self.waiting()
            if not isinstance(site.module, NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention reads its weight
            and any(parameter is not None and parameter.requires_grad for parameter in site.module._parameters.values())
        ]

    def modules(self) -> Sequence[ModuleInfo]:
        """All modules; the same object until more is known."""
        if self._num_known != len(self._outputs):
            self._num_known = len(self._outputs)
            self._modules = tuple(map(self._described, self._sites))
        return self._modules

    def _described(self, site: ModuleSite) -> ModuleInfo:
        size = sum(parameter.numel() for parameter in site.module.parameters() if not is_lazy(parameter))
        return ModuleInfo(site.name, unwrapped_class(site.module).__name__, size, *self._outputs.get(site.name, (None, "")))


class OutputShapeProbe(Consumer[str]):
    """Notes shape and dtype of the first tensor that a module returns in ``outputs``, by name; no element is read."""

    def __init__(self, sites: Iterable[ModuleSite], outputs: dict[str, _Output]) -> None:
        super().__init__((site.module, site.name) for site in sites)
        self._outputs = outputs

    def observe_output(self, target: str, _output: object, tensors: NamedTensors, _is_repeated: bool) -> Iterable[Awaited]:
        """Note what a module has returned, if it is the first time."""
        if tensors and target not in self._outputs:
            tensor = plain(tensors[0][1])
            self._outputs[target] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        return ()

    def fail(self, target: str, output: object, error: Exception) -> None:
        """An output that cannot be taken apart has no shape."""
