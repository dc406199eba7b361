"""Copies of modules that were used before: what a forward pass has left in them has a graph, and torch copies no such tensor."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compiling import CountingBackend
from torch import Tensor, nn

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.model.copies import frozen_copy, independent_copy, plain_copy, same_layout, tensors_within
from lightning_module_monitor.model.hooks import UncopiedHook


class Cache:
    """Keys and values in attributes of objects."""

    def __init__(self, tensor: Tensor) -> None:
        self.layers = [{"keys": tensor}]


class Slots:
    """An object without a dict."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Output(OrderedDict):  # type: ignore[type-arg]
    """A mapping that is copied by code of its own, as an output of Hugging Face's."""

    def __reduce__(self) -> Any:
        return type(self), (), None, None, iter(self.items())


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda tensor: tensor, lambda held: held),
    "containers": (lambda tensor: [({"a": tensor},)], lambda held: held[0][0]["a"]),
    "object": (Cache, lambda held: held.layers[0]["keys"]),
    "slots": (Slots, lambda held: held.tensor),
    "deque": (lambda tensor: deque([tensor]), lambda held: held[0]),
    "set": (lambda tensor: {tensor}, lambda held: next(iter(held))),
    "user dict": (lambda tensor: UserDict(a=tensor), lambda held: held["a"]),
    "output": (lambda tensor: Output(a=tensor), lambda held: held["a"]),
    "partial": (lambda tensor: functools.partial(torch.add, tensor), lambda held: held.args[0]),
    "module": (lambda tensor: [_with(nn.Identity(), tensor)], lambda held: held[0].held),
}


def _with(module: nn.Module, held: Any) -> nn.Module:
    module.held = held
    return module


@pytest.mark.parametrize("name", HOLDERS)
def test_a_tensor_with_a_graph_is_copied_wherever_it_is(name: str) -> None:
    """With its values, outside of the graph; that of the model stays what it was."""
    hold, take = HOLDERS[name]
    linear = nn.Linear(2, 2)
    tensor = linear(torch.ones(1, 2))
    twin = take(frozen_copy(nn.Sequential(_with(linear, hold(tensor))))[0].held)  # type: ignore[index, union-attr]
    assert torch.equal(twin, tensor)
    assert twin is not tensor
    assert twin.grad_fn is None
    assert tensor.grad_fn is not None


def test_what_copies_itself_is_not_searched() -> None:
    """A hook of the monitor's leads to the monitor, and from there to everything."""
    linear = nn.Linear(2, 2)
    held = Cache(linear(torch.ones(1, 2)))
    linear.register_forward_hook(UncopiedHook(lambda *_args: print(held)))
    linear.register_forward_hook(UncopiedHook(functools.partial(print, held)))
    assert set(map(id, tensors_within(linear))) == set(map(id, linear.parameters()))


def test_a_copy_leaves_hooks_of_others_and_keeps_those_of_the_model() -> None:
    """A logger's hook would record the copy's values; hooks that are the model's own methods belong to the model."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.utils.spectral_norm(nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)
            self.body.register_forward_hook(self.keep)
            self.kept: list[Tensor] = []

        def keep(self, _module: nn.Module, _args: object, output: Tensor) -> None:
            self.kept.append(output.detach())

        def forward(self, x: Tensor) -> Tensor:
            self.body(x)
            return self.head(self.kept[-1])

    model = Features()
    calls: list[str] = []
    model.head.register_forward_hook(lambda *_args: calls.append("head"))
    twin = frozen_copy(model)
    twin(torch.ones(1, 4))
    assert calls == []
    assert len(twin.kept) == 1  # type: ignore[arg-type]
    assert len(model.kept) == 0
    assert len(twin.body._forward_pre_hooks) == 1  # type: ignore[union-attr, arg-type]
    assert not any(parameter.requires_grad for parameter in twin.parameters())


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    """A lock on a nested submodule."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model[1][0].lock = threading.Lock()  # type: ignore[index, union-attr, assignment]
    with pytest.raises(ConfigError, match=r"reference is a copy of the model, and 1\.0\.lock cannot be copied \(TypeError"):
        frozen_copy(model)


