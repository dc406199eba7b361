"""The width check: trainings at several widths and seeds, and the rows of the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.lightning_packages import LightningModule
from lightning_module_monitor.width_check.expectations import TERMS, Parametrization, expected_exponents, exponents_by_pattern
from lightning_module_monitor.width_check.layers import over_widths
from lightning_module_monitor.width_check.power_law import Row, judge
from lightning_module_monitor.width_check.report import WidthCheck
from lightning_module_monitor.width_check.settings import DEFAULT_TERMS, Settings
from lightning_module_monitor.width_check.training import Data, Training, as_loader, check_width_is_used, train

Trainings = dict[tuple[int, int], Training]
"""Training by width and seed."""


def coordinate_check(
    make_module: Callable[[int], LightningModule],
    widths: Sequence[int],
    data: Data = None,
    *,
    seeds: int | Sequence[int] = 4,
    steps: int = 1,
    parametrization: Parametrization = "mup",
    terms: str | Sequence[str] = DEFAULT_TERMS,
    tolerance: float = 0.25,
    trainer: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> WidthCheck:
    """Check how the effect of each layer depends on the width of the network.

    The module is trained at every width and seed for a few steps, with the reference at its initialization. For every layer the root mean
    squares of the effective update (the effect of the change of its weights on its output) and of the propagating update (the effect of the
    change of its input) are measured after the last of these steps, and their exponents of width are fitted by least squares over all
    widths and seeds. Random states and the loader's generators are restored afterwards; no logger, store or checkpoint is written, and
    callbacks that the module configures do not run.

    A factor on a layer's output belongs to the layer only if it is applied inside of the layer, or to its input.

    Args:
        make_module: Makes the LightningModule of a width. Called once for each training, under its seed, which is set again
            before training, so that all widths have the same batches; and twice before the first training, to check that it uses the width.
        widths: At least two widths, increasing.
        data: A DataLoader or anything else that ``Trainer.fit`` takes for training; a list of batches, ``[(x, y), ...]``; a datamodule;
            ``None`` for the module's own ``train_dataloader``.
        seeds: Number of seeds (0, 1, ...), or the seeds.
        steps: Number of optimizer steps before the measurement.
        parametrization: The expected exponents. ``mup``: all 0, as in a sound parametrization; layers of a standard parametrization
            grow or vanish against it. Or your own exponents: by pattern (``re.fullmatch``) of module names a number for all terms,
            or numbers by term; ``None`` leaves open.
        terms: Some of ``effective_update``, ``propagating_update``, ``effective_alignment``, ``propagating_alignment``.
        tolerance: Largest accepted distance of an exponent from the expected one. Parametrizations differ by 1/2.
        trainer: Further options of the Trainer, e.g. ``{"precision": "bf16-mixed"}``.
        quiet: Whether to hide the progress bar.

    Returns:
        Rows of exponent, confidence interval of 95 %, expected exponent and verdict for every term of every layer; offending rows first.

    Raises:
        ConfigError: If an option is wrong, the networks differ in more than their width, or a training ends early.
        MonitorError: If a value could not be measured: a table without it would look sound.

    References:
        Haas and others, "On the Surprising Effectiveness of Large Learning Rates under Standard Width Scaling", 2025, arXiv 2505.22491.

    Example::

        check = coordinate_check(lambda width: MyModule(width), [128, 256, 512, 1024], train_loader)
        print(check)
        assert check.is_sound
    """
    settings = Settings.parse(
        widths=widths,
        seeds=seeds,
        steps=steps,
        parametrization=parametrization,
        terms=terms,
        tolerance=tolerance,
        trainer=trainer,
    )
    if not callable(make_module):
        raise ConfigError(f"make_module is {make_module!r}; expected a function from a width to a LightningModule.")
    if isinstance(data, Iterator):
        kind = type(data).__name__
        raise ConfigError(f"data is a {kind}, which can be read once; expected batches that every training can read, e.g. a DataLoader.")
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        raise ConfigError(f"data is a tuple of {len(data)} tensors, each of which would be a batch; expected batches, e.g. [(x, y)].")

    check_width_is_used(make_module, settings)
    data = as_loader(data)
    trainings: Trainings = {}
    with tqdm(total=len(settings.widths) * len(settings.seeds), desc="Coordinate check", disable=quiet, leave=False) as bar:
        for seed in settings.seeds:  # all widths of a seed first: detects networks that cannot be compared early
            for width in settings.widths:
                bar.set_postfix_str(f"width {width}, seed {seed}")
                trainings[width, seed] = train(make_module, data, width, seed, settings)
                _check_comparable(trainings, (width, seed))
                if isinstance(settings.parametrization, Mapping):
                    exponents_by_pattern(settings.parametrization, trainings[width, seed].layers)  # reports a wrong name after one training
                bar.update()
    return WidthCheck(_rows(trainings, settings), settings)


def _rows(trainings: Trainings, settings: Settings) -> list[Row]:
    widths, seeds = settings.widths, settings.seeds
    first = trainings[widths[0], seeds[0]]
    layers = {name: over_widths(widths, [trainings[width, seeds[0]].layers[name] for width in widths]) for name in first.layers}
    if all(layer.role == "fixed" for layer in layers.values()):
        raise ConfigError(f"Every layer has the same shape at widths {widths[0]} and {widths[-1]}; expected make_module to use the width.")
    expected = expected_exponents(settings.parametrization, layers)
    rows = []
    for name, layer in layers.items():
        for site, term in itertools.product(_sites(name, first), settings.terms):
            key = TERMS[term].format(site)
            if key in first.values:  # an embedding has no propagating update; without a change there is no alignment
                values = np.array([[trainings[width, seed].values.get(key, 0.0) for seed in seeds] for width in widths])
                rows.append(judge(site, layer.role, term, values=values, expected=expected.get((name, term)), settings=settings))
    if not rows:
        raise ConfigError(f"No layer has run at width {widths[0]}, seed {seeds[0]}; expected training_step to run the module's layers.")
    return rows


def _check_comparable(trainings: Trainings, latest: tuple[int, int]) -> None:
    """Check that the networks differ in their width only.

    Raises:
        ConfigError: If not; names the first layer that exists at one width only.
    """
    first = next(iter(trainings))
    for (width, seed), (other_width, other_seed) in ((first, latest), (latest, first)):
        training, other = trainings[width, seed], trainings[other_width, other_seed]
        for noun, names, other_names in (("layer", training.layers, other.layers), ("value", _update_keys(training), _update_keys(other))):
            for name in names:
                if name not in other_names:
                    where = f"exists at width {width} and not at width {other_width}"
                    raise ConfigError(f"The {noun} {name!r} {where}; expected networks of the same layers.")


def _update_keys(training: Training) -> list[str]:
    """The keys of the updates. They exist for every layer that ran; alignments are absent where nothing changed."""
    sites = [site for name in training.layers for site in _sites(name, training)]
    keys = [TERMS[term].format(site) for site in sites for term in DEFAULT_TERMS]
    return [key for key in keys if key in training.values]


def _sites(layer: str, training: Training) -> list[str]:
    """The sites of a layer's values: its name and, for attention, those of its projections."""
    projections = [f"{layer}.{name}_proj" for name in "qkv"]
    return [layer, *(site for site in projections if site not in training.layers)]
