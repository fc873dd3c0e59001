# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The options of every trainer: honoured, refused or irrelevant. The checks, `docs/options.md` and the tests read it.

`OPTIONS` has one table for each config class. A table lists what its class adds to the class before it, or treats
differently; [`options_of`] puts them together. A key holds one name or several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Honoured:
    """Works as documented, which the test shows (`file::function` in `tests/`)."""

    test: str


@dataclass(frozen=True)
class Refused:
    """Only the allowed values pass, the default first; the remedy says why others do not, or what to do instead."""

    remedy: str
    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class Irrelevant:
    """Folding changes nothing about it, or it has no effect, for this reason."""

    reason: str


Option = Honoured | Refused | Irrelevant

_DIFFUSION_TESTS = "diffusion/test_diffusion_trainer.py"
_EAGLE3_TESTS = "eagle3/test_trainer.py"
_LOSS_TERM = Irrelevant("a number in TRL's loss, which sees the log-probs of the unfolded rows")
_GENERATION = Irrelevant("says how completions are generated; they are folded as they come")
_REWARDS = Irrelevant("makes rewards and advantages, before the forward that is folded")
_LOADING = Irrelevant("says how the model is loaded; it is checked afterwards")
_LOGGING = Irrelevant("says what is logged, and where to")
_NO_LOGITS = "no logits are kept, so there is nothing to compute metrics from"
_ALL_RANKS = Refused("the loss is normalised over all ranks", (True,))
_ENGINE = Irrelevant("wraps the model from outside; the engines that would cut a sequence are refused")


# What no trainer here touches.
_TRAINER: dict[str, Option] = {
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules "
    "weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm": Irrelevant(
        "acts on parameters and their gradients, which are those of the branches"
    ),
    "max_steps num_train_epochs": Irrelevant("counts steps and epochs"),
    "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
    "disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
    "skip_memory_metrics": _LOGGING,
    "output_dir save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint "
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
    "restore_callback_states_from_checkpoint ignore_data_skip": Irrelevant(
        "says what is saved and restored: the model, which has no tree in it, and Trainer's state"
    ),
    "eval_strategy eval_steps eval_delay eval_on_start load_best_model_at_end metric_for_best_model "
    "greater_is_better": Irrelevant("says when evaluation runs, and which of its numbers counts"),
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
    "batch_eval_metrics label_names": Irrelevant("concerns the outputs that Trainer keeps for `compute_metrics`"),
    "do_train do_eval do_predict resume_from_checkpoint local_rank": Irrelevant("read by scripts, not by trainers"),
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order": Irrelevant("says how batches are loaded, not which"),
    "seed data_seed full_determinism": Irrelevant("seeds random draws; the fold draws nothing"),
    "use_cpu tf32 fp16 fp16_full_eval bf16_full_eval torch_empty_cache_steps debug": Irrelevant(
        "a device, a precision or a probe of the whole model, trees or not"
    ),
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
    "ddp_timeout": Irrelevant("says how ranks exchange gradients"),
    "use_cache": Irrelevant("the tree path keeps no cache; generation does as always"),
    "include_num_input_tokens_seen": Irrelevant("counts the tokens of batches as the collator makes them"),
    "auto_find_batch_size": Irrelevant("starts anew with smaller batches, which are as exact"),
    "torch_compile_backend torch_compile_mode": Irrelevant("belongs to `torch_compile`"),
    "liger_kernel_config": Irrelevant("belongs to `use_liger_kernel`, which is refused"),
    "use_liger_kernel": Refused(
        "Liger replaces parts of the model when training starts, after it was checked", (False,)
    ),
}

