"""The user's wish, as dataclasses that YAML can hold, and its one check."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_module_monitor.errors import ConfigError, nearest
from lightning_module_monitor.kinds import KINDS, Kind
from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, fit_for_loggers
from lightning_module_monitor.schedule import ParsedSchedule, Schedule, parse_schedule
from lightning_module_monitor.statistics.functions import AGGREGATES, UserFunction
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the wish: what to observe, where, and what to compute of it.

    Attributes:
        kinds: One kind or several: ``activation``, ``activation_gradient``, ``parameter``, ``gradient``,
            ``gradient_before_clip``, ``update``.
        sites: Pattern or patterns (``re.fullmatch``) of module names, for kinds of parameters of parameter names.
        exclude: Pattern or patterns of names that are left out, with all that is inside of such a module.
        types: Classes, or import paths of classes, of which the module (of a parameter: the module that owns it) must be.
        leaf_modules: Only modules without children.
        statistics: One name or several of ``STATISTICS``.
        functions: Function of the tensor, or torchmetrics object, by the name that it gets in the key.
        aggregate: How the functions' results are joined over micro-batches and calls: ``mean`` (every element counts
            once), ``sum``, ``min``, ``max``, or a function (or its import path) of the concatenated results.
        every_n_steps: The rule's own schedule, instead of the monitor's.
    """

    kinds: str | list[str]
    sites: str | list[str] = ".*"
    exclude: str | list[str] | None = None
    types: str | type[nn.Module] | list[str | type[nn.Module]] | None = None
    leaf_modules: bool = False
    statistics: str | list[str] = field(default_factory=list)
    functions: dict[str, Metric | Callable[[Tensor], Any]] = field(default_factory=dict)
    aggregate: str | Callable[[Tensor], Any] = "mean"
    every_n_steps: Schedule | None = None


@dataclass(frozen=True)
class ParsedRule:
    """A rule that was found to make sense, in the form that the engine uses."""

    label: str
    """Path of the rule, for messages: ``rules[2]``."""
    kinds: tuple[str, ...]
    sites: tuple[re.Pattern[str], ...]
    exclude: tuple[re.Pattern[str], ...]
    types: tuple[type[nn.Module], ...] | None
    leaf_modules: bool
    statistics: Mapping[str, Statistic]
    functions: tuple[UserFunction, ...]
    schedule: ParsedSchedule


def default_rules() -> list[Rule]:
    """What is watched where the user gives no rules: useful, and bounded in cost."""
    return [
        Rule(kinds="activation", leaf_modules=True, statistics=["rms", "abs_max", "nonfinite_count"]),
        Rule(kinds=["parameter", "gradient"], statistics="norm"),
    ]


def coordinate_check_rules(statistics: Sequence[str] = ("rms",)) -> list[Rule]:
    """All of the refined coordinate check.

    Args:
        statistics: Of its terms.
    """
    kinds = [kind for kind in KINDS.values() if kind.name.startswith("rcc_")]
    terms = Rule(kinds=[kind.name for kind in kinds if not kind.values], statistics=list(statistics))
    return [terms, *(Rule(kinds=kind.name) for kind in kinds if kind.values)]


