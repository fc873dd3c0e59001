# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Tree training without TRL: a plain PyTorch loop on a tiny random model and invented data.

Each step trains one tree: a prompt with four answers. Before the update the script also computes the loss of the same
branches one by one and prints both. They are equal up to float32 rounding, and the tree has fewer than half of the
tokens. Runs offline, on a CPU, in seconds:

```shell
python examples/minimal.py
```

For a real model, replace the body of `make_model` by `AutoModelForCausalLM.from_pretrained(...)`.
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hf_prefix_tree import Branch, DataCollatorForPrefixTree, PrefixTree, fold, prepare_model

VOCABULARY = 64


def make_model() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=1, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="prefix_tree")


def make_tree(seed: int) -> PrefixTree:
    """A prompt of 20 tokens and four answers of 6, each of which counts up from its first token."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, VOCABULARY, (20,), generator=generator).tolist()
    starts = torch.randint(1, VOCABULARY - 6, (4,), generator=generator).tolist()
    answers = [list(range(start, start + 6)) for start in starts]
    # One weight per token: the prompt is not supervised. `weighting="branch"` gives every branch the weight 1.
    return fold([Branch(prompt + answer, [0] * 20 + [1] * 6) for answer in answers], weighting="branch")


def loss_of_branches(model: PreTrainedModel, tree: PrefixTree) -> float:
    """The same loss by its definition: the mean over the supervised tokens of the branches, each run by itself."""
    total, count = 0.0, 0.0
    with torch.no_grad():
        for branch in tree.branches():
            input_ids = torch.tensor(branch.input_ids)[None]
            log_probs = model(input_ids=input_ids).logits[0, :-1].log_softmax(-1)
            weights = torch.tensor(branch.weights)[1:]
            total -= (log_probs.gather(1, input_ids[0, 1:, None])[:, 0] * weights).sum().item()
            count += weights.sum().item()
    return total / count


def main(steps: int = 20) -> list[tuple[float, float]]:
    """Trains and returns the loss of the tree and that of its branches, for every step."""
    torch.manual_seed(0)
    model = prepare_model(make_model())
    collator = DataCollatorForPrefixTree(pad_token_id=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(steps):
        tree = make_tree(seed=step)
        branches = loss_of_branches(model, tree)
        loss = model(**collator([tree])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), branches))
        if step % 5 == 0 or step == steps - 1:
            tokens = f"{tree.stats().tree_tokens} tokens instead of {tree.stats().branch_tokens}"
            print(f"step {step:2}: loss of the tree {loss.item():.6f}, of its branches {branches:.6f} ({tokens})")
    return losses


if __name__ == "__main__":
    main()