# `TrainingArguments` under `TreeLossMixin`, and of the trainers that derive from it.
_TREE_LOSS: dict[str, Option] = {
    "label_smoothing_factor": Refused("label smoothing needs the full logits", (0.0,)),
    "neftune_noise_alpha": Refused("a shared token draws one noise for all its branches", (None, 0)),
    "average_tokens_across_devices": _ALL_RANKS,
    "train_sampling_strategy": Honoured("trainers/test_strategies.py::test_every_row_counts_once"),
    "length_column_name": Irrelevant("rows are sorted by what they cost, not by a column"),
    "per_device_train_batch_size gradient_accumulation_steps": Honoured(
        "trainers/test_sft.py::test_step_is_normalised_over_accumulation"
    ),
    "per_device_eval_batch_size": Honoured("trainers/test_sft.py::test_evaluation_does_not_depend_on_the_batch_size"),
    "logging_steps": Honoured("trainers/test_sft.py::test_logged_numbers"),
    "bf16": Honoured("trainers/test_sft.py::test_autocast"),
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
    "gradient_checkpointing_kwargs": Honoured("trainers/test_sft.py::test_checkpointing_changes_nothing"),
    "torch_compile": Honoured("trainers/test_option_values.py::test_a_compiled_model_under_the_mixin"),
    "accelerator_config parallelism_config": Honoured("trainers/test_engines.py::test_engines_are_refused"),
    "fsdp fsdp_config": Honoured("trainers/test_engines.py::test_fsdp2"),
    "deepspeed": Honoured("trainers/test_engines.py::test_zero"),
    "dataloader_drop_last": Honoured("trainers/test_uneven_steps.py::test_an_evaluation_is_of_all_rows"),
    "remove_unused_columns": Honoured(
        "trainers/test_sft.py::test_a_plain_trainer_whose_batches_are_no_trees_says_what_they_lack"
    ),
}

# What the two trainers that derive from `SFTTrainer` have in common.
_SFT: dict[str, Option] = {
    "model_init_kwargs trust_remote_code": _LOADING,
    "packing_strategy": Irrelevant("belongs to `packing`, which is refused"),
    "dataset_text_field": Irrelevant("plain text has neither branches nor turns"),
    "torch_compile_backend torch_compile_mode": Irrelevant("belongs to `torch_compile`, which is refused"),
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "label_names": Irrelevant(_NO_LOGITS),
    "batch_eval_metrics": Refused(_NO_LOGITS, (False,)),
    "include_for_metrics": Refused(_NO_LOGITS, ([], None)),
    "assistant_only_loss": Refused("every assistant turn is supervised already, and nothing else", (False,)),
    "pad_token": Refused("set `processing_class.pad_token`", (None,)),
    "activation_offloading": Honoured("gpu/test_offloading.py::test_sft"),
    "dataset_num_proc": Honoured("data/test_datasets.py::test_two_processes_and_streaming_give_the_same"),
    "eos_token chat_template_path": Irrelevant("changes the tokenizer before the data is prepared"),
    "shuffle_dataset": Irrelevant("shuffles the prepared rows, with `seed`"),
}

# `SFTConfig` under `TreeLossMixin`, and of `TreeSFTTrainer`.
_SFT_TREES: dict[str, Option] = {
    "packing": Refused(
        "trees are packed by `per_device_train_batch_size`: all trees of a batch become one row", (False,)
    ),
    "eval_packing": Refused("trees are packed by `per_device_eval_batch_size`", (None,)),
    "padding_free": Refused("rows of trees hold next to no padding", (False,)),
    "completion_only_loss": Refused(
        "completions are supervised and prompts are not; pass `branches` for other weights", (None,)
    ),
    "loss_type": Refused(
        "the loss of shared tokens is weighted, which is defined for the negative log-likelihood only", ("nll",)
    ),
    "truncation_mode": Refused("branches share their start", ("keep_start",)),
    "torch_compile": Refused("compiling the whole model is not tested on trees; use `compile_layers=True`", (False,)),
    "router_aux_loss_coef": Honoured("trainers/test_modes.py::test_a_routers_auxiliary_loss_is_a_mean_over_branches"),
    "max_length dataset_kwargs": Irrelevant("concerns TRL's preparation, which batches of trees skip"),
    "pad_to_multiple_of": Irrelevant("belongs to TRL's collator"),
}