class Follows(nn.Module):
    """Its class takes an argument that a copy does not know, as that of ema_pytorch."""

    def __new__(cls, _model: nn.Module) -> Follows:
        return super().__new__(cls)

    def __init__(self, _model: nn.Module) -> None:
        super().__init__()
        self.average = nn.Linear(2, 2)


def test_a_module_that_cannot_be_copied_is_named() -> None:
    """And not the model that has it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Follows(nn.Linear(2, 2))))
    with pytest.raises(ConfigError, match=r"reference is a copy of the model, and 1\.1 cannot be copied \(TypeError"):
        frozen_copy(model)


class Shape(tuple):  # type: ignore[type-arg]
    """A tuple with attributes, as the shapes of mup."""

    def __init__(self, *_args: Any) -> None:
        self.main = self[-1]


class Rescaled(nn.Parameter):
    """A parameter of a class of its own."""


class Net(nn.Module):
    """Parameters and other tensors, which all have attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.readout = nn.Linear(4, 3)
        self.readout.weight = self.embedding.weight
        self.scale = Rescaled(torch.ones(4))
        self.register_buffer("mask", torch.ones(3))
        self.kept = [torch.zeros(2)]
        self.computed = self.scale * 2
        for number, tensor in enumerate((*self.parameters(), self.mask, *self.kept, self.computed)):
            tensor.shape_of_base = Shape(([number], [4]))


def test_tensors_of_a_copy_have_the_attributes_of_their_originals() -> None:
    """A shared parameter, one of a class of its own, a buffer, a tensor in a container and a computed one; each attribute is a copy."""
    net = Net()
    clone = frozen_copy(net)
    assert clone.readout.weight is clone.embedding.weight
    assert type(clone.scale) is Rescaled
    pairs = [*zip((*net.parameters(), *net.buffers()), (*clone.parameters(), *clone.buffers()), strict=True)]
    for original, copied in (*pairs, (net.kept[0], clone.kept[0]), (net.computed, clone.computed)):
        assert original is not copied
        assert vars(copied) == vars(original)
        assert type(copied.shape_of_base) is Shape
        assert copied.shape_of_base[0] is not original.shape_of_base[0]
        assert copied.shape_of_base.main is copied.shape_of_base[-1]


def test_an_attribute_of_a_parameter_may_refer_to_the_model() -> None:
    """It refers to the copy then, also within a function, and to copies of parameters that are nowhere else in the model."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, other = net[0].weight, nn.Parameter(torch.ones(1))
    first.model, first.bias, first.other, first.me = net, [net[0].bias], other, first
    first.width = lambda: net[0].in_features
    first.loader = net[0].extra_repr
    other.owner = first
    clone = frozen_copy(net)
    weight = clone[0].weight
    assert weight.model is clone
    assert weight.bias[0] is clone[0].bias
    assert weight.me is weight
    assert weight.other is not other
    assert weight.other.owner is weight
    assert weight.loader.__self__ is clone[0]
    net[0].in_features = 7
    assert weight.width() == 2


def test_an_attribute_that_cannot_be_copied_is_left_out() -> None:
    """The copy is made, and has all others; hooks on parameters stay the model's."""
    net = nn.Linear(2, 2)
    calls: list[Tensor] = []
    net.weight.lock, net.weight.shape_of_base = threading.Lock(), [2, 2]
    net.weight.register_hook(calls.append)
    net.weight.register_post_accumulate_grad_hook(calls.append)
    clone = frozen_copy(net)
    assert vars(clone.weight) == {"shape_of_base": [2, 2]}
    clone.requires_grad_()(torch.ones(1, 2)).sum().backward()
    assert not calls


