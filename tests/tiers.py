"""Which tests run when: `--tier core` (`make test`), `--tier deep` (`make test-deep`) or `--tier processes` (`make test-processes`).

core: every feature, once or in a few cases, in one process; whatever no table names.
deep: grids, generated programs, comparisons of whole trainings, worlds of more ranks.
processes: what starts other processes: commands, torchrun, notebooks, examples.

The tables name folders, files and test functions below `tests/`; the longest name that fits decides. A core test marked `core(keep=n)` leaves all but n
of its cases to deep, and what only `--all` runs of it (`thorough`) is deep too.

A function with many cases has as many of them in a tier as take `SECONDS` there by `tests/durations.json`, spread over all and at least one. In core no case
takes more than `LONGEST`, but each file has its quickest function. What core leaves is deep; what deep and processes leave is run by `make test-all`, and by
whoever names a file or folder and no tier. `THOROUGH` are whole functions that only `make test-all` runs.

`--share K/N` (`.ci/run`) leaves out files that take `SHARED` seconds and more in a tier, but for the K-th of N shares of them: N runs with other shares run
all. Files stay whole, as some tests build on what those before them compiled.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TIERS = ("core", "deep", "processes")
SECONDS = {"core": 0.6, "deep": 2.0, "processes": 40.0}
"""Of the processor, for the cases of one function."""
LONGEST = 1.4
"""Seconds of a core case. Longer ones are deep."""

LONGEST_ALONE = 2.0
"""Those of a file's quickest function."""

UNKNOWN = 0.4
"""Seconds of a case of a file that was not measured."""

SHARED = 2.0
"""Seconds of a file in a tier from which on `--share` may leave it out."""

TESTS = Path(__file__).parent

