"""The names of series: ``[prefix/][stage/]kind/site/statistic``.

Internal: it may change in any version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kinds import (
    CONTEXT_KIND,
    KINDS,
    LEARNING_RATE,
    OWN_FIGURES,
    OWN_KIND,
    RESIDUALS,
    ROOT_SITE,
    SINGULAR_VALUES,
    STAGES,
    TRAIN,
)

MAX_PREFIX_LENGTH = 40
MAX_SITE_LENGTH = 128
MAX_STATISTIC_LENGTH = 40
"""With the longest stage and kind, a key stays within the 250 characters that MLflow takes."""

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")


def fit_for_loggers(name: str, max_length: int = MAX_SITE_LENGTH) -> str:
    """A name of letters, digits, ``_``, ``-`` and single dots.

    Characters that loggers reject become ``_``. The middle of a long name is replaced by a hash.

    >>> fit_for_loggers("experts.a/b [0]")
    'experts.a_b__0_'
    """
    fit = _UNFIT.sub("_", name).replace("..", "._.")
    if len(fit) <= max_length:
        return fit
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    keep = (max_length - len(digest) - 2) // 2
    return f"{fit[:keep]}-{digest}-{fit[-keep:]}"


class Key(NamedTuple):
    """The name of one series: ``[prefix/][stage/]kind/site/statistic``.

    No part but ``prefix`` holds a ``/``, so that :meth:`parse` undoes :meth:`format`.
    """

    kind: str
    site: str
    statistic: str
    stage: str = TRAIN
    prefix: str = ""

    def format(self) -> str:
        """The key as loggers and the store know it, e.g. ``validation/activation/model.fc/rms``."""
        stage = "" if self.stage == TRAIN else self.stage
        return "/".join(part for part in (self.prefix, stage, self.kind, self.site, self.statistic) if part)

    @property
    def full_kind(self) -> str:
        """The kind with prefix and stage: ``run1/validation/activation``."""
        return self._replace(site="", statistic="").format()

    @classmethod
    def parse(cls, text: str) -> Key:
        """Take a key apart; the inverse of :meth:`format`.

        Args:
            text: A key. One with two parts, ``a/b``, has no site: kind ``a``, statistic ``b``; nor have the
                monitor's own figures, ``monitor/errors``, and the context, ``context/loss``. One without a ``/`` has neither kind nor site.

        Returns:
            Its parts.
        """
        *head, statistic = text.split("/")
        site = head.pop() if _has_site(head, statistic) else ""
        kind = head.pop() if head else ""
        stage = head.pop() if head and head[-1] in STAGES else TRAIN
        return cls(kind, site, statistic, stage, "/".join(head))

    @classmethod
    def of_user(cls, text: str) -> Key:
        """The parts of a key that a user gives to a value.

        Raises:
            ValueError: If it has more than three parts, or one that a logger would not take.
        """
        parts = text.split("/") if isinstance(text, str) else []
        if not 1 <= len(parts) <= 3 or any(not part or fit_for_loggers(part) != part for part in parts):
            fit = "/".join(map(fit_for_loggers, parts[:3])) or "own/value"
            raise ValueError(f"key {text!r} does not fit; expected at most three parts of letters, digits, '_', '-' and '.', e.g. {fit!r}.")
        return cls.parse(text)


def _has_site(head: Sequence[str], statistic: str) -> bool:
    """Whether the last part of a key before its statistic is a site, and not the kind."""
    if len(head) < 2:
        return False
    *_rest, before, last = head
    if last == CONTEXT_KIND:
        return before in KINDS  # then it is a module of this name
    return last != OWN_KIND or statistic not in OWN_FIGURES


class Columns:
    """The keys of records as columns of their vectors. Further keys are added at the end, and none is moved or removed.

    So what is bound to the first columns stays right, and :attr:`version` shows whether there are more.

    >>> columns = Columns([Key("gradient", "fc.weight", "norm")])
    >>> columns.add([Key("context", "", "loss"), Key("gradient", "fc.weight", "norm")]).tolist(), columns.texts
    ([1, 0], ['gradient/fc.weight/norm', 'context/loss'])
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.keys: list[Key] = []
        self.texts: list[str] = []
        """The keys as loggers and the store know them."""
        self._column_by_key: dict[Key, int] = {}
        self._column_by_text: dict[str, int] = {}
        self.add(keys)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Columns:
        """The columns of keys that are known as texts alone, whatever these are."""
        columns = cls()
        for text in dict.fromkeys(texts):
            columns._append(Key.parse(text), text)
        return columns

    @property
    def version(self) -> int:
        """The number of columns."""
        return len(self.keys)

    def add(self, keys: Iterable[Key]) -> NDArray[np.intp]:
        """The columns of some keys, shape ``(keys,)``; a key without a column gets one."""
        return np.array([self._column_of(key) for key in keys], np.intp)

    def find(self, text: str) -> int | None:
        """The column of a key, as loggers know it; ``None`` if it has none."""
        return self._column_by_text.get(text)

    def _column_of(self, key: Key) -> int:
        column = self._column_by_key.get(key)
        if column is None:
            text = key.format()
            # Parts of a key may differ where its text does not: a logged value may have a kind that looks like a prefix.
            column = self._column_by_text.get(text)
            column = self._append(key, text) if column is None else column
            self._column_by_key[key] = column
        return column

    def _append(self, key: Key, text: str) -> int:
        column = self._column_by_key[key] = self._column_by_text[text] = len(self.keys)
        self.texts.append(text)
        self.keys.append(key)
        return column


