"""Gradient flow in the engine and in a real Trainer, against float64 autograd."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.flow import NORM_FORMULAS, Block, batch, chain, loss_of, true_norms
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.plain_steps import record_of
from helpers.tiny import KeepRecords
from helpers.training import loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import GradientFlow, ModuleMonitor, ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.config.rules import ConfigError
from lightning_module_monitor.keys import Key


class Deep(nn.Module):
    """A chain of blocks; the first block is also the last."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        blocks = chain(num_blocks)
        self.blocks = nn.ModuleList([*blocks, blocks[0]])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def observe(model: nn.Module, step: Callable[[ModuleMonitor], None], blocks: Any = "blocks", **options: Any) -> Record:
    """A step of a plain loop with gradient flow only."""
    flow = GradientFlow(blocks=blocks, **{name: options.pop(name) for name in ("norm", "thresholds") if name in options})
    with ModuleMonitor(gradient_flow=flow, **options) as monitor:
        monitor.set_module(model)
        assert monitor.begin_step(0)
        step(monitor)
        record = record_of(monitor)
    assert not any(module._forward_hooks for module in model.modules())
    return record


def backward(model: nn.Module, *inputs: Tensor) -> Callable[[ModuleMonitor], None]:
    """A step of these micro-batches."""

    def step(monitor: ModuleMonitor) -> None:
        for x in inputs:
            loss_of(model(x)).backward()
            monitor.after_micro_batch()

    return step


def gains(record: Record, name: str = "gain") -> dict[str, float]:
    """Gain by transition."""
    keys = {text: Key.parse(text) for text in record.values}
    return {key.site: record.values[text] for text, key in keys.items() if (key.kind, key.statistic) == ("gradient_flow", name)}


def ratios(norms: list[float | None]) -> list[float]:
    """Each norm over the next."""
    return [a / b for a, b in pairwise(norms) if a is not None and b is not None]


# In the engine


@pytest.mark.parametrize("norm", NORM_FORMULAS)
@pytest.mark.parametrize("sizes", [(8,), (3, 5)], ids=str)
def test_callback_merges_micro_batches_instead_of_raising(norm: str, sizes: tuple[int, ...]) -> None:
    """They count as their concatenation, in each norm; a module with two indices has a norm at each."""
    model = Deep()
    inputs = [batch(size) for size in sizes]
    record = observe(model, backward(model, *inputs), norm=norm)
    expected = ratios(true_norms(list(model.blocks), *inputs, norm=norm))
    assert gains(record) == pytest.approx(
        dict(zip(("blocks.0-blocks.1", "blocks.1-blocks.2", "blocks.2-blocks.3"), expected, strict=True)), rel=4e-6
    )
    assert list(gains(record, "log_gain").values()) == pytest.approx(np.log(expected).tolist(), abs=4e-6)
    for name, value in {"mean_gain": np.mean(expected), "min_gain": min(expected), "max_gain": max(expected)}.items():
        assert record.values[f"gradient_flow/_summary_/{name}"] == pytest.approx(value, rel=4e-6)
    assert record.values["gradient_flow/_summary_/mean_log_gain"] == pytest.approx(np.log(expected).mean(), abs=4e-6)
    assert record.values["monitor/errors"] == 0


def test_the_planned_keys_are_the_gains_and_their_summary() -> None:
    """Norms are not recorded; every key has the prefix, and parses to its parts."""
    model = Deep()
    with ModuleMonitor(gradient_flow=GradientFlow(blocks="blocks"), prefix="run1") as monitor:
        monitor.set_module(model)
        planned = monitor.planned_keys()
        assert monitor.engine.model.planner.planned_keys(["validation"]) == ["run1/validation/monitor/errors"]
    record = observe(model, backward(model, batch(4)), prefix="run1")
    assert planned == list(record.values)
    transitions = [f"run1/gradient_flow/blocks.{i}-blocks.{i + 1}/{name}" for i in range(3) for name in ("gain", "log_gain")]
    counted = ("amplifying", "damping", "healthy", "vanishing", "missing")
    names = ["mean_gain", "min_gain", "max_gain", "mean_log_gain", *(f"num_{name}" for name in counted)]
    assert planned == [*transitions, *(f"run1/gradient_flow/_summary_/{name}" for name in names), "run1/monitor/errors"]
    assert Key.parse(planned[0]) == Key("gradient_flow", "blocks.0-blocks.1", "gain", prefix="run1")