_TREE_SFT: dict[str, Option] = {
    "dataloader_num_workers": Honoured("trainers/test_sft.py::test_workers"),
    "save_strategy resume_from_checkpoint": Honoured("trainers/test_sft.py::test_saving_and_resuming"),
    "max_length overlong": Honoured("data/test_datasets.py::test_long_branches"),
    "pad_to_multiple_of": Honoured("trainers/test_options.py::test_padding_token_and_multiple"),
    "dataset_kwargs": Honoured("trainers/test_options.py::test_options_of_a_preparation_that_is_skipped"),
    "weighting": Honoured("trainers/test_modes.py::test_grouped_is_the_tree"),
    "reasoning": Honoured("data/test_conversations.py::test_side_leaf"),
    "chat_template_kwargs column_names empty_thinking_in_prompt": Honoured(
        "trainers/test_sft.py::test_options_of_conversations"
    ),
    "group_by": Honoured("data/test_datasets.py::test_rows_of_a_group_become_one_tree_wherever_they_are"),
    "on_error": Honoured("data/test_datasets.py::test_a_bad_row_stops_or_is_skipped"),
    "max_packed_tokens overflow": Honoured("trainers/test_split.py::test_one_step_with_splitting_on_and_off"),
    "pack_trees": Honoured("data/test_packed.py::test_packed_rows_hold_the_whole_trees"),
    "selection_metric selection_num_proc": Honoured("data/test_selection.py::test_ratios_order_the_prepared_trees"),
    "max_examples": Honoured("trainers/test_sft.py::test_only_the_training_dataset_is_selected_from"),
    "mode": Honoured("trainers/test_modes.py::test_grouped_trains_the_same"),
    "attn_backend": Honoured("model/test_backends.py::test_the_kernel_that_was_chosen_is_what_runs"),
    "compile_layers": Honoured("trainers/test_engines.py::test_compiled_layers"),
}

_DIFFUSION: dict[str, Option] = {
    "packing": Refused("samples of a row would see each other", (False,)),
    "eval_packing": Refused("samples of a row would see each other", (None, False)),
    "padding_free": Refused("samples of a row would see each other", (False,)),
    "completion_only_loss": Refused("completions are supervised and prompts are not", (None, True)),
    "loss_type": Refused("the loss is that of the `objective`", ("nll",)),
    "label_smoothing_factor": Refused("the loss is that of the `objective`", (0.0,)),
    "neftune_noise_alpha": Refused("the noise of diffusion is in the tokens", (None, 0)),
    "truncation_mode": Refused("a response is cut at its end", ("keep_start",)),
    "torch_compile": Refused("compiling the whole model is not tested", (False,)),
    "average_tokens_across_devices": _ALL_RANKS,
    "train_sampling_strategy": Honoured(f"{_DIFFUSION_TESTS}::test_samplers_that_need_lengths"),
    "length_column_name": Irrelevant("rows are sorted by their own lengths, not by a column"),
    "per_device_train_batch_size gradient_accumulation_steps": Honoured(
        f"{_DIFFUSION_TESTS}::test_accumulation_changes_nothing"
    ),
    "per_device_eval_batch_size": Honoured(f"{_DIFFUSION_TESTS}::test_evaluation_is_over_the_whole_set"),
    "logging_steps": Honoured(f"{_DIFFUSION_TESTS}::test_a_second_training_logs_its_own_steps"),
    "seed data_seed": Honoured(
        "diffusion/test_diffusion_noise.py::test_another_in_every_epoch_and_under_another_seed"
    ),
    "bf16": Honoured(f"{_DIFFUSION_TESTS}::test_bf16_divides_by_the_same_count"),
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
    "router_aux_loss_coef": Honoured(f"{_DIFFUSION_TESTS}::test_checkpointing_and_the_router_of_experts"),
    "accelerator_config parallelism_config": Honoured(f"{_DIFFUSION_TESTS}::test_engines_are_refused"),
    "fsdp fsdp_config": Honoured(f"{_DIFFUSION_TESTS}::test_fsdp2_is_told_to_round_no_log_prob"),
    "deepspeed": _ENGINE,
    "dataloader_drop_last": Honoured("trainers/test_uneven_steps.py::test_an_evaluation_is_of_all_rows"),
    "remove_unused_columns": Irrelevant("the columns that are read are kept"),
    "dataset_kwargs": Honoured(f"{_DIFFUSION_TESTS}::test_wrong_arguments_are_refused"),
    "pad_to_multiple_of": Honoured(
        "diffusion/test_diffusion_collator.py::test_random_parameters_equal_the_transcription"
    ),
    "max_length": Honoured(f"{_DIFFUSION_TESTS}::test_samples_cut_to_nothing_supervised_are_left_out_and_counted"),
    "chat_template_kwargs": Honoured(f"{_DIFFUSION_TESTS}::test_texts_become_samples_that_end_with_the_response"),
    "objective alpha": Honoured(f"{_DIFFUSION_TESTS}::test_the_logged_loss_is_that_of_the_notes"),
    "block_size response_window supervise_padding": Honoured(
        "diffusion/test_diffusion_collator.py::test_random_parameters_equal_the_transcription"
    ),
    "mask_token_id": Honoured(f"{_DIFFUSION_TESTS}::test_the_mask_token"),
    "corruption": Honoured("diffusion/test_diffusion_noise.py::test_every_kind"),
    "half_life": Honoured("diffusion/test_corruption.py::test_weights"),
    "noise_eps": Honoured("diffusion/test_corruption.py::test_levels_of_whole_sequences"),
    "eval_noise_draws": Honoured(f"{_DIFFUSION_TESTS}::test_evaluation_is_over_the_whole_set"),
    "attn_backend": Honoured(f"{_DIFFUSION_TESTS}::test_flex_trains_as_the_dense_mask"),
}

