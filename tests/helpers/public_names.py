"""What follows semantic versioning, a name in each line; ``make public-names`` writes the list of a release.

``Rule(kinds='activation', ...)``, ``Rule.sites``, ``statistic rms``, ``command summary --json``, ``json summary: findings[].step: number``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import lightning_module_monitor as package
from helpers.all_trainings import TRAININGS, stored_path
from helpers.stores import write_store
from lightning_module_monitor import STATISTICS, standalone
from lightning_module_monitor.cli import COMMANDS, Command, main
from lightning_module_monitor.kinds import KINDS, OWN_FIGURES, OWN_KIND
from lightning_module_monitor.lightning_packages import packages

STORED = Path(__file__).parents[1] / "stability" / "public_names.txt"
RESULTS = ("Diagnosis", "Finding", "Histogram", "Record", "StorePlots", "StoreReader", "WidthCheck")
"""Classes whose objects users get and do not make."""
NOT_OURS = {*dir(packages()[0].Callback), *dir(tuple), *dir(Exception)}
"""Members that classes of ours have from others, which document them."""
FORMATS = {f"gradient/w/{name}_float16": [0.5] for name in ("underflow", "overflow", "scaled_underflow")}


def public_names() -> list[str]:
    """Everything that is public."""
    names = [
        *(line for name in package.__all__ for line in of_python(name, getattr(package, name))),
        *(f"standalone.{name}{parameters(getattr(standalone, name))}" for name in {*standalone.__all__} - {*package.__all__}),
        *(f"kind {kind}" for kind in KINDS),
        *(f"statistic {name}" for name in STATISTICS),
        *(f"key {OWN_KIND}/{name}" for name in OWN_FIGURES),
        *(line for command in COMMANDS for line in of_command(command)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        stores = [str(stored_path(name)) for name in [*TRAININGS][::20]]
        names += of_json("summary", *([store] for store in stores))
        names += of_json("formats", [str(write_store(Path(folder, "monitor.h5"), FORMATS))])
        names += of_json("info", [])
    return sorted(names)


# ------------------------------------------------------------------ Python


def of_python(name: str, value: object) -> Iterator[str]:
    """A function with its parameters; a class with those of its instances, attributes and methods; an exception with its bases."""
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"{name} is {', '.join(base.__name__ for base in value.__mro__[1 : value.__mro__.index(Exception)])}"
        return
    yield name if name in RESULTS else name + parameters(value)
    if inspect.isclass(value):
        members = {member for member in dir(value) if not member.startswith("_")} - NOT_OURS
        fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else getattr(value, "_fields", ())
        methods = {member: parameters(inspect.getattr_static(value, member)) for member in members - {*fields}}
        yield from (f"{name}.{member}{re.sub(r'(self|cls|monitor)(, )?', '', text, count=1)}" for member, text in methods.items())
        yield from {f"{name}.{member}" for member in (*fields, *attributes(value)) if not member.startswith("_")}


def parameters(value: object) -> str:
    """The parameters in parentheses, with their defaults; nothing for what cannot be called."""
    value = getattr(value, "__func__", value)  # of a class method
    if not callable(value):
        return ""
    signature = inspect.signature(value)
    shown = [
        parameter.replace(annotation=parameter.empty, default=Shown.of(parameter.default)) for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(shown))


class Shown(str):
    """A default value, as text without an address."""

    __slots__ = ()
    __repr__ = str.__str__

    @classmethod
    def of(cls, default: object) -> object:
        if default is inspect.Parameter.empty:
            return default
        return cls(type(default).__name__ if " at 0x" in repr(default) or " object" in repr(default) else repr(default))


def attributes(value: type) -> Iterator[str]:
    """The attributes that ``__init__`` sets, without those whose docstring begins with "Internal"."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    for method in (item for item in ast.walk(node) if isinstance(item, ast.FunctionDef) and item.name == "__init__"):
        for statement, following in zip(method.body, [*method.body[1:], ast.Pass()], strict=True):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            is_internal = isinstance(following, ast.Expr) and ast.unparse(following).startswith(("'Internal", '"""Internal'))
            yield from (target.attr for target in targets if isinstance(target, ast.Attribute) and not is_internal)


# ------------------------------------------------------------------ commands


def of_command(command: Command) -> Iterator[str]:
    """A command with its exit statuses, arguments and options."""
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    yield f"command {command.name}: exit status {', '.join(re.findall(r'^  ([0-9])  ', command.epilog, re.MULTILINE))}"
    for action in parser._actions:
        choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        yield f"command {command.name} {'/'.join(action.option_strings) or action.metavar}{choices}"


def of_json(command: str, *runs: Sequence[str]) -> set[str]:
    """The fields that a command prints with ``--json``, and their types, over several runs of it."""
    found: set[str] = set()
    for arguments in runs:
        printed = StringIO()
        with redirect_stdout(printed):
            main([command, *arguments, "--json"])
        found |= {f"json {command}: {field}" for field in fields_of(json.loads(printed.getvalue()), "")}
    return found


def fields_of(value: object, name: str) -> Iterator[str]:
    """The fields of a value of JSON; those of ``packages`` and ``extras`` are names of packages, which vary."""
    if isinstance(value, list):
        for item in value:
            yield from fields_of(item, f"{name}[]")
    elif isinstance(value, dict) and name not in ("packages", "extras"):
        for key, item in value.items():
            yield from fields_of(item, f"{name}.{key}".lstrip("."))
    else:
        kinds = {bool: "flag", int: "number", float: "number", str: "text", dict: "object", type(None): "null"}
        yield f"{name}: {kinds[type(value)]}"


if __name__ == "__main__":
    STORED.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