def is_total(key: Key, modules: Collection[str] = ()) -> bool:
    """Whether a key is a total over the parameters of a module, as ``per_module`` records them.

    Args:
        key: The key.
        modules: Names of the modules of the model, as in keys; ``_root_``, which is everything that is monitored, need not be there.

    >>> (
    ...     is_total(Key.parse("gradient/_root_/norm")),
    ...     is_total(Key.parse("gradient/head/norm"), ["head"]),
    ...     is_total(Key.parse("gradient/a/norm")),
    ... )
    (True, True, False)
    """
    kind = KINDS.get(key.kind)
    site = key.site.rpartition(".")[0] if kind is not None and kind.of_states else key.site
    return kind is not None and kind.site == "parameter" and (site == ROOT_SITE or site in modules)


def is_of_spectrum(key: Key) -> bool:
    """Whether a key is of one of a matrix's largest singular values, or of its residual: all of a site are shown together.

    >>> is_of_spectrum(Key.parse("update/fc.weight/residual_2")), is_of_spectrum(Key.parse("activation/fc/residual_2"))
    (True, False)
    """
    kind = KINDS.get(key.kind)
    return kind is not None and kind.has_matrices and key.statistic in (*SINGULAR_VALUES, *RESIDUALS)


def is_residual(key: Key) -> bool:
    """Whether a key is of the residual of a singular value, mostly a rounding error.

    >>> is_residual(Key.parse("update/fc.weight/residual_2")), is_residual(Key.parse("update/fc.weight/singular_value_2"))
    (True, False)
    """
    return key.statistic in RESIDUALS and is_of_spectrum(key)


def is_context(key: str) -> bool:
    """Whether a key is one of :data:`CONTEXT_KIND`.

    >>> is_context("run1/context/loss"), is_context("activation/context/rms")
    (True, False)
    """
    if f"{CONTEXT_KIND}/" not in key:  # quicker
        return False
    parts = Key.parse(key)
    return parts.kind == CONTEXT_KIND and not parts.site


def name_of_rate(number: int) -> str:
    """The name of a learning rate under :data:`CONTEXT_KIND`.

    >>> name_of_rate(0), name_of_rate(1)
    ('lr', 'lr_1')
    """
    return f"{LEARNING_RATE}_{number}" if number else LEARNING_RATE


def is_rate(name: str) -> bool:
    """Whether a name under :data:`CONTEXT_KIND` is that of a learning rate.

    >>> is_rate("lr_1"), is_rate("lr_ratio")
    (True, False)
    """
    return re.fullmatch(rf"{LEARNING_RATE}(_\d+)?", name) is not None


def check_prefix(prefix: str, label: str = "prefix") -> str:
    """Check the prefix of keys; returns it.

    Raises:
        ConfigError: If a logger would not take it.
    """
    parts = prefix.split("/") if isinstance(prefix, str) else [""]
    if prefix != "" and (len("/".join(parts)) > MAX_PREFIX_LENGTH or any(not part or fit_for_loggers(part) != part for part in parts)):
        expected = f"at most {MAX_PREFIX_LENGTH} letters, digits, '_', '-' and '.', with '/' between parts"
        raise ConfigError(f"{label} {prefix!r} cannot stand in a key; expected {expected}, e.g. 'run1'.")
    return prefix