_EAGLE3: dict[str, Option] = {
    "label_smoothing_factor": Refused("the draft learns the target's distribution, not labels", (0.0,)),
    "neftune_noise_alpha": Refused("the draft's inputs are the target's states", (None, 0)),
    "average_tokens_across_devices": _ALL_RANKS,
    "train_sampling_strategy": Honoured(f"{_EAGLE3_TESTS}::test_samplers_that_need_lengths"),
    "length_column_name": Irrelevant("rows are sorted by their own lengths, not by a column"),
    "torch_compile": Refused("compiling the whole draft is not tested", (False,)),
    "per_device_train_batch_size gradient_accumulation_steps": Honoured(
        f"{_EAGLE3_TESTS}::test_the_loss_is_normalised_over_the_optimizer_step"
    ),
    "per_device_eval_batch_size": Honoured(f"{_EAGLE3_TESTS}::test_evaluation_does_not_depend_on_the_batch_size"),
    "logging_steps": Honoured(f"{_EAGLE3_TESTS}::test_sums_of_a_window_that_was_not_logged_are_forgotten"),
    "bf16": Honoured(f"{_EAGLE3_TESTS}::test_streams_and_autocast"),
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
    "gradient_checkpointing_kwargs": Honoured("eagle3/test_draft.py::test_chunks_and_checkpointing_change_nothing"),
    "resume_from_checkpoint": Honoured(f"{_EAGLE3_TESTS}::test_a_checkpoint_is_resumed"),
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
    "batch_eval_metrics label_names": Irrelevant(_NO_LOGITS),
    "accelerator_config parallelism_config": _ENGINE,
    "fsdp fsdp_config": Honoured(f"{_EAGLE3_TESTS}::test_fsdp2_is_told_to_round_no_loss"),
    "deepspeed": _ENGINE,
    "dataloader_drop_last": Honoured("trainers/test_uneven_steps.py::test_an_evaluation_is_of_all_rows"),
    "remove_unused_columns": Irrelevant("the columns that are read are kept"),
    "draft_vocab_size target_model_init_kwargs": Honoured(
        f"{_EAGLE3_TESTS}::test_a_draft_is_made_for_the_target_and_only_the_draft_is_saved"
    ),
    "selected_token_ids_path": Honoured("eagle3/test_token_mapping.py::test_round_trip"),
    "aux_layer_ids": Honoured(f"{_EAGLE3_TESTS}::test_other_targets"),
    "ttt_steps step_decay": Honoured("eagle3/test_draft.py::test_the_loss_equals_the_transcription"),
    "seq_length packed_sequence_size": Honoured(f"{_EAGLE3_TESTS}::test_packed_and_padded_training_agree"),
    "packing_strategy dataset_num_proc": Honoured(
        "eagle3/test_eagle3_packing.py::test_datasets_in_one_process_in_two_and_as_a_stream"
    ),
    "supervise_reasoning reasoning_end": Honoured(
        "eagle3/test_eagle3_packing.py::test_reasoning_can_be_left_unsupervised"
    ),
    "attn_backend": Honoured("eagle3/test_draft.py::test_training_with_flex_equals_training_with_dense_attention"),
}