def test_blocks_by_a_containers_name_a_list_and_a_pattern() -> None:
    """The same transitions, for a list in the user's order; excluded modules are not blocks."""
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 6), nn.Tanh())
    model.parts = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})

    def sites(blocks: Any, **options: Any) -> list[str]:
        with ModuleMonitor(gradient_flow=GradientFlow(blocks=blocks), **options) as monitor:
            monitor.set_module(model)
            return [Key.parse(key).site for key in monitor.planned_keys() if key.endswith("/gain")]

    everything = ["body.0-body.1", "body.1-body.2", "body.2-body.3"]
    assert sites("body") == sites(r"body\.\d") == sites([f"body.{i}" for i in range(4)]) == everything
    assert sites("body", exclude=r".*\.1") == ["body.0-body.2", "body.2-body.3"]
    assert sites("body", module="body") == everything
    assert sites("parts") == ["parts.a-parts.b"]
    assert sites(["parts.a", "body.2"]) == ["parts.a-body.2"]
    assert sites(["body.0", "parts.a", "body.0", "parts.a"]) == ["body.0-parts.a", "parts.a-body.0", "body.0-parts.a_2"]
    with pytest.raises(ConfigError, match=r"gradient_flow\.blocks 'parts' is none of the 5 module names"):
        sites("parts", module="body")


def test_the_model_itself_is_a_container() -> None:
    """Under its name in keys; modules within its blocks are not blocks."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.Tanh())
    by_root = gains(observe(model, backward(model, batch(5)), "_root_"))
    assert list(by_root) == ["0-1", "1-2"]
    assert by_root == gains(observe(model, backward(model, batch(5)), ["0", "1", "2"]))


def test_one_module_under_two_names() -> None:
    """By a pattern of both names, a list of both, and a list with the same name twice."""
    model = Deep()
    expected = ratios(true_norms(list(model.blocks), batch(5)))
    for blocks in (r"blocks\.\d", ["blocks.0", "blocks.1", "blocks.2", "blocks.3"], ["blocks.0", "blocks.1", "blocks.2", "blocks.0"]):
        assert list(gains(observe(model, backward(model, batch(5)), blocks)).values()) == pytest.approx(expected, rel=4e-6)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_blocks_count_once(use_reentrant: bool) -> None:
    """In both modes, with a shared block, and with micro-batches."""
    model = Deep()

    def step(monitor: ModuleMonitor) -> None:
        for size in (3, 5):
            x = batch(size).requires_grad_()
            monitor.end_backward()
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            monitor.begin_backward()
            loss_of(x).backward()
            monitor.end_backward()
            monitor.after_micro_batch()

    expected = ratios(true_norms(list(model.blocks), batch(3), batch(5)))
    assert list(gains(observe(model, step)).values()) == pytest.approx(expected, rel=4e-6)


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT:FutureWarning")  # before torch 2.5
@pytest.mark.parametrize("implementation", ["REENTRANT", "NO_REENTRANT"])
def test_blocks_in_torchs_checkpoint_wrapper(implementation: str) -> None:
    """Its modules keep their names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model = nn.Module()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl[implementation]) for block in chain(3))

    def step(_monitor: ModuleMonitor) -> None:
        x = batch(5).requires_grad_()
        for block in model.blocks:
            x = block(x)
        loss_of(x).backward()

    expected = ratios(true_norms(chain(3), batch(5)))
    assert gains(observe(model, step)) == pytest.approx(
        dict(zip(("blocks.0-blocks.1", "blocks.1-blocks.2"), expected, strict=True)), rel=4e-6
    )


def test_frozen_blocks_and_blocks_without_a_gradient_have_no_gain() -> None:
    """Their keys are absent, and they are counted; a frozen block in the middle passes the gradient on."""
    blocks = chain(5)
    for i in (0, 3):
        blocks[i].requires_grad_(requires_grad=False)
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)

    def step(monitor: ModuleMonitor) -> None:
        h = blocks[2](blocks[1](blocks[0](batch(4))))
        blocks[4](h)
        loss_of(blocks[3](h)).backward()

    record = observe(model, step)
    norms = true_norms(blocks[:4], batch(4))
    assert norms[0] is None
    expected = {f"blocks.{i}-blocks.{i + 1}": ratio for i, ratio in zip((1, 2), ratios(norms[1:]), strict=True)}
    assert gains(record) == pytest.approx(expected, rel=4e-6)
    assert record.values["gradient_flow/_summary_/num_missing"] == 2
    assert record.values["monitor/errors"] == 0


