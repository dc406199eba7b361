"""The command ``coordinate-check``: a width check that is configured in YAML."""

from __future__ import annotations

import argparse
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_module_monitor.errors import ConfigError, require

if TYPE_CHECKING:
    from lightning_module_monitor.lightning_packages import LightningModule

NAME = "coordinate-check"
HELP = "train a model at several widths, and report which of its layers depend on the width in the wrong way"
EPILOG = """\
example:
  lightning-module-monitor coordinate-check check.yaml --figure check.png

  with check.yaml:
    model:
      class_path: my_project.MyModule     # a LightningModule
      init_args: {depth: 3}
    width_argument: width                 # which of its init_args is the width
    widths: [128, 256, 512, 1024]
    data:                                 # a LightningDataModule; left out: the module's own train_dataloader
      class_path: my_project.MyData
    seeds: 4                              # default: 4
    steps: 1                              # default: 1
    parametrization: mup                  # or exponents by pattern; default: mup
  and, as in Python: terms, confidence, tolerance, trainer (options of the Trainer)

exit status:
  0  no module offends
  1  some module does
  2  the command, or CONFIG, is wrong
  3  a training failed
"""

COMMAND_KEYS = ("model", "width_argument", "data")
CHECK_OPTIONS = ("widths", "seeds", "steps", "parametrization", "terms", "confidence", "tolerance", "trainer")
REQUIRED = ("model", "width_argument", "widths")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="path of a YAML file, as below")
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw the curves into this file (needs matplotlib)")
    parser.add_argument("--table", type=Path, metavar="PATH", help="write the table into this CSV file (needs pandas)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit status, 1 if a module offends.

    Raises:
        ConfigError: If CONFIG is wrong.
        ImportError: If an extra is not installed.
    """
    from lightning_module_monitor.width_check.check import coordinate_check

    # Expected in small runs, and from Lightning's own calls of torch.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    # Unlike "python -m", a console script does not import from the current folder, where the user's classes are.
    sys.path.insert(0, str(Path.cwd()))
    config = _read(arguments.config)
    for path, module, extra in ((arguments.figure, "matplotlib", "plot"), (arguments.table, "pandas", "pandas")):
        if path is not None:
            require(module, extra)
            if not path.parent.is_dir():
                raise ConfigError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
    make_module = _factory(config["model"], config["width_argument"])
    data = None if config.get("data") is None else _constructor("LightningDataModule", config["data"], "data")()
    check = coordinate_check(make_module, data=data, **{name: config[name] for name in CHECK_OPTIONS if name in config})
    print(check)
    if arguments.table is not None:
        check.to_frame().to_csv(arguments.table, index=False)
    if arguments.figure is not None:
        check.figure().savefig(arguments.figure, dpi=110)
    return 0 if check.is_sound else 1


def _read(path: Path) -> dict[str, Any]:
    import yaml

    from lightning_module_monitor.config.rules import check_choice

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG {str(path)!r} cannot be read ({error}).") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"CONFIG {str(path)!r} is no YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(config, dict):
        raise ConfigError(f"CONFIG {str(path)!r} holds {config!r}; expected keys {', '.join(REQUIRED)}, ...")
    known = (*COMMAND_KEYS, *CHECK_OPTIONS)
    for name in config:
        check_choice(name, known, f"CONFIG has the key {name!r}", f"some of {', '.join(known)}")
    for name in REQUIRED:
        if name not in config:
            raise ConfigError(f"CONFIG has no {name!r}; expected at least {', '.join(REQUIRED)}.")
    return config


def _factory(model: object, width_argument: object) -> Callable[[int], LightningModule]:
    """A function from a width to the module that the configuration describes."""
    definition: object = {"class_path": model} if isinstance(model, str) else model
    if not isinstance(definition, Mapping) or "class_path" not in definition:
        raise ConfigError(f"model is {model!r}; expected class_path, and perhaps init_args.")
    if not isinstance(width_argument, str):
        raise ConfigError(f"width_argument is {width_argument!r}; expected the name of one of the model's init_args.")
    init_args = definition.get("init_args") or {}
    if not isinstance(init_args, Mapping):
        raise ConfigError(f"model.init_args is {init_args!r}; expected arguments by name.")

    def constructor(width: int) -> Callable[[], LightningModule]:
        return _constructor("LightningModule", {**definition, "init_args": {**init_args, width_argument: width}}, "model")

    constructor(1)  # reports a wrong model before the first training
    return lambda width: constructor(width)()


def _base_class(name: str, definition: object) -> type:
    """Lightning's class of this name, from the package whose class the configured class extends."""
    from lightning_module_monitor.lightning_packages import packages

    path = definition.get("class_path") if isinstance(definition, Mapping) else definition
    configured: object = None
    with suppress(Exception):  # jsonargparse reports a wrong path
        configured = pkgutil.resolve_name(str(path))
    bases: list[type] = [getattr(package, name) for package in packages()]
    return next((base for base in bases if isinstance(configured, type) and issubclass(configured, base)), bases[0])


def _constructor(base: str, definition: object, label: str) -> Callable[[], Any]:
    """A function that creates the object that class_path and init_args describe, as LightningCLI does.

    ``base`` is the name of the class of Lightning that the object's class extends; ``label`` is the key in CONFIG.
    """
    jsonargparse = require("jsonargparse", "cli")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{label}", type=_base_class(base, definition))
    try:
        parsed = parser.parse_object({label: definition})
    except jsonargparse.ArgumentError as error:
        message = " ".join(str(error).split()).removeprefix(f'Parser key "{label}": ')
        raise ConfigError(f"{label} is wrong: {message}") from error
    # Before jsonargparse 4.49 the method is called ``instantiate_classes``.
    instantiate = parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes

    return lambda: instantiate(parsed)[label]
