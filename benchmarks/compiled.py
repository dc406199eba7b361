"""Whether a compiled model computes the same when its outputs are observed inside the compiled code: bit by bit.

Every module's output is given to an operator that the compiler keeps as it is. Compared are the output of the model and all gradients, with
those of the same compiled model without the operators, and with those of the uncompiled model. Takes a few minutes on a CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import workloads

OBSERVED, UNCOMPILED = "observed inside", "uncompiled"


@torch.library.custom_op("benchmarks::observe", mutates_args={"total"})
def observe(x: Tensor, total: Tensor) -> None:
    """Add up the squares of an output."""
    total += x.detach().double().square().sum()


@observe.register_fake
def _(x: Tensor, total: Tensor) -> None:
    pass


def add_observer(module: nn.Module) -> None:
    """Observe the outputs of a module."""
    total = torch.zeros((), dtype=torch.float64)

    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        observe(output, total)

    module.register_forward_hook(hook)


def results(how: str, precision: str) -> list[Tensor]:
    """The output and the gradients of a small GPT after one forward and backward pass."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = workloads.GPT(vocabulary=64, width=64, layers=2, heads=4, context=32)
    model = model.bfloat16() if precision == "bf16-true" else model
    if how == OBSERVED:
        for module in model.modules():
            add_observer(module)
    run = model if how == UNCOMPILED else torch.compile(model)
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext():
        output = run(tokens)
    output.float().square().sum().backward()
    return [output.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def main() -> None:
    """Print how many tensors are the same."""
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        compiled = results("compiled", precision)
        for how in (OBSERVED, UNCOMPILED):
            others = results(how, precision)
            same = sum(torch.equal(one, other) for one, other in zip(compiled, others, strict=True))
            print(f"{precision}: {how}, {same} of {len(compiled)} tensors are those of the compiled model")


if __name__ == "__main__":
    main()
