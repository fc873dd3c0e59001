"""Runs of TRL's preference trainers and of ours on the same pairs: metrics, weights, tokens computed."""

import contextlib
import copy
import functools

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

from conformance.double import keep_double
from tests.support.models import VOCAB
from tests.support.trainer_runs import config, distance, make_model, weights

LORA = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
NOT_COMPARED = ("runtime", "per_second", "step_time", "mfu", "epoch", "total_flos")


def tokenizer():
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, VOCAB)}}
    model = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def words(rng, low, high):
    return "".join(f" t{i}" for i in rng.integers(3, VOCAB, size=rng.integers(low, high)))


def pairs(number=20, seed=0):
    """Two pairs per prompt; the answers of a pair share their first tokens, differently many."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number // 2):
        prompt = words(rng, 8, 14)[1:]
        for _ in range(2):
            start = words(rng, 0, 4)
            rows.append({"prompt": prompt, "chosen": start + words(rng, 2, 7), "rejected": start + words(rng, 2, 7)})
    return Dataset.from_list(rows)


def unpaired(number=20, seed=0):
    """The answers of `pairs`, each a row of its own with its label."""
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in pairs(number, seed)
            for name in ("chosen", "rejected")
        ]
    )


class Run:
    """
    One training: what was logged, where the weights went, and how many positions the backbones computed.

    In float64 on CPU, but for what TRL rounds itself: in float32 its runs are as far from those in float64 as ours.
    """

    def __init__(self, folder, trainer_class, config_class, rows, lora=False, eval_rows=None, **kwargs):
        on_cpu = kwargs.get("use_cpu", True)
        model = make_model(dtype=torch.float64 if on_cpu else torch.float32)
        with torch.no_grad():  # a policy that has left its reference
            needs_reference = not lora and not kwargs.get("precompute_ref_log_probs")
            reference = copy.deepcopy(model) if needs_reference else None
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(parameter.numel())))
        self.computed = []
        for each in (model, reference):
            if each is not None:
                count = functools.partial(self._count, each)
                each.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
        options = {"max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 0.05, "seed": 3} | kwargs
        self.trainer = trainer_class(
            model=model,
            ref_model=reference,
            args=config(folder, config_class, **options),
            train_dataset=rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer(),
            peft_config=copy.deepcopy(LORA) if lora else None,
        )
        self.start = weights(self.trainer.model)
        # casts of recomputed layers are not seen by it
        with keep_double() if on_cpu and not kwargs.get("gradient_checkpointing") else contextlib.nullcontext():
            self.trainer.train()
            if eval_rows is not None:
                self.trainer.evaluate()
        self.end = weights(self.trainer.model)
        self.logs = [
            {key: value for key, value in entry.items() if not any(word in key for word in NOT_COMPARED)}
            for entry in self.trainer.state.log_history
        ]

    def _count(self, model, module, args, kwargs):
        state = getattr(model, "_hf_prefix_tree_state", None)
        if state is None or not state.verifying:
            self.computed.append((kwargs.get("prefix_tree") is not None, kwargs["input_ids"].numel()))

    def tokens(self, folded):
        return [number for on_tree, number in self.computed if on_tree == folded]


class Folds:
    """Notes what each folded call should compute: the different prefixes of its rows."""

    def __init__(self, monkeypatch):
        from hf_prefix_tree.rl import folded_forward as folded

        self.tokens = []
        fold_rows = folded.fold_rows

        def noting(ids, is_token, *rest):
            rows = [row[keep].tolist() for row, keep in zip(ids, is_token, strict=True)]
            self.tokens.append(len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}))
            return fold_rows(ids, is_token, *rest)

        monkeypatch.setattr(folded, "fold_rows", noting)


def assert_equal_runs(tree, stock):
    """
    Equal logs to 5e-7, as metrics are rounded to float32; equal weights to 1e-5 of how far training moved them
    (under AdamW, which blows up the rounding of small gradients; SGD stays below 1e-6).

    KTO's `kl` is a difference of summed log-probs, so it is as exact as those: relative to them.
    """
    assert len(tree.logs) == len(stock.logs) > 5
    for entry, other in zip(tree.logs, stock.logs, strict=True):
        assert {name for name in entry.keys() ^ other.keys() if not name.startswith("tree/")} == set()
        summed = max((abs(value) for key, value in other.items() if "logps" in key), default=1.0)
        for key, value in other.items():
            size = summed if key.endswith("kl") else max(1.0, abs(value))
            assert abs(entry[key] - value) <= 5e-7 * size, (key, entry[key], value)
    assert distance(stock.end, stock.start) > 1e-3, "training did not move the weights"
    assert distance(tree.end, stock.end, stock.start) < 1e-5


def check(tmp_path, monkeypatch, tree_class, stock_class, config_class, rows, **kwargs):
    """Trains with both and compares; the positions computed must be those of perfect folds."""
    stock = Run(tmp_path / "stock", stock_class, config_class, rows, **kwargs)
    folds = Folds(monkeypatch)
    tree = Run(tmp_path / "tree", tree_class, config_class, rows, **kwargs)
    assert_equal_runs(tree, stock)
    assert tree.tokens(folded=False) == [] and stock.tokens(folded=True) == []
    assert tree.tokens(folded=True) == folds.tokens
    assert len(folds.tokens) == len(stock.computed)
    return sum(folds.tokens) / sum(stock.tokens(folded=False))
