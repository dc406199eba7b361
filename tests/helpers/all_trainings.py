"""All small trainings with their stores, which were recorded once, and the table of the verdicts on these.

``make record-trainings`` records the stores (seed 0) and writes the table, in a few minutes: after a change of what is recorded.
``make verdicts`` writes the table alone: after a change of what is said of the same records, which its diff shows.
"""

from __future__ import annotations

import argparse
import functools
import re
import tarfile
import tempfile
from pathlib import Path

from helpers.silent_faults import SILENT_HEALTHY, SILENT_SICK
from helpers.structural_faults import STRUCTURAL_HEALTHY, STRUCTURAL_SICK
from helpers.training import trainer
from helpers.trainings import HEALTHY, SICK, Case, run_seed
from helpers.unlike_faults import UNLIKE_FAULTS
from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.report.stored_run import read_run

ALL_SICK, ALL_HEALTHY = SICK | SILENT_SICK | STRUCTURAL_SICK, HEALTHY | SILENT_HEALTHY | STRUCTURAL_HEALTHY | UNLIKE_FAULTS
TRAININGS = ALL_SICK | ALL_HEALTHY
STORES = Path(__file__).parents[1] / "health" / "stores.tar.xz"
VERDICTS = Path(__file__).parents[1] / "health" / "verdicts.txt"


def train(case: Case, folder: Path, seed: int) -> ModuleMonitorCallback:
    """The bare callback after a training with it."""
    run_seed(seed)
    callback = ModuleMonitorCallback(case.every)
    options = {"max_steps": case.steps, "max_epochs": -1, "limit_val_batches": 0} | case.options
    trainer(folder, [callback], **options).fit(case.make(), case.data())
    return callback


def file_of(name: str) -> str:
    """The name of a training's store in the archive."""
    return re.sub(r"\W+", "_", name) + ".h5"


def record() -> None:
    """Train all, and write the archive of their stores."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(STORES, "w:xz", preset=9) as archive:
        for number, (name, case) in enumerate(TRAININGS.items()):
            callback = train(case, Path(folder) / str(number), seed=0)
            archive.add(callback.store_path, file_of(name))


@functools.cache
def _unpacked() -> tempfile.TemporaryDirectory[str]:
    """A folder with all stores, as long as this process runs."""
    folder = tempfile.TemporaryDirectory()
    with tarfile.open(STORES) as archive:
        archive.extractall(folder.name, filter="data")
    return folder


def stored_path(name: str) -> Path:
    """The store of a training, as it was recorded."""
    return Path(_unpacked().name) / file_of(name)


def stored_verdict(name: str) -> Verdict:
    """The verdict on the store of a training."""
    return verdict_on(stored_path(name))


def verdict_on(store: Path) -> Verdict:
    """The verdict on a store."""
    return read_run(load_store(store)).verdict()


def entry(name: str, verdict: Verdict) -> str:
    """What the table says of a training."""
    findings = [f"  finding {finding.name}: {finding.words}, step {finding.step}" for finding in verdict.findings]
    diagnoses = [
        f"  cause {diagnosis.name} {diagnosis.site}".rstrip() + f", step {diagnosis.first_step}" for diagnosis in verdict.diagnoses
    ]
    return "\n".join([name, f"  {verdict.sentence}", *diagnoses, *findings])


def table() -> dict[str, str]:
    """The entry of each training."""
    return {text.partition("\n")[0]: text for text in VERDICTS.read_text(encoding="utf-8").strip().split("\n\n")}


def write_table() -> None:
    """Judge all stores, and write the table."""
    entries = [entry(name, stored_verdict(name)) for name in TRAININGS]
    VERDICTS.write_text("\n\n".join(entries) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verdicts", action="store_true", help="write the table alone")
    if not parser.parse_args().verdicts:
        record()
    write_table()