CORE: tuple[str, ...] = (
    "nxd_jax/abstract/test_abstract_run.py::test_a_world_larger_than_the_machine",
    "nxd_jax/abstract/test_abstract_run.py::test_errors_of_arguments",
    "nxd_jax/abstract/test_abstract_run.py::test_models_are_made_without_memory",
    "nxd_jax/abstract/test_abstract_run.py::test_values_are_refused_with_the_line_that_asks",
    "nxd_jax/abstract/test_pipeline.py::test_collectives_by_stage",
    "nxd_jax/abstract/test_pipeline.py::test_memory_of_stages",
    "nxd_jax/abstract/test_pipeline.py::test_programs_of_equal_stages_are_said_once",
    "nxd_jax/abstract/test_pipeline.py::test_the_loss_has_no_value",
    "nxd_jax/abstract/test_pipeline.py::test_the_report_as_text",
    "nxd_jax/checkpoint/test_experts.py::test_another_number_of_experts",
    "nxd_jax/checkpoint/test_experts.py::test_any_layout",
    "nxd_jax/checkpoint/test_experts_command.py::test_arguments",
    "nxd_jax/checkpoint/test_experts_command.py::test_rules",
    "nxd_jax/checkpoint/test_experts_command.py::test_to_ours_and_back",
    "nxd_jax/checkpoint/test_experts_command.py::test_what_is_not_known",
    "nxd_jax/checkpoint/test_experts_original.py::test_a_state_without_offsets",
    "nxd_jax/checkpoint/test_experts_original.py::test_another_number_of_experts",
    "nxd_jax/checkpoint/test_experts_original.py::test_files_that_are_missing",
    "nxd_jax/checkpoint/test_experts_original.py::test_info_that_disagrees",
    "nxd_jax/checkpoint/test_experts_original.py::test_shapes_that_differ_among_ranks",
    "nxd_jax/checkpoint/test_original.py::test_export_writes_what_nxd_would",
    "nxd_jax/checkpoint/test_original.py::test_names_and_shapes_must_agree",
    "nxd_jax/checkpoint/test_pipeline.py::test_another_model",
    "nxd_jax/checkpoint/test_pipeline_command.py",
    "nxd_jax/checkpoint/test_pipeline_original.py",
    "nxd_jax/checkpoint/test_safetensors.py",
    "nxd_jax/checkpoint/test_save_load.py",
    "nxd_jax/checkpoint/test_savers.py",
    "nxd_jax/checkpoint/test_saving_original.py::test_what_scripts_read",
    "nxd_jax/checkpoint/test_united.py",
    "nxd_jax/inspect/test_collectives.py::test_rows_are_what_arithmetic_predicts",
    "nxd_jax/inspect/test_estimate.py",
    "nxd_jax/inspect/test_expert_collectives.py::test_the_machine_by_groups",
    "nxd_jax/inspect/test_experts.py",
    "nxd_jax/inspect/test_hlo.py::test_find",
    "nxd_jax/inspect/test_looking.py",
    "nxd_jax/inspect/test_memory.py::test_the_verdict",
    "nxd_jax/inspect/test_pictures.py",
    "nxd_jax/inspect/test_pipeline_inspection.py::test_one_micro_batch_waits_for_all_stages",
    "nxd_jax/inspect/test_pipeline_inspection.py::test_ranks_as_people_write_them",
    "nxd_jax/inspect/test_profile.py::test_steps",
    "nxd_jax/inspect/test_recompiles.py::test_a_new_batch_size",
    "nxd_jax/inspect/test_recompiles.py::test_why_reads_as_sentences",
    "nxd_jax/inspect/test_schedules.py",
    "nxd_jax/inspect/test_tables.py",
    "nxd_jax/inspect/test_timeline.py",
    "nxd_jax/inspect/test_traffic.py",
    "nxd_jax/kernels/test_flash_attn.py::test_errors",
    "nxd_jax/kernels/test_flash_attn.py::test_parity",
    "nxd_jax/kernels/test_ring_attention_kernel.py::test_errors",
    "nxd_jax/kernels/test_ring_attention_kernel.py::test_parity",
    "nxd_jax/lightning/test_behaviour.py::test_fit",
    "nxd_jax/lightning/test_layout.py",
    "nxd_jax/lightning/test_module.py",
    "nxd_jax/lightning/test_pipeline.py::test_fit",
    "nxd_jax/lightning/test_progress_bar.py::test_three_digits",
    "nxd_jax/lightning/test_progress_bar.py::test_what_a_batch_holds",
    "nxd_jax/lightning/test_versions.py",
    "nxd_jax/lora/test_config.py",
    "nxd_jax/lora/test_layers.py::test_options_that_cannot_be_adapted",
    "nxd_jax/lora/test_layers.py::test_results_gradients_and_merging",
    "nxd_jax/lora/test_model.py::test_what_trains",
    "nxd_jax/lora/test_storage.py::test_save_and_load",
    "nxd_jax/optimizer/test_numbers.py::test_equals_torch",
    "nxd_jax/test_ckpt_command.py::test_options_that_do_not_fit",
    "nxd_jax/test_ckpt_command.py::test_safetensors_both_ways",
    "nxd_jax/test_moe_training.py::test_a_resume_from_nowhere",
    "nxd_jax/trainer/test_activation_checkpoint.py::test_a_class_that_the_model_does_not_have",
    "nxd_jax/trainer/test_activation_checkpoint.py::test_same_gradients_from_less_memory",
    "nxd_jax/trainer/test_meta_init.py::test_the_model_runs",
    "nxd_jax/trainer/test_replay.py::test_one_program_from_the_first_step_to_played_ones",
    "nxd_jax/training/lightning_modules/test_nlp_checkpoint_io.py::test_configurations_are_saved_as_plain_dicts",
    "nxd_jax/training/lightning_modules/test_nlp_checkpoint_io.py::test_values_of_the_originals_files",
    "nxd_jax/training/lightning_modules/test_nlp_checkpoint_io.py::test_where_a_runs_own_checkpoints_are",
    "nxd_jax/training/utils/test_model_checkpoint.py::test_goes_on_bit_for_bit",
    "nxd_jax/training/utils/test_model_checkpoint.py::test_no_checkpoint_would_ever_be_saved",
    "torch_bridge/precision/test_auto_cast.py::test_matmult_rounds_the_operands_and_sums_in_float32",
    "torch_bridge/precision/test_autocast.py::test_a_case_for_every_op",
    "torch_bridge/precision/test_autocast.py::test_op_computes_in_its_dtype_forward_and_backward",
    "torch_bridge/precision/test_autocast.py::test_training_with_autocast_learns_like_float32_and_compiles_no_more",
    "torch_bridge/precision/test_downcast.py::test_what_each_dtype_holds",
    "torch_bridge/precision/test_rounding.py::test_bad_values_are_named_and_nothing_is_lost",
    "torch_bridge/precision/test_rounding.py::test_results_of_half_precision_ops_are_rounded_stochastically",
    "torch_bridge/ranks/test_each_rank.py::test_each_rank_reads_its_own",
    "torch_bridge/ranks/test_functions.py::test_batch_norm_over_all_ranks",
    "torch_bridge/ranks/test_random_numbers.py::test_each_rank_draws_on_the_cpu_what_it_would_alone",
    "torch_bridge/replay_programs/test_programs.py::test_does_as_eager_torch",
    "torch_bridge/replay_programs/test_programs.py::test_enough_programs",
    "torch_bridge/test_folding.py::test_few_layers_are_left_alone",
    "torch_bridge/test_folding.py::test_weights_stay_stacked",
    "torch_bridge/test_time_loops.py::test_twelve_steps_are_folded_unasked",
)
"""What is core in folders and files of the other tables."""

