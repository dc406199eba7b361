"""Parameters that torch lays out over ranks are read in every version of torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.names import Namer

try:
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError:  # before torch 2.5
    from torch.distributed._tensor import Shard, distribute_tensor


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # before torch 2.5
def test_parameters_that_are_dtensors_are_recorded() -> None:
    """With their gradients and updates, each with its own value, and without an error."""
    net, mesh = nn.Linear(4, 3), init_device_mesh("cpu", (1,))
    whole = net.weight.detach().clone()
    net.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    with ModuleMonitor(rules=Rule(kinds=["parameter", "gradient", "update"], sites="weight", statistics="norm")) as monitor:
        monitor.set_module(net)
        monitor.begin_step(0)
        net.weight.grad = net.weight.detach() * 2
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        with torch.no_grad():
            net.weight.mul_(4)
        record = monitor.end_step()
    assert record is not None
    norm = whole.double().norm().item()
    expected = {"parameter/weight/norm": norm, "gradient/weight/norm": 2 * norm, "update/weight/norm": 3 * norm, "monitor/errors": 0.0}
    assert dict(record.values) == pytest.approx(expected, rel=1e-6)


def test_a_mode_that_was_entered_twice_is_over_when_it_was_left_twice() -> None:
    """As by each operation on a DTensor: torch 2.4 takes it for still entered."""
    mode = FakeTensorMode()
    with mode, mode:
        assert is_tracing()
    assert not is_tracing()


def test_a_parameter_of_a_tensors_class_is_no_lazy_one() -> None:
    """Torch marks such a parameter by an attribute, as it does for a DTensor."""

    class Own(Tensor):
        pass

    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Own))
    assert isinstance(net.weight, Own)
    assert Namer().parameter_sites(net)[0].tensor() is net.weight
