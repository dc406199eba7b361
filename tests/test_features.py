"""What users of four other tools have, row by row, and the tests that show that it works here under its names.

A test that is gone or renamed, and a name that no test of its row uses, fail here.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent


class Row(NamedTuple):
    """A row of one tool's table."""

    names: str
    """What its users type or read, and what was seen wrong there; each is in one of the tests, or in what that uses of its file."""
    tests: str
    """Test files with functions in them."""


MODULE_MONITOR = {
    "constructor": Row(
        "monitor_step_fn format_module_name_fn excluded_modules_regex logger cpu_offload",
        "test_engine.py::test_the_constructor_has_the_names_that_people_know",
    ),
    "module and reference": Row(
        "set_module set_reference_module remove_reference_module has_reference_module close with ValueError module_names",
        "test_engine.py::test_misuse_of_the_engine_is_an_error probes/test_reference.py::test_misuse_of_the_reference_is_told "
        "test_engine.py::test_hooks_come_off_by_close_and_with "
        "test_engine.py::test_module_names_has_every_module_by_the_name_that_it_has_in_keys",
    ),
    "phases of a step": Row(
        "begin_step after_micro_batch end_step is_step_monitored is_monitoring no_monitor raises",
        "test_engine.py::test_schedules_of_rules_and_of_the_monitor test_engine.py::test_no_monitor_hides_what_happens_inside "
        "test_engine.py::test_an_error_in_the_model_leaves_no_window_open test_mixin.py::test_own_values_of_monitored_steps",
    ),
    "metrics": Row(
        "add_activation_metric add_activation_difference_metric add_parameter_metric add_parameter_difference_metric "
        "add_gradient_metric metric_regex metric_aggregation_fn",
        "test_engine.py::test_metrics_match_by_the_beginning_of_a_name_and_return_any_shape "
        "test_engine.py::test_a_metric_that_raises_is_logged_once_and_is_nan test_engine.py::test_misuse_of_the_engine_is_an_error "
        "probes/test_reference.py::test_functions_get_both_tensors_and_torchmetrics_objects_pairs "
        "integration/test_promises.py::test_nothing_is_read_on_the_host_but_by_one_transfer",
    ),
    "parameters and gradients": Row(
        "monitor_parameters monitor_gradients before_clip=True requires_grad_(False)",
        "test_engine.py::test_before_clip_and_after_clip_have_keys_of_their_own "
        "test_engine.py::test_a_frozen_parameter_has_no_gradient_and_no_message",
    ),
    "keys": Row(
        "activation/ parameter/ gradient/ gradient_before_clip activation_difference/ parameter_difference/ _root_ a_b",
        "test_engine.py::test_before_clip_and_after_clip_have_keys_of_their_own "
        "test_engine.py::test_names_are_fit_for_every_logger_and_without_wrappers "
        "test_engine.py::test_metrics_match_by_the_beginning_of_a_name_and_return_any_shape "
        "probes/test_reference.py::test_every_statistic_of_every_difference test_engine.py::test_no_monitor_hides_what_happens_inside",
    ),
    "aggregation over micro-batches": Row(
        "0.107 -100.0 concatenated dict",
        "kernels/test_merging.py::test_micro_batches_of_three_and_five_are_their_concatenation "
        "test_engine.py::test_an_aggregate_of_the_users_sees_all_results_and_may_return_a_dict "
        "test_engine.py::test_every_statistic_of_every_tensor",
    ),
    "the log": Row(
        "get_step_metrics get_all_metrics log_scalar log_scalars log_tensor history=3",
        "test_engine.py::test_values_of_the_users_own_are_recorded_and_joined "
        "test_engine.py::test_history_is_bounded_and_goes_to_a_file_and_back",
    ),
    "a file": Row(
        "storage save_hdf5 load_hdf5 load_store",
        "test_engine.py::test_history_is_bounded_and_goes_to_a_file_and_back "
        "integration/test_callback.py::test_the_store_holds_every_record sinks/test_hdf5.py::test_round_trip_is_bit_exact",
    ),
    "names without wrappers": Row(
        "_orig_mod _forward_module _fsdp_wrapped_module _checkpoint_wrapped_module",
        "test_engine.py::test_no_wrapper_is_in_a_name probes/test_gradient_flow.py::test_blocks_in_torchs_checkpoint_wrapper",
    ),
    "outputs of any structure": Row("tuple list dict dataclass nested", "test_engine.py::test_outputs_model_covers_every_form"),
    "reference": Row(
        'no_monitor random get_rng_state training make("shared") reference',
        "probes/test_reference.py::test_the_reference_leaves_no_trace_on_random_states_buffers_modes_and_graph "
        "probes/test_reference.py::test_every_statistic_of_every_difference "
        "probes/test_coordinate_check.py::test_a_module_called_several_times_is_checked_call_by_call "
        "integration/test_reference.py::test_at_step_0_nothing_differs_and_later_something_does",
    ),
    "MonitorMixin": Row(
        "is_monitoring get_module_monitor ModuleMonitorCallback",
        "test_mixin.py::test_own_values_of_monitored_steps test_mixin.py::test_through_the_callback",
    ),
    "attention by hand, and by itself": Row(
        "attn_mask dropout_p is_causal scale enable_gqa activation is_reference attention_entropy/ head_ query key value attention=True",
        "probes/test_attention.py::test_monitor_scaled_dot_product_attention_row_of_the_table "
        "probes/test_attention.py::test_by_hand_all_arguments_under_their_names "
        "probes/test_attention.py::test_is_reference_compares_the_tensors_of_heads "
        "statistics/test_attention.py::test_masks_of_every_broadcastable_shape "
        "integration/test_attention.py::test_attention_true_is_mean_of_each_kind_and_the_largest_logit",
    ),
    "refined coordinate check": Row(
        "RefinedCoordinateCheck refined_coordinate_check token_norm rms",
        "probes/test_coordinate_check.py::test_terms_without_the_bias_are_those_of_the_forward_pass_although_the_optimizer_has_stepped "
        "probes/test_coordinate_check.py::test_the_check_is_the_same_whatever_the_split_into_micro_batches "
        "probes/test_coordinate_check.py::test_token_rms_is_token_norm_over_the_root_of_the_features "
        "probes/test_coordinate_check.py::test_attention_is_checked_by_its_projections",
    ),
    "cpu_offload": Row("cpu_offload", "probes/test_reference.py::test_every_statistic_of_every_difference"),
}

