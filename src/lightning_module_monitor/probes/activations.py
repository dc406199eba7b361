"""Outputs of modules, the gradients that arrive at them, their differences from those of the reference, and their shapes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from lightning_module_monitor.kernels.elements import plain, unwrapped
from lightning_module_monitor.model.hooks import is_in_backward, requires_gradient
from lightning_module_monitor.model.names import ModuleSite, unwrapped_class
from lightning_module_monitor.model.outputs import in_graph, is_first, named_tensors
from lightning_module_monitor.probes.base import GradientHook, GradientProbe, ModuleProbe, StepTools, WatchedModule, elements_of
from lightning_module_monitor.probes.reference import OTHER_SHAPE, NamedTensors, ReferenceProbe
from lightning_module_monitor.probes.reporting import failing_alone
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.statistics.spec import MetricSpec

DIFFERENCE = "activation_difference"

KINDS = ("activation", "activation_gradient", DIFFERENCE)
"""The kinds of this probe."""

_Compared = tuple[MetricSpec, nn.Module]
"""What is recorded of the difference of a module's output, and the module's sibling in the reference."""

_Target = tuple[str, MetricSpec | None, MetricSpec | None, _Compared | None]
"""Name of a module, and what is recorded of its output, of the gradient, and of the difference."""


class ActivationProbe(GradientProbe[_Target]):
    """Observes outputs, their gradients, and their differences from the outputs of the reference at the same call.

    It keeps no tensor, and reads no value on the host. ``reference`` is ``None`` where there is nothing to compare with.
    """

    def __init__(self, watched: Sequence[WatchedModule], tools: StepTools, reference: ReferenceProbe | None) -> None:
        targets: list[tuple[nn.Module, _Target]] = []
        for one in watched:
            activation, gradient, difference = map(one.specs.get, KINDS)
            compared = None
            if difference is not None and reference is not None and (sibling := reference.reference.sibling(one.site.module)) is not None:
                reference.want(sibling, DIFFERENCE, _floating_outputs)
                compared = difference, sibling
            if activation or gradient or compared:
                targets.append((one.site.module, (one.site.name, activation, gradient, compared)))
        super().__init__(targets)
        self._tools = tools
        self._accumulator = tools.accumulator
        self._reference = reference
        self._unsupported: defaultdict[torch.dtype | type, list[str]] = defaultdict(list)

    def observe_call(self, target: _Target, _args: object, output: object) -> None:
        """Observe every output."""
        site, activation, gradient, compared = target
        # First: an error below must not leave the reference's tensors of this call for the next one.
        if compared is not None and not is_in_backward():
            with failing_alone(functools.partial(self._accumulator.fail, compared[0], output)):
                self._compare(*compared, output)
        tensors = [((), output)] if isinstance(output, Tensor) else [*named_tensors(output)]
        if not tensors and output is not None:
            self._unsupported[type(output)].append(site)
        for path, tensor in tensors:
            elements = plain(tensor)
            if not elements.is_floating_point():
                self._unsupported[elements.dtype].append(site)
                continue
            of_output, of_gradient = activation, gradient
            if path and not is_first(path):
                name = self._tools.names.further_name(site, path)
                of_output, of_gradient = activation and activation.at(name), gradient and gradient.at(name)
            if of_output is not None and not is_in_backward():
                self._accumulator.observe(of_output, elements_of(elements))
            # A recomputed output gets a hook too: under reentrant checkpointing no other output has a gradient.
            if of_gradient is not None and requires_gradient(differentiated := in_graph(tensor)):
                self.watch_gradient(differentiated, GradientHook(self, of_gradient))

    def finish(self) -> None:
        """Log which outputs are not recorded."""
        self._tools.log_unsupported("outputs", self._unsupported)

    def fail(self, target: _Target, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart."""
        _site, activation, gradient, compared = target
        for spec in (activation, gradient, compared and compared[0]):
            if spec is not None:
                self._accumulator.fail(spec, output, error)

    def observe_gradient(self, spec: MetricSpec, gradient: Tensor) -> None:
        """Observe the gradient of an output."""
        self._accumulator.observe(spec, elements_of(gradient, self.scale))

    def fail_gradient(self, spec: MetricSpec, gradient: Tensor, error: Exception) -> None:
        """Record NaN for a gradient that cannot be read."""
        self._accumulator.fail(spec, gradient, error)

    def _compare(self, spec: MetricSpec, sibling: nn.Module, output: object) -> None:
        """Compare every output of a call with the same output of the sibling."""
        assert self._reference is not None
        references = dict(self._reference.take(sibling, DIFFERENCE) or ())
        for path, tensor in named_tensors(output):
            elements = unwrapped(tensor).detach()
            if path not in references or not elements.is_floating_point():
                continue
            if elements.shape != references[path].shape:  # as of routed experts
                self._reference.not_compared[OTHER_SHAPE].add(sibling)
                continue
            own = spec if is_first(path) else spec.at(self._tools.names.further_name(spec.site, path))
            with failing_alone(functools.partial(self._accumulator.fail, own, elements)):
                self._accumulator.observe_pair(own, elements, references[path])


def _floating_outputs(_args: object, _kwargs: object, output: object) -> NamedTensors:
    return [(path, tensor) for path, tensor in named_tensors(output) if plain(tensor).is_floating_point()]


class ModuleTable:
    """What is known of the modules of a model."""

    def __init__(self, sites: Iterable[ModuleSite] = (), observed: Iterable[ModuleSite] = ()) -> None:
        self._sites = list(sites)
        self._waiting = [site for site in observed if site.runs]
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

    def not_run(self) -> list[str]:
        """The names of modules with weights to train of which no call was observed, but for those that no module calls."""
        return [
            site.name
            for site in self._waiting
            if site.name not in self._outputs
            and not isinstance(site.module, NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention reads its weight
            and any(one is not None and one.requires_grad for one in site.module._parameters.values())
        ]

    def modules(self) -> Sequence[ModuleInfo]:
        """All modules; the same object until more is known."""

        def num_parameters(site: ModuleSite) -> int:
            return sum(one.numel() for one in site.module.parameters() if not is_lazy(one))

        if not self._modules:  # not before the first step: parameters of lazy modules have no size
            self._modules = tuple(
                ModuleInfo(site.name, unwrapped_class(site.module).__name__, num_parameters(site)) for site in self._sites
            )
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
        tensor = None if target in self._outputs else next((plain(tensor) for _path, tensor in named_tensors(output)), None)
        if tensor is not None:
            self._outputs[target] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def fail(self, target: str, output: object, error: Exception) -> None:
        """An output that cannot be taken apart has no shape."""
