"""Suggestions for a misspelt name or pattern, for the end of a message.

Internal: it may change in any version.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from lightning_module_monitor.errors import shortened

SYNONYMS = {
    # kinds
    "activation": ("act", "feature", "features", "output", "outputs"),
    "activation_gradient": ("grad_output", "grad_outputs"),
    "parameter": ("bias", "param", "params", "weight", "weights"),
    "gradient": ("grad", "grads"),
    # statistics
    "norm": ("l2", "l2_norm", "magnitude"),
    "abs_mean": ("l1", "mean_abs"),
    "abs_max": ("inf_norm", "linf", "max_abs"),
    "mean": ("average", "avg"),
    "std": ("sigma", "stddev"),
    "zero_fraction": ("sparsity", "zeros"),
    "dead_fraction": ("dead_neurons", "dead_units"),
    "nonfinite_count": ("inf", "nan", "nans"),
    "nonfinite": ("anomaly", "detect_anomaly", "inf", "nan", "nans"),
    "hist": ("distribution", "histogram"),
    "ratio": ("update_ratio",),
    # options and their values
    "sites": ("include", "layers", "modules", "names"),
    "exclude": ("ignore", "skip"),
    "statistics": ("metrics", "stats"),
    "every_n_steps": ("frequency", "interval", "log_every_n_steps", "log_freq"),
    "stop": ("abort", "error", "halt", "raise"),
    "warn": ("log", "print"),
    "ignore": ("never", "off"),
    "train": ("fit",),
    "validate": ("eval", "val"),
}
"""Name here: what other tools and textbooks call it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: the known name that is ``name`` but for capitals, has it as a synonym, or is most like it; else a dot.

    >>> nearest("Update", ["update_ratio", "update"]), nearest("sparsity", ["zero_fraction", "rms"]), nearest("entropy", ["rms"])
    ("; nearest: 'update'", "; nearest: 'zero_fraction'", '.')
    """
    match = _nearest(name, known)
    return "." if match is None else f"; nearest: {match!r}"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    by_lower_case = {name.lower(): name for name in known}
    match = name.lower() if name.lower() in by_lower_case else _near(name.lower(), by_lower_case)
    return None if match is None else by_lower_case[match]


def quoted(pattern: str) -> str:
    r"""A pattern in quotes, with single backslashes, as it is written in YAML.

    >>> print(quoted(r"blocks\.0"))
    'blocks\.0'
    """
    return repr(pattern).replace("\\\\", "\\")


def or_examples(end: str, known: Iterable[str]) -> str:
    """The end of a sentence of :func:`nearest` or :func:`nearest_pattern`; if no name is near, with three names, the outermost first.

    >>> or_examples(".", ["_root_", "net.0", "net", "head"]), or_examples("; nearest: 'net'", ["net", "head"])
    ("; expected e.g. 'net', 'head', 'net.0'.", "; nearest: 'net'")
    """
    outermost = sorted((name for name in known if not name.startswith("_")), key=lambda name: name.count("."))
    return end if end != "." or not outermost else f"; expected e.g. {', '.join(map(repr, outermost[:3]))}."


def _near(name: str, known: Collection[str]) -> str | None:
    meant = [other for other in known if name in SYNONYMS.get(other, ()) or (len(name) > 2 and other.startswith(f"{name}_"))]
    return next(iter(meant + difflib.get_close_matches(name, known, n=1)), None)


def nearest_pattern(pattern: str, names: Collection[str]) -> str:
    """The end of a sentence on a pattern that matches none of the names as a whole: a pattern that does, and the nearest name.

    >>> nearest_pattern("fc*", ["fc1", "fc2"]), nearest_pattern("mlp", ["blocks.0.mlp", "head"])
    (" as a whole; 'fc.*' matches 2 of them.", " as a whole; '.*mlp.*' matches 1 of them.")
    >>> nearest_pattern("weights/.*/norm", ["parameter/encoder.embedding/norm", "parameter/decoder.embedding/norm"])
    " as a whole; 'parameter/.*/norm' matches 2 of them."
    """
    corrected = _corrected(pattern, names)
    if corrected is None:
        return nearest(pattern, names)
    matched = [name for name in names if re.fullmatch(corrected, name)]
    return f" as a whole; {quoted(corrected)} matches {len(matched)} of them{nearest(pattern, matched) if len(matched) == 1 else '.'}"


def unmatched(patterns: Sequence[str], names: Collection[str], what: str = "names") -> str:
    """The message on patterns that match none of some names, however many: with the first three, and what these were meant to be.

    >>> unmatched(["fc*"], ["fc1", "fc2"])
    "'fc*' matches none of 2 names as a whole; 'fc.*' matches 2 of them."
    >>> unmatched(["fc*", "haed", "tail", "nose"], ["fc1", "fc2", "head"])
    "'fc*', 'haed', 'tail' and 1 more match none of 3 names; nearest: 'fc.*', 'head'."
    """
    if len(patterns) == 1:
        end = nearest_pattern(patterns[0], names)
    else:
        # Of the first three alone: a search among the names takes milliseconds.
        meant = dict.fromkeys(filter(None, (_corrected(pattern, names) or _nearest(pattern, names) for pattern in patterns[:3])))
        end = f"; nearest: {', '.join(map(quoted, meant))}." if meant else "."
    return f"{these_match(patterns)} none of {len(names)} {what}{or_examples(end, names)}"


def these_match(patterns: Sequence[str]) -> str:
    """The beginning of a sentence on patterns, with the first three of many.

    >>> these_match(["fc*"]), these_match(["a", "b", "c", "d"])
    ("'fc*' matches", "'a', 'b', 'c' and 1 more match")
    """
    return f"{shortened([*map(quoted, patterns)])} {'matches' if len(patterns) == 1 else 'match'}"


def _corrected(pattern: str, names: Collection[str]) -> str | None:
    """A pattern that a pattern without a match was meant to be, and that matches a name."""
    before, after = ("" if pattern[:1] == "^" else ".*"), ("" if pattern[-1:] == "$" else ".*")
    as_search = f".*({pattern}).*" if "|" in pattern else f"{before}{pattern}{after}"
    words = {word for name in names for word in _WORD.findall(name)}
    well_spelt = _WORD.sub(lambda word: word[0] if word[0] in words else _near(word[0], words) or word[0], pattern)
    candidates = (glob_as_pattern(pattern), as_search, well_spelt if well_spelt not in names else pattern)
    return next((corrected for corrected in candidates if any(re.fullmatch(corrected, name) for name in names)), None)


_WORD = re.compile(r"(?<!\\)[^\W\d]\w+")


def glob_as_pattern(text: str) -> str:
    """The regular expression that a glob was meant to be.

    >>> glob_as_pattern("*.attn*"), glob_as_pattern("blocks.*")
    ('.*.attn.*', 'blocks.*')
    """
    return re.sub(r"(?<![.\\\])])\*", ".*", text)