TORCH_WATCHER = {
    "all layers, or by type": Row(
        "TorchWatcher track_layers nn.Linear ModuleMonitorCallback() types",
        "standalone/test_watcher.py::test_row_1_all_layers_without_configuration standalone/test_watcher.py::test_row_1_layers_by_type "
        "standalone/test_watcher.py::test_row_1_steps_that_are_not_watched_have_no_hook_on_a_layer "
        "integration/test_callback.py::test_the_default_is_useful_and_announced integration/test_cli.py::test_types_by_import_path",
    ),
    "statistics": Row(
        "tensor_stats hist STATISTICS float16",
        "standalone/test_watcher.py::test_row_2_statistics_and_histogram "
        "standalone/test_watcher.py::test_row_2_the_norm_of_a_float16_tensor "
        "kernels/test_histogram.py::test_the_parts_add_up_to_the_whole",
    ),
    "each on or off": Row(
        "track_activations track_gradients track_parameters activation_gradient gradient",
        "standalone/test_watcher.py::test_row_3_each_on_or_off_per_call",
    ),
    "names and stages": Row(
        "base_namespace prefix train validation stages",
        "standalone/test_watcher.py::test_row_4_names "
        "standalone/test_watcher.py::test_row_4_a_validation_forward_does_not_overwrite_the_training_steps_values "
        "integration/test_callback.py::test_validation_does_not_enter_training_values_and_has_its_own_on_request",
    ),
    "any logger": Row(
        "watch run log_metrics CSVLogger",
        "standalone/test_watcher.py::test_row_5_any_object_that_logs standalone/test_watcher.py::test_row_5_nothing_is_held_between_steps",
    ),
    "warnings, not crashes": Row("WARNING raise", "standalone/test_watcher.py::test_row_6_warnings_instead_of_crashes"),
}

GRADIENT_GAIN = {
    "constructor": Row(
        "blocks norm_type strict_single_backward eps with len gradient_flow",
        "standalone/test_gradient_gain.py::test_constructor_every_norm_and_container "
        "standalone/test_gradient_gain.py::test_constructor_no_block_and_one_block "
        "standalone/test_gradient_gain.py::test_a_second_backward_is_an_error_if_strict "
        "standalone/test_gradient_gain.py::test_outputs_of_every_kind "
        "standalone/test_gradient_gain.py::test_shared_blocks_have_a_norm_for_each_place "
        "probes/test_gradient_flow.py::test_callback_merges_micro_batches_instead_of_raising "
        "probes/test_gradient_flow.py::test_a_trainer_run_with_accumulation_equals_float64_autograd",
    ),
    "norms and gains": Row(
        "norms gains None inf RuntimeError",
        "standalone/test_gradient_gain.py::test_norms_and_gains_by_hand "
        "standalone/test_gradient_gain.py::test_norms_and_gains_before_any_backward_are_an_error",
    ),
    "log_gains": Row("log_gains -INF", "standalone/test_gradient_gain.py::test_log_gains_by_hand"),
    "summary_stats": Row(
        "summary_stats mean_gain min_gain max_gain mean_log_gain num_amplifying num_damping num_healthy "
        "num_vanishing num_missing thresholds",
        "standalone/test_gradient_gain.py::test_summary_stats_by_hand "
        "standalone/test_gradient_gain.py::test_summary_stats_thresholds_are_arguments",
    ),
    "report": Row(
        "report Gradient_Norms: Gradient_Gains Summary_Statistics: Transition_Categories: [Healthy] [DAMPING] [AMPLIFYING] heuristics",
        "standalone/test_gradient_gain.py::test_report_by_hand",
    ),
    "outputs, checkpointing, frozen blocks": Row(
        "hidden_states last_hidden_state checkpoint requires_grad reset close",
        "standalone/test_gradient_gain.py::test_outputs_of_every_kind "
        "standalone/test_gradient_gain.py::test_checkpointing_block_by_block "
        "standalone/test_gradient_gain.py::test_frozen_blocks_pass_the_gradient_on "
        "standalone/test_gradient_gain.py::test_reset_after_a_forward_pass_that_failed "
        "standalone/test_gradient_gain.py::test_close_leaves_nothing_behind",
    ),
}

