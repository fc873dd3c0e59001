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
and stops. With `--eval_strategy`, a JSON Lines file is also the evaluation set.
"""

import argparse
import gc
import inspect
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig, ScriptArguments, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

from hf_prefix_tree import PrefixTree, TreeSFTConfig, TreeSFTTrainer, prepare_trees
from hf_prefix_tree.data.baselines import flat_steps, per_branch
from hf_prefix_tree.nemo import CROSS_ENTROPY_IGNORE_IDX
from hf_prefix_tree.report.gain import read_tools
from hf_prefix_tree.report.text import console, counts_list


@dataclass
class TreeScriptArguments(ScriptArguments):
    """
    Arguments of this script, besides TRL's.

    Args:
        tools_file (`str`, *optional*):
            JSON file with tool schemas: a list for all dataset rows, or an object that maps each value of `group_by`
            (by default of the column `group`) to its list.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer, if it is not the model's.
        gguf_file (`str`, *optional*):
            Name of a GGUF file in the model's folder to load the weights from.
        random_weights (`bool`, *optional*, defaults to `False`):
            Initialise the model from its config alone.
        baseline (`str`, *optional*):
            Train without trees, with TRL's `SFTTrainer`: `"per_branch"` makes a sample of each branch, `"flat_steps"`
            one of consecutive turns of a conversation, as long as the next prompt extends the last sample.
        dry_run (`bool`, *optional*, defaults to `False`):
            Prepare the data, print the counts, and stop. No model is loaded.
    """

    tools_file: str | None = field(default=None, metadata={"help": "JSON file with tool schemas."})
    tokenizer_name_or_path: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    gguf_file: str | None = field(default=None, metadata={"help": "GGUF file in the model's folder."})
    random_weights: bool = field(default=False, metadata={"help": "Initialise the model from its config alone."})
    baseline: str | None = field(
        default=None,
        metadata={"help": "Train without trees, with SFTTrainer.", "choices": ["per_branch", "flat_steps"]},
    )
    dry_run: bool = field(default=False, metadata={"help": "Prepare the data, print the table, and stop."})


def load_rows(arguments: TreeScriptArguments, training_args: TreeSFTConfig, split: str) -> Dataset:
    """The dataset rows of a split of a Hub dataset, or of a local JSON Lines file, with their tools."""
    if arguments.dataset_name is None:
        raise ValueError("`dataset_name` is missing: pass a Hub dataset or a JSON Lines file.")
    if Path(arguments.dataset_name).is_file():
        rows = load_dataset("json", data_files={split: arguments.dataset_name}, split=split)
    else:
        rows = load_dataset(arguments.dataset_name, arguments.dataset_config, split=split)
    if arguments.tools_file is None:
        return rows
    tools = read_tools(Path(arguments.tools_file), "tools_file")
    names = training_args.column_names or {}
    if "tools" in rows.column_names or "tools" in names:
        raise ValueError("`tools_file` is given, but the rows have tools of their own; leave it out.")
    if isinstance(tools, list):
        return rows.add_column("tools", [json.dumps(tools)] * len(rows))
    group_by = training_args.group_by or "group"
    column = names.get(group_by, group_by)
    if column not in rows.column_names:
        raise ValueError(f"`tools_file` has tools by group, but the rows have no column {column!r}; pass `group_by`.")
    if missing := {str(group) for group in rows.unique(column)} - tools.keys():
        raise ValueError(f"`tools_file` has no tools for {column}={min(missing)!r}; add them, if only an empty list.")
    return rows.add_column("tools", [json.dumps(tools[str(group)]) for group in rows[column]])


def prepared(rows: Dataset, tokenizer: Any, args: TreeSFTConfig, counts: dict[str, Any], **changes: Any) -> Dataset:
    """The trees that `TreeSFTTrainer` makes of the dataset rows: its options have the names of `prepare_trees`."""
    names = inspect.signature(prepare_trees).parameters
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return prepare_trees(rows, tokenizer, num_proc=args.dataset_num_proc, counts=counts, **{**options, **changes})


def folded(rows: Dataset) -> Iterator[PrefixTree]:
    """The trees of prepared dataset rows, or the parts of those that were split."""
    for row in rows:
        yield from map(PrefixTree.from_dict, row.get("trees", [row]))


def baseline_rows(
    rows: Dataset, tokenizer: Any, args: TreeSFTConfig, baseline: str, counts: dict[str, Any]
) -> tuple[Dataset, list[PrefixTree]]:
    """The same data for `SFTTrainer`, selected and truncated in the same way, and the trees that it was taken from."""
    is_flat = baseline == "flat_steps"
    if is_flat and (args.reasoning != "per_turn" or args.group_by is not None):
        raise ValueError(
            "`baseline='flat_steps'` joins the turns of one conversation: leave out `reasoning`, `group_by`."
        )
    changes = {"max_packed_tokens": None} if is_flat or args.overflow == "split" else {}
    trees = list(folded(prepared(rows, tokenizer, args, counts, **changes)))
    samples = [row for tree in trees for row in flat_steps(tree.branches())] if is_flat else per_branch(trees)
    return Dataset.from_list(samples), trees


def selection_table(trees: Sequence[PrefixTree]) -> Table:
    """The table by which prime-rl describes its selection: means and maxima over the trees, and the ratios."""
    stats = [tree.stats() for tree in trees]
    table = Table("", "mean", "max", title=f"{len(stats)} trees", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in (("branches", "K"), ("tree_tokens", "packed tokens"), ("longest_path", "longest path")):
        values = [getattr(of_tree, name) for of_tree in stats]
        table.add_row(title, f"{sum(values) / len(values):,.1f}", f"{max(values):,}")
    for name in ("token_ratio", "pair_ratio"):  # the mean is that of all trees together
        values = [getattr(of_tree, name) for of_tree in stats]
        table.add_row(name.replace("_", " "), f"{getattr(sum(stats[1:], stats[0]), name):.2f}", f"{max(values):.2f}")
    return table


def print_preparation(
    split: str, counts: dict[str, Any], trees: Sequence[PrefixTree], samples: Dataset | None
) -> None:
    """Prints the counts of a split: its trees, and the samples of a baseline."""
    ratios = {f"{name}_ratio": counts[f"branch_{name}s"] / counts[f"tree_{name}s"] for name in ("token", "pair")}
    console().print(counts_list(split, {**counts, **ratios}))
    console().print(selection_table(trees))
    if samples is not None:
        lengths = [len(ids) for ids in samples["input_ids"]]
        supervised = sum(label != CROSS_ENTROPY_IGNORE_IDX for labels in samples["labels"] for label in labels)
        print(
            f"Without trees: {len(lengths):,} samples of {sum(lengths):,} tokens, {supervised:,} supervised, ", end=""
        )
        print(f"the longest {max(lengths):,}.")


def load_model(
    model_args: ModelConfig, arguments: TreeScriptArguments, training_args: TreeSFTConfig
) -> PreTrainedModel:
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    attention = "prefix_tree" if arguments.baseline is None else model_args.attn_implementation
    kwargs = {"trust_remote_code": training_args.trust_remote_code, "attn_implementation": attention}
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


def main(arguments: TreeScriptArguments, training_args: TreeSFTConfig, model_args: ModelConfig) -> SFTTrainer | None:
    tokenizer = AutoTokenizer.from_pretrained(
        arguments.tokenizer_name_or_path or model_args.model_name_or_path,
        gguf_file=None if arguments.tokenizer_name_or_path else arguments.gguf_file,
    )
    splits = [arguments.dataset_train_split]
    if training_args.eval_strategy != "no":
        splits.append(arguments.dataset_test_split)
    datasets = []
    for split in splits:
        rows, counts = load_rows(arguments, training_args, split), {}
        if arguments.baseline is not None:
            rows, trees = baseline_rows(rows, tokenizer, training_args, arguments.baseline, counts)
        elif arguments.dry_run:
            trees = list(folded(prepared(rows, tokenizer, training_args, counts)))
        if arguments.dry_run:
            print_preparation(split, counts, trees, None if arguments.baseline is None else rows)
        datasets.append(rows)
    if arguments.dry_run:
        return None
    trainer_class = TreeSFTTrainer if arguments.baseline is None else SFTTrainer
    trainer = trainer_class(
        model=load_model(model_args, arguments, training_args),
        args=training_args,
        train_dataset=datasets[0],
        eval_dataset=datasets[1] if len(datasets) > 1 else None,
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
    # A thread of gloo could abort the process at exit, so all ranks leave together, and no DDP model keeps the group.
    PartialState().wait_for_everyone()
    gc.collect()
    PartialState().destroy_process_group()
