# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The options of every trainer: honoured, refused or irrelevant. The checks, `docs/options.md` and the tests read it.

`OPTIONS` has one table for each config class, put together from the tables below. A line of a table holds a test, the
allowed values and a remedy, or a reason; then the names of the options.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
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

# Options that no trainer here touches.
_TRAINER = """
(False,) Liger replaces parts of the model when training starts, after it was checked: use_liger_kernel
acts on parameters and their gradients, which are those of the branches: learning_rate lr_scheduler_type
  lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2
  adam_epsilon max_grad_norm
counts steps and epochs: max_steps num_train_epochs
says what is logged, and where to: logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter
  log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
  trackio_static_space_id skip_memory_metrics
says what is saved and restored: the model, which has no tree in it, and Trainer's state: output_dir save_only_model
  save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
  hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision restore_callback_states_from_checkpoint
  ignore_data_skip
says when evaluation runs, and which of its numbers counts: eval_strategy eval_steps eval_delay eval_on_start
  load_best_model_at_end metric_for_best_model greater_is_better
concerns the outputs that Trainer keeps for `compute_metrics`: prediction_loss_only eval_do_concat_batches
  eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics label_names
read by scripts, not by trainers: do_train do_eval do_predict resume_from_checkpoint local_rank
says how batches are loaded, not which: dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
  dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
seeds random draws; the fold draws nothing: seed data_seed full_determinism
a device, a precision or a probe of the whole model, trees or not: use_cpu tf32 fp16 fp16_full_eval bf16_full_eval
  torch_empty_cache_steps debug
says how ranks exchange gradients: ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
  ddp_backend ddp_timeout
the tree path keeps no cache; generation does as always: use_cache
counts the tokens of batches as the collator makes them: include_num_input_tokens_seen
starts anew with smaller batches, which are as exact: auto_find_batch_size
belongs to `torch_compile`: torch_compile_backend torch_compile_mode
belongs to `use_liger_kernel`, which is refused: liger_kernel_config
"""

# `TrainingArguments` under `TreeLossMixin`, and of the trainers that derive from it.
_TREE_LOSS = """
(0.0,) label smoothing needs the full logits: label_smoothing_factor
(None, 0) a shared token draws one noise for all its branches: neftune_noise_alpha
(True,) the loss is normalised over all ranks: average_tokens_across_devices
trainers/test_strategies.py::test_every_row_counts_once: train_sampling_strategy
trainers/test_sft.py::test_step_is_normalised_over_accumulation: per_device_train_batch_size
  gradient_accumulation_steps
trainers/test_sft.py::test_evaluation_does_not_depend_on_the_batch_size: per_device_eval_batch_size
trainers/test_sft.py::test_logged_numbers: logging_steps
trainers/test_sft.py::test_autocast: bf16
trainers/test_sft.py::test_checkpointing_changes_nothing: activation_checkpointing activation_checkpointing_kwargs
  gradient_checkpointing gradient_checkpointing_kwargs
trainers/test_option_values.py::test_a_compiled_model_under_the_mixin: torch_compile
trainers/test_engines.py::test_engines_are_refused: accelerator_config parallelism_config
trainers/test_engines.py::test_fsdp2: fsdp fsdp_config
trainers/test_engines.py::test_zero: deepspeed
trainers/test_uneven_steps.py::test_an_evaluation_is_of_all_rows: dataloader_drop_last
trainers/test_sft.py::test_a_plain_trainer_whose_batches_are_no_trees_says_what_they_lack: remove_unused_columns
rows are sorted by what they cost, not by a column: length_column_name
"""

# Common to the two trainers that derive from `SFTTrainer`.
_SFT = """
(False,) no logits are kept, so there is nothing to compute metrics from: batch_eval_metrics
([], None) no logits are kept, so there is nothing to compute metrics from: include_for_metrics
(False,) every assistant turn is supervised already, and nothing else: assistant_only_loss
(None,) set `processing_class.pad_token`: pad_token
gpu/test_offloading.py::test_sft: activation_offloading
data/test_datasets.py::test_two_processes_and_streaming_give_the_same: dataset_num_proc
says how the model is loaded; it is checked afterwards: model_init_kwargs trust_remote_code
belongs to `packing`, which is refused: packing_strategy
plain text has neither branches nor turns: dataset_text_field
belongs to `torch_compile`, which is refused: torch_compile_backend torch_compile_mode
no logits are kept, so there is nothing to compute metrics from: prediction_loss_only eval_do_concat_batches
  eval_use_gather_object eval_accumulation_steps label_names
changes the tokenizer before the data is prepared: eos_token chat_template_path
shuffles the prepared rows, with `seed`: shuffle_dataset
"""

