# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Supervised fine-tuning on prefix trees.

A Hub dataset or a JSON Lines file, in any form that `TreeSFTTrainer` takes: conversations (`messages`), `prompt` +
`completions`, token ids, folded trees.

```shell
python examples/tree_sft.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name dialogues.jsonl --tools_file dialogues.tools.json --group_by group \
    --output_dir Qwen3-0.6B-TreeSFT
```

Options can come from a YAML file (`--config options.yaml`). Start it with `accelerate launch` for several GPUs, add
`--use_peft` for LoRA.
"""

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer


@dataclass
class TreeScriptArguments(ScriptArguments):
    """
    Arguments of this script, besides TRL's.

    Args:
        tools_file (`str`, *optional*):
            JSON file with tool schemas: a list for all rows, or an object that maps each value of the column
            `group` to its list.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer, where it is not the model's.
        gguf_file (`str`, *optional*):
            Name of a GGUF file in the model's folder to load the weights from.
        random_weights (`bool`, *optional*, defaults to `False`):
            Initialise the model from its config alone.
    """

    tools_file: str | None = field(default=None, metadata={"help": "JSON file with tool schemas."})
    tokenizer_name_or_path: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    gguf_file: str | None = field(default=None, metadata={"help": "GGUF file in the model's folder."})
    random_weights: bool = field(default=False, metadata={"help": "Initialise the model from its config alone."})


def load_rows(arguments: TreeScriptArguments, split: str) -> Dataset:
    """The rows of a split of a Hub dataset, or of a local JSON Lines file, with their tools."""
    if Path(arguments.dataset_name).is_file():
        rows = load_dataset("json", data_files={split: arguments.dataset_name}, split=split)
    else:
        rows = load_dataset(arguments.dataset_name, arguments.dataset_config, split=split)
    if arguments.tools_file is not None:
        tools = json.loads(Path(arguments.tools_file).read_text())
        texts = [json.dumps(tools if isinstance(tools, list) else tools[row["group"]]) for row in rows]
        rows = rows.add_column("tools", texts)
    return rows


def load_model(
    model_args: ModelConfig, arguments: TreeScriptArguments, training_args: TreeSFTConfig
) -> PreTrainedModel:
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    kwargs = {"trust_remote_code": training_args.trust_remote_code, "attn_implementation": "prefix_tree"}
    if arguments.random_weights:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32 if dtype == "auto" else dtype, **kwargs)
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    return AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        dtype=dtype,
        gguf_file=arguments.gguf_file,
        **kwargs,
    )


def main(arguments: TreeScriptArguments, training_args: TreeSFTConfig, model_args: ModelConfig) -> TreeSFTTrainer:
    tokenizer = AutoTokenizer.from_pretrained(
        arguments.tokenizer_name_or_path or model_args.model_name_or_path,
        gguf_file=None if arguments.tokenizer_name_or_path else arguments.gguf_file,
    )
    evaluates = training_args.eval_strategy != "no"
    trainer = TreeSFTTrainer(
        model=load_model(model_args, arguments, training_args),
        args=training_args,
        train_dataset=load_rows(arguments, arguments.dataset_train_split),
        eval_dataset=load_rows(arguments, arguments.dataset_test_split) if evaluates else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=os.path.basename(arguments.dataset_name))
    return trainer


def make_parser(subparsers: argparse._SubParsersAction | None = None) -> argparse.ArgumentParser:
    dataclass_types = (TreeScriptArguments, TreeSFTConfig, ModelConfig)
    if subparsers is not None:
        return subparsers.add_parser("tree-sft", help="Run tree SFT", dataclass_types=dataclass_types)
    return TrlParser(dataclass_types)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
