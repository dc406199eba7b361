"""A linear layer that is run once more gives the very numbers that a call gives, or is called."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck
from lightning_module_monitor.modules.hooks import UncopiedHook
from lightning_module_monitor.probes.linear_again import LinearAgain
from lightning_module_monitor.statistics import running
from lightning_module_monitor.statistics.running import readable_address

pytestmark = pytest.mark.skipif(running.kernel() is None, reason="needs the compiled kernel")


def run(again: LinearAgain, module: nn.Module, x: Tensor) -> Tensor | None:
    """The layer's output, or None where it must be called."""
    prepared = again.prepare(module, (x,))
    return None if prepared is None else prepared.run()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 40), (8, 128, 40)])
def test_the_numbers_are_those_of_a_call(shape: tuple[int, ...], bias: bool) -> None:
    """Bit by bit, without a graph, although the input has one."""
    again = LinearAgain()
    for out_features in (30, 100, 1):
        module = nn.Linear(40, out_features, bias)
        module.register_forward_hook(UncopiedHook(lambda *_args: None))
        x = torch.randn(shape).requires_grad_()
        found = run(again, module, x)
        assert found is not None
        assert torch.equal(found, module(x))
        assert not found.requires_grad


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_what_a_transform_makes_is_no_memory_for_later(transform: Callable[..., Callable[[Tensor], Tensor]]) -> None:
    """Its tensors are wrapped, and some have no address once it is over."""
    again, module, x = LinearAgain(), nn.Linear(4, 3), torch.ones(2, 4)

    def function(y: Tensor) -> Tensor:
        run(again, module, x)
        return y.sum()

    transform(function)(torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2))
    found = run(again, module, x)
    assert found is not None
    assert readable_address(found)
    assert torch.equal(found, module(x))


def test_its_memory_is_of_no_default_and_of_no_mode() -> None:
    """The program's new tensors may be of another type and device, and the first step may run in inference mode."""
    again, module, x = LinearAgain(), nn.Linear(4, 3), torch.ones(2, 4)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            run(again, module, x)
    finally:
        torch.set_default_dtype(torch.float32)
    found = run(again, module, 2 * x)
    assert found is not None
    assert torch.equal(found, module(2 * x))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_is_changed_between_calls_is_run_as_it_is(bias: bool) -> None:
    """Values in place, other memory, rows cut off where they are, another parameter; memory given back and filled again."""
    again, module, x = LinearAgain(), nn.Linear(8, 6, bias), torch.randn(3, 8)

    def change_values() -> None:
        module.weight.data.mul_(2.0)

    def change_memory() -> None:
        module.weight.data = torch.randn(6, 8)

    def cut_rows() -> None:
        for one in module.parameters():
            one.data = one.data[:4]

    def replace() -> None:
        module.weight = nn.Parameter(torch.randn(4, 8))

    def stream() -> None:
        memory = module.weight.untyped_storage()
        memory.resize_(0)
        assert again.prepare(module, (x,)) is None
        memory.resize_(4 * 8 * 4)
        module.weight.data.fill_(0.5)

    for change in (change_values, change_memory, cut_rows, replace, stream):
        change()
        found = run(again, module, x)
        assert found is not None
        assert torch.equal(found, module(x)), change.__name__


class Doubled(nn.Linear):
    """Not what it is derived from."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice the output."""
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    """With a hook that changes the output."""
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda _module, _args, output: output + 1)
    return module


def with_parameter(name: str, *shape: int) -> nn.Module:
    """With a parameter of another shape, which such a layer takes, too."""
    module = nn.Linear(4, 4, bias=name == "bias")
    setattr(module, name, nn.Parameter(torch.randn(shape)))
    return module


def overridden() -> nn.Module:
    """With a forward of the object's own."""
    module = nn.Linear(4, 4)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


OTHERS = {
    "another forward": lambda: (Doubled(4, 4), torch.ones(2, 4)),
    "a hook": lambda: (hooked(), torch.ones(2, 4)),
    "a forward of its own": lambda: (overridden(), torch.ones(2, 4)),
    "parametrized": lambda: (parametrizations.weight_norm(nn.Linear(4, 4)), torch.ones(2, 4)),
    "another precision": lambda: (nn.Linear(4, 4).double(), torch.ones(2, 4).double()),
    "a weight that is a vector": lambda: (with_parameter("weight", 4), torch.ones(2, 4)),
    "a bias for each token": lambda: (with_parameter("bias", 3, 4), torch.ones(2, 3, 4)),
    "one number as bias": lambda: (with_parameter("bias"), torch.ones(2, 4)),
    "one vector": lambda: (nn.Linear(4, 4), torch.ones(4)),
    "not in order": lambda: (nn.Linear(4, 4), torch.ones(4, 2).t()),
    "an input that does not fit": lambda: (nn.Linear(4, 4), torch.ones(2, 3)),
    "no vector": lambda: (nn.Linear(4, 4), torch.ones(0, 4)),
    "another layer": lambda: (nn.LayerNorm(4), torch.ones(2, 4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_is_left_to_a_call(name: str) -> None:
    """What else than torch's operation on the layer's own parameters would be run."""
    module, x = OTHERS[name]()
    assert LinearAgain().prepare(module, (x,)) is None


def test_a_call_under_autocast_or_with_hooks_of_all_modules_is_another_operation() -> None:
    """Both are known to the call alone."""
    again, module, x = LinearAgain(), nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu"):
        assert again.prepare(module, (x,)) is None
    handle = nn.modules.module.register_module_forward_hook(lambda _module, _args, output: output + 1)
    assert again.prepare(module, (x,)) is None
    handle.remove()
    assert again.prepare(module, (x,)) is not None


def test_of_a_reference_that_was_removed_nothing_is_held() -> None:
    """What is prepared for its layers goes with it: the step that used it is over."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    with ModuleMonitor() as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        for step in range(2):
            monitor.begin_step(step)
            with monitor.no_monitor():
                reference(torch.ones(3, 4))
            model(torch.ones(3, 4))
            assert monitor.end_step() is not None
        gone = weakref.ref(reference[0].weight)
        del reference
        monitor.remove_reference_module()
        gc.collect()
        assert gone() is None


class Branches(nn.Module):
    """Layers side by side, each run by a thread of its own where there are any."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(300, 400) for _branch in range(num))
        self.pool: ThreadPoolExecutor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what the layers give."""
        run = map if self.pool is None else self.pool.map
        return torch.stack([*run(lambda branch: branch(x), self.branches)]).sum(0)


def test_layers_that_run_in_several_threads_do_not_take_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time is run again into memory that is kept; while torch computes, others go on. Who waits in vain has memory of its own."""
    torch.manual_seed(0)
    model = Branches(4)
    reference = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    x, x0 = torch.randn(2, 600, 300)
    with ModuleMonitor() as monitor, ThreadPoolExecutor(4) as pool:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)

        def values(step: int) -> dict[str, float]:
            monitor.begin_step(step)
            with monitor.no_monitor():
                reference(x0)
            model(x)
            record = monitor.end_step()
            assert record is not None
            return {key: value for key, value in record.values.items() if key.startswith("rcc_")}

        expected = values(0)
        model.pool = pool
        for step in range(1, 12):
            assert values(step) == pytest.approx(expected, rel=1e-6)

        model.pool = None
        turn = monitor._units.linear_again.turn
        monkeypatch.setattr("lightning_module_monitor.probes.coordinate_check.MOST_WAITING_SECONDS", 0.01)
        pool.submit(turn.acquire).result()
        assert values(12) == pytest.approx(expected, rel=1e-6)
        assert not turn.acquire(blocking=False)
