"""What trainers rely on inside TRL without it being public: notice when it changes."""

from __future__ import annotations

import inspect

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTTrainer
from trl.trainer import utils
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from hf_prefix_tree.rl.policy import MEANS_OVER_COMPLETIONS, SUMS

TRAINERS = pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])


def source(function):
    """One line, whitespace alike."""
    return " ".join(inspect.getsource(inspect.unwrap(function)).split())


def test_a_fused_head_looks_for_labels_by_one_function():
    """`TreeLossMixin` replaces it, and makes the metrics of these outputs; without it, every position is scored."""
    text = source(utils.add_fused_lm_head)
    assert text.count("_use_triton") == 1 and "compact = _use_triton(hidden_states.device)" in text
    assert "labels[mask] if compact else labels.clamp(min=0).reshape(-1)" in text
    assert "log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = per_token" in text
    metrics = source(SFTTrainer.compute_loss)
    for name in ("label_mask.sum()", "entropy.detach().sum()", "is_top1.sum()", "aux_loss"):
        assert f"outputs.{name}" in metrics
    logged = {line.split('"')[1] for line in metrics.split("self._metrics[mode][")[1:]}
    assert logged == {"entropy", "mean_token_accuracy", "num_tokens", "aux_loss"}


@TRAINERS
def test_overridden_methods_keep_their_arguments(trainer):
    for name, expected in {
        "_prepare_inputs": ["self", "generation_batch"],
        "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
        "_compute_loss": ["self", "model", "inputs"],
        "_get_per_token_logps_and_entropies": [
            *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
            *("compute_entropy", "compute_aux_loss"),
        ],
    }.items():
        found = list(inspect.signature(inspect.unwrap(getattr(trainer, name))).parameters)
        assert found[: len(expected)] == expected, name


@TRAINERS
def test_micro_batches_are_cut_from_shuffled_completions_and_buffered(trainer):
    text = source(trainer._prepare_inputs)
    assert "generation_batch = shuffle_sequence_dict(generation_batch)" in text
    assert "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)" in text
    assert "self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in generation_batches]" in text
    assert text.count("self._buffered_inputs =") == 1
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in text
    assert "self._step += 1" in source(trainer.training_step)
    assert "self._buffered_inputs = None" in source(trainer.__init__) and "self._step = 0" in source(trainer.__init__)


@TRAINERS
def test_generation_is_one_method(trainer):
    """The prepared attention makes place for continuous batching there."""
    text = source(trainer._generate_single_turn)
    assert "elif self.use_transformers_continuous_batching:" in text and "generate_batch(" in text
    assert source(trainer).count("generate_batch(") == 1


@TRAINERS
def test_the_loss_scores_a_micro_batch_once_and_logs_into_metrics(trainer):
    text = source(trainer._compute_loss)
    assert text.count("self._get_per_token_logps_and_entropies(") == 1
    assert "compute_entropy=True, compute_aux_loss=self.aux_loss_enabled" in text
    assert "batch_size" not in text
    assert "self._metrics[mode][" in text
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in source(trainer.__init__)
    assert "self._compute_loss(model, inputs)" in source(trainer.compute_loss)
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert f'inputs["{key}"]' in text


@TRAINERS
def test_the_model_is_called_with_what_is_folded(trainer):
    text = source(trainer._get_per_token_logps_and_entropies)
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in text
    assert "outputs.log_probs[:, -logits_to_keep:]" in text and "outputs.entropy[:, -logits_to_keep:]" in text
    generation = source(trainer._generate_and_score_completions)
    assert "batch_size = self.args.per_device_train_batch_size if mode" in generation
    assert generation.count("self._get_per_token_logps_and_entropies(") == 3


@TRAINERS
def test_images_are_told_apart_by_these_inputs(trainer):
    """Images in patches have a grid; all others have `pixel_values` without one, or types of tokens."""
    names = list(inspect.signature(inspect.unwrap(trainer._get_per_token_logps_and_entropies)).parameters)
    assert set(names[8:]) == {
        *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
        *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    }
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    batch = {"pixel_values": torch.arange(12.0)[:, None], "image_grid_thw": grids, "num_images": [0, 1, 1]}
    split = split_pixel_values_by_grid(batch)
    assert [len(pixels) for pixels in split["pixel_values"]] == [0, 4, 8]
    whole = unsplit_pixel_values_by_grid(split)
    assert all(torch.equal(whole[name], batch[name]) for name in ("pixel_values", "image_grid_thw"))
    text = source(trainer._compute_loss)
    assert all(f'{name}=inputs.get("{name}")' in text for name in names[8:])


@TRAINERS
def test_images_are_gathered_for_the_log_by_ranks_that_have_some(trainer):
    """Hence a rank without images is waited for, unless the log leaves images out."""
    text = source(trainer._generate_and_score_completions)
    assert 'if images is not None and self.log_multimodal: self._logs["images"].extend(gather_object(images))' in text
    assert "images is not None and all(img_list == [] for img_list in images): images = None" in text
    assert source(trainer).count("self.log_multimodal") == 2  # there, and where the option is read


def test_grpo_losses():
    """How each loss is normalised: what scales a micro-batch of another size rests on it."""
    text = source(GRPOTrainer._compute_loss)
    _, *cases = text.split("(per_token_loss * mask).sum")
    assert len(cases) == 5
    for part in (
        'if self.loss_type in ["grpo", "sapo"]: '
        "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
        'elif self.loss_type == "bnpo": loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)',
        'elif self.loss_type == "dr_grpo": '
        "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
        'elif self.loss_type in ["cispo", "dapo", "vespo"]:',
        'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        "loss = (per_token_loss * mask).sum() / normalizer",
        'elif self.loss_type == "luspo":',
        "loss = (per_token_loss * mask).sum(-1).mean()",
    ):
        assert part in text, part
    assert set(MEANS_OVER_COMPLETIONS) == {"grpo", "sapo", "dr_grpo", "luspo"}
    assert set(SUMS) == {"cispo", "dapo", "vespo"}
    assert "entropy_loss = ( (entropies * effective_mask).sum() / effective_mask.sum().clamp(min=1.0)" in text
    for name in ("loss_type", "top_entropy_quantile", "_entropy_bonus_enabled", "aux_loss_enabled"):
        assert f"self.{name} = " in source(GRPOTrainer.__init__)


def test_rloo_loss():
    text = source(RLOOTrainer._compute_loss)
    assert "loss = per_sequence_loss.mean()" in text
    assert text.count("loss = ") == 4  # the mean, the two sides of the clip, the router's
    assert "self.aux_loss_enabled = " in source(RLOOTrainer.__init__)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_options(config):
    names = {"steps_per_generation", "num_generations", "num_iterations", "per_device_train_batch_size"}
    assert names <= config.__dataclass_fields__.keys()
