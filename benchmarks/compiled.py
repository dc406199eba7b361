"""Compiled models: what a monitored step costs with both values of ``compiled``, and why nothing is observed inside compiled code.

The first part times steps of a small GPT, compiled by block: as it is, not compiled, and monitored at every step, in turns. The second part
gives every module's output to an operator that the compiler keeps as it is, and compares the output of the model and all gradients, bit by
bit, with those of the same compiled model without the operators, and with those of the uncompiled model. Takes a few minutes on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import workloads
from lightning_module_monitor import ModuleMonitor, Rule

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
    return [output.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


PARAMETERS = Rule(kinds=["parameter", "gradient"], statistics="norm")
OUTPUTS = Rule(kinds=["activation", "activation_gradient"], statistics="rms")
COSTS: dict[str, tuple[bool, str, list[Rule]]] = {
    "compiled, not monitored": (True, "keep", []),
    "not compiled, not monitored": (False, "keep", []),
    "not compiled, parameters and gradients": (False, "keep", [PARAMETERS]),
    "compiled: keep, parameters and gradients": (True, "keep", [PARAMETERS]),
    "compiled: keep, and outputs of blocks": (True, "keep", [PARAMETERS, OUTPUTS]),
    "compiled: uncompiled, parameters and gradients": (True, "uncompiled", [PARAMETERS]),
    "compiled: uncompiled, and all outputs": (True, "uncompiled", [PARAMETERS, OUTPUTS]),
}
"""Whether blocks are compiled, the option, and the rules, by what is timed."""


def step_of(is_compiled: bool, option: str, rules: list[Rule]) -> Callable[[int], None]:
    """A training step, which is monitored if there are rules."""
    torch.manual_seed(0)
    model = workloads.GPT(vocabulary=64, width=128, layers=4, heads=4, context=64)
    for block in model.blocks if is_compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(1))
    monitor = ModuleMonitor(rules=rules, compiled=option)
    if rules:
        monitor.set_module(model)

    def step(number: int) -> None:
        if rules:
            monitor.begin_step(number)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if rules:
            monitor.monitor_gradients()
            monitor.monitor_parameters()
        optimizer.step()
        optimizer.zero_grad()
        if rules:
            monitor.end_step()

    return step


def print_costs(num_steps: int = 20) -> None:
    """Print the median time of a step of each, timed in turns."""
    steps = {name: step_of(*options) for name, options in COSTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_steps + 3):
        for name, step in steps.items():
            begun = time.perf_counter()
            step(number)
            times[name].append(time.perf_counter() - begun)
    plain = statistics.median(times["compiled, not monitored"][3:])
    for name, seconds in times.items():
        median = statistics.median(seconds[3:])
        print(f"{name}: {median * 1e3:.1f} ms a step, {median / plain:.2f} times the compiled one")


def main() -> None:
    """Print what a step costs, and how many tensors are the same."""
    print_costs()
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        compiled = results("compiled", precision)
        for how in (OBSERVED, UNCOMPILED):
            others = results(how, precision)
            same = sum(torch.equal(tensor, other) for tensor, other in zip(compiled, others, strict=True))
            print(f"{precision}: {how}, {same} of {len(compiled)} tensors are those of the compiled model")


if __name__ == "__main__":
    main()
