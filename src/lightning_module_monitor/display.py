"""Display of objects at the prompt and in a notebook: a title and a short table.

Internal: it may change in any version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from lightning_module_monitor.record import Finding, ModuleInfo

MAX_ROWS = 30


class Description(NamedTuple):
    """Title and table of an object."""

    title: str
    """One line."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def description_of_file(path: str, noun: str, columns: Sequence[str], read: Callable[[], Sequence[Sequence[str]]]) -> Description:
    """The description of a file by the rows that are read from it, or by the error: a display raises none."""
    try:
        rows = read()
    except (OSError, ValueError) as error:  # for example, the file is missing
        return Description(f"{path!r}, which cannot be read: {error}", (), ())
    return Description(f"{path!r}: {counted(len(rows), noun)}", columns, rows)


class Described(ABC):
    """An object that a notebook shows as a table and the prompt by its title; the lists below keep the form of a list at the prompt."""

    @abstractmethod
    def _describe(self) -> Description:
        """The title and the table."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe().title})"

    def _repr_html_(self) -> str:
        """The table for IPython. All texts are escaped: names of modules and paths may contain any characters."""
        title, columns, rows = self._describe()
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        lines = ["".join(f'<td style="text-align: left">{escape(cell)}</td>' for cell in row) for row in rows[:MAX_ROWS]]
        if len(rows) > MAX_ROWS:
            lines.append(f'<td colspan="{len(columns)}">and {len(rows) - MAX_ROWS} more</td>')
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        caption = f'<caption style="text-align: left"><b>{escape(type(self).__name__)}</b>: {escape(title)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Findings(Described, list[Finding]):
    """Findings in their order."""

    def _describe(self) -> Description:
        rows = [(str(finding.step), finding.severity, finding.name, finding.site, finding.words) for finding in self]
        return Description(counted(len(self), "finding"), ("step", "severity", "name", "site", "words"), rows)

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"


class Modules(Described, list[ModuleInfo]):
    """The modules of a model, in its order."""

    def _describe(self) -> Description:
        rows = [["" if cell is None else str(cell) for cell in module] for module in self]
        return Description(counted(len(self), "module"), [name.replace("_", " ") for name in ModuleInfo._fields], rows)

    __repr__ = list.__repr__


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun.

    >>> counted(1, "finding"), counted(1200, "key"), counted(2, "series")
    ('1 finding', '1,200 keys', '2 series')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's' * (not noun.endswith('s'))}"
