"""A device without float64, as MPS: nothing in a step asks for it, and the values are those of a device that has it."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_module_monitor import STATISTICS, GradientFlow, ModuleMonitor, Record, Rule, Statistic
from lightning_module_monitor.config.health_options import watch_rules
from lightning_module_monitor.config.rules import coordinate_check_rules
from lightning_module_monitor.health.detectors import BUILT_IN
from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.record import is_undefined

WIDE = (torch.float64, torch.complex128)
OF_A_TENSOR = [name for name, known in STATISTICS.items() if isinstance(known, Statistic) and not (known.relative or known.compared_with)]
RULES = [
    Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=[*OF_A_TENSOR, "hist"]),
    Rule(kinds=["activation", "activation_gradient"], statistics="outlier_channels"),
    Rule(kinds="update", statistics=["ratio", "cosine_to_gradient", "cosine_to_previous"]),
    Rule(kinds="optimizer_state", statistics=["norm", "cosine_to_gradient"]),
    Rule(kinds=["activation_difference", "parameter_difference"], statistics=["ratio", "cosine", "rms"]),
    Rule(kinds=["parameter", "gradient"], per_module="_root_", statistics="norm"),
    *watch_rules([*BUILT_IN]),
    *coordinate_check_rules(("rms", "token_rms", "token_norm")),
]


class Net(nn.Module):
    """An embedding, attention of both sorts, a convolution, normalization layers, and what saturates."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc, self.norm = nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv, self.bn = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.squashed, self.head = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc(self.embedding(x)))
        h = h + self.attention(h, h, h)[0] + F.scaled_dot_product_attention(h, h, h)
        h = self.bn(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.head((h + self.squashed(h)).mean(1))


class WideResults(TorchFunctionMode):
    """Notes the functions whose results are float64, other than tensors that are made on the host on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # the result of the function
        result = func(*args, **(kwargs or {}))
        if func is not torch.tensor and any(isinstance(leaf, Tensor) and leaf.dtype in WIDE for leaf in tree_leaves(result)):
            self.functions.append(func.__name__)
        return result


def records(around: Callable[[], contextlib.AbstractContextManager[object]]) -> list[Record]:
    """Three steps of two micro-batches; up to its end a step runs in a context."""
    torch.manual_seed(0)
    model, found = Net(), list[Record]()
    monitor = ModuleMonitor(rules=RULES, gradient_flow=GradientFlow(blocks=["fc", "conv", "head"]), gradient_noise=True, on_error="raise")
    monitor.set_module(model)
    reference = copy.deepcopy(model)
    monitor.set_reference_module(reference)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        with around():
            monitor.begin_step(step)
            for scale in (2.0, torch.tensor(2.0)):
                x, y = torch.randint(10, (4, 5)), torch.randint(3, (4,))
                monitor.monitor_context("batch_size", 4, "sum")
                with monitor.no_monitor():
                    reference(x)
                loss = scale * F.cross_entropy(model(x), y)
                monitor.begin_backward(scale)
                loss.backward()
                monitor.end_backward()
                monitor.after_micro_batch()
            monitor.log_tensor("own/loss/last", loss)
            monitor.monitor_gradients(before_clip=True, scale=2.0)
            monitor.monitor_gradients(scale=torch.tensor(2.0))
            monitor.monitor_parameters()
            optimizer.step()
            monitor.monitor_updates(optimizers=optimizer)
            optimizer.zero_grad()
        record = monitor.end_step()
        assert record is not None
        found.append(record)
    return found


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[WideResults]:
    """The host is a device without float64: every use of the widest dtype is in the name ``widest``."""
    monkeypatch.setattr(numba_kernel, "takes", lambda _tensor: False)
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_module_monitor.") and hasattr(module, "widest"):
            monkeypatch.setattr(module, "widest", lambda _device: torch.float32)
    return WideResults()


def test_nothing_in_a_step_is_float64(without_float64: WideResults) -> None:
    """With every kind, statistic and detector, a reference and scaled losses."""
    records(lambda: without_float64)
    assert without_float64.functions == []


@pytest.mark.parametrize("is_autocast", [False, True])
def test_values_are_those_of_a_device_with_float64(is_autocast: bool, request: pytest.FixtureRequest) -> None:
    """To 1e-4: values themselves to 1e-5, differences of nearly equal numbers are rounded more. Autocast rounds no sum."""

    def around() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=is_autocast)

    expected = records(around)
    request.getfixturevalue("without_float64")
    for wide, narrow in zip(expected, records(around), strict=True):
        assert wide.values.keys() == narrow.values.keys()
        assert wide.histograms == narrow.histograms
        defined = [key for key, value in wide.values.items() if not is_undefined(value)]
        assert len(defined) > 3000
        values = {key: narrow.values[key] for key in defined}
        assert values == pytest.approx({key: wide.values[key] for key in defined}, rel=1e-4, abs=1e-6)
