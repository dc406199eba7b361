"""Attention observed in models, head by head, against the heads themselves in float64."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.attention import Truth, truth
from helpers.operations import operations
from helpers.plain_steps import in_step, record_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import ModuleMonitor, Record, Rule, monitor_scaled_dot_product_attention
from lightning_module_monitor.config.rules import attention_rules
from lightning_module_monitor.histogram import EDGES
from lightning_module_monitor.probes import attention as probe
from lightning_module_monitor.statistics import attention_figures as maths

needs_hooked_layers = pytest.mark.skipif(
    "_forward_hooks" not in inspect.getsource(nn.TransformerEncoderLayer),
    reason="this torch runs a whole layer of a transformer at once in eval mode, and none of the hooks within it",
)
needs_grouped_queries = pytest.mark.skipif(
    "enable_gqa" not in str(F.scaled_dot_product_attention.__doc__), reason="torch before 2.5 has no grouped queries"
)

ALL = Rule(kinds=list(Truth._fields), statistics=["mean", "min", "max", "std"])


class Calls(nn.Module):
    """Calls a function with two tensors, and keeps nothing."""

    def __init__(self, call: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random heads."""
    return (1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def record(model: nn.Module, *args: Any, rules: Any = ALL, **kwargs: Any) -> Record:
    """One forward pass of a model, monitored."""
    with in_step(model, rules=rules) as monitor:
        model(*args, **kwargs)
        result = record_of(monitor)
    assert _get_current_function_mode_stack() == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return result


def expected_values(site: str, *truths: Truth) -> dict[str, float]:
    """All statistics of all calls together, by key."""
    values = {}
    for kind in Truth._fields:
        for head in range(getattr(truths[0], kind).shape[1]):
            x = np.concatenate([getattr(figures, kind)[:, head].ravel() for figures in truths])
            x = x[~np.isnan(x)]
            result = {"mean": x.mean(), "min": x.min(), "max": x.max(), "std": x.std(ddof=1)} if x.size else {}
            values |= {f"{kind}/{site}.head_{head}/{name}": float(result.get(name, np.nan)) for name in ("mean", "min", "max", "std")}
    return values


def assert_values(result: Record, expected: dict[str, float], errors: float = 0.0) -> None:
    """These keys, no others, and these values."""
    values = {key: value for key, value in result.values.items() if key.startswith("attention")}
    assert values.keys() == expected.keys()
    assert values == pytest.approx(expected, rel=5e-6, abs=2e-6, nan_ok=True)
    assert result.values["monitor/errors"] == errors


SDPA: dict[str, tuple[tuple[Tensor, ...], dict[str, Any], dict[str, Any]]] = {
    "plain": ((heads(2, 3, 5, 4), heads(2, 3, 5, 4, seed=1)), {}, {}),
    "causal, L < S": ((heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)), {"is_causal": True}, {"is_causal": True}),
    "causal, L > S": ((heads(2, 3, 7, 4), heads(2, 3, 5, 4, seed=1)), {"is_causal": True}, {"is_causal": True}),
    "scale": ((heads(2, 3, 5, 4), heads(2, 3, 5, 4, seed=1)), {"scale": 0.2}, {"scale": 0.2}),
    "dropout": ((heads(2, 3, 5, 4), heads(2, 3, 5, 4, seed=1)), {"dropout_p": 0.5}, {}),
    "grouped queries": ((heads(2, 6, 5, 4), heads(2, 2, 7, 4, seed=1)), {"enable_gqa": True}, {}),
    "one key head for all": ((heads(2, 3, 5, 4), heads(2, 1, 7, 4, seed=1)), {}, {}),
    "one sample of keys": ((heads(2, 3, 5, 4), heads(1, 3, 7, 4, seed=1).expand(2, 3, 7, 4)), {}, {}),
    "boolean mask (B, 1, L, S)": (
        (heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)),
        {"attn_mask": heads(2, 1, 5, 7, seed=2) > 0},
        {"visible": heads(2, 1, 5, 7, seed=2) > 0},
    ),
    "boolean mask (L, S)": (
        (heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)),
        {"attn_mask": heads(5, 7, seed=2) > 0},
        {"visible": heads(5, 7, seed=2) > 0},
    ),
    "fully masked rows": (
        (heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)),
        {"attn_mask": (torch.arange(5) < 3)[:, None].expand(5, 7)},
        {"visible": (torch.arange(5) < 3)[:, None]},
    ),
    "nothing but masked rows": (
        (heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)),
        {"attn_mask": torch.zeros(5, 7, dtype=torch.bool)},
        {"visible": torch.zeros(5, 7, dtype=torch.bool)},
    ),
    "additive mask (1, H, L, S)": (
        (heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)),
        {"attn_mask": heads(1, 3, 5, 7, seed=2)},
        {"bias": heads(1, 3, 5, 7, seed=2)},
    ),
    "bfloat16": (
        (heads(2, 3, 5, 4, dtype=torch.bfloat16), heads(2, 3, 7, 4, seed=1, dtype=torch.bfloat16)),
        {"attn_mask": heads(2, 1, 1, 7, seed=2, dtype=torch.bfloat16)},
        {"bias": heads(2, 1, 1, 7, seed=2, dtype=torch.bfloat16)},
    ),
    "float16": ((heads(2, 3, 5, 4, dtype=torch.float16), heads(2, 3, 7, 4, seed=1, dtype=torch.float16)), {}, {}),
}
"""Query and key, options of torch's function, and the same for the truth."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_grouped_queries) if "grouped" in name else name for name in SDPA])
def test_scaled_dot_product_attention(name: str) -> None:
    """All masks and shapes, self and cross attention, as torch's function takes them."""
    (query, key), options, of_truth = SDPA[name]
    model = Calls(F.scaled_dot_product_attention)
    assert_values(record(model, query, key, key, **options), expected_values("_root_", truth(query, key, **of_truth)))