DEEP: tuple[str, ...] = (
    "benchmarks",
    "models",
    "nxd_jax/abstract",
    "nxd_jax/checkpoint",
    "nxd_jax/checkpoint/test_pipeline_command.py::test_tied_weights_are_written_for_both_ranks",
    "nxd_jax/checkpoint/test_pipeline_original.py::test_adapters",
    "nxd_jax/checkpoint/test_pipeline_original.py::test_training_goes_on_after_both_ways",
    "nxd_jax/checkpoint/test_safetensors.py::test_llama_both_ways",
    "nxd_jax/checkpoint/test_save_load.py::test_bfloat16_keeps_master_weights",
    "nxd_jax/checkpoint/test_save_load.py::test_interrupted_training_goes_on_bit_for_bit",
    "nxd_jax/checkpoint/test_save_load.py::test_state_dicts_on_the_cpu_keep_each_ranks_values",
    "nxd_jax/inspect",
    "nxd_jax/inspect/test_estimate.py::test_a_recorded_llama_does_what_the_formulas_say",
    "nxd_jax/inspect/test_estimate.py::test_a_recorded_mixture_does_what_the_formulas_say",
    "nxd_jax/inspect/test_timeline.py::test_as_many_are_kept_of_played_stages",
    "nxd_jax/inspect/test_timeline.py::test_numbers_are_those_of_a_step_that_is_not_measured",
    "nxd_jax/inspect/test_timeline.py::test_of_several_steps_the_least_time_of_each_computation_counts",
    "nxd_jax/inspect/test_timeline.py::test_the_last_step_of_that_model_counts",
    "nxd_jax/inspect/test_timeline.py::test_the_report_of_a_script_that_trains_a_pipeline",
    "nxd_jax/kernels",
    "nxd_jax/lightning",
    "nxd_jax/lora",
    "nxd_jax/modules/moe/test_balancer.py::test_a_hundred_steps",
    "nxd_jax/modules/moe/test_balancer.py::test_checkpoints_have_the_biases",
    "nxd_jax/modules/moe/test_balancer.py::test_layouts",
    "nxd_jax/modules/moe/test_expert_mlps.py::test_padding",
    "nxd_jax/modules/moe/test_load.py::test_a_log_of_stages",
    "nxd_jax/modules/moe/test_load.py::test_counting_compiles_no_more",
    "nxd_jax/modules/moe/test_load.py::test_what_is_computed_again_is_counted_once",
    "nxd_jax/modules/moe/test_pipeline_alone.py",
    "nxd_jax/optimizer/test_numbers.py",
    "nxd_jax/optimizer/test_zero_dcp_utils.py",
    "nxd_jax/parallel_layers/test_checkpointing.py::test_training_continues_bit_for_bit",
    "nxd_jax/pipeline/test_lora.py::test_a_resumed_run_lies_on_its_stage",
    "nxd_jax/pipeline/test_lora.py::test_adapters_in_files",
    "nxd_jax/pipeline/test_lora.py::test_meta_device_init",
    "nxd_jax/pipeline/test_lora.py::test_training",
    "nxd_jax/pipeline/test_pipeline.py::test_a_checkpoint_loads_in_other_layouts",
    "nxd_jax/pipeline/test_pipeline.py::test_dropout_is_drawn_again_by_activation_checkpoints",
    "nxd_jax/pipeline/test_read_tensors.py::test_gradients",
    "nxd_jax/pipeline/test_transformers.py::test_checkpointed_layers_and_sequences_without_a_mask",
    "nxd_jax/pipeline/test_transformers.py::test_decoders_train_as_in_eager_torch",
    "nxd_jax/quantization/test_checkpoint.py",
    "nxd_jax/test_ckpt_command.py",
    "nxd_jax/test_llama.py::test_same_weights_for_every_tp",
    "nxd_jax/test_llama.py::test_weights_go_to_hugging_face_and_back",
    "nxd_jax/test_moe_examples.py::test_a_bias_balances_mixtral_without_a_loss",
    "nxd_jax/test_moe_examples.py::test_weights_go_to_hugging_face_and_back",
    "nxd_jax/training/test_abstract_step.py",
    "nxd_jax/trainer/test_activation_checkpoint.py",
    "nxd_jax/trainer/test_footprint.py",
    "nxd_jax/trainer/test_meta_init.py",
    "nxd_jax/trainer/test_model.py::test_a_model_of_transformers",
    "nxd_jax/trainer/test_model.py::test_replay_by_variable",
    "nxd_jax/trainer/test_replay.py",
    "nxd_jax/training/lightning_modules/test_hf_models.py::test_a_step_equals_transformers",
    "nxd_jax/training/lightning_modules/test_megatron.py::test_a_step_equals_transformers",
    "nxd_jax/training/lightning_modules/test_megatron.py::test_mixed_precision_learns_about_what_float32_learns",
    "nxd_jax/training/lightning_modules/test_nlp_checkpoint_io.py",
    "nxd_jax/training/test_fixtures.py::test_parameter_norms_do_not_count_copies_of_context_parallel_ranks",
    "nxd_jax/training/test_fixtures.py::test_the_second_validation_is_of_its_own_batches",
    "nxd_jax/training/utils/test_model_checkpoint.py",
    "opinfo",
    "torch_bridge/generation/test_arguments.py::test_a_dynamic_cache_of_the_scripts",
    "torch_bridge/generation/test_generate.py::test_a_forward_of_the_instance_is_called",
    "torch_bridge/generation/test_generate.py::test_many_layers_are_no_loop",
    "torch_bridge/generation/test_generate.py::test_several_at_once",
    "torch_bridge/generation/test_generate.py::test_sliding_windows",
    "torch_bridge/generation/test_ranks.py::test_a_prompt_for_each",
    "torch_bridge/lowerings/test_batches.py",
    "torch_bridge/lowerings/test_ctc.py",
    "torch_bridge/lowerings/test_grid_sampler.py",
    "torch_bridge/lowerings/test_grouped_matmul.py",
    "torch_bridge/lowerings/test_grouped_mlp.py::test_gradients_of_gradients_and_vmap",
    "torch_bridge/lowerings/test_random.py",
    "torch_bridge/lowerings/test_special.py",
    "torch_bridge/lowerings/test_unpooling.py",
    "torch_bridge/lowerings/test_upsample.py",
    "torch_bridge/precision",
    "torch_bridge/ranks/test_aliasing.py",
    "torch_bridge/ranks/test_each_rank.py",
    "torch_bridge/ranks/test_functions.py",
    "torch_bridge/ranks/test_random_numbers.py",
    "torch_bridge/replay_programs",
    "torch_bridge/test_folding.py",
    "torch_bridge/test_func.py::test_gradient_penalty_of_a_convolutional_critic",
    "torch_bridge/test_func.py::test_gradient_penalty_of_a_transformer",
    "torch_bridge/test_gpu_attention.py",
    "torch_bridge/test_growth_hints.py",
    "torch_bridge/test_interrupts.py::test_while_recording_every_op_is_done_or_not",
    "torch_bridge/test_long_run.py",
    "torch_bridge/test_optimizer_checks.py",
    "torch_bridge/test_packed_sequences.py",
    "torch_bridge/test_programming_guide.py::test_full_bf16_with_stochastic_rounding",
    "torch_bridge/test_random_distributions.py",
    "torch_bridge/test_random_programs.py",
    "torch_bridge/test_recurrent_layers.py::test_gradients_of_gradients",
    "torch_bridge/test_replay.py::test_a_training_loop_compiles_as_often_as_without",
    "torch_bridge/test_replay.py::test_gradient_accumulation_with_and_without_a_step_between",
    "torch_bridge/test_replay.py::test_gradients_of_gradients",
    "torch_bridge/test_replay.py::test_optimized_module_in_a_checkpoint",
    "torch_bridge/test_replay_answers.py",
    "torch_bridge/test_replay_checkpoints.py",
    "torch_bridge/test_replay_gradients.py",
    "torch_bridge/test_replay_results.py",
    "torch_bridge/test_replay_uploads.py",
    "torch_bridge/test_replay_without_engine.py",
    "torch_bridge/test_step_hints.py",
    "torch_bridge/test_time_loops.py",
    "torch_bridge/test_to_optax_states.py",
)

