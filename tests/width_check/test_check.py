"""Width checks of real trainings: published exponents, an independent float64 computation, nothing left behind, wrong networks."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from helpers.lightning_package import NAME, Callback, LightningModule, ModelCheckpoint, Trainer
from helpers.plain_rcc import PlainCoordinateCheck
from helpers.training import seed
from helpers.widths import CLASSES, IN_FEATURES, Gaussian, MicrosoftMlp, WideMlp, gaussian_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import WidthCheck, coordinate_check
from lightning_module_monitor.errors import ConfigError, MonitorError
from lightning_module_monitor.width_check.expectations import TERMS

SMALL = [16, 32, 64]


def check(
    make_module: Callable[[int], LightningModule] = WideMlp, widths: list[int] = SMALL, data: Any = None, **options: Any
) -> WidthCheck:
    """A check without output, of two seeds."""
    return coordinate_check(make_module, widths, data, **{"seeds": 2, "quiet": True} | options)


@pytest.mark.parametrize(
    ("parametrization", "optimizer", "effective", "propagating"),
    [
        ("sp", "sgd", (-0.5, 0.5, 1.0), (-0.5, 1.0)),
        ("sp", "adam", (-1.0, 0.0, 0.0), (-1.0, 0.5)),
        ("mup", "sgd", (0.0, 0.0, 0.0), (0.0, 0.0)),
        ("mup", "adam", (0.0, 0.0, 0.0), (0.0, 0.0)),
    ],
)
def test_published_exponents(
    parametrization: Literal["sp", "mup"],
    optimizer: Literal["sgd", "adam"],
    effective: tuple[float, ...],
    propagating: tuple[float, ...],
) -> None:
    """ArXiv 2505.22491 and 2203.03466: (input, hidden, output) and (hidden, output); alignments do not depend on the width."""

    class OneBatch(WideMlp):
        def train_dataloader(self) -> DataLoader[Any]:
            # Of the seed, and the same in both steps.
            return DataLoader(TensorDataset(torch.randn(64, IN_FEATURES), torch.randint(CLASSES, (64,))), 64)

    rows = check(lambda width: OneBatch(width, parametrization, optimizer), [128, 256, 512, 1024], seeds=4, terms=list(TERMS))
    layers = ("net.0", "net.2", "net.4")
    assert [rows[name, "effective_update"].exponent for name in layers] == pytest.approx(effective, abs=0.25)
    assert [rows[name, "propagating_update"].exponent for name in layers[1:]] == pytest.approx(propagating, abs=0.25)
    assert (rows["net.0", "propagating_update"].exponent, rows["net.0", "propagating_update"].verdict) == (-math.inf, "ok")
    alignments = [row for row in rows if row.term.endswith("alignment")]
    assert len(alignments) == 5
    for row in alignments:
        assert abs(row.exponent) < 0.1, row
    assert {row.expected for row in rows} == {0.0}
    assert rows.is_sound == (parametrization == "mup")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_network_of_the_package_mup_is_sound(optimizer: Literal["sgd", "adam"]) -> None:
    """Its parameters carry their shapes as attributes, which its readout and optimizers read: all exponents are 0."""
    rows = check(lambda width: MicrosoftMlp(width, optimizer), [64, 128, 256, 512], seeds=3, terms=list(TERMS))
    assert {row.module for row in rows} == {"net.0", "net.2", "net.4"}
    changing = [row for row in rows if (row.module, row.term) not in [("net.0", "propagating_update"), ("net.0", "propagating_alignment")]]
    assert [row.exponent for row in changing] == pytest.approx([0.0] * len(changing), abs=0.25)
    assert {row.expected for row in changing} == {0.0}
    assert rows.is_sound


def test_the_standard_parametrization_offends_against_mup() -> None:
    """Layers that grow or vanish are named, the worst first."""
    rows = check(lambda width: WideMlp(width, "sp", "adam", 1e-4), [64, 256, 1024], seeds=4, tolerance=0.3)
    assert [rows[name, "effective_update"].verdict for name in ("net.0", "net.2", "net.4")] == ["vanishes", "ok", "ok"]
    assert rows["net.2", "propagating_update"].verdict == "vanishes"
    assert rows.offending[:2] in (("net.0", "net.2"), ("net.2", "net.0"))  # an order of the width both


@pytest.mark.parametrize("steps", [1, 3])
def test_values_are_those_of_an_independent_computation(steps: int) -> None:
    """The same trainings by hand, with the terms in float64 by the formula."""
    rows = check(widths=[16, 32], seeds=[3, 5], steps=steps, terms=list(TERMS))
    for column, width in enumerate((16, 32)):
        for row, number in enumerate((3, 5)):
            torch.manual_seed(number)
            module, truth = WideMlp(width), PlainCoordinateCheck(steps)
            torch.manual_seed(number)
            Trainer(
                accelerator="cpu", max_steps=steps + 1, callbacks=[truth], logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            ).fit(module)  # fmt: skip
            assert truth.last_record is not None
            for name in ("net.0", "net.2", "net.4"):
                for term in ("effective_update", "propagating_update"):
                    expected = truth.last_record.values[TERMS[term].format(name)]
                    assert rows[name, term].values[column, row] == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random states, the loader's generator, the datamodule's trainer, the log level, the environment, files: as before."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(3)
    loader, datamodule = gaussian_batches(4, generator=generator), Gaussian()
    level, environment = logging.getLogger(NAME).level, dict(os.environ)
    seed()
    expected = [torch.rand(1).item(), np.random.rand(), random.random()]
    drawn = generator.get_state()
    seed()
    check(data=loader, steps=2)
    check(data=datamodule)
    assert [torch.rand(1).item(), np.random.rand(), random.random()] == expected
    assert torch.equal(generator.get_state(), drawn)
    assert datamodule.trainer is None
    assert logging.getLogger(NAME).level == level
    assert dict(os.environ) == environment
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_fails_leaves_nothing_behind() -> None:
    """The user's error comes through, and random states and the log level are as before."""

    class Fails(WideMlp):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise ZeroDivisionError("of the user's own")

    seed()
    expected = torch.rand(1).item()
    seed()
    level = logging.getLogger(NAME).level
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        check(Fails)
    assert torch.rand(1).item() == expected
    assert logging.getLogger(NAME).level == level


