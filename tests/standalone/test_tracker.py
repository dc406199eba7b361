"""Raw tensors in a list: table 4 of FEATURES, row by row, and known faults of the tool whose names these are."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from helpers.zoo import ZOO, Outputs, batches, make
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import Event, Stash, Tracker, track
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.standalone import default_stash, default_stash_value, get_stash_fn, rmap_tensor


class Triple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


@dataclass(frozen=True)
class Output:
    """A frozen dataclass with fields that are not tensors."""

    thing: Tensor
    status: str


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclass
class Half:
    """A dataclass with a field that its constructor does not take."""

    left: Tensor
    right: Tensor = field(init=False)


class Two(tuple[Tensor, Tensor]):
    """A tuple whose constructor does not take its elements."""

    __slots__ = ()

    def __new__(cls, left: Tensor, right: Tensor) -> Two:
        return super().__new__(cls, (left, right))


class Model(nn.Module):
    """Returns a dataclass with the output of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.triple = Triple()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Output:
        return Output(self.sigmoid(self.triple(x=x)), "ok")


class Returns(nn.Module):
    """Returns a structure of two layers' outputs."""

    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)
        self.build = build

    def forward(self, x: Tensor) -> Any:
        return self.build(self.a(x), self.b(x))


def hooks_on(module: nn.Module) -> int:
    """Number of hooks of any kind on a module and its submodules."""
    return sum(
        len(one._forward_hooks) + len(one._forward_pre_hooks) + len(one._backward_hooks) + len(one._backward_pre_hooks)
        for one in module.modules()
    )


def names_of(tracker: Tracker, grad: bool) -> list[str]:
    """The names of the stashes of one direction, in order."""
    return [one.name for one in tracker if one.grad is grad]


# ------------------------------------------------------------------ track, its patterns and its block


def test_track_keeps_outputs_then_gradients() -> None:
    """Values by hand: of 3 x, its sigmoid, and the gradients of 1000 times the sum."""
    module = Model()
    x = torch.full((8,), 0.7, requires_grad=True)
    with track(module) as tracker:
        module(x).thing.backward(torch.full((8,), 1000.0))
    y = torch.sigmoid(3 * x.detach())
    ones = torch.full((8,), 1000.0)
    expected = [
        ("triple", Triple, False, 3 * x.detach()),
        ("sigmoid", nn.Sigmoid, False, y),
        ("", Model, False, y),
        ("", Model, True, ones),  # the dataclass's gradient, which the original lacks
        ("sigmoid", nn.Sigmoid, True, ones),
        ("triple", Triple, True, ones * y * (1 - y)),
    ]
    assert [(one.name, one.type, one.grad) for one in tracker] == [one[:3] for one in expected]
    for stash, (name, _type, _grad, value) in zip(tracker, expected, strict=True):
        torch.testing.assert_close(stash.first_value, value, msg=name)
    assert tracker[2].value.status == tracker[3].value.status == "ok"
    assert isinstance(tracker[4].value, tuple)  # as a module's backward hook has it


