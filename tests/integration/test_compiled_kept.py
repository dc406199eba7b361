"""Models under torch.compile with ``compiled: keep``: as many compilations and runs as without the callback, and the same training."""

from __future__ import annotations

import functools
import logging
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.compiling import (
    OF_PARAMETERS,
    WAYS,
    WITHOUT_OUTSIDE,
    Attention,
    Block,
    CountingBackend,
    Net,
    Trained,
    compiled,
    everything,
    plain_state,
)
from helpers.lightning_package import Callback
from helpers.selection import spread
from helpers.tiny import KeepRecords
from helpers.training import KeepLosses, loader, seed, trainer
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitorCallback, Record, Rule
from lightning_module_monitor.errors import ConfigError, NonfiniteError

# Importing torch's compiler calls what torch 2.13 has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    # Its tracer reads the gradient of the input of a compiled block.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 compiles once more where hooks come and go"),
]

RULES = [Rule(kinds=[*OF_PARAMETERS, "activation", "activation_gradient"], statistics=["mean", "norm"])]
OUTSIDE = [how for how in WAYS if how.startswith("blocks")]
"""The ways in which the outputs of blocks are outside."""
WHERE = {
    "whole": "_root_|model.*",
    "whole, in place": "model.*",
    **dict.fromkeys(("part", "in place"), r"model\..*"),
    **dict.fromkeys(
        ("a function that a module holds", "a method that a module holds", "a function around the model"), r"model\.blocks\.\d"
    ),
}
"""What is inside compiled code beside the modules within blocks, which always are."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run(NamedTuple):
    counts: list[tuple[int, int]]
    """Compilations and runs after the first fit, the second one, and the resumed one."""
    losses: list[Tensor]
    random_states: list[Any]
    weights: dict[str, Tensor]
    records: list[Record]
    callback: ModuleMonitorCallback | None


def run(how: str, folder: Path, options: dict[str, Any] | None, *, fullgraph: bool = False, **of_trainer: Any) -> Run:
    """Two fits of six steps with loops of validation, and a third one from the first one's checkpoint; ``options`` are the callback's."""
    torch._dynamo.reset()
    backend, counts, losses = CountingBackend(), [], KeepLosses()
    seed()
    module, model = compiled(how, backend, fullgraph=fullgraph)
    callback = None if options is None else ModuleMonitorCallback(**({"every_n_steps": 2, "on_error": "raise", "store": False} | options))
    records = None if callback is None else KeepRecords(callback)
    callbacks: list[Callback] = [losses] if callback is None or records is None else [callback, records, losses]
    limits: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 1} | of_trainer
    for number, resumed in enumerate((None, None, folder / "0.ckpt")):
        fit = trainer(folder, callbacks, **(limits | ({"max_epochs": 3} if resumed else {})))
        fit.fit(model, loader(), loader(8), ckpt_path=resumed, weights_only=False)
        fit.save_checkpoint(folder / f"{number}.ckpt")
        counts.append(backend.counts)
    return Run(counts, losses.losses, losses.random_states, plain_state(module), [] if records is None else records.records, callback)


ACCUMULATED: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_train_batches": 6}


@functools.cache
def plain_run(how: str, *, fullgraph: bool, is_accumulated: bool) -> Run:
    """The same without the callback."""
    with tempfile.TemporaryDirectory() as folder:
        return run(how, Path(folder), None, fullgraph=fullgraph, **ACCUMULATED if is_accumulated else {})


@pytest.mark.parametrize(("how", "which", "fullgraph"), spread(WAYS, ["default rules", "parameters only", "everything"], [False, True]))
def test_as_many_compilations_and_runs_as_without_the_callback(how: str, which: str, fullgraph: bool, tmp_path: Path) -> None:
    """In every way: over monitored and other steps, loops of validation, a second fit and a resumed one; and training is the same."""
    options: dict[str, dict[str, Any]] = {
        "default rules": {},
        "parameters only": {"rules": [Rule(kinds=OF_PARAMETERS, statistics="norm")]},
        "everything": everything(how),
    }
    of_trainer = ACCUMULATED if which == "everything" else {}
    plain = plain_run(how, fullgraph=fullgraph, is_accumulated=which == "everything")
    monitored = run(how, tmp_path, options[which], fullgraph=fullgraph, **of_trainer)
    assert plain.counts[0][0] >= 1
    assert monitored.counts == plain.counts
    assert all(torch.equal(first, other) for first, other in zip(plain.losses, monitored.losses, strict=True))
    assert monitored.random_states == plain.random_states
    assert all(torch.equal(monitored.weights[name], value) for name, value in plain.weights.items())
    recorded = [record.step for record in monitored.records if "gradient/model.head.weight/norm" in record.values]
    assert recorded[:3] == [0, 2, 4]


# Compiled code beside what is not


@torch.compile(backend=CountingBackend())
def scaled(x: Tensor) -> Tensor:
    """A function that nothing in a model holds."""
    return x.sin() * 2


class Attending(Attention):
    """Attention, and then another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(super().forward(x))
        return output


