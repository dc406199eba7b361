"""The benchmark runs, and what it counts is what is promised; times are not asserted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

OVERHEAD = Path(__file__).parents[1] / "benchmarks" / "overhead.py"


def test_overhead_counts_one_transfer_and_no_host_read(tmp_path: Path) -> None:
    """A row for each variant, all values of W2's 129 activations, 128 parameters and 128 gradients, and one transfer for them."""
    report = tmp_path / "results.md"
    command = [sys.executable, str(OVERHEAD), "--steps", "2", "--workloads", "W2", "--skip-peers", "--output", str(report)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "COLUMNS": "160"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "wandb.watch is skipped" in done.stdout

    text = report.read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header, rows = lines[0], [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
    assert header[:2] == ["workload", "variant"]
    assert [(row["workload"], row["variant"]) for row in rows] == [
        ("W2", name) for name in ("plain", "idle", "ours", "ours, eager", "floor")
    ]
    plain, idle, ours, eager, floor = rows
    for engine in (ours, eager):
        assert {name: int(engine[name]) for name in ("transfers", "host reads", "values")} == {
            "transfers": 1,
            "host reads": 0,
            "values": 7 * (129 + 128 + 128),
        }
    # The compiled kernel needs none of torch's operations for a tensor; those that are left finish the whole table.
    assert int(ours["dispatches"]) < 100
    assert {name: int(floor[name]) for name in ("transfers", "host reads", "values")} == {
        "transfers": 1,
        "host reads": 0,
        "values": 129 + 128 + 128,
    }
    for unmonitored in (plain, idle):
        assert [int(unmonitored[name]) for name in ("transfers", "host reads", "dispatches", "values")] == [0, 0, 0, 0]

    for statistic in ("std", "norm"):
        found = re.search(rf"against float64.*\b{statistic} ([0-9.e+-]+)", text)
        assert found, text
        assert float(found[1]) < 2e-6
    assert re.search(r"transfers 1, target 1: met; host reads 0, target 0: met", text)
