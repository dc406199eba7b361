"""What the Triton kernel launches compiles for real GPUs, without one: ``make test-triton`` installs Triton and runs these tests."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.lightning_package import MixedPrecision
from helpers.training import Classifier, loader, trainer
from torch import Tensor
from torch.amp import GradScaler

from lightning_module_monitor import ModuleMonitorCallback, Rule
from lightning_module_monitor.kernels import numba_kernel, triton_kernel, warm_up
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.triton_kernel import WARPS, TritonKernel
from lightning_module_monitor.kernels.warm_up import Launch
from lightning_module_monitor.trainer import controller

ROOT = Path(__file__).parents[2]
triton = pytest.importorskip("triton", "3.4", reason="Triton 3.4 or later is not installed; make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 interprets instead of compiling", allow_module_level=True)

PINNED = re.findall(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


def needs_the_pinned_compiler() -> None:
    """Skip what follows with another version of the compiler, which allots registers in another way."""
    if triton.__version__ != PINNED:
        pytest.skip(f"budgets of registers and instructions are those of Triton {PINNED}, and this is {triton.__version__}")


DEFAULT = Need.SQUARES | Need.EXTREMES | Need.NONFINITE
"""What the default rules need of an activation."""

SEVEN = DEFAULT | Need.MEAN | Need.DEVIATIONS | Need.MAGNITUDE | Need.ZEROS
"""What mean, std, rms, abs_mean, abs_max, zero_fraction and nonfinite_count need."""

EVERYTHING = Need.EVERYTHING | Need.COUNTS
BF16, F64 = torch.bfloat16, torch.float64
TYPES = {torch.float32: "fp32", BF16: "bf16", torch.float16: "fp16", F64: "fp64", torch.int64: "i64"}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor, of which only shape, dtype and alignment matter."""
    return torch.zeros(shape, dtype=dtype)


LAUNCHES: dict[str, Callable[[TritonKernel], Any]] = {
    "activation": lambda kernel: kernel.add((0,), zeros(64, 1024, dtype=BF16), DEFAULT),
    "seven statistics of an activation": lambda kernel: kernel.add((0,), zeros(64, 1024), SEVEN),
    "activation of an odd size": lambda kernel: kernel.add((0,), zeros(77, dtype=torch.float16), DEFAULT),
    "huge activation": lambda kernel: kernel.add((0,), torch.empty(1 << 32, dtype=BF16, device="meta"), DEFAULT),
    "one element": lambda kernel: kernel.add((0,), zeros(1), DEFAULT),
    "tokens of one element": lambda kernel: kernel.add((0,), zeros(2000, 1), Need.TOKENS),
    "everything": lambda kernel: kernel.add((0,), zeros(64, 256), EVERYTHING),
    "everything of float64": lambda kernel: kernel.add((0,), zeros(64, 96, dtype=F64), EVERYTHING),
    "difference": lambda kernel: kernel.add((0,), zeros(64, 96, dtype=BF16), EVERYTHING, zeros(64, 96, dtype=BF16), zeros(96)),
    "heads": lambda kernel: kernel.add((0,), zeros(8, 4, 64, 64, dtype=BF16)[:, 1], EVERYTHING),
    "scaled": lambda kernel: kernel.add((0,), zeros(64, 96, dtype=BF16), EVERYTHING, scale=zeros()),
    "scaled float64": lambda kernel: kernel.add((0,), zeros(64, 96, dtype=F64), EVERYTHING, scale=zeros()),
    "parameters": lambda kernel: kernel.add_all([0, 1], [zeros(64, 96), zeros(64)], [Need.SQUARES] * 2),
    "everything of parameters": lambda kernel: kernel.add_all([0, 1], [zeros(64, 96, dtype=BF16), zeros(64, dtype=BF16)], [EVERYTHING] * 2),
    "product": lambda kernel: kernel.add_product(0, zeros(64, 96, dtype=BF16), zeros(64, 96), -1),
    "fine counts": lambda kernel: kernel.add((0,), zeros(64, 1024, dtype=BF16), Need.FINE_COUNTS | Need.EXTREMES),
    "collect": lambda kernel: kernel.collect(3),
}


class Specialized(NamedTuple):
    """What the compiler knows of a launch; another makes it compile anew."""

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attributes: dict[tuple[int], Any]