class CallsScaled(Attention):
    """Attention, and then a compiled function."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled(super().forward(x))


def in_place(module: nn.Module, backend: CountingBackend | str) -> nn.Module:
    """The module, compiled in place."""
    module.compile(backend=backend)
    return module


class Calls(nn.Module):
    """Calls a block, or a compiled function that it holds."""

    def __init__(self, block: nn.Module, function: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.block, self.function = block, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.block(x))


def sharing(backend: CountingBackend | str) -> nn.Module:
    """A compiled block that a compiled module calls, and one that is not compiled."""
    block = in_place(Block(), backend)
    return type("Layers", (nn.Sequential,), {})(in_place(Calls(block), backend), Calls(block))


BESIDE: dict[str, Callable[[CountingBackend | str], nn.Module | None]] = {
    "Sequential": lambda backend: in_place(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)), backend),
    "LayerNorm": lambda backend: in_place(nn.LayerNorm(8), backend),
    "a layer with its own norm compiled": lambda backend: in_place(nn.TransformerEncoderLayer(8, 2, 8), backend),
    "a block within": lambda backend: in_place(nn.Sequential(Block(), nn.Linear(8, 8)), backend),
    "a block within a subclass": lambda backend: in_place(type("Layers", (nn.Sequential,), {})(Block(), nn.Linear(8, 8)), backend),
    "a block that is shared": sharing,
    "a function within": lambda backend: Calls(nn.Linear(8, 8), torch.compile(torch.sin, backend=backend)),
    "a function elsewhere": lambda _backend: None,
}


def fit_beside(how: str, folder: Path, options: dict[str, Any] | None, *, inductor: bool = False, **of_trainer: Any) -> tuple[Any, ...]:
    """Compilations and runs, the frames that torch has compiled, losses and weights, of six steps; and the callback."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend, losses = CountingBackend(), KeepLosses()
    seed()
    model = Net()
    inner = BESIDE[how]("inductor" if inductor else backend)
    model.attention = CallsScaled() if inner is None else Attending(inner)
    module = Trained(model)
    callback = None if options is None else ModuleMonitorCallback(2, store=False, on_error="raise", **options)
    trainer(folder, [*([callback] if callback else []), losses], max_steps=6, **of_trainer).fit(module, loader(), loader(8))
    frames = dict(torch._dynamo.utils.counters["frames"])
    return (
        backend.counts,
        frames,
        [loss.tolist() for loss in losses.losses],
        {n: v.tolist() for n, v in plain_state(module).items()},
        callback,
    )


@functools.cache
def plain_fit_beside(how: str) -> tuple[Any, ...]:
    """The same without the callback."""
    with tempfile.TemporaryDirectory() as folder:
        return fit_beside(how, Path(folder), None)


IN_ONE_MODULE = [Rule(kinds="attention_relative_entropy", sites=r"model\.attention", statistics="mean")]


