"""Figures of attention against softmax in float64, for every mask and shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.attention import Truth, truth
from torch import Tensor

from lightning_module_monitor.statistics import attention_figures as module
from lightning_module_monitor.statistics.attention_figures import MAX_QUERIES, AttentionFigures, attention_figures

BATCH, HEADS, FEATURES = 3, 2, 4


def make(queries: int, keys: int, dtype: torch.dtype = torch.float32, size: float = 2.0) -> tuple[Tensor, Tensor]:
    """Queries and keys, of logits that differ enough."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = (BATCH, HEADS, queries, FEATURES), (BATCH, HEADS, keys, FEATURES)
    query, key = (size * torch.randn(shape, generator=generator) for shape in shapes)
    return query.to(dtype), key.to(dtype)


def assert_equal(figures: AttentionFigures, expected: Truth, rtol: float = 2e-6, atol: float = 1e-6) -> None:
    """Every token that counts has its figures; ``visible`` shows whether it counts."""
    values = (figures.entropy, figures.relative_entropy, figures.max_logit, figures.sink)
    for name, figure, value in zip(Truth._fields, values, expected, strict=True):
        needed = 2 if name == "attention_relative_entropy" else 1
        counts = figures.visible.numpy() >= needed
        assert np.array_equal(counts, ~np.isnan(value)), name
        np.testing.assert_allclose(figure.double().numpy()[counts], value[counts], rtol=rtol, atol=atol, err_msg=name)