def test_every_width_has_the_same_batches() -> None:
    """With torch's default generator, however many numbers the network has drawn, and with a generator of the loader."""
    sums: list[float] = []

    class SumsBatches(WideMlp):
        def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
            sums.append(batch[0].sum().item())

    for generator in (None, torch.Generator().manual_seed(3)):
        sums.clear()
        check(SumsBatches, data=gaussian_batches(4, generator=generator), seeds=1)
        assert len(sums) == 3 * 2
        assert sums[:2] == sums[2:4] == sums[4:]
        assert sums[0] != sums[1]


def test_callbacks_and_files_of_the_module_are_left_out(tmp_path: Path) -> None:
    """Callbacks that the module configures do not run, and no checkpoint is written."""
    ran: list[str] = []

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            ran.append("callback")

    class Configures(WideMlp):
        def configure_callbacks(self) -> list[Callback]:
            return [Notes(), ModelCheckpoint(tmp_path, every_n_train_steps=1)]

    assert check(Configures).rows
    assert ran == []
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_printed_by_print_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The check shows a bar of all trainings on stderr, unless it is quiet, and prints nothing itself."""
    rows = check(quiet=False)
    printed = capsys.readouterr()
    assert "0/6" in printed.err
    assert "width 64, seed 1" in printed.err
    assert printed.out == ""
    print(rows)
    assert capsys.readouterr().out.count("Exponents of width against mup: widths 16, 32, 64; 2 seeds, 1 step") == 1
    check()
    assert capsys.readouterr() == ("", "")


def test_data_from_everywhere() -> None:
    """A loader, a datamodule, the module's own, a list of batches: the same batches, the same values."""
    by_module, by_loader, by_datamodule = (check(data=data, steps=2) for data in (None, gaussian_batches(), Gaussian()))
    fixed = DataLoader(gaussian_batches().dataset, batch_size=64)
    by_fixed_loader, by_list = (check(data=data, steps=3) for data in (fixed, [tuple(batch) for batch in fixed]))
    for row in by_fixed_loader:
        np.testing.assert_array_equal(by_list[row.module, row.term].values, row.values)
    for row in by_module:
        np.testing.assert_array_equal(by_loader[row.module, row.term].values, row.values)
        np.testing.assert_array_equal(by_datamodule[row.module, row.term].values, row.values)


def test_a_list_of_loaders_stays_one() -> None:
    """A Trainer takes a batch of each of them at a time."""

    class TwoLoaders(WideMlp):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0], 0) + super().training_step(batch[1], 0)

    assert check(TwoLoaders, data=[gaussian_batches(), gaussian_batches()], seeds=1).rows


def test_options_reach_the_trainer() -> None:
    """In float64 the values differ."""
    single, double = check(widths=[16, 32]), check(widths=[16, 32], trainer={"precision": "64-true"})
    assert not (single["net.2", "effective_update"].values == double["net.2", "effective_update"].values).any()


def test_a_frozen_layer_has_no_effective_update() -> None:
    """Exactly zero is expected of it; what it passes on is not zero."""

    class Frozen(WideMlp):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.net[2].requires_grad_(False)
            return torch.optim.SGD([self.net[0].weight, self.net[4].weight], lr=0.1)

    rows = check(Frozen)
    assert (rows["net.2", "effective_update"].expected, rows["net.2", "effective_update"].verdict) == (-math.inf, "ok")
    assert math.isfinite(rows["net.4", "propagating_update"].exponent)