@pytest.mark.parametrize(
    "options", [{"attention": True}, {"health": {"watch": "all"}}, {"rules": IN_ONE_MODULE}], ids=["attention", "watch", "in one module"]
)
@pytest.mark.parametrize("how", BESIDE)
def test_attention_beside_compiled_code_compiles_nothing_more(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In the module that calls attention: of torch's own compiled in place, which torch leaves out, and a function that nothing holds."""
    plain = plain_fit_beside(how)
    if how == "a function elsewhere" and "health" not in options:
        with pytest.raises(
            ConfigError, match=r"attention.*compiled: keep observes nothing inside compiled code \(model\.attention\.scaled\(\)\)"
        ):
            fit_beside(how, tmp_path, {"rules": [Rule(kinds="attention_entropy", sites="model.attention", statistics="mean")]})
        return
    *monitored, callback = fit_beside(how, tmp_path, options)
    assert monitored == [*plain[:-1]]
    prefixes = ("attention_relative_entropy/model.attention.head", "attention_max_logit/model.attention.head")
    keys = [key for key in callback.last_record.values if key.startswith(prefixes)]
    assert bool(keys) == (how != "a function elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_bit_by_bit_with_inductor_where_torch_leaves_out_its_own_modules(precision: str, tmp_path: Path) -> None:
    """With dropout, whose masks compiled code draws otherwise."""
    plain, monitored = (
        fit_beside("Sequential", tmp_path, options, inductor=True, precision=precision) for options in (None, {"attention": True})
    )
    assert monitored[:-1] == plain[:-1]


class SetsStance(Trained):
    """Its ``training_step`` sets a stance of the compiler; from the third step on it makes a NaN, if it is to."""

    stance, makes_nan = "default", False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.compiler.set_stance(self.stance if self.global_step else "default"):
            loss = super().training_step(batch, batch_idx)
        return loss.log() * (float("nan") if self.makes_nan and self.global_step >= 2 else 1.0)


@pytest.mark.parametrize("options", [{"reference": "init"}, {"health": {"nonfinite": "always"}}], ids=["reference", "nonfinite"])
@pytest.mark.parametrize(
    ("how", "stance"),
    spread(
        [how for how in WAYS if how not in ("whole", "whole, in place", "a function around the model")], ["default", "fail_on_recompile"]
    ),
)
def test_no_copy_runs_compiled_under_a_stance_of_the_user(how: str, stance: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A reference, and the copy that searches for a non-finite value, run uncompiled, and none fails the run."""
    counts = []
    for arguments in (None, options):
        torch._dynamo.reset()
        seed()
        backend, module = CountingBackend(), SetsStance()
        module.stance, module.makes_nan = stance, "health" in options
        module, trained = compiled(how, backend, module)
        rules = [Rule(kinds=["parameter_difference", "activation_difference"], statistics="ratio")] if "reference" in options else [RMS]
        rules = rules if how not in WITHOUT_OUTSIDE else [Rule(kinds="parameter", statistics="norm")]
        callbacks = [] if arguments is None else [ModuleMonitorCallback(2, store=False, on_error="raise", rules=rules, **arguments)]
        trainer(tmp_path, callbacks, max_steps=6, limit_val_batches=0).fit(trained, loader(), loader(8))
        counts.append(backend.counts)
    assert counts[1] == counts[0]


class StepsCompiled(Trained):
    """torch's recipe: a function that calls ``step`` of the optimizer is compiled."""

    def __init__(self, backend: CountingBackend) -> None:
        super().__init__()
        self.automatic_optimization, self.backend = False, [backend]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        wrapped = self.optimizers()
        wrapped.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.stepping()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.parameters(), lr=torch.tensor(0.01))
        self.stepping = torch.compile(lambda: optimizer.step(), backend=self.backend[0])  # noqa: PLW0108  # as in the recipe
        return optimizer


OF_OPTIMIZERS = [
    Rule(kinds="optimizer_state", statistics=["norm", "cosine_to_gradient"]),
    Rule(kinds="update", statistics=["cosine_to_gradient", "cosine_to_previous"]),
]


@pytest.mark.parametrize(
    "options",
    [{}, {"rules": [Rule(kinds="gradient", statistics="norm")], "health": False}, {"rules": OF_OPTIMIZERS, "health": False}],
    ids=["", "gradients", "states"],
)
def test_nothing_of_ours_is_compiled_with_an_optimizer(options: dict[str, Any], tmp_path: Path) -> None:
    """A compiled function that steps: as many compilations and runs, the same training, and no function of the package is compiled."""
    runs = []
    for arguments in (None, options):
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        seed()
        backend = CountingBackend()
        module = StepsCompiled(backend)
        callbacks = [] if arguments is None else [ModuleMonitorCallback(2, store=False, on_error="raise", **arguments)]
        trainer(tmp_path, callbacks, max_steps=6, limit_val_batches=0).fit(module, loader(), loader(8))
        runs.append((backend.counts, {name: value.tolist() for name, value in plain_state(module).items()}))
    assert runs[0] == runs[1]
    names = [metric.co_filename for metric in torch._dynamo.utils.get_compilation_metrics()]
    assert names
    assert not [name for name in names if name and "lightning_module_monitor" in name]


# What is observed


RMS = {"kinds": "activation", "statistics": "rms"}
INSIDE = r"compiled: keep observes nothing inside compiled code \(model\.blocks\.0, model\.blocks\.1\), and nothing else matches"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": [RMS | {"sites": ".*fc"}]}, rf"rules\[0\]\.kinds activation: {INSIDE} \(model\.blocks\.0\.fc"),
        ({"rules": [RMS | {"types": ["Dropout"]}]}, rf"rules\[0\]\.kinds activation: {INSIDE}"),
        ({"capture": {"sites": "model.blocks.1.norm", "steps": 0}}, f"capture.kinds .*: {INSIDE}"),
        ({"gradient_flow": {"blocks": ["model.blocks.0.fc", "model.blocks.1.fc"]}}, rf"gradient_flow\.blocks: {INSIDE}"),
        ({"alerts": [{"keys": "activation/.*fc/rms", "above": 1.0}], "rules": [RMS]}, f"alerts.*{INSIDE}"),
    ],
)
def test_what_is_inside_alone_is_refused_by_a_line_that_names_the_option(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Rules, capture, gradient flow and alerts; a wrong name is refused as ever."""
    _module, model = compiled("blocks", CountingBackend())
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, [ModuleMonitorCallback(**options)], fast_dev_run=1).fit(model, loader(), loader(8))
    wrong = ModuleMonitorCallback(rules=[RMS | {"sites": "model.blocks.0.fcc"}])
    with pytest.raises(ConfigError, match=r"matches none of .* module names.*model\.blocks\.0\.fc"):
        trainer(tmp_path, [wrong], fast_dev_run=1).fit(model, loader(), loader(8))


@pytest.mark.parametrize("option", ["attention", "rcc"])
@pytest.mark.parametrize("how", ["whole", "part", "in place"])
def test_options_that_need_insides_are_refused_where_nothing_is_outside(how: str, option: str, tmp_path: Path) -> None:
    """By name, before the first batch."""
    _module, model = compiled(how, CountingBackend())
    with pytest.raises(ConfigError, match=rf"{option}.*compiled: keep observes nothing inside compiled code"):
        trainer(tmp_path, [ModuleMonitorCallback(**{option: True})], fast_dev_run=1).fit(model, loader(), loader(8))


def test_attention_inside_of_compiled_blocks_is_refused(tmp_path: Path) -> None:
    """Also where modules around them are not compiled; of those one that calls attention itself is observed."""
    module = Trained(nn.Sequential(nn.Linear(6, 8), torch.compile(Attention(), backend="eager"), nn.Linear(8, 3)))
    with pytest.raises(ConfigError, match=r"attention_entropy.*compiled: keep.*\(model\.1\)"):
        trainer(tmp_path, [ModuleMonitorCallback(attention=True)], fast_dev_run=1).fit(module, loader(), loader(8))
    attention = Attention()
    attention.qkv = torch.compile(attention.qkv, backend="eager")  # type: ignore[assignment]  # a module, too
    callback = ModuleMonitorCallback(1, rules=[], attention=True, store=False)
    trainer(tmp_path, [callback], max_steps=1).fit(Trained(nn.Sequential(nn.Linear(6, 8), attention, nn.Linear(8, 3))), loader(), loader(8))
    assert callback.last_record is not None
    assert "attention_entropy/model.1.head_0/mean" in callback.last_record.values


@pytest.mark.parametrize("how", WAYS)
def test_one_line_says_what_is_compiled_and_how_many_modules_of_the_rules_that_leaves_out(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first batch, or, of a function that nothing in the model holds, after the first step; once for two fits."""
    _module, model = compiled(how, CountingBackend())
    callback = ModuleMonitorCallback(1, store=False)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            trainer(tmp_path, [callback], max_steps=3).fit(model, loader(), loader(8))
    lines = [record.getMessage() for record in caplog.records if "compiled: uncompiled" in record.getMessage()]
    names = {
        "whole": "_root_",
        "whole, in place": "_root_",
        "part": "model",
        "in place": "model",
        "a function that a module holds": r"model\.encode",
        "a method that a module holds": r"model\.encode",
    }
    left_out = {"whole": "9 of the 9", "whole, in place": "9 of the 10", "part": "9 of the 10", "in place": "9 of the 10"}
    of_blocks = "6 of the 9" if how.startswith("a ") else "6 of the 11"
    of_names = names.get(how, r"model\.blocks\.0, model\.blocks\.1")
    expected = rf"Compiled: {of_names}\. Modules inside are not observed: {left_out.get(how, of_blocks)} that the rules match\. .*"
    if how == "a function around the model":
        expected = r"model\.blocks\.0\.norm, model\.blocks\.0\.fc, .* did not run in step 0, or inside a compiled function.*"
    assert len(lines) == 1
    assert re.match(expected, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("value", "how"),
    spread(["uncompiled", "keep"], WAYS),
)
def test_values_are_those_of_the_model_that_is_not_compiled(value: str, how: str, tmp_path: Path) -> None:
    """With a backend that rounds nothing: ``uncompiled`` records everything inside, ``keep`` what is outside, the outputs of blocks too."""
    flow = {"blocks": "model.blocks"} if value == "uncompiled" or how in OUTSIDE else None
    runs = []
    for compiled_how in ("none", how):
        torch._dynamo.reset()
        seed()
        options: dict[str, Any] = {"rules": RULES, "gradient_flow": flow if compiled_how == how else {"blocks": "model.blocks"}}
        callback = ModuleMonitorCallback(2, compiled=value, store=False, on_error="raise", **options)
        records, module = KeepRecords(callback), Trained()
        model = module if compiled_how == "none" else compiled(how, CountingBackend(), module)[1]
        trainer(tmp_path, [callback, records], max_steps=6).fit(model, loader(), loader(8))
        runs.append([(record.step, dict(record.values.items())) for record in records.records])
    for (step, plain), (other_step, kept) in zip(*runs, strict=True):
        assert step == other_step
        assert all(plain[key] == value for key, value in kept.items())
        # Of the context what the calls of modules show.
        missing = {key for key in plain if key not in kept} - {
            f"context/{name}" for name in ("output_variation", "constant_from", "same_units")
        }
        inside = r"(activation|activation_gradient)/(model\.blocks\.\d\..*|{})/.*".format(WHERE.get(how, "none"))
        assert (
            not missing if value == "uncompiled" else all(re.match(inside, key) or (not flow and "gradient_flow" in key) for key in missing)
        )
        assert bool(missing) == (value == "keep")


def test_classes_are_those_of_what_is_compiled(tmp_path: Path) -> None:
    """In ``types``, and in the table of modules: not those of torch's wrapper."""
    _module, model = compiled("blocks", CountingBackend())
    callback = ModuleMonitorCallback(1, rules=[RMS | {"types": ["Block"]}], store=False)
    trainer(tmp_path, [callback], max_steps=1).fit(model, loader(), loader(8))
    record = callback.last_record
    assert record is not None
    assert [key for key in record.values if key.startswith("activation")] == [
        "activation/model.blocks.0/rms",
        "activation/model.blocks.1/rms",
    ]
    assert {module.type for module in record.modules if module.name == "model.blocks.0"} == {"Block"}


def test_a_reference_runs_uncompiled_and_the_log_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the backend does not round at all, the differences of the first step are zero."""
    backend = CountingBackend()
    _module, model = compiled("blocks", backend, Trained(Net(dropout=0.0)))
    rules = [Rule(kinds="activation_difference", statistics="ratio")]
    callback = ModuleMonitorCallback(1, rules=rules, reference="init", store=False, rcc=True, on_error="raise")
    records = KeepRecords(callback)
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [callback, records], max_steps=2, limit_val_batches=0).fit(model, loader(), loader(8))
    assert sum("The reference runs uncompiled" in record.getMessage() for record in caplog.records) == 1
    first = records.records[0].values
    assert first["activation_difference/model.blocks.1/ratio"] == 0.0
    assert first["rcc_effective_update/model.head/rms"] == 0.0
    assert not any(key.startswith("rcc_") and "blocks" in key for key in first)
    assert records.records[1].values["activation_difference/model.blocks.1/ratio"] > 0.0
    assert backend.counts == (1, 4)  # two blocks of one code, in two steps


def test_a_check_that_needs_insides_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the same line; one with modules outside of compiled code does not."""
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), backend="eager"), nn.Linear(8, 3), nn.Sigmoid())
    callback = ModuleMonitorCallback(1, health={"watch": ["dead_units", "saturation"]}, store=False)
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [callback], max_steps=1).fit(Trained(model), loader(), loader(8))
    [line] = [record.getMessage() for record in caplog.records if "health.watch" in record.getMessage()]
    assert line.startswith("Compiled: model.0. Modules inside are not observed: 2 of the 5 that the rules match.")
    assert "health.watch has no dead_fraction to judge. compiled: uncompiled records them" in line


