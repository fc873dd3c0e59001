# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Train an EAGLE-3 draft head for a target model, and export it for serving.

Takes a Hub dataset or a JSON Lines file, in any form that `Eagle3Trainer` reads: conversations (`messages`), `prompt`
+ `completion`, token ids with a `loss_mask`. Answers that the target itself generated work best.

```shell
python examples/eagle3_train.py \
    --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name answers.jsonl \
    --draft_vocab_size 32000 --selected_token_ids_path draft_vocabulary.safetensors \
    --packed_sequence_size 4096 --bf16 \
    --output_dir Qwen3-8B-EAGLE3 --export_engine vllm
```

Options can come from a YAML file (`--config options.yaml`). Use `accelerate launch` for several GPUs.
`--precompute_dir states` runs the target once and trains without it; a later run with the same folder as
`--model_name_or_path`, and `--tokenizer_name_or_path`, needs neither target nor dataset. `--dry_run` prepares the
data, prints the counts and stops. Without a GPU leave out `--bf16`, or add `--use_cpu`.
"""

import argparse
import gc
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_quantization_config

from hf_prefix_tree import Eagle3Config, Eagle3DraftModel, Eagle3Trainer, export_for_serving
from hf_prefix_tree.eagle3.data import padding_token, prepare_eagle3_rows
from hf_prefix_tree.eagle3.export import validate_export
from hf_prefix_tree.eagle3.target import TARGET_FILE, Eagle3Target, precompute_hidden_states


@dataclass
class Eagle3ScriptArguments(ScriptArguments):
    """
    Arguments of this script, besides TRL's.

    Args:
        tools_file (`str`, *optional*):
            JSON file with tool schemas: a list for all dataset rows, or an object that maps each value of the column
            `group` to its list.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer, if it is not the model's.
        random_weights (`bool`, *optional*, defaults to `False`):
            Initialise the target from its config alone.
        draft_name_or_path (`str`, *optional*):
            Checkpoint of a draft to train further.
        precompute_dir (`str`, *optional*):
            Folder for the target's hidden states. The script writes them first and trains the draft on them.
        export_engine (`str`, *optional*):
            Serving engine to export the draft for, into the folder `serving` of the output.
        dry_run (`bool`, *optional*, defaults to `False`):
            Prepare the data, print the counts, and stop. No model is loaded.
    """

    tools_file: str | None = field(default=None, metadata={"help": "JSON file with tool schemas."})
    tokenizer_name_or_path: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    random_weights: bool = field(default=False, metadata={"help": "Initialise the target from its config alone."})
    draft_name_or_path: str | None = field(default=None, metadata={"help": "Draft to train further."})
    precompute_dir: str | None = field(default=None, metadata={"help": "Folder for the target's hidden states."})
    export_engine: str | None = field(
        default=None,
        metadata={"help": "Engine to export the draft for.", "choices": ["vllm", "sglang", "speculators"]},
    )
    dry_run: bool = field(default=False, metadata={"help": "Prepare the data, print the counts, and stop."})


def load_rows(arguments: Eagle3ScriptArguments, split: str) -> Dataset:
    """The dataset rows of a split of a Hub dataset, or of a local JSON Lines file, with their tools."""
    if arguments.dataset_name is None:
        raise ValueError("`dataset_name` is missing: pass a Hub dataset or a JSON Lines file.")
    if Path(arguments.dataset_name).is_file():
        rows = load_dataset("json", data_files={split: arguments.dataset_name}, split=split)
    else:
        rows = load_dataset(arguments.dataset_name, arguments.dataset_config, split=split)
    if arguments.tools_file is not None:
        tools = json.loads(Path(arguments.tools_file).read_text())
        texts = [json.dumps(tools if isinstance(tools, list) else tools[row["group"]]) for row in rows]
        rows = rows.add_column("tools", texts)
    return rows


def prepared(rows: Dataset, tokenizer: Any, args: Eagle3Config) -> Dataset:
    """The packed or padded documents that `Eagle3Trainer` makes of the dataset."""
    return prepare_eagle3_rows(
        rows,
        {
            "tokenizer": tokenizer,
            "supervise_reasoning": args.supervise_reasoning,
            "reasoning_end": args.reasoning_end,
            "on_error": args.on_error,
        },
        seq_length=args.seq_length,
        packed_sequence_size=args.packed_sequence_size,
        strategy=args.packing_strategy,
        pad_token_id=padding_token(tokenizer),
        num_proc=args.dataset_num_proc,
    )


def print_preparation(split: str, rows: Dataset, args: Eagle3Config) -> None:
    length = args.packed_sequence_size or args.seq_length
    masks = (
        rows["attention_mask"] if "attention_mask" in rows.column_names else [[1] * len(i) for i in rows["input_ids"]]
    )
    tokens, supervised = sum(map(sum, masks)), sum(map(sum, rows["loss_mask"]))
    print(
        f"{split}: {len(rows):,} sequences of {length:,} positions, {tokens:,} tokens "
        f"({tokens / (len(rows) * length):.1%} of the positions), {supervised:,} supervised."
    )


def load_target(arguments: Eagle3ScriptArguments, model_args: ModelConfig, args: Eagle3Config) -> Any:
    """The target model, or the folder of its precomputed hidden states."""
    name = model_args.model_name_or_path
    if Path(name, TARGET_FILE).is_file():
        return name
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    settings = dict(args.target_model_init_kwargs or {})
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        settings["quantization_config"] = quantization
    if arguments.random_weights:
        config = AutoConfig.from_pretrained(name)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32 if dtype == "auto" else dtype)
    return AutoModelForCausalLM.from_pretrained(name, revision=model_args.model_revision, dtype=dtype, **settings)


def main(arguments: Eagle3ScriptArguments, training_args: Eagle3Config, model_args: ModelConfig) -> Any:
    if model_args.use_peft:
        raise ValueError("`use_peft` has no meaning here: the target is frozen, and the draft is trained whole.")
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name_or_path or model_args.model_name_or_path)
    splits = [arguments.dataset_train_split]
    if training_args.eval_strategy != "no":
        splits.append(arguments.dataset_test_split)
    if arguments.dry_run:
        for split in splits:
            print_preparation(split, prepared(load_rows(arguments, split), tokenizer, training_args), training_args)
        return None
    target = load_target(arguments, model_args, training_args)
    if isinstance(target, str):
        rows = [load_from_disk(str(Path(target, "rows", split))) for split in splits]
    else:
        rows = [load_rows(arguments, split) for split in splits]
        if arguments.precompute_dir is not None:
            frozen = Eagle3Target(target, training_args.aux_layer_ids, training_args.attn_backend)
            frozen.to(training_args.device)
            rows = [
                precompute_hidden_states(
                    frozen, prepared(dataset, tokenizer, training_args), arguments.precompute_dir, split=split
                )
                for dataset, split in zip(rows, splits, strict=True)
            ]
            target = arguments.precompute_dir
    trainer = Eagle3Trainer(
        model=arguments.draft_name_or_path,
        target_model=target,
        args=training_args,
        train_dataset=rows[0],
        eval_dataset=rows[1] if len(rows) > 1 else None,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub()
    if arguments.export_engine is not None and trainer.is_world_process_zero():
        folder = str(Path(training_args.output_dir, "serving"))
        draft = Eagle3DraftModel.from_pretrained(training_args.output_dir)  # whole, even if training sharded it
        export_for_serving(
            draft,
            folder,
            arguments.export_engine,
            dtype=torch.bfloat16,
            target_name_or_path=model_args.model_name_or_path,
        )
        for problem in validate_export(folder):
            print(f"FAILED: {problem}")
    return trainer


def make_parser(subparsers: argparse._SubParsersAction | None = None) -> argparse.ArgumentParser:
    dataclass_types = (Eagle3ScriptArguments, Eagle3Config, ModelConfig)
    if subparsers is not None:
        return subparsers.add_parser("eagle3-train", help="Train an EAGLE-3 draft", dataclass_types=dataclass_types)
    return TrlParser(dataclass_types)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
    # A thread of gloo could abort the process at exit, so all ranks leave together, and no DDP model keeps the group.
    PartialState().wait_for_everyone()
    gc.collect()
    PartialState().destroy_process_group()