def test_dimensions_other_than_four() -> None:
    """The third dimension from the end is the heads; of three there is one head, those before are the batch."""
    model = Calls(F.scaled_dot_product_attention)
    query, key = heads(2, 3, 2, 5, 4), heads(2, 3, 2, 7, 4, seed=1)
    mask = heads(3, 1, 5, 7, seed=2)
    result = record(model, query, key, key, attn_mask=mask)
    assert_values(result, expected_values("_root_", truth(query.flatten(0, 1), key.flatten(0, 1), bias=torch.cat([mask, mask]))))
    of_three = record(model, query[0, 0], key[0, 0], key[0, 0], attn_mask=mask[0])
    assert_values(of_three, expected_values("_root_", truth(query[0, 0][:, None], key[0, 0][:, None], bias=mask[0][None])))
    of_two = record(model, query[0, 0, 0], key[0, 0, 0], key[0, 0, 0])
    assert_values(of_two, expected_values("_root_", truth(query[:1, 0, :1], key[:1, 0, :1])))


def test_torchs_own_causal_bias() -> None:
    """A mask that is none until it is used: from the bottom right, where there are more keys."""
    query, key = heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)
    visible = torch.ones(5, 7, dtype=torch.bool).tril(2)
    result = record(Calls(F.scaled_dot_product_attention), query, key, key, attn_mask=causal_lower_right(5, 7))
    assert_values(result, expected_values("_root_", truth(query, key, visible=visible)))


def test_a_function_that_was_imported_by_name_is_observed() -> None:
    """Nobody has to call it as ``F.scaled_dot_product_attention``; keyword arguments are as good."""
    query, key = heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)
    result = record(Calls(lambda q, k: imported_by_name(query=q, key=k, value=k)), query, key)
    assert_values(result, expected_values("_root_", truth(query, key)))


MHA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "batch first": ({"batch_first": True}, {}),
    "bias_k, bias_v": ({"add_bias_kv": True}, {}),
    "zero attention": ({"add_zero_attn": True}, {}),
    "separate projections": ({"kdim": 6, "vdim": 10}, {}),
    "separate projections, no bias": ({"kdim": 6, "vdim": 10, "bias": False}, {}),
    "boolean mask": ({}, {"attn_mask": heads(5, 7, seed=5) > 0.5}),
    "additive mask": ({}, {"attn_mask": heads(5, 7, seed=5)}),
    "mask for each head": ({}, {"attn_mask": heads(3 * 2, 5, 7, seed=5)}),
    "boolean mask for each head": ({}, {"attn_mask": heads(3 * 2, 5, 7, seed=5) > 1.0}),
    "padding": ({}, {"key_padding_mask": torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]}),
    "additive padding": ({}, {"key_padding_mask": heads(3, 7, seed=6)}),
    "all at once": (
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
        {"attn_mask": heads(5, 7, seed=5) > 0.5, "key_padding_mask": torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]},
    ),
}
"""Options of nn.MultiheadAttention, and of its call."""