def specialized(launched: Callable[[TritonKernel], Any], monkeypatch: pytest.MonkeyPatch) -> list[Specialized]:
    """The functions that are launched, each with its arguments as Triton's launcher specializes them."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, int]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            triton_kernel,
            "launch",
            lambda _device, function, _num, *arguments, **constants: launches.append((function, arguments, constants)),
        )
        launched(TritonKernel(torch.device("cpu")))
    return [_specialized(*launch) for launch in launches]


def _specialized(function: Any, arguments: tuple[Any, ...], constants: dict[str, int]) -> Specialized:
    signature, constexprs, attributes = dict[str, str](), dict[str, Any](constants), dict[tuple[int], Any]()
    for index, (parameter, argument) in enumerate(zip(function.params, arguments, strict=False)):
        # As Triton's launcher does: None and 1 become constants, and what 16 divides is known to be so.
        if argument is None or (isinstance(argument, int) and argument == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constexprs[parameter.name] = "constexpr", argument
            continue
        integer = parameter.annotation_type or ("i64" if isinstance(argument, int) and argument >= 2**31 else "i32")
        signature[parameter.name] = f"*{TYPES[argument.dtype]}" if isinstance(argument, Tensor) else integer
        number = argument.data_ptr() if isinstance(argument, Tensor) else argument
        if number % 16 == 0 and not parameter.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
    return Specialized(function, signature | dict.fromkeys(constants, "constexpr"), constexprs, attributes)


def compiled(launched: Callable[[TritonKernel], Any], target: tuple[str, int | str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The one function that is launched, compiled for a GPU, with the arguments that it is launched with."""
    (launch,) = specialized(launched, monkeypatch)
    source = triton.compiler.ASTSource(*launch)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget(*target), options={"num_warps": WARPS})


SIZES = (1, 2, 3, 7, 16, 17, 64, 100, 128, 1000, 1023, 1024, 1025, 4096, 5000, 1 << 16, 77777, 1 << 20, (1 << 20) + 1, 3 << 19)
MEMORY = torch.empty(1 << 24)


@pytest.mark.parametrize("needs", [DEFAULT, EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_one_compilation_for_twenty_numbers_of_elements(needs: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tensor, of many, of a difference, wherever they lie; rows of one length have one, rows of any length three."""

    def keys(add: Callable[[TritonKernel, int], Any], sizes: Sequence[int] = SIZES) -> int:
        return len({repr(launch) for size in sizes for launch in specialized(functools.partial(add, size=size), monkeypatch)})

    part = lambda size: MEMORY[offset : offset + size * 8].view(size, 8)  # noqa: E731
    assert len(SIZES) == 20
    assert keys(lambda kernel, size: kernel.add((0,), part(size), needs)) == 1
    assert keys(lambda kernel, size: kernel.add((0,), part(size), needs, MEMORY[: size * 8].view(size, 8))) == 1
    assert keys(lambda kernel, size: kernel.add((0,), part(size), needs, None, MEMORY[:8])) == 1
    assert keys(lambda kernel, size: kernel.add_all([0, 1], [part(size), part(1)], [needs] * 2)) == 1
    assert keys(lambda kernel, size: kernel.add_product(0, part(size), MEMORY[: size * 8].view(size, 8), (-1) ** size)) == 1
    reserved = lambda kernel, size: [kernel._parts.reserve([size]), kernel._launches.append((0, 0))]  # noqa: E731
    assert keys(lambda kernel, size: [reserved(kernel, size), kernel.collect(size)], SIZES[:10]) == 1
    lengths = [length for length in SIZES if length <= 1 << 20]
    assert keys(lambda kernel, size: kernel.add((0,), MEMORY[:size].view(1, size), needs), lengths) <= 3


OF_RUNS: dict[str, dict[str, Any]] = {
    "default": {},
    "every kind": {
        "rules": Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["std", "hist"])
    },
    "reference": {"reference": "init", "rcc": True},
    "gradient flow": {"gradient_flow": {"blocks": "model.layers"}},
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", OF_RUNS)
def test_no_step_of_a_run_compiles(name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that steps launch was compiled before: as if the tensors of a run on a CPU were on a GPU, where nothing is measured."""
    compiled_before, in_steps = set[str](), set[str]()
    found = in_steps
    monkeypatch.setattr(
        triton_kernel,
        "launch",
        lambda _device, function, _num, *arguments, **constants: found.add(repr(_specialized(function, arguments, constants))),
    )
    monkeypatch.setattr(triton_kernel, "takes", lambda _tensor: True)
    monkeypatch.setattr(numba_kernel, "takes", lambda _tensor: False)

    def compile_before(device: torch.device, launches: Collection[Launch]) -> None:
        nonlocal found
        found = compiled_before
        for launch in launches:
            kernel = TritonKernel(device)
            kernel.collect(1 + warm_up._add(kernel, device, launch))
        found = in_steps

    monkeypatch.setattr(controller, "warm_up", compile_before)
    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        how = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))}
    callback = ModuleMonitorCallback(every_n_steps=1, store=False, **OF_RUNS[name])
    trainer(tmp_path, [callback], max_steps=3, **how).fit(Classifier("mlp"), loader(), loader(8))
    assert len(in_steps) >= 3
    assert in_steps <= compiled_before


