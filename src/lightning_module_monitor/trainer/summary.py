"""Texts about what is monitored: the line at the start of a fit, and the dry run."""

from __future__ import annotations

from collections import Counter

from lightning_module_monitor.config.rules import ParsedRule, as_tuple
from lightning_module_monitor.config.schedule import ParsedSchedule
from lightning_module_monitor.display import Description, counted
from lightning_module_monitor.errors import in_bytes, shortened
from lightning_module_monitor.health.alert_options import ParsedHealth
from lightning_module_monitor.health.detectors import BUILT_IN
from lightning_module_monitor.kernels.bins_of_floats import HISTOGRAM
from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.plan.matching import OF_WATCHES
from lightning_module_monitor.plan.planner import Planner
from lightning_module_monitor.plan.totals import of_modules
from lightning_module_monitor.probes.base import WatchedParameter
from lightning_module_monitor.probes.gradient_noise import VALUES as NOISE_VALUES
from lightning_module_monitor.record import KINDS
from lightning_module_monitor.trainer.options import Options
from lightning_module_monitor.trainer.run import RunResults

BYTES_PER_VALUE = 8


def summary(planner: Planner, schedule: ParsedSchedule, roll_ups: str) -> str:
    """One line about a monitored step; ``roll_ups`` is a sentence about the keys of loggers, or empty."""
    plan, captured = planner.plan(), planner.capture_plan()
    num_keys = len(planner.planned_keys()) + len(planner.planned_histograms())
    later = (", more if attention runs" if plan.modules_with_heads else "") + (
        ", more for states of optimizers" if plan.states is not None else ""
    )
    keys = f"{num_keys} keys a step{later}"
    blocks = f", gradient flow of {len(plan.chain.blocks)} blocks" if plan.chain is not None else ""
    noise = f", gradient noise of {counted(len(plan.noise.members), 'module')}" if plan.noise is not None else ""
    num_modules = sum(module.site.runs for module in plan.modules)
    raw = "" if captured is None else f" Raw tensors of {len(captured.modules)} modules, {len(captured.parameters)} parameters."
    watched = f"Watching {num_modules} modules, {len(plan.parameters)} parameters{blocks}{noise}"
    return f"{watched}: {keys}, {schedule}.{roll_ups}{raw}"


