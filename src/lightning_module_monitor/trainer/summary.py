"""Texts about what is monitored: the line at the start of a fit, the dry run, and the description of a callback."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parameter import is_lazy

from lightning_module_monitor.config.health_options import ParsedHealth
from lightning_module_monitor.config.rules import ParsedRule, as_tuple
from lightning_module_monitor.config.schedule import ParsedSchedule
from lightning_module_monitor.display import Description, counted
from lightning_module_monitor.errors import in_bytes, shortened
from lightning_module_monitor.health.detectors import BUILT_IN
from lightning_module_monitor.kernels.bins_of_floats import HISTOGRAM
from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.keys import is_context
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.plan.matching import WATCH_LABEL
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.plan.planner import Planner
from lightning_module_monitor.plan.totals import per_module_phrase
from lightning_module_monitor.probes.base import WatchedParameter
from lightning_module_monitor.probes.gradient_noise import VALUES as NOISE_VALUES
from lightning_module_monitor.probes.parameters import matrices_of
from lightning_module_monitor.statistics.spectral_statistics import num_products
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.suggestions import these_match
from lightning_module_monitor.trainer.options import Options
from lightning_module_monitor.trainer.run import RunResults

BYTES_PER_VALUE = 8


def line_of_fit(planner: Planner, schedule: ParsedSchedule, keys: Sequence[str], roll_ups: str) -> str:
    """The line at the start of a fit, about a monitored step.

    Args:
        planner: The planner of the model.
        schedule: The schedule of the monitor.
        keys: Every planned key of training, also of a histogram.
        roll_ups: A sentence about the keys of loggers, or empty.
    """
    plan, captured = planner.plan(), planner.capture_plan()
    num_modules = sum(watched.site.runs for watched in plan.modules)
    blocks = f", gradient flow of {counted(len(plan.chain.blocks), 'block')}" if plan.chain is not None else ""
    noise = f", gradient noise of {counted(len(plan.noise.members), 'module')}" if plan.noise is not None else ""
    heads = ", more if attention runs" if plan.modules_with_heads else ""
    states = ", more for states of optimizers" if plan.states is not None else ""
    raw = "" if captured is None else f" Raw tensors of {_modules_and_parameters(len(captured.modules), captured)}."
    watched_sites = f"{_modules_and_parameters(num_modules, plan)}{blocks}{noise}"
    return f"Watching {watched_sites}: {_describe_keys(keys)} a step{heads}{states}, {schedule}.{roll_ups}{raw}"


def _modules_and_parameters(num_modules: int, plan: Plan) -> str:
    return f"{counted(num_modules, 'module')}, {counted(len(plan.parameters), 'parameter')}"


def _describe_keys(keys: Sequence[str]) -> str:
    num_context = sum(map(is_context, keys))
    return f"{counted(len(keys) - num_context, 'key')} and {num_context} context keys"


def dry_run_text(planner: Planner, schedule: ParsedSchedule, max_steps: int, keys: Sequence[str], histograms: Sequence[str]) -> str:
    """The content and cost of a monitored step: sites and statistics by kind, memory, bytes of the table and of the store.

    Args:
        planner: The planner of the model.
        schedule: The schedule of the monitor.
        max_steps: The length of the fit; -1 if it is not known.
        keys: Every planned key of a number of training.
        histograms: Every planned key of a histogram of training.
    """
    plan, captured = planner.plan(), planner.capture_plan()
    measured = [stream for stream in plan.expected() if not stream.members and not KINDS[stream.kind].has_late_sites]
    num_rows = len(measured) + (0 if plan.chain is None else len(plan.chain.blocks))
    num_counts = sum(bins.num_counts for stream in measured for bins in stream.rows_of_sums)
    table = (num_rows * len(Moments._fields) + num_counts) * BYTES_PER_VALUE
    row = (len(keys) + len(histograms) * HISTOGRAM.num_counts) * BYTES_PER_VALUE
    if max_steps >= 0 and schedule.by_clock is None:
        num_records = sum(1 for step in range(max_steps) if schedule(step))
        numbers = f"at most {in_bytes(num_records * row)} of numbers in the store"
        size = f"{counted(num_records, 'monitored step')} in max_steps={max_steps}: {numbers}"
    else:
        limit = "" if max_steps >= 0 else "; max_steps is not set"
        size = f"at most {in_bytes(row)} of numbers in the store for each monitored step ({schedule}{limit})"
    lines = [
        *_recorded(plan),
        *_memory(plan),
        *_singular_values(plan),
        *_waiting(plan),
        f"{_describe_keys([*keys, *histograms])}; a table of {in_bytes(table)} to copy to the host, once",
        size,
        *([] if captured is None else [_raw_tensors(captured)]),
    ]
    return "\n  ".join(["Dry run: nothing is recorded. With these rules a monitored step has", *lines])


def _recorded(plan: Plan) -> Iterator[str]:
    """The sites of each kind that have the same statistics, of totals after the others."""
    alike: defaultdict[tuple[bool, str, tuple[str, ...]], list[Stream]] = defaultdict(list)
    for stream in plan.expected():
        if stream.outputs:
            alike[bool(stream.members), stream.kind, tuple(stream.outputs)].append(stream)
    for (are_totals, kind, names), streams in sorted(alike.items(), key=lambda item: item[0][0]):
        sites = f": {counted(len(streams), 'site')}"
        if are_totals:
            sites = f" of all parameters of a module: {shortened([stream.site for stream in streams])}"
        elif KINDS[kind].of_heads:
            sites = f": heads of attention within {counted(len(streams), 'module')}, known when it runs,"
        elif KINDS[kind].of_states:
            sites = f": states of up to {counted(len(streams), 'parameter')}, known after the first step,"
        yield f"{kind}{sites} x {len(names)} ({', '.join(names)})"
    if plan.chain is not None:
        num_blocks = len(plan.chain.blocks)
        yield f"gradient_flow: {counted(num_blocks - 1, 'transition')} between {num_blocks} blocks, and their summary"
    if plan.noise is not None:
        yield f"gradient_noise: {counted(len(plan.noise.members), 'module')} x {len(NOISE_VALUES)} ({', '.join(NOISE_VALUES)})"


def _memory(plan: Plan) -> Iterator[str]:
    """The copies of parameters and updates that are kept."""
    updates = [(_num_bytes(parameter), parameter.streams["update"]) for parameter in plan.parameters if "update" in parameter.streams]
    copies = sum(size for size, _stream in updates)
    if copies:
        yield f"a copy of the parameters whose update is recorded: {in_bytes(copies)} during the step"
    kept = sum(size for size, stream in updates if "previous" in stream.compared_with)
    if kept:
        yield f"the last update for cosine_to_previous, in the dtype of the parameters: {in_bytes(kept)} from step to step"


def _singular_values(plan: Plan) -> Iterator[str]:
    """The multiplications that singular values take."""
    of_sources = [
        (matrices_of(parameter.site, torch.empty(tensor.shape, device="meta")), source)
        for parameter in plan.parameters
        if (tensor := parameter.site.tensor()) is not None and not is_lazy(tensor)
        for stream in parameter.streams.values()
        for source in stream.sources
    ]
    if of_sources:
        number = sum(num_products(matrices.shape, source) for matrices, source in of_sources)
        num_rows = number / max(1, sum(matrices.numel() for matrices, _source in of_sources))
        forward = counted(round(num_rows), "sample or token", "samples or tokens")
        yield f"singular values of {counted(len(of_sources), 'tensor')}: {number:.2g} multiplications, as a forward pass of {forward}"
    modules = [watched.site.name for watched in plan.modules if any(stream.sources for stream in watched.all_streams())]
    if modules:
        yield (
            f"all singular values of the features of {shortened(modules)}: for each sample or token as many multiplications as in a square "
            "layer, and on the host 0.1 s for 1,024 features, 5 s for 4,096"
        )


def _waiting(plan: Plan) -> Iterator[str]:
    """The patterns that may match states of optimizers."""
    for label, patterns in ({} if plan.states is None else plan.states.unmatched_patterns()).items():
        these = these_match([pattern.pattern for pattern in patterns])
        yield f"{label} {these} no parameter; names of states are known after the first step"


def _raw_tensors(captured: Plan) -> str:
    kinds = Counter(stream.kind for stream in captured.streams())
    sites = ", ".join(f"{kind}: {counted(num_sites, 'site')}" for kind, num_sites in kinds.items())
    size = in_bytes(sum(_num_bytes(parameter) * len(parameter.streams) for parameter in captured.parameters))
    return f"raw tensors beside the store ({sites}): {size} a step of parameters, and outputs as large as they are"


def description_of(options: Options, monitor: ModuleMonitor, results: RunResults) -> Description:
    """The rules, the health, the store and the findings of a callback, for the prompt and a notebook."""
    rules = [rule for rule in monitor.engine.base_recipe.rules if rule.label != WATCH_LABEL]
    findings, store, record = results.findings, results.store_path, results.last_record
    last = "none" if record is None else f"of step {record.step}: {counted(len(record.values), 'value')}"
    is_default = options.arguments["rules"] is None
    defaults = [rule for rule in rules if is_default and rule.is_optional and rule.label.startswith("rules")]
    rows = [
        *(("watched by default" if rule in defaults else "watched", _describe_rule(rule)) for rule in rules),
        ("health", _describe_health(options.health)),
        ("last record", last),
        ("store", store or "none"),
        *(("finding", f"step {finding.step}, {finding.name}: {finding.words}") for finding in findings),
    ]
    rule_count = "default rules" if is_default else counted(len(as_tuple(options.arguments["rules"])), "rule")
    title = f"{options.every_n_steps}, {rule_count}, store: {store or 'none'}, {counted(len(findings), 'finding')}"
    return Description(title, ("", ""), rows)


def _describe_rule(rule: ParsedRule) -> str:
    sites = shortened([pattern.pattern for pattern in rule.sites])
    where = (f" of {sites}" if sites != ".*" else "") + per_module_phrase(rule)
    return f"{', '.join(rule.kinds)}{where}: {', '.join(rule.outputs)}, {rule.schedule}"


def _describe_health(health: ParsedHealth) -> str:
    detectors = "no detectors" if health.is_off else counted(len(BUILT_IN), "detector")
    named = f" ({', '.join(health.named)} named)" if health.named and not health.is_off else ""
    return f"nonfinite: {health.nonfinite}, {detectors}{named}, {counted(len(health.alerts), 'alert')}"


def _num_bytes(watched: WatchedParameter) -> int:
    parameter = watched.site.tensor()
    return 0 if parameter is None else parameter.nbytes
