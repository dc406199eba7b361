"""Checks before the first batch: runs that cannot be monitored, and patterns that cannot match any key."""

from __future__ import annotations

import difflib
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.detectors import BUILT_IN
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import KINDS, OWN_KIND, ROLL_UP_SITES, STAGES, TRAIN
from lightning_module_monitor.lightning_packages import LightningModule, Trainer, is_a, is_overridden, messages
from lightning_module_monitor.model.compiled import UNCOMPILED, compiled_parts
from lightning_module_monitor.model.names import ROOT, ModelIndex, unwrapped_class, without_wrappers
from lightning_module_monitor.plan.planner import Planner
from lightning_module_monitor.plan.recipe import Recipe
from lightning_module_monitor.probes.base import ErrorReporter
from lightning_module_monitor.probes.rcc_layers import layer_parts
from lightning_module_monitor.record import Record
from lightning_module_monitor.suggestions import nearest, nearest_pattern, or_examples, unmatched
from lightning_module_monitor.trainer.options import Options


def check_compiled(pl_module: LightningModule, options: Options, reporter: ErrorReporter) -> None:
    """Under ``compiled: uncompiled`` log that monitored steps run a compiled model uncompiled; refuse it where that is not possible."""
    parts = compiled_parts(pl_module)
    compiled = [without_wrappers(name).replace(ROOT, "The model") for name in parts.names if parts.inside]
    if not compiled or options.arguments["compiled"] != UNCOMPILED:
        return
    if options.health.is_at_every_step:
        expected = "expected compiled: keep, or health: {nonfinite: warn}, which looks at monitored steps, when it runs uncompiled"
        raise ConfigError(
            f"health.nonfinite looks at every step, and {compiled[0]} is compiled, and hooks do not run in compiled modules; {expected}."
        )
    if not hasattr(torch.compiler, "set_stance"):
        reason = f"torch {torch.__version__} cannot run it uncompiled in monitored steps"
        raise ConfigError(f"{compiled[0]} is compiled, and {reason}; expected torch 2.6 or later, or compiled: keep.")
    consequence = "monitored steps run it uncompiled, with the time and the memory that this takes"
    reporter.log_once(f"{compiled[0]} is compiled: {consequence}. compiled: keep leaves it compiled, and observes what is outside of it.")


def check_manual_optimization(pl_module: LightningModule, recipe: Recipe, reference: str) -> None:
    """Under manual optimization refuse a reference (the option's name, or empty) that runs itself, and gradients before clipping."""
    if pl_module.automatic_optimization:
        return
    model = type(pl_module).__name__
    if reference:
        reason = f"{model} uses manual optimization, and a reference cannot run its training_step"
        remedy = f"module, the name of a submodule that training_step calls: a copy of that submodule then runs. Or leave {reference} out"
        raise ConfigError(f"{reference} is given; {reason}. Expected {remedy}.")
    rule = recipe.first_with("gradient_before_clip", but_not="gradient")
    if rule is not None:
        reason = f"{model} uses manual optimization, and when it clips, if it does, is not known"
        raise ConfigError(f"{rule}: {reason}; expected 'gradient', what the optimizer uses.")


def check_monitored_keys(trainer: Trainer, keys: Collection[str], patterns: Sequence[re.Pattern[str]], reporter: ErrorReporter) -> None:
    """Warn of callbacks whose planned keys ``callback_metrics`` does not give them; refuse EarlyStopping that would end the run."""
    for callback in trainer.callbacks:  # type: ignore[union-attr]  # set by a connector, where mypy does not look
        key = getattr(callback, "monitor", None)
        if not isinstance(key, str) or key not in keys or any(pattern.fullmatch(key) for pattern in patterns):
            continue
        problem = f"{type(callback).__name__} monitors {key!r}, and callback_metrics does not match it"
        message = f"{problem}; expected callback_metrics: [{key!r}] among the options of ModuleMonitorCallback."
        if is_a(callback, "EarlyStopping") and callback.strict:
            raise ConfigError(message)
        reporter.log_once(message, logging.WARNING)


def check_keys(planner: Planner, pattern: re.Pattern[str], label: str, keys: Sequence[str], histograms: Sequence[str]) -> bool:
    """Refuse the pattern of an option (``label``) that can match no key; return whether it matches a planned key of a number (``keys``)."""
    if any(pattern.fullmatch(key) for key in keys):
        return True
    streams = [stream for watched in planner.plan_inside().modules for stream in watched.all_streams()]
    inside = [stream.site for stream in streams if any(map(pattern.fullmatch, stream.number_keys))]
    if inside:
        raise planner.index.refusal(f"{label} {pattern.pattern!r}", inside)
    text = pattern.pattern
    problem = f"{label} {text!r} matches"
    histogram = next((key for key in histograms if pattern.fullmatch(key)), None)
    if histogram is not None:
        raise ConfigError(f"{problem} {histogram!r}, a histogram; expected keys of numbers{nearest(text, keys)}")
    roll_up = next((site for site in ROLL_UP_SITES if site in text), None)
    if roll_up is not None:
        expected = f"expected the keys themselves, e.g. {text.replace(roll_up, '.*')!r}"
        raise ConfigError(
            f"{problem} no key that is recorded: the site {roll_up} is made for loggers, where there are many keys; {expected}"
        )
    if not _may_come(planner, text):
        raise ConfigError(f"{problem} none of the {len(keys)} keys{or_examples(nearest_pattern(text, keys), keys)}")
    return False