def dry_run(planner: Planner, schedule: ParsedSchedule, max_steps: int) -> str:
    """The contents and the cost of a monitored step, as text: sites x statistics by kind, keys, bytes of the table and of the store."""
    plan, captured = planner.plan(), planner.capture_plan()
    keys, histograms = planner.planned_keys(), planner.planned_histograms()
    expected = plan.expected()
    totals, streams = [stream for stream in expected if stream.members], [stream for stream in expected if not stream.members]
    lines = ["Dry run: nothing is recorded. With these rules a monitored step has"]
    for kind in dict.fromkeys(stream.kind for stream in streams if stream.outputs):
        streams_of_kind = [stream for stream in streams if stream.kind == kind and stream.outputs]
        names = dict.fromkeys(name for stream in streams_of_kind for name in stream.outputs)
        sites = f"{len(streams_of_kind)} sites"
        if KINDS[kind].of_heads:
            sites = f"heads of attention within {len(streams_of_kind)} modules, known when it runs,"
        if KINDS[kind].of_states:
            sites = f"states of up to {len(streams_of_kind)} parameters, known after the first step,"
        lines.append(f"  {kind}: {sites} x {len(names)} ({', '.join(names)})")
    for kind in dict.fromkeys(total.kind for total in totals):
        modules = [total.site for total in totals if total.kind == kind]
        names = dict.fromkeys(name for total in totals if total.kind == kind for name in total.outputs)
        lines.append(f"  {kind} of all parameters of a module: {shortened(modules)} x {len(names)} ({', '.join(names)})")
    num_blocks = len(plan.chain.blocks) if plan.chain is not None else 0
    if num_blocks:
        lines.append(f"  gradient_flow: {num_blocks - 1} transitions between {num_blocks} blocks, and their summary")
    if plan.noise is not None:
        lines.append(f"  gradient_noise: {counted(len(plan.noise.members), 'module')} x {len(NOISE_VALUES)} ({', '.join(NOISE_VALUES)})")
    copies = sum(_num_bytes(parameter) for parameter in plan.parameters if "update" in parameter.streams)
    if copies:
        lines.append(f"  a copy of the parameters whose update is recorded: {in_bytes(copies)} during the step")
    kept = sum(
        _num_bytes(parameter)
        for parameter in plan.parameters
        if (update := parameter.streams.get("update")) and "previous" in update.compared_with
    )
    if kept:
        lines.append(f"  the last update for cosine_to_previous, in the dtype of the parameters: {in_bytes(kept)} from step to step")
    waiting = [] if plan.states is None else plan.states.waiting()
    lines += [f"  {label}.sites {pattern!r} matches no parameter, and waits for names of states" for label, pattern in waiting]
    measured = [stream for stream in streams if not KINDS[stream.kind].has_late_sites]
    num_counts = sum(sort.num_counts for stream in measured for sort in stream.rows_of_sums)
    num_moments = (len(measured) + num_blocks) * len(Moments._fields)
    table = (num_moments + num_counts) * BYTES_PER_VALUE
    lines.append(f"  {len(keys) + len(histograms)} keys; a table of {in_bytes(table)} to copy to the host, once")
    row = (len(keys) + len(histograms) * HISTOGRAM.num_counts) * BYTES_PER_VALUE
    if max_steps >= 0 and schedule.by_clock is None:
        num_records = sum(1 for step in range(max_steps) if schedule(step))
        lines.append(f"  {num_records} monitored steps in max_steps={max_steps}: at most {in_bytes(num_records * row)} of store")
    else:
        limit = "" if max_steps >= 0 else "; max_steps is not set"
        lines.append(f"  at most {in_bytes(row)} of store for each monitored step ({schedule}{limit})")
    if captured is not None:
        kinds = Counter(stream.kind for stream in captured.streams())
        captured_sites = ", ".join(f"{kind}: {num_sites} sites" for kind, num_sites in kinds.items())
        size = in_bytes(sum(_num_bytes(parameter) * len(parameter.streams) for parameter in captured.parameters))
        lines.append(f"  raw tensors beside the store ({captured_sites}): {size} a step of parameters, and outputs as large as they are")
    return "\n".join(lines)


def described(options: Options, monitor: ModuleMonitor, results: RunResults) -> Description:
    """The rules, the health, the store and the findings of a callback, for the prompt and a notebook."""
    rules = [rule for rule in monitor.engine.own_recipe.rules if rule.label != OF_WATCHES]
    findings, store, record = results.findings, results.store_path, results.last_record
    last = "none" if record is None else f"of step {record.step}: {counted(len(record.values), 'value')}"
    is_default = options.arguments["rules"] is None
    defaults = [rule for rule in rules if is_default and rule.is_optional and rule.label.startswith("rules")]
    rows = [
        *(("watched by default" if rule in defaults else "watched", _rule_in_words(rule)) for rule in rules),
        ("health", _health_in_words(options.health)),
        ("last record", last),
        ("store", store or "none"),
        *(("finding", f"step {finding.step}, {finding.name}: {finding.words}") for finding in findings),
    ]
    rule_count = "default rules" if is_default else counted(len(as_tuple(options.arguments["rules"])), "rule")
    title = f"{options.every_n_steps}, {rule_count}, store: {store or 'none'}, {counted(len(findings), 'finding')}"
    return Description(title, ("", ""), rows)


def _rule_in_words(rule: ParsedRule) -> str:
    sites = " or ".join(pattern.pattern for pattern in rule.sites)
    where = (f" of {sites}" if sites != ".*" else "") + of_modules(rule)
    return f"{', '.join(rule.kinds)}{where}: {', '.join(rule.outputs)}, {rule.schedule}"


def _health_in_words(health: ParsedHealth) -> str:
    detectors = "no detectors" if health.is_off else counted(len(BUILT_IN), "detector")
    named = f" ({', '.join(health.named)} named)" if health.named and not health.is_off else ""
    return f"nonfinite: {health.nonfinite}, {detectors}{named}, {counted(len(health.alerts), 'alert')}"


def _num_bytes(watched: WatchedParameter) -> int:
    parameter = watched.site.tensor()
    return 0 if parameter is None else parameter.nbytes
