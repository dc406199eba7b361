"""Runs the module of a snapshot by itself: inputs, outputs, and the first submodule with a non-finite value."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_module_monitor.errors import printable
from lightning_module_monitor.health.producer import Producer, producer
from lightning_module_monitor.health.snapshot import Snapshot, load
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.model.outputs import named_tensors, suffix
from lightning_module_monitor.model.unchanged import unchanged_random_states
from lightning_module_monitor.probes.nonfinite import NonfiniteProbe

CPU = torch.device("cpu")


def show(path: str, *, trust: bool = False) -> int:
    """Run the module of a snapshot again, and print what went in and what came out; returns 1 if anything is not finite.

    Args:
        path: The file.
        trust: Whether code of the file may run.

    Raises:
        ConfigError: If there is no snapshot, or none that can be read without trust.
    """
    snapshot = load(path, trust=trust)
    print(printable(f"Step {snapshot.step}, {snapshot.site}: {snapshot.words}"))
    if snapshot.module is None:
        print("The module could not be kept by itself; the batch is here.")
        return _print_tensors("batch", snapshot.batch)
    _print_tensors("input", (snapshot.args, snapshot.kwargs))
    _print_tensors("weight", dict(snapshot.module.named_parameters()))
    return replay(snapshot)


def replay(snapshot: Snapshot) -> int:
    """Run the module of a snapshot, forward and backward; returns 1 if anything is not finite."""
    module = snapshot.module
    assert module is not None
    inputs = [value.requires_grad_() for value in _tensors((snapshot.args, snapshot.kwargs)) if value.is_floating_point()]
    inside = nn.ModuleDict({"module": module})  # under a root: the probe observes all but the root
    probe = NonfiniteProbe([site for site in Namer().module_sites(inside) if site.name != "_root_"], _raise)
    probe.attach()
    try:
        with unchanged_random_states(CPU), torch.autocast("cpu", dtype=snapshot.autocast, enabled=snapshot.autocast is not None):
            if snapshot.random_states is not None:
                torch.set_rng_state(snapshot.random_states.of_cpu)
            probe.begin_micro_batch()
            # Copies: the module may write into its inputs, and a leaf that requires a gradient does not allow that.
            args, kwargs = copy.deepcopy((snapshot.args, snapshot.kwargs), {id(one): one.clone() for one in inputs})
            output = module(*args, **kwargs)
        found = _print_tensors("output", output)
        outputs = [one for one in _tensors(output) if one.is_floating_point() and one.requires_grad]
        if not found and outputs:
            # The gradient that arrived then was not kept: one of ones shows where the backward pass breaks.
            probe.begin_backward(outputs[0].detach().sum())
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
            found = _print_tensors("gradient of input", [one.grad for one in inputs])
            found |= _print_tensors("gradient of weight", {name: one.grad for name, one in module.named_parameters()})
        _print_producer(snapshot, producer(probe.observed()))
    finally:
        probe.close()
    return found


def _print_producer(snapshot: Snapshot, inner: Producer | None) -> None:
    if inner is not None and inner.site not in ("_root_", "module"):
        print(f"Within it, {inner.site.removeprefix('module.')}: {inner.words}")
    elif inner is not None:
        print(f"It is {snapshot.site} itself: {inner.words}")


def _print_tensors(label: str, value: object) -> int:
    """A line for each tensor; returns 1 if anything in them is not finite."""
    found = 0
    for path, tensor in named_tensors(value):
        line = f"  {suffix(path, label):32} {tuple(tensor.shape)!s:20} {str(tensor.dtype).removeprefix('torch.'):9}"
        if tensor.is_floating_point() and tensor.numel():
            finite = tensor.detach()[tensor.detach().isfinite()].double()
            limits = f"{finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else "nothing finite"
            num_nan, num_infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            line += f" {limits:28} {num_nan} NaN, {num_infinite} infinite"
            found |= int(num_nan + num_infinite > 0)
        print(printable(line.rstrip()))
    return found


def _tensors(value: object) -> Iterator[Tensor]:
    return (tensor for _path, tensor in named_tensors(value))


def _raise(error: Exception) -> None:
    raise error
