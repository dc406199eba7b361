"""A closer look at one site, after a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_module_monitor.config import Capture, Rule
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.plan import DETAIL
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic


def raise_detail(monitor: ModuleMonitor, site: str, steps: Sequence[int]) -> bool:
    """Record every statistic of a module, or of the one that a parameter is of, of all within it, and its raw tensors, in some steps.

    Args:
        monitor: The monitor.
        site: Name of the module or parameter, of an output or head of the module, or of a transition of the gradient flow, which stands
            for the block that the gradient has come through.
        steps: Which steps; they are monitored then.

    Returns:
        Whether there is such a module or parameter.
    """
    sites, chain = monitor.planner.index, monitor.planner.plan().chain
    of_transitions = {} if chain is None else dict(zip(chain.transitions, chain.specs[1:], strict=True))
    name = of_transitions[site].site if site in of_transitions else site
    while sites.module_site(name) is None and "." in name:
        name = name.rpartition(".")[0]
    if sites.module_site(name) is None and not any(parameter.name == name for parameter in sites.parameters):
        return False
    pattern = f"{re.escape(name)}(\\..*)?"
    kinds = ["activation", "activation_gradient", "parameter", "gradient"]
    plain = [key for key, one in STATISTICS.items() if isinstance(one, Statistic) and not (one.relative or one.paired)]
    rule = Rule(kinds=kinds, sites=pattern, statistics=[one for one in plain if not one.startswith("token")], every_n_steps=list(steps))
    monitor.add_rules(rule, DETAIL, are_optional=True)
    monitor.planner.add_capture(Capture(sites=pattern, steps=list(steps), kinds=kinds))
    return True