def test_no_line_where_nothing_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A compiled layer is observed as a whole; and nn.MultiheadAttention never calls its ``out_proj``."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.compile(nn.LayerNorm(6), backend=CountingBackend())
            self.attention, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            prediction: Tensor = self.head(self.attention(x, x, x)[0])
            return prediction

    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [ModuleMonitorCallback(1, store=False)], max_steps=1).fit(Trained(Attends()), loader(), loader(8))
    assert not [record.getMessage() for record in caplog.records if "compiled: uncompiled" in record.getMessage()]


# The search for non-finite values


@pytest.mark.parametrize("nonfinite", ["warn", "always", "stop"])
@pytest.mark.parametrize("how", ["whole", "part", "blocks", "blocks, in place"])
def test_the_module_inside_that_made_a_nan_is_named(how: str, nonfinite: str, tmp_path: Path) -> None:
    """A copy that is not compiled runs the step again; what is compiled is not compiled again."""
    backend = CountingBackend()
    module = Trained(Net(dropout=0.0))
    with torch.no_grad():
        module.model.blocks[1].fc.weight.fill_(1e30)
        module.model.blocks[1].norm.weight.fill_(1e30)
    _module, model = compiled(how, backend, module)
    callback = ModuleMonitorCallback(50, health={"nonfinite": nonfinite}, store=False)
    fit = trainer(tmp_path, [callback], max_steps=2, limit_val_batches=0)
    if nonfinite == "stop":
        with pytest.raises(NonfiniteError, match=r"model\.blocks\.1\.fc"):
            fit.fit(model, loader(), loader(8))
    else:
        fit.fit(model, loader(), loader(8))
    assert [(finding.step, finding.site) for finding in callback.findings if finding.name == "nonfinite"] == [(0, "model.blocks.1.fc")]
    assert backend.num_compilations <= 2