def of_weights(weights: Tensor) -> dict[str, float]:
    """Mean entropy and mean weight on the first key, from weights that torch itself returns, shape (batch, heads, L, S)."""
    p = weights.detach().double().numpy()
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    values = {}
    for head in range(p.shape[1]):
        values[f"attention_entropy/_root_.head_{head}/mean"] = entropy[:, head].mean()
        values[f"attention_sink/_root_.head_{head}/mean"] = p[:, head, :, 0].mean()
    return values


@pytest.mark.parametrize("name", MHA)
@pytest.mark.parametrize("mode", ["weights", "no weights", "eval", "function", "unbatched"])
def test_multihead_attention_against_its_own_weights(name: str, mode: str) -> None:
    """Every option of the module and of its call, whichever path it takes; and of the function that it calls."""
    options, of_call = MHA[name]
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **options).train(mode != "eval")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0).add_(0.1 * torch.randn_like(parameter))
    query, key, value = heads(5, 3, 8), heads(7, 3, options.get("kdim", 8), seed=1), heads(7, 3, options.get("vdim", 8), seed=2)
    if mode == "unbatched":
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        of_call = {name: mask[:2] if name == "attn_mask" and mask.dim() == 3 else mask for name, mask in of_call.items()}
        of_call = {name: mask[0] if name == "key_padding_mask" else mask for name, mask in of_call.items()}
    elif options.get("batch_first"):
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    _output, weights = module(query, key, value, need_weights=True, average_attn_weights=False, **of_call)
    weights = weights[None] if mode == "unbatched" else weights
    rules = Rule(kinds=["attention_entropy", "attention_sink"], statistics="mean")
    if mode == "function":
        model: nn.Module = Calls(lambda *args, **kwargs: nn.MultiheadAttention.forward(module, *args, **kwargs))
        result = record(model, query, key, value, rules=rules, **of_call)
    else:
        result = record(module, query, key, value, rules=rules, need_weights=mode == "weights", **of_call)
    expected = of_weights(weights)
    assert result.values == pytest.approx({**expected, "monitor/errors": 0.0}, rel=1e-4, abs=1e-5)