PROCESSES: tuple[str, ...] = (
    "benchmarks/test_crash_checkpoints.py",
    "models/test_hf_fsdp.py",
    "models/test_hf_trainer.py",
    "notebooks",
    "nxd_jax/abstract/test_abstract_run.py::test_worlds_after_a_run_that_came_first",
    "nxd_jax/checkpoint/test_any_layout.py::test_real_processes",
    "nxd_jax/checkpoint/test_experts_processes.py",
    "nxd_jax/checkpoint/test_pipeline_kills.py",
    "nxd_jax/checkpoint/test_pipeline_torchrun.py",
    "nxd_jax/checkpoint/test_savers.py::test_a_tag_that_another_process_is_saving",
    "nxd_jax/checkpoint/test_savers.py::test_retention_leaves_what_another_process_is_saving",
    "nxd_jax/checkpoint/test_savers.py::test_the_last_save_in_the_background_fails",
    "nxd_jax/faults",
    "nxd_jax/inference/test_command.py::test_the_command_starts",
    "nxd_jax/inference/test_example.py",
    "nxd_jax/inference/test_model_files.py::test_experts_on_one_device",
    "nxd_jax/inference/test_model_files.py::test_in_another_process",
    "nxd_jax/inference/test_torchrun.py",
    "nxd_jax/inspect/test_command.py",
    "nxd_jax/inspect/test_docs.py::test_the_code_runs",
    "nxd_jax/inspect/test_dumps.py",
    "nxd_jax/inspect/test_pictures.py::test_nothing_of_pyplot_is_loaded",
    "nxd_jax/inspect/test_replay.py::test_the_command",
    "nxd_jax/lightning/test_linear.py",
    "nxd_jax/lightning/test_llama.py",
    "nxd_jax/lightning/test_oldest.py",
    "nxd_jax/lightning/test_one_lightning.py",
    "nxd_jax/lightning/test_torchrun.py",
    "nxd_jax/lightning/test_versions.py::test_a_malicious_release_is_not_even_looked_into",
    "nxd_jax/lora/test_torchrun.py",
    "nxd_jax/ls/test_command.py::test_terminals_that_lack_characters",
    "nxd_jax/modules/moe/test_load.py::test_processes_count_their_own_stages",
    "nxd_jax/modules/moe/test_moe_parallel_layers.py::test_processes_of_one_rank_give_what_one_process_gives",
    "nxd_jax/parallel_compile/test_command.py::test_the_run_after_it_compiles_nothing",
    "nxd_jax/parallel_layers/test_alone.py",
    "nxd_jax/parallel_layers/test_draws.py",
    "nxd_jax/parallel_layers/test_layers.py::test_processes_of_one_rank_give_what_one_process_gives",
    "nxd_jax/pipeline/test_comm.py::test_processes_of_one_rank",
    "nxd_jax/pipeline/test_comm.py::test_processes_of_two_ranks",
    "nxd_jax/modules/moe/test_torchrun.py",
    "nxd_jax/pipeline/test_torchrun.py",
    "nxd_jax/quantization/test_torchrun.py",
    "nxd_jax/test_ckpt_command.py::test_the_command_starts",
    "nxd_jax/test_interpreter.py::test_the_question_that_is_asked",
    "nxd_jax/test_later.py::test_a_script_that_goes_on_without",
    "nxd_jax/test_llama_training.py",
    "nxd_jax/test_moe_training.py",
    "nxd_jax/test_run.py::test_a_script_and_a_module",
    "nxd_jax/test_run.py::test_scripts_that_fail",
    "nxd_jax/test_run.py::test_the_same_numbers_under_torchrun",
    "nxd_jax/test_splits.py",
    "nxd_jax/top/test_command.py::test_live_while_jobs_start_end_and_are_killed",
    "nxd_jax/top/test_command.py::test_signals_leave_the_terminal_as_it_was",
    "nxd_jax/top/test_records.py::test_life_of_real_processes",
    "nxd_jax/top/test_records.py::test_the_command_starts_without_torch_and_jax",
    "nxd_jax/topology/test_topology.py::test_the_package_needs_no_jax_and_no_torch",
    "nxd_jax/training/converters/test_command.py::test_verify_compares_logits",
    "nxd_jax/training/data/megatron/test_index_maps.py::test_several_processes_at_once",
    "nxd_jax/training/data/test_making.py::test_a_killed_run",
    "nxd_jax/training/evaluation/test_evaluation.py::test_the_command",
    "nxd_jax/training/example/test_running.py",
    "nxd_jax/training/test_command.py::test_processes_train_as_one_does",
    "nxd_jax/training/test_command.py::test_the_installed_command_finds_users_code",
    "nxd_jax/training/test_command.py::test_train_iters_compile_and_going_on",
    "nxd_jax/training/test_command.py::test_users_own_orchestrators_run",
    "nxd_jax/trainer/test_footprint.py::test_seven_billion_parameters_on_a_trn1_32xlarge",
    "nxd_jax/trainer/test_package.py::test_importing_it_brings_no_checkpoints",
    "nxd_jax/training/utils/test_kills.py",
    "nxd_jax/training/utils/test_preemption.py",
    "nxd_jax/trace/test_model_files.py::test_another_process_without_the_models_code",
    "nxd_jax/trace/test_torchrun.py",
    "nxd_jax/utils/test_torchrun.py",
    "opinfo/test_workers.py",
    "test_examples.py",
    "test_many_machines.py",
    "test_readme.py::test_code_runs",
    "torch_bridge/aot/test_files.py::test_another_process_needs_no_code_of_the_model",
    "torch_bridge/aot/test_files.py::test_without_the_library_it_says_what_to_call",
    "torch_bridge/fsdp/test_processes.py",
    "torch_bridge/precision/test_rounding.py::test_a_second_process_gives_the_same",
    "torch_bridge/ranks/test_oracle.py",
    "torch_bridge/ranks/test_processes.py",
    "torch_bridge/ranks/test_random_numbers.py::test_the_first_number_of_a_rank_is_a_seed",
    "torch_bridge/ranks/test_sigterm.py",
    "torch_bridge/spmd/test_processes.py",
    "torch_bridge/test_boundaries.py",
    "torch_bridge/test_eager_mode.py::test_before_the_first_tensor",
    "torch_bridge/test_errors.py::test_really_out_of_memory",
    "torch_bridge/test_executables.py::test_a_second_process_with_eight_ranks",
    "torch_bridge/test_facade_aliasing.py",
    "torch_bridge/test_facade_backend.py::test_without_a_backend_scripts_for_the_cpu_have_gloo",
    "torch_bridge/test_facade_hlo.py::test_neuron_framework_debug",
    "torch_bridge/test_facade_hlo.py::test_xla_dump_to",
    "torch_bridge/test_facade_neuronx.py::test_submodules_of_utils_need_no_import",
    "torch_bridge/test_facade_profiler.py::test_the_end_of_a_script_waits_for_the_trace",
    "torch_bridge/test_facade_sharding.py::test_dtensor_says_so",
    "torch_bridge/test_fills.py::test_an_abstract_run_allocates_nothing",
    "torch_bridge/test_freed_memory.py::test_steps_do_not_ask_for_their_memory_again",
    "torch_bridge/test_fused_optimizers.py::test_optimizers_made_before_the_device",
    "torch_bridge/test_heap_gaps.py::test_steps_do_not_look_through_what_compiling_left",
    "torch_bridge/test_idle_heaps.py::test_threads_that_wait",
    "torch_bridge/test_interrupts.py::test_cpu_scripts_keep_pythons_handler",
    "torch_bridge/test_interrupts.py::test_scripts_keep_their_own_handler",
    "torch_bridge/test_isolation.py",
    "torch_bridge/test_library_fusions.py::test_functions_under_the_callers_jit_are_right",
    "torch_bridge/test_library_fusions.py::test_functions_warn_where_xla_read_its_flags_before",
    "torch_bridge/test_library_fusions.py::test_recorded_and_traced_programs_are_right",
    "torch_bridge/test_saving.py::test_files_can_be_read_without_the_bridge_once_on_the_cpu",
    "torch_bridge/test_termination.py",
    "torch_bridge/test_torch_compile.py::test_tracing_cpu_code_starts_no_jax",
    "torch_bridge/test_torch_kernels.py::test_a_second_process_finds_the_program_and_ends_while_it_runs",
    "torch_bridge/test_variables.py::test_a_script_sets_them_before_its_first_tensor",
)

