"""The kernels that a run needs on its device, from its plan and precision; they are compiled before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.warm_up import Form, Launch
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.lightning_packages import Trainer
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.trainer import strategy

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
"""By the first part of a Trainer's ``precision``."""


def expected_launches(trainer: Trainer, module: nn.Module, plan: Plan) -> set[Launch]:
    """The launches of a plan, in the dtypes of the parameters and of the precision.

    What only a step shows, as the dtype of an output that a model casts by itself, is compiled in that step.
    """
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    dtypes |= {_DTYPES[name] for name in [str(trainer.precision).split("-")[0]] if name in _DTYPES}
    is_scaled = strategy.scaler_of(trainer) is not None
    launches = set[Launch]()
    for stream in plan.all_streams():
        for needs, form in _measurements(stream, is_scaled=is_scaled):
            launches |= {Launch(dtype, needs, form) for dtype in dtypes if needs}
        if stream.compared_with:
            launches |= {Launch(dtype, Need.MEAN, Form.PRODUCT) for dtype in dtypes}
            launches |= {Launch(dtype, Need.SQUARES, Form.ONE) for dtype in dtypes}
    if any("activation" in watched.streams for watched in plan.modules_with_heads):
        launches |= {launch._replace(form=Form.MANY) for launch in launches if launch.form is Form.ONE}
    return launches


def _measurements(stream: Stream, *, is_scaled: bool) -> Iterator[tuple[int, Form]]:
    """What is needed of each tensor of a stream, and how the tensors come."""
    kind = KINDS[stream.kind]
    if kind.needs_reference:
        yield stream.needs, Form.DIFFERENCE
        yield stream.base_needs, Form.ONE
    elif kind.site == "parameter":
        yield stream.needs, Form.MANY
        yield stream.base_needs, Form.MANY
    elif not kind.of_heads:
        yield stream.needs, Form.SCALED if is_scaled and kind.name != "activation" else Form.ONE