def check_validation(trainer: Trainer, pl_module: LightningModule, reporter: ErrorReporter) -> None:
    """Warn of a fit without the validation loop that ``stages`` names."""
    every, max_epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    if not is_overridden(pl_module, "validation_step"):
        own_methods = [name for name in vars(type(pl_module)) if not hasattr(LightningModule, name)]
        reason = f"{type(pl_module).__name__} has no validation_step{nearest('validation_step', own_methods).removesuffix('.')}"
    elif trainer.limit_val_batches == 0:
        reason = "limit_val_batches is 0"
    elif not trainer.enable_validation:
        reason = "it has no dataloader for validation"
    elif every is not None and max_epochs is not None and 0 <= max_epochs < every:
        reason = f"check_val_every_n_epoch is {every}, and max_epochs is {max_epochs}"
    else:
        return
    message = f"stages has 'validate', and this fit runs no validation loop: {reason}. Nothing is recorded under validation/."
    reporter.log_once(message, logging.WARNING)


def check_detectors(planner: Planner, names: Collection[str], record: Record, reporter: ErrorReporter) -> None:
    """Warn of detectors that the user named, and that have nothing to judge: neither planned keys nor keys of the first record."""
    keys = [Key.parse(key) for key in (*planner.planned_keys(), *record.values)]
    types = {unwrapped_class(site.module).__name__ for site in planner.index.whole.modules}
    compiled_types = types - {unwrapped_class(site.module).__name__ for site in planner.index.modules}
    for detector in map(BUILT_IN.__getitem__, names):
        if detector.is_always_recorded or any(map(detector.concerns, keys)):
            continue
        if not compiled_types.isdisjoint(detector.types):
            continue  # the line about compiled code names it
        if detector.types and types.isdisjoint(detector.types):
            wanted = " or ".join(filter(None, (", ".join(detector.types[:-1]), detector.types[-1])))
            reason = f"the model has no {wanted}."
        else:
            reason = f"{detector.without}."
        reporter.log_once(f"health.watch {detector.name!r} has nothing to judge: {reason}", logging.WARNING)


def check_coordinate_check(index: ModelIndex, reporter: ErrorReporter) -> None:
    """Check that the model has a layer that the coordinate check knows."""
    if any(layer_parts(site.module) for site in index.modules):
        return
    inside = [site.name for site in index.whole.modules if layer_parts(site.module)]
    if inside:
        raise index.refusal("rcc", inside)
    layer = "a layer that the coordinate check knows (Linear, convolution, embedding, normalization)"
    reporter.log_once(f"rcc: none of the {len(index.modules)} modules is {layer}; nothing of it is recorded.")


AwaitedKeys = dict[tuple[str, re.Pattern[str]], bool]
"""Whether a pattern without a planned key was compared with the first record of a run, by the option's label and pattern."""


def check_awaited(awaited: AwaitedKeys, record: Record) -> None:
    """Warn of patterns that match no key of the first record either, e.g. because of a typo; in one line for each option."""
    without_match: defaultdict[str, list[str]] = defaultdict(list)
    for label, pattern in [option for option, was_compared in awaited.items() if not was_compared]:
        awaited[label, pattern] = True
        if is_first_process() and not any(map(pattern.fullmatch, record.values)):
            without_match[label].append(pattern.pattern)
    for label, patterns in without_match.items():
        wrong = unmatched(patterns, [*record.values], "keys of the first record").removesuffix(".")
        messages.warning("%s %s. Later records may have such keys.", label, wrong)


def _may_come(planner: Planner, pattern: str) -> bool:
    """Whether a pattern without a planned key may match a later key: of a further output, a head, a part of a dict, or a logged value."""
    start = f"{planner.recipe.prefix}/" if planner.recipe.prefix else ""
    stage, *rest = pattern.removeprefix(start).split("/", 1)
    kind, *_more = rest[0].split("/") if stage in STAGES and rest else [stage]
    is_plain = re.fullmatch(r"\w+", kind) is not None and pattern.startswith(start)
    known_kinds = (*KINDS, OWN_KIND, *STAGES)
    if is_plain and kind not in known_kinds:
        return not difflib.get_close_matches(kind, known_kinds, n=1, cutoff=0.75)
    planned = planner.planned_keys((TRAIN, *STAGES))
    for addition in (r"\\?\.output_[\w.-]+", r"\\?\.[\w-]+$"):  # to a site, or to the name of a statistic
        shorter = re.sub(addition, "", pattern)
        if shorter != pattern and any(re.fullmatch(shorter, key) for key in planned):
            return True
    return not planner.plan().knows_all_keys(kind if is_plain else "")


def makes_layers_late(pl_module: LightningModule) -> bool:
    """Whether the module may create layers after the ``setup`` of the callbacks."""
    return any(is_overridden(pl_module, hook) for hook in ("setup", "configure_model"))
