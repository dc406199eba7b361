"""The ways to train that are compared: without a monitor, with ours, with the floor, and with the peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import in_trainer
import observers
from lanes import Lane, LoopLane, Parts, TrainerLane
from lightning_module_monitor.statistics import registry
from workloads import WORKLOADS, Workload

PLAIN, IDLE, OURS, EAGER, FLOOR = "plain", "idle", "ours", "ours, eager", "floor"
REFERENCE, RCC = "reference forward", "reference + RCC"
NOISE, QUANTILES, FORMATS, PEAKS, OUTLIERS = "gradient noise", "quantiles", "formats", "peak to rms", "outlier channels"
SPECTRA, RANKS = "singular values", "effective rank"
TRAINER, CALLBACK, LOGGED = "Trainer", "callback + store", "callback + store + TensorBoard"
PEER, PEER_IN_TRAINER = "torch-module-monitor", "torch-module-monitor in a Trainer"
DEFAULTS, DEFAULTS_IDLE = "default callback, monitored step", "default callback, other steps"

ALL, FIRST = tuple(WORKLOADS), ("W1",)

TIMED = (OURS, FLOOR, PEER, CALLBACK, DEFAULTS, DEFAULTS_IDLE)
"""Variants whose own calls are timed as well: they work only in forward hooks and between the parts of a step."""


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    note: str
    start: Callable[[Workload, str, torch.device], Lane]
    """Makes the lane from a workload, a precision and a device."""
    package: str = ""
    """Import name of the peer that is needed, if any; its distribution has the same name with dashes."""
    workloads: tuple[str, ...] = ALL
    """The workloads on which it is measured."""
    base: str = PLAIN
    """The variant without a monitor that it is compared with."""

    @property
    def is_installed(self) -> bool:
        """Whether the peer that is needed, if any, is there."""
        return not self.package or importlib.util.find_spec(self.package) is not None


def in_loop(
    name: str,
    note: str,
    attach: Callable[[nn.Module], observers.Observer],
    *,
    package: str = "",
    workloads: tuple[str, ...] = ALL,
) -> Variant:
    """A variant in a plain training loop."""
    return Variant(name, note, partial(LoopLane, attach), package, workloads)


def in_lightning(name: str, note: str, make_parts: Callable[[Path], Parts], package: str = "", workloads: tuple[str, ...] = ALL) -> Variant:
    """A variant in Lightning's Trainer."""
    return Variant(name, note, partial(TrainerLane, make_parts), package, workloads, base=TRAINER)


VARIANTS = (
    in_lightning(TRAINER, "no monitor, no logger", in_trainer.nothing),
    in_lightning(CALLBACK, "seven statistics at every step, into monitor.h5", in_trainer.callback),
    in_lightning(LOGGED, "the same; the logger gets minimum, median and maximum over the sites", in_trainer.callback_logged),
    in_lightning(PEER_IN_TRAINER, "the same seven statistics, kept nowhere", in_trainer.peer, "torch_module_monitor"),
    in_lightning(DEFAULTS, "default rules at every step, store, TensorBoard", partial(in_trainer.defaults_logged, every_n_steps=1)),
    in_lightning(DEFAULTS_IDLE, "the same at no step", partial(in_trainer.defaults_logged, every_n_steps=in_trainer.NEVER)),
    in_loop(PLAIN, "no monitor", lambda _model: observers.Observer()),
    in_loop(IDLE, "our engine, at steps that are not monitored", partial(observers.Engine, every_n_steps=in_trainer.NEVER)),
    in_loop(OURS, "our engine, seven statistics, finished on the host", partial(observers.Engine, every_n_steps=1)),
    in_loop(EAGER, "the same with torch's operations alone", observers.EagerEngine),
    in_loop(FLOOR, "one norm of each tensor", observers.Floor),
    in_loop(REFERENCE, "the forward pass of a reference, alone", observers.ReferenceForward, workloads=FIRST),
    in_loop(RCC, "reference and refined coordinate check, all terms and norms", observers.CoordinateCheck, workloads=FIRST),
    in_loop(NOISE, "gradient noise of the whole model; one micro-batch a step", observers.WatchedNoise, workloads=FIRST),
    in_loop(
        QUANTILES,
        "seven quantiles of activations, parameters and gradients",
        partial(observers.Statistics, kinds=observers.KINDS, statistics=[*registry.QUANTILES]),
        workloads=("W1", "W2"),
    ),
    in_loop(
        FORMATS,
        "underflow, overflow and scaled underflow of four formats, and the dynamic range, of activations, parameters and gradients",
        partial(
            observers.Statistics,
            kinds=observers.KINDS,
            statistics=[name for name in registry.STATISTICS if "flow_" in name or "range" in name],
        ),
        workloads=("W1", "W2"),
    ),
    in_loop(
        PEAKS,
        "largest magnitude over rms of activations, parameters and gradients",
        partial(observers.Statistics, kinds=observers.KINDS, statistics=["peak_to_rms"]),
        workloads=("W1", "W2"),
    ),
    in_loop(
        OUTLIERS,
        "outlier channels of activations",
        partial(observers.Statistics, kinds=["activation"], statistics=["outlier_channels"]),
        workloads=("W1", "W2"),
    ),
    in_loop(
        SPECTRA,
        "spectral norm and stable rank of all parameters, by 40 steps of bidiagonalization",
        partial(observers.Statistics, kinds=["parameter"], statistics=["spectral_norm", "stable_rank"]),
        workloads=("W1", "W2"),
    ),
    in_loop(
        RANKS,
        "effective rank of all activations: products of features, and eigenvalues on the host",
        partial(observers.Statistics, kinds=["activation"], statistics=["effective_rank"]),
        workloads=("W2",),
    ),
    in_loop(PEER, "the same seven statistics", observers.TorchModuleMonitor, package="torch_module_monitor"),
)


def choose_variants(skip_peers: bool, only: Sequence[str] | None = None) -> list[Variant]:
    """The variants that can be measured here; prints which cannot, and why.

    Args:
        skip_peers: Whether to leave the peers out.
        only: Names of variants; those that they are compared with are added.
    """
    names = {variant.name for variant in VARIANTS}
    if only is not None:
        names = {PLAIN, *only, *(variant.base for variant in VARIANTS if variant.name in only)}
    chosen = []
    for variant in VARIANTS:
        if variant.name not in names:
            continue
        if variant.package and skip_peers:
            print(f"{variant.name} is skipped: --skip-peers was given.")
        elif not variant.is_installed:
            print(f"{variant.name} is skipped: it is not installed; pip install {variant.package.replace('_', '-')}")
        else:
            chosen.append(variant)
    return chosen
