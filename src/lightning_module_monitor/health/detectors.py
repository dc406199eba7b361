"""The table of detectors: the values that each judges, its limit, and the limit's source. ``causes.py`` has the advice.

All are judged by the same code (``judge.py``), record by record while training, and later on a store; those without a rule need the whole
run and are judged at its end. The limits of the tests on the loss are constants of ``losses.py`` and ``learning.py``.
"""

from __future__ import annotations

from lightning_module_monitor.health.detectors_of_runs import DETECTORS_OF_RUNS
from lightning_module_monitor.health.detectors_of_setup import DETECTORS_OF_SETUP
from lightning_module_monitor.health.detectors_of_values import DETECTORS_OF_VALUES
from lightning_module_monitor.health.finding_names import NONFINITE

DETECTORS = {detector.name: detector for detector in (*DETECTORS_OF_RUNS, *DETECTORS_OF_SETUP, *DETECTORS_OF_VALUES)}
"""Detector by name, which is the name of its findings."""

BUILT_IN = {name: detector for name, detector in DETECTORS.items() if name != NONFINITE}
"""Detectors that ``health.watch`` may name."""