# What scores padded rows through the folded forward: GRPO, RLOO, DPO, KTO.
_FOLDED: dict[str, Option] = {
    "model_init_kwargs trust_remote_code": _LOADING,
    "label_smoothing_factor average_tokens_across_devices": Irrelevant("TRL's loss does not read it"),
    "remove_unused_columns length_column_name dataloader_drop_last": Irrelevant(
        "says which rows meet in a batch; batches are folded as they come"
    ),
    "logging_steps": _LOGGING,
    "bf16": Honoured("trainers/test_tree_grpo.py::test_mixed_precision_with_a_reference_model"),
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
    "gradient_checkpointing_kwargs": Honoured(
        "trainers/test_folded_forward.py::test_gradient_checkpointing_changes_nothing"
    ),
    "torch_compile": Honoured("trainers/test_tree_grpo.py::test_compiling_the_whole_model_is_said_to_fold_nothing"),
    "accelerator_config parallelism_config": Honoured("trainers/test_tree_dpo.py::test_refuses_context_parallelism"),
    "fsdp fsdp_config": Honoured("trainers/test_folded_forward.py::test_wrapped_for_data_parallel_training"),
    "deepspeed": _ENGINE,
    "disable_dropout": Irrelevant("switches dropout off before the model is prepared"),
    "router_aux_loss_coef": Honoured(
        "trainers/test_folded_forward.py::test_router_loss_counts_a_shared_token_once_per_row"
    ),
}

_POLICY: dict[str, Option] = {
    "neftune_noise_alpha": Refused(
        "each row draws noise of its own, so that nothing could be folded; use TRL's trainer", (None, 0)
    ),
    "auto_find_batch_size": Irrelevant("TRL refuses it"),
    "train_sampling_strategy": Irrelevant("TRL has a sampler of its own"),
    "per_device_train_batch_size gradient_accumulation_steps steps_per_generation num_generations": Honoured(
        "trainers/test_tree_grpo.py::test_windows_that_do_not_match_generations"
    ),
    "per_device_eval_batch_size": Honoured("trainers/test_tree_grpo.py::test_evaluation"),
    "num_generations_eval max_completion_length ds3_gather_for_generation top_p top_k min_p generation_kwargs "
    "chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl "
    "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
    "vllm_tensor_parallel_size": _GENERATION,
    "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged": Honoured(
        "trainers/test_tree_grpo.py::test_continuous_batching"
    ),
    "temperature mask_truncated_completions": Honoured("trainers/test_tree_grpo.py::test_generated_completions"),
    "reward_weights": _REWARDS,
    "shuffle_dataset": Irrelevant("says which rows meet in a batch; batches are folded as they come"),
    "log_completions log_multimodal num_completions_to_print log_unique_prompts": _LOGGING,
}

_GRPO: dict[str, Option] = {
    "loss_type importance_sampling_level off_policy_mask_threshold": Honoured(
        "trainers/test_tree_grpo.py::test_equals_stock"
    ),
    "beta num_iterations epsilon": Honoured("trainers/test_tree_grpo.py::test_equals_stock"),
    "epsilon_high delta use_bias_correction_kl scale_rewards multi_objective_aggregation generation_batch_size "
    "pad_to_multiple_of sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": Honoured(
        "trainers/test_option_values.py::test_grpo"
    ),
    "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg": _LOSS_TERM,
    "top_entropy_quantile entropy_coef": Honoured(
        "trainers/test_tree_grpo.py::test_micro_batches_that_stay_are_said_once"
    ),
    "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target": Honoured(
        "trainers/test_option_values.py::test_an_entropy_bonus_that_adapts"
    ),
    "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_clip_min vllm_importance_sampling_cap": Honoured(
        "trainers/test_option_values.py::test_log_probs_of_vllm"
    ),
    "cast_lm_head_to_fp32": Honoured(
        "trainers/test_folded_forward.py::test_temperature_scale_softcap_and_float32_head_are_those_of_the_fused_head"
    ),
    "max_tool_calling_iterations": _GENERATION,
    "log_completions_hub_repo": _LOGGING,
}

