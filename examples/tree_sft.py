# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Supervised fine-tuning on prefix trees.

Takes a Hub dataset or a JSON Lines file, in any form that `TreeSFTTrainer` reads: conversations (`messages`), `prompt`
+ `completions`, token ids, folded trees.

```shell
python examples/tree_sft.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name dialogues.jsonl --tools_file dialogues.tools.json --group_by group \
    --output_dir Qwen3-0.6B-TreeSFT
```

Options can come from a YAML file (`--config options.yaml`; `examples/ablation` has some). Use `accelerate launch` for
several GPUs, `--use_peft` for LoRA, and `--use_cpu` without a GPU. `--dry_run` prepares the data, prints the counts
and stops. With `--eval_strategy`, a file is also the evaluation set. It is `hf-prefix-tree train sft`.
"""

import sys
from collections.abc import Sequence

from trl import SFTTrainer

from hf_prefix_tree.cli.train import leave, parse, run


def main(options: Sequence[str]) -> SFTTrainer | None:
    return run("sft", *parse("sft", options))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