SIZES = {"L = S": (6, 6), "L < S": (4, 7), "L > S": (7, 4), "one query": (1, 5), "one key": (5, 1)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("block", [1, 40, 1 << 18], ids=["single rows", "small blocks", "one block"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_without_a_mask_and_causal(sizes: tuple[int, int], block: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal is from the top left, as torch has it where queries and keys differ in number; blocks change nothing."""
    monkeypatch.setattr(module, "CPU_BLOCK_LOGITS", block)
    query, key = make(*sizes)
    assert_equal(attention_figures(query, key, is_causal=is_causal), truth(query, key, is_causal=is_causal))


@pytest.mark.parametrize("shape", [(b, h, r, c) for b in (1, BATCH) for h in (1, HEADS) for r in (1, 5) for c in (1, 6)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "additive", "both"])
@pytest.mark.parametrize("block", [1, 70, 1 << 18])
def test_masks_of_every_broadcastable_shape(shape: tuple[int, ...], kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boolean, additive with minus infinity, and both; ``visible`` is 0 for rows without a visible key."""
    monkeypatch.setattr(module, "CPU_BLOCK_LOGITS", block)
    generator = torch.Generator().manual_seed(sum(shape))
    query, key = make(5, 6)
    visible = torch.rand(shape, generator=generator) > 0.5
    bias = torch.randn(shape, generator=generator).masked_fill(torch.rand(shape, generator=generator) > 0.7, -torch.inf)
    every = {"visible": visible, "bias": bias}
    options: dict[str, Any] = {"boolean": {"visible": visible}, "additive": {"bias": bias}, "both": every}[kind]
    figures = attention_figures(query, key, [*options.values()])
    assert_equal(figures, truth(query, key, **options))
    assert figures.visible.dtype == torch.float32
    assert not any(figure.isnan().any() for figure in (figures.entropy, figures.max_logit, figures.sink))


@pytest.mark.parametrize("lowest", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_common_substitutes_for_minus_infinity_hide(lowest: float) -> None:
    """The visible keys are those of a boolean mask; a padded token without any does not count."""
    query, key = make(4, 6)
    visible = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)[None, None]
    figures = attention_figures(query, key, [torch.zeros(visible.shape).masked_fill(~visible, lowest)])
    assert_equal(figures, truth(query, key, visible=visible))
    assert figures.visible[0, 0].tolist() == [2, 1, 5, 0]
    assert (figures.sink[:, :, 2] == 0).all()  # hidden: no weight at all


@pytest.mark.parametrize("block", [1, 40, 1 << 18])
def test_a_causal_mask_with_padding(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hide, also where a block does not have all keys."""
    monkeypatch.setattr(module, "CPU_BLOCK_LOGITS", block)
    query, key = make(6, 6)
    visible = (torch.arange(6) >= torch.tensor([0, 2, 6])[:, None])[:, None, None]  # padded on the left by 0, 2, 6
    assert_equal(attention_figures(query, key, [visible], is_causal=True), truth(query, key, visible=visible, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(dtype: torch.dtype) -> None:
    """Half precision is computed in float32 of the numbers as they are, float64 in float64."""
    query, key = make(9, 9, dtype)
    figures = attention_figures(query, key, is_causal=True, scale=0.3)
    assert figures.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    assert_equal(figures, truth(query, key, is_causal=True, scale=0.3), tolerance, tolerance)


def test_large_float16_logits_do_not_overflow() -> None:
    """The product of 200 and 200 by 64 features leaves float16."""
    query, key = torch.full((1, 1, 1, 64), 200.0, dtype=torch.float16), torch.full((1, 1, 2, 64), 200.0, dtype=torch.float16)
    figures = attention_figures(query, key)
    assert figures.max_logit.item() == 200 * 200 * 64 / 8
    assert figures.entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("gap", [0.0, 1.0, 10.0, 16.0, 80.0, 1e3])
def test_collapsed_attention(gap: float) -> None:
    """Entropy of two keys by hand, down to where one weight has all: not negative, and right where it is small."""
    query, key = torch.tensor([[[[gap]]]]), torch.tensor([[[[1.0], [0.0]]]])
    figures = attention_figures(query, key, scale=1.0)
    p = math.exp(-gap) / (1 + math.exp(-gap))
    expected = math.log1p(math.exp(-gap)) + gap * p
    assert figures.entropy.item() >= 0
    assert figures.entropy.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert figures.sink.item() == pytest.approx(1 - p)


def test_even_attention_has_relative_entropy_one() -> None:
    """All logits alike: log of the number of visible keys, and one over it for the sink; never more than 1."""
    query, key = torch.zeros(1, 1, 300, 4), torch.randn(1, 1, 300, 4)
    figures = attention_figures(query, key, is_causal=True)
    np.testing.assert_allclose(figures.entropy[0, 0].numpy(), np.log(np.arange(1, 301)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(figures.sink[0, 0].numpy(), 1 / np.arange(1, 301), rtol=1e-6)
    assert figures.relative_entropy[0, 0, 1:].max() <= 1
    assert figures.relative_entropy[0, 0, 1:].min() > 1 - 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_logits_are_not_hidden(bad: float) -> None:
    """A NaN or infinite key makes the figures of its sample and head non-finite, and of no others."""
    query, key = make(4, 4)
    query, key = query.abs(), key.abs()
    key[1, 0, 2] = bad
    figures = attention_figures(query, key)
    finite = torch.ones(BATCH, HEADS, 4, dtype=torch.bool)
    finite[1, 0] = False
    assert torch.equal(figures.entropy.isfinite(), finite)
    assert torch.equal(figures.max_logit.isfinite(), finite)


def test_of_many_query_tokens_evenly_spaced_ones_are_measured() -> None:
    """Every third of 3 * MAX_QUERIES, the middle one of each three, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 1, 3 * MAX_QUERIES - 1, 2, generator=generator), torch.randn(1, 1, 8, 2, generator=generator)
    figures = attention_figures(query, key, is_causal=True)
    assert figures.entropy.shape == (1, 1, MAX_QUERIES)
    some = slice(100, 110)
    expected = truth(query[:, :, 1::3][:, :, some], key)
    assert_equal(AttentionFigures(*(figure[:, :, some] for figure in figures)), expected)
    assert figures.visible[0, 0, :4].tolist() == [2, 5, 8, 8]
    bias = torch.arange(3 * MAX_QUERIES - 1.0)[None, None, :, None].expand(-1, -1, -1, 8)
    masked = attention_figures(query, key, [bias])
    assert masked.max_logit[0, 0, 100].item() == pytest.approx(truth(query[:, :, 301:302], key).attention_max_logit.item() + 301)
