"""The callback on a CUDA device: the values of raw tensors in float64, as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.textbook import textbook
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from helpers.zoo import raw_tensors
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.statistics.effective_rank import gram_sums
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.spectra import TOLERANCE, bidiagonals, spectral_norms

KINDS = ["activation", "activation_gradient", "parameter", "gradient", "update"]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@needs_cuda
def test_values_on_a_cuda_device(tmp_path: Path) -> None:
    """The first step against raw tensors on the CPU; training is bit for bit that without the callback."""
    losses = []
    for monitored in (False, True):
        seed()
        module, keep = Classifier("shared", torch.optim.SGD, lr=0.1), KeepLosses()
        raw = raw_tensors(module.model, [next(iter(loader()))], F.cross_entropy)
        callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm")], on_error="raise")
        records = KeepRecords(callback)
        options = {"accelerator": "cuda", "devices": 1, "max_steps": 3, "limit_val_batches": 0, "deterministic": True}
        trainer(tmp_path, [callback, records, keep] if monitored else [keep], **options).fit(module, loader(), loader(8))
        losses.append(keep.losses)
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
    first = records.records[0].values
    for (kind, site), tensors in raw.items():
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        key = f"{kind}/model" + (f".{site}" if site != "_root_" else "")
        assert first[f"{key}/norm"] == pytest.approx(textbook("norm", whole), rel=1e-4), key
        if kind == "gradient":
            assert first[f"update/model.{site}/norm"] == pytest.approx(0.1 * textbook("norm", whole), rel=1e-4)


def noise(x: Tensor) -> Tensor:
    """A function that draws random numbers."""
    return torch.randn_like(x).mean()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("every_n_steps", [1, 2])
@pytest.mark.parametrize("has_reference", [True, False])
def test_dropout_between_recurrent_layers(has_reference: bool, every_n_steps: int, name: str, tmp_path: Path) -> None:
    """The reference and a user's function leave the random state of cuDNN as it is, and the reference has the model's dropout."""
    differences = [Rule(kinds=["activation_difference"], statistics="abs_max")]
    functions = [Rule(kinds="activation", functions={"noise": noise})]
    runs = []
    for monitored in (False, True):
        seed()
        module, keep = Classifier(ARCHITECTURES[name]()), KeepLosses()
        monitoring = {"rules": differences, "reference": "init"} if has_reference else {"rules": functions}
        callback = ModuleMonitorCallback(every_n_steps, **monitoring, on_error="raise")
        records = KeepRecords(callback)
        options = {"accelerator": "cuda", "devices": 1, "max_steps": 4, "accumulate_grad_batches": 2, "limit_val_batches": 0}
        trainer(tmp_path, [callback, records, keep] if monitored else [keep], **options).fit(module, loader(), loader(8))
        runs.append((keep.losses, [*module.parameters()], torch.cuda.get_rng_state()))
    plain, other = ([*losses, *parameters, state] for losses, parameters, state in runs)
    assert all(torch.equal(one, another) for one, another in zip(plain, other, strict=True))
    if has_reference:
        found = {key: value for key, value in records.records[0].values.items() if key.startswith("activation_difference/")}
        assert len(found) >= 4
        assert not any(found.values())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_the_host_does_not_wait_for_spectra_and_the_torch_kernel() -> None:
    """What they compute on the host is copied to the device from pinned memory."""
    device = torch.device("cuda", 0)
    weight, rows = torch.randn(1, 30, 20, device=device), torch.randn(2, 50, device=device)
    kernel, counted = TorchKernel(device), torch.ones(2, 50, dtype=torch.bool, device=device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        [(_owners, numbers)] = bidiagonals({"fc": Difference(weight)})
        sums = gram_sums(weight)
        kernel.add_rows([0, 1], rows, counted, [Need.MEAN] * 2)
        moments = kernel.collect(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = torch.linalg.matrix_norm(weight.double(), 2).tolist()
    assert spectral_norms(numbers.double().cpu().numpy()) == pytest.approx(expected, rel=TOLERANCE)
    torch.testing.assert_close(sums.products, weight[0].double().T @ weight[0].double())
    assert moments[1].tolist() == pytest.approx(rows.double().mean(1).tolist())


def small_monitor() -> tuple[nn.Module, ModuleMonitor, Tensor]:
    """A network on the device, a monitor of its outputs, and an input."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
    monitor = ModuleMonitor(rules=[Rule(kinds="activation", sites="[012]", statistics="norm")])
    monitor.set_module(net)
    return net, monitor, torch.randn(4, 8, device="cuda")


@pytest.mark.gpu
@needs_cuda
def test_a_graph_that_is_captured_in_a_monitored_step() -> None:
    """It is captured and replayed as without a monitor, and the values are those of the calls around it."""
    net, monitor, x = small_monitor()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        net(x)
    torch.cuda.current_stream().wait_stream(side)
    graph, static = torch.cuda.CUDAGraph(), 100 * x
    monitor.begin_step(0)
    with torch.cuda.graph(graph):
        captured = net(static)
    graph.replay()
    output = net(x)
    record = monitor.end_step()
    monitor.close()
    assert record is not None
    assert record.values["activation/2/norm"] == pytest.approx(output.double().norm().item(), rel=1e-6)
    torch.testing.assert_close(captured, net(static), rtol=0, atol=0)
