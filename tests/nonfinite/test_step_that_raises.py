"""A step that is ended by an exception: the NaN that has caused it is found, and the exception reaches the user as it was."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checks
from helpers.training import BAD_STEP, Bad, Classifier, loader, seed, trainer
from torch import Tensor, nn
from torch.distributions import Normal

from lightning_module_monitor import Health, ModuleMonitorCallback, load_store
from lightning_module_monitor.nonfinite.exceptions import speaks_of_nonfinite
from lightning_module_monitor.nonfinite.second_run import SecondRun
from lightning_module_monitor.trainer import strategy


class Masking(nn.Module):
    """Hides what is negative, by infinities that a softmax removes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, -math.inf)


class Failing(nn.Softmax):
    """Raises an exception from its fourth call on, whatever the values are."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > BAD_STEP:
            raise ValueError("not nan")
        return super().forward(x)


class Raising(Classifier):
    """Raises what it is given in the fourth step, whatever the values are."""

    def __init__(self, error: BaseException, part: nn.Module | None = None) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 6), part or Bad(), nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)
        self.error = error

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == BAD_STEP:
            raise self.error
        return loss


class Density(Raising):
    """Its loss is a density, whose arguments torch.distributions checks."""

    def __init__(self) -> None:
        super().__init__(ValueError("not reached"))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -Normal(self.model(batch[0]), 1.0, validate_args=True).log_prob(batch[0][:, :3]).mean()


class Slope(Classifier):
    """A loss with an infinite slope in the fourth step: NaN in the backward pass alone."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        y = self.model(batch[0])
        return torch.sqrt((y * 0) ** 2).sum() if self.global_step == BAD_STEP else y.mean()


def fit(module: Classifier, folder: Path, callbacks: list[Any], **options: Any) -> tuple[BaseException, list[Tensor], Tensor]:
    """The exception that ends training, the weights and buffers that it leaves, and torch's random state."""
    with pytest.raises((ValueError, RuntimeError, MemoryError)) as raised:
        trainer(folder, callbacks, limit_val_batches=0, **options).fit(module, loader(), loader(8))
    return raised.value, [*module.parameters(), *module.buffers()], torch.get_rng_state()


@pytest.mark.parametrize("option", ["warn", "always", "stop"])
@pytest.mark.parametrize("every_n_steps", [1, 50])
def test_the_module_is_found(option: str, every_n_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the callback, in its store, and in the last line of the log; nothing else differs from a run without the callback."""
    seed()
    plain = fit(Density(), tmp_path, [])
    seed()
    callback = ModuleMonitorCallback(every_n_steps, health=Health(nonfinite=option))
    with caplog.at_level(logging.INFO):
        error, tensors, random_state = fit(Density(), tmp_path, [callback])
    [found] = [one for one in callback.findings if one.name == "nonfinite"]
    assert (found.step, found.name, found.site, found.severity) == (BAD_STEP, "nonfinite", "model.1", "error")
    assert found.words.startswith(f"NaN in model.1, in the forward pass of micro-batch 0 (epoch 0, batch_idx {BAD_STEP}). Its own code,")
    assert [one.words for one in load_store(callback.store_path).findings() if one.name == "nonfinite"] == [found.words]
    assert found.words in callback.diagnose()[0].evidence
    [verdict] = [record.getMessage() for record in caplog.records if "Verdict" in record.getMessage()]
    assert verdict.startswith(f"[monitor] Verdict: sick: NaN in model.1 at step {BAD_STEP}")
    assert verdict.endswith(". ValueError ended the run.")
    assert str(error) == str(plain[0])
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(tensors, plain[1], strict=True))
    assert torch.equal(random_state, plain[2])


@pytest.mark.parametrize("in_second_run", [KeyboardInterrupt(), SystemExit(7)], ids=["Ctrl-C", "exit"])
def test_nothing_takes_the_place_of_the_exception(in_second_run: BaseException, tmp_path: Path) -> None:
    """Not even Ctrl-C while the step is run again."""
    errors = iter([ValueError("the user's nan"), in_second_run])

    class Twice(Raising):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.global_step == BAD_STEP:
                raise next(errors)
            return super().training_step(batch, batch_idx)

    error, *_ = fit(Twice(ValueError("not reached")), tmp_path, [ModuleMonitorCallback(1)])
    assert (str(error), error.__context__) == ("the user's nan", None)
    assert next(errors, None) is None


def test_in_the_backward_pass(tmp_path: Path) -> None:
    """Torch's detection of anomalies raises an exception there, and names an operation; the finding names what is around it."""
    callback = ModuleMonitorCallback(50, health=Health(watch=[]))
    module = Slope(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), torch.optim.SGD)
    error, tensors, _state = fit(module, tmp_path, [callback], detect_anomaly=True)
    assert "returned nan values" in str(error)
    [found] = callback.findings
    assert (found.step, found.site, found.cause) == (BAD_STEP, "_root_", "infinite_slope")
    assert found.words.startswith("NaN in the backward pass of the loss, micro-batch 0")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_in_an_earlier_micro_batch(tmp_path: Path) -> None:
    """Whose loss is NaN, and raises nothing: the step's first such micro-batch is run again, and not the one that raises."""

    class Late(Density):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) if batch_idx == 5 else self.model(batch[0]).mean()

    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always", watch=[]))
    fit(Late(), tmp_path, [callback], accumulate_grad_batches=8)
    [found] = callback.findings
    assert (found.step, found.site) == (0, "model.1")
    assert f"micro-batch {BAD_STEP} (epoch 0, batch_idx {BAD_STEP})" in found.words


