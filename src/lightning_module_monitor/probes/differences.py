"""Differences of the model's activations from those that the reference has for the same input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook
from lightning_module_monitor.model.outputs import Path, is_first, named_tensors, of_all_samples
from lightning_module_monitor.probes.probe import Probe, WatchedModule
from lightning_module_monitor.probes.reference import ReferenceProbe, named_outputs
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.spec import MetricSpec

KIND = "activation_difference"


class DifferenceProbe(Probe):
    """Compares every output of a module with what its sibling in the reference gave at the same call.

    Args:
        watched: The modules.
        observation: Where pairs of tensors go.
        twins: What the reference gave.
        further_name: Names further outputs, from the module's site and the path.
    """

    def __init__(
        self,
        watched: Sequence[WatchedModule],
        observation: StepAccumulator,
        twins: ReferenceProbe,
        further_name: Callable[[str, Path], str],
    ) -> None:
        self._observation = observation
        self._twins = twins
        self._further_name = further_name
        self._hooks = HookSet()
        pairs = ((one, twins.reference.twin(one.site.module)) for one in watched if KIND in one.watches)
        self._watched = [(one, twin) for one, twin in pairs if twin is not None]
        for _one, twin in self._watched:
            twins.want(twin, KIND, lambda _args, _kwargs, output: named_outputs(output))

    def attach(self) -> None:
        """Put the hooks on."""
        for watched, twin in self._watched:
            hook = UncopiedHook(functools.partial(self._after_forward, watched, twin))
            self._hooks.add_forward(watched.site.module, hook)

    def close(self) -> None:
        """Take every hook off."""
        self._hooks.close()

    def _after_forward(self, watched: WatchedModule, twin: nn.Module, _module: nn.Module, _args: object, output: object) -> None:
        # A forward pass within a backward pass is the recomputation of a checkpointed one, which was compared.
        if not self.is_open or torch._C._current_graph_task_id() != -1:
            return
        watch = watched.watches[KIND]
        try:
            call = self._twins.take(twin, KIND)
            if call is None:
                return
            references = dict(call)
            for path, tensor in named_tensors(output):
                if path not in references or not tensor.is_floating_point():
                    continue
                elements = of_all_samples(tensor.detach())
                if elements.shape != references[path].shape:
                    self._twins.note_other_shape(twin)
                    continue
                own = watch if is_first(path) else watch.at(self._further_name(watch.site, path))
                self._compare(own, elements, references[path])
        except MonitorError:
            raise
        except Exception as error:
            self._observation.fail(watch, output, error)

    def _compare(self, watch: MetricSpec, tensor: Tensor, reference: Tensor) -> None:
        try:
            self._observation.observe_pair(watch, tensor, reference)
        except MonitorError:
            raise
        except Exception as error:
            self._observation.fail(watch, tensor, error)