def test_a_causal_hint_of_multihead_attention() -> None:
    """With the hint, and with the mask that it hints at."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2)
    x, mask = heads(5, 3, 8), nn.Transformer.generate_square_subsequent_mask(5)
    _output, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    rules = Rule(kinds=["attention_entropy", "attention_sink"], statistics="mean")
    for need_weights in (False, True):
        result = record(module, x, x, x, rules=rules, attn_mask=mask, is_causal=True, need_weights=need_weights)
        assert result.values == pytest.approx({**of_weights(weights), "monitor/errors": 0.0}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "is_training",
    [
        pytest.param(True, id="train"),
        pytest.param(False, id="eval", marks=needs_hooked_layers),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_transformer_encoder_with_padding(is_training: bool) -> None:
    """In eval mode padding is left out by nested tensors: only real tokens count."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(is_training)
    x, padding = heads(3, 5, 8), torch.arange(5) >= torch.tensor([5, 4, 2])[:, None]
    attention = model.layers[0].self_attn
    assert isinstance(attention, nn.MultiheadAttention)
    _output, weights = attention(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    there = [weights[i, :, :length] for i, length in enumerate((5, 5, 5) if is_training else (5, 4, 2))]
    p = [np.concatenate([weights[head].detach().double().numpy().ravel() for weights in there]) for head in range(2)]
    tokens = sum(weights.shape[1] for weights in there)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
        result = record(model, x, src_key_padding_mask=padding, rules=attention_rules())
        assert torch.equal(model(x, src_key_padding_mask=padding), plain)
    for head in range(2):
        expected = -sum(weight * math.log(weight) for weight in p[head] if weight > 0) / tokens
        assert result.values[f"attention_entropy/layers.0.self_attn.head_{head}/mean"] == pytest.approx(expected, rel=1e-4)
    assert {key.split("/")[1] for key in result.values if key.startswith("attention")} == {
        f"layers.{layer}.self_attn.head_{head}" for layer in range(2) for head in range(2)
    }
    assert result.values["monitor/errors"] == 0


def test_the_fast_path_of_frozen_attention_stays() -> None:
    """In eval mode torch takes a faster path with other rounding, also with nested tensors; a monitored module takes the same."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)
    model = Calls(lambda x: module(x, x, x), module)
    with operations() as called:
        result = record(model, heads(3, 5, 8), rules=attention_rules())
    assert "_native_multi_head_attention" in called.names
    assert {key.split("/")[1] for key in result.values if key.startswith("attention")} == {"parts.0.head_0", "parts.0.head_1"}


def test_a_call_belongs_to_the_innermost_recorded_module() -> None:
    """Nested modules, one called twice, one excluded, a call outside of any."""
    query, key = heads(2, 1, 5, 4), heads(2, 1, 7, 4, seed=1)
    inner = Calls(F.scaled_dot_product_attention)
    excluded = Calls(lambda q, k: F.scaled_dot_product_attention(2 * q, k, k))

    def forward(q: Tensor, k: Tensor) -> None:
        inner(q, k, k)
        F.scaled_dot_product_attention(3 * q, k, k)
        inner(4 * q, k, k)
        excluded(q, k)

    model = Calls(forward, inner, excluded)
    with in_step(model, rules=ALL, exclude=r"parts\.1") as monitor:
        F.scaled_dot_product_attention(query, key, key)
        model(query, key)
        F.scaled_dot_product_attention(query, key, key)
        result = record_of(monitor)
    of_root = expected_values("_root_", truth(3 * query, key), truth(2 * query, key))
    assert_values(result, of_root | expected_values("parts.0", truth(query, key), truth(4 * query, key)))


def test_micro_batches_count_as_their_concatenation() -> None:
    """Three samples and five, of which one has padded tokens."""
    q3, k3, q5, k5 = heads(3, 2, 5, 4), heads(3, 2, 7, 4, seed=1), heads(5, 2, 5, 4, seed=2), heads(5, 2, 7, 4, seed=3)
    visible = torch.ones(5, 1, 5, 7, dtype=torch.bool)
    visible[4, :, 2:] = False
    model = Calls(F.scaled_dot_product_attention)
    with in_step(model, rules=ALL) as monitor:
        model(q3, k3, k3)
        monitor.after_micro_batch()
        model(q5, k5, k5, attn_mask=visible)
        result = record_of(monitor)
    assert_values(result, expected_values("_root_", truth(q3, k3), truth(q5, k5, visible=visible)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_attention_counts_once(use_reentrant: bool) -> None:
    """Under activation checkpointing the forward runs again within the backward pass."""
    query, key = heads(2, 3, 5, 4).requires_grad_(), heads(2, 3, 7, 4, seed=1)
    inner = Calls(F.scaled_dot_product_attention)
    model = Calls(lambda q, k: checkpoint(inner, q, k, k, use_reentrant=use_reentrant), inner)
    rule = Rule(kinds=["attention_entropy"], functions={"num": lambda x: torch.tensor(float(x.numel()))}, aggregate="sum")
    with in_step(model, rules=[ALL, rule]) as monitor:
        model(query, key).sum().backward()
        result = record_of(monitor)
    numbers = {f"attention_entropy/parts.0.head_{head}/num": 10.0 for head in range(3)}
    assert_values(result, expected_values("parts.0", truth(query, key)) | numbers)
    assert query.grad is not None
    assert _get_current_function_mode_stack() == []


def test_an_error_in_a_forward_corrupts_nothing() -> None:
    """The exception of an inner module that the outer one catches, and one that ends the forward pass."""
    query, key = heads(2, 1, 5, 4), heads(2, 1, 7, 4, seed=1)

    def fail(*_args: Any) -> None:
        raise RuntimeError("on purpose")

    def forward(q: Tensor, k: Tensor, ends: bool) -> None:
        try:
            model.parts[0](q)
        except RuntimeError:
            F.scaled_dot_product_attention(q, k, k)
        if ends:
            raise RuntimeError("the end")

    model = Calls(forward, Calls(fail, Calls(fail)))
    with in_step(model, rules=ALL) as monitor:
        with pytest.raises(RuntimeError, match="the end"):
            model(query, key, True)
        assert _get_current_function_mode_stack() == []
        model(2 * query, key, False)
        result = record_of(monitor)
    assert_values(result, expected_values("_root_", truth(query, key), truth(2 * query, key)))


def test_ctrl_c_in_a_forward_leaves_nothing() -> None:
    """No hook of a module's comes after it; closing the monitor takes the mode off, and no other mode."""

    def forward(q: Tensor) -> None:
        raise KeyboardInterrupt

    class Other(TorchFunctionMode):
        pass

    other = Other()
    model = Calls(forward)
    with in_step(model, rules=ALL) as monitor:
        with pytest.raises(KeyboardInterrupt):
            model(heads(2, 1, 5, 4))
        with other:
            monitor.close()
            assert _get_current_function_mode_stack() == [other]
    assert _get_current_function_mode_stack() == []


def test_modes_of_the_model_stay_where_they_are() -> None:
    """A mode that the model enters around torch's own layers is left by the model, and ours before and after it."""
    functions = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            functions.append(func)
            return func(*args, **(kwargs or {}))

    query, key = heads(2, 1, 5, 4), heads(2, 1, 7, 4, seed=1)
    layer = nn.Linear(4, 4)

    def forward(q: Tensor, k: Tensor) -> None:
        with Mode():
            layer(q)
            F.scaled_dot_product_attention(q, k, k)
        assert len(_get_current_function_mode_stack()) == 1
        functions.clear()
        F.scaled_dot_product_attention(2 * q, k, k)

    model = Calls(forward, layer, Calls(lambda: None))
    assert_values(record(model, query, key), expected_values("_root_", truth(query, key), truth(2 * query, key)))
    assert functions == []


def test_no_monitor_and_other_stages() -> None:
    """Within ``no_monitor`` nothing counts; a validation loop in the middle of a step has values of its own."""
    query, key = heads(2, 1, 5, 4), heads(2, 1, 7, 4, seed=1)
    model = Calls(F.scaled_dot_product_attention)
    with in_step(model, rules=ALL) as monitor:
        model(query, key, key)
        with monitor.no_monitor():
            model(3 * query, key, key)
        assert monitor.engine.begin_stage("validation", 0)
        with torch.inference_mode():
            model(2 * query, key, key)
        validation = monitor.engine.end_stage()
        model(4 * query, key, key)
        train = record_of(monitor)
    assert validation is not None
    assert _get_current_function_mode_stack() == []
    assert_values(train, expected_values("_root_", truth(query, key), truth(4 * query, key)))
    expected = {f"validation/{key}": value for key, value in expected_values("_root_", truth(2 * query, key)).items()}
    assert validation.values == pytest.approx({**expected, "validation/monitor/errors": 0.0}, rel=1e-5, abs=1e-6)


def test_steps_that_are_not_monitored_have_neither_hook_nor_mode() -> None:
    """Between monitored steps the model is as it was."""
    modes = []
    model = Calls(lambda: modes.append(len(_get_current_function_mode_stack())))
    with ModuleMonitor(2, rules=ALL) as monitor:
        monitor.set_module(model)
        for step in range(4):
            monitor.begin_step(step)
            model()
            monitor.end_step()
    assert modes == [1, 0, 1, 0]


def test_autocast_does_not_round_the_figures() -> None:
    """Inside the model's own autocast they are computed in float32, and projections of nn.MultiheadAttention as the model does."""
    query, key = heads(2, 1, 5, 4), heads(2, 1, 7, 4, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        result = record(Calls(F.scaled_dot_product_attention), query, key, key)
    assert_values(result, expected_values("_root_", truth(query, key)))
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2), heads(5, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        result = record(module, x, x, x)
        q, k, _v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k = (tensor.unflatten(2, (2, 4)).permute(1, 2, 0, 3) for tensor in (q, k))
    assert q.dtype == torch.bfloat16
    assert_values(result, expected_values("_root_", truth(q, k)))


def test_many_query_tokens_are_sampled_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once for the module, and not by numbers that differ from call to call."""
    monkeypatch.setattr(maths, "MAX_QUERIES", 4)
    monkeypatch.setattr(probe, "MAX_QUERIES", 4)
    query, key = heads(2, 1, 6, 4), heads(2, 1, 12, 4, seed=1)  # twelve of both samples together
    with caplog.at_level(logging.INFO):
        result = record(Calls(F.scaled_dot_product_attention), query, key, key)
    assert caplog.messages == ["_root_: evenly spaced query tokens are measured, as there are over 4."]
    assert_values(result, expected_values("_root_", truth(query[:, :, 1::3], key)))


def test_functions_get_nan_for_tokens_that_do_not_count() -> None:
    """A function of the user's sees the tokens of each head, and which of them see nothing."""
    query, key, visible = heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1), (torch.arange(5) < 3)[:, None].expand(5, 7)
    rule = Rule(kinds=["attention_max_logit"], functions={"median": torch.nanmedian, "missing": lambda x: x.isnan().sum()})
    result = record(Calls(F.scaled_dot_product_attention), query, key, key, attn_mask=visible, rules=rule)
    expected = truth(query, key, visible=visible).attention_max_logit[:, 1]
    assert result.values["attention_max_logit/_root_.head_1/median"] == pytest.approx(float(np.sort(expected[~np.isnan(expected)])[2]))
    assert result.values["attention_max_logit/_root_.head_1/missing"] == 4


def test_histograms_omit_tokens_that_do_not_count() -> None:
    """Of two calls; a token that sees nothing is in no bin, nor among the NaN."""
    query, key, visible = heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1), (torch.arange(5) < 3)[:, None].expand(5, 7)
    model = Calls(F.scaled_dot_product_attention)
    with in_step(model, rules=[Rule(kinds="attention_max_logit", statistics="hist")]) as monitor:
        model(query, key, key, attn_mask=visible)
        model(query, key, key)
        result = record_of(monitor)
    for head in range(3):
        logits = [figures.attention_max_logit[:, head].ravel() for figures in (truth(query, key, visible=visible), truth(query, key))]
        values = np.concatenate(logits)
        expected, _edges = np.histogram(values[~np.isnan(values)], bins=EDGES)
        histogram = result.histograms[f"attention_max_logit/_root_.head_{head}/hist"]
        assert histogram.counts.sum() == 6 + 10
        assert np.array_equal(histogram.counts[positive := EDGES[:-1] > 0], expected[positive])
        assert not any(histogram.nonfinite.values())