def test_where_hooks_have_observed_the_step(tmp_path: Path) -> None:
    """Under manual optimization no step is run again, and need not be."""

    class ByHand(Density):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always", watch=[]))
    fit(ByHand(), tmp_path, [callback])
    assert [(one.step, one.site) for one in callback.findings] == [(BAD_STEP, "model.1")]


def test_on_an_accelerator_a_flag_that_no_record_has_shown_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of NaN in a step that was not monitored, whose update makes the next step raise."""
    monkeypatch.setattr(strategy, "reads_at_once", lambda _trainer: False)

    class Next(Density):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.model(batch[0]).mean() if self.global_step == BAD_STEP else super().training_step(batch, batch_idx)

    callback = ModuleMonitorCallback(50, health=Health(watch=[]))
    fit(Next(), tmp_path, [callback])
    assert [(one.step, one.site) for one in callback.findings] == [(BAD_STEP, "_root_")]
    assert "in a step that was not monitored" in callback.findings[0].words


@pytest.mark.parametrize("part", [nn.ReLU, Masking], ids=["finite", "with a mask"])
def test_another_exception_is_no_finding(part: type[nn.Module], tmp_path: Path) -> None:
    """A model without NaN; infinities of a mask are none, as what would remove them has not run."""
    seed()  # with weights for which no row is masked as a whole
    callback = ModuleMonitorCallback(50, health=Health(watch=[]))
    module = Classifier(nn.Sequential(nn.Linear(6, 6), part(), Failing(1), nn.Linear(6, 3)))
    error, _tensors, _state = fit(module, tmp_path, [callback])
    assert (str(error), callback.findings) == ("not nan", [])


def several_ranks(module: Raising) -> None:
    """Let the Trainer count two processes."""
    module.trainer.strategy.world_size = 2


@pytest.mark.parametrize(
    ("make_error", "prepare"),
    [
        (KeyboardInterrupt, None),
        (lambda: torch.cuda.OutOfMemoryError("full, nan"), None),
        (lambda: ValueError("nan"), several_ranks),
    ],
    ids=["Ctrl-C", "out of memory", "several ranks"],
)
def test_where_nothing_is_run_again(
    make_error: Callable[[], BaseException], prepare: Callable[[Raising], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an exception of one rank, a second run could wait for others; without memory or time, it would not end."""
    runs: list[int] = []
    monkeypatch.setattr(SecondRun, "prepare", lambda _self, micro_batch, _error: lambda: runs.append(micro_batch))

    class Prepared(Raising):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if prepare is not None and self.global_step == BAD_STEP:
                prepare(self)
            return super().training_step(batch, batch_idx)

    for error, is_prepared in ((ValueError("nan"), False), (make_error(), True)):
        runs.clear()
        module = (Prepared if is_prepared else Raising)(error)
        with pytest.raises((type(error), SystemExit)):
            trainer(tmp_path, [ModuleMonitorCallback(50)], limit_val_batches=0).fit(module, loader(), loader(8))
        assert runs == ([] if is_prepared else [0])


