"""A module that records values of its own from inside its forward."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from helpers.training import Classifier, loader, seed, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, MonitorMixin, Rule, load_store

RULES = [Rule(kinds="activation", statistics="mean")]
KEY = "gate/open_fraction"


class Gated(nn.Module, MonitorMixin):
    """Logs how much of its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc(x)
        if self.is_monitoring:
            monitor = self.get_module_monitor()
            assert monitor is not None
            monitor.log_tensor(KEY, (gate > 0).float())
        return torch.relu(gate)


def model() -> nn.Sequential:
    """The same each time."""
    torch.manual_seed(0)
    return nn.Sequential(Gated(), nn.Linear(6, 3))


def gated(module: nn.Module) -> Gated:
    """The first part."""
    part = next(module.children())
    assert isinstance(part, Gated)
    return part


def open_fraction(module: nn.Module, *batches: Tensor) -> float:
    """What is to be logged, in float64."""
    return float((gated(module).fc(torch.cat(batches)) > 0).double().mean())


def batch(size: int, seed: int = 0) -> Tensor:
    """Inputs."""
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))


def test_own_values_of_monitored_steps() -> None:
    """Only then ``is_monitoring`` is true; micro-batches of 3 and 5 count by their elements."""
    net = model()
    assert not gated(net).is_monitoring
    assert gated(net).get_module_monitor() is None
    with ModuleMonitor(lambda step: step == 1, rules=RULES) as monitor:
        monitor.set_module(net)
        assert gated(net).get_module_monitor() is monitor
        for step in range(3):
            monitor.begin_step(step)
            assert gated(net).is_monitoring is (step == 1)
            for x in (batch(3), batch(5, seed=1)):
                net(x)
                monitor.after_micro_batch()
            with monitor.no_monitor():
                assert not gated(net).is_monitoring
                net(100 + batch(5))
            record = monitor.end_step()
            assert not gated(net).is_monitoring
            assert (record is not None) is (step == 1)
            if record is not None:
                assert record.values[KEY] == pytest.approx(open_fraction(net, batch(3), batch(5, seed=1)), rel=1e-6)


def test_nothing_is_kept_on_the_module() -> None:
    """The module has no attribute more; copied and pickled, within a monitored step, too, it is watched by nobody."""
    net, plain = model(), model()
    with ModuleMonitor(rules=RULES) as monitor:
        monitor.set_module(net)
        monitor.begin_step(0)
        net(batch(4))
        for part, other in zip(net.modules(), plain.modules(), strict=True):
            assert part.__dict__.keys() == other.__dict__.keys()
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # our own bytes
            assert not gated(twin).is_monitoring
            assert gated(twin).get_module_monitor() is None
            torch.testing.assert_close(twin(100 + batch(4)), net(100 + batch(4)))
            with ModuleMonitor(rules=RULES) as second:
                second.set_module(twin)
                assert gated(twin).get_module_monitor() is second
    assert gated(net).get_module_monitor() is None
    assert pickle.dumps(net)


def test_several_monitors_one_after_the_other() -> None:
    """Each has the values of its own time; the one that is left goes on when another is closed."""
    net = model()
    first, second = ModuleMonitor(rules=RULES), ModuleMonitor(rules=RULES)
    first.set_module(net)
    second.set_module(net)
    assert gated(net).get_module_monitor() is second
    first.begin_step(0)
    assert gated(net).get_module_monitor() is first, "the one that observes now"
    net(batch(4))
    record = first.end_step()
    assert record is not None
    assert KEY in record.values
    first.close()
    assert gated(net).get_module_monitor() is second
    second.begin_step(0)
    net(batch(4))
    record = second.end_step()
    assert record is not None
    assert KEY in record.values
    second.close()
    third = ModuleMonitor(rules=RULES)
    third.set_module(net)
    assert gated(net).get_module_monitor() is third
    third.close()
    third.close()
    assert gated(net).get_module_monitor() is None


def test_a_monitor_that_is_forgotten_is_gone() -> None:
    """Without ``close`` neither the monitor nor the model is held."""
    net = model()
    monitor = ModuleMonitor(rules=RULES)
    monitor.set_module(net)
    gone, module = weakref.ref(monitor), weakref.ref(net)
    del monitor
    gc.collect()
    assert gone() is None
    assert not gated(net).is_monitoring
    del net
    gc.collect()
    assert module() is None


def test_an_excluded_module_is_watched_by_nobody() -> None:
    """As its activations are not."""
    net = nn.Sequential(Gated(), Gated())
    with ModuleMonitor(rules=RULES, exclude="0") as monitor:
        monitor.set_module(net)
        parts = list(net)
        assert [part.get_module_monitor() for part in parts if isinstance(part, Gated)] == [None, monitor]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_logs_once(reentrant: bool) -> None:
    """Under activation checkpointing the second forward was observed before."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated = Gated()
            self.calls = 0
            self.gated.register_forward_hook(self._count)

        def _count(self, *_args: object) -> None:
            self.calls += 1

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.gated, x, use_reentrant=reentrant)
            return y

    net = Checkpointed()
    results: list[int] = []
    with ModuleMonitor(rules=RULES) as monitor:
        monitor.set_module(net)
        monitor.begin_step(0)
        log_tensor = monitor.log_tensor
        monitor.log_tensor = lambda *args, **kwargs: (results.append(1), log_tensor(*args, **kwargs))[1]  # type: ignore[method-assign]
        net(batch(4).requires_grad_()).sum().backward()
        record = monitor.end_step()
    assert len(results) == 1
    assert record is not None
    assert record.values[KEY] == pytest.approx(float((net.gated.fc(batch(4)) > 0).double().mean()), rel=1e-6)


class InCallback(Classifier):
    """A LightningModule with a gated part, which also logs itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(Gated(), nn.Linear(6, 3)))


@pytest.mark.parametrize("how", ["success", "exception"])
def test_through_the_callback(how: str, tmp_path: Path) -> None:
    """Own values are in the store with the callback's; training is the same as without; afterwards nothing is left."""

    class Fails(InCallback):
        def on_train_batch_end(self, *_args: object) -> None:
            if how == "exception" and self.global_step == 4:
                raise RuntimeError("on purpose")

    runs = []
    for callbacks in ([], [ModuleMonitorCallback(2, rules=RULES, stages=["train", "validate"])]):
        seed()
        module = Fails()
        run = trainer(tmp_path, list(callbacks), max_steps=6, val_check_interval=3)
        if how == "exception":
            with pytest.raises(RuntimeError, match="on purpose"):
                run.fit(module, loader(), loader(8))
        else:
            run.fit(module, loader(), loader(8))
        runs.append(module)
    plain, module = runs
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True))
    store = load_store(callbacks[0].store_path)
    steps, values = store.series(KEY)
    assert steps.tolist() == ([0, 2, 4] if how == "success" else [0, 2])
    assert ((values > 0) & (values < 1)).all()
    if how == "success":
        assert store.series(f"validation/{KEY}")[0].tolist() == [2, 5]
    assert gated(module.model).get_module_monitor() is None
    for part, other in zip(module.modules(), plain.modules(), strict=True):
        assert part.__dict__.keys() == other.__dict__.keys()
