"""Charts of several series, and TensorBoard's layout of them in its tab CUSTOM SCALARS."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.core import url_to_fs

from lightning_module_monitor.keys import Key, is_of_spectrum, is_rate, is_total
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS, OWN_KIND, ROOT_SITE, SINGULAR_VALUES, SUMMARY_SITE
from lightning_module_monitor.lightning_packages import Logger
from lightning_module_monitor.sinks.logger_types import is_tensorboard, key_prefix
from lightning_module_monitor.sinks.roll_ups import NONFINITE_COUNT, SITES

GLANCE = "at a glance"
"""TensorBoard's first category of charts."""


class Chart(NamedTuple):
    """The series of a kind and statistic, a line for each site."""

    kind: str
    """With prefix and stage."""
    statistic: str

    def pattern(self, prefix: str, without: Collection[str] = ()) -> str:
        """A regular expression for the keys, after the prefix of a logger, of all sites but some."""
        site = f"(?!({'|'.join(map(re.escape, without))})/)[^/]+" if without else "[^/]+"
        return f"^{re.escape(f'{prefix}{self.kind}')}/{site}/{re.escape(self.statistic)}$"


def charts_of(keys: Iterable[str], modules: Collection[str] = ()) -> Counter[Chart]:
    """Number of sites by chart. Totals are not counted; counts of non-finite elements are rarely logged and have no chart.

    Of singular values the largest has a chart. Several are in charts of :func:`spectra_of`; their residuals are in none.
    """
    shown = (key for key in _drawn(keys) if key.statistic == SINGULAR_VALUES[0] or not is_of_spectrum(key))
    return Counter(Chart(key.full_kind, key.statistic) for key in shown if not is_total(key, modules))


def spectra_of(keys: Iterable[str], *, rolls_up: bool) -> list[Key]:
    """The sites, or the roll-ups, whose singular values have a chart because there are several, as keys without a statistic."""
    several = (key for key in _drawn(keys) if key.statistic == SINGULAR_VALUES[1] and is_of_spectrum(key))
    sites = (key._replace(site=site, statistic="") for key in several for site in (SITES if rolls_up else [key.site]))
    return [*dict.fromkeys(sites)]


def _drawn(keys: Iterable[str]) -> list[Key]:
    parsed = map(Key.parse, keys)
    return [key for key in parsed if key.site not in ("", SUMMARY_SITE) and key.kind != OWN_KIND and key.statistic != NONFINITE_COUNT]


def lay_out(logger: object, keys: Collection[str], modules: Collection[str] = (), *, rolls_up: bool) -> None:
    """Add charts to TensorBoard's tab CUSTOM SCALARS: those to look at first, then one for each kind and statistic, and spectra."""
    if not is_tensorboard(logger) or not keys:
        return
    prefix = key_prefix(logger)
    glance, layout = defaultdict[tuple[int, str], list[str]](list), defaultdict[str, dict[str, list[Any]]](dict)
    for text in dict.fromkeys(keys):
        chart_at_a_glance = _chart_at_a_glance(Key.parse(text), modules)
        if chart_at_a_glance is not None:
            glance[chart_at_a_glance].append(f"^{re.escape(prefix + text)}$")
    for (_order, title), patterns in sorted(glance.items()):
        layout[GLANCE][title] = ["Multiline", patterns]
    totals = [key for key in _drawn(keys) if is_total(key, modules)]
    for chart in charts_of(keys, modules):
        without = dict.fromkeys(key.site for key in totals if (key.full_kind, key.statistic) == chart)
        layout[chart.kind][f"{chart.kind}: {chart.statistic}"] = ["Multiline", [chart.pattern(prefix, without)]]
    for site in spectra_of(keys, rolls_up=rolls_up):
        pattern = f"^{re.escape(prefix + site.format())}/{SINGULAR_VALUES[0].replace('1', '[0-9]')}$"
        layout[site.full_kind][f"{site.full_kind}: singular values of {site.site}"] = ["Multiline", [pattern]]
    # The tab shows the last layout of a run, and those of all runs below its folder: a second one gets a run of its own.
    own = Path("monitor_charts", Key.parse(next(iter(keys))).prefix)
    if _has_layout(logger):
        with type(logger.experiment)(f"{logger.log_dir}/{own.as_posix()}") as writer:
            writer.add_custom_scalars(dict(layout))
    else:
        logger.experiment.add_custom_scalars(dict(layout))


def _has_layout(logger: Logger) -> bool:
    """Whether a run of TensorBoard has a layout, of the user's or of an earlier callback."""
    logger.experiment.flush()
    files, folder = url_to_fs(logger.log_dir)
    for path in files.find(folder, maxdepth=1):
        if "tfevents" in path:
            with files.open(path) as events:
                if any(b"custom_scalars__config__" in line for line in events):
                    return True
    return False


def _chart_at_a_glance(key: Key, modules: Collection[str]) -> tuple[int, str] | None:
    """Rank and title of the chart of a key among those to look at first; ``None`` if it is not in one of them."""
    if key.kind == CONTEXT_KIND:
        return (0, "loss") if key.statistic == LOSS else (1, "learning rate") if is_rate(key.statistic) else None
    if not is_total(key, modules) or key.statistic == NONFINITE_COUNT:
        return None
    title = f"{key.full_kind}: {key.statistic}"
    return (2 if key.kind == "gradient" else 3, title) if key.site == ROOT_SITE else (4, f"{title} by module")