def parse_rule(rule: Rule, label: str, schedule: ParsedSchedule) -> ParsedRule:
    """Check a rule.

    Args:
        rule: The user's rule.
        label: Its path, for messages.
        schedule: The monitor's schedule, for a rule without one of its own.

    Returns:
        The checked rule.

    Raises:
        ConfigError: If a value is wrong; says which, what was expected, and the nearest right name.
    """
    if not isinstance(rule, Rule):
        raise ConfigError(f"{label} is a {type(rule).__name__}; expected a Rule.")
    kinds = as_tuple(rule.kinds)
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ConfigError(f"{label}.kinds {kind!r} is not a kind; expected {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
    if not kinds:
        raise ConfigError(f"{label}.kinds is empty; expected at least one of {', '.join(KINDS)}.")
    has_values = [kind for kind in kinds if KINDS[kind].values]
    if has_values and len(kinds) > 1:
        raise ConfigError(f"{label}.kinds {has_values[0]!r} has values that are not statistics; expected a rule of its own for it.")
    statistics, functions = ({}, _parse_values(rule, label, KINDS[kinds[0]])) if has_values else _parse_statistics(rule, label, kinds)
    return ParsedRule(
        label=label,
        kinds=kinds,
        sites=parse_patterns(_not_empty(rule.sites, f"{label}.sites", "'.*' for every site"), f"{label}.sites"),
        exclude=parse_patterns(rule.exclude, f"{label}.exclude"),
        types=_parse_types(rule.types, f"{label}.types"),
        leaf_modules=rule.leaf_modules,
        statistics=statistics,
        functions=functions,
        schedule=schedule if rule.every_n_steps is None else parse_schedule(rule.every_n_steps, f"{label}.every_n_steps"),
    )


def parse_patterns(patterns: str | Iterable[str] | None, label: str) -> tuple[re.Pattern[str], ...]:
    """Compile one pattern or several.

    Raises:
        ConfigError: If one is not a regular expression.
    """
    compiled = []
    for pattern in as_tuple(patterns):
        try:
            compiled.append(re.compile(pattern))
        except (re.error, TypeError) as error:
            message = f"{label} {pattern!r} is not a regular expression ({error}); expected a pattern like 'encoder.blocks.*'"
            raise ConfigError(message) from error
    return tuple(compiled)


def check_name(name: str, label: str) -> str:
    """The name of a statistic or function, if it may stand in a key.

    Raises:
        ConfigError: If a logger would not take it.
    """
    if not isinstance(name, str) or not name or fit_for_loggers(name, MAX_STATISTIC_LENGTH) != name:
        raise ConfigError(
            f"{label} {name!r} cannot stand in a key; expected at most {MAX_STATISTIC_LENGTH} letters, digits, '_', '-' and single dots."
        )
    return name


def as_tuple(value: object) -> tuple[Any, ...]:
    """One value, several, or none, as a tuple.

    >>> as_tuple("rms"), as_tuple(["rms", "max"]), as_tuple(None)
    (('rms',), ('rms', 'max'), ())
    """
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


def _parse_statistics(rule: Rule, label: str, kinds: tuple[str, ...]) -> tuple[dict[str, Statistic], tuple[UserFunction, ...]]:
    """Built-in statistics by name, and functions: the rule's own and those that stand in ``STATISTICS``."""
    aggregate = _parse_aggregate(rule.aggregate, f"{label}.aggregate")
    statistics: dict[str, Statistic] = {}
    functions: dict[str, UserFunction] = {}
    for name in as_tuple(rule.statistics):
        if not isinstance(name, str) or name not in STATISTICS:
            known = ", ".join(STATISTICS)
            raise ConfigError(f"{label}.statistics {name!r} is not a statistic; expected {known}{nearest(str(name), STATISTICS)}")
        check_name(name, f"{label}.statistics")
        statistic = STATISTICS[name]
        if not isinstance(statistic, Statistic):
            functions[name] = UserFunction(name, statistic, aggregate)
            continue
        if statistic.paired and not all(KINDS[kind].is_pair for kind in kinds):
            unfit = [kind for kind in kinds if not KINDS[kind].is_pair]
            raise ConfigError(
                f"{label}.statistics {name!r} is of two tensors, and {unfit[0]!r} is one; "
                f"expected kinds {', '.join(name for name, kind in KINDS.items() if kind.is_pair)}. Give it a rule of its own."
            )
        unfit = [kind for kind in kinds if statistic.relative and not KINDS[kind].is_relative]
        if unfit:
            raise ConfigError(
                f"{label}.statistics {name!r} is relative, and {unfit[0]!r} is relative to nothing; "
                f"expected kinds {', '.join(name for name, kind in KINDS.items() if kind.is_relative)}. Give it a rule of its own."
            )
        statistics[name] = statistic
    if not isinstance(rule.functions, Mapping):
        raise ConfigError(f"{label}.functions is {rule.functions!r}; expected functions by name, e.g. {{kurtosis: my_project.kurtosis}}.")
    if rule.functions and len({KINDS[kind].is_pair for kind in kinds}) > 1:
        raise ConfigError(f"{label}.functions of kinds {', '.join(kinds)}: some have two tensors, some one; expected a rule for each sort.")
    for name, function in rule.functions.items():
        if name in statistics or name in functions:
            raise ConfigError(f"{label}.functions {name!r} is also in its statistics; expected another name, for keys must differ.")
        if not callable(function):
            raise ConfigError(f"{label}.functions {name!r} is {function!r}; expected a function of a tensor or a torchmetrics object.")
        functions[check_name(name, f"{label}.functions")] = UserFunction(name, function, aggregate)
    if not statistics and not functions:
        raise ConfigError(f"{label} has neither statistics nor functions; expected at least one, e.g. statistics: rms.")
    return statistics, tuple(functions.values())


def _parse_values(rule: Rule, label: str, kind: Kind) -> tuple[UserFunction, ...]:
    """The names of the values of a kind that has no statistics, all of them where none is given."""
    if rule.functions:
        raise ConfigError(
            f"{label}.functions: {kind.name!r} has no tensor to call them with; expected statistics: {', '.join(kind.values)}."
        )
    for name in as_tuple(rule.statistics):
        if name not in kind.values:
            expected = f"expected {', '.join(kind.values)}{nearest(str(name), kind.values)}"
            raise ConfigError(f"{label}.statistics {name!r} is none of {kind.name!r}; {expected}")
    # What is told by another is joined like the results of a function.
    return tuple(UserFunction(name, float, "mean") for name in as_tuple(rule.statistics) or kind.values)


def _parse_aggregate(aggregate: object, label: str) -> str | Callable[[Tensor], Any]:
    if isinstance(aggregate, str) and aggregate in AGGREGATES:
        return aggregate
    function = _imported(aggregate, label) if isinstance(aggregate, str) and "." in aggregate else aggregate
    if callable(function):
        return function
    expected = ", ".join(AGGREGATES)
    raise ConfigError(f"{label} {aggregate!r} is unknown; expected {expected}, or a function{nearest(str(aggregate), AGGREGATES)}")


def _not_empty(value: object, label: str, example: str) -> tuple[Any, ...]:
    if not as_tuple(value):
        raise ConfigError(f"{label} is empty; expected at least one, e.g. {example}.")
    return as_tuple(value)


def _parse_types(types: object, label: str) -> tuple[type[nn.Module], ...] | None:
    """Module classes; ``None`` for all."""
    if types is None:
        return None
    return tuple(_parse_type(one, label) for one in _not_empty(types, label, "torch.nn.Linear"))


def _parse_type(value: object, label: str) -> type[nn.Module]:
    """A module class, given as itself or by its import path."""
    found = _imported(value, label) if isinstance(value, str) else value
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(f"{label} {value!r} is not a module class; expected one like torch.nn.Linear.")
    return found


def _imported(path: str, label: str) -> object:
    """What is at an import path."""
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{label} {path!r} cannot be imported ({error}); expected a path like 'torch.nn.Linear'.") from error
    if not hasattr(module, name):
        raise ConfigError(f"{label} {path!r}: {module_path} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)