# `SFTConfig` under `TreeLossMixin`, and of `TreeSFTTrainer`.
_SFT_TREES = """
(False,) trees are packed by `per_device_train_batch_size`: all trees of a batch become one row: packing
(None,) trees are packed by `per_device_eval_batch_size`: eval_packing
(False,) rows of trees hold next to no padding: padding_free
(None,) completions are supervised and prompts are not; pass `branches` for other weights: completion_only_loss
('nll',) the loss of shared tokens is weighted, which is defined for the negative log-likelihood only: loss_type
('keep_start',) branches share their start: truncation_mode
(False,) compiling the whole model is not tested on trees; use `compile_layers=True`: torch_compile
trainers/test_modes.py::test_a_routers_auxiliary_loss_is_a_mean_over_branches: router_aux_loss_coef
concerns TRL's preparation, which batches of trees skip: max_length dataset_kwargs
belongs to TRL's collator: pad_to_multiple_of
"""

_TREE_SFT = """
trainers/test_sft.py::test_workers: dataloader_num_workers
trainers/test_sft.py::test_saving_and_resuming: save_strategy resume_from_checkpoint
data/test_datasets.py::test_long_branches: max_length overlong
trainers/test_options.py::test_padding_token_and_multiple: pad_to_multiple_of
trainers/test_options.py::test_options_of_a_preparation_that_is_skipped: dataset_kwargs
trainers/test_modes.py::test_grouped_is_the_tree: weighting
data/test_conversations.py::test_side_leaf: reasoning
trainers/test_sft.py::test_options_of_conversations: chat_template_kwargs column_names empty_thinking_in_prompt
data/test_datasets.py::test_rows_of_a_group_become_one_tree_wherever_they_are: group_by
data/test_datasets.py::test_a_bad_row_stops_or_is_skipped: on_error
trainers/test_split.py::test_one_step_with_splitting_on_and_off: max_packed_tokens overflow
data/test_packed.py::test_packed_rows_hold_the_whole_trees: pack_trees
data/test_selection.py::test_ratios_order_the_prepared_trees: selection_metric selection_num_proc
trainers/test_sft.py::test_only_the_training_dataset_is_selected_from: max_examples
trainers/test_modes.py::test_grouped_trains_the_same: mode
model/test_backends.py::test_the_kernel_that_was_chosen_is_what_runs: attn_backend
trainers/test_engines.py::test_compiled_layers: compile_layers
"""

_DIFFUSION = """
(False,) samples of a row would see each other: packing padding_free
(None, False) samples of a row would see each other: eval_packing
(None, True) completions are supervised and prompts are not: completion_only_loss
('nll',) the loss is that of the `objective`: loss_type
(0.0,) the loss is that of the `objective`: label_smoothing_factor
(None, 0) the noise of diffusion is in the tokens: neftune_noise_alpha
('keep_start',) a response is cut at its end: truncation_mode
(False,) compiling the whole model is not tested: torch_compile
(True,) the loss is normalised over all ranks: average_tokens_across_devices
diffusion/test_diffusion_trainer.py::test_samplers_that_need_lengths: train_sampling_strategy
diffusion/test_diffusion_trainer.py::test_accumulation_changes_nothing: per_device_train_batch_size
  gradient_accumulation_steps
diffusion/test_diffusion_trainer.py::test_evaluation_is_over_the_whole_set: per_device_eval_batch_size eval_noise_draws
diffusion/test_diffusion_trainer.py::test_a_second_training_logs_its_own_steps: logging_steps
diffusion/test_diffusion_noise.py::test_another_in_every_epoch_and_under_another_seed: seed data_seed
diffusion/test_diffusion_trainer.py::test_bf16_divides_by_the_same_count: bf16
diffusion/test_diffusion_trainer.py::test_checkpointing_and_the_router_of_experts: activation_checkpointing
  activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs router_aux_loss_coef
diffusion/test_diffusion_trainer.py::test_engines_are_refused: accelerator_config parallelism_config
diffusion/test_diffusion_trainer.py::test_fsdp2_is_told_to_round_no_log_prob: fsdp fsdp_config
trainers/test_uneven_steps.py::test_an_evaluation_is_of_all_rows: dataloader_drop_last
diffusion/test_diffusion_trainer.py::test_wrong_arguments_are_refused: dataset_kwargs
diffusion/test_diffusion_collator.py::test_random_parameters_equal_the_transcription: pad_to_multiple_of block_size
  response_window supervise_padding
diffusion/test_diffusion_trainer.py::test_samples_cut_to_nothing_supervised_are_left_out_and_counted: max_length
diffusion/test_diffusion_trainer.py::test_texts_become_samples_that_end_with_the_response: chat_template_kwargs
diffusion/test_diffusion_trainer.py::test_the_logged_loss_is_that_of_the_notes: objective alpha
diffusion/test_diffusion_trainer.py::test_the_mask_token: mask_token_id
diffusion/test_diffusion_noise.py::test_every_kind: corruption
diffusion/test_corruption.py::test_weights: half_life
diffusion/test_corruption.py::test_levels_of_whole_sequences: noise_eps
diffusion/test_diffusion_trainer.py::test_flex_trains_as_the_dense_mask: attn_backend
rows are sorted by their own lengths, not by a column: length_column_name
wraps the model from outside; the engines that would cut a sequence are refused: deepspeed
the columns that are read are kept: remove_unused_columns
"""

