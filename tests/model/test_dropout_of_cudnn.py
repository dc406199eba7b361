"""The random state of cuDNN, from which recurrent layers draw dropout; a fake of cuDNN changes it here, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.unchanged import unchanged_dropout_of_cudnn, unchanged_random_states

CUDA = torch.device("cuda", 0)


class Cudnn:
    """As torch calls it: a state that is seeded when the generator was set, and that each call changes."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.is_to_be_seeded = True
        self.num_seeds = 0

    def call(self, x: Tensor) -> Tensor:
        """A layer with dropout, which adds the state to its input."""
        if self.is_to_be_seeded:
            self.state = torch.ops.aten._cudnn_init_dropout_state(0.5, True, 7, dtype=torch.uint8, device="cpu")
            self.is_to_be_seeded, self.num_seeds = False, self.num_seeds + 1
        arguments = (x, [x], 1, None, x, None, 2, 8, 0, 2, True, 0.5, True, False, [], self.state)
        result: Tensor = torch.ops.aten._cudnn_rnn(*arguments)[0]
        return result


def _rnn(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    state = arguments[-1]
    result = x + state[0]
    state.add_(1)
    return result, x.clone(), x.clone(), x.clone(), x.clone()


def _seeded(_dropout: float, _train: bool, _seed: int, **_options: Any) -> Tensor:
    return torch.zeros(4, dtype=torch.uint8)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudnn]:
    """The operations of cuDNN on a CPU, and a generator whose state is only set."""
    found = Cudnn()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: setattr(found, "is_to_be_seeded", True))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn", _rnn, "CPU")
        library.impl("_cudnn_init_dropout_state", _seeded, "CPU")
        yield found


class Recurrent(nn.LSTM):
    """An LSTM with dropout whose forward calls the fake."""

    def __init__(self, cudnn: Cudnn) -> None:
        super().__init__(8, 8, num_layers=2, dropout=0.5)
        self.cudnn = cudnn

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the output alone
        return self.cudnn.call(x)


def test_a_run_leaves_the_state_as_it_was_and_has_the_same_dropout(cudnn: Cudnn) -> None:
    """Call by call, the copy draws what the model draws after it; seeds are drawn as without the copy."""
    model, copied, x = Recurrent(cudnn), Recurrent(cudnn), torch.zeros(3)
    for step in range(3):
        with unchanged_dropout_of_cudnn(copied, CUDA):
            expected = copied(x)
        assert torch.equal(expected, torch.full((3,), float(step)))
        assert torch.equal(model(x), expected)
    assert cudnn.num_seeds == 2  # one of them in the copy, on the copy of the generator's state


def test_hooks_of_a_layer_run_outside_of_the_mode_and_nothing_is_left(cudnn: Cudnn) -> None:
    """Also after an error, and where the layer had a forward of its own."""
    layer, seen = Recurrent(cudnn), []
    own = layer.forward
    layer.forward = own  # type: ignore[method-assign]  # as libraries replace it
    layer.register_forward_hook(lambda *_arguments: seen.append(is_tracing()))
    cudnn.is_to_be_seeded = False  # a call without a state is an error of the fake
    with pytest.raises(TypeError), unchanged_dropout_of_cudnn(layer, CUDA):
        layer(torch.zeros(3))
    assert vars(layer)["forward"] == own
    del layer.forward
    cudnn.is_to_be_seeded = True
    with unchanged_dropout_of_cudnn(layer, CUDA):
        layer(torch.zeros(3))
    assert seen == [False]
    assert "forward" not in vars(layer)


def test_layers_without_dropout_and_other_devices_are_left_alone() -> None:
    """No forward is replaced."""
    for layer, device in ((nn.LSTM(8, 8), CUDA), (nn.LSTM(8, 8, num_layers=2, dropout=0.5), torch.device("cpu"))):
        with unchanged_dropout_of_cudnn(layer, device):
            assert "forward" not in vars(layer)


class Generator:
    """A generator of CUDA: an object with a state, as far as the monitor uses it."""

    def __init__(self, state: list[int]) -> None:
        self.state = state

    def clone_state(self) -> Generator:
        return Generator([*self.state])

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


def test_no_state_of_cuda_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it would seed cuDNN's state anew: the block draws from a copy of the state."""
    state = [3]
    generator = Generator(state)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_arguments: pytest.fail("a state was set"))
    before = torch.get_rng_state()
    with unchanged_random_states(CUDA):
        generator.state[0] += 4
        torch.randn(1)
        assert state == [3]
    assert generator.state is state
    assert state == [3]
    assert torch.equal(torch.get_rng_state(), before)
