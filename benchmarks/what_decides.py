"""Which detectors and causes decide a verdict, in the trainings of the test suite.

python benchmarks/what_decides.py train FOLDER [--only NAME ...] [--seed 0]
python benchmarks/what_decides.py judge FOLDER

``train`` runs each training of tests/helpers (trainings.py, silent_faults.py, structural_faults.py), sick and healthy, with the values
that all detectors need, and keeps the stores below FOLDER. ``judge`` prints a line for each wrong verdict, and as Markdown how often each
detector fires, how often each cause is the first diagnosis, and in how many sick runs a detector decides: without its findings the level or
the first diagnosis would be another.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.silent_faults import SILENT_HEALTHY, SILENT_SICK  # type: ignore[import-not-found]  # a folder of the repository
from helpers.structural_faults import STRUCTURAL_HEALTHY, STRUCTURAL_SICK  # type: ignore[import-not-found]  # a folder of the repository
from helpers.training import trainer  # type: ignore[import-not-found]  # a folder of the repository
from helpers.trainings import HEALTHY, SICK, Case, run_seed  # type: ignore[import-not-found]  # a folder of the repository

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.config.health_options import Health
from lightning_module_monitor.health.causes import CAUSES
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.report.stored_run import read_run


@dataclass
class Counts:
    """In how many runs each detector and cause is found, and in how many it decides."""

    num_runs: Counter[bool] = field(default_factory=Counter)
    """By whether the run is sick."""
    fires: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By the name of the detector and whether the run is sick."""
    decides: Counter[str] = field(default_factory=Counter)
    """By the name of the detector: sick runs alone."""
    is_first: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By the name of the cause and whether the run is sick."""

    def add(self, verdict: Verdict, *, is_sick: bool) -> None:
        """Count the verdict on a run."""
        self.num_runs[is_sick] += 1
        result = _result_of(verdict)
        for name in {finding.name for finding in verdict.findings}:
            self.fires[name, is_sick] += 1
            rest = [finding for finding in verdict.findings if finding.name != name]
            self.decides[name] += is_sick and _result_of(replace(verdict, findings=rest)) != result
        self.is_first.update((cause.name, is_sick) for cause in verdict.diagnoses[:1])

    def tables(self) -> Iterable[str]:
        """The two tables, as lines of Markdown."""
        yield f"| Detector | Fires in {self.num_runs[True]} sick runs | Decides | Fires in {self.num_runs[False]} healthy runs |"
        yield "|---|---|---|---|"
        for name in DETECTORS:
            yield f"| `{name}` | {self.fires[name, True]} | {self.decides[name]} | {self.fires[name, False]} |"
        yield f"\n| Cause | First diagnosis in {self.num_runs[True]} sick runs | In {self.num_runs[False]} healthy runs |"
        yield "|---|---|---|"
        for name in dict.fromkeys(cause.name for cause in CAUSES):
            yield f"| `{name}` | {self.is_first[name, True]} | {self.is_first[name, False]} |"


def _result_of(verdict: Verdict) -> tuple[str, str]:
    return verdict.level, next((cause.name for cause in verdict.diagnoses), "")


def _folder_of(root: Path, name: str, *, is_sick: bool) -> Path:
    """A folder of its own for each training: a healthy one may have the name of a sick one."""
    return root / ("sick" if is_sick else "healthy") / quote(name, safe=" ")


def train(root: Path, cases: Mapping[str, Case], seed: int, *, is_sick: bool) -> None:
    """Run trainings, and keep their stores."""
    for name, case in cases.items():
        run_seed(seed)
        callback = ModuleMonitorCallback(case.every, health=Health(watch="all"))
        options = {"max_steps": case.steps, "max_epochs": -1, "limit_val_batches": 0} | case.options
        trainer(_folder_of(root, name, is_sick=is_sick), [callback], **options).fit(case.make(), case.data())


def judge(root: Path, cases: Mapping[str, Case], counts: Counts, *, is_sick: bool) -> None:
    """Count the verdicts on the kept stores, and print those that are wrong."""
    for name, case in cases.items():
        for path in sorted(_folder_of(root, name, is_sick=is_sick).rglob("monitor.h5")):
            verdict = read_run(load_store(path)).verdict()
            counts.add(verdict, is_sick=is_sick)
            level, cause = _result_of(verdict)
            levels = case.levels if is_sick or "unknown" in case.levels else ("healthy",)
            if level not in levels or (cause and cause not in case.causes):
                print(f"{name}: {level}, {cause or 'no cause'}; expected {' or '.join(levels)}, {' or '.join(case.causes) or 'no cause'}\n")


def main() -> None:
    """Train, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of trainings; default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    counts = Counts()
    kinds = ((True, SICK | SILENT_SICK | STRUCTURAL_SICK), (False, HEALTHY | SILENT_HEALTHY | STRUCTURAL_HEALTHY))
    for is_sick, cases in kinds:
        chosen = {name: case for name, case in cases.items() if not args.only or name in args.only}
        if args.what == "train":
            train(args.folder, chosen, args.seed, is_sick=is_sick)
        else:
            judge(args.folder, chosen, counts, is_sick=is_sick)
    if args.what == "judge":
        print("\n".join(counts.tables()))


if __name__ == "__main__":
    main()