THOROUGH: tuple[str, ...] = (
    "benchmarks/test_crash_checkpoints.py::test_a_few_kills",
    "nxd_jax/abstract/test_example.py::test_a_pipeline",
    "nxd_jax/abstract/test_pipeline.py::test_gpipe_keeps_every_micro_batch",
    "nxd_jax/abstract/test_pipeline.py::test_schedules",
    "nxd_jax/checkpoint/test_experts_processes.py::test_a_machine_that_is_killed",
    "nxd_jax/checkpoint/test_pipeline.py::test_from_layout_to_layout_and_back",
    "nxd_jax/checkpoint/test_pipeline_kills.py::test_successors_resume_from_the_newest_complete_tag",
    "nxd_jax/checkpoint/test_query_heads.py::test_same_function_for_any_number_of_copies",
    "nxd_jax/inspect/test_memory.py::test_predicted_is_what_the_executable_needs",
    "nxd_jax/inspect/test_pipeline_inspection.py::test_a_real_run_shows_what_shapes_do",
    "nxd_jax/inspect/test_pipeline_inspection.py::test_idle_time_is_the_schedules",
    "nxd_jax/inspect/test_timeline.py::test_of_several_steps_the_least_time_of_each_computation_counts",
    "nxd_jax/inspect/test_watching.py::test_the_report_of_ranks",
    "nxd_jax/lightning/test_experts.py::test_fit",
    "nxd_jax/modules/moe/test_balancer.py::test_a_hundred_steps",
    "nxd_jax/modules/moe/test_balancer.py::test_checkpoints_have_the_biases",
    "nxd_jax/modules/moe/test_balancer.py::test_layouts",
    "nxd_jax/modules/moe/test_load.py::test_processes_count_their_own_stages",
    "nxd_jax/modules/moe/test_torchrun.py::test_several_processes",
    "nxd_jax/parallel_layers/test_draws.py::test_one_process_and_four_draw_the_same",
    "nxd_jax/trainer/test_footprint.py::test_experts_take_as_much",
    "nxd_jax/training/converters/test_memory.py::test_memory_of_the_largest_tensor",
    "nxd_jax/training/lightning_modules/test_megatron.py::test_dropout",
    "nxd_jax/training/lightning_modules/test_megatron.py::test_mixed_precision_learns_about_what_float32_learns",
    "nxd_jax/training/test_alignment.py::test_a_training_that_goes_on_keeps_the_first_reference",
    "nxd_jax/training/test_alignment.py::test_adapters",
    "nxd_jax/training/test_alignment.py::test_documents_of_a_row_do_not_see_each_other",
    "nxd_jax/training/test_alignment.py::test_weights_of_another_run_are_where_fine_tuning_begins",
    "nxd_jax/training/test_command.py::test_train_iters_compile_and_going_on",
    "nxd_jax/training/test_command.py::test_users_own_orchestrators_run",
    "nxd_jax/training/test_fixtures.py::test_parameter_norms_do_not_count_copies_of_context_parallel_ranks",
    "nxd_jax/training/test_fixtures.py::test_precisions",
    "nxd_jax/training/test_fixtures.py::test_the_second_validation_is_of_its_own_batches",
    "nxd_jax/training/utils/test_model_checkpoint.py::test_on_s3",
    "nxd_jax/training/utils/test_preemption.py::test_both_end_and_go_on",
    "torch_bridge/lowerings/test_grouped_mlp.py::test_gradients_of_gradients_and_vmap",
    "torch_bridge/test_long_run.py::test_memory_stays_flat_over_thousands_of_steps",
    "torch_bridge/test_replay_checkpoints.py::test_reentrant_among_other_gradients",
)
"""Functions that `make test-all` runs, and whoever asks for them: they take a tenth of a minute and more, and the tiers test most of what they test."""