def test_an_error_of_the_second_run_takes_no_exception_s_place(tmp_path: Path) -> None:
    """Not even with ``on_error: raise``; every hook is gone."""

    class Uncopied(Raising):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not this one")

    module, callback = Uncopied(ValueError("the user's nan")), ModuleMonitorCallback(1, on_error="raise")
    error, _tensors, _state = fit(module, tmp_path, [callback])
    assert (str(error), callback.findings) == ("the user's nan", [])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("option", ["warn", "always"])
def test_code_behind_the_exception_writes_into_no_weight(option: str, tmp_path: Path) -> None:
    """If the second run raises nothing, it goes further than the step, and changes copies alone."""
    calls: list[int] = []

    class Once(Raising):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = Classifier.training_step(self, batch, batch_idx)
            calls.append(batch_idx)
            if batch_idx == BAD_STEP:
                if calls.count(BAD_STEP) == 1:
                    raise self.error
                with torch.no_grad():
                    self.model[0].weight.zero_()
            return loss

    module = Once(ValueError("nan, once"), nn.ReLU())
    fit(module, tmp_path, [ModuleMonitorCallback(50, health=Health(nonfinite=option))])
    assert calls.count(BAD_STEP) == 2
    assert bool((module.model[0].weight != 0).all())


SPEAKING = [
    "Function 'SqrtBackward0' returned nan values in its 0th output.",
    "NaN in the loss",
    "3 NaNs",
    "loss is inf",
    "cannot convert float infinity to integer",
    "probability tensor contains either `inf`, `nan` or element < 0",
    "Input contains NaN, infinity or a value too large for dtype('float32').",
    "the loss is non-finite: stopping",
    "nonfinite gradient",
    "The total norm is not finite",
    "Expected parameter loc of distribution Normal to satisfy the constraint Real(), but found invalid values:",
    "linalg.cholesky: The factorization could not be completed because the input is not positive-definite (the leading minor of order 1).",
    "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values.",
    "loss=nan",
    "it was (nan)",
    "loss is -inf",
    "contains NaN/Inf!",
    "array must not contain infs",
    "Input has infinite values",
    "a non finite gradient",
    "the matrix is not positive definite",
    "invalid value encountered in log",
]
SILENT = [
    "finance",
    "information",
    "tenant",
    "unknown tenant nano",
    "infinite recursion",
    "META-INF/services is missing",
    "/data/nan/train.csv not found",
    "no such file: nan.csv",
    "torch.inf.x has no attribute y",
    "connection lost",
    "cannot open https://host/?q=nan&x=1",
    "cannot open C:\\data\\nan\\x",
    "column inf=3 is missing",
    "",
]


@pytest.mark.parametrize("message", SPEAKING)
def test_messages_that_speak_of_it(message: str) -> None:
    """In whole words."""
    assert speaks_of_nonfinite(RuntimeError(message))


@pytest.mark.parametrize("message", SILENT)
def test_messages_that_speak_of_something_else(message: str) -> None:
    """Parts of other words, paths and names are no such words."""
    assert not speaks_of_nonfinite(RuntimeError(message))


