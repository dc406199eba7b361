"""The picture of the data flow, as SVG in the colours of the page around it."""

from __future__ import annotations

BOXES = (
    ("Training step", ("forward, backward, optimizer step", "of one or several micro-batches")),
    ("Probes", ("hooks, in monitored steps only;", "they read tensors and keep none")),
    ("Moments", ("one row for each tensor: count, mean, squared", "deviations, extremes, ...; on the device, in float64")),
    ("Reduction over ranks", ("two collectives for all rows together;", "none with one process")),
    ("One transfer", ("all rows are copied to the host at once,", "at the end of the step")),
    ("Record", ("statistics are finished from moments:", "{key: value} of the step")),
)
"""Stages, from top to bottom: title, and the lines beside it."""

SINKS = ("Loggers", "Store (HDF5)", "Health, alerts", "callback_metrics")

WIDTH, BOX_WIDTH, BOX_HEIGHT, GAP = 680, 220, 44, 26


def _box(x: float, y: float, width: float, text: str, weight: int) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6" fill-opacity="0.06" stroke="currentColor"/>'
        f'<text x="{x + width / 2}" y="{y + BOX_HEIGHT / 2 + 6}" text-anchor="middle" font-weight="{weight}">{text}</text>'
    )


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="currentColor" marker-end="url(#arrow)"/>'


def data_flow() -> str:
    """The picture, for a page of HTML."""
    parts = []
    for place, (title, lines) in enumerate(BOXES):
        y = 4 + place * (BOX_HEIGHT + GAP)
        parts.append(_box(4, y, BOX_WIDTH, title, 600))
        parts += [f'<text x="{BOX_WIDTH + 24}" y="{y + 18 + 21 * number}">{line}</text>' for number, line in enumerate(lines)]
        if place:
            parts.append(_arrow(4 + BOX_WIDTH / 2, y - GAP + 2, 4 + BOX_WIDTH / 2, y - 7))
    bottom = 4 + len(BOXES) * (BOX_HEIGHT + GAP)
    share = (WIDTH - 8) / len(SINKS)
    for number, sink in enumerate(SINKS):
        x = 4 + number * share
        parts.append(_box(x, bottom + 12, share - 12, sink, 400))
        parts.append(_arrow(4 + BOX_WIDTH / 2, bottom - GAP + 2, x + share / 2 - 6, bottom + 5))
    height = bottom + 12 + BOX_HEIGHT + 4
    marker = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    head = f'<defs>{marker}<path d="M0 0 L8 4 L0 8 z" fill="currentColor"/></marker></defs>'
    title = "The way of a tensor: training step, probes, moments, reduction over ranks, one transfer, record, and from there to all sinks"
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}" font-size="17" fill="currentColor">'
    return f'<figure class="data-flow">{svg}{head}{"".join(parts)}</svg></figure>'