@pytest.fixture(autouse=True)
def _nothing_compiled_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


SLOW = (75, 86, 89)
"""Compute capabilities at which float64 takes 32 or 64 times as long as float32."""


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90])
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiled_for_cuda(name: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is a cubin; sums stay in registers, all but one, of float64 tensors most.

    By default, and for seven statistics, so many programs run at once on a multiprocessor as a tensor has for it.
    """
    monkeypatch.setattr(triton_kernel, "has_slow_float64", lambda _device: arch in SLOW)
    kernel = compiled(LAUNCHES[name], ("cuda", arch, 32), monkeypatch)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    target = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
    assert target is not None
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert len(spills) == 2, log
    needs_the_pinned_compiler()
    assert max(map(int, spills)) <= (128 if name == "everything of float64" else 8), log
    if "activation" in name and arch not in SLOW:
        registers = int(re.findall(r"Used (\d+) registers", log)[0])
        assert registers * WARPS * 32 * triton_kernel.PROGRAMS_OF_PROCESSOR <= 1 << 16, log


@pytest.mark.parametrize(("arch", "width", "is_slow"), [("gfx942", 64, False), ("gfx1100", 32, True)])
@pytest.mark.parametrize("name", ["everything", "everything of parameters", "collect"])
def test_compiled_for_rocm(name: str, arch: str, width: int, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles for an MI300, and for an RX 7900, on which float64 is slow; no register is spilled."""
    monkeypatch.setattr(triton_kernel, "has_slow_float64", lambda _device: is_slow)
    kernel = compiled(LAUNCHES[name], ("hip", arch, width), monkeypatch)
    assert kernel.asm["hsaco"][:4] == b"\x7fELF"
    needs_the_pinned_compiler()
    assert re.findall(r"\.[sv]gpr_spill_count: *(\d+)", kernel.asm["amdgcn"]) == ["0", "0"]


_OF_FLOAT64 = {"cuda": r"\b(DADD|DMUL|DFMA|DSETP|F2F\.F64\S*)\b", "hip": r"\bv_(?:\w+_)?f64\w*"}


def loop(kernel: Any, backend: str) -> list[str]:
    """The instructions of the loop over a span that reads the tensor: the first one that has a load."""
    if backend == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            text = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], check=True, capture_output=True, text=True).stdout
        label, jump, load = r"\s*(\.L_x_\d+):", r"BRA\S*\s.*?\((\.L_x_\d+)\)", "LDG"
    else:
        text, label, jump, load = kernel.asm["amdgcn"], r"(\.LBB\d+_\d+):", r"s_c?branch\w* (\.LBB\d+_\d+)", "_load_"
    lines = text.splitlines()
    labels = {found[1]: number for number, line in enumerate(lines) if (found := re.match(label, line))}
    jumps = ((labels.get(found[1], len(lines)), number) for number, line in enumerate(lines) if (found := re.search(jump, line)))
    bodies = (lines[begin:end] for begin, end in jumps if begin < end)
    return next(body for body in bodies if any(load in line for line in body))


@pytest.mark.parametrize(("needs", "most", "most_slow"), [(DEFAULT, 2, 0), (SEVEN, 5, 0)], ids=["default", "seven"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, "gfx942"])
def test_instructions_of_float64(  # noqa: PLR0917  # a target and its limits
    arch: int | str, dtype: torch.dtype, needs: int, most: int, most_slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each element, in the loop over a span: none where float64 is slow."""
    monkeypatch.setattr(triton_kernel, "has_slow_float64", lambda _device: arch in SLOW)
    backend = "cuda" if isinstance(arch, int) else "hip"
    target = (backend, arch, 32 if backend == "cuda" else 64)
    body = loop(compiled(lambda kernel: kernel.add((0,), zeros(64, 1024, dtype=dtype), needs), target, monkeypatch), backend)
    elements = triton_kernel.TILE // (WARPS * target[2])
    needs_the_pinned_compiler()
    num = sum(bool(re.search(_OF_FLOAT64[backend], line)) for line in body)
    assert num <= (most_slow if arch in SLOW else most) * elements
    assert len(body) > 40  # it is the loop