_RLOO: dict[str, Option] = {
    "beta num_iterations epsilon": Honoured("trainers/test_tree_rloo.py::test_equals_stock"),
    "normalize_advantages": Honoured("trainers/test_tree_rloo.py::test_equals_stock"),
    "epsilon_high reward_clip_range generation_batch_size pad_to_multiple_of sync_ref_model ref_model_mixup_alpha "
    "ref_model_sync_steps": Honoured("trainers/test_option_values.py::test_rloo"),
}

_PREFERENCE: dict[str, Option] = {
    "neftune_noise_alpha": Honoured("trainers/test_option_values.py::test_noise_on_embeddings_is_that_of_trl"),
    "train_sampling_strategy max_length pad_to_multiple_of": Honoured(
        "trainers/test_option_values.py::test_other_batches"
    ),
    "dataset_num_proc": Irrelevant("says how rows are tokenized; batches are folded as they come"),
    "activation_offloading": Honoured("gpu/test_offloading.py::test_preferences"),
    "precompute_ref_log_probs precompute_ref_batch_size": Honoured(
        "trainers/test_option_values.py::test_reference_log_probs_in_other_batches"
    ),
}

_DPO: dict[str, Option] = {
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps": Honoured(
        "trainers/test_tree_dpo.py::test_five_steps_are_those_of_trl"
    ),
    "use_weighting ld_alpha": Honoured("trainers/test_tree_dpo.py::test_five_steps_are_those_of_trl"),
    "padding_free": Irrelevant("TRL 1.16 ignores it, with a warning"),
    "pad_token": Irrelevant("sets the tokenizer's padding token, which is never folded"),
    "loss_type loss_weights label_smoothing beta f_divergence_type f_alpha_divergence_coef discopop_tau "
    "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": Honoured("trainers/test_option_values.py::test_dpo"),
    "truncation_mode": Honoured("trainers/test_option_values.py::test_other_batches"),
}

_KTO: dict[str, Option] = {
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps": Honoured(
        "trainers/test_tree_kto.py::test_five_steps_are_those_of_trl"
    ),
    "loss_type": Honoured("trainers/test_tree_kto.py::test_five_steps_are_those_of_trl"),
    "beta desirable_weight undesirable_weight sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": Honoured(
        "trainers/test_option_values.py::test_kto"
    ),
}


def _merged(*tables: dict[str, Option]) -> dict[str, Option]:
    """One name per key; later tables come first."""
    return {name: option for table in tables for names, option in table.items() for name in names.split()}


# By the name of the config class. `TrainingArguments` and `SFTConfig` are those of a trainer under `TreeLossMixin`.
OPTIONS: dict[str, dict[str, Option]] = {
    "TrainingArguments": _merged(_TRAINER, _TREE_LOSS),
    "SFTConfig": _merged(_TRAINER, _TREE_LOSS, _SFT, _SFT_TREES),
    "TreeSFTConfig": _merged(_TRAINER, _TREE_LOSS, _SFT, _SFT_TREES, _TREE_SFT),
    "GRPOConfig": _merged(_TRAINER, _FOLDED, _POLICY, _GRPO),
    "RLOOConfig": _merged(_TRAINER, _FOLDED, _POLICY, _RLOO),
    "DPOConfig": _merged(_TRAINER, _FOLDED, _PREFERENCE, _DPO),
    "KTOConfig": _merged(_TRAINER, _FOLDED, _PREFERENCE, _KTO),
    "DiffusionSFTConfig": _merged(_TRAINER, _SFT, _DIFFUSION),
    "Eagle3Config": _merged(_TRAINER, _EAGLE3),
}


def refuse_options(args: Any) -> None:
    """
    Refuses options that a trainer does not serve.

    Args:
        args (`TrainingArguments`): Of a class of [`OPTIONS`], or of one that derives from it.

    Raises:
        `ValueError`: Names the option, its value and the remedy.
    """
    table = next(OPTIONS[parent.__name__] for parent in type(args).__mro__ if parent.__name__ in OPTIONS)
    for name, option in table.items():
        if not isinstance(option, Refused):
            continue
        value = getattr(args, name)
        if value not in option.allowed:
            raise ValueError(
                f"`{name}={value!r}` is not supported: {option.remedy}. Leave it at "
                f"{' or '.join(map(repr, option.allowed))}."
            )
