"""Whether patterns of keys, in options, match a key that there can be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from lightning_module_monitor.errors import ConfigError, nearest, nearest_pattern
from lightning_module_monitor.plan import Planner
from lightning_module_monitor.probes.gradient_flow import KIND as GRADIENT_FLOW
from lightning_module_monitor.record import KINDS, OWN_KIND, ROLL_UP_SITES, STAGES, TRAIN


def check_keys(planner: Planner, pattern: re.Pattern[str], label: str, keys: Sequence[str], histograms: Sequence[str]) -> bool:
    """Check that a pattern of keys matches one.

    Args:
        planner: What is recorded.
        pattern: The pattern.
        label: What it is called in messages.
        keys: Those of numbers that are planned.
        histograms: Those of histograms.

    Returns:
        Whether it does; else it may match one that is not known yet.

    Raises:
        ConfigError: If it matches none that there can be.
    """
    if any(pattern.fullmatch(key) for key in keys):
        return True
    text = pattern.pattern
    wrong = f"{label} {text!r} matches"
    histogram = next((key for key in histograms if pattern.fullmatch(key)), None)
    if histogram is not None:
        raise ConfigError(f"{wrong} {histogram!r}, a histogram; expected keys of numbers{nearest(text, keys)}")
    roll_up = next((site for site in ROLL_UP_SITES if site in text), None)
    if roll_up is not None:
        expected = f"expected the keys themselves, e.g. {text.replace(roll_up, '.*')!r}"
        raise ConfigError(f"{wrong} no key that is recorded: the site {roll_up} is made for loggers, where there are many keys; {expected}")
    if not _may_come(planner, text):
        raise ConfigError(f"{wrong} none of the {len(keys)} keys{nearest_pattern(text, keys)}")
    return False


def _may_come(planner: Planner, pattern: str) -> bool:
    """Whether a pattern that matches no planned key may match one that comes: of a further output, a head, or one of the user's own."""
    start = f"{planner.prefix}/" if planner.prefix else ""
    stage, *rest = pattern.removeprefix(start).split("/", 1)
    kind, *_more = rest[0].split("/") if stage in STAGES and rest else [stage]
    is_plain = re.fullmatch(r"\w+", kind) is not None and pattern.startswith(start)
    ours = (*KINDS, GRADIENT_FLOW, OWN_KIND, *STAGES)
    if is_plain and kind not in ours:
        return not difflib.get_close_matches(kind, ours, n=1, cutoff=0.75)
    shorter = re.sub(r"\\?\.output_[\w.-]+", "", pattern)
    if shorter != pattern and any(re.fullmatch(shorter, key) for key in planner.planned_keys((TRAIN, *STAGES))):
        return True
    return not planner.plan().knows_all_keys(kind if is_plain else "")
