"""Raw tensors of a step, copied as they come, brought to the host at its end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.distributed.shards import is_sharded
from lightning_module_monitor.kernels.elements import in_memory, own_elements, plain
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.model.outputs import NamedTensors
from lightning_module_monitor.probes.base import StepTools, WatchedModule
from lightning_module_monitor.probes.tap import Awaited, Consumer
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.precision import divided_by_scale

_Call = tuple[str, int]
"""Name of an output, and number of the call in the step."""


class CaptureProbe(Consumer[WatchedModule]):
    """Copies tensors of a step as they are: on their own device, of any dtype.

    Calls of a module are numbered over the whole step, in the order of its forward passes; a gradient has the number of its output's
    call. A recomputation by checkpointing is no further call.
    """

    def __init__(self, modules: Sequence[WatchedModule], tools: StepTools) -> None:
        super().__init__((watched.site.module, watched) for watched in modules)
        self._name = tools.output_name
        self._report = tools.report_not_captured
        self._num_calls: Counter[str] = Counter()  # by name of the output
        self._kept: list[RawTensor] = []

    def keep(self, kind: str, name: str, call: int, tensor: Tensor) -> None:
        """Copy a tensor of any kind on its device: of a sharded one this rank's part, of a sparse one its zeros too.

        One that is no output has call 0.
        """
        tensor = plain(tensor).detach()
        tensor = tensor.to_local() if is_sharded(tensor) else tensor
        copy = in_memory(own_elements(tensor)).clone() if tensor.layout is torch.strided else tensor.to_dense()
        self._kept.append(RawTensor(kind, name, call, copy))

    def tensors(self) -> list[RawTensor]:
        """The captured tensors, on the host; in the order in which they came."""
        return [dataclasses.replace(raw, value=raw.value.to("cpu")) for raw in self._kept]

    def close(self) -> None:
        """Release every tensor."""
        self._kept = []

    def observe_output(self, watched: WatchedModule, _output: object, tensors: NamedTensors, is_repeated: bool) -> Iterator[Awaited]:
        """Copy every tensor of an output, and await their gradients."""
        for path, tensor in tensors:
            name = self._name(watched.site.name, path)
            call = name, self._num_calls[name]
            if not is_repeated:
                self._num_calls[name] += 1
                if "activation" in watched.streams:
                    self.keep("activation", *call, tensor)
            if "activation_gradient" in watched.streams:
                yield tensor, name, call

    def fail(self, watched: WatchedModule, output: object, error: Exception) -> None:
        """Report an output that cannot be taken apart or copied."""
        self._report(f"The output of {watched.site.name!r}", error)

    def observe_gradient(self, call: _Call, gradient: Tensor, scale: Scale) -> None:
        """Copy the gradient of an output."""
        self.keep("activation_gradient", *call, divided_by_scale(gradient, scale))

    def fail_gradient(self, call: _Call, gradient: Tensor, error: Exception) -> None:
        """Report a gradient that cannot be copied."""
        self._report(f"The gradient that arrived at the output of {call[0]!r}", error)
