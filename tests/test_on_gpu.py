"""What ``make gpu`` does, on a machine without a GPU: a trial of all of it, and what is made of what a GPU would show."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.benchmarks import BENCHMARKS, Import, tiny_workload, variant
from helpers.documents import ROOT

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.warm_up import Form, Launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("on_gpu")]  # groups are begun first, and these tests take long

CPU = torch.device("cpu")
MONITORED, OTHER = "default callback, monitored step", "default callback, other steps"
AVERAGE = "default callback, average of 50 steps"
TRIAL = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import on_gpu
sys.exit(on_gpu.run(on_gpu.STAGES, pathlib.Path(sys.argv[2])))
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Import:
    """Imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


# ------------------------------------------------------------------ the command


def test_all_of_it_as_a_trial_on_a_cpu(tmp_path: Path, module: Import) -> None:
    """Without a GPU every stage ends well, with figures of its own; the page says that they mean nothing, and is made of the JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRIAL, str(BENCHMARKS), str(tmp_path / "new")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "new" / "gpu.json").read_text(encoding="utf-8"))
    page = (tmp_path / "new" / "GPU.md").read_text(encoding="utf-8")
    assert page == module("gpu_page").page(found)
    says = "This was a trial on a CPU: there was no GPU, sizes were cut down, and the figures mean nothing."
    assert page.startswith(f"# One run on a GPU\n\n**{says}**")
    assert found["is_trial"] is True
    known = found["surroundings"]
    assert (known["torch"], known["device"], known["compute_capability"], known["driver"]) == (torch.__version__, None, None, None)
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", known["commit"])

    stages = found["stages"]
    assert {name: stage["outcome"] for name, stage in stages.items()} == dict.fromkeys(
        ("kernels", "default", "everything", "profile", "tests"), "ended well"
    )
    assert all(0 < stage["seconds"] < stage["limit_s"] for stage in stages.values())
    figures = {name: stage["figures"] for name, stage in stages.items()}
    launches = figures["kernels"]["launches"]
    # The default has rms, abs_max and nonfinite_count of outputs, under autocast in both formats, and norms of all parameters at once.
    for launch in (("one tensor", ["squares", "extremes", "nonfinite"]), ("many tensors", ["squares"])):
        assert {one["dtype"] for one in launches[:4] if (one["form"], one["needs"]) == launch} == {"float32", "bfloat16"}
    assert (len(launches) > 10, figures["kernels"]["loops"]) == (True, True)

    default, everything = (figures[name]["workloads"] for name in ("default", "everything"))
    has_peer = importlib.util.find_spec("torch_module_monitor") is not None
    assert figures["default"]["not_installed"] == ([] if has_peer else ["torch-module-monitor in a Trainer"])
    for name in ("GPT", "W2"):
        variants = default[name]["variants"]
        plain, monitored, other = (variants[one] for one in ("Trainer", MONITORED, OTHER))
        assert (plain["ratio"], plain["quartiles"], default[name]["rounds"]) == (1, [1, 1], 3)
        assert [one["counts"]["transfers"] for one in (plain, monitored, other, variants["floor in a Trainer"])] == [0, 1, 0, 1]
        counted = [one["counts"]["dispatches"] for one in (plain, other, monitored, everything[name]["variants"]["everything"])]
        assert counted == sorted(set(counted)), "the more is observed, the more operations there are"
        assert all(one["ms"] > 0 for one in variants.values())
        assert len(default[name]["targets"]) == 2
    rows = figures["profile"]["on_the_host"]
    assert figures["profile"]["on_the_device"] == []
    assert [row["ms"] for row in rows] == sorted((row["ms"] for row in rows), reverse=True)
    assert (len(rows), rows[0]["ms"] > 0, any(row["name"] == "aten::addmm" for row in rows)) == (25, True, True)
    tests = figures["tests"]
    assert [tests[name] for name in ("passed", "failed", "not_run", "failures")] == [0, 0, 0, {}]
    assert tests["skipped"] == sum(tests["reasons_to_skip"].values()) > 10
    assert tests["reasons_to_skip"]["no CUDA device here"] > 10


def test_make_gpu_is_the_command_that_is_tested(module: Import) -> None:
    """It takes less than eight minutes, and a trial does not replace what a GPU has shown."""
    done = subprocess.run(["make", "--no-print-directory", "--dry-run", "gpu"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ".venv/bin/python benchmarks/on_gpu.py"
    on_gpu = module("on_gpu")
    assert sum(stage.seconds for stage in on_gpu.STAGES) < 480
    assert (on_gpu.folder_for(is_gpu=True), on_gpu.folder_for(is_gpu=False)) == (BENCHMARKS, ROOT / "build")


HANGS = """
import json, pathlib, subprocess, sys, time
child = 'import fcntl, sys, time; kept = open(sys.argv[1], "w"); fcntl.flock(kept, fcntl.LOCK_EX); print(flush=True); time.sleep(300)'
started = subprocess.Popen([sys.executable, "-c", child, {lock!r}], stdout=subprocess.PIPE)
started.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(json.dumps({{"found": 7}}))
time.sleep(300)
"""
FAILS = 'import sys; print("what was computed"); sys.exit("3 of 4 kernels are wrong | so far")'
DIES = "import os; os.abort()"
WELL = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text('{\"arguments\": %d}' % len(sys.argv))"


def test_a_stage_that_fails_or_runs_over_is_named_and_the_others_run(
    tmp_path: Path, module: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1, the reason on the page, and what was found until then; of one that ran over no process is left."""
    stage, lock = module("stages").Stage, tmp_path / "lock"
    programs = {"hangs": HANGS.format(lock=str(lock)), "fails": FAILS, "dies": DIES, "well": WELL}
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
    stages = [stage(name, f"what {name}", (str(tmp_path / f"{name}.py"), "first"), 3 if name == "hangs" else 30) for name in programs]
    stages[0] = stages[0]._replace(command=stages[0].command[:1])
    assert module("on_gpu").run(stages, tmp_path) == 1
    done = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert {name: (one["outcome"], one["reason"], one["figures"]) for name, one in done.items()} == {
        "hangs": ("ran over", "ended after 3 s", {"found": 7}),
        "fails": ("failed", "3 of 4 kernels are wrong | so far", {}),
        "dies": ("failed", "status -6", {}),
        "well": ("ended well", "", {"arguments": 3}),
    }
    assert done["fails"]["output"] == ["what was computed", "3 of 4 kernels are wrong | so far"]
    assert (done["hangs"]["seconds"] < 10, done["well"]["output"]) == (True, [])
    assert 30 < done["well"]["limit_s"] < 91, "with the time that the two before it have left"
    page = (tmp_path / "GPU.md").read_text()
    assert re.search(r"^\| hangs \| ran over \| 3 \| 3 \| ended after 3 s \|$", page, re.MULTILINE)
    assert re.search(r"^\| fails \| failed \| \d+ \| \d+ \| 3 of 4 kernels are wrong / so far \|$", page, re.MULTILINE)
    assert "```text\nwhat was computed\n3 of 4 kernels are wrong | so far\n```" in page
    assert "fails: what fails ...\nfailed after" in capsys.readouterr().out
    with lock.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert module("on_gpu").run(stages[-1:], tmp_path) == 0


