# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What the package relies on inside Transformers, TRL and torch without it being public: notice when it changes."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
import trl
from torch._inductor.kernel.flex import flex_attention as flex_kernels
from transformers import PreTrainedModel, Trainer, masking_utils
from transformers.integrations import moe, neftune, sdpa_attention
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_jit_checkpoint import CheckpointManager
from transformers.utils import output_capturing
from trl import GRPOTrainer, SFTTrainer

from hf_prefix_tree.training.step import _SENTINEL


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_mask_functions_are_called_with_what_ours_reads():
    """`prefix_tree_mask` recognises the layer type by these keywords."""
    source = inspect.getsource(masking_utils.create_causal_mask)
    assert "mask_factory_function = causal_mask_function" in source
    for keyword in ("mask_function=", "use_vmap=", "allow_is_causal_skip=", "config=config", "q_length=", "device="):
        assert keyword in source
    assert "local_size=sliding_window" in inspect.getsource(masking_utils.create_sliding_window_causal_mask)
    assert "local_size=chunk_size" in inspect.getsource(masking_utils.create_chunked_causal_mask)


def test_shared_keys_of_sdpa():
    """`benchmarks/scaling.py` has them repeated in float32, where SDPA's kernels take none."""
    assert "use_gqa_in_sdpa(" in inspect.getsource(sdpa_attention.sdpa_attention_forward)


def test_the_precision_of_flex_attention_is_an_option():
    """`attention/kernels.py` sets it for float32."""
    for function in (flex_kernels.flex_attention, flex_kernels.flex_attention_backward):
        assert 'setdefault("FLOAT32_PRECISION"' in inspect.getsource(function)


def test_names_that_checks_of_a_call_look_for():
    assert LOSS_MAPPING["ForCausalLM"] is ForCausalLMLoss
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_hidden_layers=1))
    assert model.loss_function is ForCausalLMLoss
    assert "neftune" in neftune.neftune_post_forward_hook.__qualname__
    assert "embeddings.neftune_noise_alpha = neftune_noise_alpha" in inspect.getsource(neftune.activate_neftune)
    assert "output_router_logits" in transformers.Qwen3MoeConfig().to_dict()


def test_how_checkpoints_are_rotated_and_marked():
    """`CheckpointMixin` rotates them itself, and leaves out the mark of a save on SIGTERM."""
    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.index("TRAINER_STATE_NAME") < source.index("save_total_limit=self.args.save_total_limit")
    assert _SENTINEL in inspect.getsource(CheckpointManager)


def test_model_attributes():
    assert isinstance(PreTrainedModel._supports_sdpa, bool)
    assert isinstance(PreTrainedModel.loss_function, property) and PreTrainedModel.loss_function.fset is not None
    assert "_loss_function" in inspect.getsource(PreTrainedModel.loss_function.fset)
    assert transformers.Qwen3ForCausalLM.config_class is transformers.Qwen3Config


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Trainer._get_num_items_in_batch, ["self", "batch_samples", "device"]),
        (Trainer._get_dataloader, ["self", "dataset", "description", "batch_size"]),
        (Trainer._inner_training_loop, ["self", "batch_size"]),
        (Trainer._get_eval_sampler, ["self", "eval_dataset"]),
        (Trainer._save_checkpoint, ["self", "model", "trial"]),
        (Trainer._get_output_dir, ["self", "trial"]),
        (Trainer.call_model_init, ["self", "trial"]),
        (Trainer._remove_unused_columns, ["self", "dataset", "description"]),
        (Trainer.compute_loss, ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        (SFTTrainer.compute_loss, ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        (
            SFTTrainer._prepare_dataset,
            ["self", "dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"],
        ),
        (SFTTrainer._set_signature_columns_if_needed, ["self"]),
    ],
)
def test_overridden_methods_keep_their_arguments(method, expected):
    assert parameters(method)[: len(expected)] == expected


def test_names_of_trl():
    assert inspect.isgeneratorfunction(inspect.unwrap(trl.trainer.utils.global_then_local_main_first))
    initialiser = inspect.getsource(SFTTrainer.__init__)
    assert "self._tokenizer = " in initialiser and "self._is_vision_dataset = " in initialiser


