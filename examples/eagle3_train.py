# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Train an EAGLE-3 draft head for a target model, and export it for serving.

Takes a Hub dataset or a JSON Lines file, in any form that `Eagle3Trainer` reads: conversations (`messages`) and
completions of a prompt, which are folded into trees, or token ids with a `loss_mask`. Answers that the target itself
generated work best.

```shell
python examples/eagle3_train.py \
    --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name answers.jsonl \
    --draft_vocab_size 32000 --selected_token_ids_path draft_vocabulary.safetensors \
    --packed_sequence_size 16384 --per_device_train_batch_size 1 --bf16 \
    --output_dir Qwen3-8B-EAGLE3 --export_engine vllm
```

Options can come from a YAML file (`--config options.yaml`). Use `accelerate launch` for several GPUs.
`--precompute_dir states` runs the target once and trains without it; a later run with the same folder as
`--model_name_or_path`, and `--tokenizer_name_or_path`, needs neither target nor dataset. `--dry_run` prepares the
data, prints the counts and stops. The script is `hf-prefix-tree train eagle3`.
"""

import sys
from collections.abc import Sequence

from hf_prefix_tree import Eagle3Trainer
from hf_prefix_tree.cli.train import leave, parse, run


def main(options: Sequence[str]) -> Eagle3Trainer | None:
    return run("eagle3", *parse("eagle3", options))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