TENSOR_TRACKER = {
    "track": Row(
        "track grad= include exclude re.compile stash_value stash= in_place",
        "standalone/test_tracker.py::test_track_keeps_outputs_then_gradients "
        "standalone/test_tracker.py::test_patterns_are_searched_for_in_names "
        "standalone/test_tracker.py::test_without_grad_only_outputs_are_kept standalone/test_tracker.py::test_stash_value_keeps_less "
        "standalone/test_tracker.py::test_event_has_name_type_grad_value_args_kwargs standalone/test_tracker.py::test_in_place_layers_work "
        "standalone/test_tracker.py::test_gradients_of_every_structure_are_kept",
    ),
    "Event and Stash": Row(
        "Event name type grad value args kwargs first_value order",
        "standalone/test_tracker.py::test_event_has_name_type_grad_value_args_kwargs "
        "standalone/test_tracker.py::test_stash_first_value "
        "standalone/test_tracker.py::test_events_are_in_forward_order_then_in_backward_order",
    ),
    "helpers": Row(
        "rmap_tensor default_stash default_stash_value get_stash_fn ValueError Pair",
        "standalone/test_tracker.py::test_rmap_tensor_keeps_structure_and_types "
        "standalone/test_tracker.py::test_default_stash_value_is_a_detached_copy_on_the_cpu "
        "standalone/test_tracker.py::test_default_stash_and_get_stash_fn",
    ),
    "Tracker": Row(
        "len( [0] clear register register_all unregister str( Tracker(stashes= max_bytes MemoryError",
        "standalone/test_tracker.py::test_tracker_is_a_list_of_stashes "
        "standalone/test_tracker.py::test_register_register_all_and_unregister "
        "standalone/test_tracker.py::test_max_bytes_is_a_clear_error_when_it_is_reached",
    ),
    "to_frame": Row(
        "to_frame stat_name name type grad std ImportError",
        "standalone/test_tracker.py::test_to_frame_has_name_type_grad_and_the_statistic "
        "standalone/test_tracker.py::test_to_frame_without_pandas_says_how_to_get_it",
    ),
    "capture": Row(
        "Capture( sites steps tensor( bfloat16",
        "integration/test_capture.py::test_round_trip_is_bit_exact_in_every_dtype "
        "integration/test_capture.py::test_capture_alone_is_enough sinks/test_tensors.py::test_round_trip_is_bit_exact",
    ),
}

TABLES = {
    "torch-module-monitor": MODULE_MONITOR,
    "TorchWatcher": TORCH_WATCHER,
    "GradientGainMonitor": GRADIENT_GAIN,
    "tensor_tracker": TENSOR_TRACKER,
}
ROWS = [pytest.param(row, id=f"{tool}: {name}") for tool, table in TABLES.items() for name, row in table.items()]


@functools.cache
def texts(path: str) -> dict[str, str]:
    """The text of everything that a file defines, with its decorators, by name."""
    lines = (TESTS / path).read_text(encoding="utf-8").splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        for defined in getattr(node, "targets", [getattr(node, "target", node)]):
            found[getattr(defined, "name", getattr(defined, "id", ""))] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def text_of(path: str, test: str) -> str:
    """A test, and what it uses of its file."""
    used = set(re.findall(r"\w+", texts(path)[test]))
    return "\n".join(text for name, text in texts(path).items() if name in used)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_tests_that_use_its_names(row: Row) -> None:
    """Each test is there, and each name is used by one of them."""
    used = ""
    for test in row.tests.split():
        path, _, name = test.partition("::")
        assert (TESTS / path).is_file(), f"there is no {path}"
        assert name in texts(path), f"there is no {name} in {path}"
        used += text_of(path, name)
    for name in row.names.split():
        words = rf"{re.escape(name)}|{re.escape(name.replace('_', ' '))}"
        before, after = r"\b" if name[0].isalpha() else "", r"\b" if name[-1].isalnum() else ""
        found = re.search(f"{before}(?:{words}){after}", used)
        assert found, f"{name} is used by none of {row.tests}"
