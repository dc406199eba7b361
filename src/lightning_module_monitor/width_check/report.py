"""The result of a width check: table, frame and figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_module_monitor.config.rules import check_choice
from lightning_module_monitor.display import Described, Description, counted
from lightning_module_monitor.errors import require, shortened
from lightning_module_monitor.sinks.store.plot import new_axes
from lightning_module_monitor.width_check.power_law import Row
from lightning_module_monitor.width_check.settings import Settings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

COLUMNS = ("module", "role", "term", "exponent", "interval", "expected", "verdict", "note")


class WidthCheck(Described):
    """The result of :func:`~lightning_module_monitor.coordinate_check`: a row for every term of every module.

    ``print(check)`` shows the table. Iteration is over the rows.

    Attributes:
        rows: Offending rows first, the farthest from the expected exponent first; then the others in the model's order.
        settings: The options of the check: ``widths``, ``seeds``, ``steps``, ``parametrization``, ...
    """

    def __init__(self, rows: Sequence[Row], settings: Settings) -> None:
        self.rows = tuple(sorted(rows, key=_urgency))
        self.settings = settings

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[str, str]) -> Row:
        """The row of a module and term; ``KeyError`` if it does not exist."""
        return {(row.module, row.term): row for row in self.rows}[key]

    @property
    def offending(self) -> tuple[str, ...]:
        """The modules with an offending row, the worst first."""
        return tuple(dict.fromkeys(row.module for row in self.rows if row.is_offending))

    @property
    def is_sound(self) -> bool:
        """Whether no module is offending. Rows that are ``unclear`` do not count."""
        return not self.offending

    @property
    def title(self) -> str:
        """The options in a line."""
        parametrization = self.settings.parametrization
        against = parametrization if isinstance(parametrization, str) else "exponents of your own"
        runs = f"{counted(len(self.settings.seeds), 'seed')}, {counted(self.settings.steps, 'step')}"
        return f"Exponents of width against {against}: widths {', '.join(map(str, self.settings.widths))}; {runs}"

    @property
    def summary(self) -> str:
        """The result in a line."""
        num_unclear = sum(row.verdict == "unclear" for row in self.rows)
        unclear = f"; {num_unclear} of {len(self.rows)} rows unclear" if num_unclear else ""
        return (f"offending: {shortened(self.offending)}" if self.offending else "no offending module") + unclear

    def _describe(self) -> Description:
        num_columns = len(COLUMNS) if any(row.note for row in self.rows) else len(COLUMNS) - 1
        rows = [_cells(row)[:num_columns] for row in self.rows]
        return Description(f"{counted(len(self.rows), 'row')}, {self.summary}", COLUMNS[:num_columns], rows)

    def __str__(self) -> str:
        """The table as plain text; without a note the columns fit into 80 characters."""
        _title, columns, rows = self._describe()
        cells = [columns, *rows]
        sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)).rstrip() for line in cells]
        return "\n".join([self.title, "", *lines, "", self.summary])

    def to_frame(self) -> pd.DataFrame:
        """The rows as a pandas frame.

        Returns:
            Columns ``module, role, term, exponent, lower, upper, expected, verdict, note``; ``expected`` is NaN where none is expected.

        Raises:
            ImportError: If pandas is not installed.
        """
        frame: pd.DataFrame = require("pandas", "pandas").DataFrame([vars(row) for row in self.rows])
        return frame.drop(columns="values").astype({"expected": float})

    def figure(self) -> Figure:
        """The curves: a panel for every term, a line for every module.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure: Figure = require("matplotlib.figure", "plot").Figure(figsize=(11, 4.5), layout="constrained")
        self.draw(figure)
        figure.suptitle(self.title, fontsize=10)
        return figure

    def draw(self, into: FigureBase) -> None:
        """Draw the curves into a figure or subfigure."""
        terms = self._drawn_terms()
        for axes, term in zip(into.subplots(1, len(terms), squeeze=False, sharey=True)[0], terms, strict=True):
            self.plot(term, ax=axes)

    def plot(self, term: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the curves of one term over the width: a line for every module, dashed where it is offending.

        Args:
            term: One of the check's terms. Default: the first one with an exponent.
            ax: Axes to draw into. Default: those of a new figure of ``matplotlib.pyplot``, which a notebook shows.

        Returns:
            The axes.

        Raises:
            ConfigError: If this check has no such term.
            ImportError: If matplotlib is not installed.
        """
        terms = self._drawn_terms()
        term = terms[0] if term is None else term
        check_choice(term, self.settings.terms, f"term is {term!r}", f"one of {', '.join(self.settings.terms)}")
        rows = [row for row in self.rows if math.isfinite(row.exponent)]
        colors = {module: f"C{number % 10}" for number, module in enumerate(sorted({row.module for row in rows}))}
        axes = ax or new_axes()
        for row in rows:
            if row.term == term:
                _draw(axes, row, self.settings.widths, colors[row.module])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(self.settings.widths, [str(width) for width in self.settings.widths])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("width")
        axes.set_ylabel("alignment [0 to 1]" if term.endswith("alignment") else "root mean square")
        axes.set_title(term.replace("_", " "), loc="left", fontweight="bold")
        if axes.get_lines():
            axes.legend(fontsize=8, frameon=False)
        return axes

    def _drawn_terms(self) -> Sequence[str]:
        """The terms with an exponent; without any the first term."""
        terms = [term for term in self.settings.terms if any(row.term == term and math.isfinite(row.exponent) for row in self.rows)]
        return terms or self.settings.terms[:1]


def _draw(axes: Axes, row: Row, widths: Sequence[int], color: str) -> None:
    """The seeds as points, their geometric mean as a line, dashed for an offending row."""
    values = np.where((row.values > 0) & np.isfinite(row.values), row.values, np.nan)
    axes.plot(widths, values, ".", color=color, alpha=0.4)
    logarithms = [np.log(seeds[seeds > 0]) for seeds in values]
    means = [np.exp(seeds.mean()) if len(seeds) else math.nan for seeds in logarithms]
    axes.plot(widths, means, "--" if row.is_offending else "-", color=color, label=f"{row.module}: {row.exponent:+.2f} {row.verdict}")


def _urgency(row: Row) -> tuple[bool, float]:
    """Offending rows first: those that are not finite, then by distance from the expected exponent."""
    if not row.is_offending:
        return True, 0.0
    return False, -math.inf if row.expected is None or math.isnan(row.exponent) else -abs(row.exponent - row.expected)


def _cells(row: Row) -> tuple[str, ...]:
    interval = "" if math.isnan(row.lower) or math.isinf(row.exponent) else f"{row.lower:+.2f} .. {row.upper:+.2f}"
    return row.module, row.role, row.term, _number(row.exponent), interval, _number(row.expected), row.verdict, row.note


def _number(exponent: float | None) -> str:
    if exponent is None or math.isnan(exponent):
        return ""
    return "zero" if math.isinf(exponent) else f"{exponent:+.2f}"
