"""Rules and other options, as dataclasses that YAML can hold, and their check."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_module_monitor.config.plain import PlainFields, any_hints, plain
from lightning_module_monitor.config.schedule import ParsedSchedule, Schedule, parse_schedule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.keys import MAX_STATISTIC_LENGTH, fit_for_loggers
from lightning_module_monitor.kinds import KINDS, ROOT_SITE
from lightning_module_monitor.statistics.channels import ChannelStatistic
from lightning_module_monitor.statistics.effective_rank import MAX_FEATURES, MOST_FEATURES
from lightning_module_monitor.statistics.functions import AGGREGATES, Aggregate, Function, Value
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.spectral_statistics import LARGEST_VALUES, MAX_VALUES, SpectralStatistic
from lightning_module_monitor.statistics.stream import Output
from lightning_module_monitor.statistics.units import UnitStatistic
from lightning_module_monitor.suggestions import glob_as_pattern, nearest


@any_hints
@dataclass(frozen=True, kw_only=True)
class Rule(PlainFields):
    """What to observe, where, and what to compute of it.

    Attributes:
        kinds: One kind or several: ``activation``, ``activation_gradient``, ``parameter``, ``gradient``,
            ``gradient_before_clip``, ``update``, ``optimizer_state``, ``attention_entropy``, ``attention_relative_entropy``,
            ``attention_max_logit``, ``attention_sink``; with a reference ``activation_difference``,
            ``parameter_difference``, and those of the coordinate check, ``rcc_...``.
        sites: Pattern or patterns of module names, for kinds of parameters of parameter names, for ``optimizer_state`` of
            parameter names or names of states (``.*exp_avg``). A pattern matches a whole name (``re.fullmatch``): ``.*attn.*`` is every
            name with ``attn`` in it.
        exclude: Pattern or patterns of whole names that are left out, with all that is inside of such a module.
        types: Classes, import paths of classes, or names of classes that occur in the model (``Linear``): the module (of a parameter: the
            module to which it belongs) must be of one of them. A parameter from which ``torch.nn.utils.parametrize`` computes the weight
            of a layer, as weight norm and spectral norm do, belongs to that layer.
        leaf_modules: Only modules without children, apart from those that compute their parameters (``torch.nn.utils.parametrize``).
        statistics: One name or several of ``STATISTICS``; of ``rcc_operator_norm`` and ``rcc_alignment`` names of their values.
        functions: Function of the tensor (of a difference: of the model's and the reference's), or torchmetrics object, by the
            name that it gets in the key; of a result that is a dict, each part has the key ``name.part``.
        aggregate: How the functions' results are joined over micro-batches and calls: ``mean`` (every element counts
            once), ``sum``, ``min``, ``max``, or a function (or its import path) of the concatenated results.
        every_n_steps: The rule's own schedule, instead of the monitor's.
        singular_values: Number of largest singular values to record, at most 8, of parameters, their gradients, updates, states or
            differences as matrices: ``singular_value_1``, ``residual_1`` and so on.
        max_features: Limit of the features of an activation, or of the smaller side of a matrix, of which ``effective_rank`` and what else
            needs all singular values is computed: at most 4096, which take seconds. Larger matrices are refused, larger activations NaN.
        gather: Whether a matrix that is laid out over ranks (FSDP, tensor parallel) is assembled on one rank for statistics of singular
            values, by a collective each. Without it such a rule is refused.
        per_module: Pattern or patterns of module names, for kinds of parameters: all picked parameters inside of such a module count as
            one tensor, tied ones once, and the module's name is the site. ``_root_`` is everything that is monitored.
    """

    kinds: str | Sequence[str]
    sites: str | Sequence[str] = ".*"
    exclude: str | Sequence[str] | None = None
    types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None
    leaf_modules: bool = False
    statistics: str | Sequence[str] = field(default_factory=list)
    functions: Mapping[str, Metric | Callable[..., Any]] = field(default_factory=dict)
    aggregate: str | Callable[[Tensor], Any] = "mean"
    every_n_steps: Schedule | None = None
    per_module: str | Sequence[str] | None = None
    singular_values: int = 0
    max_features: int = MAX_FEATURES
    gather: bool = False


@any_hints
@dataclass(frozen=True, kw_only=True)
class Capture(PlainFields):
    """Which raw tensors to write to a file beside the store, and at which steps.

    Of several ranks the first one's activations and their gradients are written; parameters, their gradients and their updates whole.

    Attributes:
        sites: Pattern or patterns (``re.fullmatch``) of names of modules and of parameters: ``head`` is that module's output, ``head.*``
            its parameters, too.
        steps: One optimizer step or several.
        kinds: One kind or several: ``activation``, ``activation_gradient``, ``parameter``, ``gradient``,
            ``gradient_before_clip``, ``update``.
    """

    sites: str | Sequence[str]
    steps: int | Sequence[int]
    kinds: str | Sequence[str] = field(default_factory=lambda: ["activation", "activation_gradient", "parameter", "gradient"])


@dataclass(frozen=True, kw_only=True)
class ParsedRule:
    """A checked :class:`Rule`, or a :class:`Capture`, which has no statistics."""

    label: str
    """Path of the rule, for messages: ``rules[2]``."""
    kinds: tuple[str, ...]
    sites: tuple[re.Pattern[str], ...]
    schedule: ParsedSchedule
    exclude: tuple[re.Pattern[str], ...] = ()
    types: tuple[type[nn.Module] | str, ...] | None = None
    """Classes, and names of classes of the model."""
    leaf_modules: bool = False
    outputs: Mapping[str, Output] = field(default_factory=dict)
    """What it records of a tensor, by name."""
    per_module: tuple[re.Pattern[str], ...] = ()
    """Modules whose parameters count as one tensor; empty where each parameter counts by itself."""
    is_optional: bool = False
    """Whether it may match nothing: the user has not named its sites."""


def default_rules() -> list[Rule]:
    """The rules of a callback or monitor without ``rules``: useful, and bounded in cost."""
    return [
        Rule(kinds="activation", leaf_modules=True, statistics=["rms", "abs_max", "nonfinite_count"]),
        Rule(kinds=["parameter", "gradient"], statistics="norm"),
        Rule(kinds=["parameter", "gradient"], per_module=ROOT_SITE, statistics="norm"),
    ]


def attention_rules() -> list[Rule]:
    """What ``attention: true`` stands for."""
    return [
        Rule(kinds=["attention_entropy", "attention_relative_entropy", "attention_sink"], statistics="mean"),
        Rule(kinds="attention_max_logit", statistics="max"),
    ]


def coordinate_check_rules(statistics: Sequence[str] = ("rms",)) -> list[Rule]:
    """The rules of the refined coordinate check: first that of its terms, with these statistics; then operator norms and alignments."""
    kinds = [kind for kind in KINDS.values() if kind.of_layers]
    terms = Rule(kinds=[kind.name for kind in kinds if not kind.values], statistics=list(statistics))
    return [terms, *(Rule(kinds=kind.name) for kind in kinds if kind.values)]


def parse_rule(rule: Rule | Mapping[str, Any], label: str, schedule: ParsedSchedule) -> ParsedRule:
    """Check a rule, whose path is ``label``; ``schedule`` is the monitor's, for a rule without one of its own.

    Raises:
        ConfigError: If a value is wrong. The message names it, what was expected, and the nearest right name.
    """
    rule = options_of(Rule, rule, label, "{kinds: activation, statistics: norm}")
    kinds = as_tuple(rule.kinds)
    for kind in kinds:
        check_choice(kind, KINDS, f"{label}.kinds {kind!r} is not a kind", _KINDS_IN_SHORT)
        if KINDS[kind].has_option:
            raise ConfigError(f"{label}.kinds {kind!r} is recorded by the option {kind}, and by no rule; expected {_KINDS_IN_SHORT}.")
    if not kinds:
        raise ConfigError(f"{label}.kinds is empty; expected at least one of {_KINDS_IN_SHORT}.")
    has_values = [kind for kind in kinds if KINDS[kind].values]
    if has_values and len(kinds) > 1:
        raise ConfigError(f"{label}.kinds {has_values[0]!r} has values that are not statistics; expected a rule of its own for it.")
    for name, flag in (("leaf_modules", rule.leaf_modules), ("gather", rule.gather)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{label}.{name} is {flag!r}; expected true or false.")
    for name, number, least, most in (
        ("singular_values", rule.singular_values, 0, MAX_VALUES),
        ("max_features", rule.max_features, 1, MOST_FEATURES),
    ):
        if not is_whole(number) or not least <= number <= most:
            raise ConfigError(f"{label}.{name} is {number!r}; expected a whole number from {least} to {most}.")
    per_module = _parse_per_module(rule, label, kinds)
    types = None if rule.types is None else _not_empty(rule.types, f"{label}.types", "torch.nn.Linear")
    outputs = _parse_values(rule, label, kinds[0]) if has_values else _parse_outputs(rule, label, kinds)
    return ParsedRule(
        label=label,
        kinds=kinds,
        sites=parse_patterns(_not_empty(rule.sites, f"{label}.sites", "'.*' for every site"), f"{label}.sites"),
        exclude=parse_patterns(rule.exclude, f"{label}.exclude"),
        types=None if types is None else tuple(_parse_type(type_, f"{label}.types") for type_ in types),
        leaf_modules=rule.leaf_modules,
        schedule=schedule if rule.every_n_steps is None else parse_schedule(rule.every_n_steps, f"{label}.every_n_steps"),
        outputs=outputs,
        per_module=per_module,
    )


def parse_capture(capture: Capture | Mapping[str, Any]) -> ParsedRule:
    """Check a capture.

    Returns:
        A rule that records the tensors themselves, and no statistic of them.

    Raises:
        ConfigError: If a value is wrong. The message names it, what was expected, and the nearest right name.
    """
    capture = options_of(Capture, capture, "capture", "{sites: model.head, steps: [0, 100]}")
    kinds = _not_empty(capture.kinds, "capture.kinds", "activation")
    captured = [name for name, kind in KINDS.items() if kind.can_be_captured]
    for kind in kinds:
        check_choice(kind, captured, f"capture.kinds {kind!r} is no kind of tensor that can be captured")
    sites = parse_patterns(_not_empty(capture.sites, "capture.sites", "'model.head'"), "capture.sites")
    steps = parse_schedule(list(_not_empty(capture.steps, "capture.steps", "[0, 100]")), "capture.steps")
    return ParsedRule(label="capture", kinds=kinds, sites=sites, schedule=steps)


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
            example = glob_as_pattern(pattern) if isinstance(pattern, str) and "*" in pattern else "encoder.blocks.*"
            raise ConfigError(f"{label} {pattern!r} is not a regular expression ({error}); expected a pattern like {example!r}.") from error
    return tuple(compiled)


def _check_name(name: object, label: str) -> None:
    if not isinstance(name, str) or not name or fit_for_loggers(name, MAX_STATISTIC_LENGTH) != name:
        raise ConfigError(
            f"{label} {name!r} cannot stand in a key; expected at most {MAX_STATISTIC_LENGTH} letters, digits, '_', '-' and single dots."
        )


Options = TypeVar("Options")


def options_of(kind: type[Options], value: object, label: str, example: str) -> Options:
    """Options as their dataclass.

    LightningCLI makes the dataclass of a mapping itself if nothing is wrong in it, and passes on the mapping otherwise.
    ``label`` is the path of the option, and ``example`` what YAML may hold.

    Raises:
        ConfigError: If it is neither, if there is no such option, or one is missing that has no default.
    """
    if isinstance(value, kind):
        return value
    value = plain(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label} is {value!r}; expected options, e.g. {example}.")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # a dataclass
    known = [option.name for option in fields]
    for name in value:
        if name not in known:
            raise ConfigError(f"{label} has no option {name!r}; expected {', '.join(known)}{nearest(str(name), known)}")
    for option in fields:
        if option.name not in value and option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{label} lacks {option.name}; expected e.g. {example}.")
    return kind(**value)


def check_choice(value: object, known: Collection[str], wrong: str, expected: str = "") -> None:
    """Check that a value is a known name.

    Raises:
        ConfigError: If it is not. The message begins with ``wrong``, has all names or ``expected``, and the nearest one.
    """
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{wrong}; expected {expected or ', '.join(known)}{nearest(str(value), known)}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, unlike ``True``."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_count(value: object, label: str, reason: str = "") -> int:
    """Check a whole number, which has to be at least 1.

    Raises:
        ConfigError: If it is not; the message ends with ``reason``.
    """
    if not is_whole(value) or value < 1:
        raise ConfigError(f"{label} is {value!r}; expected a whole number >= 1{reason}.")
    return value


def as_tuple(value: object) -> tuple[Any, ...]:
    """One value, several, or none, as a tuple.

    >>> as_tuple("rms"), as_tuple(["rms", "max"]), as_tuple(None)
    (('rms',), ('rms', 'max'), ())
    """
    value = plain(value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


_OF_RULES = [name for name, kind in KINDS.items() if not kind.has_option]
_KINDS_IN_SHORT = ", ".join(dict.fromkeys(re.sub(r"^(attention|rcc)_\w+", r"\1_*", name) for name in _OF_RULES))
"""Every kind, large families by their common beginning: a message has to stay within two lines."""


def _parse_outputs(rule: Rule, label: str, kinds: tuple[str, ...]) -> dict[str, Output]:
    """What a rule records of a tensor, by name; functions are the rule's own and those in ``STATISTICS``."""
    aggregate = _parse_aggregate(rule.aggregate, f"{label}.aggregate")
    outputs: dict[str, Output] = {}
    # The first statistics alone: a message has to stay within two lines.
    in_short = f"{', '.join([*STATISTICS][:16])}, ... ({len(STATISTICS)} in STATISTICS)"
    for name in as_tuple(rule.statistics):
        if isinstance(name, str) and name in LARGEST_VALUES:
            raise ConfigError(f"{label}.statistics {name!r} is recorded by an option; expected singular_values: {name.rpartition('_')[2]}.")
        check_choice(name, STATISTICS, f"{label}.statistics {name!r} is not a statistic", in_short)
        _check_name(name, f"{label}.statistics")
        statistic = STATISTICS[name]
        _check_fits(statistic, kinds, f"{label}.statistics {name!r}")
        outputs[name] = Function(aggregate, function=statistic) if callable(statistic) else statistic
    for name, statistic in [*LARGEST_VALUES.items()][: 2 * rule.singular_values]:
        _check_fits(statistic, kinds, f"{label}.singular_values {rule.singular_values}")
        outputs[name] = statistic
    for name, output in outputs.items():
        if isinstance(output, SpectralStatistic):
            outputs[name] = dataclasses.replace(output, max_features=rule.max_features, gathers=rule.gather)
    if not isinstance(rule.functions, Mapping):
        raise ConfigError(f"{label}.functions is {rule.functions!r}; expected functions by name, e.g. {{kurtosis: my_project.kurtosis}}.")
    if rule.functions and len({KINDS[kind].is_pair for kind in kinds}) > 1:
        raise ConfigError(f"{label}.functions of kinds {', '.join(kinds)}: some have two tensors, some one; expected a rule for each sort.")
    for name, option in rule.functions.items():
        if name in outputs:
            raise ConfigError(f"{label}.functions {name!r} is also in its statistics; expected another name, for keys must differ.")
        function = _function(option, f"{label}.functions {name!r}")
        if not callable(function):
            raise ConfigError(f"{label}.functions {name!r} is {function!r}; expected a function of a tensor or a torchmetrics object.")
        _check_name(name, f"{label}.functions")
        outputs[name] = Function(aggregate, function=function)
    if not outputs:
        raise ConfigError(f"{label} has neither statistics nor functions; expected at least one, e.g. statistics: rms.")
    return outputs