_EAGLE3 = """
(0.0,) the draft learns the target's distribution, not labels: label_smoothing_factor
(None, 0) the draft's inputs are the target's states: neftune_noise_alpha
(True,) the loss is normalised over all ranks: average_tokens_across_devices
(False,) compiling the whole draft is not tested: torch_compile
eagle3/test_trainer.py::test_samplers_that_need_lengths: train_sampling_strategy
eagle3/test_trainer.py::test_the_loss_is_normalised_over_the_optimizer_step: per_device_train_batch_size
  gradient_accumulation_steps
eagle3/test_trainer.py::test_evaluation_does_not_depend_on_the_batch_size: per_device_eval_batch_size
eagle3/test_trainer.py::test_sums_of_a_window_that_was_not_logged_are_forgotten: logging_steps
eagle3/test_trainer.py::test_streams_and_autocast: bf16
eagle3/test_draft.py::test_chunks_and_checkpointing_change_nothing: activation_checkpointing
  activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
eagle3/test_trainer.py::test_a_checkpoint_is_resumed: resume_from_checkpoint
eagle3/test_trainer.py::test_fsdp2_is_told_to_round_no_loss: fsdp fsdp_config
trainers/test_uneven_steps.py::test_an_evaluation_is_of_all_rows: dataloader_drop_last
eagle3/test_trainer.py::test_a_draft_is_made_for_the_target_and_only_the_draft_is_saved: draft_vocab_size
  target_model_init_kwargs
eagle3/test_token_mapping.py::test_round_trip: selected_token_ids_path
eagle3/test_trainer.py::test_other_targets: aux_layer_ids
eagle3/test_draft.py::test_the_loss_equals_the_transcription: ttt_steps step_decay
eagle3/test_trainer.py::test_packed_and_padded_training_agree: seq_length packed_sequence_size
eagle3/test_eagle3_packing.py::test_datasets_in_one_process_in_two_and_as_a_stream: packing_strategy dataset_num_proc
eagle3/test_eagle3_packing.py::test_reasoning_can_be_left_unsupervised: supervise_reasoning reasoning_end
eagle3/test_draft.py::test_training_with_flex_equals_training_with_dense_attention: attn_backend
rows are sorted by their own lengths, not by a column: length_column_name
no logits are kept, so there is nothing to compute metrics from: prediction_loss_only eval_do_concat_batches
  eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics label_names
wraps the model from outside; the engines that would cut a sequence are refused: accelerator_config parallelism_config
  deepspeed
the columns that are read are kept: remove_unused_columns
"""

# The trainers that score padded rows through the folded forward: GRPO, RLOO, DPO, KTO.
_FOLDED = """
trainers/test_tree_grpo.py::test_mixed_precision_with_a_reference_model: bf16
trainers/test_folded_forward.py::test_gradient_checkpointing_changes_nothing: activation_checkpointing
  activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
trainers/test_tree_grpo.py::test_compiling_the_whole_model_is_said_to_fold_nothing: torch_compile
trainers/test_tree_dpo.py::test_refuses_context_parallelism: accelerator_config parallelism_config
trainers/test_folded_forward.py::test_wrapped_for_data_parallel_training: fsdp fsdp_config
trainers/test_folded_forward.py::test_router_loss_counts_a_shared_token_once_per_row: router_aux_loss_coef
says how the model is loaded; it is checked afterwards: model_init_kwargs trust_remote_code
TRL's loss does not read it: label_smoothing_factor average_tokens_across_devices
says which rows meet in a batch; batches are folded as they come: remove_unused_columns length_column_name
  dataloader_drop_last
says what is logged, and where to: logging_steps
wraps the model from outside; the engines that would cut a sequence are refused: deepspeed
switches dropout off before the model is prepared: disable_dropout
"""