# The compiler's own rounding


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "part", "blocks", "blocks, in place"])
def test_bit_by_bit_with_inductor_in_bf16_mixed(how: str, tmp_path: Path) -> None:
    """LayerNorm, GELU and a residual, which it rounds otherwise: ``keep`` trains as without the callback, ``uncompiled`` does not."""
    kinds = ["gradient", "parameter", *([] if how in WITHOUT_OUTSIDE else ["activation", "activation_gradient"])]
    some = {"rules": [Rule(kinds=kinds, statistics="norm")], "store": False}
    runs = []
    for options in (None, {"compiled": "uncompiled", **some}, {"compiled": "keep", **some}, everything(how) | {"gradient_noise": False}):
        torch._dynamo.reset()
        seed()
        module, model = compiled(how, "inductor", Trained(Net(width=64, dropout=0.0)))
        losses = KeepLosses()
        callbacks: list[Callback] = [losses]
        if options is not None:
            callbacks.insert(0, ModuleMonitorCallback(**({"every_n_steps": 2, "on_error": "raise"} | options)))
        fit = trainer(tmp_path, callbacks, max_steps=6, precision="bf16-mixed", limit_val_batches=1)
        fit.fit(model, loader(), loader(8))
        runs.append((losses.losses, plain_state(module)))
    (losses_of_plain, weights_of_plain), (_losses, weights_uncompiled), *all_kept = runs
    for kept, weights_kept in all_kept:
        assert all(torch.equal(first, other) for first, other in zip(losses_of_plain, kept, strict=True))
        assert all(torch.equal(weights_kept[name], value) for name, value in weights_of_plain.items())
    assert not all(torch.equal(weights_uncompiled[name], value) for name, value in weights_of_plain.items())
