"""Ctrl-C at any moment of the end of a step leaves nothing behind: no hook, no attribute, no mode; and the monitor can be used again."""

from __future__ import annotations

import copy
import logging
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.training import Classifier, loader, seed, trainer
from helpers.zoo import batches, make
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils import hooks as hooks_of_torch
from torch.utils.hooks import RemovableHandle
from torchmetrics import MeanMetric

import lightning_module_monitor
from lightning_module_monitor import Alert, Capture, GradientFlow, Health, ModuleMonitor, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.config.rules import attention_rules, coordinate_check_rules
from lightning_module_monitor.record import RawTensor, Record
from lightning_module_monitor.sinks.store.tensors import RunFiles

PACKAGE = Path(lightning_module_monitor.__file__).parent
EVERY_LINE_OF_MONITOR = (
    "engine/step_context.py",
    "engine/phases.py",
    "probes/base.py",
    "model/hooks.py",
    hooks_of_torch.__file__,
)
EVERY_LINE_OF_CALLBACK = ("/callback.py", "trainer/step.py", "trainer/optimizers.py")
FILES_OF_STORES = ("store/schema.py", "store/read_access.py", "store/journal.py")
"""Files that close what a step has opened: an interrupt comes before each line that they run, of others before some."""

EVERY_FIFTH = pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow, id="every line"), pytest.param(5, id="every fifth line")]
)
"""Of the lines, from an offset by the date; all of them where slow tests are run."""

