"""The monitor of a module, for any loop.

Internal: it may change in any version.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_module_monitor.config.gradient_options import GradientFlow, GradientNoise, parse_gradient_flow, parse_gradient_noise
from lightning_module_monitor.config.rules import (
    Capture,
    Rule,
    as_tuple,
    check_choice,
    default_rules,
    parse_capture,
    parse_patterns,
    parse_rule,
)
from lightning_module_monitor.config.schedule import Schedule, parse_schedule
from lightning_module_monitor.display import Described, Description, counted
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.engine import metrics
from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.engine.phases import StepEngine
from lightning_module_monitor.errors import ConfigError, Log, shortened
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.kinds import OWN_KIND
from lightning_module_monitor.model.compiled import COMPILED_CHOICES, KEEP
from lightning_module_monitor.model.names import beginning_with, without_wrappers
from lightning_module_monitor.plan.blocks import BLOCK_LABEL
from lightning_module_monitor.plan.matching import WATCH_LABEL
from lightning_module_monitor.plan.recipe import Recipe
from lightning_module_monitor.plan.totals import per_module_phrase
from lightning_module_monitor.probes.attention_calls import RawCall
from lightning_module_monitor.probes.base import ErrorReporter
from lightning_module_monitor.probes.parameters import ParameterAccess
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.recent_records import StorageManager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_monitors: list[weakref.ref[ModuleMonitor]] = []
"""Every monitor that has a module, the newest last."""


def monitor_of(module: nn.Module) -> ModuleMonitor | None:
    """The monitor of a module; of several, one that observes now, else the one that was set last."""
    monitors = (monitor for ref in reversed(_monitors) if (monitor := ref()) is not None)
    watching = [monitor for monitor in monitors if monitor.engine.observed is not None and module in monitor.engine.observed.watched]
    return next((monitor for monitor in watching if monitor.is_monitoring()), watching[0] if watching else None)


NOTHING_RECORDED = (
    "Nothing was recorded: this monitor has no rules. Give it rules, or rules=None for those of the callback without arguments."
)


class ModuleMonitor(Described):
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

    Every call of the module between :meth:`begin_step` and :meth:`end_step` counts, whatever it is for, unless :meth:`no_monitor` is on.

    Args:
        monitor_step_fn: Which steps are monitored, even if no rule is due: every n-th, a list, ``"log"``, one every so many minutes
            (``{"minutes": 5}``), or a function of the step.
        format_module_name_fn: Makes names in keys of what ``named_modules`` and ``named_parameters`` give; the default removes wrappers.
        excluded_modules_regex: Names that begin like this (``re.match``) are not monitored.
        logger: Receives warnings and other messages.
        rules: What to record, by default nothing; methods like :meth:`add_activation_metric` add more. ``None``: what the callback
            records by default.
        gradient_flow: Blocks between which the gain of the gradient is recorded, in every step that ``monitor_step_fn`` picks.
        gradient_noise: Whether to record the simple noise scale, in every step that ``monitor_step_fn`` picks: of the whole model, or with
            ``{per_module: ...}`` of modules. See :class:`GradientNoise`.
        capture: Raw tensors that the records of some steps hold.
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
        gradient_noise: GradientNoise | Mapping[str, Any] | bool = False,
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
        check_choice(compiled, COMPILED_CHOICES, f"compiled is {compiled!r}")
        excluded = parse_patterns(as_tuple(exclude), "exclude")
        if excluded_modules_regex is not None:
            excluded += parse_patterns(beginning_with(excluded_modules_regex), "excluded_modules_regex")
        schedule = parse_schedule(monitor_step_fn, "every_n_steps", may_be_by_clock=True)
        rule_specs = default_rules() if rules is None else as_tuple(rules)
        self.distributed = distributed
        self.access = ParameterAccess()
        """Internal: reads parameters and their gradients, from the next :meth:`set_module` on."""
        self.storage = StorageManager(history)
        """The records in memory."""
        self._cpu_offload = cpu_offload
        self._reporter = ErrorReporter(logger or logging.getLogger(__name__), on_error, self._speaks_for_all)
        recipe = Recipe(
            schedule,
            tuple(parse_rule(rule, f"rules[{number}]", schedule) for number, rule in enumerate(rule_specs)),
            None if gradient_flow is None else parse_gradient_flow(gradient_flow),
            parse_gradient_noise(gradient_noise, schedule),
            () if capture is None else (parse_capture(capture),),
            within=module,
            exclude=excluded,
            format_name=format_module_name_fn,
            prefix=prefix,
            keeps_compiled=compiled == KEEP,
        )
        self.engine = StepEngine(recipe, self._reporter, self.storage)
        """Internal: runs the steps."""
        self.metrics: set[tuple[str, str]] = set()
        """Internal: kind and name of each metric that was added by function."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in the middle of a run is a monitor without a module: hooks and an open step belong to the original."""
        return vars(self) | {"engine": StepEngine(self.engine.base_recipe, self._reporter, self.storage)}

    # The module

    def _describe(self) -> Description:
        rules, last = [rule for rule in self.engine.recipe.rules if rule.label not in (WATCH_LABEL, BLOCK_LABEL)], self.storage.last_step()
        module = "no module" if self.module is None else type(self.module).__name__
        title = f"{module}, {counted(len(rules), 'rule')}, {'no record' if last is None else f'last record of step {last}'}"
        sites = [shortened([site.pattern for site in rule.sites]) + per_module_phrase(rule) for rule in rules]
        rows = [(", ".join(rule.kinds), site, ", ".join(rule.outputs), str(rule.schedule)) for rule, site in zip(rules, sites, strict=True)]
        return Description(title, ("kinds", "sites", "statistics", "when"), rows)

    @property
    def module(self) -> nn.Module | None:
        """The module that is monitored; ``None`` before :meth:`set_module`."""
        return None if self.engine.observed is None else self.engine.observed.module

    @property
    def module_names(self) -> dict[nn.Module, str]:
        """The name of every module of the monitored one, also of those that are excluded; empty before :meth:`set_module`."""
        return {} if self.engine.observed is None else self.engine.observed.index.names()

    def planned_keys(self) -> list[str]:
        """Every key of training, also of a histogram, that is known before the first step; a ``ValueError`` if no module was set."""
        planner = self.engine.model.planner
        return [*planner.planned_keys(), *planner.planned_histograms()]

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
        engine = self.engine
        if engine.observed is not None:
            raise ValueError("A module was set before; close this monitor, or use a second one for a second module.")
        engine.observed = ObservedModel(
            module, engine.base_recipe, self._reporter, engine.gate, distributed=self.distributed, access=self.access
        )
        _monitors.append(weakref.ref(self, _monitors.remove))

    def close(self) -> None:
        """Remove all hooks and release the module. May be called at any time, and twice."""
        _monitors[:] = [ref for ref in _monitors if ref() is not self]
        self.engine.close()
        self.engine = StepEngine(self.engine.base_recipe, self._reporter, self.storage)

    def __enter__(self) -> ModuleMonitor:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def add_rules(self, rules: Rule | Sequence[Rule], label: str = "rules", *, are_optional: bool = False) -> None:
        """Add rules to those that the monitor was made with; from the next step on they count.

        Args:
            rules: One or several.
            label: What they are called in messages.
            are_optional: Whether they may match nothing.

        Raises:
            ConfigError: If one is wrong, or matches nothing in the module.
        """
        for rule in as_tuple(rules):
            self.engine.add_rule(rule, label, is_optional=are_optional)

    # Metrics, values of the user, recorded values: see engine/metrics.py

    add_activation_metric = metrics.add_activation_metric
    add_activation_difference_metric = metrics.add_activation_difference_metric
    add_parameter_difference_metric = metrics.add_parameter_difference_metric
    add_parameter_metric = metrics.add_parameter_metric
    add_gradient_metric = metrics.add_gradient_metric
    get_step_metrics = metrics.get_step_metrics
    get_all_metrics = metrics.get_all_metrics
    monitor_skipped_step = metrics.monitor_skipped_step
    monitor_context = metrics.monitor_context
    log_scalar = metrics.log_scalar
    log_scalars = metrics.log_scalars
    log_tensor = metrics.log_tensor

    # The reference

    @property
    def reference_module(self) -> nn.Module | None:
        """The module that it is compared with; ``None`` if there is none."""
        observed = self.engine.observed
        return None if observed is None or observed.reference is None else observed.reference.module

    def has_reference_module(self) -> bool:
        """Whether there is a module to compare with."""
        return self.reference_module is not None

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
        if self.engine.observed is None:
            raise ValueError("There is no module that this could be the reference of; call set_module(module) first.")
        self.remove_reference_module()
        self.engine.observed.set_reference(module, follows=follows, cpu_offload=self._cpu_offload, wrapper=wrapper)

    def remove_reference_module(self) -> None:
        """Compare with nothing from now on; a step that is open is closed without a record."""
        if self.engine.observed is not None and self.engine.observed.reference is not None:
            self.engine.drop_steps()
            self.engine.observed.reference = None

    @contextmanager
    def running_reference(self) -> Iterator[None]:
        """Within the block the reference is run, by other means than its own ``forward``; see :meth:`set_reference_module`.

        Raises:
            ValueError: If there is none.
        """
        observed = self.engine.observed
        if observed is None or observed.reference is None:
            raise ValueError("There is no reference to run; call set_reference_module(module) first.")
        with self.no_monitor(), observed.reference.running():
            yield

    # The phases of a step

    @property
    def current_step(self) -> int | None:
        """The step that was begun and has not ended, monitored or not, or that of the open validation loop; ``None`` if there is none."""
        return self.engine.begun if self.engine.open_step is None else self.engine.open_step.step

    def is_step_monitored(self, step: int) -> bool:
        """Whether the schedule picks a step, a rule with a cadence of its own is due in it, or tensors are captured in it."""
        return self.engine.due(step) is not None

    def is_monitoring(self) -> bool:
        """Whether what happens now is observed: nothing is while torch traces (``torch.export``, ``FakeTensorMode``, any dispatch mode)."""
        return self.engine.is_monitoring()

    def no_monitor(self) -> AbstractContextManager[None]:
        """Within the block nothing is observed."""
        return self.engine.gate.closed()

    def begin_step(self, step: int) -> bool:
        """Begin a step; if it is monitored, the hooks go on. A step that an error left open is closed first.

        Args:
            step: Number of the optimizer step. It may be lower than before: after a resume it is.

        Returns:
            Whether the step is monitored.

        Raises:
            ValueError: If no module was set.
        """
        return self.engine.begin_step(step)

    def begin_backward(self, scale: Scale = None) -> None:
        """The backward pass begins: from now to :meth:`end_backward` gradients that arrive at outputs count.

        Where neither is ever called, all do, as they arrive.

        Args:
            scale: What the loss was multiplied by, shape ``()``: those gradients are divided by it, and values are of the loss
                itself. Of a ``GradScaler`` that is ``scaler.scale(torch.ones((), device=loss.device))``, which unlike
                ``scaler.get_scale()`` reads nothing on the host.
        """
        if self.engine.open_step is not None:
            self.engine.open_step.modules.begin_backward(scale)

    def end_backward(self) -> None:
        """The backward pass is over. The gradients of a later ``autograd.grad`` do not count."""
        if self.engine.open_step is not None:
            self.engine.open_step.modules.end_backward()

    def monitor_gradients(self, before_clip: bool = False, parameters: Iterable[Tensor] | None = None, scale: Scale = None) -> None:
        """Observe the gradients of the parameters, as they are now.

        Args:
            before_clip: Whether they are about to be clipped; they get keys of their own then.
            parameters: Of which parameters, where several optimizers have their own; all without it.
            scale: What they are still multiplied by, where no ``GradScaler.unscale_`` has divided by it; see :meth:`begin_backward`.
        """
        if self.engine.observing_step is not None:
            kind = "gradient_before_clip" if before_clip else "gradient"
            self.engine.observing_step.observe_gradients(kind, parameters, scale)

    def monitor_parameters(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Observe the parameters, as they are now: before the optimizer moves them.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
        """
        if self.engine.observing_step is not None:
            self.engine.observing_step.observe_parameters(parameters)

    def monitor_updates(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        is_skipped: bool | Tensor = False,
        optimizers: Optimizer | Iterable[Optimizer] = (),
    ) -> None:
        """Observe the change of the parameters since :meth:`monitor_parameters`; :meth:`end_step` does it otherwise.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
            is_skipped: Whether the optimizer left them where they were: then the update is 0, whatever else has changed them. A tensor,
                shape ``()``, that is not 0 if an optimizer that skips by itself has done so, is not read on the host.
            optimizers: The optimizers that have just stepped, for ``optimizer_state``.
        """
        if self.engine.observing_step is not None:
            stepped = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
            self.engine.observing_step.observe_updates(parameters, is_skipped=is_skipped, optimizers=stepped)

    def monitor_attention(
        self, module: nn.Module | str, arguments: Mapping[str, Any], output: Tensor | None = None, *, is_reference: bool = False
    ) -> None:
        """Observe a call of scaled dot product attention; see :func:`monitor_scaled_dot_product_attention`.

        Args:
            module: The module that it belongs to, or a name of it.
            arguments: The arguments of ``F.scaled_dot_product_attention``, by name.
            output: What it returned.
            is_reference: Whether the module is one of the reference's, which runs under :meth:`no_monitor`.

        Raises:
            ValueError: If there is no such module, or no reference that it could belong to.
        """
        if is_reference and not self.has_reference_module():
            raise ValueError("There is no reference that this attention could belong to; call set_reference_module(module) first.")
        context = self.engine.open_step if is_reference else self.engine.observing_step
        if context is not None:
            context.observe_attention(module, RawCall((), arguments, output), is_reference=is_reference)

    def after_micro_batch(self) -> None:
        """End one of several micro-batches of a step."""
        if self.engine.open_step is not None:
            self.engine.open_step.end_micro_batch()

    def end_step(self) -> Record | None:
        """End the step: hooks off, one transfer, values finished.

        Returns:
            The record, if the step was monitored.
        """
        record = self.engine.end_step()
        if record is not None and not (
            self.engine.recipe.rules or record.tensors or any(key.kind != OWN_KIND for key in record.columns.keys)
        ):
            self._reporter.log_once(NOTHING_RECORDED, logging.WARNING)
        return record

    def _speaks_for_all(self) -> bool:
        return self.distributed is False or is_first_process()
