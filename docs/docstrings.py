"""Docstrings as Markdown: an extension of griffe, which reads the code for the reference pages."""

from __future__ import annotations

import re
from typing import Any

import griffe


class SphinxToMarkdown(griffe.Extension):
    """Rewrites the few forms of Sphinx that the docstrings use, and that ``help()`` shows well as they stand."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is None:
            return
        text = re.sub(r":(?:class|func|meth|data|attr|mod):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", obj.docstring.value)
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)  # the section of doctests
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # an indented block is code in both