@pytest.mark.parametrize(
    "error", [KeyError("nan"), IndexError("nan"), FileNotFoundError(2, "none", "nan"), ConnectionError("nan"), ImportError("nan")]
)
def test_what_is_not_found_may_have_any_name(error: Exception) -> None:
    """A key, a file, a server and a module."""
    assert not speaks_of_nonfinite(error)


@pytest.mark.parametrize("check", checks.OF_FINITE)
def test_a_check_speaks_of_it_by_its_source(check: Callable[[Tensor], None]) -> None:
    """Assertions and arithmetic errors of statements that test for non-finite values."""
    with pytest.raises((AssertionError, ArithmeticError)) as raised:
        check(torch.tensor(math.nan))
    assert speaks_of_nonfinite(raised.value)


@pytest.mark.parametrize("check", checks.OF_OTHERS)
def test_another_statement_does_not(check: Callable[[Tensor], None]) -> None:
    """Also not one in the next line, or beside a comment that names a check."""
    with pytest.raises((AssertionError, ArithmeticError, LookupError)) as raised:
        check(torch.tensor(math.nan))
    assert not speaks_of_nonfinite(raised.value)


class WithDatabase(Classifier):
    """Writes a row for each step into a database."""

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 6), Bad(), nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)
        self.rows, self.error, self.where = [], error, where
        self.database = Database(self.rows)

    def fail(self, where: str) -> None:
        if where == self.where and self.global_step == BAD_STEP:
            raise self.error

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.database.write(batch_idx)
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, *_args: Any) -> None:
        self.fail("on_train_batch_start")

    def on_before_backward(self, _loss: Tensor) -> None:
        self.fail("on_before_backward")

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        self.fail("backward")
        super().backward(loss, *args, **options)

    def on_after_backward(self) -> None:
        self.fail("on_after_backward")

    def on_train_batch_end(self, *_args: Any) -> None:
        self.fail("on_train_batch_end")


class Database:
    """A connection, which a copy of the model shares."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def write(self, row: int) -> None:
        self.rows.append(row)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("where", "message", "is_run_again"),
    [
        ("training_step", "nan", True),
        ("backward", "nan", True),
        ("training_step", "connection lost", False),
        ("backward", "connection lost", False),
        ("on_train_batch_start", "nan", False),
        ("on_before_backward", "nan", False),
        ("on_after_backward", "nan", False),
        ("on_train_batch_end", "nan", False),
    ],
)
def test_training_step_is_run_again_only_for_its_own_errors(where: str, message: str, is_run_again: bool, tmp_path: Path) -> None:
    """An error of a database, or of a hook, is no reason to write a row twice."""
    num_rows = {}
    for option in ("ignore", "warn"):
        module, callback = WithDatabase(ValueError(message), where), ModuleMonitorCallback(50, health=Health(nonfinite=option))
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, [callback], limit_val_batches=0).fit(module, loader(), loader(8))
        num_rows[option] = len(module.rows)
    assert num_rows["warn"] - num_rows["ignore"] == is_run_again


class ClipsByItself(Classifier):
    """Refuses to clip gradients that are not finite, after the search has read them."""

    def configure_gradient_clipping(self, *_arguments: Any, **_options: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("option", ["warn", "always"])
@pytest.mark.parametrize("every_n_steps", [1, 50])
def test_what_was_found_before_the_exception_is_kept(option: str, every_n_steps: int, tmp_path: Path) -> None:
    """An exception between the search and the end of the step hides no finding."""
    seed()
    module = ClipsByItself(nn.Sequential(nn.Linear(6, 6), Bad(), nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)
    callback = ModuleMonitorCallback(every_n_steps, health=Health(nonfinite=option))
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer(tmp_path, [callback], gradient_clip_val=1.0).fit(module, loader(), loader(8))
    assert [(found.name, found.site, found.step) for found in callback.findings] == [("nonfinite", "model.1", BAD_STEP)]
    assert [found.site for found in load_store(callback.store_path).findings()] == ["model.1"]
