"""The command line ``lightning-module-monitor``: one subcommand for each entry of ``COMMANDS``.

Internal: it may change in any version.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_module_monitor.errors import ConfigError, in_bytes, package_version, printable, require, writing
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import ROOT_SITE
from lightning_module_monitor.sinks.store.remote import is_url
from lightning_module_monitor.suggestions import nearest_pattern

if TYPE_CHECKING:
    from lightning_module_monitor.sinks.store.reader import StoreReader

WRONG_USAGE = 2
FAILED = 3


class Command(NamedTuple):
    """A subcommand. Its ``run`` imports slow packages, because every command imports this module."""

    name: str
    help: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status; a ``ConfigError`` or ``ImportError`` becomes one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments; by default those of the process.

    Returns:
        Exit status of the subcommand; 2 for wrong usage, 3 for any other error.
    """
    parser = argparse.ArgumentParser(prog="lightning-module-monitor", description=__doc__.partition(":")[0] + ".")
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, help_text, epilog, add_arguments, run in COMMANDS:
        raw = argparse.RawDescriptionHelpFormatter
        subparser = subparsers.add_parser(name, help=help_text, description=help_text, epilog=epilog, formatter_class=raw)
        add_arguments(subparser)
        subparser.set_defaults(run=run)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ConfigError, ImportError) as error:
        print(f"lightning-module-monitor {options.command}: error: {printable(str(error))}", file=sys.stderr)
        return WRONG_USAGE
    except BrokenPipeError:  # the reader has closed the pipe, as in "keys monitor.h5 | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        return FAILED
    return status


# ------------------------------------------------------------------ shared by the subcommands

_STORE = "path of a run's monitor.h5, or of a folder, whose newest run is used; the run may be live or killed"


def _add_store(parser: argparse.ArgumentParser, num: int | str | None = None, help_text: str = _STORE) -> None:
    parser.add_argument("store", metavar="STORE", type=_path_or_url, nargs=num, help=help_text)


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help=f"default: {default}")


