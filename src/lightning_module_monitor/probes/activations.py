"""Outputs of modules, the gradients that arrive at them, their differences from those of the reference, and their shapes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from lightning_module_monitor.kernels.elements import plain, without_transforms
from lightning_module_monitor.model.hooks import is_in_backward
from lightning_module_monitor.model.names import ModuleSite, unwrapped_class
from lightning_module_monitor.model.outputs import NamedTensors, named_tensors
from lightning_module_monitor.probes.base import StepTools, WatchedModule, failing_alone
from lightning_module_monitor.probes.reference import OTHER_SHAPE, ReferenceProbe
from lightning_module_monitor.probes.tap import Awaited, Consumer, elements_of
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.statistics.precision import divided_by_scale
from lightning_module_monitor.statistics.stream import Stream

ACTIVATION, GRADIENT, DIFFERENCE = "activation", "activation_gradient", "activation_difference"

_Measured = tuple[str, Stream | None, Stream | None]
"""Name of a module, and what is recorded of its output, and of the gradient."""

_Compared = tuple[Stream, nn.Module]
"""The stream of the difference of a module's output, and the module's sibling in the reference."""


class ActivationProbe(Consumer[_Measured]):
    """Measures outputs and their gradients. It keeps no tensor, and reads no value on the host."""

    def __init__(self, watched: Sequence[WatchedModule], tools: StepTools) -> None:
        measured = [(module.site, module.streams) for module in watched if ACTIVATION in module.streams or GRADIENT in module.streams]
        super().__init__([(site.module, (site.name, streams.get(ACTIVATION), streams.get(GRADIENT))) for site, streams in measured])
        self._tools = tools
        self._accumulator = tools.accumulator
        self._unsupported: defaultdict[torch.dtype | type, list[str]] = defaultdict(list)

    def observe_output(self, target: _Measured, output: object, tensors: NamedTensors, is_repeated: bool) -> Iterator[Awaited]:
        """Measure every tensor."""
        site, activation, gradient = target
        if not tensors and output is not None:
            self._unsupported[type(output)].append(site)
        for path, tensor in tensors:
            elements = plain(tensor)
            if not elements.is_floating_point():
                self._unsupported[elements.dtype].append(site)
                continue
            output_stream, gradient_stream = activation, gradient
            if path and (name := self._tools.output_name(site, path)) != site:
                output_stream, gradient_stream = activation and activation.at(name), gradient and gradient.at(name)
            if output_stream is not None and not is_repeated:
                self._accumulator.observe(output_stream, elements_of(elements))
            # Also of a recomputed output: under reentrant checkpointing no other has a gradient.
            if gradient_stream is not None:
                yield tensor, None, gradient_stream

    def finish(self) -> None:
        """Log which outputs are not recorded."""
        self._tools.log_unsupported("outputs", self._unsupported)

    def fail(self, target: _Measured, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart."""
        for stream in target[1:]:
            if stream is not None:
                self._accumulator.fail(stream, output, error)

    def observe_gradient(self, stream: Stream, gradient: Tensor, scale: Tensor | None) -> None:
        """Measure the gradient of an output."""
        gradient = elements_of(gradient)
        self._accumulator.observe(stream, gradient if scale is None else divided_by_scale(gradient, scale))

    def fail_gradient(self, stream: Stream, gradient: Tensor, error: Exception) -> None:
        """Record NaN for a gradient that cannot be read."""
        self._accumulator.fail(stream, gradient, error)


class DifferenceProbe(Consumer[_Compared]):
    """Compares outputs with the outputs of the reference at the same call."""

    def __init__(self, watched: Sequence[WatchedModule], tools: StepTools, reference: ReferenceProbe) -> None:
        compared = ((module, module.streams.get(DIFFERENCE), reference.reference.sibling(module.site.module)) for module in watched)
        super().__init__((module.site.module, (stream, sibling)) for module, stream, sibling in compared if stream and sibling is not None)
        for _module, (_stream, sibling) in self.targets:
            reference.wanted[sibling, DIFFERENCE] = _floating_outputs, False
        self._tools = tools
        self._accumulator = tools.accumulator
        self._reference = reference

    def observe_output(self, target: _Compared, output: object, tensors: NamedTensors, is_repeated: bool) -> Iterable[Awaited]:
        """Compare every tensor with the same one of the sibling's call."""
        if is_repeated:
            return ()
        stream, sibling = target
        with failing_alone(functools.partial(self._accumulator.fail, stream, output)):
            references = dict(self._reference.take(sibling, DIFFERENCE) or ())
            for path, tensor in tensors:
                elements = without_transforms(tensor).detach()
                if path not in references or not elements.is_floating_point():
                    continue
                if elements.shape != references[path].shape:  # for example, routed experts
                    self._reference.not_compared[OTHER_SHAPE].add(sibling)
                    continue
                name = self._tools.output_name(stream.site, path)
                part = stream if name == stream.site else stream.at(name)
                with failing_alone(functools.partial(self._accumulator.fail, part, elements)):
                    self._accumulator.observe_pair(part, elements, references[path])
        return ()

    def fail(self, target: _Compared, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart. The sibling's tensors of this call must not be left for the next one."""
        stream, sibling = target
        if not is_in_backward():
            self._reference.take(sibling, DIFFERENCE)
        self._accumulator.fail(stream, output, error)


def _floating_outputs(_args: object, _kwargs: object, output: object) -> NamedTensors:
    return [(path, tensor) for path, tensor in named_tensors(output) if plain(tensor).is_floating_point()]


class ModuleTable:
    """Collects type, size and first output of the modules of a model."""

    def __init__(self, sites: Sequence[ModuleSite], observed: Iterable[ModuleSite]) -> None:
        self._sites = sites
        self._waiting = [site for site in observed if site.runs]
        """The modules that have not run yet."""
        self._outputs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype, by name."""
        self._modules: tuple[ModuleInfo, ...] = ()
        self._num_known = 0
        """Number of outputs that are in ``_modules``."""

    def probe(self) -> OutputShapeProbe | None:
        """A probe for the modules that have not run yet; ``None`` if all of them have."""
        self._waiting = [site for site in self._waiting if site.name not in self._outputs]
        return OutputShapeProbe(self._waiting, self._outputs) if self._waiting else None

    def not_run(self) -> list[str]:
        """The names of modules with trainable weights and without an observed call, except modules that are never called."""
        return [
            site.name
            for site in self._waiting
            if site.name not in self._outputs
            and not isinstance(site.module, NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention reads its weight
            and any(parameter is not None and parameter.requires_grad for parameter in site.module._parameters.values())
        ]

    def modules(self) -> Sequence[ModuleInfo]:
        """All modules; the same object until more is known."""
        if not self._modules:  # not before the first step: parameters of lazy modules have no size
            sizes = [sum(each.numel() for each in site.module.parameters() if not is_lazy(each)) for site in self._sites]
            types = [unwrapped_class(site.module).__name__ for site in self._sites]
            self._modules = tuple(map(ModuleInfo, [site.name for site in self._sites], types, sizes))
        if self._num_known != len(self._outputs):
            self._num_known = len(self._outputs)
            self._modules = tuple(ModuleInfo(*info[:3], *self._outputs.get(info.name, (None, ""))) for info in self._modules)
        return self._modules


class OutputShapeProbe(Consumer[str]):
    """Notes shape and dtype of the first tensor that a module returns in ``outputs``, by name; no element is read."""

    def __init__(self, sites: Iterable[ModuleSite], outputs: dict[str, tuple[tuple[int, ...], str]]) -> None:
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