@needs_grouped_queries
def test_tensors_of_heads_are_activations() -> None:
    """Under the activation rules that match the module; a key head that several query heads read is there for each."""
    query, key, value = heads(2, 4, 5, 4), heads(2, 2, 7, 4, seed=1), heads(2, 2, 7, 3, seed=2)
    model = Calls(F.scaled_dot_product_attention)
    rules = [*attention_rules(), Rule(kinds="activation", statistics=["norm", "max"])]
    result = record(model, query, key, value, enable_gqa=True, rules=rules)
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    for head in range(4):
        tensors = {"query": query[:, head], "key": key[:, head // 2], "value": value[:, head // 2], "activation": output[:, head]}
        for name, tensor in tensors.items():
            site = f"activation/_root_.head_{head}.{name}"
            assert result.values[f"{site}/norm"] == pytest.approx(float(tensor.double().norm()), rel=1e-6)
            assert result.values[f"{site}/max"] == float(tensor.max())
    assert not [key for key in record(model, query, key, value, enable_gqa=True, rules=rules[-1]).values if "head" in key]


def test_a_call_that_cannot_be_read_is_nan_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of a class that holds two tensors: the model's own result is right, the module's figures are NaN, all else is there."""
    query, key = heads(2, 3, 5, 4), heads(2, 3, 5, 4, seed=1)
    inner = Calls(F.scaled_dot_product_attention)

    def forward(q: Tensor, k: Tensor) -> Tensor:
        F.scaled_dot_product_attention(q, k, k)
        return inner(TwoTensor(q, q), TwoTensor(k, k), TwoTensor(k, k)).a

    model = Calls(forward, inner)
    rules = [Rule(kinds=["attention_entropy"], statistics="mean")]
    result = record(model, query, key, rules=rules)
    torch.testing.assert_close(model(query, key), F.scaled_dot_product_attention(query, key, key))
    expected = truth(query, key).attention_entropy.mean(axis=(0, 2))
    values = [result.values[f"attention_entropy/_root_.head_{head}/mean"] for head in range(3)]
    assert values == pytest.approx(expected.tolist(), rel=1e-5)
    assert math.isnan(result.values["attention_entropy/parts.0/mean"])
    assert result.values["monitor/errors"] == 1
    assert len([message for message in caplog.messages if "attention_entropy 'parts.0'" in message]) == 1


def test_empty_batches_change_nothing() -> None:
    """No sample, no query, no key."""
    model = Calls(F.scaled_dot_product_attention)
    query, key = heads(2, 1, 5, 4), heads(2, 1, 7, 4, seed=1)
    with in_step(model, rules=ALL) as monitor:
        model(query[:0], key[:0], key[:0])
        model(query[:, :, :0], key, key)
        model(query, key, key)
        result = record_of(monitor)
    assert_values(result, expected_values("_root_", truth(query, key)))


def test_a_copy_of_a_monitored_model_is_not_monitored() -> None:
    """It deep-copies and pickles in the middle of a step."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    with in_step(model, rules=ALL) as monitor:
        x = heads(5, 3, 8)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # our own bytes
            clone[0](x, x, x)
        result = record_of(monitor)
    assert result.values == {"monitor/errors": 0.0}


# Told by hand


class Told(nn.Module):
    """Computes attention itself, and reports it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.options = options
        self.monitor: list[ModuleMonitor] = []  # in a list, for a module does not own its monitor

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        weights = torch.softmax(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5, -1)
        output = weights @ value
        for monitor in self.monitor:
            monitor_scaled_dot_product_attention(monitor, self.inner, query, key, value, activation=output, **options)
        return output


def test_monitor_scaled_dot_product_attention_row_of_the_table() -> None:
    """FEATURES, table 1: without a rule about attention the mean entropy of each head, and its tensors under the activation metrics."""
    query, key, value = heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1), heads(2, 3, 7, 4, seed=2)
    mask = heads(2, 1, 5, 7, seed=3) > -1  # boolean, (B, 1, L, S), and S is not L: where the other tool crashes
    model = Told()
    with ModuleMonitor(lambda step: step % 2 == 0) as monitor:
        monitor.add_activation_metric("max", metric_regex="inn")
        monitor.set_module(model)
        model.monitor.append(monitor)
        for step in range(2):
            monitor.begin_step(step)
            output = model(query, key, value, attn_mask=mask, dropout_p=0.3)
            monitor.after_micro_batch()
            monitor.end_step()
        model(query, key, value)
        assert monitor.get_all_metrics().keys() == {0}
        values = monitor.get_all_metrics()[0]
    expected = {"monitor/errors": 0.0}
    for head, entropy in enumerate(np.nanmean(truth(query, key, visible=mask).attention_entropy, axis=(0, 2))):
        expected[f"attention_entropy/inner.head_{head}/mean"] = entropy
        for name, tensor in {"query": query, "key": key, "value": value, "activation": output}.items():
            expected[f"activation/inner.head_{head}.{name}/max"] = float(tensor[:, head].max())
    assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_by_hand_all_arguments_under_their_names(is_causal: bool) -> None:
    """Grouped queries, a scale of the user's, a causal or an additive mask; dropout does not touch the weights."""
    query, key, value = heads(2, 6, 5, 4), heads(2, 3, 7, 4, seed=1), heads(2, 3, 7, 2, seed=2)
    bias = heads(6, 1, 7, seed=3).masked_fill(heads(6, 1, 7, seed=4) > 1, -math.inf)
    with in_step(model := nn.Identity(), rules=[ALL, Rule(kinds="activation", statistics="max")]) as monitor:
        monitor_scaled_dot_product_attention(
            monitor=monitor,
            module=model,
            query=query,
            key=key,
            value=value,
            attn_mask=None if is_causal else bias,
            dropout_p=0.9,
            is_causal=is_causal,
            scale=0.3,
            enable_gqa=True,
            activation=None,
            is_reference=False,
        )
        result = record_of(monitor)
    expected = truth(query, key, bias=None if is_causal else bias, is_causal=is_causal, scale=0.3)
    assert_values(result, expected_values("_root_", expected))
    for head in range(6):
        of_head = {"query": query[:, head], "key": key[:, head // 2], "value": value[:, head // 2]}
        for name, tensor in of_head.items():
            assert result.values[f"activation/_root_.head_{head}.{name}/max"] == float(tensor.max())
    assert not any("activation/" in name and name.endswith(".activation/max") for name in result.values)


@pytest.mark.parametrize("first", ["by hand", "intercepted"])
def test_a_call_that_is_reported_and_intercepted_counts_once(first: str) -> None:
    """In either order; two different calls count twice."""
    query, key = heads(2, 3, 5, 4), heads(2, 3, 7, 4, seed=1)
    monitor = ModuleMonitor(rules=ALL)

    def forward(q: Tensor, k: Tensor) -> None:
        if first == "by hand":
            monitor_scaled_dot_product_attention(monitor, "_root_", q, k, k)
        F.scaled_dot_product_attention(q, k, k)
        if first == "intercepted":
            monitor_scaled_dot_product_attention(monitor, "_root_", q, k, k)
        monitor_scaled_dot_product_attention(monitor, "_root_", 2 * q, k, k)
        F.scaled_dot_product_attention(q, k, k)

    model = Calls(forward)
    with monitor:
        monitor.set_module(model)
        monitor.begin_step(0)
        model(query, key)
        result = record_of(monitor)
    assert_values(result, expected_values("_root_", truth(query, key), truth(2 * query, key), truth(query, key)))


def test_by_hand_heads_come_first_where_there_is_no_batch() -> None:
    """As the other tool has it: ``(heads, queries, features)``."""
    query, key = heads(3, 5, 4), heads(3, 7, 4, seed=1)
    with in_step(model := nn.Identity(), rules=ALL) as monitor:
        monitor_scaled_dot_product_attention(monitor, model, query, key, key, is_causal=True)
        result = record_of(monitor)
    assert_values(result, expected_values("_root_", truth(query[None], key[None], is_causal=True)))


def test_by_hand_of_an_unknown_module() -> None:
    """An unknown module or name is an error with the nearest name; excluded modules and steps that are not monitored are passed over."""
    x = heads(2, 1, 5, 4)
    with ModuleMonitor(rules=ALL, exclude="b") as monitor:
        monitor.set_module(model := nn.ModuleDict({"attn": nn.Identity(), "b": nn.Identity()}))
        monitor_scaled_dot_product_attention(monitor, "attention", x, x, x)
        monitor.begin_step(0)
        monitor_scaled_dot_product_attention(monitor, model["b"], x, x, x)
        with pytest.raises(ValueError, match="'attention' is none of the 2 modules that are watched; nearest: 'attn'"):
            monitor_scaled_dot_product_attention(monitor, "attention", x, x, x)
        with pytest.raises(ValueError, match="This Linear is none of the 2 modules"):
            monitor_scaled_dot_product_attention(monitor, nn.Linear(1, 1), x, x, x)
        with pytest.raises(ValueError, match="There is no reference"):
            monitor_scaled_dot_product_attention(monitor, model["attn"], x, x, x, is_reference=True)
        result = record_of(monitor)
    assert result.values == {"monitor/errors": 0.0}


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_is_reference_compares_the_tensors_of_heads(cpu_offload: bool) -> None:
    """Two micro-batches, the reference first, under ``no_monitor``; what it did that the model did not come to is forgotten."""
    torch.manual_seed(0)
    model, reference = nn.ModuleDict({"attn": nn.Linear(4, 4)}), nn.ModuleDict({"attn": nn.Linear(4, 4)})
    inputs = [heads(2, 3, 5, 4), heads(4, 3, 5, 4, seed=1)]
    result, expected = {}, {}
    with ModuleMonitor(cpu_offload=cpu_offload) as monitor:
        monitor.add_activation_difference_metric("norm")
        monitor.add_activation_difference_metric("distance", lambda current, other: (current - other).abs().sum(), ".*", torch.sum)
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        monitor.begin_step(0)
        for x in inputs:
            with monitor.no_monitor(), torch.no_grad():
                y = reference["attn"](x)
                for _call in range(2):
                    monitor_scaled_dot_product_attention(monitor, reference["attn"], y, x, x, activation=2 * y, is_reference=True)
            z = model["attn"](x)
            monitor_scaled_dot_product_attention(monitor, model["attn"], z, x, x, activation=2 * z)
            monitor.after_micro_batch()
        with pytest.raises(ValueError, match="This Linear is none of the 2 modules of the reference"):
            monitor_scaled_dot_product_attention(monitor, model["attn"], z, z, z, is_reference=True)
        monitor.end_step()
        result = monitor.get_step_metrics()
    changes = [(model["attn"](x) - reference["attn"](x)).detach().double() for x in inputs]
    for head in range(3):
        of_head = torch.cat([change[:, head].flatten() for change in changes])
        for name, factor in {"query": 1, "key": 0, "value": 0, "activation": 2}.items():
            expected[f"activation_difference/attn.head_{head}.{name}/norm"] = factor * float(of_head.norm())
            expected[f"activation_difference/attn.head_{head}.{name}/distance"] = factor * float(of_head.abs().sum())
    values = {key: value for key, value in result.items() if ".head_" in key and key.startswith("activation_difference")}
    assert values == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert result["monitor/errors"] == 0


@pytest.mark.parametrize("follows", [False, True])
def test_attention_of_the_reference_is_not_the_models(follows: bool) -> None:
    """It runs beside the model, and its modules once more for the coordinate check: neither is recorded."""
    model = Calls(lambda x: model.parts[0](x, x, x)[0], nn.MultiheadAttention(8, 2))
    reference, x = copy.deepcopy(model), heads(5, 3, 8)
    reference.call = lambda x: reference.parts[0](2 * x, x, x)[0]
    rules = [ALL, Rule(kinds=["rcc_output", "rcc_propagating_update", "activation_difference"], statistics="rms")]
    with in_step(model, rules=rules, reference=reference, follows=follows) as monitor:
        if not follows:
            with monitor.no_monitor():
                reference(x)
        model(x).sum().backward()
        monitor.after_micro_batch()
        result = record_of(monitor)
    assert any(key.startswith("rcc_output") for key in result.values)
    alone = record(model, x)
    assert {key: value for key, value in result.values.items() if key.startswith("attention")} == {
        key: value for key, value in alone.values.items() if key.startswith("attention")
    }