_POLICY = """
(None, 0) each row draws noise of its own, so that nothing could be folded; use TRL's trainer: neftune_noise_alpha
trainers/test_tree_grpo.py::test_windows_that_do_not_match_generations: per_device_train_batch_size
  gradient_accumulation_steps steps_per_generation num_generations
trainers/test_tree_grpo.py::test_evaluation: per_device_eval_batch_size
trainers/test_tree_grpo.py::test_continuous_batching: use_transformers_continuous_batching
  transformers_continuous_batching_config use_transformers_paged
trainers/test_tree_grpo.py::test_generated_completions: temperature mask_truncated_completions
TRL refuses it: auto_find_batch_size
TRL has a sampler of its own: train_sampling_strategy
says how completions are generated; they are folded as they come: num_generations_eval max_completion_length
  ds3_gather_for_generation top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
  cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
  vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
  vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
makes rewards and advantages, before the forward that is folded: reward_weights
says which rows meet in a batch; batches are folded as they come: shuffle_dataset
says what is logged, and where to: log_completions log_multimodal num_completions_to_print log_unique_prompts
"""

_GRPO = """
trainers/test_tree_grpo.py::test_equals_stock: loss_type importance_sampling_level off_policy_mask_threshold beta
  num_iterations epsilon
trainers/test_option_values.py::test_grpo: epsilon_high delta use_bias_correction_kl scale_rewards
  multi_objective_aggregation generation_batch_size pad_to_multiple_of sync_ref_model ref_model_mixup_alpha
  ref_model_sync_steps
trainers/test_tree_grpo.py::test_micro_batches_that_stay_are_said_once: top_entropy_quantile entropy_coef
trainers/test_option_values.py::test_an_entropy_bonus_that_adapts: use_adaptive_entropy entropy_coef_min
  entropy_coef_max entropy_coef_delta entropy_target
trainers/test_option_values.py::test_log_probs_of_vllm: vllm_importance_sampling_correction
  vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
  vllm_importance_sampling_cap
trainers/test_folded_forward.py::test_temperature_scale_softcap_and_float32_head_are_those_of_the_fused_head:
  cast_lm_head_to_fp32
a number in TRL's loss, which sees the log-probs of the unfolded rows: sapo_temperature_neg sapo_temperature_pos
  vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
says how completions are generated; they are folded as they come: max_tool_calling_iterations
says what is logged, and where to: log_completions_hub_repo
"""

_RLOO = """
trainers/test_tree_rloo.py::test_equals_stock: beta num_iterations epsilon normalize_advantages
trainers/test_option_values.py::test_rloo: epsilon_high reward_clip_range generation_batch_size pad_to_multiple_of
  sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
"""

_PREFERENCE = """
trainers/test_option_values.py::test_noise_on_embeddings_is_that_of_trl: neftune_noise_alpha
trainers/test_option_values.py::test_other_batches: train_sampling_strategy max_length pad_to_multiple_of
gpu/test_offloading.py::test_preferences: activation_offloading
trainers/test_option_values.py::test_reference_log_probs_in_other_batches: precompute_ref_log_probs
  precompute_ref_batch_size
says how rows are tokenized; batches are folded as they come: dataset_num_proc
"""

_DPO = """
trainers/test_tree_dpo.py::test_five_steps_are_those_of_trl: per_device_train_batch_size per_device_eval_batch_size
  gradient_accumulation_steps use_weighting ld_alpha
trainers/test_option_values.py::test_dpo: loss_type loss_weights label_smoothing beta f_divergence_type
  f_alpha_divergence_coef discopop_tau sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
trainers/test_option_values.py::test_other_batches: truncation_mode
TRL 1.16 ignores it, with a warning: padding_free
sets the tokenizer's padding token, which is never folded: pad_token
"""

_KTO = """
trainers/test_tree_kto.py::test_five_steps_are_those_of_trl: per_device_train_batch_size per_device_eval_batch_size
  gradient_accumulation_steps loss_type
trainers/test_option_values.py::test_kto: beta desirable_weight undesirable_weight sync_ref_model ref_model_mixup_alpha
  ref_model_sync_steps
"""


def _option(text: str) -> Option:
    if text.startswith("("):
        values, remedy = text.split(") ", 1)
        return Refused(remedy, ast.literal_eval(values + ")"))
    return Honoured(text) if "::" in text else Irrelevant(text)


def _merged(*tables: str) -> dict[str, Option]:
    """The options by name; later tables override earlier ones."""
    options: dict[str, Option] = {}
    for line in filter(None, "".join(tables).replace("\n  ", " ").splitlines()):
        text, names = line.rsplit(": ", 1)
        options |= dict.fromkeys(names.split(), _option(text))
    return options


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


def option_field(default: Any, text: str, choices: Sequence[str] = ()) -> Any:
    """The field of an option of ours; `HfArgumentParser` shows the text and the choices."""
    return field(default=default, metadata={"help": text} | ({"choices": [*choices]} if choices else {}))


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
