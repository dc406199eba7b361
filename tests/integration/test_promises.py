"""The promises of the callback in a real Trainer: training unchanged, no waiting, nothing left behind, no memory kept."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, CSVLogger, LightningModule, Trainer
from helpers.operations import no_host_reads, operations
from helpers.selection import spread
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from lightning_module_monitor import Alert, Capture, GradientFlow, Health, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.kernels import elements, numba_kernel
from lightning_module_monitor.kinds import KINDS

STATISTICS = ["mean", "std", "kurtosis", "norm", "min", "abs_mean", "zero_fraction", "nonfinite_count", "token_norm", "hist"]
EVERYTHING = [
    Rule(kinds=[name for name, kind in KINDS.items() if not (kind.needs_reference or kind.has_option)], statistics=STATISTICS),
    Rule(kinds="update", statistics="ratio"),
    Rule(kinds=["parameter", "gradient", "gradient_before_clip", "update"], statistics=["norm", "std", "hist"], per_module=".*"),
    Rule(kinds=["activation", "gradient"], functions={"noise": lambda x: (x + torch.rand_like(x)).mean()}),
]

FLOWS = {
    "mlp": GradientFlow(blocks="model.layers"),
    "cnn": GradientFlow(blocks=["model.stem.0", "model.stem.2", "model.block", "model.head"], norm="l1"),
    "transformer": GradientFlow(blocks=["model.embedding", "model.attention", "model.mlp", "model.head"], norm="linf"),
    "gpt": GradientFlow(blocks=["model.embedding", "model.out", "model.head"]),
    "shared": GradientFlow(blocks="model.(inner|again|encoder)", norm="mean"),
    "outputs": GradientFlow(blocks="model.(tuple|list|dict|dataclass|named|nested|lstm|integer|complex|empty|head)"),
}
"""Blocks of the models of the zoo, chosen in all ways."""

CAPTURED = [name for name, kind in KINDS.items() if kind.can_be_captured]
CAPTURE = Capture(sites=".*", steps=list(range(1, 28, 4)), kinds=CAPTURED)
"""All raw tensors there are, at steps that no rule is due at, too."""

HEALTH: dict[str, Any] = {"health": Health(nonfinite="always", watch="all"), "alerts": [Alert(keys=".*/norm", below=-1.0)]}
"""Everything that is looked out for, at every step; an alert that never fires."""

DIFFERENCES = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio", "cosine"])
ALL_THERE_IS: dict[str, Any] = {"rules": [*EVERYTHING, DIFFERENCES], "attention": True, "reference": "init", "rcc": True, **HEALTH}

WAYS: dict[str, dict[str, Any]] = {
    "Trainer, one device": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "clipping": {"gradient_clip_val": 0.05},
    "accumulation, bf16-mixed, clipping": {"accumulate_grad_batches": 3, "precision": "bf16-mixed", "gradient_clip_val": 0.05},
}


@pytest.mark.parametrize(("way", "model"), spread(WAYS, ["mlp", "cnn", "transformer", "gpt", "shared"]))
def test_monitoring_does_not_change_training(model: str, way: str, tmp_path: Path) -> None:
    """Promise 1: losses, weights, buffers and random states are bit-identical over 15 steps, with all there is switched on."""
    steps = 15
    runs = []
    for monitored in (False, True):
        seed()
        module = Classifier(model)
        keep = KeepLosses()
        more: dict[str, Any] = {"gradient_flow": FLOWS[model], "capture": CAPTURE, "stages": ["train", "validate"], "on_error": "raise"}
        if "accumulate_grad_batches" in WAYS[way]:
            more["gradient_noise"] = {"per_module": ".*"}
        callback = ModuleMonitorCallback(every_n_steps=2, **more, **ALL_THERE_IS)
        options: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "val_check_interval": 4} | WAYS[way]
        run = trainer(tmp_path, [callback, keep] if monitored else [keep], **options)
        run.fit(module, loader(shuffle=True), loader(8))
        runs.append((keep, module.state_dict()))
        if monitored:
            assert callback.last_record is not None
            # Its classes are drawn at random.
            assert {finding.name for finding in callback.findings} <= {"not_learning"}
            assert len(callback.last_record.histograms) > 3
            assert (
                callback.last_record.values[
                    "monitor/errors" if "monitor/errors" in callback.last_record.values else "validation/monitor/errors"
                ]
                == 0
            )
    (one, weights), (other, monitored_weights) = runs
    # Of 10 batches an epoch, accumulation makes 4 steps: of 3, 3, 3 and, at the end, of 1.
    assert len(one.losses) == (39 if "accumulate_grad_batches" in WAYS[way] else steps)
    assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
    assert one.random_states == other.random_states
    assert weights.keys() == monitored_weights.keys()
    assert all(torch.equal(weights[name], monitored_weights[name]) for name in weights)


@pytest.mark.parametrize("has_kernel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_is_read_on_the_host_but_by_one_transfer(monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    """Promise 3: from begin_step to the transfer at its end there is no host read; there is one transfer, whatever the number of keys."""
    from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck

    transfers = []
    original = elements.transfer

    def count(tensor: Tensor) -> Tensor:
        transfers.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(elements, "transfer", count)
    if not has_kernel:
        monkeypatch.setattr(numba_kernel, "loops", lambda: None)
    for name in ("mlp", "cnn", "outputs", "transformer", "gpt"):
        model = Classifier(name)
        transfers.clear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        capture = Capture(sites=".*", steps=0, kinds=CAPTURED)
        reference = copy.deepcopy(model)
        with ModuleMonitor(rules=[*EVERYTHING[:2], DIFFERENCES], gradient_flow=FLOWS[name], capture=capture) as monitor:
            monitor.set_module(model)
            monitor.set_reference_module(reference)
            RefinedCoordinateCheck(monitor)
            x, y = next(iter(loader()))
            with no_host_reads():
                monitor.begin_step(0)
                for _micro_batch in range(2):
                    with monitor.running_reference():
                        reference.model(x)
                    nn.functional.cross_entropy(model.model(x), y).backward()
                    monitor.after_micro_batch()
                monitor.monitor_gradients(before_clip=True)
                monitor.monitor_gradients()
                monitor.monitor_parameters()
            optimizer.step()
            assert transfers == []
            with no_host_reads():
                monitor.monitor_updates()
            record = monitor.end_step()
        assert record is not None
        assert len(record.values) > 200
        assert record.values["gradient_flow/_summary_/max_gain"] > 0
        assert len(record.tensors) > 30
        assert len(record.histograms) > 25
        assert record.values["monitor/errors"] == 0
        assert len(transfers) == 1


@pytest.mark.parametrize(("nonfinite", "num_more"), [("ignore", 0), ("warn", 7), ("always", 7)])
def test_a_step_that_is_not_monitored_costs_no_hook_and_no_operation(nonfinite: str, num_more: int, tmp_path: Path) -> None:
    """Promise 3: hooks exist in monitored steps only; the others call exactly the operations that they call without the callback.

    To look at every step puts all small gradients together, takes their extremes and those of the loss, and nothing else: on a CPU nine
    operations, four of which read a value where it lies.
    """

    class CountSteps(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.hooks = [*getattr(self, "hooks", []), sum(len(module._forward_hooks) for module in self.modules())]

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with operations() as called:
                super().optimizer_step(*args, **kwargs)
            self.num_called = [*getattr(self, "num_called", []), len(called.names)]

    seed()
    plain = CountSteps("cnn")
    trainer(tmp_path, [], max_steps=6).fit(plain, loader(), loader(8))
    seed()
    module = CountSteps("cnn")
    options = ALL_THERE_IS | {"health": Health(nonfinite=nonfinite, watch="all")}
    callback = ModuleMonitorCallback(every_n_steps=3, gradient_flow=FLOWS["cnn"], **options)
    trainer(tmp_path, [callback], max_steps=6).fit(module, loader(), loader(8))
    assert [num > 0 for num in module.hooks] == [True, False, False, True, False, False]
    for step in (1, 2, 4, 5):
        assert module.num_called[step] == plain.num_called[step] + num_more
    assert module.num_called[3] > plain.num_called[3]


class Ends(Callback):
    """Ends a run in the middle of a monitored step, in some way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 2:
            if self.how == "an exception":
                raise RuntimeError("on purpose")
            if self.how == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
            trainer.should_stop = True