# ------------------------------------------------------------------ its tests


TESTS = {
    "test_some.py": """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
@pytest.mark.parametrize("number", [1, 2])
def test_wrong(number): assert number == 3
@pytest.mark.skip(reason="too cold")
def test_left_out(): pass
""",
    "test_plain.py": "import pytest\n@pytest.mark.gpu\ndef test_right(): pass\ndef test_elsewhere(): assert False",
    "test_gone.py": "import nothing_of_this_name  # has a pytest.mark.gpu",
    "test_absent.py": "import pytest\npytestmark = pytest.mark.gpu\npytest.skip('no such device', allow_module_level=True)",
    "test_other.py": "raise ArithmeticError",
}
RUN_TESTS = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import gpu_tests
gpu_tests.ROOT = pathlib.Path.cwd()
gpu_tests.torch.cuda.is_available = lambda: {is_gpu}
sys.argv[1:] = ["figures.json"]
gpu_tests.main()
"""


def run_tests(folder: Path, tests: dict[str, str], *, is_gpu: bool) -> tuple[int, str, dict[str, Any]]:
    """Run some tests as on a GPU, or as without one: the status, the last line of what is printed, and the figures."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    for name, text in tests.items():
        (folder / "tests" / name).write_text(text)
    command = [sys.executable, "-c", RUN_TESTS.format(is_gpu=is_gpu), str(BENCHMARKS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, (done.stderr.splitlines() or [""])[-1], json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("is_gpu", [False, True], ids=["one process", "several processes"])
def test_tests_are_counted_and_reasons_are_kept(is_gpu: bool, tmp_path: Path) -> None:
    """Also those of files that cannot be imported; where nothing concerns a GPU, nothing is imported."""
    status, line, figures = run_tests(tmp_path, TESTS, is_gpu=is_gpu)
    assert (status, line) == (1, "3 of 5 tests failed")
    failures = {
        "tests/test_some.py::test_wrong[1]": "assert 1 == 3",
        "tests/test_some.py::test_wrong[2]": "assert 2 == 3",
        "tests/test_gone.py": "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    }
    assert figures == {
        "passed": 2,
        "failed": 3,
        "skipped": 2,
        "not_run": 0,
        "failures": failures,
        "reasons_to_skip": {"too cold": 1, "no such device": 1},
    }


@pytest.mark.parametrize("is_gpu", [False, True])
def test_where_all_tests_are_skipped(is_gpu: bool, tmp_path: Path) -> None:
    """On a GPU it is a failure."""
    status, line, figures = run_tests(tmp_path, {"test_absent.py": TESTS["test_absent.py"]}, is_gpu=is_gpu)
    assert (figures["passed"], figures["skipped"]) == (0, 1)
    assert (status, line) == ((1, "no test ran") if is_gpu else (0, ""))


def test_tests_that_were_not_reached_are_counted(module: Import, tmp_path: Path) -> None:
    """The process is ended where it runs over; what it has written says how many it had still to run."""
    tally = module("gpu_tests").Tally(tmp_path / "figures.json")
    tally.pytest_xdist_node_collection_finished(ids=["a.py::one", "a.py::two", "a.py::three"])
    report = {"nodeid": "a.py::one", "passed": True, "failed": False, "skipped": False}
    for when in ("setup", "call", "teardown"):
        tally.pytest_runtest_logreport(SimpleNamespace(**report, when=when))
    written = json.loads((tmp_path / "figures.json").read_text())
    assert (written["passed"], written["not_run"]) == (1, 2)


def test_every_test_that_needs_a_gpu_has_the_marker(module: Import) -> None:
    """No file that asks for CUDA, or for Triton on it, is left out of ``make gpu``."""
    chosen = module("gpu_tests").files_with_tests(ROOT / "tests")
    asks = re.compile(r"skipif\([^\n]*cuda\.is_available|not torch\.cuda\.is_available\(\):|^skip_without_triton\(\)", re.MULTILINE)
    asking = [path for path in (ROOT / "tests").rglob("test_*.py") if asks.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in asking} >= {"test_cuda.py", "test_triton_kernel.py", "test_overhead.py", "test_counts.py"}
    assert set(asking) <= {*chosen}
    for path in asking:
        text = path.read_text(encoding="utf-8")
        num_asking = len(re.findall(r"^@needs_cuda|^@pytest\.mark\.skipif\([^\n]*cuda\.is_available", text, re.MULTILINE))
        assert text.count("@pytest.mark.gpu\n") >= num_asking, path


# ------------------------------------------------------------------ its kernels

LAUNCHES = [Launch(torch.float32, Need.SQUARES, Form.ONE), Launch(torch.bfloat16, Need.MEAN | Need.TOKENS, Form.MANY)]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_each_launch_is_compared_and_timed(is_wrong: bool, module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also those after one that is wrong, which ends the program with status 1 and the reason."""
    kernels, compared = module("gpu_kernels"), []

    def compare(_device: torch.device, launch: Launch) -> None:
        compared.append(launch)
        time.sleep(0.01)
        if is_wrong and launch == LAUNCHES[0]:
            raise ValueError("squares was [1.0], expected [2.0]")

    monkeypatch.setattr(kernels, "compare", compare)
    monkeypatch.setattr(kernels.triton_kernel, "works", lambda _device: True)
    output = tmp_path / "figures.json"
    if is_wrong:
        with pytest.raises(SystemExit) as ended:
            kernels.check_all(CPU, LAUNCHES, output)
        reason = "1 of 2 launches are wrong, the first with one tensor of float32: ValueError: squares was [1.0], expected [2.0]"
        assert ended.value.code == reason
    else:
        kernels.check_all(CPU, LAUNCHES, output)
    assert compared == LAUNCHES
    figures = json.loads(output.read_text())
    one, many = figures["launches"]
    assert (one["form"], one["dtype"], one["needs"]) == ("one tensor", "float32", ["squares"])
    assert (many["form"], many["dtype"], many["needs"], many["wrong"]) == ("many tensors", "bfloat16", ["mean", "tokens"], "")
    assert one["wrong"] == ("ValueError: squares was [1.0], expected [2.0]" if is_wrong else "")
    assert one["seconds"] >= 0.01


def test_where_triton_does_not_work_nothing_is_compared(module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the stage fails."""
    kernels = module("gpu_kernels")
    monkeypatch.setattr(kernels.triton_kernel, "works", lambda _device: False)
    with pytest.raises(SystemExit, match="Triton does not work on this device"):
        kernels.check_all(CPU, LAUNCHES, tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["launches"] == []


# ------------------------------------------------------------------ its figures


class FakeEvent:
    """A CUDA event that asks the clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.seconds - self.seconds)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own
def test_a_gpu_is_measured_by_events_and_memory(module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU runs in a Trainer, on a CPU whose events are a clock's."""
    gpu, cost, sets = module("gpu"), module("gpu_cost"), module("gpu_variants").ON_GPU
    held = iter(range(0, 1000 * 2**20, 2**20))
    fake = SimpleNamespace(
        Event=FakeEvent,
        synchronize=lambda: None,
        memory_allocated=lambda: next(held),
        max_memory_allocated=lambda: 100 * 2**20,
        reset_peak_memory_stats=lambda: None,
    )
    monkeypatch.setattr(gpu, "cuda", fake)
    monkeypatch.setattr(gpu.Gpu, "device", CPU)
    variants = [one for one in sets["default"] if not one.package]
    result = module("measuring").measure(tiny_workload(module), variants, 2, "32-true", place=gpu.Gpu())
    assert [*result.peak_bytes.values()] == [(100 - before) * 2**20 for before in range(5)]
    assert all(
        0 < seconds <= wall
        for name in result.seconds
        for seconds, wall in zip(result.seconds[name], result.wall_seconds[name], strict=True)
    )
    assert not result.own_seconds
    assert result.num_outputs == 5
    figures = cost.figures_of(result, variants)
    assert [*figures["variants"]] == [*result.seconds, AVERAGE]
    counts = {name: one["counts"] for name, one in figures["variants"].items() if name != AVERAGE}
    assert [one["transfers"] for one in counts.values()] == [0, 1, 0, 1, 1]
    assert counts["callback + store"]["host_reads"] == counts["default callback, other steps"]["host_reads"]
    assert figures["targets"][0] == "callback + store: 0 launches, target at most 46: met"


def test_rounds_end_where_their_time_is_over(module: Import) -> None:
    """The one that has begun is finished, and there is at least one."""
    measuring, lane = module("measuring"), variant(module, "plain").start(tiny_workload(module), "32-true", CPU)
    batches = module("lanes").make_batches(tiny_workload(module))
    result = measuring.Result(tiny_workload(module))
    measuring.time_rounds({"plain": lane, "other": lane}, batches, 10**9, result, most_seconds=0.05)
    assert 1 <= len(result.seconds["plain"]) == len(result.seconds["other"]) < 10**5


def test_the_average_is_that_of_the_default_schedule(module: Import) -> None:
    """One monitored step and 49 others, round by round, in relation to the plain step of the round."""
    cost, measuring = module("gpu_cost"), module("measuring")
    slow = [1.0, 1.0, 2.0, 4.0, 4.0]
    added = {"Trainer": 0.0, MONITORED: 1.0, OTHER: 0.01, "callback + store": 3.0, "floor in a Trainer": 2.0}
    seconds = {name: [one * (1 + more) for one in slow] for name, more in added.items()}
    counts = {name: measuring.Counts(9, 0, 1, 0, launches=100 + 47 * (name == "callback + store")) for name in seconds}
    result = measuring.Result(module("workloads").WORKLOADS["W2"], seconds, counts, wall_seconds=seconds, num_outputs=5)
    result.peak_bytes = dict.fromkeys(seconds, 0)
    variants = [one for one in module("gpu_variants").ON_GPU["default"] if one.name in seconds]
    figures = cost.figures_of(result, variants)
    average = figures["variants"][AVERAGE]
    assert average["ratio"] == pytest.approx((2 + 49 * 1.01) / 50)
    assert average["ms"] == pytest.approx(2000 * (2 + 49 * 1.01) / 50)
    plain = figures["variants"]["Trainer"]
    assert (plain["ratio"], plain["quartiles"], plain["ms"]) == (1, [1, 1], 2000)
    assert figures["targets"] == [
        "callback + store: 47 launches, target at most 46: MISSED",
        "callback + store 1.50 (1.50 to 1.50) of the floor, target at most 1.5: met",
    ]


def test_a_step_is_counted_by_the_names_of_calls_and_copies(module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are those of torch's own kernels and those of Triton's; kernels and copies are not, and their time is the device's."""
    measuring, lane = module("measuring"), variant(module, "plain").start(tiny_workload(module), "32-true", CPU)
    kinds = type(measuring.DeviceType.CPU)
    launches = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"]
    waits = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"]
    on_device = [
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "vectorized_kernel",
    ]

    def event(name: str, kind: object, *, is_user_annotation: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(elapsed_us=lambda: 500.0)
        return SimpleNamespace(name=name, cpu_parent=None, device_type=kind, time_range=span, is_user_annotation=is_user_annotation)

    events = [event(name, kinds.CPU) for name in (*launches, *waits, "cudaMemcpyAsync", "cudaEventRecord", "aten::add")]
    events += [event(name, kinds.CUDA) for name in on_device] + [event("AdamW.step", kinds.CUDA, is_user_annotation=True)]

    class FakeProfile:
        def __init__(self, activities: list[object]) -> None:
            assert len(activities) == 2, "without what the GPU does"

        def __enter__(self) -> FakeProfile:
            return self

        def __exit__(self, *_error: object) -> None:
            """Nothing was started."""

        def events(self) -> list[SimpleNamespace]:
            return events

    monkeypatch.setattr(measuring, "profile", FakeProfile)
    batch = module("lanes").make_batches(tiny_workload(module))[0]
    counts = measuring.count(lane, batch, torch.device("cuda"))
    assert (counts.launches, counts.copies_to_host, counts.copies_to_device, counts.waits, counts.dispatches) == (4, 1, 2, 3, 1)
    assert counts.device_seconds == pytest.approx(4 * 0.0005)


def test_a_profile_has_the_names_that_take_most(module: Import) -> None:
    """Each with all its calls: kernels by their time on the device, calls on the host without those that they make."""
    largest, kinds = module("gpu_profile").largest, module("measuring").DeviceType

    def event(name: str, kind: object, us: float, own_us: float = 0.0) -> SimpleNamespace:
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=kind, time_range=span, self_cpu_time_total=own_us, is_user_annotation=False)

    events = [event("gemm", kinds.CUDA, 3000.0), event("measure", kinds.CUDA, 2500.0), event("measure", kinds.CUDA, 1500.0)]
    events += [event("aten::linear", kinds.CPU, 9000.0, 10.0), event("aten::addmm", kinds.CPU, 8000.0, 8000.0)]
    assert largest(events, on_device=True) == [{"name": "measure", "calls": 2, "ms": 4.0}, {"name": "gemm", "calls": 1, "ms": 3.0}]
    host = [{"name": "aten::addmm", "calls": 1, "ms": 8.0}, {"name": "aten::linear", "calls": 1, "ms": 0.01}]
    assert largest(events, on_device=False) == host
    assert len(largest([event(str(number), kinds.CPU, 1.0) for number in range(40)], on_device=False)) == 25


# ------------------------------------------------------------------ its Trainers


class Noted:
    """A context that notes the thread that enters it, and the one that leaves it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        self.threads.append(threading.current_thread())

    def __exit__(self, *_error: object) -> None:
        self.threads.append(threading.current_thread())


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own
def test_a_step_of_a_trainer_is_profiled_in_its_thread(module: Import) -> None:
    """One step and no other, also where it fails; the operations are those of the plain loop, with the Trainer's own."""
    measuring, workload = module("measuring"), tiny_workload(module)
    measuring.set_up_profiler(CPU)
    batch = module("lanes").make_batches(workload)[0]
    loop, lane = (variant(module, name).start(workload, "32-true", CPU) for name in ("plain", "Trainer"))
    first, failing = Noted(), Noted()
    loop.train_step(batch)
    lane.train_step(batch, first)
    assert first.threads == [lane.thread] * 2
    counted = [measuring.count(one, batch).dispatches for one in (loop, lane)]
    assert 0 < counted[0] <= counted[1] < 2 * counted[0]
    lane.train_step(batch)
    lane.model.register_forward_hook(lambda *_args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lane.train_step(batch, failing)
    lane.close()
    assert (first.threads, failing.threads) == ([lane.thread] * 2, [lane.thread] * 2)


def test_a_trainer_trains_on_the_device_that_is_measured(module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the precision of the workload, with what is measured and nothing else."""
    lanes, given = module("lanes"), {}
    monkeypatch.setattr(lanes, "Trainer", lambda **options: given.update(options))
    lanes.make_trainer(lanes.Parts([]), "bf16-mixed", torch.device("cuda"), "folder", max_steps=0)
    expected = {"accelerator": "cuda", "devices": 1, "precision": "bf16-mixed", "max_steps": 0, "logger": False, "callbacks": []}
    assert {name: given[name] for name in expected} == expected


# ------------------------------------------------------------------ its page


def test_the_page_of_a_gpu(module: Import) -> None:
    """What was compiled and whether it is right, the cost beyond the Trainer alone, and which tests failed."""
    stages, page = module("stages"), module("gpu_page").page
    counted = ("launches", "copies_to_host", "copies_to_device", "waits", "host_reads", "dispatches")
    counts = dict.fromkeys(counted, 5) | {"device_seconds": 0.01}
    plain = {"ms": 20.0, "ratio": 1.0, "quartiles": [1.0, 1.0], "ms_by_clock": 21.0, "counts": counts, "peak_bytes": 2**30, "note": "alone"}
    monitored = plain | {"ms": 25.0, "ratio": 1.25, "quartiles": [1.2, 1.3], "counts": counts | {"launches": 75, "waits": 4}, "note": "all"}
    average = {"ms": 20.1, "ratio": 1.005, "quartiles": [1.004, 1.006], "note": "of both"}
    launch = {"form": "one tensor", "dtype": "float32", "needs": ["mean"], "seconds": 1.25, "wrong": ""}
    figures = {
        "kernels": {"device": "cuda:0", "works": True, "first_s": 2.0, "launches": [launch, launch | {"wrong": "ValueError: a | b"}]},
        "default": {
            "not_installed": ["that one"],
            "workloads": {
                "W2": {
                    "workload": "64 layers",
                    "rounds": 60,
                    "variants": {"Trainer": plain, MONITORED: monitored, AVERAGE: average},
                    "targets": ["a: met", "b: MISSED"],
                }
            },
        },
        "profile": {"workload": "a GPT", "variant": MONITORED, "on_the_host": [], "on_the_device": [{"name": "k", "calls": 2, "ms": 0.5}]},
        "tests": {
            "passed": 90,
            "failed": 1,
            "skipped": 2,
            "not_run": 3,
            "failures": {"a.py::b": "assert 1 == 2"},
            "reasons_to_skip": {"no such dtype": 2},
        },
    }
    done = {
        name: stages.pending(stages.Stage(name, "...", (), 9)) | {"outcome": stages.WELL, "figures": one} for name, one in figures.items()
    }
    done["everything"] = stages.pending(stages.Stage("everything", "all", (), 9))
    known = {"date": "2026-01-02 03:04 UTC", "commit": "abc", "device": "NVIDIA H100", "compute_capability": "9.0", "triton": None}
    text = page({"is_trial": False, "surroundings": known, "stages": done})
    assert "trial" not in text
    assert "`make gpu`, 2026-01-02 03:04 UTC, commit abc; device NVIDIA H100, compute capability 9.0." in text
    assert "Triton works on cuda:0; its first kernel took 2.0 s." in text
    assert "| one tensor | float32 | mean | 1.2 | equal |\n| one tensor | float32 | mean | 1.2 | ValueError: a / b |" in text
    assert "that one was not measured: it is not installed." in text
    assert "| Trainer | 20.00 | 21.00 | 1 | - | 10.00 | 5 | 5 | 5 | 5 | 5 | 5 | 1024 | alone |" in text
    row = "25.00 | 21.00 | +25.0 % | +20.0 % to +30.0 % | 10.00 | +70 | +0 | +0 | -1 | +0 | +0 | 1024 | all |"
    assert f"| {MONITORED} | {row}" in text
    assert f"| {AVERAGE} | 20.10 | - | +0.5 % | +0.4 % to +0.6 % | {'- | ' * 8}of both |" in text
    assert "- a: met\n- b: MISSED" in text
    assert "Kernels and copies:\n\n| name | calls | ms |\n| --- | ---: | ---: |\n| `k` | 2 | 0.500 |" in text
    assert "Calls on the host" not in text
    assert "90 passed, 1 failed, 2 skipped, 3 were not run.\n\n- `a.py::b`: assert 1 == 2\n- 2 skipped: no such dtype" in text
    assert "## everything: all\n\n**did not run**" in text