@pytest.mark.parametrize("compiled", [False, True])
def test_patterns_are_searched_for_in_names(compiled: bool) -> None:
    """``include`` and ``exclude`` by ``re.search``, as strings or compiled; both, either or none."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3))

    def tracked(**patterns: str) -> list[str]:
        options: dict[str, Any] = {name: re.compile(one) if compiled else one for name, one in patterns.items()}
        with track(module, **options) as tracker:
            module(torch.ones(2, 6))
        return names_of(tracker, grad=False)

    assert tracked() == ["0", "1.0", "1.1", "1", "2", ""]
    assert tracked(include=r"\.") == ["1.0", "1.1"]
    assert tracked(exclude="^1") == ["0", "2", ""]
    assert tracked(include="1", exclude="1$") == ["1.0"]


def test_patterns_that_leave_nothing_are_refused() -> None:
    """A misspelt name is an error, not an empty list."""
    with pytest.raises(ConfigError, match=r"include 'triplle' and exclude None select none of 3 modules.*\(re.search\).*nearest: 'triple'"):
        track(Model(), include="triplle")
    assert hooks_on(Model()) == 0


def test_without_grad_only_outputs_are_kept() -> None:
    """``grad=False``, and outputs that need no gradient."""
    module = nn.Linear(6, 3)
    with track(module, grad=False) as tracker:
        module(torch.ones(2, 6)).sum().backward()
    assert [one.grad for one in tracker] == [False]
    with track(module) as tracker, torch.no_grad():
        module(torch.ones(2, 6))
    assert [one.grad for one in tracker] == [False]


@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_nothing_is_left_after_an_exception_inside_the_block(where: str) -> None:
    """No hook on any module, none on the outputs, and a second pass is not kept."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, *gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("backward")

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if where == "forward":
                raise ZeroDivisionError("forward")
            return Fails.apply(x) if where == "backward" else x * 1

    module = nn.Sequential(nn.Linear(6, 6), Part(), nn.Linear(6, 3))
    outputs: list[Tensor] = []
    module[0].register_forward_hook(lambda _module, _args, output: outputs.append(output))
    tracker = track(module)

    def block() -> None:
        with tracker:
            module(torch.ones(2, 6)).sum().backward()
            raise ZeroDivisionError("block")

    with pytest.raises(ZeroDivisionError, match=where):
        block()
    assert hooks_on(module) == 1  # this test's own
    assert not outputs[0]._backward_hooks
    assert str(tracker) == f"Tracker(stashes={len(tracker)}, tracking=0)"
    num_stashes = len(tracker)
    assert num_stashes > 0
    where = ""
    module(torch.ones(2, 6)).sum().backward()
    assert len(tracker) == num_stashes


# ------------------------------------------------------------------ gradients of whatever a module returns


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda a, b: (a, b), lambda v: v),
    "list": (lambda a, b: [a, b], lambda v: v),
    "named tuple": (Pair, lambda v: (v.left, v.right)),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda v: (v["a"], v["b"])),
    "dataclass": (Output, lambda v: (v.thing, v.status)),  # type: ignore[arg-type]  # two tensors
    "nested": (lambda a, b: {"x": [(a, None)], "y": Pair("text", b)}, lambda v: (v["x"][0][0], v["y"].right)),
    "in one dict twice": (lambda a, b: {"a": a, "b": b, "again": a}, lambda v: (v["again"], v["b"])),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_every_structure_are_kept(structure: str) -> None:
    """The gradient of 5 a + 7 b^2 / 2 has the structure and types of the output."""
    build, take = STRUCTURES[structure]
    module = Returns(build)
    with track(module) as tracker:
        output = module(torch.randn(4, 6))
        a, b = take(output)
        (5 * a.sum() + 7 * b.pow(2).sum() / 2).backward()
    (stash,) = (one for one in tracker if one.grad and one.name == "")
    assert type(stash.value) is type(output)
    gradient_of_a, gradient_of_b = take(stash.value)
    assert torch.equal(gradient_of_a, torch.full((4, 2), 5.0))
    torch.testing.assert_close(gradient_of_b, 7 * b.detach())


def test_a_field_that_is_not_set_is_no_output() -> None:
    """The forward pass continues; the other fields have their values and gradients."""
    module = Returns(lambda a, _b: Half(a))
    with track(module, include="^$") as tracker:
        output = module(torch.randn(4, 6))
        (5 * output.left).sum().backward()
    assert torch.equal(tracker[0].value.left, output.left)
    assert torch.equal(tracker[1].value.left, torch.full((4, 2), 5.0))
    assert not any(hasattr(stash.value, "right") for stash in tracker)


def test_a_tuple_that_cannot_be_made_again_is_kept_as_a_plain_one() -> None:
    """Its class does not take the elements."""
    module = Returns(Two)
    with track(module, include="^$") as tracker:
        left, right = module(torch.randn(4, 6))
        (5 * left.sum() + 7 * right.sum()).backward()
    assert all(type(stash.value) is tuple for stash in tracker)
    assert torch.equal(tracker[0].value[1], right)
    assert torch.equal(tracker[1].value[1], torch.full((4, 2), 7.0))


