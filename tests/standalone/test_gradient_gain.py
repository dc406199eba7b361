"""Gradient flow without a Trainer: the features of GradientGainMonitor, compared with float64 autograd."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.flow import Block, batch, chain, loss_of, true_norms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import GradientGainMonitor
from lightning_module_monitor.kernels import elements

INF = math.inf


def run(blocks: Any, x: Tensor) -> Tensor:
    """A plain forward pass through blocks; returns the loss."""
    for block in blocks:
        x = block(x)
    return loss_of(x)


def assert_close(found: list[float | None], expected: list[float | None]) -> None:
    """Equal within the precision of float32; ``None`` at the same indices."""
    assert [value is None for value in found] == [value is None for value in expected]
    assert [value for value in found if value is not None] == pytest.approx([value for value in expected if value is not None], rel=2e-6)


def hooks_on(blocks: Any) -> int:
    """Forward hooks of all blocks."""
    return sum(len(block._forward_hooks) for block in blocks)


class Scale(nn.Module):
    """Multiplies by a number, for known gains."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def by_hand(*norms: float | None, **options: Any) -> GradientGainMonitor:
    """A monitor with these norms, from gradients of the blocks' outputs."""
    blocks = [nn.Identity() for _ in norms]
    with GradientGainMonitor(blocks, **options) as monitor:
        ends = [block(torch.zeros((), requires_grad=True) * 1) for block in blocks]
        torch.autograd.backward([end * norm for end, norm in zip(ends, norms, strict=True) if norm is not None])
    return monitor


@pytest.mark.parametrize(
    "container", [list, nn.ModuleList, lambda blocks: nn.Sequential(*blocks)], ids=["list", "ModuleList", "Sequential"]
)
@pytest.mark.parametrize("norm", ["l2", "l1", "linf", "mean"])
def test_constructor_every_norm_and_container(container: Callable[[Any], Any], norm: str) -> None:
    """Each norm equals float64 autograd; ``mean`` is the mean magnitude."""
    blocks = container(chain())
    with GradientGainMonitor(blocks, norm_type=norm, strict_single_backward=True, eps=1e-30) as monitor:
        run(blocks, batch(5)).backward()
        assert len(monitor) == 4
        assert_close(monitor.norms(), true_norms(list(blocks), batch(5), norm=norm))
    assert (monitor.norm_type, monitor.strict_single_backward, monitor.eps) == (norm, True, 1e-30)
    assert monitor.blocks == list(blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_type": "l3"}, "norm_type 'l3' is not a norm; expected l2, l1, linf, mean\\."),
        ({"norm_type": 2}, "norm_type 2 is not a norm"),
        ({"eps": 0.0}, "eps is 0.0; expected a number above 0"),
        ({"eps": "small"}, "eps is 'small'"),
        ({"thresholds": [2.0, 0.5]}, "thresholds is .*; expected two numbers"),
        ({"thresholds": [0.5]}, "expected two numbers"),
        ({"thresholds": [0.5, "2"]}, "expected two numbers"),
        ({"blocks": nn.Linear(1, 1)}, "blocks is a Linear; expected a list of modules"),
        ({"blocks": ["model.blocks"]}, r"blocks\[0\] is a str; expected a list of modules"),
    ],
)
def test_constructor_refuses_wrong_values(options: dict[str, Any], message: str) -> None:
    """The ValueError has the value, what was expected, and the nearest valid value."""
    with pytest.raises(ValueError, match=message):
        GradientGainMonitor(**({"blocks": []} | options))


def test_constructor_no_block_and_one_block() -> None:
    """There is no transition."""
    assert len(GradientGainMonitor([])) == 0
    monitor = by_hand(3.0)
    assert (monitor.norms(), monitor.gains(), monitor.log_gains()) == ([3.0], [], [])
    assert monitor.summary_stats()["mean_gain"] is None
    assert "Block  0: 3.0000e+00" in monitor.report()


@dataclasses.dataclass
class Output:
    """An output that is a dataclass."""

    loss: Tensor | None
    last_hidden_state: Tensor


@dataclasses.dataclass
class Unnamed:
    """An output whose parts have other names."""

    mask: Tensor
    values: Tensor


class Pair(NamedTuple):
    """An output that is a named tuple."""

    values: Tensor
    rest: Tensor