def _path_or_url(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def _open_store(path: Path | str) -> StoreReader:
    from lightning_module_monitor.sinks.store.reader import load_store

    try:
        return load_store(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _output_path(wanted: Path | None, store: StoreReader, suffix: str) -> Path:
    """The path to write to, by default beside the store.

    Raises:
        ConfigError: If the folder does not exist, or the path is the store.
    """
    path = store.default_path(suffix) if wanted is None else wanted
    with writing(path):
        is_in_folder, is_folder, is_store = path.parent.is_dir(), path.is_dir(), path.resolve() == store.path.resolve()
    if not is_in_folder:
        raise ConfigError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
    if is_folder or is_store:
        raise ConfigError(f"{str(path)!r} cannot be written: it is {'a folder' if is_folder else 'the store itself'}.")
    return path


# ------------------------------------------------------------------ pages: report, compare

REPORT = """\
examples:
  lightning-module-monitor report monitor.h5
  lightning-module-monitor report monitor.h5 -o report.html

The page is one file that needs no network. The page of a live run shows the records so far.

exit status:
  0  the page was written
  2  the command is wrong, STORE cannot be read, or an extra is not installed
"""

COMPARE = """\
examples:
  lightning-module-monitor compare before/monitor.h5 after/monitor.h5
  lightning-module-monitor compare seed1.h5 seed2.h5 seed3.h5 -o seeds.html
  lightning-module-monitor compare main.h5 branch.h5 --fail-on 'gradient/.*/norm' --ratio 2

Sites are matched by name; the page lists the sites that match no other. Differences are to the first run; the largest are printed.

With --fail-on the command only compares the medians of the last quarter of the records, for every key that PATTERN matches as a whole in
both runs, and prints the keys that fail. A key also fails if values of one run are not finite, or if the signs differ. A page is written
with -o only.

exit status:
  0  the page was written; with --fail-on no key differs by more than RATIO
  1  with --fail-on a key differs by more than RATIO
  2  the command is wrong, a STORE cannot be read, an extra is not installed, or PATTERN matches no key of both runs
"""


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_store(parser, 1)
    _add_output(parser, "beside the store, as monitor.html")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_store(parser, "+", "paths of the runs' monitor.h5 or folders, two or more")
    _add_output(parser, "compare.html")
    help_text = "compare the keys that this regular expression matches as a whole; may be given several times"
    parser.add_argument("--fail-on", metavar="PATTERN", action="append", help=help_text)
    parser.add_argument("--ratio", type=float, help="largest factor between two runs that is no failure; default: 2")


def _compare(arguments: argparse.Namespace) -> int:
    if len(arguments.store) < 2:
        raise ConfigError("one STORE is given; expected two or more. For one run there is the command report.")
    if arguments.fail_on is None:
        if arguments.ratio is not None:
            raise ConfigError(f"--ratio is {arguments.ratio:g}, and there is no --fail-on; expected --fail-on PATTERN.")
        arguments.output = arguments.output or Path("compare.html")
        _write_page(arguments)
        return _print_changes(arguments.store)
    status = _check_series(arguments.store, [_pattern(text, "--fail-on") for text in arguments.fail_on], arguments.ratio)
    if arguments.output is not None:
        _write_page(arguments)
    return status


def _print_changes(paths: Sequence[Path]) -> int:
    """Print last losses, rates and norms of the first run and each other run, and the series that differ most."""
    from lightning_module_monitor.report.comparison import largest_changes
    from lightning_module_monitor.report.glance import at_a_glance
    from lightning_module_monitor.report.stored_run import read_run

    first, *others = [read_run(_open_store(path)) for path in paths]
    for other in others:
        rows = [row for group in at_a_glance([first, other]) for row in group.rows if None not in row.summaries]
        if rows:
            print(printable(f"{first.path} -> {other.path}: last values"))
        for row in rows:
            print(printable(f"  {row.name}: {' -> '.join(f'{summary.last:.4g}' for summary in row.summaries if summary is not None)}"))
        changes = largest_changes(first, other, most=10)
        is_common = any(Key.parse(key).site not in ("", ROOT_SITE) and key in other.series for key in first.series)
        without = "no series of both differs" if is_common else "no site is in both runs"
        heading = "medians of the last quarter that differ most" if changes else without
        print(printable(f"{first.path} -> {other.path}: {heading}"))
        for change in changes:
            print(printable(f"  {change}"))
    return 0


def _check_series(paths: Sequence[Path], patterns: Sequence[re.Pattern[str]], ratio: float | None) -> int:
    """Print the keys that differ by more than a factor between the first run and any other run."""
    from lightning_module_monitor.report.comparison import compare_series
    from lightning_module_monitor.report.stored_run import read_run

    ratio = 2.0 if ratio is None else ratio
    if not 1 <= ratio < math.inf:
        raise ConfigError(f"--ratio is {ratio:g}; expected a number >= 1, e.g. 2.")
    first, *others = [read_run(_open_store(path)) for path in paths]
    num_failures = 0
    for other in others:
        series = compare_series(first, other, patterns)
        failures = [difference for difference in series if difference.exceeds(ratio)]
        num_failures += len(failures)
        for failure in failures:
            print(printable(str(failure)))
        result = f"{len(failures)} of {len(series)} keys differ by more than a factor of {ratio:g}"
        print(printable(f"{first.path} -> {other.path}: {result}"))
    return 1 if num_failures else 0


def _write_page(arguments: argparse.Namespace) -> int:
    stores = [_open_store(path) for path in arguments.store]
    for store in stores:
        path = _output_path(arguments.output, store, ".html")
    from lightning_module_monitor.report.page import write_report

    with writing(path):
        write_report(stores, path)
    print(f"{path}: {in_bytes(path.stat().st_size)}")
    return 0


# ------------------------------------------------------------------ texts: summary, keys

SUMMARY = """\
examples:
  lightning-module-monitor summary monitor.h5
  lightning-module-monitor summary --markdown monitor.h5 >> "$GITHUB_STEP_SUMMARY"
  lightning-module-monitor summary --json monitor.h5

--markdown prints a page for a log or a language model: verdict, diagnoses, their findings and series, the content of the store, and
queries in Python.

exit status:
  0  no check is sick
  1  a check is sick
  2  the command is wrong, or STORE cannot be read
"""

KEYS = """\
examples:
  lightning-module-monitor keys monitor.h5
  lightning-module-monitor keys monitor.h5 'gradient/.*/norm'

exit status:
  0  a key matches
  1  no key matches
  2  the command is wrong, or STORE cannot be read
"""


FORMATS = """\
examples:
  lightning-module-monitor formats monitor.h5
  lightning-module-monitor formats monitor.h5 --json

A tensor fits into a format if in each record a cast would make at most 0.1 % of its numbers zero and none infinite. It fits scaled if that
holds after a multiplication by a power of two. Zeros are elements that are zero already, as gradients of 16-mixed that float16 has lost.

exit status:
  0  the table was printed
  1  the store has no statistics of formats
  2  the command is wrong, or STORE cannot be read
"""


def _add_formats(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("--json", action="store_true", help="print the table and the worst sites as JSON")


def _print_formats(arguments: argparse.Namespace) -> int:
    from lightning_module_monitor.report.formats import HOW_TO_RECORD, as_json, as_lines, format_fits
    from lightning_module_monitor.report.stored_run import read_run

    run = read_run(_open_store(arguments.store))
    fits = format_fits(run)
    if arguments.json:
        print(as_json(run.path, fits))
    elif fits:
        print(*map(printable, as_lines(fits)), sep="\n")
    if not fits:
        print(printable(f"{run.path!r} has no statistics of formats for any kind; {HOW_TO_RECORD}"), file=sys.stderr)
    return 0 if fits else 1


def _add_summary(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--markdown", action="store_true", help="print one page of Markdown")
    forms.add_argument("--json", action="store_true", help="print the verdict, the diagnoses, findings and checks as JSON")


def _print_summary(arguments: argparse.Namespace) -> int:
    from lightning_module_monitor.report.stored_run import read_run

    run = read_run(_open_store(arguments.store))
    verdict = run.verdict()
    if arguments.markdown or arguments.json:
        from lightning_module_monitor.report.markdown import as_json, as_markdown

        print((as_markdown(run, verdict) if arguments.markdown else as_json(run, verdict)).rstrip())
    else:
        require("rich", "report")
        from lightning_module_monitor.report.terminal import print_verdict

        print_verdict(run, verdict)
    return 1 if verdict.level == "sick" else 0


def _add_keys(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default=".*", help="regular expression that matches the whole key")


def _print_keys(arguments: argparse.Namespace) -> int:
    store = _open_store(arguments.store)
    pattern, keys = _pattern(arguments.pattern, "PATTERN"), [*store.keys(), *store.histogram_keys()]
    matches = [key for key in keys if pattern.fullmatch(key)]
    for key in matches:
        print(printable(key))
    if not matches:
        near = nearest_pattern(arguments.pattern, keys)
        print(printable(f"PATTERN {arguments.pattern!r} matches none of {len(keys)} keys{near}"), file=sys.stderr)
    return 0 if matches else 1


def _pattern(text: str, label: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{label} is {text!r}; expected a regular expression ({error}).") from error


# ------------------------------------------------------------------ files: export, repair

EXPORT = """\
examples:
  lightning-module-monitor export monitor.h5 --format csv
  lightning-module-monitor export monitor.h5 --format parquet -o run.parquet
  lightning-module-monitor export seed1.h5 seed2.h5 -o seeds.csv

The columns are step, stage, kind, site, statistic and value; a row is a recorded value. With several stores the first column is run, the
path of the store. Histograms are left out. In CSV, a text that begins with =, +, - or @ gets a leading ': a spreadsheet would run it as a
formula.

exit status:
  0  the file was written
  2  the command is wrong, a STORE cannot be read, or an extra is not installed
"""

REPAIR = """\
example:
  lightning-module-monitor repair monitor.h5

The other commands and load_store also read the store of a killed run. The file of raw tensors beside it is always closed.

exit status:
  0  every HDF5 program can read it
  2  the command is wrong, STORE cannot be read, or a run is writing to it
"""


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_store(parser, "+")
    parser.add_argument("--format", choices=("csv", "parquet"), default="csv", help="default: csv")
    _add_output(parser, "beside the store, as monitor.csv or monitor.parquet; of several stores export.csv or export.parquet")


def _export(arguments: argparse.Namespace) -> int:
    from lightning_module_monitor.report.export import export

    stores, suffix = [_open_store(path) for path in arguments.store], f".{arguments.format}"
    output = arguments.output or (Path(f"export{suffix}") if len(stores) > 1 else None)
    for store in stores:
        path = _output_path(output, store, suffix)
    num_values = export(stores, path, arguments.format)
    print(f"{path}: {num_values:,} values, {in_bytes(path.stat().st_size)}")
    return 0


def _repair(arguments: argparse.Namespace) -> int:
    store = _open_store(arguments.store)
    try:
        with writing(store.path):
            had_journal = store.repair()
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    print(f"{store.path}: {'repaired' if had_journal else 'was closed; nothing to repair'}")
    return 0


# ------------------------------------------------------------------ info

INFO = """\
examples:
  lightning-module-monitor info
  lightning-module-monitor info --json

The self-check measures the output of a layer on every device, compares it with formulas in float64, and reads a store back.

exit status:
  0  everything works
  1  the self-check found an error
"""


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _print_info(arguments: argparse.Namespace) -> int:
    from lightning_module_monitor.installation import installation

    installed = installation()
    print(installed.as_json() if arguments.json else installed.as_text())
    return 1 if any(check.error for check in installed.checks) else 0


_PAGE = "write an HTML page about a run: a verdict, heat maps, profiles over depth, histograms, the configuration"
_PAGES = "write an HTML page about several runs, side by side and with their differences; or check for differences"
_VERDICT = "print a table of the checks of a run, healthy or not, with the evidence"
_REPAIR = "make the store of a killed run readable for every HDF5 program"

COMMANDS: Sequence[Command] = (
    Command("report", _PAGE, REPORT, _add_report, _write_page),
    Command("compare", _PAGES, COMPARE, _add_compare, _compare),
    Command("summary", _VERDICT, SUMMARY, _add_summary, _print_summary),
    Command("formats", "print which tensors of a run fit into float16, bfloat16 and float8", FORMATS, _add_formats, _print_formats),
    Command("keys", "list the keys of a store", KEYS, _add_keys, _print_keys),
    Command("export", "write every number of a store into a CSV or Parquet file", EXPORT, _add_export, _export),
    Command("repair", _REPAIR, REPAIR, _add_store, _repair),
    Command("info", "print versions, extras, the kernels in use, and a self-check: for a report of a bug", INFO, _add_info, _print_info),
)