def test_an_output_that_the_loss_does_not_use_has_none() -> None:
    """An LSTM's last states, and a tensor that needs no gradient."""
    module = nn.LSTM(6, 6, batch_first=True)
    with track(module) as tracker:
        module(torch.randn(2, 3, 6))[0].sum().backward()
    value, (hidden, cell) = tracker[1].value
    assert torch.equal(value, torch.ones(2, 3, 6))
    assert hidden is None
    assert cell is None
    detached = Returns(lambda a, b: (a, b.detach()))
    with track(detached, include="^$") as tracker:
        detached(torch.randn(4, 6))[0].sum().backward()
    assert torch.equal(tracker[1].value[0], torch.ones(4, 2))
    assert tracker[1].value[1] is None


def test_a_packed_sequence_keeps_its_type() -> None:
    """A named tuple whose constructor refuses gradients."""
    module = nn.LSTM(6, 4, batch_first=True)
    x = pack_padded_sequence(torch.randn(2, 3, 6), torch.tensor([3, 2]), batch_first=True)
    with track(module, stash_value=torch.sum) as tracker:
        module(x)[0].data.sum().backward()
    packed = tracker[1].value[0]
    assert type(packed) is PackedSequence
    assert packed.data == 5 * 4


def test_in_place_layers_work() -> None:
    """``ReLU(inplace=True)`` and ``y += x``: gradients are those of the model without, outputs are as they left their layer."""

    class Net(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inplace = inplace
            self.first, self.relu, self.last = nn.Linear(6, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.relu(self.first(x))
            y: Tensor = self.last(h)
            if self.inplace:
                y += x
                return y
            return y + x

    kept = []
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for inplace in (False, True):
        module = Net(inplace)
        with track(module) as tracker:
            module(x).pow(2).sum().backward()
        kept.append(tracker)
    plain, in_place = kept
    assert names_of(in_place, grad=True) == names_of(plain, grad=True) == ["", "last", "relu", "first"]
    for one, other in zip(plain, in_place, strict=True):
        assert torch.equal(one.first_value, other.first_value), (one.name, one.grad)


@pytest.mark.parametrize("name", [name for name in ZOO if name != "frozen"])
def test_tracking_does_not_change_training(name: str) -> None:
    """Losses and gradients are bit-identical, with dropout, BatchNorm, shared modules and odd outputs."""
    results = []
    for tracked in (False, True):
        module = make(name)
        torch.manual_seed(3)
        (x, y), *_ = batches(5)
        if tracked:
            with track(module) as tracker:
                loss = nn.functional.cross_entropy(module(x), y)
                loss.backward()
            assert len(tracker) > 4
        else:
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_is_kept_once_with_its_gradient(reentrant: bool) -> None:
    """A recomputation is not a second output; gradients equal those without checkpointing."""
    kept = []
    x = torch.randn(4, 6, requires_grad=True)
    for checkpointed in (False, True):
        torch.manual_seed(0)
        inner, outer = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
        with Tracker() as tracker:
            tracker.register_all(inner)
            tracker.register(outer, "outer")
            h = checkpoint(inner, x, use_reentrant=reentrant) if checkpointed else inner(x)
            outer(h).sum().backward()
        kept.append(tracker)
    plain, again = ({(one.name, one.grad): one.first_value for one in tracker} for tracker in kept)
    assert len(kept[0]) == len(kept[1]) == len(again) == 8
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[key], again[key]) for key in plain)


# ------------------------------------------------------------------ Event, Stash, order