def _check_fits(statistic: object, kinds: tuple[str, ...], named: str) -> None:
    """Check that a statistic, which messages call ``named``, exists for all kinds of a rule."""
    if isinstance(statistic, ChannelStatistic | UnitStatistic):
        why, fit = "is of the units of a layer, and {!r} has none", [name for name, kind in KINDS.items() if kind.has_units]
    elif isinstance(statistic, SpectralStatistic):
        what = "of matrices" if statistic.is_of_matrices else "of matrices or features"
        what = "of the features of a layer" if statistic.is_of_features else what
        why, fit = f"is {what}, and {{!r}} has none", statistic.kinds
    elif isinstance(statistic, Statistic) and statistic.compared_with:
        compared_with = statistic.compared_with
        why = f"compares with another tensor ({compared_with}), and {{!r}} has none"
        fit = [name for name, kind in KINDS.items() if compared_with in kind.compared_with]
    elif isinstance(statistic, Statistic) and statistic.relative:
        why, fit = "is relative, and {!r} is relative to nothing", [name for name, kind in KINDS.items() if kind.is_relative]
    else:
        return
    unfit = next((kind for kind in kinds if kind not in fit), None)
    if unfit is not None:
        expected = f"expected kinds {', '.join(fit)}. Give it a rule of its own."
        raise ConfigError(f"{named} {why.format(unfit)}; {expected}")


