"""Print how long the tests of each file take, by a report of pytest: ``pytest --junitxml=report.xml``, then ``durations.py report.xml``."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from xml.etree import ElementTree

NUM_FILES = 25


def main(report: str) -> None:
    """Print a table of the files that take longest, and of all others together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # "tests.sinks.test_hdf5" or "tests.sinks.test_hdf5.TestClass"; a doctest has its module.
        names = case.attrib["classname"].split(".")
        file = "/".join(name for name in names if not name.startswith("Test"))
        seconds[file] += (taken := float(case.attrib["time"]))
        tests[file] += 1
        slowest[file] = max(taken, slowest.get(file, 0.0))
    print("| file | tests | seconds | slowest test |\n|---|---|---|---|")
    most = sorted(seconds.items(), key=lambda item: -item[1])[:NUM_FILES]
    for file, total in most:
        print(f"| {file} | {tests[file]} | {total:.0f} | {slowest[file]:.0f} |")
    others = [file for file in seconds if file not in dict(most)]
    rest = (sum(tests[file] for file in others), sum(seconds[file] for file in others), max(slowest[file] for file in others))
    print(f"| {len(others)} others | {rest[0]} | {rest[1]:.0f} | {rest[2]:.0f} |")
    print(f"| all | {tests.total()} | {sum(seconds.values()):.0f} | {max(slowest.values()):.0f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