def test_events_are_in_forward_order_then_in_backward_order() -> None:
    """The backward order is the reversed forward order, also for containers that return the output of their last layer."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Sequential(nn.Linear(6, 3))))
    with track(module) as tracker:
        for _micro_batch in range(2):
            module(torch.ones(2, 6)).sum().backward()
    forward = ["0", "1.0", "1.1.0", "1.1", "1", ""]
    assert [(one.name, one.grad) for one in tracker] == 2 * (
        [(name, False) for name in forward] + [(name, True) for name in reversed(forward)]
    )


def test_order_of_a_module_called_twice_and_of_a_second_backward_pass() -> None:
    """A shared layer has its outputs in order and its gradients in reverse; a retained graph gives them again."""
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(2.0)
    with track(module) as tracker:
        y = module(module(torch.ones(1, 1)))
        y.backward(retain_graph=True)
        y.backward()
    assert [(one.grad, float(one.first_value)) for one in tracker] == [
        (False, 2.0), (False, 4.0), (True, 1.0), (True, 2.0), (True, 1.0), (True, 2.0),
    ]  # fmt: skip


def test_a_residual_sum_gives_both_sides_one_gradient_and_the_right_order() -> None:
    """Autograd hands one tensor to both summands: they are two modules' gradients all the same."""
    module = Returns(lambda a, b: a + b)
    with track(module) as tracker:
        module(torch.ones(1, 6)).sum().backward()
    assert names_of(tracker, grad=True) == ["", "b", "a"]


def test_event_has_name_type_grad_value_args_kwargs() -> None:
    """A user function gets the whole event; the event of a gradient has no arguments."""
    events: list[Event] = []

    def keep(event: Event) -> Stash:
        events.append(event)
        return Stash(event.name, event.type, event.grad, None)

    module = Model()
    x = torch.ones(3, requires_grad=True)
    with track(module, stash=keep) as tracker:
        module(x).thing.sum().backward()
    first, second, *_rest, last = events
    assert (first.name, first.type, first.grad, first.args) == ("triple", Triple, False, ())
    assert first.kwargs["x"] is x
    assert torch.equal(first.value, 3 * x)
    assert second.args[0] is first.value
    assert second.kwargs == {}
    assert (last.name, last.grad, last.args, last.kwargs) == ("triple", True, (), {})
    assert torch.equal(last.value[0], x.grad / 3 if x.grad is not None else x)
    assert len(tracker) == 6


def test_stash_first_value() -> None:
    """The first part at any depth; for a tuple of gradients the first that is not ``None``."""
    ones = torch.ones(2)

    def first(value: Any) -> Any:
        return Stash("fc", nn.Linear, False, value).first_value

    for value in (ones, (ones, 1), [[ones]], {"a": ones, "b": 2}, Output(ones, "ok"), Pair(ones, None), (None, (ones,))):
        assert first(value) is ones
    assert first(3.5) == 3.5
    assert first((1.5, 2.5)) == 1.5
    assert first(()) == ()


# ------------------------------------------------------------------ helpers


def test_rmap_tensor_keeps_structure_and_types() -> None:
    """Every container, also nested, and named tuples; other leaves stay, the original is unchanged."""

    @dataclass(frozen=True, slots=True)
    class Slots:
        inside: Any
        other: int = 3

    t = torch.arange(3.0)
    value = [
        t,
        (t, "text"),
        {"k": t, 4: None},
        Pair(t, [t]),
        Output(t, "ok"),
        Slots({"deep": t}),
        torch.max(t.view(1, 3), 1),
        torch.Size([2]),
    ]
    mapped = rmap_tensor(value, torch.sum)
    three = torch.tensor(3.0)
    assert mapped[0] == three
    assert mapped[1] == (three, "text")
    assert mapped[2] == {"k": three, 4: None}
    assert mapped[3] == Pair(three, [three])
    assert type(mapped[3]) is Pair
    assert mapped[4] == Output(three, "ok")
    assert mapped[5] == Slots({"deep": three})
    assert type(mapped[6]) is torch.return_types.max
    assert mapped[6].values == 2
    assert type(mapped[7]) is torch.Size
    assert value[4].thing is t  # type: ignore[union-attr]
    assert rmap_tensor("text", torch.sum) == "text"
    assert rmap_tensor(t, torch.sum) == three


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_default_stash_value_is_a_detached_copy_on_the_cpu(dtype: torch.dtype) -> None:
    """Bit-exact, in separate memory, without a graph."""
    tensor = torch.tensor([[1.5, -2.0]]).to(dtype).requires_grad_(dtype.is_floating_point)
    kept = default_stash_value(tensor)
    assert torch.equal(kept, tensor)
    assert (kept.dtype, kept.device.type, kept.requires_grad) == (dtype, "cpu", False)
    assert kept.data_ptr() != tensor.data_ptr()


