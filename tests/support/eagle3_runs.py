"""Small training runs of drafts."""

import torch

from hf_prefix_tree import DataCollatorForEagle3, Eagle3Config, Eagle3DraftConfig, Eagle3DraftModel, Eagle3Trainer
from tests.support.drafts import AUX, TARGETS, VOCAB, make_target, random_documents

BY_LENGTH = ("group_by_length", "batch_rebalance")  # sampling strategies that need the length of every row
OPTIONS = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "learning_rate": 2.0,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seq_length": 16,
    "ttt_steps": 3,
    "train_sampling_strategy": "sequential",
    "dataloader_pin_memory": False,
}


def small_draft(target="llama", draft_vocab_size=49):
    torch.manual_seed(1)
    config = Eagle3DraftConfig.from_target(
        TARGETS[target], draft_vocab_size=draft_vocab_size, aux_layer_ids=AUX, initializer_range=0.2
    )
    draft = Eagle3DraftModel(config)
    if draft_vocab_size is not None:  # most of what the targets choose, and not all
        draft.set_draft_vocabulary(torch.tensor([i for i in range(VOCAB) if i % 5 != 1]))
    return draft


def trainer_of(folder, rows, target=None, draft=None, eval_rows=None, tokenizer=None, **options):
    return Eagle3Trainer(
        model=draft,
        target_model=make_target(dtype=torch.float32) if target is None else target,
        args=Eagle3Config(str(folder), **{**OPTIONS, "aux_layer_ids": AUX, **options}),
        data_collator=DataCollatorForEagle3(0, length=options.get("packed_sequence_size") or 16),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
    )


def train(folder, rows, **kwargs):
    trainer = trainer_of(folder, rows, draft=kwargs.pop("draft", None) or small_draft(), **kwargs)
    trainer.train()
    return trainer


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def distance(got, expected, start):
    """Largest difference of an update, relative to the largest update, over all parameters."""
    change = max((expected[n] - start[n]).abs().max().item() for n in expected)
    return max((got[n] - expected[n]).abs().max().item() for n in expected) / change


def documents(count, seed=0):
    return random_documents(seed, count=count, longest=14, shortest=5)


def branch_rows(count, seed=0):
    """Rows of two branches that fork."""
    rows = []
    for row in documents(count, seed):
        ids, mask = row["input_ids"], row["loss_mask"]
        other = [*ids[:3], *(3 + (token + 1) % (VOCAB - 3) for token in ids[3:])]
        rows.append({"branches": [{"input_ids": path, "weights": list(map(float, mask))} for path in (ids, other)]})
    return rows