def test_trl_rollouts():
    """`rl/rollouts.py` puts rollouts of several rows through them. TRL marks rollout functions as experimental."""
    generate = " ".join(inspect.getsource(GRPOTrainer._generate).split())
    assert "output = self.rollout_func(prompts, self)" in generate
    assert 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}' in generate
    assert 'tool_mask = extra_fields.pop("env_mask", None)' in generate
    assert "torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids]" in generate  # empty completions fail
    assert "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images" in generate
    assert parameters(GRPOTrainer._generate) == ["self", "prompts"]
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    rewards = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    assert parameters(GRPOTrainer._calculate_rewards) == rewards
    scored = " ".join(inspect.getsource(GRPOTrainer._generate_and_score_completions).split())
    assert scored.index("= self._generate(prompts)") < scored.index("self._get_per_token_logps_and_entropies(")
    assert "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)" in scored
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'inputs["advantages"]' in loss and "if advantages.dim() == 1:" in loss


def test_trl_tool_loop():
    """`rl/rollouts.py` samples the turns of the loop after contexts of its own, and reads what the loop keeps."""
    arguments = ["prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields"]
    assert parameters(GRPOTrainer._tool_call_loop) == ["self", *arguments]
    assert parameters(GRPOTrainer._tokenize_prompts) == ["self", "prompts"]
    assert parameters(GRPOTrainer._generate_single_turn)[:2] == ["self", "prompt_ids"]
    assert "chat_template=self.chat_template" in inspect.getsource(GRPOTrainer._tokenize_prompts)
    loop = " ".join(inspect.getsource(GRPOTrainer._tool_call_loop).split())
    assert "prompt_completion_tools = [prompts[i] for i in idxs_with_tool]" in loop
    assert "prompt_completion_tool.append(tool_message)" in loop
    assert "del prompts[idx_with_tool][prompts_len_before[idx] :]" in loop
    assert "post_tool_ids, post_tool_logprobs = self._generate_single_turn( prompt_completion_tool_ids," in loop
    assert "post_tool_ids[idx] = post_tool_ids[idx][:new_len]" in loop
    assert loop.count("self._generate_single_turn(") == 1 and "self._tokenize_prompts(" not in loop
    assert loop.endswith("logprobs, tool_call_count, tool_failure_count, tool_images")


def test_trainer_scales_by_num_items_in_batch():
    """With `model_accepts_loss_kwargs`, a given number of items means: normalised over the accumulated batch."""
    source = " ".join(inspect.getsource(Trainer.training_step).split())
    assert "self.model_accepts_loss_kwargs and num_items_in_batch is not None" in source or (
        "not self.model_accepts_loss_kwargs or num_items_in_batch is None" in source
    )


def test_hooks_record_outputs_into_a_variable_that_can_be_a_global():
    """`modeling/compilation.py` makes it one, with lists of its own, while a compiled layer runs."""
    collector = output_capturing._active_collector
    assert (collector.get(), collector.global_var, collector.compiling) == (None, None, False)
    collector.global_var, collector.compiling = {"router_logits": []}, True
    try:
        layer = torch.nn.Identity()
        output_capturing.install_output_capuring_hook(layer, "router_logits", 0)
        layer("logits")
        assert collector.get() == {"router_logits": ["logits"]}
    finally:
        collector.global_var, collector.compiling = None, False
    assert collector.get() is None


def test_how_experts_are_dispatched():
    """`modeling/compilation.py` leaves eager experts outside of graphs, and grouped matmuls without the operator."""
    source = inspect.getsource(moe)
    assert "get_interface(self.config._experts_implementation" in source
    assert '"grouped_mm": grouped_mm_experts_forward' in source
    assert "is_torchdynamo_compiling() and weight.dtype != torch.bfloat16" in source
    has_operator = hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")
    assert has_operator == ("_grouped_mm_fallback_backward_fake" in source)


def test_torch_options():
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True, specialize_float=True):
        assert torch._dynamo.config.fail_on_recompile_limit_hit
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        assert not torch.fx.experimental._config.use_duck_shape
    assert torch.fx.experimental._config.use_duck_shape
