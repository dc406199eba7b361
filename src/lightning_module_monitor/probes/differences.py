"""Differences of the model's activations from those of the reference for the same input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import nn

from lightning_module_monitor.model.hooks import is_in_backward
from lightning_module_monitor.model.outputs import Path, is_first, named_tensors, of_all_samples
from lightning_module_monitor.probes.base import ModuleProbe, WatchedModule, failing_alone
from lightning_module_monitor.probes.reference import ReferenceProbe, named_outputs
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.spec import MetricSpec

KIND = "activation_difference"

_Target = tuple[MetricSpec, nn.Module]
"""What is recorded of a module, and its sibling in the reference."""


class DifferenceProbe(ModuleProbe[_Target]):
    """Compares every output of a module with the output of its sibling in the reference at the same call.

    Args:
        watched: The modules.
        accumulator: Takes pairs of tensors.
        reference: Keeps the reference's outputs.
        further_name: Names further outputs, from the module's site and the path.
    """

    def __init__(
        self,
        watched: Sequence[WatchedModule],
        accumulator: StepAccumulator,
        reference: ReferenceProbe,
        further_name: Callable[[str, Path], str],
    ) -> None:
        self._accumulator = accumulator
        self._reference = reference
        self._further_name = further_name
        siblings = [(one, reference.reference.sibling(one.site.module)) for one in watched if KIND in one.specs]
        super().__init__((one.site.module, (one.specs[KIND], sibling)) for one, sibling in siblings if sibling is not None)
        for _module, (_watch, sibling) in self._targets:
            reference.want(sibling, KIND, lambda _args, _kwargs, output: named_outputs(output))

    def observe_call(self, target: _Target, _args: object, output: object) -> None:
        """Compare every output."""
        if is_in_backward():
            return  # a recomputation, which was compared
        spec, sibling = target
        references = dict(self._reference.take(sibling, KIND) or ())
        for path, tensor in named_tensors(output):
            if path not in references or not tensor.is_floating_point():
                continue
            elements = of_all_samples(tensor.detach())
            if elements.shape != references[path].shape:
                self._reference.note_other_shape(sibling)
                continue
            own = spec if is_first(path) else spec.at(self._further_name(spec.site, path))
            with failing_alone(functools.partial(self._accumulator.fail, own, elements)):
                self._accumulator.observe_pair(own, elements, references[path])

    def fail(self, target: _Target, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart."""
        self._accumulator.fail(target[0], output, error)
