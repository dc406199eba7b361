"""The options of health and alerts, as dataclasses that YAML can hold, and their check."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from lightning_module_monitor.config.plain import PlainFields, any_hints
from lightning_module_monitor.config.rules import Rule, as_tuple, check_choice, options_of, parse_patterns
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.alerts import ACTIONS, Action, AlertRule, matching
from lightning_module_monitor.health.detectors import BUILT_IN
from lightning_module_monitor.statistics.registry import saturated_sigmoid, saturated_softmax, saturated_tanh

WARN, ALWAYS, STOP, IGNORE = "warn", "always", "stop", "ignore"
NONFINITE = (WARN, ALWAYS, STOP, IGNORE)
"""Values of ``nonfinite``."""

ALL = "all"
CHEAP = tuple(name for name, one in BUILT_IN.items() if one.is_by_default)
"""The watches that record their values beside the default rules: attention and updates cost more."""

WATCH = (ALL, *BUILT_IN)
"""Values of ``watch``."""

EXAMPLE = "{keys: gradient/.*/norm, above: 100}"


@any_hints
@dataclass(frozen=True, kw_only=True)
class Health(PlainFields):
    """Which signs of ill health are looked for, beside the alerts.

    Attributes:
        nonfinite: Where the first NaN or infinity is looked for. ``warn``: in monitored steps, and lightly in all others. ``always``: in
            every step. ``stop``: in every step, and it ends training by an error before the optimizer uses it. ``ignore``: nowhere.
        watch: Names of detectors, e.g. ``entropy_collapse``, or ``all``: what they need is recorded in addition. All detectors judge
            whatever is recorded. ``[]``: none does.
        then: What follows a finding of a watch, beside the message: ``stop``, ``checkpoint``, ``capture``; one or several.
        capture_steps: For how many steps ``capture``, of watches and alerts, raises detail.
    """

    nonfinite: str = WARN
    watch: str | Sequence[str] | None = None
    then: str | Sequence[str] = "warn"
    capture_steps: int = 5


@any_hints
@dataclass(frozen=True, kw_only=True)
class Alert(PlainFields):
    """A rule on recorded values: their limits, and what follows when they leave them.

    Attributes:
        keys: Pattern or patterns (``re.fullmatch``) of keys; each key is judged by itself. Required.
        above: Fires where a value is larger than this.
        below: Fires where a value is smaller than this.
        relative_to_median: Whether the two are multiples of the median of the key's own last 50 values, once there are 10.
        for_steps: In how many consecutive records the condition has to be met.
        then: What follows, beside the message: ``stop`` (after this step), ``checkpoint``, ``capture`` (every statistic and the raw tensors
            of the site, for the next steps); one or several.
        name: Its name in findings; default: the first pattern.
    """

    keys: str | Sequence[str] = ""
    above: float | None = None
    below: float | None = None
    relative_to_median: bool = False
    for_steps: int = 1
    then: str | Sequence[str] = "warn"
    name: str = ""


@dataclass(frozen=True)
class ParsedHealth:
    """The checked options."""

    nonfinite: str
    recorded: tuple[str, ...]
    """The detectors that record the values they need."""
    is_off: bool
    """Whether no detector judges."""
    then: tuple[Action, ...]
    """What follows a finding of a detector."""
    alerts: tuple[AlertRule, ...]
    """The user's alerts."""
    patterns: tuple[tuple[str, re.Pattern[str]], ...]
    """Patterns of the user's alerts, each with its name in messages."""
    capture_steps: int

    @property
    def watched(self) -> tuple[str, ...]:
        """The detectors for which values are recorded, with ``nonfinite`` if training searches for non-finite values."""
        return (*(["nonfinite"] if self.nonfinite != IGNORE else []), *self.recorded)

    @property
    def is_at_every_step(self) -> bool:
        """Whether non-finite values are looked for also in steps that are not monitored."""
        return self.nonfinite in (ALWAYS, STOP)

    @property
    def rules(self) -> tuple[AlertRule, ...]:
        """The user's alerts, and the detectors as rules."""
        detectors = () if self.is_off else BUILT_IN.values()
        return (*self.alerts, *(detector.alert(self.then) for detector in detectors if detector.rule is not None))

    @property
    def may_capture(self) -> bool:
        """Whether an alert or detector captures raw tensors."""
        return any("capture" in rule.then for rule in self.rules)