def test_nan_is_named() -> None:
    """A width with NaN offends; the other widths are not fitted without it."""

    class Breaks(WideMlp):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (math.nan if self.net[2].in_features == 64 else 1)

    rows = check(Breaks)
    assert set(rows.offending) == {"net.0", "net.2", "net.4"}
    assert rows["net.0", "effective_update"].note == "not finite at width 64"
    assert rows["net.0", "effective_update"].verdict == "nonfinite"


def test_exponents_by_pattern() -> None:
    """Named terms are compared, the rest is open."""
    exponents = {"net.4": {"effective_update": 1.0}}
    rows = check(lambda width: WideMlp(width, learning_rate=1e-2), [64, 256, 1024], seeds=4, tolerance=0.5, parametrization=exponents)
    assert rows["net.4", "effective_update"].verdict == "ok"
    assert {row.verdict for row in rows if (row.module, row.term) != ("net.4", "effective_update")} == {"unclear"}


def deeper(width: int) -> LightningModule:
    """A module with a layer more where it is wide."""
    module = WideMlp(width)
    if width > 16:
        module.net.append(nn.BatchNorm1d(CLASSES))
    return module


class Skips(WideMlp):
    """Has a layer that only narrow networks use."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x) if self.ratio < 0.2 else self.net[4](self.net[0](x))
        return logits


class OneShot:
    """Batches that can be read once, of an object that does not say so."""

    def __init__(self) -> None:
        self.batches = iter(gaussian_batches(5))

    def __iter__(self) -> Any:
        return self.batches


class Manual(WideMlp):
    """Steps its optimizer itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.automatic_optimization = False


class Idle(WideMlp):
    """Runs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        return None


@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
@pytest.mark.parametrize(
    ("make_module", "options", "message"),
    [
        (deeper, {}, "The layer 'net.5' exists at width 32 and not at width 16; expected networks of the same layers"),
        (Skips, {}, "The value 'rcc_effective_update/net.2/rms' exists at width 16 and not at width 32"),
        (lambda _width: WideMlp(16), {}, "Every parameter has the same shape at widths 16 and 64; expected make_module to use the width"),
        (lambda width: nn.Linear(IN_FEATURES, width), {}, r"make_module\(16\) returned a Linear; expected a LightningModule"),
        (WideMlp(16), {"widths": [16]}, "widths is .* expected at least two"),
        ("WideMlp", {}, "make_module is 'WideMlp'; expected a function"),
        (WideMlp, {"data": iter(gaussian_batches())}, "which can be read once; expected"),
        (WideMlp, {"data": (torch.ones(8, 128), torch.ones(8))}, r"data is a tuple of 2 tensors, .* expected batches, e.g. \[\(x, y\)\]"),
        (WideMlp, {"data": OneShot()}, "Training at width 64 ended after 0 steps; expected 2: give more batches, which every training can"),
        (Manual, {}, r"make_module\(16\) returned a module with manual optimization; expected automatic"),
        (Idle, {}, "No layer has run at width 16, seed 0; expected training_step to run"),
        (WideMlp, {"parametrization": {"net.9": 0}}, "parametrization 'net.9' matches none of the 3 modules .*; nearest: 'net"),
    ],
    ids=[
        *("structure", "skipped", "same-width", "no-lightning-module", "one-width", "no-function", "iterator", "pair", "one-shot"),
        *("manual", "idle", "pattern"),
    ],
)
def test_wrong_networks_and_arguments(make_module: Any, options: dict[str, Any], message: str) -> None:
    """The error has the wrong value and the expected one."""
    with pytest.raises(ConfigError, match=message):
        check(make_module, **options)


def test_a_width_that_is_not_used_is_found_before_training() -> None:
    """No batch is run for it, and the random state stays; layers that are made later are checked after their training."""

    class Unlike(WideMlp):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("a batch was run")

    class Later(WideMlp):
        def __init__(self) -> None:
            super().__init__(16)
            del self.net

        def configure_model(self) -> None:
            self.net = WideMlp(16).net

    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="Every parameter has the same shape"):
        check(lambda _width: Unlike(16))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match="Every layer has the same shape"):
        check(lambda _width: Later())


def test_a_reference_that_cannot_run_is_an_error() -> None:
    """Without the reference half of the rows would be missing, and the network would look sound."""

    class AsksForOptimizers(WideMlp):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.optimizers().zero_grad()
            return super().training_step(batch, batch_idx)

    with pytest.raises(MonitorError, match=r"The reference could not run .*cannot use the optimizers"):
        check(AsksForOptimizers)