def test_a_step_without_any_gradient_has_counts_only() -> None:
    """All are missing, and there is no mean."""
    model = Deep()
    record = observe(model, lambda _monitor: model(batch(4)))
    assert {key: value for key, value in record.values.items() if value} == {"gradient_flow/_summary_/num_missing": 3.0}
    assert "gradient_flow/_summary_/mean_gain" not in record.values


def test_thresholds_move_the_counts() -> None:
    """A gain between them is healthy."""
    model = Deep()
    wide = observe(model, backward(model, batch(4)), thresholds=[0.0, 1e9])
    narrow = observe(model, backward(model, batch(4)), thresholds=[0.0, 0.0])
    assert (wide.values["gradient_flow/_summary_/num_healthy"], narrow.values["gradient_flow/_summary_/num_amplifying"]) == (3, 3)


def test_only_the_gradient_of_the_loss_counts() -> None:
    """A user's inner ``autograd.grad`` and calls under ``no_monitor`` do not count, also as calls of a shared block."""
    model = Deep()
    x = batch(4).requires_grad_()

    def step(monitor: ModuleMonitor) -> None:
        monitor.end_backward()
        with monitor.no_monitor():
            loss_of(model.blocks[0](batch(9))).backward()
        h = model.blocks[0](x)
        torch.autograd.grad(h.sum(), x, create_graph=True)
        for block in list(model.blocks)[1:]:
            h = block(h)
        loss = loss_of(h)
        torch.autograd.grad(loss, x, create_graph=True)
        monitor.begin_backward()
        loss.backward()
        monitor.end_backward()
        loss_of(model(batch(7))).backward()

    expected = ratios(true_norms(list(model.blocks), batch(4)))
    assert list(gains(observe(model, step)).values()) == pytest.approx(expected, rel=4e-6)


def test_a_micro_batch_that_failed_does_not_count_as_a_call() -> None:
    """In the next micro-batch the first call of a shared block has its first index."""
    model = Deep()

    def step(monitor: ModuleMonitor) -> None:
        model.blocks[0](batch(9))
        monitor.after_micro_batch()
        backward(model, batch(4))(monitor)

    expected = ratios(true_norms(list(model.blocks), batch(4)))
    assert list(gains(observe(model, step)).values()) == pytest.approx(expected, rel=4e-6)


def test_a_gradient_that_cannot_be_read_is_nan_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once; other transitions have gains. Likewise for an output that cannot be taken apart."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            self.output: dict[str, Any] = {}
            self.output["self"] = self.output
            return self.output

    model = nn.Module()
    model.blocks = nn.ModuleList([*chain(3), Odd()])

    def step(monitor: ModuleMonitor) -> None:
        h = model.blocks[2](model.blocks[1](model.blocks[0](batch(4))))
        model.blocks[3](h)
        loss_of(h).backward()

    record = observe(model, step)
    assert list(gains(record).values()) == pytest.approx(
        [*ratios(true_norms(list(model.blocks)[:3], batch(4))), math.nan], rel=4e-6, nan_ok=True
    )
    assert math.isnan(record.values["gradient_flow/_summary_/mean_gain"])
    assert record.values["monitor/errors"] == 1
    assert "gradient_flow 'blocks.3', a dict: l2 failed with RecursionError" in caplog.text


def test_names_that_loggers_would_not_take(caplog: pytest.LogCaptureFixture) -> None:
    """They are changed by rule, stay different, and the log reports it."""
    model = nn.Module()
    for name in ("a", "b", "a-b", "b-a", "x y", "n" * 100, "m" * 100):
        model.add_module(name, nn.Linear(6, 6))
    flow = GradientFlow(blocks=["a", "b-a", "b", "a-b", "a", "x y", "n" * 100, "m" * 100])
    with caplog.at_level(logging.INFO), ModuleMonitor(gradient_flow=flow) as monitor:
        monitor.set_module(model)
        sites = [Key.parse(key).site for key in monitor.planned_keys() if key.endswith("/gain")]
    assert sites[:5] == ["a-b-a", "b-a-b", "b-a-b_2", "a-b-a_2", "a-x_y"]
    assert len(set(sites)) == 7
    assert max(map(len, sites)) <= 128
    assert "'a-x y' is called 'a-x_y' in keys" in caplog.text


