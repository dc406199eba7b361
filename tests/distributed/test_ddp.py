"""DDP: every value is that of all ranks' elements together, each counted once, against raw tensors in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed.scenarios import EVERYTHING, FINE, OF_PARTS, QUANTILES, SCENARIOS, data
from helpers.other_code import assert_same
from helpers.textbook import PLAIN, histogram, slack, textbook
from helpers.tiny import measured
from helpers.training import Classifier
from helpers.zoo import RawTensors, raw_tensors
from torch import Tensor, nn
from torch.nn import functional as F

RunScenarios = Callable[[int, str], list[Any]]

MODELS = [name.removeprefix("zoo_") for name in SCENARIOS if name.startswith("zoo_")]
MICRO_BATCHES = 2


def truth_of_step(model: str, step: int, result: dict[str, Any], num_ranks: int) -> RawTensors:
    """Raw tensors of all ranks: from the weights that the step began with, and each rank's own micro-batches."""
    module = Classifier(model)
    module.load_state_dict(result["states"][step])
    by_rank = [
        raw_tensors(module.model, data(rank, num_ranks)[MICRO_BATCHES * step :][:MICRO_BATCHES], lambda y, t: F.cross_entropy(y, t) / 2)
        for rank in range(num_ranks)
    ]
    raw: RawTensors = {}
    for kind, site in {key: None for rank_tensors in by_rank for key in rank_tensors}:
        tensors = [rank_tensors[kind, site] for rank_tensors in by_rank if (kind, site) in rank_tensors]
        name = "model" if site == "_root_" else f"model.{site}"
        if kind == "parameter":
            raw[kind, name] = tensors[0]
        elif kind == "gradient":
            raw["gradient_before_clip", name] = [torch.stack([gradients[0] for gradients in tensors]).sum(0) / num_ranks]
        else:
            raw[kind, name] = [tensor for outputs in tensors for tensor in outputs]
    gradients = {site: tensors[0] for (kind, site), tensors in raw.items() if kind == "gradient_before_clip"}
    total = torch.cat([tensors.flatten() for tensors in gradients.values()]).norm()
    after = result["states"].get(step + 1, result["state"])
    for site, gradient in gradients.items():
        raw["gradient", site] = [gradient * min(1.0, 0.5 / float(total))]
    for (kind, site), tensors in list(raw.items()):
        if kind == "parameter":
            raw["update", site] = [after[site].double() - tensors[0]]
    return raw


def totals_of(module: nn.Module, raw: RawTensors) -> RawTensors:
    """The parameters inside of each module as one tensor, shared ones once."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    totals: RawTensors = {}
    for kind in ("parameter", "gradient_before_clip", "gradient", "update"):
        for site, part in module.named_modules():
            inside = [raw[kind, names[id(one)]][0].flatten() for one in part.parameters() if (kind, names[id(one)]) in raw]
            totals |= {(kind, site or "_root_"): [torch.cat(inside)]} if inside else {}
    return totals


def whole(tensors: list[Tensor]) -> Tensor:
    """All elements, a token a row where all tokens are of one size."""
    rows = [tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1) for tensor in tensors]
    return torch.cat(rows) if len({row.shape[1] for row in rows}) == 1 else torch.cat([row.reshape(-1) for row in rows])


def assert_fine(values: Mapping[str, float], key: str, elements: Tensor) -> None:
    """Quantiles and what a cast loses are those of all ranks' elements; one element may round to the other side of a limit."""
    near = 1e-6 * float(elements.abs().max())
    for name, share in QUANTILES.items():
        truth = np.quantile(elements.numpy(), share, method="inverted_cdf")
        assert values[f"{key}{name}"] == pytest.approx(truth, rel=0.045, abs=near), key
    nonzero = elements[elements != 0].abs()
    lost = float((nonzero <= 2**-10).sum())
    assert values[f"{key}overflow_float8_e4m3fn"] == pytest.approx(float((elements.abs() > 464).double().mean())), key
    if not len(nonzero):
        return
    largest = float(nonzero.max())
    assert values[f"{key}underflow_float8_e4m3fn"] == pytest.approx(lost / len(nonzero), abs=1 / len(nonzero)), key
    assert values[f"{key}peak_to_rms"] == pytest.approx(largest / float(elements.square().mean().sqrt()), rel=1e-5), key
    if key.startswith(("activation/", "parameter/")):  # what rounding leaves of a gradient that is zero is not the same twice
        scaled = nonzero * 2.0 ** math.floor(math.log2(448 / largest))
        lost = float((scaled <= 2**-10).sum())
        assert values[f"{key}scaled_underflow_float8_e4m3fn"] == pytest.approx(lost / len(nonzero), abs=1 / len(nonzero)), key
        assert values[f"{key}dynamic_range"] == pytest.approx(math.log2(largest / float(nonzero.min())), abs=0.065), key


