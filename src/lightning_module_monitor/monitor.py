"""The monitor of a module, for any loop: what users ask of it, values that they log, and what was recorded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_module_monitor.config.rules import Capture, GradientFlow, Rule, as_tuple, check_choice, default_rules, parse_patterns
from lightning_module_monitor.config.schedule import Schedule, parse_schedule
from lightning_module_monitor.display import Described, Description, counted
from lightning_module_monitor.distributed.shards import fsdp1_units
from lightning_module_monitor.engine.phases import StepEngine
from lightning_module_monitor.errors import ConfigError, Log, nearest
from lightning_module_monitor.model.compiled import COMPILED, KEEP
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.names import ROOT, beginning_with, without_wrappers
from lightning_module_monitor.plan.planner import DETAIL, Planner
from lightning_module_monitor.probes.activations import ModuleTable
from lightning_module_monitor.probes.attention_calls import RawCall, read_scaled_dot_product_attention
from lightning_module_monitor.probes.reference import Reference, structural_differences
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import CONTEXT_KIND, OWN_KIND, STEP_SKIPPED, TRAIN, Key, Record
from lightning_module_monitor.sinks.recent_records import StorageManager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Function = Callable[[Tensor], Any]
PairFunction = Callable[[Tensor, Tensor], Any]

_monitors: list[weakref.ref[ModuleMonitor]] = []
"""Every monitor that has a module, the newest last."""


def monitor_of(module: nn.Module) -> ModuleMonitor | None:
    """The monitor of a module; of several, one that observes now, else the one that was set last."""
    watching = [monitor for ref in reversed(_monitors) if (monitor := ref()) is not None and monitor.watches(module)]
    return next((monitor for monitor in watching if monitor.is_monitoring()), watching[0] if watching else None)


class ModuleMonitor(Described, StepEngine):
    """Observes a module while it trains.

    In a plain loop::

        monitor = ModuleMonitor(rules=[Rule(kinds=["activation", "gradient"], statistics="rms")])
        monitor.set_module(model)
        for step, (x, y) in enumerate(batches):
            monitor.begin_step(step)
            loss_fn(model(x), y).backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step()
            if monitor.is_step_monitored(step):
                print(monitor.get_step_metrics())

    Args:
        monitor_step_fn: Which steps are monitored, even if no rule is due: every n-th, a list, ``"log"``, one every so many minutes
            (``{"minutes": 5}``), or a function of the step.
        format_module_name_fn: Makes names in keys of what ``named_modules`` and ``named_parameters`` give; the default removes wrappers.
        excluded_modules_regex: Names that begin like this (``re.match``) are not monitored.
        logger: Receives warnings and other messages.
        rules: What to record; methods like :meth:`add_activation_metric` add more.
        gradient_flow: Blocks between which the gain of the gradient is recorded, in every step that ``monitor_step_fn`` picks.
        capture: Which raw tensors the records of which steps hold.
        exclude: Pattern or patterns (``re.fullmatch``) of names that are not monitored, with everything inside.
        module: Name of the submodule to monitor. Keys keep the names of the whole model.
        prefix: Put before every key.
        on_error: ``warn``: a value that cannot be computed is logged once and recorded as NaN. ``raise``: it is an error.
        history: Number of records that are kept in memory.
        cpu_offload: Whether the reference's activations wait for the model's in host memory: less memory of a GPU, and more time.
        compiled: ``keep``: nothing inside compiled code is observed. ``uncompiled``: everything is, and monitored steps run uncompiled.
        distributed: Whether every rank of ``torch.distributed`` runs this monitor, in the same steps, and has the values of all ranks
            together. In tensor parallel training the mesh of the ranks that share their input. A rank that leaves ends the record alone.

    Raises:
        ConfigError: If a value is wrong. The message names it, what was expected, and the nearest right one.
    """

    def __init__(
        self,
        monitor_step_fn: Schedule = 1,
        format_module_name_fn: Callable[[str], str] = without_wrappers,
        excluded_modules_regex: str | None = None,
        logger: Log | None = None,
        *,
        rules: Rule | Sequence[Rule | Mapping[str, Any]] | None = (),
        gradient_flow: GradientFlow | Mapping[str, Any] | None = None,
        capture: Capture | Mapping[str, Any] | None = None,
        exclude: str | Sequence[str] | None = None,
        module: str | None = None,
        prefix: str = "",
        on_error: str = "warn",
        history: int = 1000,
        cpu_offload: bool = False,
        distributed: bool | DeviceMesh = False,
        compiled: str = KEEP,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise ConfigError(f"on_error is {on_error!r}; expected 'warn' or 'raise'.")
        if module is not None and not isinstance(module, str):
            raise ConfigError(f"module is {module!r:.60}; expected the name of a submodule, e.g. 'encoder'.")
        check_choice(compiled, COMPILED, f"compiled is {compiled!r}")
        excluded = parse_patterns(as_tuple(exclude), "exclude")
        if excluded_modules_regex is not None:
            excluded += parse_patterns(beginning_with(excluded_modules_regex), "excluded_modules_regex")
        self._within = module
        self._cpu_offload = cpu_offload
        self._metrics: set[tuple[str, str]] = set()
        reporter = ErrorReporter(logger or logging.getLogger(__name__), on_error, self._speaks_for_all)
        planner = Planner(
            parse_schedule(monitor_step_fn, "every_n_steps", may_be_by_clock=True),
            default_rules() if rules is None else as_tuple(rules),
            gradient_flow,
            capture,
            within=module,
            exclude=excluded,
            format_name=format_module_name_fn,
            prefix=prefix,
            keeps_compiled=compiled == KEEP,
            reporter=reporter,
        )
        super().__init__(reporter, planner, StorageManager(history), distributed)

    def _forget_module(self) -> None:
        super()._forget_module()
        self._watched: frozenset[nn.Module] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in the middle of a run is a monitor without a module: hooks and an open step belong to the original."""
        closed = object.__new__(type(self))
        vars(closed).update(vars(self))
        closed._forget_module()
        return vars(closed)

    # What there is

    def _describe(self) -> Description:
        rules, last = self.planner.rules, self.storage.last_step()
        module = "no module" if self._module is None else type(self._module).__name__
        title = f"{module}, {counted(len(rules), 'rule')}, {'no record' if last is None else f'last record of step {last}'}"
        rows = [
            (", ".join(rule.kinds), " or ".join(one.pattern for one in rule.sites), ", ".join(rule.outputs), str(rule.schedule))
            for rule in rules
        ]
        return Description(title, ("kinds", "sites", "statistics", "when"), rows)

    @property
    def reference_module(self) -> nn.Module | None:
        """The module that it is compared with; ``None`` if there is none."""
        return None if self._reference is None else self._reference.module

    # What is recorded

    def set_module(self, module: nn.Module) -> None:
        """Set the module to monitor.

        Args:
            module: Any module. It gets hooks only while a step is monitored.

        Raises:
            ValueError: If one was set before, or this is none.
            ConfigError: If a rule matches nothing in it, or it has no such blocks as ``gradient_flow`` names.
        """
        if not isinstance(module, nn.Module):
            raise ValueError(f"The module is {module!r}; expected a torch.nn.Module.")
        if self._module is not None:
            raise ValueError("A module was set before; close this monitor, or use a second one for a second module.")
        self._awaits_attention |= self._reporter.begin(module)
        shares_input = not isinstance(self.distributed, bool) and self.distributed.size() > 1
        sites = self.planner.read_names(module, has_ranks=self.distributed is not False, shares_input=shares_input)
        self._module, self._watched = module, sites.with_wrapped(module)
        self._opener.modules = ModuleTable(sites.whole.modules, sites.modules)
        _monitors.append(weakref.ref(self, _monitors.remove))

    def set_reference_module(self, module: nn.Module, *, follows: bool = False, wrapper: nn.Module | None = None) -> None:
        """Set the module that the monitored one is compared with, in place of any other.

        It is never trained, and stays as it is. In a monitored step run it first, then the model, with the same input::

            if monitor.begin_step(step):
                with monitor.no_monitor():
                    reference(x)
            loss_fn(model(x), y).backward()

        It then runs in the model's train or eval mode and with its ``requires_grad`` flags, so that torch selects the same
        kernels, and on the random numbers that the model draws after it. Flags and buffers are as before afterwards, and what it
        returns has no graph. What does not go through the reference's own ``forward`` (``reference.training_step(batch, 0)``)
        is run ``with monitor.running_reference()``.

        Args:
            module: A module of the same structure as the monitored one, or as its submodule ``module``; e.g. a copy made at initialization.
            follows: Whether the monitor calls it whenever the module is about to run, with the same arguments.
            wrapper: For a module in a unit of FSDP1 that can only run within another module's forward pass: that other module, which
                calls its first argument with all others.

        Raises:
            ValueError: If no module was set, or if names or shapes of modules or parameters differ; lists them.
        """
        if self._module is None:
            raise ValueError("There is no module that this could be the reference of; call set_module(module) first.")
        self.remove_reference_module()
        is_of_whole = self._within is not None and not structural_differences(self._module, module)
        live = self._module if is_of_whole else self.planner.index.within
        units = fsdp1_units(self.wrapper or self._module) | fsdp1_units(wrapper or module)
        name, offload = self._within or ROOT, self._cpu_offload
        self._reference = Reference(live, module, follows=follows, cpu_offload=offload, name=name, wrapper=wrapper, units=units)
        self.planner.report_uncompiled_reference()

    def remove_reference_module(self) -> None:
        """Compare with nothing from now on; a step that is open is closed without a record."""
        if self._reference is not None:
            self.abandon()
        self._reference = None

    def has_reference_module(self) -> bool:
        """Whether there is a module to compare with."""
        return self._reference is not None

    def awaits_reference(self) -> bool:
        """Whether the step that is open compares the model's activations with the reference's, which is to be run first."""
        is_awaited = self._context is not None and self._context.reference is not None
        return is_awaited and self._reference is not None and not self._reference.follows and not is_tracing()

    @contextmanager
    def running_reference(self) -> Iterator[None]:
        """Within the block the reference is run, by other means than its own ``forward``; see :meth:`set_reference_module`.

        Raises:
            ValueError: If there is none.
        """
        if self._reference is None:
            raise ValueError("There is no reference to run; call set_reference_module(module) first.")
        with self.no_monitor(), self._reference.running():
            yield

    def run_reference(self, call: Callable[[], object]) -> None:
        """Run the reference; an error is reported and counted, and training continues.

        Args:
            call: Runs it, e.g. by its ``training_step``. A second time if it needs tensors for a backward pass of its own.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self._context is not None and self._context.reference is not None:
            with self.no_monitor():
                self._context.reference.run(call)

    def add_activation_metric(
        self, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*", metric_aggregation_fn: Function | None = None
    ) -> None:
        """Add a metric of every module's output.

        Args:
            metric_name: Its name in the key; without a function, that of a built-in statistic.
            metric_fn: Function of the output, which returns a tensor of any shape.
            metric_regex: Modules whose name begins like this (``re.match``).
            metric_aggregation_fn: Function of the concatenated results of a step; the default is their mean.

        Raises:
            ValueError: If there is one of this name.
        """
        self._add_metric(("activation",), metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: PairFunction | None = None,
        metric_regex: str = ".*",
        metric_aggregation_fn: Function | None = None,
    ) -> None:
        """Add a metric of every module's output and the reference's; arguments as for :meth:`add_activation_metric`.

        The function gets the output and the reference's output for the same input. A built-in statistic is that of their
        difference; ``ratio`` its norm over the norm of the reference's, ``cosine`` that of the angle between the two.
        """
        self._add_metric(("activation_difference",), metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_difference_metric(self, metric_name: str, metric_fn: PairFunction | None = None, metric_regex: str = ".*") -> None:
        """Add a metric of every parameter and the reference's; as for :meth:`add_activation_difference_metric`."""
        self._add_metric(("parameter_difference",), metric_name, metric_fn, metric_regex, None)

    def add_parameter_metric(self, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*") -> None:
        """Add a metric of every parameter; arguments as for :meth:`add_activation_metric`."""
        self._add_metric(("parameter",), metric_name, metric_fn, metric_regex, None)

    def add_gradient_metric(self, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*") -> None:
        """Add a metric of every parameter's gradient; arguments as for :meth:`add_activation_metric`."""
        self._add_metric(("gradient", "gradient_before_clip"), metric_name, metric_fn, metric_regex, None)

    def add_rules(self, rules: Rule | Sequence[Rule], label: str = "rules", *, are_optional: bool = False) -> None:
        """Add rules to those that the monitor was made with; from the next step on they count.

        Args:
            rules: One or several.
            label: What they are called in messages.
            are_optional: Whether they may match nothing.

        Raises:
            ConfigError: If one is wrong, or matches nothing in the module.
        """
        self._has_agreed = False
        self._opener.forget_plans()
        for rule in as_tuple(rules):
            self.planner.add(rule, label, is_optional=are_optional)

    def add_detail(self, rule: Rule, capture: Capture) -> None:
        """Record more, of what the module has of it, and capture more, in some steps, until the module is released."""
        self.add_rules(rule, DETAIL, are_optional=True)
        self.planner.add_capture(capture)

    def watches(self, module: nn.Module) -> bool:
        """Whether a module is, or is in, the one to monitor, and is not excluded."""
        return module in self._watched

    # Phases of a step

    def monitor_skipped_step(self, is_skipped: bool | Tensor) -> None:
        """Take in whether a ``GradScaler`` skipped the step of an optimizer; ``monitor/step_skipped`` is 1 if that of any in this step.

        Args:
            is_skipped: Also a tensor of shape ``()``, on any device, which is not 0 if so; it is not read before the step ends.
        """
        if not is_tracing():
            value = (is_skipped != 0).float() if isinstance(is_skipped, Tensor) else float(is_skipped)
            self.monitor_figure(STEP_SKIPPED, value)

    def monitor_figure(self, name: str, value: Tensor | float) -> None:
        """Take in one of the monitor's own figures in this step: ``monitor/<name>`` is the largest of all ranks."""
        if self._context is not None and not is_tracing():
            self.logged.add(self._context, OWN_KIND, name, value, "max")

    def monitor_context(self, name: str, value: Tensor | float, aggregate: str = "mean") -> None:
        """Take in what training is like in this step, e.g. ``monitor.monitor_context("loss", loss)``: its key is ``context/<name>``.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``.``.
            value: A number, or a tensor of one element on any device, which is not read before the step ends.
            aggregate: How several values of this step and of all ranks are joined: ``mean``, ``sum``, ``min`` or ``max``.
        """
        if self._context is not None and self.is_monitoring():
            self.logged.add(self._context, CONTEXT_KIND, name, value, aggregate)

    def monitor_attention(
        self, module: nn.Module | str, arguments: Mapping[str, Any], output: Tensor | None = None, *, is_reference: bool = False
    ) -> None:
        """Take in a call of scaled dot product attention; see :func:`monitor_scaled_dot_product_attention`.

        Args:
            module: The module that it belongs to, or a name of it.
            arguments: The arguments of ``F.scaled_dot_product_attention``, by name.
            output: What it returned.
            is_reference: Whether the module is one of the reference's, which runs under :meth:`no_monitor`.

        Raises:
            ValueError: If there is no such module, or no reference that it could belong to.
        """
        if is_reference and self._reference is None:
            raise ValueError("There is no reference that this attention could belong to; call set_reference_module(module) first.")
        if self._context is None or self._module is None or not (is_reference or self.is_monitoring()):
            return
        of_reference = self._reference if is_reference else None
        live = module if of_reference is None or isinstance(module, str) else of_reference.model_of(module)
        site, attention = None if live is None else self.planner.index.module_site(live), self._context.attention
        if site is None and all(live is not one for one in self._module.modules()):
            what = repr(module) if isinstance(module, str) else f"This {type(module).__name__}"
            names = [one.name for one in self.planner.index.modules]
            which = "of the reference" if is_reference else "that are watched"
            near = nearest(module, names) if isinstance(module, str) else ""
            raise ValueError(f"{what} is none of the {len(names)} modules {which}{near}")
        if site is None or attention is None:  # it is excluded, or an error has ended the step
            return
        watched, call = attention.watched(site), RawCall((), arguments, output)
        if of_reference is not None:
            attention.keep_of_reference(watched, read_scaled_dot_product_attention, call, to_host=of_reference.cpu_offload)
        else:
            watched = self.planner.attention_by_hand(watched, self._context.stage)
            attention.observe(watched, read_scaled_dot_product_attention, call, is_reported=True)

    def close(self) -> None:
        """Remove all hooks and release the module. May be called at any time, and twice."""
        self.abandon()
        if self.ranks is not None:
            self.ranks.close()
        _monitors[:] = [ref for ref in _monitors if ref() is not self]
        self._forget_module()
        self.planner.forget_names()

    def __enter__(self) -> ModuleMonitor:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Values of the user's own

    def log_scalar(self, key: str, value: float | Tensor, aggregation_fn: Function | None = None, force: bool = False) -> None:
        """Record a value of your own in this step. Several of one key are joined as those of a metric are.

        Args:
            key: At most three parts, ``kind/site/name``, of letters, digits, ``_``, ``-`` and ``.``.
            value: A number, or a tensor on any device, which is not read before the step ends.
            aggregation_fn: Function of the concatenated values; the default is their mean.
            force: In a step that is not monitored, record it at once all the same.

        Raises:
            ValueError: If the key does not fit, or is one that the monitor has a value for.
        """
        parts = Key.of_user(key)
        stage = TRAIN if self._context is None else self._context.stage
        whole = parts._replace(stage=stage, prefix=self.planner.prefix).format()
        if self._module is not None and self.planner.is_taken(whole, stage):
            expected = f"expected one of your own, e.g. 'own/{parts.statistic}'"
            raise ValueError(f"key {whole!r} is one that the monitor records itself; {expected}.")
        if self._context is not None and self.is_monitoring():
            aggregate = aggregation_fn or "mean"
            self.logged.add(self._context, parts.kind, parts.statistic, value, aggregate, site=parts.site)
        elif force:
            last = self.storage.last_step()
            number = float(value)
            self.storage.add(Record(0 if last is None else last, {parts._replace(prefix=self.planner.prefix).format(): number}))

    def log_scalars(self, monitor_dict: Mapping[str, float | Tensor], force: bool = False) -> None:
        """Record several values; see :meth:`log_scalar`."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Function | None = None) -> None:
        """Record the mean of a tensor's elements, or what a function makes of those of the whole step; see :meth:`log_scalar`."""
        self.log_scalar(key, tensor.clone(), aggregation_fn)

    # Inside

    def _add_metric(
        self, kinds: tuple[str, ...], name: str, function: Callable[..., Any] | None, regex: str, aggregation: Function | None
    ) -> None:
        if (kinds[0], name) in self._metrics:
            raise ValueError(f"There is a metric {name!r} of kind {kinds[0]!r} already; expected another name.")
        recorded: dict[str, Any] = {"statistics": name} if function is None else {"functions": {name: function}}
        rule = Rule(kinds=list(kinds), sites=beginning_with(regex), aggregate=aggregation or "mean", **recorded)
        self.add_rules(rule, f"metric {name!r}")
        self._metrics.add((kinds[0], name))