def _parse_per_module(rule: Rule, label: str, kinds: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """The patterns of modules whose parameters count as one tensor, if nothing in the rule is without a total."""
    if rule.per_module is None:
        return ()
    unfit = [f"kind {kind!r} is of modules" for kind in kinds if KINDS[kind].site != "parameter"]
    known = [(name, STATISTICS.get(str(name))) for name in as_tuple(rule.statistics)]
    unfit += [f"{name!r} is of tokens" for name, output in known if isinstance(output, Statistic) and output.needs & Need.TOKENS]
    unfit += [f"{name!r} is of units" for name, output in known if isinstance(output, ChannelStatistic | UnitStatistic)]
    unfit += [f"{name!r} is of one matrix" for name, output in known if isinstance(output, SpectralStatistic)]
    unfit += ["singular_values are of one matrix"] if rule.singular_values else []
    unfit += [f"{name!r} is a function" for name, output in known if callable(output)]
    unfit += ["functions get one parameter at a time"] if rule.functions else []
    if unfit:
        fit = ", ".join(name for name in _OF_RULES if KINDS[name].site == "parameter")
        raise ConfigError(f"{label}.per_module: {unfit[0]}; expected kinds {fit}, and statistics of whole tensors, e.g. norm.")
    patterns = _not_empty(rule.per_module, f"{label}.per_module", "_root_ for the whole model")
    return parse_patterns(patterns, f"{label}.per_module")


def _parse_values(rule: Rule, label: str, name_of_kind: str) -> dict[str, Output]:
    """As :func:`_parse_outputs`, for a kind that has named values and no statistics; all values if none is given."""
    kind, names = KINDS[name_of_kind], as_tuple(rule.statistics)
    if rule.functions:
        why = f"{kind.name!r} has no tensor to call them with"
        raise ConfigError(f"{label}.functions: {why}; expected statistics: {', '.join(kind.values)}.")
    for name in names:
        check_choice(name, kind.values, f"{label}.statistics {name!r} is none of {kind.name!r}")
    return {name: Value() for name in names or kind.values}


def _parse_aggregate(aggregate: object, label: str) -> Aggregate:
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


def _function(value: object, label: str) -> object:
    """A function, of its import path, or an object of ``class_path`` and ``init_args``, as LightningCLI makes them."""
    if isinstance(value, str):
        return _imported(value, label)
    path = value.get("class_path") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(path, str):
        return value
    made: Any = _imported(path, label)
    try:
        return made(**value.get("init_args") or {})
    except Exception as error:
        raise ConfigError(f"{label} {path!r} was not made ({type(error).__name__}: {error}); expected init_args that it takes.") from error


def _parse_type(value: object, label: str) -> type[nn.Module] | str:
    if isinstance(value, str) and value.isidentifier():
        return value  # looked up when there is a model
    class_ = _imported(value, label) if isinstance(value, str) else value
    if not isinstance(class_, type) or not issubclass(class_, nn.Module):
        raise ConfigError(f"{label} {value!r} is not a module class; expected one like torch.nn.Linear, or the name of one in the model.")
    return class_


def _imported(path: str, label: str) -> object:
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{label} {path!r} cannot be imported ({error}); expected a path like 'torch.nn.Linear'.") from error
    if not hasattr(module, name):
        raise ConfigError(f"{label} {path!r}: {module_path} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)
