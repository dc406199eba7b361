"""The options of health and alerts, as dataclasses that YAML can hold, and their check."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from lightning_module_monitor.config.plain import PlainFields, any_hints
from lightning_module_monitor.config.rules import Rule, as_tuple, check_choice, options_of, parse_count, parse_patterns
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.alerts import ACTIONS, Action, AlertRule, matching, naming
from lightning_module_monitor.health.detectors import BUILT_IN, DETECTORS
from lightning_module_monitor.statistics.registry import saturated_sigmoid, saturated_softmax, saturated_tanh

WARN, ALWAYS, STOP, IGNORE = "warn", "always", "stop", "ignore"
NONFINITE = (WARN, ALWAYS, STOP, IGNORE)
"""Values of ``nonfinite``."""

ALL = "all"
CHEAP = tuple(name for name, detector in BUILT_IN.items() if detector.is_by_default)
"""The detectors whose values are recorded beside the default rules. Values of attention cost more."""

WATCH = (ALL, *BUILT_IN)
"""Values of ``watch``."""

EXAMPLE = "{keys: gradient/.*/norm, above: 100}"


@any_hints
@dataclass(frozen=True, kw_only=True)
class Health(PlainFields):
    """Options of the search for non-finite values and of the detectors.

    Attributes:
        nonfinite: How the first NaN or infinity is searched for. ``warn``: in every step, and without a wait: on an accelerator or several
            ranks its module is named in monitored steps alone. ``always``: its module is named in every step. ``stop``: also, an error
            ends training before the optimizer uses the value. ``ignore``: not at all.
        watch: Names of detectors, e.g. ``large_logits``, or ``all``: the values that they need are recorded in addition. All detectors
            judge all recorded values. ``[]``: no detectors.
        then: Actions after a finding of a detector, besides the message: ``stop``, ``checkpoint``, ``capture``; one or several.
        capture_steps: Number of steps for which ``capture``, of detectors and alerts, raises detail.
    """

    nonfinite: str = WARN
    watch: str | Sequence[str] | None = None
    then: str | Sequence[str] = "warn"
    capture_steps: int = 5


@any_hints
@dataclass(frozen=True, kw_only=True)
class Alert(PlainFields):
    """A rule on recorded values: limits, and actions when a value crosses them.

    Attributes:
        keys: Pattern or patterns (``re.fullmatch``) of keys; each key is judged by itself. Those of ``per_module`` only if a pattern names
            their site: ``gradient/_root_/norm``. Required.
        above: Fires if a value is larger than this limit.
        below: Fires if a value is smaller than this limit.
        relative_to_median: Whether the limits are multiples of the median of the key's last 50 values (at least 10).
        for_steps: Number of consecutive records in which the condition has to be met.
        then: Actions besides the message: ``stop`` (after this step), ``checkpoint``, ``capture`` (every statistic and the raw tensors of
            the site, for the next steps); one or several.
        name: The name of the alert in findings; default: the first pattern.
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
    named: tuple[str, ...]
    """The detectors that the user named one by one."""
    recorded: tuple[str, ...]
    """The detectors that record the values they need."""
    is_off: bool
    """Whether no detector judges."""
    then: tuple[Action, ...]
    """Actions after a finding of a detector."""
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
    """Check the options. With the default rules (``has_default_rules``), values for cheap detectors are recorded as well.

    Raises:
        ConfigError: If a value is wrong.
    """
    if health is None or isinstance(health, bool):
        health = Health() if health is not False else Health(nonfinite=IGNORE, watch=[])
    health = options_of(Health, health, "health", "{nonfinite: always}")
    check_choice(health.nonfinite, NONFINITE, f"health.nonfinite is {health.nonfinite!r}")
    watches = as_tuple(health.watch)
    for watch in watches:
        check_choice(watch, WATCH, f"health.watch {watch!r} is not a detector")
    named = tuple(BUILT_IN) if ALL in watches else watches
    is_off = health.watch is not None and not watches
    recorded = () if is_off else tuple(dict.fromkeys((*(CHEAP if has_default_rules else ()), *named)))
    then = _parse_actions(health.then, "health.then")
    by_label = {f"alerts[{number}]": alert for number, alert in enumerate(as_tuple(alerts))}
    parsed = {label: options_of(Alert, alert, label, EXAMPLE) for label, alert in by_label.items()}
    alert_rules = tuple(_parse_alert(alert, label) for label, alert in parsed.items())
    patterns = [(f"{label}.keys", pattern) for label, alert in parsed.items() for pattern in parse_patterns(alert.keys, f"{label}.keys")]
    capture_steps = parse_count(health.capture_steps, "health.capture_steps")
    by_name = () if ALL in watches else named
    return ParsedHealth(health.nonfinite, by_name, recorded, is_off, then, alert_rules, tuple(patterns), capture_steps)


_SATURATION = ((nn.Sigmoid, saturated_sigmoid), (nn.Tanh, saturated_tanh), (nn.Softmax, saturated_softmax))
_SIZES = (
    *("exploding", "growing_weights", "shrinking_weights", "frozen_updates", "no_optimizer", "zero_gradients"),
    *("no_gradients", "overwritten", "large_steps", "one_sided"),
)
_RECORDING: tuple[tuple[tuple[str, ...], tuple[Rule, ...]], ...] = (
    (("dead_units",), (Rule(kinds="activation", types=[nn.ReLU, nn.ReLU6], statistics="dead_fraction"),)),
    (
        ("saturation",),
        tuple(Rule(kinds="activation", types=kind, functions={"saturated_fraction": function}) for kind, function in _SATURATION),
    ),
    (("vanishing",), (Rule(kinds="gradient", sites=r"(?!.*bias[^.]*$).*", statistics="rms"),)),
    (_SIZES, (Rule(kinds=["parameter", "gradient"], statistics="norm"),)),
    (("growing_over_depth", "shrinking_outputs"), (Rule(kinds="activation", leaf_modules=True, statistics="rms"),)),
    (("large_logits",), (Rule(kinds="attention_max_logit", statistics="max"),)),
)
"""Detectors, and the rules that record their values where the model has them."""


def watch_rules(watches: Sequence[str]) -> list[Rule]:
    """The rules that record the values of detectors."""
    return [rule for names, rules in _RECORDING if {*names} & {*watches} for rule in rules]


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
        why = "every value is above the first limit or below the second"
        raise ConfigError(f"{label}.above is {alert.above}, and below is {alert.below}: {why}; expected below to be the smaller one.")
    if not isinstance(alert.relative_to_median, bool):
        raise ConfigError(f"{label}.relative_to_median is {alert.relative_to_median!r}; expected true or false.")
    if str(alert.name) in DETECTORS:
        raise ConfigError(f"{label}.name is {alert.name!r}, which is the name of a detector; expected another one.")
    return AlertRule(
        name=str(alert.name or patterns[0].pattern),
        concerns=matching(patterns),
        concerns_total=naming(patterns),
        above=alert.above,
        below=alert.below,
        relative_to="median" if alert.relative_to_median else "",
        for_steps=parse_count(alert.for_steps, f"{label}.for_steps"),
        then=_parse_actions(alert.then, f"{label}.then"),
    )


def _parse_actions(then: object, label: str) -> tuple[Action, ...]:
    actions = as_tuple(then)
    for action in actions:
        check_choice(action, ACTIONS, f"{label} {action!r} is unknown")
    return cast("tuple[Action, ...]", actions)