def parse_health(health: object, alerts: Sequence[object], *, has_default_rules: bool) -> ParsedHealth:
    """Check the options. Where the user gave no rules (``has_default_rules``), the watches record what they need, if that is cheap.

    Raises:
        ConfigError: If a value is wrong.
    """
    if health is None or isinstance(health, bool):
        health = Health() if health is not False else Health(nonfinite=IGNORE, watch=[])
    health = options_of(Health, health, "health", "{nonfinite: always}")
    check_choice(health.nonfinite, NONFINITE, f"health.nonfinite is {health.nonfinite!r}")
    watches = as_tuple(health.watch)
    for watch in watches:
        check_choice(watch, WATCH, f"health.watch {watch!r} is not a watch")
    named = tuple(BUILT_IN) if ALL in watches else watches
    is_off = health.watch is not None and not watches
    recorded = () if is_off else tuple(dict.fromkeys((*(CHEAP if has_default_rules else ()), *named)))
    then = _parse_actions(health.then, "health.then")
    by_label = {f"alerts[{number}]": alert for number, alert in enumerate(as_tuple(alerts))}
    parsed = {label: options_of(Alert, alert, label, EXAMPLE) for label, alert in by_label.items()}
    of_user = [_parse_alert(alert, label) for label, alert in parsed.items()]
    patterns = [(f"{label}.keys", one) for label, alert in parsed.items() for one in parse_patterns(alert.keys, f"{label}.keys")]
    capture_steps = _parse_count(health.capture_steps, "health.capture_steps")
    return ParsedHealth(health.nonfinite, recorded, is_off, then, tuple(of_user), tuple(patterns), capture_steps)


def watch_rules(watches: Sequence[str]) -> list[Rule]:
    """The rules that record the values of built-in watches, where the model has them."""
    rules = {
        "dead_units": [Rule(kinds="activation", types=[nn.ReLU, nn.ReLU6], statistics="dead_fraction")],
        "saturation": [
            Rule(kinds="activation", types=one, functions={"saturated_fraction": function})
            for one, function in ((nn.Sigmoid, saturated_sigmoid), (nn.Tanh, saturated_tanh), (nn.Softmax, saturated_softmax))
        ],
        "vanishing": [Rule(kinds="gradient", sites=".*weight.*", statistics="rms")],
        "exploding": [Rule(kinds=["parameter", "gradient"], statistics="norm")],
        "growing_over_depth": [Rule(kinds="activation", leaf_modules=True, statistics="rms")],
        "entropy_collapse": [Rule(kinds="attention_relative_entropy", statistics="mean")],
        "large_logits": [Rule(kinds="attention_max_logit", statistics="max")],
        "large_updates": [Rule(kinds="update", sites=".*weight.*", statistics="ratio")],
    }
    same = {
        "growing_weights": "exploding",
        "shrinking_weights": "exploding",
        "frozen_updates": "exploding",
        "no_optimizer": "exploding",
        "zero_gradients": "exploding",
        "gradient_spike": "exploding",
        "tiny_updates": "large_updates",
        "growing_activations": "growing_over_depth",
        "zero_outputs": "growing_over_depth",
    }
    return [rule for name in dict.fromkeys(same.get(watch, watch) for watch in watches) for rule in rules.get(name, ())]


def _parse_alert(alert: Alert, label: str) -> AlertRule:
    patterns = parse_patterns(alert.keys or (), f"{label}.keys")
    if not patterns:
        raise ConfigError(f"{label}.keys is empty; expected at least one pattern, e.g. 'gradient/.*/norm'.")
    limits = {"above": alert.above, "below": alert.below}
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit)):
            raise ConfigError(f"{label}.{name} is {limit!r}; expected a finite number.")
        if limit is not None and limit < 0 and alert.relative_to_median is True:
            raise ConfigError(f"{label}.{name} is {limit}, and relative_to_median is true; expected a multiple, at least 0.")
    if all(limit is None for limit in limits.values()):
        raise ConfigError(f"{label} has no limit; expected above or below, e.g. above: 100.")
    if alert.above is not None and alert.below is not None and alert.below > alert.above:
        why = "every value is above the one or below the other"
        raise ConfigError(f"{label}.above is {alert.above}, and below is {alert.below}: {why}; expected below to be the smaller one.")
    if not isinstance(alert.relative_to_median, bool):
        raise ConfigError(f"{label}.relative_to_median is {alert.relative_to_median!r}; expected true or false.")
    return AlertRule(
        name=str(alert.name or patterns[0].pattern),
        concerns=matching(patterns),
        above=alert.above,
        below=alert.below,
        relative_to="median" if alert.relative_to_median else "",
        for_steps=_parse_count(alert.for_steps, f"{label}.for_steps"),
        then=_parse_actions(alert.then, f"{label}.then"),
    )


def _parse_count(value: object, label: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{label} is {value!r}; expected a whole number >= 1.")
    return value


def _parse_actions(then: object, label: str) -> tuple[Action, ...]:
    actions = as_tuple(then)
    for action in actions:
        check_choice(action, ACTIONS, f"{label} {action!r} is unknown")
    return cast("tuple[Action, ...]", actions)
