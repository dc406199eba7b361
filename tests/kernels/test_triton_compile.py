"""What the Triton kernel launches compiles for real GPUs, without one: ``make test-triton`` installs Triton and runs these tests."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_module_monitor.kernels import triton_kernel
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.triton_kernel import WARPS, TritonKernel

triton = pytest.importorskip("triton", "3.4", reason="Triton 3.4 or later is not installed; make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 interprets instead of compiling", allow_module_level=True)

DEFAULT = Need.SQUARES | Need.EXTREMES | Need.NONFINITE
"""What the default rules need of an activation."""

EVERYTHING = Need.EVERYTHING | Need.COUNTS
BF16, F64 = torch.bfloat16, torch.float64
TYPES = {torch.float32: "fp32", BF16: "bf16", torch.float16: "fp16", F64: "fp64", torch.int64: "i64"}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor, of which only shape, dtype and alignment matter."""
    return torch.zeros(shape, dtype=dtype)


LAUNCHES: dict[str, Callable[[TritonKernel], Any]] = {
    "activation": lambda kernel: kernel.add((0,), zeros(64, 1024, dtype=BF16), DEFAULT),
    "activation of an odd size": lambda kernel: kernel.add((0,), zeros(77, dtype=torch.float16), DEFAULT),
    "huge activation": lambda kernel: kernel.add((0,), torch.empty(1 << 32, dtype=BF16, device="meta"), DEFAULT),
    "one element": lambda kernel: kernel.add((0,), zeros(1), DEFAULT),
    "tokens of one element": lambda kernel: kernel.add((0,), zeros(2000, 1), Need.TOKENS),
    "everything": lambda kernel: kernel.add((0,), zeros(64, 256), EVERYTHING),
    "everything of float64": lambda kernel: kernel.add((0,), zeros(64, 96, dtype=F64), EVERYTHING),
    "difference": lambda kernel: kernel.add((0,), zeros(64, 96, dtype=BF16), EVERYTHING, zeros(64, 96, dtype=BF16), zeros(96)),
    "parameters": lambda kernel: kernel.add_all([0, 1], [zeros(64, 96), zeros(64)], [Need.SQUARES] * 2),
    "everything of parameters": lambda kernel: kernel.add_all([0, 1], [zeros(64, 96, dtype=BF16), zeros(64, dtype=BF16)], [EVERYTHING] * 2),
    "fine counts": lambda kernel: kernel.add((0,), zeros(64, 1024, dtype=BF16), Need.FINE_COUNTS | Need.EXTREMES),
    "collect": lambda kernel: kernel.collect(3),
}


def compiled(launched: Callable[[TritonKernel], Any], target: tuple[str, int | str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The one function that is launched, compiled for a GPU, with the arguments that it is launched with."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, int]]] = []
    monkeypatch.setattr(
        triton_kernel, "launch", lambda _device, function, _num, *arguments, **constants: launches.append((function, arguments, constants))
    )
    launched(TritonKernel(torch.device("cpu")))
    ((function, arguments, constants),) = launches
    signature, constexprs, attributes = {}, dict[str, Any](constants), {}
    for index, (parameter, argument) in enumerate(zip(function.params, arguments, strict=False)):
        # As Triton's launcher does: None and 1 become constants, and what 16 divides is known to be so.
        if argument is None or (isinstance(argument, int) and argument == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constexprs[parameter.name] = "constexpr", argument
            continue
        integer = "i64" if isinstance(argument, int) and argument >= 2**31 else "i32"
        signature[parameter.name] = f"*{TYPES[argument.dtype]}" if isinstance(argument, Tensor) else integer
        number = argument.data_ptr() if isinstance(argument, Tensor) else argument
        if number % 16 == 0 and not parameter.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(function, signature, constexprs, attributes)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget(*target), options={"num_warps": WARPS})


@pytest.fixture(autouse=True)
def _nothing_compiled_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiled_for_cuda(name: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is a cubin; sums stay in registers (Triton 3.8: all but one); 16 bytes are read at once, or 8 of half precision."""
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
    is_new = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)  # it spills one number where 3.7 spills none
    assert max(map(int, spills)) <= (8 if is_new else 0), log
    if name in {"activation", "huge activation", "everything", "everything of float64", "difference", "parameters"}:
        assert re.search(r"ld\.global\S*\.v[24]\.b", ptx.read_text())


@pytest.mark.parametrize("name", ["everything", "everything of parameters", "collect"])
def test_compiled_for_rocm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles for an MI300, and no register is spilled."""
    kernel = compiled(LAUNCHES[name], ("hip", "gfx942", 64), monkeypatch)
    assert kernel.asm["hsaco"][:4] == b"\x7fELF"
    assert re.findall(r"\.[sv]gpr_spill_count: *(\d+)", kernel.asm["amdgcn"]) == ["0", "0"]