TABLE: dict[str, str] = {name: tier for tier, names in zip(TIERS, (CORE, DEEP, PROCESSES), strict=True) for name in names}


def tier_of(place: str) -> str:
    """The tier of `folder`, `folder/test_file.py` or `folder/test_file.py::test_function`, by the tables alone."""
    return next((TABLE[name] for name in _wider(place) if name in TABLE), "core")


def tiers_in(place: str) -> set[str]:
    """The tiers that tests of a file or folder can be in. Marks may move cases from core to deep."""
    if place in ("", "."):
        return set(TIERS)
    found = {tier_of(place)} | {tier for name, tier in TABLE.items() if place in _wider(name)}
    return found | {"deep"} if "core" in found else found


def _wider(place: str) -> Iterator[str]:
    """A place and those around it, narrowest first."""
    path, colons, _ = place.partition("::")
    if colons:
        yield place
    while path not in ("", "."):
        yield path
        path = path.rpartition("/")[0]


def place_of(item: Any) -> str:
    """`folder/test_file.py::test_function` of a collected test."""
    path, _, name = item.nodeid.partition("[")[0].partition("::")
    return f"{path.removeprefix('tests/')}::{name}"


class Selection:
    """Which of the collected tests run.

    taken: seconds and cases by file and function (`durations.known`); a function without a number has no limit, unless its whole file has none.
    few: those that run without `--all`. tiers: the tier of each test, thorough cases too. beyond: those of `few` that take too long for their tier.
    """

    def __init__(self, items: Sequence[Any], taken: Mapping[str, Mapping[str, tuple[float, int]]]):
        functions: dict[str, list[Any]] = {}
        for item in items:
            functions.setdefault(place_of(item), []).append(item)
        self.few: set[Any] = set()
        self.beyond: set[Any] = set()
        self.tiers: dict[Any, str] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        longest = _longest(functions, taken)
        for place, cases in functions.items():
            few = [] if place in THOROUGH else _kept(cases, "thorough")
            self.few.update(few)
            file = _file(place)
            each = _each(place, taken)
            tier = tier_of(place)
            core = _within(_kept(few, "core"), each, "core", 1) if tier == "core" and each <= longest[file] else []
            tier = "deep" if tier == "core" else tier
            self.tiers.update(dict.fromkeys(cases, tier) | dict.fromkeys(core, "core"))
            rest = [case for case in few if self.tiers[case] == tier]
            within = _within(rest, each, tier, 0 if core else 1)
            self.beyond.update(set(rest) - set(within))
            for name, ran in (("core", core), (tier, within)):
                self._seconds[file, name] = self._seconds.get((file, name), 0.0) + each * len(ran)

    def runs(self, item: Any, everything: bool, tier: str = "all") -> bool:
        """Whether a test runs. everything: thorough cases too. tier: of this tier alone, within its limits."""
        if tier == "all":
            return everything or item in self.few
        return tier == self.tiers[item] and (everything or (item in self.few and item not in self.beyond))

    def in_share(self, item: Any, number: int, count: int) -> bool:
        """Whether a test is in this one of so many shares. Files that take little are in all."""
        file = _file(place_of(item))
        return self._seconds[file, self.tiers[item]] < SHARED or zlib.crc32(file.encode()) % count == number