def test_a_module_that_is_copied_as_itself_is_refused() -> None:
    """The hooks of the model would be taken off, and its part frozen."""

    class Shared(nn.Linear):
        def __deepcopy__(self, _memo: Any) -> Any:
            return self

    net = nn.Sequential(Shared(2, 2))
    net[0].register_forward_hook(lambda *_call: None)
    with pytest.raises(ConfigError, match="a copy of Sequential shares its Shared with it"):
        frozen_copy(net)
    assert net[0].weight.requires_grad
    assert net[0]._forward_hooks


def test_arguments_keep_their_attributes() -> None:
    """Plain ones: no code of their classes is run. A tensor may refer to itself."""
    mask = torch.ones(2)
    mask.me, mask.labels, mask.lock = mask, ["a"], threading.Lock()
    clone = plain_copy([mask])[0]
    assert clone is not mask
    assert clone.me is clone
    assert clone.labels == ["a"]
    assert clone.labels is not mask.labels
    assert not hasattr(clone, "lock")


def within_function(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that calls the other one, which it has in its closure."""
    return lambda x: function(x) + 0


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "hold",
    [
        lambda layer, compiled: compiled(layer),
        lambda layer, compiled: compiled(layer.forward),
        lambda layer, compiled: [compiled(layer)],
        lambda layer, compiled: {"one": compiled(layer.forward)},
        lambda layer, compiled: compiled(lambda x: layer(x) + 0),
        lambda layer, compiled: within_function(compiled(lambda x: layer(x) + 0)),
        lambda layer, compiled: layer.compile(backend=compiled.keywords["backend"]) or layer,
        lambda _layer, compiled: type("Decorated", (nn.Linear,), {"forward": compiled(nn.Linear.forward)})(2, 2),
    ],
)
def test_nothing_in_a_copy_is_compiled(hold: Any) -> None:
    """However a module holds it; and it computes with the weights of the copy."""
    backend, model = CountingBackend(), nn.Module()
    model.layer = type("Layer", (nn.Linear,), {"forward": lambda self, x: self.bias + x @ self.weight.T})(2, 2)
    model.held = hold(model.layer, functools.partial(torch.compile, backend=backend))
    clone = independent_copy(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    held = clone.held[0] if isinstance(clone.held, list) else clone.held["one"] if isinstance(clone.held, dict) else clone.held
    assert held(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
    assert backend.counts == (0, 0)


def test_a_function_with_a_weight_in_its_closure_gets_that_of_the_copy() -> None:
    """A regularization that a program has kept as a function."""
    model = nn.Linear(2, 2)
    weight, other = model.weight, torch.ones(2, 2)
    model.penalty = lambda: weight.detach() + other
    clone = independent_copy(model)
    with torch.no_grad():
        clone.weight.fill_(3.0)
    assert torch.equal(clone.penalty(), torch.full((2, 2), 4.0))
    assert torch.equal(model.penalty(), model.weight.detach() + 1)


class Tagged(Tensor):
    """A tensor of a user's class."""


GAPS = torch.arange(12.0).view(3, 4)[:, ::2]


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.arange(6.0).view(2, 3), (3, 1)),
        (torch.arange(6.0).view(2, 3).t(), (1, 3)),
        (GAPS, (4, 2)),
        (torch.arange(3.0).view(3, 1).expand(3, 4), (1, 0)),
        (torch.arange(5.0).as_strided((3, 3), (1, 1)), (1, 1)),
        (GAPS.as_subclass(Tagged), (2, 1)),  # a class may do anything, and is copied by its own code
        (torch.eye(3).to_sparse(), None),
    ],
    ids=["contiguous", "transposed", "gaps", "expanded", "windows", "subclass", "sparse"],
)
def test_a_copy_has_the_strides_of_its_tensor(tensor: Tensor, strides: tuple[int, ...] | None) -> None:
    """By which torch selects kernels; its elements are its own, and its class is that of the tensor."""
    copied = same_layout(tensor)
    assert type(copied) is type(tensor)
    assert torch.equal(copied.to_dense(), tensor.to_dense())
    if strides is None:
        assert copied.layout is torch.sparse_coo
    else:
        assert copied.stride() == strides
        assert copied.data_ptr() != tensor.data_ptr()