def test_default_stash_and_get_stash_fn() -> None:
    """Copies by default; a function of each tensor; a function of the event; not both."""
    value = (torch.ones(2), "text")
    event = Event("fc", nn.Linear, False, value, (1,), {"x": 2})
    assert default_stash(event, torch.sum) == Stash("fc", nn.Linear, False, (torch.tensor(2.0), "text"))
    assert get_stash_fn(torch.sum)(event) == Stash("fc", nn.Linear, False, (torch.tensor(2.0), "text"))
    copied = get_stash_fn()(event).value[0]
    assert torch.equal(copied, value[0])
    assert copied.data_ptr() != value[0].data_ptr()
    own = Stash("mine", nn.Module, True, 5)
    assert get_stash_fn(stash=lambda _event: own)(event) is own
    with pytest.raises(ValueError, match="Both stash_value and stash are given; expected one of them"):
        get_stash_fn(torch.sum, lambda _event: own)
    with pytest.raises(ValueError, match="Both stash_value and stash are given"):
        track(Model(), stash_value=torch.sum, stash=lambda _event: own)


# ------------------------------------------------------------------ Tracker


def test_tracker_is_a_list_of_stashes() -> None:
    """``len``, index, negative index, iteration, ``stashes``; ``clear`` and ``str``."""
    module = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    tracker = track(module)
    assert str(tracker) == "Tracker(stashes=0, tracking=3)"
    module(torch.ones(2, 6)).sum().backward()
    assert str(tracker) == "Tracker(stashes=6, tracking=3)"
    assert len(tracker) == len(tracker.stashes) == 6
    assert [one.name for one in tracker] == ["0", "1", "", "", "1", "0"]
    assert tracker[0] is tracker.stashes[0]
    assert tracker[-1].grad
    tracker.clear()
    assert len(tracker) == 0
    module(torch.ones(2, 6)).sum().backward()
    assert names_of(tracker, grad=True) == ["", "1", "0"]
    tracker.unregister()
    assert str(tracker) == "Tracker(stashes=6, tracking=0)"
    assert hooks_on(module) == 0


def test_register_register_all_and_unregister() -> None:
    """By hand: one module under a name of one's own, then another with all that is in it; off and on again."""
    encoder, decoder = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    tracker = Tracker()
    tracker.register(encoder, "encoder", grad=False)
    tracker.register_all(decoder, include="[01]")

    def run() -> list[tuple[str, bool]]:
        tracker.clear()
        decoder(encoder(torch.ones(1, 6))).sum().backward()
        return [(one.name, one.grad) for one in tracker]

    assert run() == [("encoder", False), ("0", False), ("1", False), ("1", True), ("0", True)]
    tracker.unregister()
    tracker.unregister()
    assert run() == []
    tracker.register(encoder)
    assert run() == [("", False), ("", True)]
    tracker.unregister()


def test_max_bytes_is_a_clear_error_when_it_is_reached() -> None:
    """Tensors within the limit are kept; a further tensor raises an error with a remedy; ``clear`` frees the space."""
    module = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 10))
    # Outputs: 2 x 10 floats each, for the two layers and the container: 80 bytes each; then the gradients.
    with pytest.raises(MemoryError) as full, track(module, max_bytes=350) as tracker:
        module(torch.ones(2, 6)).sum().backward()
    message = str(full.value)
    assert "holds 320 bytes in 4 stashes, and the gradient of '' has 80 more; expected at most max_bytes=350" in message
    assert "include" in message
    assert "stash_value" in message
    assert [(one.name, one.grad) for one in tracker] == [("0", False), ("1", False), ("", False), ("1", True)]
    assert hooks_on(module) == 0
    with track(module, max_bytes=480) as tracker:
        for _step in range(3):
            tracker.clear()
            module(torch.ones(2, 6)).sum().backward()
    assert len(tracker) == 6
    with pytest.raises(MemoryError, match="the output of '0' has 80 more"), track(module, max_bytes=79):
        module(torch.ones(2, 6))
    with track(module, stash_value=torch.mean, max_bytes=24) as tracker:
        module(torch.ones(2, 6)).sum().backward()
    assert len(tracker) == 6