RULES = [
    Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics="norm"),
    Rule(
        kinds="activation", sites=".*head", statistics="hist", functions={"mean": torch.mean, "metric": MeanMetric(nan_strategy="disable")}
    ),
    Rule(kinds=["activation_difference", "parameter_difference"], statistics="ratio"),
]
BLOCKS = "(embedding|attention|mlp|head)"
CAPTURE = Capture(sites=".*", steps=list(range(10_000)), kinds=["activation", "activation_gradient", "gradient", "update"])
KIND_OF_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Interrupted:
    """Runs calls, and raises ``KeyboardInterrupt`` before one of the lines that they run in the package or in torch's handles of hooks.

    Args:
        at: Number of the line, of all that are run; without it all are run.
    """

    def __init__(self, at: int | None = None) -> None:
        self._at = at
        self.lines: list[tuple[str, int]] = []
        """File and number of each line, in the order in which they are run."""
        self._is_traced: dict[str, bool] = {hooks_of_torch.__file__: True}

    def run(self, call: Callable[[], object]) -> None:
        """Run a call.

        Raises:
            KeyboardInterrupt: Before the line.
        """
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if name not in self._is_traced:
            self._is_traced[name] = Path(name).is_relative_to(PACKAGE)
        return self._step if self._is_traced[name] else None

    def _step(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self._at:
                raise KeyboardInterrupt
        return self._step


def moments(lines: Sequence[tuple[str, int]], every_line_of: tuple[str, ...], num_others: int) -> list[int]:
    """Numbers of lines at which to interrupt: each different line of some files, at its first and its last time, and others.

    Args:
        lines: All that were run.
        every_line_of: How the paths of those files end.
        num_others: How many of the other files' lines, evenly spread.
    """
    indices: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for index, line in enumerate(lines):
        indices[line].append(index)
    chosen = {number for (path, _), numbers in indices.items() if path.endswith(every_line_of) for number in (numbers[0], numbers[-1])}
    others = [numbers[len(numbers) // 2] for (path, _), numbers in indices.items() if not path.endswith(every_line_of)]
    return sorted(chosen.union(others[:: max(1, len(others) // num_others)]))


def state_of(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """All that a monitor may have changed: hooks, attributes, modes and random states."""
    parts = [(index, name, part) for index, module in enumerate(modules) for name, part in module.named_modules()]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return {
        "hooks": {(index, name, kind): len(getattr(part, kind)) for index, name, part in parts for kind in KIND_OF_HOOKS},
        "hooks of parameters": [
            len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ()) for parameter in parameters
        ],
        "hooks of optimizers": [
            len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers
        ],
        "attributes": {(index, name): sorted(vars(part)) for index, name, part in parts},
        "flags": [parameter.requires_grad for parameter in parameters],
        "modes": _get_current_function_mode_stack(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "stance of the compiler": getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", None),  # since torch 2.6
        "random state": torch.get_rng_state().numpy().tobytes(),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was."""
    return {name: after[name] for name in before if after[name] != before[name]}


def num_hooks(state: dict[str, Any]) -> int:
    """How many hooks modules have."""
    return sum(state["hooks"].values())


class Loop:
    """A loop with every probe on, whose step is ended in one of several ways; then the monitor is closed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = make("transformer")
        self.reference = copy.deepcopy(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        [(self.x, self.y)] = batches(4)
        rules = [*RULES, *attention_rules(), *coordinate_check_rules()]
        self.monitor = ModuleMonitor(rules=rules, gradient_flow=GradientFlow(blocks=BLOCKS), capture=CAPTURE)
        self.before = self.state()
        self.keys: set[str] = set()
        """Of the record of the step that ended last."""

    def state(self) -> dict[str, Any]:
        return state_of([self.net, self.reference], [self.optimizer])

    def step(self, end: Callable[[Callable[[], object]], None]) -> None:
        """Run a step, end it in some way, and close the monitor; checks that nothing is left."""
        self.monitor.set_module(self.net)
        self.monitor.set_reference_module(self.reference, follows=True)
        self.monitor.begin_step(0)
        assert num_hooks(self.state()) > 50
        F.cross_entropy(self.net(self.x), self.y).backward()
        self.monitor.monitor_gradients()
        self.monitor.monitor_parameters()
        self.optimizer.step()
        self.before["random state"] = self.state()["random state"]
        try:
            end(self._end)
        finally:
            self.monitor.close()
            self.optimizer.zero_grad()
            assert changes(self.before, self.state()) == {}

    def _end(self) -> None:
        self.monitor.after_micro_batch()
        record = self.monitor.end_step()
        assert record is not None
        assert record.values["monitor/errors"] == 0
        self.keys = {*record.values, *record.histograms}


@EVERY_FIFTH
def test_an_interrupt_at_any_line_of_the_end_of_a_step_leaves_nothing(stride: int) -> None:
    """In a plain loop with every probe on; the step after all interrupts records the same as the first step."""
    loop, whole = Loop(), Interrupted()
    loop.step(lambda end: end())
    loop.step(whole.run)
    keys = loop.keys
    points = moments(whole.lines, EVERY_LINE_OF_MONITOR, num_others=30)
    assert len(points) > 120
    for point in points[date.today().toordinal() % stride :: stride]:
        with pytest.raises(KeyboardInterrupt):
            loop.step(Interrupted(point).run)
    loop.step(lambda end: end())
    assert loop.keys == keys


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_interrupt_at_each_removal_of_a_handle_leaves_nothing(is_removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the hook is removed, and after it."""
    loop = Loop()
    original = RemovableHandle.remove
    calls: list[RemovableHandle] = []
    interrupted_calls: set[int] = set()

    def remove(handle: RemovableHandle) -> None:
        calls.append(handle)
        if is_removed:
            original(handle)
        if len(calls) in interrupted_calls:
            interrupted_calls.clear()
            raise KeyboardInterrupt
        original(handle)

    monkeypatch.setattr(RemovableHandle, "remove", remove)
    loop.step(lambda end: end())
    num_calls = len(calls)
    assert num_calls > 30
    for call in range(1, num_calls + 1, 3):
        calls.clear()
        interrupted_calls.add(call)
        with pytest.raises(KeyboardInterrupt):
            loop.step(lambda end: end())


def use_a_store(folder: Path, name: str) -> None:
    """Go on in both files of a run, which has rows and tensors to supersede and gets a late key, and read them."""
    files = RunFiles(folder / name, configuration={}, resumed=folder / name, resume_from=1, logger=logging.getLogger("test"))
    for step in (1, 2):
        values = {"activation/fc/rms": 1.0, f"activation/{step}/rms": 2.0}
        files.write(Record.of(step, values, tensors=[RawTensor("activation", "fc", 0, torch.ones(2))]))
    files.close()
    reader = load_store(folder / name)
    reader.keys()
    reader.to_frame()
    reader.tensors()


# An interrupt at the end of a "with" block keeps a file of Python's from being closed, until it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@EVERY_FIFTH
def test_an_interrupt_at_any_line_of_the_store_reaches_the_user(stride: int, tmp_path: Path) -> None:
    """Nothing turns it into another exception, and the store does not report it as an error of a file."""
    steps = [Record.of(step, {"activation/fc/rms": 1.0}, tensors=[RawTensor("activation", "fc", 0, torch.ones(2))]) for step in (0, 1)]
    (tmp_path / "before").mkdir()
    files = RunFiles(tmp_path / "before" / "m.h5", configuration={}, logger=logging.getLogger("test"))
    for record in steps:
        files.write(record)
    files.close()

    def interrupted(at: int | None = None) -> Interrupted:
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "now")
        return Interrupted(at)

    for _ in range(2):  # the second run finds the names of keys in a cache, as all later ones do
        whole = interrupted()
        whole.run(lambda: use_a_store(tmp_path / "now", "m.h5"))
    indices = {line: index for index, line in enumerate(whole.lines)}
    inner = [index for (path, _line), index in indices.items() if path.endswith(FILES_OF_STORES)]
    points = inner + [index for index in indices.values() if index not in inner][::20]
    assert len(points) > 80
    for point in points[date.today().toordinal() % stride :: stride]:
        with pytest.raises(KeyboardInterrupt):
            interrupted(point).run(lambda: use_a_store(tmp_path / "now", "m.h5"))


class Attacks(Callback):
    """Interrupts a callback's end of a step, at another moment in every step, and starts it anew. It stands before the callback.

    The first two steps and the last are not interrupted. Every step is the first one after a start.

    Args:
        callback: It monitors every step.
        stride: It interrupts at each of so many moments.
    """

    def __init__(self, callback: ModuleMonitorCallback, stride: int) -> None:
        self.callback, self._stride = callback, stride
        self.points: list[int] = []
        self.num_attacks = 0
        self.keys: list[set[str]] = []
        """Of the records of steps that were not interrupted."""
        self._end = callback.on_train_batch_end
        callback.on_train_batch_end = self.attack  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.before = state_of([pl_module], trainer.optimizers)
        assert num_hooks(self.before) == 0

    def attack(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step, or begin to."""

        def end() -> None:
            self._end(trainer, pl_module, outputs, batch, batch_idx)

        reference = self.callback.monitor.reference_module
        assert reference is not None
        assert num_hooks(state_of([pl_module, reference], [])) > 50
        self.before["random state"] = state_of([], [])["random state"]
        error: BaseException | None = None
        if len(self.keys) < 2 or self.num_attacks == len(self.points):
            whole = Interrupted()
            whole.run(end)
            assert self.callback.last_record is not None
            self.keys.append({*self.callback.last_record.values})
            self.points = moments(whole.lines, EVERY_LINE_OF_CALLBACK, num_others=15)
            assert len(self.points) > 50
            self.points = self.points[date.today().toordinal() % self._stride :: self._stride]
            trainer.should_stop = len(self.keys) == 3
        else:
            with pytest.raises(KeyboardInterrupt) as interrupt:
                Interrupted(self.points[self.num_attacks]).run(end)
            error = interrupt.value
            self.num_attacks += 1
        self.callback.on_exception(trainer, pl_module, error or KeyboardInterrupt())
        assert changes(self.before, state_of([pl_module], trainer.optimizers)) == {}
        assert num_hooks(state_of([reference], [])) == 0
        # To go on in a file takes longer than the step, and longer with every start.
        for path in Path(trainer.default_root_dir).glob("monitor*"):
            path.unlink()
        self.callback.setup(trainer, pl_module, "fit")
        self.callback.on_fit_start(trainer, pl_module)


@EVERY_FIFTH
def test_an_interrupt_at_the_end_of_a_step_of_the_callback_leaves_nothing(stride: int, tmp_path: Path) -> None:
    """Lightning handles it by ``on_exception``; every option of the callback is on."""
    callback = ModuleMonitorCallback(
        1,
        rules=RULES,
        reference="init",
        rcc=True,
        attention=True,
        gradient_flow=GradientFlow(blocks=f"model.{BLOCKS}"),
        capture=CAPTURE,
        health=Health(nonfinite="always", watch="all"),
        alerts=[Alert(keys=".*/norm", below=-1.0)],
        on_error="raise",
    )
    attacks = Attacks(callback, stride)
    seed()
    run = trainer(tmp_path, [attacks, callback], max_epochs=-1, limit_val_batches=0)
    run.fit(Classifier("transformer"), loader(), loader(8))
    assert attacks.num_attacks > 50 // stride
    assert attacks.keys[1] == attacks.keys[2]
