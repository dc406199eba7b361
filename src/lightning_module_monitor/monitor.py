"""The hook engine and its phases. It knows no Trainer and works in any loop."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_module_monitor.complaints import Complaints, unchanged_grad_mode
from lightning_module_monitor.config import (
    Capture,
    GradientFlow,
    Rule,
    as_tuple,
    default_rules,
    parse_patterns,
)
from lightning_module_monitor.distributed.agreement import disagreement
from lightning_module_monitor.distributed.exchange import Exchange
from lightning_module_monitor.distributed.processes import is_first_process, process_ranks
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import ConfigError, nearest, shortened
from lightning_module_monitor.model.hooks import Unobserved, is_tracing
from lightning_module_monitor.model.names import ROOT, without_wrappers
from lightning_module_monitor.plan import Plan
from lightning_module_monitor.probes.activations import ActivationProbe
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.attention_calls import RawCall, read_scaled_dot_product_attention
from lightning_module_monitor.probes.base import Among, Probe
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.coordinate_check import CoordinateCheckProbe
from lightning_module_monitor.probes.differences import DifferenceProbe
from lightning_module_monitor.probes.gradient_flow import GradientFlowProbe
from lightning_module_monitor.probes.parameters import ParameterProbe
from lightning_module_monitor.probes.reference import Reference, ReferenceProbe, structural_differences
from lightning_module_monitor.probes.step_context import Window
from lightning_module_monitor.probes.whole_tensors import WholeTensors, expected_names
from lightning_module_monitor.record import (
    MAX_PREFIX_LENGTH,
    OVERHEAD_FRACTION,
    OWN_KIND,
    RCC_SKIPPED_CALLS,
    STAGES,
    STEP_SKIPPED,
    TRAIN,
    Histogram,
    Key,
    RawTensor,
    Record,
    Values,
    fit_for_loggers,
)
from lightning_module_monitor.schedule import Schedule, parse_schedule
from lightning_module_monitor.sinks.history import StorageManager
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.watch import Watch
from lightning_module_monitor.wishes import DETAIL, Due, Wishes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Function = Callable[[Tensor], Any]
PairFunction = Callable[[Tensor, Tensor], Any]

_monitors: weakref.WeakValueDictionary[int, ModuleMonitor] = weakref.WeakValueDictionary()
"""Every monitor that has a module, the newest last."""
_numbers = itertools.count()


def monitor_of(module: nn.Module) -> ModuleMonitor | None:
    """The monitor that a module is watched by; of several one that observes now, else the one that was set last."""
    watching = [monitor for _number, monitor in sorted(_monitors.items(), reverse=True) if monitor.watches(module)]
    return next((monitor for monitor in watching if monitor.is_monitoring()), watching[0] if watching else None)


class ModuleMonitor:
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
        monitor_step_fn: Which steps are monitored, also where no rule is due: every n-th, a list, ``"log"``, or a function of the step.
        format_module_name_fn: Makes a name of what ``named_modules`` and ``named_parameters`` give; the default takes
            wrappers off.
        excluded_modules_regex: Names that begin like this (``re.match``) are never watched.
        logger: Where problems and late keys are said.
        rules: What to watch; methods like :meth:`add_activation_metric` add more.
        gradient_flow: Blocks between which the gain of the gradient is watched, in every step that ``monitor_step_fn`` picks.
        capture: Which raw tensors the records of which steps hold.
        exclude: Pattern or patterns (``re.fullmatch``) of names that are never watched, with all that is inside.
        module: Name of the submodule outside of which nothing is watched. Names stay those of the whole.
        prefix: Put before every key.
        on_error: ``warn``: what cannot be computed is said once and recorded as NaN. ``raise``: it is an error.
        history: Number of records that are kept in memory.
        cpu_offload: Whether the reference's activations wait for the model's in the memory of the host. On a GPU that
            takes less of its memory and more time.
        distributed: Whether every rank of ``torch.distributed`` runs this monitor, in the same steps, and the values are to be
            those of all ranks together. Every rank then has every record. In tensor parallel training the mesh of the ranks
            that share their input.

    Raises:
        ConfigError: If a value is wrong; says which, what was expected, and the nearest right one.
    """

    def __init__(
        self,
        monitor_step_fn: Schedule = 1,
        format_module_name_fn: Callable[[str], str] = without_wrappers,
        excluded_modules_regex: str | None = None,
        logger: logging.Logger | None = None,
        *,
        rules: Rule | Sequence[Rule | dict[str, Any]] | None = (),
        gradient_flow: GradientFlow | dict[str, Any] | None = None,
        capture: Capture | dict[str, Any] | None = None,
        exclude: str | Sequence[str] | None = None,
        module: str | None = None,
        prefix: str = "",
        on_error: str = "warn",
        history: int = 1000,
        cpu_offload: bool = False,
        distributed: bool | DeviceMesh = False,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise ConfigError(f"on_error is {on_error!r}; expected 'warn' or 'raise'.")
        if module is not None and not isinstance(module, str):
            raise ConfigError(f"module is a {type(module).__name__}; expected the name of a submodule, e.g. 'encoder'.")
        excluded = parse_patterns(as_tuple(exclude), "exclude")
        if excluded_modules_regex is not None:
            excluded += parse_patterns(_beginning_with(excluded_modules_regex), "excluded_modules_regex")
        self._complaints = Complaints(logger or logging.getLogger(__name__), on_error, self._speaks_for_all)
        self._within = module
        self._prefix = check_prefix(prefix)
        if not {*prefix.split("/")}.isdisjoint(STAGES):
            expected = f"expected none of {', '.join(STAGES)}, which keys have already"
            raise ConfigError(f"prefix {prefix!r} has the name of a stage in it; {expected}.")
        self._cpu_offload = cpu_offload
        self.distributed: bool | DeviceMesh = distributed
        self.wishes = Wishes(
            parse_schedule(monitor_step_fn, "every_n_steps"),
            default_rules() if rules is None else as_tuple(rules),
            gradient_flow,
            capture,
            within=module,
            exclude=excluded,
            format_name=format_module_name_fn,
            prefix=prefix,
            say=self._complaints.say_once,
        )
        """What is watched, when and where."""
        self._metrics: set[tuple[str, str]] = set()
        self.storage = StorageManager(history)
        self._forget_module()

    def _forget_module(self) -> None:
        """Set everything that is not an option to what it is where there is no module."""
        self._number = -1
        """Its place among the monitors that have a module."""
        self._module: nn.Module | None = None
        self._watched: frozenset[nn.Module] = frozenset()
        self._exchanges: dict[tuple[str, Due], Exchange] = {}
        """How what all ranks have seen is brought together, by the plan that says what may be seen."""
        self._has_agreed = False
        """Whether all ranks are known to watch the same."""
        self._reference: Reference | None = None
        self._begun: int | None = None
        """The step that was begun and has not ended, monitored or not."""
        self._window: Window | None = None
        self._suspended: list[Window | None] = []
        self._silences: set[object] = set()
        """One for each block in which nothing is observed."""
        self._awaits_attention = True
        """Whether no step has ended yet in which attention was due."""
        self._own_watches: dict[tuple[str, str, str, str], Watch] = {}
        self._free_keys: set[str] = set()
        """Keys of the user's that are none of ours."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in the middle of a run is a monitor without a module: hooks and an open step belong to the original."""
        closed = object.__new__(type(self))
        vars(closed).update(vars(self))
        closed._forget_module()
        return vars(closed)

    # What there is

    @property
    def module(self) -> nn.Module | None:
        """The module that is monitored; ``None`` before :meth:`set_module`."""
        return self._module

    @property
    def reference_module(self) -> nn.Module | None:
        """The module that it is compared with; ``None`` if there is none."""
        return None if self._reference is None else self._reference.module

    @property
    def current_step(self) -> int | None:
        """The step that was begun and has not ended, monitored or not, or that of the open validation loop; ``None`` if there is none."""
        return self._begun if self._window is None else self._window.step

    # What is watched

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
        shares_input = not isinstance(self.distributed, bool) and self.distributed.size() > 1
        sites = self.wishes.read_names(module, shares_input=shares_input)
        self._module, self._watched = module, sites.with_wrapped(module)
        self._number = next(_numbers)
        _monitors[self._number] = self
        self._report_renamed()

    def set_reference_module(self, module: nn.Module, *, follows: bool = False) -> None:
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
            module: A module of the same structure as the monitored one; a copy of it, say, made at its initialization.
                Where the monitor has a ``module``, one of that submodule's structure will do.
            follows: Whether the monitor calls it whenever the module is about to run, with the same arguments.

        Raises:
            ValueError: If no module was set, or if names or shapes of modules or parameters differ; lists them.
        """
        if self._module is None:
            raise ValueError("There is no module that this could be the reference of; call set_module(module) first.")
        self.remove_reference_module()
        is_of_whole = self._within is not None and not structural_differences(self._module, module)
        live = self._module if is_of_whole else self.wishes.sites.within
        self._reference = Reference(live, module, follows=follows, cpu_offload=self._cpu_offload, name=self._within or ROOT)

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
        is_awaited = self._window is not None and any(isinstance(probe, ReferenceProbe) for probe in self._window.probes)
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
        with self.no_monitor():
            for probe in () if self._window is None else self._window.probes:
                if isinstance(probe, ReferenceProbe):
                    probe.run(call)

    def _reference_failed(self, error: Exception) -> None:
        """Report and count that the reference could not be run.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self._window is not None:
            self._window.observation.num_errors += 1
        name, cause = type(error).__name__, str(error).strip().partition("\n")[0]
        self._complaints.report(f"The reference could not run ({name}: {cause}).", error, f"reference {name}")

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
        for rule in as_tuple(rules):
            self._add_rule(rule, label, is_optional=are_optional)

    def raise_detail(self, site: str, steps: Sequence[int]) -> bool:
        """Record every statistic of a module, or of the one that a parameter is of, of all within it, and its raw tensors, in some steps.

        Args:
            site: Name of the module or parameter, of an output or head of the module, or of a transition of the gradient flow, which stands
                for the block that the gradient has come through.
            steps: Which steps; they are monitored then.

        Returns:
            Whether there is such a module or parameter.
        """
        sites, chain = self.wishes.sites, self.wishes.plan().chain
        of_transitions = {} if chain is None else dict(zip(chain.transitions, chain.watches[1:], strict=True))
        name = of_transitions[site].site if site in of_transitions else site
        while sites.module_site(name) is None and "." in name:
            name = name.rpartition(".")[0]
        if sites.module_site(name) is None and not any(parameter.name == name for parameter in sites.parameters):
            return False
        pattern = f"{re.escape(name)}(\\..*)?"
        kinds = ["activation", "activation_gradient", "parameter", "gradient"]
        plain = [key for key, one in STATISTICS.items() if isinstance(one, Statistic) and not (one.relative or one.paired)]
        rule = Rule(kinds=kinds, sites=pattern, statistics=[one for one in plain if not one.startswith("token")], every_n_steps=list(steps))
        self._add_rule(rule, DETAIL, is_optional=True)
        self.wishes.add_capture(Capture(sites=pattern, steps=list(steps), kinds=kinds))
        return True

    def has_module(self) -> bool:
        """Whether there is a module to monitor."""
        return self._module is not None

    def watches(self, module: nn.Module) -> bool:
        """Whether a module is, or is in, the one to monitor, and is not excluded."""
        return module in self._watched

    def watched_module(self) -> nn.Module:
        """The module outside of which nothing is watched: the monitored one, or the submodule that was named.

        Raises:
            ValueError: If no module was set.
        """
        return self.wishes.sites.within

    def agree(self) -> None:
        """Make sure that all ranks watch the same: one collective, of every rank. Without it the first step that is monitored begins so.

        Raises:
            ConfigError: On every rank, if rules, schedules or modules differ.
        """
        ranks = None if self._has_agreed else self._ranks()
        if ranks is None or self._module is None:
            return
        differences = disagreement(self.wishes.one_by_one(), ranks)
        if differences:
            raise ConfigError(differences)
        self._has_agreed = True

    # Phases of a step

    def is_step_monitored(self, step: int) -> bool:
        """Whether the schedule picks a step, a rule with a cadence of its own is due in it, or tensors are captured in it."""
        return self._due(step) is not None

    def is_monitoring(self) -> bool:
        """Whether what happens now is observed: nothing is while torch traces (``torch.export``, ``FakeTensorMode``, any dispatch mode)."""
        return self._window is not None and not self._silences and not is_tracing()

    def begin_step(self, step: int) -> bool:
        """Begin a step; if it is monitored, the hooks go on. A step that an error left open is closed first.

        Args:
            step: Number of the optimizer step. It may be lower than before: after a resume it is.

        Returns:
            Whether the step is monitored.

        Raises:
            ValueError: If no module was set.
        """
        self._join_what_is_open()
        if self._module is None:
            raise ValueError("There is no module to monitor; call set_module(module) before the first step.")
        self._begun = step
        due = self._due(step)
        if due is not None:
            self._open(due, step, TRAIN, self.wishes.capture_plan(step))
        return due is not None

    def begin_backward(self, scale: Tensor | float | None = None) -> None:
        """The backward pass begins: from now to :meth:`end_backward` gradients that arrive at outputs count.

        Where neither is ever called, all do, as they arrive.

        Args:
            scale: What the loss was multiplied by, shape ``()``: those gradients are divided by it, and values are of the loss
                itself. Of a ``GradScaler`` that is ``scaler.scale(torch.ones((), device=loss.device))``, which unlike
                ``scaler.get_scale()`` reads nothing on the host.
        """
        if self._window is not None:
            for probe in self._window.probes:
                probe.begin_backward(_as_scale(scale))

    def end_backward(self) -> None:
        """The backward pass is over: an ``autograd.grad`` of the user's from now on does not count."""
        if self._window is not None:
            for probe in self._window.probes:
                probe.end_backward()

    def monitor_gradients(
        self, before_clip: bool = False, parameters: Iterable[Tensor] | None = None, scale: Tensor | float | None = None
    ) -> None:
        """Take in the gradients of the parameters, as they are now.

        Args:
            before_clip: Whether they are about to be clipped; they get keys of their own then.
            parameters: Of which parameters, where several optimizers have their own; all without it.
            scale: What they are still multiplied by, where no ``GradScaler.unscale_`` has seen to that; see :meth:`begin_backward`.
        """
        kind = "gradient_before_clip" if before_clip else "gradient"
        among, factor = _identities(parameters), _as_scale(scale)
        self._tell("gradients", Probe.see_gradients, kind, among, factor)

    def monitor_parameters(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Take in the parameters, as they are now: before the optimizer moves them.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
        """
        among = _identities(parameters)
        self._tell("parameters", Probe.see_parameters, among)

    def monitor_updates(self, parameters: Iterable[Tensor] | None = None, *, is_skipped: bool = False) -> None:
        """Take in what the optimizer did to the parameters since :meth:`monitor_parameters`; :meth:`end_step` does it otherwise.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
            is_skipped: Whether the optimizer left them where they were: then the update is 0, whatever anybody else did.
        """
        among = _identities(parameters)
        self._tell("updates", Probe.see_updates, among, is_skipped=is_skipped)

    def monitor_skipped_step(self, is_skipped: bool | Tensor) -> None:
        """Take in whether a ``GradScaler`` skipped the step of an optimizer; ``monitor/step_skipped`` is 1 if that of any in this step.

        Args:
            is_skipped: Also a tensor of shape ``()``, on any device, which is not 0 if so; it is not read before the step ends.
        """
        if not is_tracing():
            self._see_own_figure(STEP_SKIPPED, (is_skipped != 0).double() if isinstance(is_skipped, Tensor) else float(is_skipped))

    def monitor_overhead(self, fraction: float) -> None:
        """Take in the share of the time that monitoring takes on this rank: ``monitor/overhead_fraction`` is the largest of all ranks."""
        self._see_own_figure(OVERHEAD_FRACTION, fraction)

    def monitor_attention(self, module: nn.Module | str, arguments: Mapping[str, Any], output: Tensor | None = None) -> None:
        """Take in a call of scaled dot product attention; see :func:`monitor_scaled_dot_product_attention`.

        Args:
            module: The module that it belongs to, or a name of it.
            arguments: The arguments of ``F.scaled_dot_product_attention``, by name.
            output: What it returned.

        Raises:
            ValueError: If the model has no such module.
        """
        if self._window is None or self._module is None or not self.is_monitoring():
            return
        sites = self.wishes.sites
        site, attention = sites.module_site(module), self._window.attention
        if site is not None and attention is not None:
            watched = self.wishes.told_attention(attention.watched(site), self._window.stage)
            attention.see(watched, read_scaled_dot_product_attention, RawCall((), arguments, output), by_hand=True)
        elif all(module is not one for one in self._module.modules()):
            raise ValueError(_none_of(module, "that are watched", [one.name for one in sites.modules]))

    def monitor_reference_attention(self, module: nn.Module | str, arguments: Mapping[str, Any], output: Tensor | None = None) -> None:
        """Take in a call of the reference's, to compare the model's own with; like :meth:`monitor_attention`.

        Under :meth:`no_monitor` too, which the reference runs under.

        Raises:
            ValueError: If there is no reference, or it has no such module.
        """
        if self._reference is None:
            raise ValueError("There is no reference that this attention could belong to; call set_reference_module(module) first.")
        if self._window is None:
            return
        sites = self.wishes.sites
        live = module if isinstance(module, str) else self._reference.model_of(module)
        site, attention = None if live is None else sites.module_site(live), self._window.attention
        if site is not None and attention is not None:
            call = RawCall((), arguments, output)
            watched = attention.watched(site)
            attention.see_reference(watched, read_scaled_dot_product_attention, call, to_host=self._reference.cpu_offload)
        elif not isinstance(live, nn.Module):
            raise ValueError(_none_of(module, "of the reference", [one.name for one in sites.modules]))

    @unchanged_grad_mode()
    def after_micro_batch(self) -> None:
        """End one of several micro-batches of a step."""
        if self._window is not None:
            for probe in self._window.probes:
                with self._complaints.guard("micro-batch", self._window.observation):
                    probe.end_micro_batch()

    def end_step(self) -> Record | None:
        """End the step: hooks off, one transfer, values finished.

        Returns:
            The record, if the step was monitored.
        """
        if self.is_in_stage():
            return None
        self._begun = None
        if self._window is None:
            return None
        self.monitor_updates()
        return self._finish()

    def end_comparison(self) -> None:
        """The model has run on what the reference was run on: what of the reference is left over is said, and forgotten."""
        if self._window is not None:
            for probe in self._window.probes:
                if isinstance(probe, ReferenceProbe):
                    probe.end_micro_batch()

    def begin_stage(self, stage: str, step: int) -> bool:
        """Begin a validation, test or predict loop. A step that is open is suspended until it ends.

        A loop that an error left open is closed first.

        Args:
            stage: ``validation``, ``test`` or ``predict``.
            step: The step that its record gets.

        Returns:
            Whether any rule asks for activations.
        """
        if self._window is not None and self.is_in_stage():
            self._window.lose()
            self.end_stage()
        everything = self.wishes.everything()
        plan = self.wishes.plan(everything, stage)
        if self._window is not None:
            self._window.set_open(False)
            self._window.set_suspended(True)
        self._suspended.append(self._window)
        self._open(everything, step, stage)
        return bool(plan.modules)

    def is_in_stage(self) -> bool:
        """Whether a loop of another stage than training is monitored now."""
        return bool(self._suspended)

    def end_stage(self) -> Record | None:
        """End the loop that was begun last, and go on with the step that it interrupted.

        Returns:
            The record of the loop.
        """
        if not self._suspended:
            return None
        record = self._finish()
        self._window = self._suspended.pop()
        if self._window is not None:
            self._window.set_suspended(False)
        self._set_open()
        return record

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Within the block nothing is observed."""
        silence = object()
        try:
            self._silences.add(silence)
            self._set_open()
            yield
        finally:
            self._silences.discard(silence)
            self._set_open()

    def lose(self) -> None:
        """An error: what is open gives no record when it ends, which it must all the same, for other ranks wait for that."""
        for window in (self._window, *self._suspended):
            if window is not None:
                window.lose()

    def _join_what_is_open(self) -> None:
        """Close what an error has left open, in the order in which other ranks have ended it: the loop, then the step around it."""
        self.lose()
        while self._window is not None or self._suspended:
            if self._window is not None:
                self._finish()
            self._window = self._suspended.pop() if self._suspended else None

    def abandon(self) -> None:
        """Close the step, and what it suspended, at once and without a record; other ranks are not told."""
        with ExitStack() as stack:
            for window in (self._window, *self._suspended):
                if window is not None:
                    stack.callback(window.close)
        self._window = self._begun = None
        self._suspended.clear()

    def close(self) -> None:
        """Take every hook off and let the module go. May be called at any time, also twice."""
        self.abandon()
        _monitors.pop(self._number, None)
        self._forget_module()
        self.wishes.forget_names()
        self._complaints.forget()

    def __enter__(self) -> ModuleMonitor:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Values of the user's own, and what was recorded

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
        parts = Key.parse(_check_own_key(key))
        self._check_is_free(parts, TRAIN if self._window is None else self._window.stage)
        if self._window is not None and self.is_monitoring():
            watch = self._own_watch(parts.kind, parts.site, parts.statistic, self._window.stage)
            size = value.numel() if isinstance(value, Tensor) else 1
            value = value.detach() if isinstance(value, Tensor) else value
            function = UserFunction(parts.statistic, float, aggregation_fn or "mean")
            self._window.observation.add_result(watch, function, value, size)
        elif force:
            last = self.storage.last_step()
            number = float(value)
            self.storage.add(Record(0 if last is None else last, {parts._replace(prefix=self._prefix).format(): number}))

    def log_scalars(self, monitor_dict: Mapping[str, float | Tensor], force: bool = False) -> None:
        """Record several values; see :meth:`log_scalar`."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Function | None = None) -> None:
        """Record the mean of a tensor's elements, or what a function makes of those of the whole step; see :meth:`log_scalar`."""
        self.log_scalar(key, tensor.clone(), aggregation_fn)

    def get_step_metrics(self) -> dict[str, float]:
        """The values of the step that ended last, by key."""
        last = self.storage.last_step()
        return {} if last is None else self.storage.get_step_metrics(last)

    def get_step_histograms(self) -> dict[str, Histogram]:
        """The histograms of the step that ended last, by key; those of earlier steps are in a store, if there is one."""
        return self.storage.last_histograms()

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """The values by key of every step that is still in memory, by step."""
        return self.storage.get_all_metrics()

    # Inside

    def _add_metric(
        self, kinds: tuple[str, ...], name: str, function: Callable[..., Any] | None, regex: str, aggregation: Function | None
    ) -> None:
        if (kinds[0], name) in self._metrics:
            raise ValueError(f"There is a metric {name!r} of kind {kinds[0]!r} already; expected another name.")
        wish: dict[str, Any] = {"statistics": name} if function is None else {"functions": {name: function}}
        rule = Rule(kinds=list(kinds), sites=_beginning_with(regex), aggregate=aggregation or "mean", **wish)
        self._add_rule(rule, f"metric {name!r}")
        self._metrics.add((kinds[0], name))

    def _add_rule(self, rule: Rule, label: str, *, is_optional: bool = False) -> None:
        self.wishes.add(rule, label, is_optional=is_optional)
        self._exchanges.clear()
        self._has_agreed = False
        if self._module is not None:
            self._report_renamed()

    def _report_renamed(self) -> None:
        """Report, in one line, the names in keys that are not those of the model."""
        changed = [f"{old!r} is called {new!r} in keys" for old, new in self.wishes.renamed().items()]
        if changed:
            differ = f"{len(changed)} {'name differs' if len(changed) == 1 else 'names differ'} from those of the model"
            fit = "Loggers take letters, digits, '_', '-' and '.', and names must differ"
            self._complaints.say_once(f"{differ}: {', '.join(changed[:3])}. {fit}.")

    def _due(self, step: int) -> Due | None:
        """What is due in a step, if it is monitored; where a function of the user's fails, raw tensors alone are captured."""
        try:
            return self.wishes.due(step)
        except Exception as error:
            self._complaints.report(f"every_n_steps failed at step {step} ({type(error).__name__}: {error}).", error, "every_n_steps")
            return Due((), gradient_flow=False) if self.wishes.is_captured(step) else None

    def _open(self, due: Due, step: int, stage: str, captured: Plan | None = None) -> None:
        self.agree()
        self._leave_out_what_is_gone()
        plan, sites = self.wishes.plan(due, stage), self.wishes.sites
        observation = Observation(self._complaints.of_watch, plan.rows)
        exchange = self._exchange(due, stage)
        failed = functools.partial(self._not_captured, observation)
        expected = expected_names(plan.parameters_with_functions, [] if captured is None else captured.parameters)
        whole_tensors = WholeTensors(expected, None if exchange is None else exchange.ranks, failed)
        self._window = Window(step, stage, observation, exchange, whole_tensors)
        rank = 0 if exchange is None else exchange.ranks.index
        probes: list[Probe] = [
            ParameterProbe(plan.parameters_by_kind, observation, whole_tensors, self._complaints.say_once, self._reference, rank),
            ActivationProbe(plan.outputs, observation, sites.further_name, self._complaints.say_once),
        ]
        if plan.chain is not None:
            probes.append(GradientFlowProbe(plan.chain, observation))
        if captured is not None:
            probes.append(CaptureProbe(captured.modules, captured.parameters, sites.further_name, failed, whole_tensors))
        if self._reference is not None:
            probes += self._reference_probes(plan, observation, self._reference)
        attention = AttentionProbe(
            plan.modules,
            plan.modules_with_heads,
            observation,
            sites.head_name,
            self._complaints.say_once,
            is_asked_for=self.wishes.asks_for_attention(due),
        )
        self._window.attach(attention, probes)
        self._set_open()

    def _leave_out_what_is_gone(self) -> None:
        gone = self.wishes.leave_out_what_is_gone()
        if gone:
            self._exchanges.clear()
            why = "what took its place is not watched, and there are no more values of it before the next fit"
            self._complaints.say_once(f"{shortened(gone)} was taken out of the model while it trains: {why}.", logging.WARNING)

    def _ranks(self) -> Ranks | None:
        """The processes that train together; ``None`` where this is the only one."""
        same_input = None if isinstance(self.distributed, bool) else self.distributed
        return None if self.distributed is False else process_ranks(same_input)

    def _exchange(self, due: Due, stage: str) -> Exchange | None:
        """What brings all ranks together; ``None`` where this is the only one."""
        ranks = self._ranks()
        if ranks is None:
            return None
        if (stage, due) not in self._exchanges:
            self._exchanges[stage, due] = Exchange(ranks, self.wishes.plan(due, stage).all_watches())
        return self._exchanges[stage, due]

    def _reference_probes(self, plan: Plan, observation: Observation, reference: Reference) -> list[Probe]:
        """Those that compare with the reference, and, if any of them will, the one that keeps what it gives."""
        name, say = self.wishes.sites.further_name, self._complaints.say_once
        twins = ReferenceProbe(reference, self._reference_failed, say)
        probes: list[Probe] = [
            DifferenceProbe(plan.modules, observation, twins, name),
            CoordinateCheckProbe(plan.modules, observation, twins, self._own_figure(RCC_SKIPPED_CALLS), name, say),
        ]
        # The last to be attached: by then it is known what is wanted of it.
        return [*probes, twins] if twins.is_needed() else []

    def _set_open(self) -> None:
        if self._window is not None:
            self._window.set_open(not self._silences)

    def _tell(self, what: str, moment: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Tell every probe that it concerns of a moment of the step, a method of ``Probe``; an error in one keeps it from no other."""
        if self._window is not None and self.is_monitoring():
            with unchanged_grad_mode():
                for probe in self._window.probes:
                    if probe.overrides(moment):
                        with self._complaints.guard(what, self._window.observation):
                            getattr(probe, moment.__name__)(*args, **kwargs)

    @unchanged_grad_mode()
    def _finish(self) -> Record | None:
        """Close the window and finish what it saw; ``None`` if an error has spoiled that, on any rank."""
        assert self._window is not None
        window, tensors = self._window, []
        try:
            tensors = self._end_probes(window)
        finally:
            with self._complaints.guard("hooks", window.observation):
                window.close()
            # Not before: what Ctrl-C has left on is taken off by whoever closes this monitor.
            self._window = None
        if window.has_missed():
            self._complaints.say_once(Unobserved.message, logging.WARNING)
        values: Values | dict[str, float] = Values()
        for key in window.observation.drop_overwriting(self._own_watches.values()):
            self._complaints.say_once(f"{key!r} is logged, and is measured too: what is measured is recorded.", logging.WARNING)
        with self._complaints.guard("values", window.observation):
            values = collected = window.observation.collect(window.exchange)
            values = _with_derived(collected, window.probes)
        if window.observation.is_lost:
            return None
        self._check_attention(window)
        values[self.wishes.own_key("errors", window.stage)] = float(window.observation.num_errors)
        record = Record(window.step, values, window.observation.histograms, tensors)
        self.storage.add(record)
        return record

    def _end_probes(self, window: Window) -> list[RawTensor]:
        """Let the probes take in what has waited; returns the raw tensors of the step."""
        tensors: list[RawTensor] = []
        with self._complaints.guard("whole tensors", window.observation):
            window.whole_tensors.put_together()
        for probe in window.probes:
            if probe.overrides(Probe.finish):
                with self._complaints.guard("what has waited", window.observation):
                    probe.finish()
            if probe.overrides(Probe.tensors):
                with self._complaints.guard("raw tensors", window.observation):
                    tensors += probe.tensors()
        return tensors

    def _check_attention(self, window: Window) -> None:
        """Warn once if the first step in which attention was due had none."""
        if window.attention is None or not (self._awaits_attention and window.attention.is_asked_for):
            return
        self._awaits_attention = False
        if not window.attention.has_observed and self._speaks_for_all():
            message = (
                f"attention: step {window.step} called none of F.scaled_dot_product_attention, F.multi_head_attention_forward and "
                'nn.MultiheadAttention, and no attention is recorded. Try attn_implementation="sdpa" for a Hugging Face model, and '
                "monitor_scaled_dot_product_attention in a forward of your own."
            )
            self._complaints.say_once(message, logging.WARNING)

    def _check_is_free(self, parts: Key, stage: str) -> None:
        """Check that a key of the user's, in its parts, is not one that the monitor has a value for, as far as those are known."""
        key = parts._replace(stage=stage, prefix=self._prefix).format()
        if key in self._free_keys or self._module is None:
            return
        if self.wishes.is_taken(key, stage):
            raise ValueError(f"key {key!r} is one that the monitor records itself; expected one of your own, e.g. 'own/{parts.statistic}'.")
        self._free_keys.add(key)

    def _see_own_figure(self, name: str, value: Tensor | float) -> None:
        if self._window is not None and not is_tracing():
            function = UserFunction(name, float, "max")
            self._window.observation.add_result(self._own_figure(name, self._window.stage), function, value, 1)

    def _own_figure(self, name: str, stage: str = TRAIN) -> Watch:
        return self._own_watch(OWN_KIND, "", name, stage)

    def _own_watch(self, kind: str, site: str, name: str, stage: str) -> Watch:
        """What stands for a value that no probe takes: always the same for the same key, on every rank, whatever else there is."""
        return self._own_watches.setdefault((kind, site, name, stage), Watch(kind, site, stage, self._prefix))

    def _not_captured(self, observation: Observation, what: str, error: Exception) -> None:
        observation.num_errors += 1
        name = type(error).__name__
        self._complaints.report(f"{what} could not be captured ({name}: {error}).", error, f"capture {name}")

    def _speaks_for_all(self) -> bool:
        return self.distributed is False or is_first_process()


def _beginning_with(regex: str) -> str:
    """A pattern for ``re.fullmatch`` that matches what ``re.match`` matches with ``regex``."""
    return f"(?:{regex})(?s:.*)"


def check_prefix(prefix: str, label: str = "prefix") -> str:
    """What is put before keys, if it may stand in one.

    Raises:
        ConfigError: If a logger would not take it.
    """
    parts = prefix.split("/") if isinstance(prefix, str) else [""]
    if prefix != "" and (len("/".join(parts)) > MAX_PREFIX_LENGTH or any(not part or fit_for_loggers(part) != part for part in parts)):
        expected = f"at most {MAX_PREFIX_LENGTH} letters, digits, '_', '-' and '.', with '/' between parts"
        raise ConfigError(f"{label} {prefix!r} cannot stand in a key; expected {expected}, e.g. 'run1'.")
    return prefix


def _with_derived(values: Values, probes: Iterable[Probe]) -> Values | dict[str, float]:
    """The values, with what some probes put in the place of others."""
    deriving = [probe for probe in probes if probe.overrides(Probe.derive)]
    if not deriving:
        return values
    derived = dict(values.items())
    for probe in deriving:
        probe.derive(derived)
    return derived


def _identities(parameters: Iterable[Tensor] | None) -> Among:
    return None if parameters is None else frozenset(map(id, parameters))


def _as_scale(scale: Tensor | float | None) -> Tensor | None:
    return torch.tensor(scale, dtype=torch.float64, device="cpu") if isinstance(scale, float | int) else scale


def _none_of(module: nn.Module | str, which: str, names: Sequence[str]) -> str:
    """What is said of a module that is not there."""
    what = repr(module) if isinstance(module, str) else f"This {type(module).__name__}"
    return f"{what} is none of the {len(names)} modules {which}{nearest(str(module), names) if isinstance(module, str) else ''}"


def _check_own_key(key: str) -> str:
    parts = key.split("/")
    if len(parts) > 3 or any(not part or fit_for_loggers(part) != part for part in parts):
        fit = "/".join(re.sub(r"[^A-Za-z0-9_.-]", "_", part) for part in parts[:3])
        raise ValueError(f"key {key!r} does not fit; expected at most three parts of letters, digits, '_', '-' and '.', e.g. {fit!r}.")
    return key
