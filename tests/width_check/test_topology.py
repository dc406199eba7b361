"""Which layers feed which, read from the graph of one forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor.width_check.layers import Topology, Upstream


class Net(nn.Module):
    """Four layers, put together by a function."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def upstream_of(forward: Callable[[Net, Tensor], Tensor]) -> dict[str, Upstream | None]:
    """Run a net once; returns what feeds each of its layers."""
    net = Net(forward)
    topology = Topology({name: module for name, module in net.named_modules() if name})
    net(torch.randn(2, 4))
    topology.close()
    assert all(not module._forward_hooks for module in net.modules())
    return topology.upstream


def feeds(*names: str, is_homogeneous: bool = True) -> Upstream:
    """Short for what is expected."""
    return Upstream(frozenset(names), is_homogeneous)


def test_a_chain() -> None:
    """Each layer is fed by the one before it, through what scales with its input: ReLU, dropout, in-place, reshaping, a factor."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = F.dropout(F.relu_(net.a(x)), 0.5)
        h = net.b(h.view(2, 2, 2).flatten(1) * 3 / 2)
        return net.c(h.relu().mean(0, keepdim=True))

    assert upstream_of(forward) == {"a": feeds(), "b": feeds("a"), "c": feeds("b")}


def test_branches_and_residuals() -> None:
    """Parallel layers do not feed each other; a sum has all its terms; the data alone is nothing."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        h = h + net.b(h) + net.c(h)
        return net.d(torch.cat([h[:1], x[1:]]))

    assert upstream_of(forward) == {"a": feeds(), "b": feeds("a"), "c": feeds("a"), "d": feeds("a", "b", "c")}


@pytest.mark.parametrize(
    "between",
    [torch.tanh, lambda h: h * h, lambda h: h.softmax(-1), F.gelu, lambda h: F.layer_norm(h, (4,)), lambda h: h / h.norm()],
    ids=["tanh", "product", "softmax", "gelu", "norm", "quotient"],
)
def test_what_does_not_scale(between: Callable[[Tensor], Tensor]) -> None:
    """A bounded or curved function between two layers is seen."""
    assert upstream_of(lambda net, x: net.b(between(net.a(x))))["b"] == feeds("a", is_homogeneous=False)


def test_a_norm_that_owns_weights_is_a_layer() -> None:
    """It is fed and feeds."""
    assert upstream_of(lambda net, x: net.b(net.norm(net.a(x)))) == {"a": feeds(), "norm": feeds("a"), "b": feeds("norm")}


def test_a_layer_that_is_called_twice() -> None:
    """What feeds any of its calls feeds it, itself included."""
    assert upstream_of(lambda net, x: net.a(net.b(net.a(x))))["a"] == feeds("b")
    assert upstream_of(lambda net, x: net.a(net.a(x)))["a"] == feeds("a")


def test_what_the_graph_does_not_tell() -> None:
    """A weight used outside of its layer, and a forward pass without a graph, leave open what feeds a layer."""
    assert upstream_of(lambda net, x: net.b(F.linear(x, net.a.weight)))["b"] is None

    def no_graph(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.a(x)
            h = net.b(h)
        return net.c(h)

    assert upstream_of(no_graph) == {"a": None, "b": None, "c": feeds()}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activation_checkpointing(is_reentrant: bool) -> None:
    """Without reentrance the graph is whole; with it the inside of the block is not seen, and nothing is made up."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: net.c(net.b(y)), net.a(x), use_reentrant=is_reentrant)
        return net.d(h)

    found = upstream_of(forward)
    if is_reentrant:
        assert found == {"a": feeds(), "b": None, "c": None, "d": None}
    else:
        assert found == {"a": feeds(), "b": feeds("a"), "c": feeds("b"), "d": feeds("c")}