def _file(place: str) -> str:
    return place.partition("::")[0]


def _each(place: str, taken: Mapping[str, Mapping[str, tuple[float, int]]]) -> float:
    """Seconds of a case of a function."""
    file, _, function = place.partition("::")
    seconds, measured = taken[file].get(function, (0.0, 1)) if file in taken else (UNKNOWN, 1)
    return seconds / measured


def _longest(places: Iterable[str], taken: Mapping[str, Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """By file, seconds that a core case of it may take: as long as its quickest function does, if that is longer than others may be."""
    quickest: dict[str, float] = {}
    for place in places:
        quickest.setdefault(_file(place), LONGEST_ALONE)
        if tier_of(place) == "core" and place not in THOROUGH:
            quickest[_file(place)] = min(quickest[_file(place)], _each(place, taken))
    return {file: max(LONGEST, seconds) for file, seconds in quickest.items()}


def share_of(text: str) -> tuple[int, int]:
    """K and N of "K/N", K from 0 on. Raises ValueError for anything else."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--share {text}: give K/N with 0 <= K < N, the K-th of N shares")
    return int(number), int(count)


def _kept(cases: Sequence[Any], name: str) -> list[Any]:
    """The cases of a function without a mark, and those that the mark keeps (`keep`, none if it does not say), spread over all that have it."""
    marks = {case: mark for case in cases if (mark := case.get_closest_marker(name)) is not None}
    marked = list(marks)
    left = set(_spread(marked, marks[marked[0]].kwargs.get("keep", 0))) if marked else set()
    return [case for case in cases if case not in marks or case in left]


def _within(cases: Sequence[Any], each: float, tier: str, least: int) -> list[Any]:
    """As many cases as take the tier's limit, at least that many, if a case takes `each` seconds."""
    return _spread(cases, max(least, int(SECONDS[tier] / each))) if each else list(cases)


def _spread(cases: Sequence[Any], count: int) -> list[Any]:
    count = min(count, len(cases))
    return [cases[k * len(cases) // count] for k in range(count)]