def test_the_forecast_counts_the_transitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints them."""
    callback = ModuleMonitorCallback(1, rules=[], gradient_flow=GradientFlow(blocks="model.blocks"), dry_run=True, store=False)
    trainer(tmp_path, [callback], max_steps=2).fit(Trained(), loader(), loader(8))
    printed = capsys.readouterr().out
    assert "gradient_flow: 3 transitions between 4 blocks, and their summary" in printed
    assert "16 keys" in printed  # two for each transition, nine of the summary, monitor/errors
    assert callback.last_record is None


# In a real Trainer


class Trained(LightningModule):
    """A :class:`Deep` that is trained."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.model = Deep()
        self.head = Block()
        self.use_reentrant = use_reentrant

    def hidden(self, x: Tensor) -> list[Tensor]:
        """The outputs of the blocks."""
        outputs = []
        for block in self.model.blocks:
            x = block(x) if self.use_reentrant is None or not self.training else checkpoint(block, x, use_reentrant=self.use_reentrant)
            outputs.append(x)
        return outputs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0] if self.use_reentrant is None else batch[0].clone().requires_grad_()
        return F.cross_entropy(self.head(self.hidden(x)[-1])[:, :3], batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.head(self.hidden(batch[0])[-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Autograd(Callback):
    """Expected gradients of each step: ``torch.autograd.grad`` of a float64 copy with the current weights."""

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.gradients: list[list[np.ndarray]] = []
        self.by_step: list[list[list[np.ndarray]]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.random.fork_rng(devices=[]):
            twin = Trained().double()
        twin.load_state_dict(copy.deepcopy(pl_module.state_dict()))
        hidden = twin.hidden(batch[0].double())
        loss = F.cross_entropy(twin.head(hidden[-1])[:, :3], batch[1]) / self.num_micro_batches
        self.gradients.append([gradient.numpy() for gradient in torch.autograd.grad(loss, hidden)])

    def on_train_batch_end(self, trainer: Trainer, *_args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.by_step.append(self.gradients)
            self.gradients = []

    def gains(self, step: int, norm: str) -> list[float]:
        """The gains of a step: all of its micro-batches together."""
        together = [np.concatenate([part.ravel() for part in parts]) for parts in zip(*self.by_step[step], strict=True)]
        return ratios([NORM_FORMULAS[norm](gradient) for gradient in together])


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-10), ("32-true", 1e-5)])
def test_a_trainer_run_with_accumulation_equals_float64_autograd(
    precision: Any, tolerance: float, use_reentrant: bool | None, tmp_path: Path
) -> None:
    """Steps of 3, 3, 3 and 1 micro-batches, a validation loop in the middle of a step: every gain of every step."""
    seed()
    callback = ModuleMonitorCallback(
        1,
        rules=[],
        gradient_flow=GradientFlow(blocks="model.blocks", norm="l1"),
        store=str(tmp_path / "run.h5"),
        stages=["train", "validate"],
    )
    truth, kept = Autograd(3), KeepRecords(callback)
    run = trainer(tmp_path, [callback, truth, kept], accumulate_grad_batches=3, precision=precision, val_check_interval=4)
    run.fit(Trained(use_reentrant), loader(40), loader(8))
    records = [record for record in kept.records if "monitor/errors" in record.values]
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [len(step) for step in truth.by_step] == [3, 3, 3, 1]
    for record in records:
        assert list(gains(record).values()) == pytest.approx(truth.gains(record.step, "l1"), rel=tolerance)
        assert record.values["gradient_flow/_summary_/mean_gain"] == pytest.approx(np.mean(truth.gains(record.step, "l1")), rel=tolerance)
        assert record.values["monitor/errors"] == 0
    steps, values = load_store(tmp_path / "run.h5").series("gradient_flow/model.blocks.0-model.blocks.1/gain")
    assert steps.tolist() == [0, 1, 2, 3]
    assert values.tolist() == [gains(record)["model.blocks.0-model.blocks.1"] for record in records]


def test_the_flow_has_the_callbacks_cadence_and_rules_have_theirs(tmp_path: Path) -> None:
    """With rules of other cadences in one run; the sum of the gains can stop a run."""
    callback = ModuleMonitorCallback(
        3,
        rules=[Rule(kinds="activation", sites="head", statistics="rms", every_n_steps=2)],
        gradient_flow=GradientFlow(blocks="model.blocks"),
        callback_metrics="gradient_flow/_summary_/mean_gain",
    )
    kept = KeepRecords(callback)
    run = trainer(tmp_path, [callback, kept], max_steps=7)
    run.fit(Trained(), loader(40), loader(8))
    series = kept.series()
    assert list(series["activation/head/rms"]) == [0, 2, 4, 6]
    mean_gain = series["gradient_flow/_summary_/mean_gain"]
    assert list(mean_gain) == [0, 3, 6]
    assert float(run.callback_metrics["gradient_flow/_summary_/mean_gain"]) == pytest.approx(mean_gain[6], rel=1e-6)