@pytest.mark.parametrize(("health", "most"), [(None, 560), (False, 55)])
def test_a_step_that_is_not_monitored_costs_a_few_calls(health: bool | None, most: int, tmp_path: Path) -> None:
    """At the default configuration all events of the callback in a step of two micro-batches make few calls, those of C included.

    On 2026-11-25 they made 550, and without a look for NaN 52: 9 are the test's own, and 22 find out that the step is not monitored.
    """
    calls_by_batch: list[int] = []
    callback = ModuleMonitorCallback(health=health)

    def count(_frame: object, event: str, _argument: object) -> None:
        calls_by_batch[-1] += event in ("call", "c_call")

    def counted(name: str, run: Callable[..., None], *args: object) -> None:
        if name == "on_train_batch_start":
            calls_by_batch.append(0)
        sys.setprofile(count)
        try:
            run(*args)
        finally:
            sys.setprofile(None)

    events = ["on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
    for name in events:
        setattr(callback, name, functools.partial(counted, name, getattr(callback, name)))
    run = trainer(tmp_path, [callback], logger=CSVLogger(tmp_path), log_every_n_steps=1, max_steps=4, accumulate_grad_batches=2)
    run.fit(Classifier(), loader(), loader(8))
    assert callback.last_record is not None
    assert callback.last_record.step == 0
    monitored, others = calls_by_batch[:2], calls_by_batch[2:]
    assert sum(monitored) > 500
    assert len(others) == 6
    assert all(first + second <= most for first, second in zip(others[::2], others[1::2], strict=True)), others


@pytest.mark.parametrize("model", ["cnn", "gpt"])
@pytest.mark.parametrize("how", ["end of fit", "an exception", "Ctrl-C", "two fits"])
def test_nothing_is_left_behind(how: str, model: str, tmp_path: Path) -> None:
    """Promise 5: no hook, no attribute, no patched method; the model deep-copies, pickles and saves as before."""
    seed()
    module = Classifier(model)
    plain = Classifier(model)
    trainer(tmp_path, []).fit(plain, loader(), loader(8))
    more: dict[str, Any] = {"gradient_flow": FLOWS[model], "capture": CAPTURE, "stages": ["train", "validate"]}
    callback = ModuleMonitorCallback(every_n_steps=1, **more, **ALL_THERE_IS)
    run = trainer(tmp_path, [callback, Ends(how)], max_epochs=2)
    if how == "an exception":
        with pytest.raises(RuntimeError, match="on purpose"):
            run.fit(module, loader(), loader(8))
    elif how == "Ctrl-C":
        # A shell that starts this suite in the background has it ignore Ctrl-C.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(SystemExit):
                run.fit(module, loader(), loader(8))
        finally:
            signal.signal(signal.SIGINT, handler)
    else:
        run.fit(module, loader(), loader(8))
        if how == "two fits":
            trainer(tmp_path, [callback], max_epochs=1).fit(module, loader(), loader(8))
    optimizer_hooks = [len(one._optimizer_step_pre_hooks) + len(one._optimizer_step_post_hooks) for one in run.optimizers]
    assert sum(optimizer_hooks) == 0
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")
    assert [f"{name}.{kind}" for name, part in module.named_modules() for kind in kinds if getattr(part, kind)] == []
    assert not any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    assert _get_current_function_mode_stack() == []
    for (name, part), unmonitored in zip(module.named_modules(), plain.modules(), strict=True):
        assert part.__dict__.keys() == unmonitored.__dict__.keys(), name
    clone = copy.deepcopy(module)
    assert all(torch.equal(a, b) for a, b in zip(clone.state_dict().values(), module.state_dict().values(), strict=True))
    file = io.BytesIO()
    torch.save(module.model.state_dict(), file)
    assert pickle.loads(pickle.dumps(module.model)).state_dict().keys() == module.model.state_dict().keys()  # our own bytes
    assert load_store(callback.store_path).keys()


def test_the_model_is_garbage_after_fit(tmp_path: Path) -> None:
    """The callback lets go of it."""
    import weakref

    callback = ModuleMonitorCallback(every_n_steps=1)
    module = Classifier("mlp")
    run = trainer(tmp_path, [callback], max_steps=2)
    run.fit(module, loader(), loader(8))
    gone = weakref.ref(module.model)
    del module, run
    for bound in ("log", "log_dict"):  # Lightning's own bindings
        callback.__dict__.pop(bound, None)
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """A tiny model, every step monitored and stored: the process and its Python objects stay as they were after 500 steps."""

    class Measure(Callback):
        def __init__(self) -> None:
            self.objects: list[int] = []
            self.resident_bytes: list[int] = []

        def on_train_batch_end(self, trainer: Trainer, *_args: Any) -> None:
            if trainer.global_step in (500, 3000):
                gc.collect()
                self.objects.append(len(gc.get_objects()))
                self.resident_bytes.append(resident_bytes())

    measure = Measure()
    module = Classifier(nn.Linear(6, 3))
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds=["activation", "parameter", "update"], statistics=["rms", "std"])])
    run = trainer(tmp_path, [callback, measure], max_steps=3000, max_epochs=-1)
    run.fit(module, loader(400), loader(8))
    assert measure.objects[1] - measure.objects[0] < 300
    assert measure.resident_bytes[1] - measure.resident_bytes[0] < 3e6
    steps, _values = load_store(callback.store_path).series("update/model.weight/rms")
    assert list(steps) == list(range(3000))


def resident_bytes() -> int:
    """Memory that the process holds now; where the system does not tell, the most that it has held."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