def test_max_bytes_counts_all_that_a_stash_holds() -> None:
    """Also tensors that a user function attaches."""

    def keep(event: Event) -> Stash:
        stash = default_stash(event, default_stash_value)
        stash.args = rmap_tensor(event.args, default_stash_value)  # type: ignore[attr-defined]  # as the original's users do
        return stash

    module = nn.Linear(6, 10)
    with track(module, grad=False, stash=keep, max_bytes=80 + 48):
        module(torch.ones(2, 6))
    with pytest.raises(MemoryError, match="has 128 more"), track(module, grad=False, stash=keep, max_bytes=80 + 47):
        module(torch.ones(2, 6))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1GB"])
def test_a_wrong_max_bytes_is_refused(value: Any) -> None:
    """The error has the value and what was expected."""
    with pytest.raises(ValueError, match=r"max_bytes is .*; expected a number of bytes >= 1"):
        track(Model(), max_bytes=value)


def test_a_copy_of_a_tracked_module_is_not_tracked() -> None:
    """It is copied and pickled without stashes, and its passes are not kept."""
    module = nn.Sequential(nn.Linear(6, 3))
    with track(module) as tracker:
        module(torch.ones(100_000, 6))
        clone = copy.deepcopy(module)
        data = pickle.dumps(module)
        clone(torch.ones(2, 6)).sum().backward()
    assert len(tracker) == 2
    assert len(data) < 10_000
    assert torch.equal(clone[0].weight, module[0].weight)


def test_a_tracker_does_not_hold_a_module_by_the_hooks_it_has() -> None:
    """A module that a user's hook refers to is freed, although the tracker exists."""
    import gc
    import weakref

    module = nn.Linear(6, 3)
    module.register_forward_hook(lambda *_args, own=module: None)
    with track(nn.Linear(6, 3)) as tracker:
        tracker.register(module, "other")
        gone = weakref.ref(module)
        del module
        gc.collect()
        assert gone() is None


def test_outputs_may_be_freed_before_the_backward_pass() -> None:
    """A tracker that keeps only statistics does not keep an output alive."""
    import weakref

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x + 1, "b": x + 2}

    module = Sums()
    x = torch.ones(4, requires_grad=True)
    with track(module, stash_value=torch.sum) as tracker:
        output = module(x)
        gone = weakref.ref(output["a"])
        loss = 3 * output["a"].sum() + output["b"].sum()
        del output
        assert gone() is None
        loss.backward()
    assert tracker[1].value == {"a": 12, "b": 4}


# ------------------------------------------------------------------ to_frame


def test_to_frame_has_name_type_grad_and_the_statistic() -> None:
    """A row for each stash; the column has the function's name or the given name."""
    pd = pytest.importorskip("pandas")
    module = Outputs()
    (x, _y), *_ = batches(5)
    with track(module, include="^(head|integer|dataclass|complex)$") as tracker:
        module(x).sum().backward()
    frame = tracker.to_frame()
    assert list(frame.columns) == ["name", "type", "grad", "std"]
    assert list(frame["name"]) == [one.name for one in tracker]
    assert list(frame["grad"]) == [one.grad for one in tracker]
    of_head = frame[(frame["name"] == "head") & ~frame["grad"]].iloc[0]
    assert of_head["type"] == "torch.nn.modules.linear.Linear"
    assert of_head["std"] == pytest.approx(float(next(stash.value for stash in tracker if stash.name == "head").std()))
    assert frame["std"].notna().all()  # of dataclasses and integers, too
    assert list(tracker.to_frame(stat=torch.linalg.vector_norm, stat_name="norm").columns)[-1] == "norm"
    assert list(tracker.to_frame(lambda tensor: tensor.abs().max()).columns)[-1] == "value"
    assert list(Tracker().to_frame().columns) == ["name", "type", "grad", "std"]
    with track(module.head, stash_value=str) as tracker:
        module.head(x)
    assert pd.isna(tracker.to_frame()["std"]).all()


def test_to_frame_without_pandas_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pandas is not installed. Install it with: pip install 'lightning-module-monitor\[pandas\]'"):
        Tracker().to_frame()