def outlier_channels(tensors: list[Tensor]) -> int:
    """The channels whose rms is more than six times the median, over all calls and ranks."""
    tensors = [tensor if tensor.dim() > 1 else tensor.reshape(1, -1) for tensor in tensors]
    channels = [tensor.double().movedim(1 if tensor.dim() in (4, 5) else -1, 0).flatten(1) for tensor in tensors]
    rms = torch.cat(channels, 1).square().mean(1).sqrt().numpy()
    return int((rms > 6 * np.median(rms)).sum())


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_every_statistic_of_every_kind_is_that_of_all_ranks(model: str, num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Uneven micro-batches, accumulation without synchronization, clipping, shared and frozen layers, outputs of all shapes."""
    by_rank = run_scenarios(num_ranks, f"zoo_{model}")
    result = by_rank[0]
    assert [record.step for record in result["records"]] == [0, 1, 2]
    for other in by_rank[1:]:
        for record, other_record in zip(result["records"], other["records"], strict=True):
            np.testing.assert_equal(dict(record.values), dict(other_record.values))
    for record in result["records"]:
        raw = truth_of_step(model, record.step, result, num_ranks)
        totals = totals_of(Classifier(model), raw)
        raw |= totals
        names = {key: [name for name in PLAIN if name in (OF_PARTS if key in totals else EVERYTHING)] for key in raw}
        expected = {
            f"{kind}/{site}/{name}" for (kind, site), tensors in raw.items() if whole(tensors).numel() for name in names[kind, site]
        }
        left_out = ("/ratio", "/outlier_channels", *(f"/{name}" for name in FINE))
        recorded = {key for key in measured(record) if not key.startswith("monitor/") and not key.endswith(left_out)}
        empty = tuple(f"{kind}/{site}/" for (kind, site), tensors in raw.items() if not whole(tensors).numel())
        assert {key for key in recorded if not key.startswith(empty)} == expected
        assert record.values["monitor/errors"] == record.values["monitor/rank_disagreement"] == 0
        for (kind, site), tensors in raw.items():
            elements = whole(tensors)
            if not elements.numel():
                continue
            largest = float(elements.abs().max())
            for name in names[kind, site]:
                # Gradients are summed by the reducer in an order of its own; an update is a difference of rounded weights.
                close = {"rel": 1e-5, "abs": 1e-6 * largest} if kind.startswith("gradient") or kind == "update" else {"rel": 2e-6}
                # Standardized moments have no unit: what rounding leaves of them is not in proportion to the elements.
                near = 0.0 if name in ("skewness", "kurtosis") else close.get("abs", 0.0)
                close = {**close, "abs": max(near, close["rel"] * slack(name, elements))}
                if name in ("skewness", "kurtosis") and close["abs"] > 1:
                    continue  # all that the elements differ by is rounding
                value, truth = record.values[f"{kind}/{site}/{name}"], textbook(name, elements)
                assert value == pytest.approx(truth, **close, nan_ok=True), (kind, site, name)
            if f"{kind}/{site}/median" in record.values:
                assert_fine(record.values, f"{kind}/{site}/", elements.double().flatten())
            if kind == "activation" and len({tensor.shape[1:] for tensor in tensors}) == 1:
                assert record.values[f"{kind}/{site}/outlier_channels"] == outlier_channels(tensors)
            if kind in ("activation", "activation_gradient", "parameter"):
                np.testing.assert_array_equal(record.histograms[f"{kind}/{site}/hist"].row, histogram(elements).row)
            if kind == "update" and float(raw["parameter", site][0].norm()):
                ratio = float(elements.norm() / raw["parameter", site][0].norm())
                assert record.values[f"update/{site}/ratio"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_only_rank_0_writes_and_speaks(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """The store is rank 0's; the others write no file, and say nothing that is no problem of theirs."""
    by_rank = run_scenarios(num_ranks, "zoo_outputs")
    assert by_rank[0]["files"] == ["rank_0/monitor.h5"]
    assert any("Watching" in message for message in by_rank[0]["messages"])
    for other in by_rank[1:]:
        assert (other["files"], other["messages"]) == ([], [])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_wrong_is_the_same_on_every_rank(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """A unit is dead if it is on all ranks; who made what is not finite is named with rank and micro-batch, and everywhere alike."""
    by_rank = run_scenarios(num_ranks, "sick")
    for result in by_rank:
        [finding] = result["findings"]
        assert (finding.name, finding.site, finding.step) == ("nonfinite", "model", 2)
        assert f"in the forward pass of micro-batch 1 on rank {num_ranks - 1}" in finding.words
        assert finding.words == by_rank[0]["findings"][0].words
        assert [record.values["activation/model.relu/dead_fraction"] for record in result["records"]] == [0.5, 0.5]
    assert [message.partition(",")[0] for message in by_rank[0]["messages"] if "in the forward pass" in message] == [
        "[monitor] Step 2",
        "[monitor] Diagnosis 1: A value is not finite",
    ]
    assert not any("nonfinite" in message for result in by_rank[1:] for message in result["messages"])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_that_one_rank_cannot_run_again_is_run_by_none(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """The forward pass of the others would wait for it; every rank knows why no module is named."""
    for result in run_scenarios(num_ranks, "sick_and_not_copied"):
        [finding] = result["findings"]
        assert (finding.step, finding.name, finding.site) == (1, "nonfinite", "_root_")
        assert finding.words.endswith("the step could not be run again (TypeError: cannot pickle '_thread.lock' object).")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_by_default_the_record_tells_that_something_is_wrong(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Without a collective of its own: in monitored steps; the same module is named as where every step is searched."""
    by_rank, every_step = run_scenarios(num_ranks, "sick_by_default"), run_scenarios(num_ranks, "sick")
    for result, other in zip(by_rank, every_step, strict=True):
        [finding], [expected] = result["findings"], other["findings"]
        assert (finding.step, finding.site, finding.severity) == (expected.step, expected.site, expected.severity)
        assert finding.words == by_rank[0]["findings"][0].words
        assert finding.words.startswith(
            f"NaN or infinity in the activation of {finding.site}. In the order of a step it is the first that "
        )


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_by_the_clock_are_the_same_on_all_ranks(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """All go by the slowest rank. Step 11, which one of them cannot begin, is lost on all, and the next one is as far away as it was."""
    for result in run_scenarios(num_ranks, "by_the_clock"):
        assert [record.step for record in result["records"]] == [0, 1, *range(21, 120, 30 // num_ranks)]
        times = [record.values.get("monitor/seconds_per_step") for record in result["records"]]
        assert times == [None, *[float(num_ranks)] * (len(times) - 1)]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_next_record_tells_which_step_was_the_first(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """A step that is not monitored has no collective of ours; every rank gets the same finding with the next record, and no other."""
    for result in run_scenarios(num_ranks, "sick_between"):
        [finding] = result["findings"]
        assert (finding.step, finding.name, finding.site) == (1, "nonfinite", "_root_")
        assert finding.words.endswith("health: {nonfinite: always} names the module.")
        assert [record.values["monitor/steps_since_nonfinite"] for record in result["records"][1:]] == [2.0]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_limit_of_the_time_leaves_the_same_steps_out_on_all_ranks(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Each rank has another cost, and one cannot even begin the first step: all go by the slowest, and count from the same step."""
    by_rank = run_scenarios(num_ranks, "limited")
    cost = 0.5 * num_ranks
    gap = math.ceil(9 * cost)
    for result in by_rank:
        assert [record.step for record in result["records"]] == [2, 4, *range(4 + gap, 36, gap)]
        fractions = [record.values.get("monitor/overhead_fraction") for record in result["records"]]
        assert fractions[0] is None
        assert fractions[1:] == pytest.approx([cost / (cost + 2), *[cost / (cost + gap)] * (len(fractions) - 2)])
    about_limit = [[message for message in result["messages"] if message.startswith("max_overhead")] for result in by_rank]
    assert [len(messages) for messages in about_limit] == [1, *[0] * (num_ranks - 1)]


@pytest.mark.slow
def test_operations_of_the_check_of_health(run_scenarios: RunScenarios) -> None:
    """Of 385 recorded tensors with 64 ReLUs: a few for each ReLU in a monitored step, and a dozen in another one."""
    for result in run_scenarios(2, "operations"):
        (plain, plain_elsewhere), (without, elsewhere_without), (default, elsewhere) = result.values()
        assert elsewhere_without == plain_elsewhere
        assert elsewhere - elsewhere_without <= 12
        assert default - without <= 450, result
        assert without - plain <= 600, result


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_monitored_step_has_one_transfer(num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """Promise 3, in a Trainer: moments, histograms, loss, learning rates and results come together; other steps bring nothing."""
    for result in [SCENARIOS["transfers"](tmp_path)] if num_ranks == 1 else run_scenarios(num_ranks, "transfers"):
        (sizes, num_values), (all_sizes, num_all_values) = result["default"], result["everything"]
        assert len(num_values) == len(sizes) == 3
        assert min(num_values) > 40
        assert len(num_all_values) == len(all_sizes) == 6
        assert min(num_all_values) > 500


@pytest.mark.slow
def test_other_code_that_runs_the_model(run_scenarios: RunScenarios) -> None:
    """In each event of a callback, or hook of the module, on both ranks: the records are those of the steps alone."""
    for result in run_scenarios(2, "other_code"):
        assert len(result) > 100
        for records in result.values():
            assert_same(result[""], records)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_or_loop_that_one_rank_cannot_begin(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """It is lost on all ranks, and none waits for it: the others, and training, go on."""
    results = run_scenarios(num_ranks, "one_rank_cannot_begin")
    for result in results:
        assert result["loops"] == 4
        steps = [(record.step, next(iter(record.values)).startswith("validation/")) for record in result["records"]]
        assert steps == [(0, False), (0, True), (2, False), (2, True), (3, False), (3, True)]
    assert any("it cannot begin, on purpose" in message for message in results[-1]["messages"])
    assert all(torch.equal(value, results[0]["state"][name]) for name, value in results[-1]["state"].items())


def test_a_module_that_is_replaced_after_ranks_have_met(run_scenarios: RunScenarios) -> None:
    """It is observed, and its values are of all ranks; the group of the monitor is the one that was made before."""
    first, second = run_scenarios(2, "late_layers")
    assert (first["num_groups"], second["num_groups"]) == (1, 1)
    for one, other in zip(first["records"], second["records"], strict=True):
        assert one.values["activation/model.1/min"] == other.values["activation/model.1/min"] == 2
        assert one.values["activation/model.1/rms"] == other.values["activation/model.1/rms"] >= 2
        assert one.values["monitor/errors"] == other.values["monitor/errors"] == 0


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_that_an_optimizer_of_the_module_s_own_moves(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Their values and updates are true from the second step on; gradients that arrive are of one rank, and there are none."""
    for result in run_scenarios(num_ranks, "own_optimizer"):
        assert [finding.name for finding in result["findings"]] == []
        records = {record.step: record.values for record in result["records"]}
        assert [*records] == [0, 1, 2, 3]
        assert not any("gradient/" in key for values in records.values() for key in values)
        assert not any(key.startswith(("parameter/", "update/")) for key in records[0])
        name = "model.layers.0.weight"
        for step in (1, 2):
            # The steps that Lightning counts stand still, so that the weights of the first one alone were kept.
            assert records[step][f"update/{name}/norm"] > 0
            assert records[step][f"parameter/{name}/norm"] > 0