class Wrapped(nn.Module):
    """A block whose output is in a container."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = Block()
        self.pack, self.unpack = pack, unpack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.inner(x))


ZERO = torch.zeros(1)
PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda h: h, lambda o: o),
    "tuple": (lambda h: (h, ZERO), lambda o: o[0]),
    "list": (lambda h: [h, ZERO], lambda o: o[0]),
    "tuple with integers first": (lambda h: (torch.ones(2, dtype=torch.long), h), lambda o: o[1]),
    "dict with hidden_states": (lambda h: {"aux": ZERO, "hidden_states": h}, lambda o: o["hidden_states"]),
    "dict with last_hidden_state": (lambda h: {"aux": ZERO, "last_hidden_state": h}, lambda o: o["last_hidden_state"]),
    "dict with all hidden_states": (
        lambda h: {"last_hidden_state": h, "hidden_states": (ZERO, ZERO)},
        lambda o: o["last_hidden_state"],
    ),
    "dict, else first": (lambda h: {"x": h, "aux": ZERO}, lambda o: o["x"]),
    "dataclass": (lambda h: Output(None, h), lambda o: o.last_hidden_state),
    "dataclass of other names": (lambda h: Unnamed(torch.ones(2) > 0, h), lambda o: o.values),
    "named tuple": (lambda h: Pair(h, ZERO), lambda o: o.values),
    "nested": (lambda h: ((None, h), ZERO), lambda o: o[0][1]),
}


@pytest.mark.parametrize("kind", PACKED)
def test_outputs_of_every_kind(kind: str) -> None:
    """The gradient is measured at the tensor that the next block uses."""
    torch.manual_seed(0)
    blocks = [Wrapped(*PACKED[kind]) for _ in range(3)]
    with GradientGainMonitor(blocks) as monitor:
        h = batch(4)
        for block in blocks:
            h = block.unpack(block(h))
        loss_of(h).backward()
        assert_close(monitor.norms(), true_norms([block.inner for block in blocks], batch(4)))


def test_outputs_without_a_tensor_end_nothing() -> None:
    """Such a block has no gradient; an output that cannot be taken apart is a warning."""
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    blocks = [Scale(2.0), Wrapped(lambda h: "text", lambda o: o), Wrapped(lambda h: cyclic, lambda o: o), Scale(3.0)]
    with GradientGainMonitor(blocks) as monitor:
        h = blocks[0](torch.ones(2, 6, requires_grad=True))
        blocks[1](h)
        with pytest.warns(RuntimeWarning, match="Block 2, a dict: RecursionError.*counts as a block without a gradient"):
            blocks[2](h)
        blocks[3](h).sum().backward()
        assert monitor.norms() == [pytest.approx(3 * 12**0.5), None, None, pytest.approx(12**0.5)]
        assert monitor.gains() == [None, None, None]


@pytest.mark.parametrize("order", [(0, 1, 0), (0, 0, 1, 0), (0, 0, 0)], ids=str)
def test_shared_blocks_have_a_norm_for_each_index(order: tuple[int, ...]) -> None:
    """A module at several indices: its first call is the block at the first index, and so on, also in the next pass."""
    pair = chain(2)
    blocks = [pair[i] for i in order]
    with GradientGainMonitor(blocks) as monitor:
        assert len(monitor) == len(order)
        for size in (4, 7):
            run(blocks, batch(size)).backward()
            assert_close(monitor.norms(), true_norms(blocks, batch(size)))
            monitor.reset()


def test_a_block_called_several_times_in_one_pass_counts_as_one_tensor() -> None:
    """Two calls, as in twin towers: one norm of both gradients, in one backward pass."""
    blocks = chain(3)
    with GradientGainMonitor(blocks, strict_single_backward=True) as monitor:
        (run(blocks, batch(3)) + run(blocks, batch(5))).backward()
        assert_close(monitor.norms(), true_norms(blocks, batch(3), batch(5)))


def test_norms_and_gains_before_any_backward_are_an_error() -> None:
    """A forward pass is not enough; the report is a sentence."""
    blocks = chain(2)
    with GradientGainMonitor(blocks) as monitor:
        run(blocks, batch(3))
        assert monitor.report().startswith("No gradients recorded")
        for method in (monitor.norms, monitor.gains, monitor.log_gains, monitor.summary_stats):
            with pytest.raises(RuntimeError, match=r"No gradients recorded.*Call backward\(\)"):
                method()


def test_norms_and_gains_by_hand() -> None:
    """gamma_i = norm before / norm after; None without a gradient; inf where the denominator is below eps.

    Its logarithm is -inf where only the numerator is below eps, unlike elsewhere; means leave infinities out.
    """
    monitor = by_hand(1.0, 4.0, 2.0, None, 3.0, 1e-31, 5.0)
    assert monitor.norms() == pytest.approx([1.0, 4.0, 2.0, None, 3.0, 1e-31, 5.0])
    assert monitor.gains() == pytest.approx([0.25, 2.0, None, None, INF, 2e-32])
    assert by_hand(1.0, 4.0, 2.0, eps=3.0).gains() == [0.25, INF]
    monitor = by_hand(math.e, 1.0, 0.0, 0.0, 1.0, math.e**2, None)
    assert monitor.log_gains() == pytest.approx([1.0, INF, INF, -INF, -2.0, None], abs=1e-7)
    assert monitor.summary_stats()["mean_log_gain"] == pytest.approx(-0.5)
    assert monitor.summary_stats()["mean_gain"] == pytest.approx((math.e + 0.0 + math.e**-2) / 3)
    counts = by_hand(6.0, 2.0, 2.0, 8.0, thresholds=(0.2, 1.5)).summary_stats()  # gains 3, 1, 1/4
    assert [counts[f"num_{name}"] for name in ("amplifying", "damping", "healthy")] == [1, 0, 2]


def test_report_by_hand() -> None:
    """The whole text: a line for each block and transition, all sections, marks named heuristics."""
    assert by_hand(6.0, 2.0, 2.0, 8.0, 0.0, 1.0, None).report() == (
        "Gradient Flow Analysis\n"
        "  norm: l2; blocks: 7\n"
        "\n"
        "Gradient Norms:\n"
        "  Block  0: 6.0000e+00\n"
        "  Block  1: 2.0000e+00\n"
        "  Block  2: 2.0000e+00\n"
        "  Block  3: 8.0000e+00\n"
        "  Block  4: 0.0000e+00\n"
        "  Block  5: 1.0000e+00\n"
        "  Block  6: none\n"
        "\n"
        "Gradient Gains (norm over norm of the next block; marks are heuristics):\n"
        "  Transition  0 to  1: gamma=3.0000, log_gamma=1.0986 [AMPLIFYING]\n"
        "  Transition  1 to  2: gamma=1.0000, log_gamma=0.0000 [Healthy]\n"
        "  Transition  2 to  3: gamma=0.2500, log_gamma=-1.3863 [DAMPING]\n"
        "  Transition  3 to  4: gamma=inf, log_gamma=inf [VANISHING]\n"
        "  Transition  4 to  5: gamma=0.0000, log_gamma=-inf [DAMPING]\n"
        "  Transition  5 to  6: gamma=none, log_gamma=none [no gradient]\n"
        "\n"
        "Summary Statistics:\n"
        "  Mean gain:     1.0625\n"
        "  Min gain:      0.0000\n"
        "  Max gain:      3.0000\n"
        "  Mean log-gain: -0.0959\n"
        "\n"
        "Transition Categories:\n"
        "  Healthy (0.5 <= gamma <= 2): 1\n"
        "  Amplifying (gamma > 2):      1\n"
        "  Damping (gamma < 0.5):       2\n"
        "  Vanishing (gamma = inf):     1\n"
        "  Missing (no gradient):       1"
    )


def test_report_of_many_blocks_small_gains_and_nan() -> None:
    """Columns stay aligned, a small gain keeps its digits, NaN is marked; the given thresholds are used."""
    report = by_hand(1.0, 2e4, *[3.0] * 98, math.nan, thresholds=(0.25, 4.0)).report()
    assert "  Block   0: 1.0000e+00\n" in report
    assert "  Transition   0 to   1: gamma=5.0000e-05, log_gamma=-9.9035 [DAMPING]\n" in report
    assert "  Transition  99 to 100: gamma=nan, log_gamma=nan [NOT FINITE]\n" in report
    assert "  Mean gain:     nan\n" in report
    assert "Healthy (0.25 <= gamma <= 4)" in report
    assert max(map(len, report.splitlines())) <= 80


def test_report_in_a_log_file_and_in_a_terminal() -> None:
    """It is plain ASCII in a file; rich shows the same text in colours on a terminal, and not in a file."""
    import io

    from rich.console import Console

    report = by_hand(6.0, 2.0, 2.0, 0.0).report()
    assert isinstance(report, str)
    assert report.isascii()
    assert "\x1b" not in report
    assert pickle.loads(pickle.dumps(report)) == report  # our own bytes
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    terminal.print(report)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "\x1b[33m[AMPLIFYING]\x1b[0m" in shown
    assert "\x1b[32m[Healthy]\x1b[0m" in shown
    assert "\x1b[1;31m[VANISHING]\x1b[0m" in shown
    assert "\x1b[1mGradient Norms:\x1b[0m" in shown
    file = Console(file=io.StringIO(), width=100)
    file.print(report)
    assert file.file.getvalue() == f"{report}\n"  # type: ignore[attr-defined]  # a StringIO


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("order", "checkpointed"), [((0, 0, 1, 0), (0, 1, 2, 3)), *(((0, 1, 0, 0), indices) for indices in ((0,), (2,), (0, 3)))], ids=str
)
def test_checkpointing_block_by_block(order: tuple[int, ...], checkpointed: tuple[int, ...], use_reentrant: bool) -> None:
    """All or some blocks, also some calls of a shared block, are recomputed in the backward pass, which counts once."""
    some = chain(3)
    blocks = [some[i] for i in order]
    with GradientGainMonitor(blocks) as monitor:
        for size in (4, 7):
            h = batch(size).requires_grad_()
            for index, block in enumerate(blocks):
                h = checkpoint(block, h, use_reentrant=use_reentrant) if index in checkpointed else block(h)
            loss_of(h).backward()
            assert_close(monitor.norms(), true_norms(blocks, batch(size)))
            monitor.reset()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch, of the inner one, in the outer forward pass
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_checkpointing_within_checkpointing(outer: bool, inner: bool) -> None:
    """Both modes within both modes."""
    blocks = chain(4)

    def half(h: Tensor, start: int) -> Tensor:
        for block in blocks[start : start + 2]:
            h = checkpoint(block, h, use_reentrant=inner)
        return h

    with GradientGainMonitor(blocks) as monitor:
        h = batch(4).requires_grad_()
        for start in (0, 2):
            h = checkpoint(half, h, start, use_reentrant=outer)
        loss_of(h).backward()
        assert_close(monitor.norms(), true_norms(blocks, batch(4)))


@pytest.mark.parametrize("checkpointed", [(0, 1, 2, 3), (0, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_a_recurrent_block_is_one_backward(checkpointed: tuple[int, ...], use_reentrant: bool) -> None:
    """Two blocks, each called twice: the recomputation within the backward pass is not a second backward pass."""
    pair = chain(2)
    unrolled = [*pair, *pair]
    with GradientGainMonitor(pair, strict_single_backward=True) as monitor:
        h = batch(4).requires_grad_()
        for call, block in enumerate(unrolled):
            h = checkpoint(block, h, use_reentrant=use_reentrant) if call in checkpointed else block(h)
        loss_of(h).backward()
        norms = [norm or 0.0 for norm in true_norms(unrolled, batch(4))]
        assert_close(monitor.norms(), [math.hypot(norms[0], norms[2]), math.hypot(norms[1], norms[3])])


def test_a_second_backward_is_an_error_if_strict() -> None:
    """Through the same graph, and through the graph of a second micro-batch; after reset a pass is the first."""
    blocks = chain(2)
    with GradientGainMonitor(blocks) as monitor:
        loss = run(blocks, batch(4))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"block 1 fired twice.*Call reset\(\).*strict_single_backward=False"):
            loss.backward(retain_graph=True)
        monitor.reset()
        with pytest.raises(RuntimeError, match="No gradients recorded"):
            monitor.norms()
        loss.backward(retain_graph=True)
        assert_close(monitor.norms(), true_norms(blocks, batch(4)))
        with pytest.raises(RuntimeError, match="fired twice"):
            run(blocks, batch(5)).backward()


def test_a_second_backward_replaces_the_first_if_not_strict() -> None:
    """Each block has the norm of the latest pass that reached it, also if both forward passes came first."""
    blocks = chain(3)
    with GradientGainMonitor(blocks, strict_single_backward=False) as monitor:
        losses = [run(blocks, batch(size)) for size in (4, 6)]
        for size, loss in zip((4, 6), losses, strict=True):
            loss.backward()
            assert_close(monitor.norms(), true_norms(blocks, batch(size)))
        part = blocks[:2]
        run(part, batch(7)).backward()
        assert_close(monitor.norms(), [*true_norms(part, batch(7)), true_norms(blocks, batch(6))[2]])


def test_losses_of_single_blocks_are_no_second_backward() -> None:
    """Layer-wise training: each backward pass reaches one block."""
    blocks = chain(3)
    with GradientGainMonitor(blocks) as monitor:
        h = batch(4)
        expected: list[float | None] = []
        for block in blocks:
            expected += true_norms([block], h)
            h = block(h.detach())
            loss_of(h).backward()
        assert_close(monitor.norms(), expected)


def test_reset_after_a_forward_pass_that_failed() -> None:
    """The calls of a shared block are counted from 0."""
    some = chain(2)
    blocks = [some[0], some[1], some[0]]
    with GradientGainMonitor(blocks) as monitor:
        blocks[0](batch(4))
        monitor.reset()
        run(blocks, batch(4)).backward()
        assert_close(monitor.norms(), true_norms(blocks, batch(4)))


@pytest.mark.parametrize("how", ["with", "close", "twice", "error"])
def test_close_leaves_nothing_behind(how: str) -> None:
    """No hook on module or output; results stay; the model can be copied and pickled, also while it is observed."""
    blocks = nn.ModuleList(chain(2))
    attributes = [set(block.__dict__) for block in blocks]
    monitor = GradientGainMonitor(blocks)
    assert hooks_on(blocks) == 2
    twin = copy.deepcopy(blocks)
    run(twin, batch(4)).backward()
    assert monitor.report().startswith("No gradients recorded")
    outputs: list[Tensor] = []
    if how == "error":
        with pytest.raises(ZeroDivisionError), monitor:
            run(blocks, batch(4) * (1 / 0)).backward()
    else:
        outputs.append(blocks[0](batch(4)))
        outputs.append(blocks[1](outputs[0]))
        loss_of(outputs[1]).backward(retain_graph=True)
        norms = monitor.norms()
        if how == "with":
            with monitor:
                pass
        for _ in range({"with": 0, "close": 1, "twice": 2}[how]):
            monitor.close()
        assert not any(output._backward_hooks for output in outputs)
        loss_of(outputs[1]).backward()
        assert monitor.norms() == norms
    assert hooks_on(blocks) == 0
    assert [set(block.__dict__) for block in blocks] == attributes
    assert pickle.loads(pickle.dumps(blocks)).state_dict().keys() == blocks.state_dict().keys()  # our own bytes


def test_memory_does_not_grow_with_passes() -> None:
    """Not strict and never reset: freed graphs leave nothing, and only the latest pass is kept."""
    blocks = chain(3)
    with GradientGainMonitor(blocks, strict_single_backward=False) as monitor:
        outputs = []
        for _ in range(5):
            h = blocks[0](batch(4))
            outputs.append(weakref.ref(h))
            loss_of(blocks[2](blocks[1](h))).backward()
            with torch.no_grad():
                run(blocks, batch(4))
        del h
        gc.collect()
        assert [output() for output in outputs] == [None] * 5
        assert len(monitor._probe.tap._gradient_hooks) == 0
        assert len(set(monitor._probe.reached.values())) == 1


def test_nothing_is_read_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer for all norms, and none for gains and summaries."""
    transfers = []
    original = elements.transfer
    monkeypatch.setattr(elements, "transfer", lambda tensor: (transfers.append(tensor.numel()), original(tensor))[1])
    blocks = chain(4)
    with GradientGainMonitor(blocks) as monitor:
        run(blocks, batch(4)).backward()
        assert transfers == []
        monitor.report(), monitor.norms(), monitor.gains(), monitor.summary_stats()
    assert len(transfers) == 1


def test_norms_are_read_again_after_more_gradients_of_the_same_pass() -> None:
    """In the middle of a backward pass the norms so far are returned; after it, all norms."""
    blocks = chain(3)
    early: list[Any] = []
    with GradientGainMonitor(blocks) as monitor:
        h = blocks[0](batch(4))
        middle = h * 1.0
        middle.register_hook(lambda _gradient: early.append(monitor.norms()))
        loss_of(blocks[2](blocks[1](middle))).backward()
        expected = true_norms(blocks, batch(4))
        assert_close(early[0], [None, *expected[1:]])
        assert_close(monitor.norms(), expected)


def test_monitoring_changes_no_gradient() -> None:
    """Gradients are bit-identical, random numbers too, under autocast and dropout."""
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        blocks = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
        monitor = GradientGainMonitor(blocks) if watched else None
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            blocks(batch(4)).float().pow(2).sum().backward()
        if monitor is not None:
            monitor.report()
            monitor.close()
        found.append([*(parameter.grad for parameter in blocks.parameters()), torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
