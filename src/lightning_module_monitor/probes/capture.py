"""Raw tensors of a step, copied as they come, brought to the host at its end."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_module_monitor.distributed.shards import is_sharded
from lightning_module_monitor.kernels.elements import in_memory, own_elements, unwrapped
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.model.outputs import NamedTensors
from lightning_module_monitor.probes.base import Among, StepTools, WatchedModule
from lightning_module_monitor.probes.parameters import (
    FOR_THE_FILE,
    Copies,
    ParameterAccess,
    SpecsByKind,
    WholeTensors,
    name_of,
    present,
    update,
)
from lightning_module_monitor.probes.reporting import failing_alone
from lightning_module_monitor.probes.tap import Awaited, Consumer
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.precision import unscaled

_Call = tuple[str, int]
"""Name of an output, and number of the call in the step."""


class CaptureProbe(Consumer[WatchedModule]):
    """Copies tensors of a step as they are: on their own device, of any dtype.

    Calls of a module are numbered over the whole step, in the order of its forward passes; a gradient has the number of its output's
    call. A recomputation by checkpointing is no further call.
    """

    def __init__(
        self,
        modules: Sequence[WatchedModule],
        parameters: SpecsByKind,
        tools: StepTools,
        whole_tensors: WholeTensors,
        access: ParameterAccess,
    ) -> None:
        super().__init__((one.site.module, one) for one in modules)
        self._parameters = parameters
        self._name = tools.output_name
        self._report = tools.report_not_captured
        self._whole_tensors = whole_tensors
        self._access = access
        self._num_calls: Counter[str] = Counter()  # by name of the output
        self._before = Copies()
        self._kept: list[RawTensor] = []

    def observe_parameters(self, among: Among = None) -> None:
        """Copy parameters, also those whose update is captured."""
        for site, _spec, parameter in present(self._parameters, "parameter", among):
            with self._reporting("parameter", site):
                self._keep_whole("parameter", site, self._access.parameter(parameter))
        for site, _spec, parameter in present(self._parameters, "update", among):
            with self._reporting("update", site):
                self._before.keep(site, parameter, self._access)

    def observe_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """Copy the gradients that there are."""
        for site, _spec, parameter in present(self._parameters, kind, among):
            with self._reporting(kind, site):
                self._keep_whole(kind, site, self._access.unscaled_gradient(parameter, scale))

    def observe_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """Keep parameter now minus parameter before; of a half-precision one in float32."""
        for site, copy in self._before.take(among):
            with self._reporting("update", site):
                self._keep_whole("update", site, update(site, copy, self._access, is_skipped=is_skipped))

    def tensors(self) -> list[RawTensor]:
        """The captured tensors, on the host; in the order in which they came."""
        return [dataclasses.replace(raw, value=raw.value.to("cpu")) for raw in self._kept]

    def close(self) -> None:
        """Release every tensor."""
        self._before.take()
        self._kept = []

    def observe_output(self, watched: WatchedModule, _output: object, tensors: NamedTensors, is_repeated: bool) -> Iterator[Awaited]:
        """Copy every tensor of an output, and await their gradients."""
        for path, tensor in tensors:
            name = self._name(watched.site.name, path)
            call = name, self._num_calls[name]
            if not is_repeated:
                self._num_calls[name] += 1
                if "activation" in watched.specs:
                    self._keep("activation", *call, tensor)
            if "activation_gradient" in watched.specs:
                yield tensor, name, call

    def fail(self, watched: WatchedModule, output: object, error: Exception) -> None:
        """Report an output that cannot be taken apart or copied."""
        self._report(f"The output of {watched.site.name!r}", error)

    def observe_gradient(self, call: _Call, gradient: Tensor, scale: Tensor | None) -> None:
        """Copy the gradient of an output."""
        self._keep("activation_gradient", *call, unscaled(gradient, scale))

    def fail_gradient(self, call: _Call, gradient: Tensor, error: Exception) -> None:
        """Report a gradient that cannot be copied."""
        self._report(f"The gradient that arrived at the output of {call[0]!r}", error)

    def _keep_whole(self, kind: str, site: ParameterSite, tensor: Tensor | None) -> None:
        if tensor is not None:
            self._whole_tensors.give(name_of(kind, site.name, FOR_THE_FILE), [tensor], functools.partial(self._keep, kind, site.name, 0))

    def _reporting(self, kind: str, site: ParameterSite) -> AbstractContextManager[None]:
        return failing_alone(functools.partial(self._report, name_of(kind, site.name, FOR_THE_FILE)))

    def _keep(self, kind: str, name: str, call: int, tensor: Tensor) -> None:
        self._kept.append(RawTensor(kind, name, call, _copy(tensor)))


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the same device: of a sparse tensor with its zeros, under ``vmap`` of all samples, of a sharded one this rank's part."""
    tensor = unwrapped(tensor).detach()
    tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return in_memory(own_elements(tensor)).clone() if tensor.layout is torch.strided else tensor.to_dense()
