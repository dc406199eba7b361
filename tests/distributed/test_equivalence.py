"""The same training, in one process and in several: the same values, the same weights, two collectives a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import scenarios
from torch.nn import functional as F

from lightning_module_monitor import load_store
from lightning_module_monitor.keys import Key

RunScenarios = Callable[[int, str], list[Any]]

OF_MICRO_BATCHES = {f"context/{name}" for name in ("input_variation", "output_variation", "target_min", "target_max")}
"""Keys of what is taken of each micro-batch of a rank by itself, the largest of all, and of labels only if these are enough."""

LOCAL_LOSS = ("activation_gradient",)
"""Kinds that are of each rank's own loss, a mean over its share of the batch."""


def assert_same(whole: dict[str, Any], result: dict[str, Any], num_shares: int) -> None:
    """The records of ranks that share out the batches are those of one process that has them whole."""
    assert len(result["records"]) == len(whole["records"])
    for record, merged in zip(whole["records"], result["records"], strict=True):
        assert record.step == merged.step
        assert record.values.keys() - OF_MICRO_BATCHES == merged.values.keys() - {"monitor/rank_disagreement"} - OF_MICRO_BATCHES
        assert merged.values.get("monitor/rank_disagreement", 0.0) == 0.0
        for key, value in record.values.items():
            if key in OF_MICRO_BATCHES:
                continue
            expected = value * expected_factor(key, num_shares)
            # What is a difference of rounded numbers is as exact as these.
            is_rounding = (
                "difference" in key or "rcc" in key or key.startswith(("update", "gradient_before_clip", "gradient/", "optimizer_state"))
            )
            if is_rounding and key.endswith("zero_fraction"):
                continue
            near = 2e-5 if is_rounding else 1e-6
            assert merged.values[key] == pytest.approx(expected, rel=5e-4 if is_rounding else 1e-4, abs=near, nan_ok=True), key
        assert record.histograms.keys() == merged.histograms.keys()
        for key, histogram in record.histograms.items():
            assert histogram.row.sum() == merged.histograms[key].row.sum(), key


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shares_of_a_batch_give_the_values_of_the_whole_batch(num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """All kinds, functions, aggregates, histograms, torchmetrics objects, heads and stages, on every rank."""
    whole = scenarios.whole_and_parts(tmp_path)
    assert len(whole["records"]) == 8
    by_rank = run_scenarios(num_ranks, "whole_and_parts")
    for result in by_rank:
        assert_same(whole, result, num_ranks)
    values = by_rank[0]["records"][-1].values
    assert {Key.parse(key).kind for record in by_rank[0]["records"] for key in record.values} >= {
        "activation", "activation_gradient", "gradient", "update", "activation_difference", "parameter_difference", "rcc_effective_update",
        "rcc_alignment", "rcc_operator_norm", "attention_entropy", "gradient_flow",
    }  # fmt: skip
    assert values["validation/monitor/errors" if "validation/monitor/errors" in values else "monitor/errors"] == 0


@pytest.mark.parametrize(
    ("scenario", "num_ranks", "num_shares"),
    [
        ("fully_sharded", 2, 2),
        ("fully_sharded", 3, 3),
        ("tensor_parallel", 2, 1),
        ("laid_out_activations", 2, 1),
        ("both_ways", 4, 2),
    ],
)
def test_parameters_that_are_laid_out_over_ranks(
    scenario: str, num_ranks: int, num_shares: int, run_scenarios: RunScenarios, tmp_path: Path
) -> None:
    """FSDP2 and tensor parallel: even, uneven and empty shards, local slices, replicated activations; every element once."""
    whole = scenarios.SCENARIOS[scenario](tmp_path)
    for result in run_scenarios(num_ranks, scenario):
        assert_same(whole, result, num_shares)
        # Where functions or the file want whole tensors, ranks first say what they have; singular values take two, in two steps or in all.
        of_features = 2 * (scenario == "fully_sharded")
        assert [calls.count("all_reduce") for calls in result["collectives"]] == [3 + 2, 3 + 2, 2 + of_features]
        assert {call for calls in result["collectives"] for call in calls} == {"all_reduce"}
        assert all(record.values["monitor/errors"] == 0 for record in result["records"])
        for name, value in whole["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("scenario", "num_ranks"),
    [
        ("states_ddp", 2),
        ("states_fully_sharded", 2),
        ("states_fully_sharded", 3),
        ("states_flat", 2),
    ],
)
def test_states_of_optimizers_and_cosines(scenario: str, num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """They are those of one process, per parameter and of modules; two collectives from the second step on."""
    whole = scenarios.SCENARIOS[scenario](tmp_path)
    states = {Key.parse(key).site.rpartition(".")[2] for key in whole["records"][0].values if key.startswith("optimizer_state")}
    assert states == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", *(["extra"] if scenario == "states_ddp" else [])}
    for result in run_scenarios(num_ranks, scenario):
        assert_same(whole, result, num_ranks)
        assert all(record.values["monitor/errors"] == 0 for record in result["records"])
        assert [calls.count("all_reduce") for calls in result["collectives"]][1:] == [2, 2]


def test_the_module_that_made_nan_is_found_where_no_copy_can_be_made(run_scenarios: RunScenarios) -> None:
    """FSDP2 lets no copy of a model be made: every step is observed as it runs."""
    for result in run_scenarios(2, "sick_with_parts"):
        assert result["findings"] == [("nonfinite", "network.squash", 0)]


def test_a_reference_that_computes_in_half_precision(run_scenarios: RunScenarios) -> None:
    """It has FSDP2's policy of precision as the model has: nothing differs in step 0, and later the weights have moved."""
    for result in run_scenarios(2, "reference_in_half_precision"):
        first, second, _third = result["records"]
        assert all(record.values["monitor/errors"] == record.values["monitor/rcc_skipped_calls"] == 0 for record in result["records"])
        kinds = ("activation_difference", "rcc_effective_update")
        changes = [key for key in second.values if key.startswith(kinds)]
        assert len(changes) > 12
        for key in changes:
            assert first.values[key] == 0, key
            assert second.values[key] > 0, key


@pytest.mark.parametrize(
    ("scenario", "num_ranks"),
    [
        ("flat_full", 2),
        ("flat_full", 4),
        ("flat_grad_op", 2),
        ("flat_not", 2),
        ("flat_accumulated", 2),
        ("flat_offloaded", 2),
        ("flat_hybrid", 4),
    ],
)
def test_flat_parameters_that_are_laid_out_over_ranks(scenario: str, num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """FSDP1: views of shards, of which some are empty, with padding and copies; what it ignores counts once; raw tensors are whole."""
    whole = scenarios.FLAT[scenario](tmp_path)
    whole_store = load_store(whole["folder"] / "rank_0" / "monitor.h5")
    by_rank = run_scenarios(num_ranks, scenario)
    for result in by_rank:
        assert_same(whole, result, num_ranks)
        assert all(record.values["monitor/errors"] == 0 for record in result["records"])
        # In the first step ranks exchange what the module logs, and in the first two functions or the file want whole tensors.
        assert result["collectives"][2] == ["all_reduce"] * 2
        for record, truth in zip(result["records"], result["truth"], strict=True):
            if scenario == "flat_accumulated":
                assert max(value for key, value in record.values.items() if key.startswith("gradient/") and key.endswith("/max")) <= 0.01
            for key, (norm, mean) in truth.items():
                before = key.replace("gradient/", "gradient_before_clip/")
                unclipped = before if f"{before}/norm" in record.values else key
                assert record.values[f"{unclipped}/norm"] == pytest.approx(norm, rel=1e-6), key
                assert record.values[f"{unclipped}/mean"] == pytest.approx(mean, rel=1e-5, abs=1e-8), key
    store = load_store(by_rank[0]["folder"] / "rank_0" / "monitor.h5")
    for kind in ("parameter", "gradient", "update"):
        for name, parameter in scenarios.Uneven().named_parameters():
            tensor = store.tensor(kind, f"model.{name}", step=1)
            assert tensor.shape == parameter.shape
            torch.testing.assert_close(tensor, whole_store.tensor(kind, f"model.{name}", step=1), rtol=1e-3, atol=1e-6)


def test_references_that_are_laid_out_by_fsdp1(run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """They go through the steps that the model goes through: nothing differs in step 0, and later all differs as in one process."""
    whole = scenarios.flat_references(tmp_path)
    for result in run_scenarios(2, "flat_references"):
        for name, records in result.items():
            for expected, other in zip(whole[name], records, strict=True):
                assert expected.values.keys() - OF_MICRO_BATCHES == other.values.keys() - {"monitor/rank_disagreement"} - OF_MICRO_BATCHES
                for key, value in expected.values.items():
                    if key.startswith(("activation_difference", "rcc", "parameter_difference")) and name != "beside":
                        assert other.values[key] == pytest.approx(value, rel=5e-4, abs=2e-5, nan_ok=True), (name, key)
            first, second, _third = records
            changes = [key for key in second.values if key.startswith(("activation_difference", "rcc_effective_update"))]
            assert len(changes) > 12
            assert {first.values[key] for key in changes} == {0.0}, name
            # Rounded to bfloat16 the weight of the gate has not moved yet.
            still = [key for key in changes if second.values[key] <= 0 and not (name == "beside" and "update/model.gate" in key)]
            assert not still, name
            assert all(record.values["monitor/errors"] == record.values["monitor/rcc_skipped_calls"] == 0 for record in records)


def test_a_loop_with_flat_parameters(run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """The wrapper that FSDP1 returns is the module to set; the module within it does not show its layout, and is refused."""
    whole = scenarios.flat_loop(tmp_path)
    for result in run_scenarios(2, "flat_loop"):
        assert_same(whole, result, 2)
        assert result["error"] == (
            "norm.weight, norm.bias: FSDP has it in a unit that is not known here; "
            "expected set_module(what FullyShardedDataParallel returns), and use_orig_params=True."
        )


def test_flat_parameters_under_mixed_precision(run_scenarios: RunScenarios) -> None:
    """Parameters and their gradients are those that FSDP puts together, in float32; activations are in bfloat16, and are recorded."""
    for result in run_scenarios(2, "flat_mixed"):
        assert len(result["truth"]) == 3
        for record, truth in zip(result["records"], result["truth"], strict=True):
            assert record.values["monitor/errors"] == record.values["monitor/rank_disagreement"] == 0
            assert record.values["activation/model/norm"] > 0
            for key, (norm, mean) in truth.items():
                assert record.values[f"{key}/norm"] == pytest.approx(norm, rel=1e-6), key
                assert record.values[f"{key}/mean"] == pytest.approx(mean, rel=1e-5, abs=1e-8), key


def test_flat_parameters_without_names_are_left_out(run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """Activations and their gradients are those of all ranks together; one line names the kinds that are left out, and the way to them."""
    whole = scenarios.FLAT["flat_without_names"](tmp_path)
    for rank, result in enumerate(run_scenarios(2, "flat_without_names")):
        for expected, other in zip(whole["records"], result["records"], strict=True):
            kinds = {Key.parse(key).kind for key in other.values}
            assert kinds == {"activation", "activation_gradient", "context", "monitor"}
            for key, value in expected.values.items():
                if Key.parse(key).kind in kinds and key in other.values and key not in OF_MICRO_BATCHES:
                    assert other.values[key] == pytest.approx(value * expected_factor(key, 2), rel=1e-4, abs=1e-6), key
        messages = [message for message in result["messages"] if "use_orig_params" in message]
        assert messages == [
            "OwnFSDPStrategy with use_orig_params=False makes flat parameters without names: parameter, parameter_difference, "
            "gradient_before_clip, gradient, update are left out. use_orig_params=True gives all kinds."
        ] * (rank == 0)


@pytest.mark.parametrize(
    "num_ranks",
    [
        1,
        2,
        3,
    ],
)
def test_a_loop_with_fabric(num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """Plain ``fully_shard``, two micro-batches a step and clipping, against a loop by torch alone in one process."""
    whole = scenarios.plain_loop(tmp_path)
    assert all(
        record.values["gradient/up.weight/norm"] < 0.9 * record.values["gradient_before_clip/up.weight/norm"] for record in whole["records"]
    )
    for result in [scenarios.fabric_loop(tmp_path)] if num_ranks == 1 else run_scenarios(num_ranks, "fabric_loop"):
        assert len(result["records"]) == 3
        assert_same(whole, result, num_ranks)
        for name, value in whole["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("scenario", "num_ranks"),
    [
        ("fully_sharded", 2),
        ("tensor_parallel", 2),
        ("laid_out_activations", 2),
    ],
)
def test_raw_tensors_of_parameters_are_whole(scenario: str, num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """Parameters, gradients and updates that are laid out over ranks are put together; of an activation there is what rank 0 has."""
    whole = load_store(scenarios.SCENARIOS[scenario](tmp_path)["folder"] / "rank_0" / "monitor.h5")
    store = load_store(run_scenarios(num_ranks, scenario)[0]["folder"] / "rank_0" / "monitor.h5")
    shapes = {name: parameter.shape for name, parameter in scenarios.Uneven().named_parameters()}
    for kind in ("parameter", "gradient", "update"):
        for name, shape in shapes.items():
            tensor = store.tensor(kind, f"network.{name}", step=1)
            assert tensor.shape == shape
            torch.testing.assert_close(tensor, whole.tensor(kind, f"network.{name}", step=1), rtol=1e-3, atol=1e-6)
    full = whole.tensor("activation", "network.up", step=1)
    rows, columns = (num_ranks, 1) if scenario == "fully_sharded" else (1, num_ranks)
    part = store.tensor("activation", "network.up", step=1)
    torch.testing.assert_close(part, full[: full.shape[0] // rows, : full.shape[1] // columns], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_subclass_of_a_strategy_is_what_it_is(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """What a user derives from DDPStrategy or ModelParallelStrategy has the values of these."""
    for result in run_scenarios(num_ranks, "of_a_subclass"):
        assert result["values"].keys() == {"DDPStrategy", "ModelParallelStrategy"}
        for plain, derived in result["values"].values():
            assert [len(values) for values in plain] == [len(plain[0])] * 3
            np.testing.assert_equal(derived, plain)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_under_a_strategy_that_is_not_known_each_rank_has_its_own_values(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Activations, their gradients and the loss of the rank's own batches, without a collective; one line names what is left out."""
    for rank, by_health in enumerate(run_scenarios(num_ranks, "of_an_unknown_strategy")):
        for result in by_health.values():
            assert [record.step for record in result["records"]] == [0, 2]
            assert result["all_reduces"] == 0
            assert result["files"] == ([] if rank else ["rank_0/monitor.h5"])
            kinds = {Key.parse(key).kind for record in result["records"] for key in record.values}
            assert kinds == {"activation", "activation_gradient", "context", "monitor"}
            x, y = scenarios.data(rank, num_ranks, micro_batches=1)[0]
            module = scenarios.Classifier(torch.nn.Linear(6, 3)).double()
            module.load_state_dict(result["states"][0])
            logits = module.model(x.double())
            logits.retain_grad()
            loss = F.cross_entropy(logits, y)
            loss.backward()
            values = result["records"][0].values
            assert values["activation/model/norm"] == pytest.approx(float(logits.detach().norm()), rel=1e-6)
            assert values["activation_gradient/model/norm"] == pytest.approx(float(logits.grad.norm()), rel=1e-6)
            assert values["context/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
            # The bad batch of the last rank is its own; none runs a step again without the others.
            assert [(finding.name, finding.step) for finding in result["findings"]] == [("nonfinite", 2)] * (rank == num_ranks - 1)
            unknown = [message for message in result["messages"] if message.startswith("UnknownStrategy")]
            assert unknown == [
                "UnknownStrategy keeps parameters in a way that is not known: activation_difference, parameter, gradient are left out; "
                "values are those of rank 0 alone. DDPStrategy, FSDPStrategy, ModelParallelStrategy and their subclasses give all kinds."
            ] * (rank == 0)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_errors_that_a_loop_of_its_own_catches_on_one_rank(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """In a step, in a loop within one, in a loop after one: the step is lost on all ranks, no rank waits, and later steps do not mix."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    batches = [scenarios.own_data(rank, num_ranks) for rank in range(num_ranks)]
    for result in run_scenarios(num_ranks, "own_loop"):
        for prefix, steps in (("", {0, 1, 4, 5, 6, 7}), ("validation/", {4, 5, 6, 7}), ("test/", {6, 7})):
            key = f"{prefix}activation/_root_/norm"
            assert {step for step, values in result["values"].items() if key in values} == steps
            for step, values in result["values"].items():
                if key in values:
                    x = torch.cat([rank_batches[step][0] for rank_batches in batches]).double()
                    assert values[key] == pytest.approx(float(model(x).detach().norm()), rel=1e-5)
                    assert values[f"{prefix}monitor/errors"] == 0


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_of_the_users_own_come_from_any_rank_in_any_step(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Of one site: each rank has one of its own, all have one with an aggregate of theirs, one comes later."""
    for result in run_scenarios(num_ranks, "own_loop"):
        for step in (0, 1, 4, 5, 6, 7):
            values = {key: value for key, value in result["values"][step].items() if key.startswith("own/")}
            expected = {f"own/site/of_rank_{rank}": step + 0.5 for rank in range(num_ranks)}
            expected["own/site/largest"] = max(step, num_ranks - 1)
            if step > 3:
                expected["own/site/late"] = sum(range(num_ranks)) / num_ranks
            assert values == pytest.approx(expected)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_weight_that_differs_on_one_rank_is_named(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Once, with its number; its values are of all ranks' elements together, those of all others still count once: two collectives."""
    by_rank = run_scenarios(num_ranks, "corrupted")
    site = "model.blocks.1.weight"
    for result in by_rank:
        assert result["collectives"][1:] == [["all_reduce"] * 2] * 2  # in the first step ranks exchange what the module logs
        records = result["records"]
        assert [record.values["monitor/rank_disagreement"] for record in records] == [0.0, 1.0, 1.0]
        [finding] = result["findings"]
        assert (finding.step, finding.name, finding.site) == (1, "rank_disagreement", site)
        assert finding.words.startswith(f"Ranks have different values of parameter {site}, which must be equal.")
        for step, record in enumerate(records):
            for name in result["states"][step]:
                gathered = torch.stack([other["states"][step][name].double() for other in by_rank])
                together = gathered if name == site and step else gathered[:1]
                if name == site and step == 1:
                    together[-1, 0, 0] += 0.25  # which comes after the state was kept
                assert record.values[f"parameter/{name}/norm"] == pytest.approx(float(together.norm()), rel=1e-6), name
                assert record.values[f"parameter/{name}/max"] == pytest.approx(float(together.max()), rel=1e-6), name
                assert record.histograms[f"parameter/{name}/hist"].row.sum() == together.numel(), name
                assert record.histograms[f"gradient/{name}/hist"].row.sum() == together[0].numel(), name


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_of_ranks_that_train_alone_values_are_of_all_elements_together(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Local steps: gradients differ from the first step on, parameters from the second; a frozen one never does, and counts once."""
    by_rank = run_scenarios(num_ranks, "local_steps")
    for result in by_rank:
        for step, record in enumerate(result["records"]):
            assert record.values["monitor/rank_disagreement"] == 3.0
            assert [(finding.step, finding.site) for finding in result["findings"]] == [(0, "0.weight")]
            for name in result["states"][step]:
                parameters = torch.stack([other["states"][step][name][0].double() for other in by_rank])
                together = parameters if step and name != "0.bias" else parameters[:1]
                assert record.values[f"parameter/{name}/norm"] == pytest.approx(float(together.norm()), rel=1e-6)
                if name != "0.bias":
                    gradients = torch.stack([other["states"][step][name][1].double() for other in by_rank])
                    assert record.values[f"gradient/{name}/norm"] == pytest.approx(float(gradients.norm()), rel=1e-6)
                    assert record.values[f"gradient/{name}/mean"] == pytest.approx(float(gradients.mean()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_join_a_rank_that_has_no_more_batches_ends_the_record_and_not_the_run(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Collectives of the monitor meet none of DDP's or of ``Join``'s; steps that all ranks have are recorded, and training is the same."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    x = torch.cat([scenarios.data(rank, num_ranks, micro_batches=1, steps=6)[0][0] for rank in range(num_ranks)]).double()
    for rank, result in enumerate(run_scenarios(num_ranks, "join")):
        plain, monitored = result["plain"], result["monitored"]
        assert all(torch.equal(plain["state"][name], monitored["state"][name]) for name in plain["state"])
        assert list(monitored["values"]) == [0, 1]
        assert monitored["values"][0]["activation/_root_/norm"] == pytest.approx(float(model(x).detach().norm()), rel=1e-6)
        ends = [message.startswith("Monitoring ends after the record of step 1: another rank did not") for message in monitored["messages"]]
        assert ends == [True] * (rank < num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_leaves_ends_the_record_and_not_the_run(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Whichever collective it leaves, that of a record or of the search for what is not finite: one sentence, and no hook stays."""
    for result in run_scenarios(num_ranks, "one_rank_leaves"):
        states = [outcome["state"] for outcome in result.values()]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        for outcome in result.values():
            assert [record.step for record in outcome["records"]] == [0, 1]
            assert sorted(outcome["states"]) == [0, 1, 2, 3, 4, 5]
            assert outcome["hooks"] == 0
            ends = [message for message in outcome["messages"] if "Monitoring ends" in message or "failed" in message]
            assert [message.partition(":")[0] for message in ends] == ["Monitoring ends after the record of step 1"]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rules_that_differ_from_rank_to_rank_are_refused(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """On every rank, before the first batch; what is of another rank, or in other steps, would wait for ever, or mix."""
    for result in run_scenarios(num_ranks, "other_rules"):
        rules = result["errors"][0]
        assert rules == (
            f"ranks 0 and {num_ranks - 1} do not record the same: rank 0 alone has 'activation/_root_/train/norm every step'; "
            "expected the same rules, steps and modules on every rank."
        )
        assert [error.partition(": ")[2].partition(";")[0] for error in result["errors"]] == [
            "rank 0 alone has 'activation/_root_/train/norm every step'",
            "rank 0 alone has 'activation/_root_/train/norm at steps [0, 1]'",
            "rank 0 alone has 'activation/_root_/train at steps [0]'",
        ]
        # What they agree on is asked once, and where they differ, which it is.
        assert result["collectives"] == [["all_gather_object"] * 2] * 3


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_ranks_compare_with_one_reference(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """A reference that every rank has made from a seed of its own is the first rank's, as the model is."""
    torch.manual_seed(0)
    reference = scenarios.Attending().double()
    for result in run_scenarios(num_ranks, "own_reference"):
        model = scenarios.Classifier(scenarios.Attending())
        model.load_state_dict(result["states"][0])
        x = torch.cat([scenarios.data(rank, num_ranks, steps=1, micro_batches=1)[0][0] for rank in range(num_ranks)]).double()
        difference = model.double().model(x) - reference(x)
        (record,) = result["records"]
        assert record.values["activation_difference/model/norm"] == pytest.approx(float(difference.detach().norm()), rel=1e-4)


def expected_factor(key: str, num_ranks: int) -> float:
    """What a value of the whole batch is multiplied by on ranks, each of which has the mean loss of its own share."""
    parts = Key.parse(key)
    if parts.kind not in LOCAL_LOSS or parts.statistic in ("zero_fraction", "nonfinite_count", "positive", "skewness", "kurtosis"):
        return 1.0
    return float(num_ranks)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_monitoring_does_not_change_training(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Promise 1 on several ranks: weights, buffers and random states are bit-identical, with reference and coordinate check."""
    for result in run_scenarios(num_ranks, "unchanged"):
        plain, monitored = result["states"]
        assert result["num_values"] > 100
        assert plain.keys() == monitored.keys()
        assert all(torch.equal(plain[name], monitored[name]) for name in plain)


def test_monitoring_does_not_change_training_where_parameters_are_laid_out(run_scenarios: RunScenarios) -> None:
    """The same, to the last bit, with whole tensors put together in every step."""
    for result in run_scenarios(2, "unchanged_with_parts"):
        assert result.keys() == {"FSDP2", "tensor parallel"}
        for plain, monitored in result.values():
            assert len(plain) == 12
            assert all(torch.equal(plain[name], monitored[name]) for name in plain)


def test_monitoring_does_not_change_training_by_fsdp1(run_scenarios: RunScenarios) -> None:
    """The same with flat parameters, accumulation, and whole tensors put together in every step."""
    for plain, monitored in run_scenarios(2, "unchanged_flat"):
        assert len(plain) > 8
        assert plain.keys() == monitored.keys()
        assert all(torch.equal(plain[name], monitored[name]) for name in plain)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_only_one_rank_has_mixes_with_nothing_and_costs_two_collectives(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """A module, a second output, and from step 1 on heads of attention: two collectives a step, more only where something is new."""
    by_rank = run_scenarios(num_ranks, "branches")
    alone = {"activation/model.only/norm", "activation/model.pair.output_1/mean", "activation/model.pair.output_1/hist"}
    for result in by_rank:
        keys = [{*record.values, *record.histograms} for record in result["records"]]
        assert all(alone <= rank_keys for rank_keys in keys)
        assert "attention_entropy/model.attention.head_1/mean" not in keys[0]
        assert all("attention_entropy/model.attention.head_1/mean" in rank_keys for rank_keys in keys[1:])
        assert all(math.isfinite(value) for record in result["records"] for value in record.values.values())
        # Both ask torchmetrics, whose objects pay for themselves: a barrier and a gathering for each of their two states.
        reductions = [[call for call in calls if call == "all_reduce"] for calls in result["collectives"]]
        assert [len(calls) for calls in reductions] == [4, 4, 2, 2, 2, 2]
        # New streams take an exchange of names, and the step is reduced again.
        exchanges = [calls.count("all_gather_object") for calls in result["collectives"]]
        assert exchanges == [1, 1, 0, 0, 0, 0]
    for step, record in enumerate(by_rank[0]["records"]):
        last = scenarios.data(num_ranks - 1, num_ranks)[step]
        elements = len(last[0]) * 6
        histogram = record.histograms["activation/model.only/hist"]
        assert histogram.row.sum() == elements
        common = sum(len(scenarios.data(rank, num_ranks)[step][0]) for rank in range(num_ranks)) * 6
        assert record.histograms["activation/model.common/hist"].row.sum() == common
        total = record.values["activation/model.pair/total"]
        assert total == pytest.approx(2 / 3 * record.values["activation/model.pair.output_1/total"] + rest(by_rank[0], step, last[0]))


def rest(result: dict[str, Any], step: int, x: torch.Tensor) -> float:
    """Twice the sum of what the pair got, but for the first two columns."""
    model = scenarios.Branches()
    module = scenarios.Classifier(model)
    module.load_state_dict(result["states"][step])
    h = model.common(x)
    h = h + model.only(h)
    return float(2 * h[:, 2:].detach().double().sum())


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_is_an_error_on_all(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """A function that raises on one rank is NaN for all; an error in the monitor on one rank loses the step on all; no rank waits."""
    by_rank = run_scenarios(num_ranks, "one_rank_fails")
    for result in by_rank:
        assert [record.step for record in result["records"]] == [0, 2, 4, 6]
        assert [record.values["monitor/errors"] > 0 for record in result["records"]] == [False, True, True, False]
        values = [record.values["activation/model.layers.0/fails"] for record in result["records"]]
        np.testing.assert_array_equal(np.isnan(values), [False, False, True, False])
        for key in ("activation/model.layers.0/norm", "activation/model.layers.0/mse"):
            assert all(record.values[key] > 0 for record in result["records"])
        # The gradients that the last rank could not take in are not known to be those of the others.
        gradients = [record.values["gradient/model.layers.0.weight/norm"] for record in result["records"]]
        np.testing.assert_array_equal(np.isnan(gradients), [False, True, False, False])
        assert all(record.values["monitor/rank_disagreement"] == 0 for record in result["records"])
        assert all(record.values["activation/model.layers.0/spread.low"] < 0 for record in result["records"])
    assert not any("on purpose" in message for message in by_rank[0]["messages"])
    # Each of them, and the function's.
    messages = [message for message in by_rank[-1]["messages"] if "on purpose" in message]
    assert len(messages) == len({*scenarios.BROKEN.values()}) + 1


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_keeps_no_part_from_the_others(num_ranks: int, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """Whole tensors are gathered only if all ranks have their parts: no rank waits, and training continues."""
    whole = scenarios.one_rank_fails_of_those_with_parts(tmp_path)
    by_rank = run_scenarios(num_ranks, "one_rank_fails_of_those_with_parts")
    expected = {record.step: record for record in whole["records"]}
    for result in by_rank:
        assert [record.step for record in result["records"]] == [0, 2, 4, 6]
        for record in result["records"]:
            # Of what one rank could not take in in step 2 nothing is known, and what is not there in whole is in no function.
            is_missing = record.step == 2
            assert (record.values["monitor/errors"] > 0) == is_missing
            for key, value in expected[record.step].values.items():
                if key in OF_MICRO_BATCHES:
                    continue
                if not is_missing or key.startswith(("activation/", "context/")):
                    assert record.values[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
                elif key.endswith("/norm"):
                    assert math.isnan(record.values[key]), key
                else:
                    assert key not in record.values or key == "monitor/errors" or math.isnan(record.values[key]), key
        for name, value in whole["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-4, atol=1e-6)
    store = load_store(by_rank[0]["folder"] / "rank_0" / "monitor.h5")
    assert store.tensor("parameter", "network.up.weight", step=4).shape == (12, 5)


def test_the_store_has_what_all_ranks_have(run_scenarios: RunScenarios, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The file that rank 0 writes holds the records that every rank has."""
    by_rank = run_scenarios(2, "whole_and_parts")
    assert by_rank[0]["files"] == ["rank_0/monitor.h5"]
    assert by_rank[1]["files"] == []
    store = load_store(by_rank[0]["folder"] / "rank_0" / "monitor.h5")
    for key in ("activation/model.head/rms", "gradient/model.head.weight/norm", "rcc_effective_update/model.head/rms"):
        recorded = {record.step: record.values[key] for record in by_rank[1]["records"] if key in record.values}
        steps, values = store.series(key)
        assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == recorded
