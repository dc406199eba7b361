"""Raw tensors of a step, copied as they come, brought to the host at its end."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_module_monitor.distributed.shards import is_sharded
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.kernels.elements import in_memory, own_elements, unwrapped
from lightning_module_monitor.model.hooks import ForwardHook, HookSet
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.model.outputs import Path, in_graph, is_first, named_tensors
from lightning_module_monitor.probes.backward import BackwardProbe
from lightning_module_monitor.probes.probe import Among, WatchedModule, WatchedParameter, failing_alone
from lightning_module_monitor.probes.updates import Copies, update
from lightning_module_monitor.probes.whole_tensors import FOR_THE_FILE, WholeTensors, name_of
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.loss_scale import unscaled


class CaptureProbe(BackwardProbe):
    """Copies the tensors of a step that are wanted as they are: on their own device, of any dtype.

    Calls of a module are numbered over the whole step, in the order of its forward passes; a gradient gets the number of the output
    that it is of. What checkpointing computes again is no further call.

    Args:
        modules: The modules whose outputs, or their gradients, are wanted.
        parameters: The parameters that are wanted, or their gradients or updates.
        output_name: Names further outputs, from the module's site and the path.
        report: Told of what could not be copied, in words, and why.
        whole_tensors: Puts together what is laid out over ranks.
    """

    def __init__(
        self,
        modules: Sequence[WatchedModule],
        parameters: Sequence[WatchedParameter],
        output_name: Callable[[str, Path], str],
        report: Callable[[str, Exception], None],
        whole_tensors: WholeTensors,
    ) -> None:
        self._modules = modules
        self._parameters = parameters
        self._output_name = output_name
        self._report = report
        self._whole_tensors = whole_tensors
        self._module_hooks = HookSet()
        self._tensor_hooks = HookSet()
        self._num_calls: Counter[str] = Counter()
        """By name of the output."""
        self._unhooked: defaultdict[str, list[int]] = defaultdict(list)
        """Calls whose output got no hook for its gradient: reentrant checkpointing may run them again."""
        self._repeated: list[_Awaited] = []
        """Outputs of the stretch that is being run again, of which it is not yet known which calls they repeat."""
        self._before = Copies()
        self._kept: list[RawTensor] = []

    def attach(self) -> None:
        """Put the hooks on."""
        for watched in self._modules:
            self._module_hooks.add_forward(watched.site.module, _ForwardHook(self, watched))

    def see_parameters(self, among: Among = None) -> None:
        """Copy parameters, also those whose update is wanted."""
        for site, parameter in self._wanted("parameter", among):
            with self._reporting("parameter", site):
                self._keep_whole("parameter", site, parameter)
        for site, parameter in self._wanted("update", among):
            with self._reporting("update", site):
                self._before.keep(site, parameter)

    def see_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """Copy the gradients that there are."""
        for site, parameter in self._wanted(kind, among):
            if parameter.grad is not None:
                with self._reporting(kind, site):
                    self._keep_whole(kind, site, unscaled(parameter.grad, scale))

    def see_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """Keep parameter now minus parameter before; of a half-precision one in float32."""
        for site, copy in self._before.take(among):
            with self._reporting("update", site):
                difference = update(site, copy, is_skipped=is_skipped)
                if difference is not None:
                    self._keep_whole("update", site, difference)

    def end_micro_batch(self) -> None:
        """Forget the outputs of the micro-batch that is over."""
        self._tensor_hooks.close()
        self._unhooked.clear()
        self._repeated.clear()

    def tensors(self) -> list[RawTensor]:
        """What was kept, on the host; in the order in which it came."""
        return [dataclasses.replace(raw, value=raw.value.to("cpu")) for raw in self._kept]

    def close(self) -> None:
        """Take every hook off and forget every tensor."""
        self._module_hooks.close()
        self.end_micro_batch()
        self._before.take()
        self._kept = []

    def see_outputs(self, watched: WatchedModule, output: object) -> None:
        """A module was called: copy every tensor of its output, and look out for their gradients."""
        try:
            for path, tensor in named_tensors(output):
                name = watched.site.name if is_first(path) else self._output_name(watched.site.name, path)
                self._see_output(watched, name, tensor)
        except MonitorError:
            raise
        except Exception as error:
            # An output that cannot be taken apart or copied is no reason for training to end.
            self._report(f"The output of {watched.site.name!r}", error)

    def _see_output(self, watched: WatchedModule, name: str, tensor: Tensor) -> None:
        is_repeated = torch._C._current_graph_task_id() != -1
        differentiated = in_graph(tensor)
        if not is_repeated:
            call = self._num_calls[name]
            self._num_calls[name] += 1
            if "activation" in watched.watches:
                self._keep("activation", name, call, tensor)
            if differentiated.requires_grad:
                self._await_gradient(watched, differentiated, _Awaited(name, call))
            else:
                self._unhooked[name].append(call)
        elif differentiated.requires_grad and self._unhooked[name]:
            awaited = _Awaited(name)
            self._repeated.append(awaited)
            self._await_gradient(watched, differentiated, awaited)

    def _await_gradient(self, watched: WatchedModule, tensor: Tensor, awaited: _Awaited) -> None:
        if "activation_gradient" in watched.watches:
            self._tensor_hooks.add(tensor.register_hook(functools.partial(self._see_gradient, awaited)))

    def _see_gradient(self, awaited: _Awaited, gradient: Tensor | None) -> None:
        # Returns nothing: what a tensor hook returns replaces the gradient.
        # None: of several outputs of one function (of ``chunk``, say) this one was not used.
        if gradient is None or not self.takes_gradients():
            return
        try:
            self._number_repeated()
            if awaited.call is not None:
                self._keep("activation_gradient", awaited.name, awaited.call, unscaled(gradient, self.scale))
        except MonitorError:
            raise
        except Exception as error:
            self._report(f"The gradient that arrived at the output of {awaited.name!r}", error)

    def _number_repeated(self) -> None:
        """Tell which calls were run again: stretches of the model are repeated from the last to the first, each from its beginning."""
        by_name: defaultdict[str, list[_Awaited]] = defaultdict(list)
        for awaited in self._repeated:
            by_name[awaited.name].append(awaited)
        self._repeated.clear()
        for name, stretch in by_name.items():
            calls = self._unhooked[name]
            for awaited, call in zip(reversed(stretch), reversed(calls), strict=False):
                awaited.call = call
            del calls[-len(stretch) :]

    def _keep_whole(self, kind: str, site: ParameterSite, tensor: Tensor) -> None:
        self._whole_tensors.give(name_of(kind, site.name, FOR_THE_FILE), [tensor], functools.partial(self._keep, kind, site.name, 0))

    def _reporting(self, kind: str, site: ParameterSite) -> AbstractContextManager[None]:
        return failing_alone(functools.partial(self._report, name_of(kind, site.name, FOR_THE_FILE)))

    def _keep(self, kind: str, name: str, call: int, tensor: Tensor) -> None:
        self._kept.append(RawTensor(kind, name, call, _copy(tensor)))

    def _wanted(self, kind: str, among: Among) -> Iterator[tuple[ParameterSite, Tensor]]:
        for watched in self._parameters:
            parameter = watched.site.tensor() if kind in watched.watches else None
            if parameter is not None and (among is None or id(parameter) in among):
                yield watched.site, parameter


class _ForwardHook(ForwardHook):
    """Called after a module's forward. Returns nothing: what a forward hook returns replaces the output."""

    def __init__(self, probe: CaptureProbe, watched: WatchedModule) -> None:
        self._probe = probe
        self._watched = watched

    def see(self, _module: nn.Module, _args: object, output: object) -> None:
        if self._probe.is_open:
            self._probe.see_outputs(self._watched, output)


@dataclasses.dataclass
class _Awaited:
    """A gradient that may yet arrive."""

    name: str
    call: int | None = None
    """``None`` where that is not known yet."""


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the same device that belongs to nobody else; of a sparse tensor with its zeros, of a mapped one all samples.

    Of one that is laid out over ranks this rank's part.
    """
    tensor = unwrapped(tensor).detach()
    tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return in_memory(own_elements(tensor)).clone() if tensor.layout is torch.strided else tensor.to_dense()
