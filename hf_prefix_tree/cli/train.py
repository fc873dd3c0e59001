# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`hf-prefix-tree train METHOD`: the trainers of this package with TRL's command-line conventions.

Options are those of TRL's scripts: the fields of a method's arguments, of its configuration and of TRL's
`ModelConfig`, on the command line or in a YAML file (`--config`). The example scripts call [`run`] with data of their
own.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from hf_prefix_tree.data.baselines import stock_samples
from hf_prefix_tree.data.formats import with_tools
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.eagle3.data import prepare_eagle3_trees
from hf_prefix_tree.eagle3.export import export_for_serving, validate_export
from hf_prefix_tree.eagle3.model import Eagle3DraftModel
from hf_prefix_tree.eagle3.target import TARGET_FILE, Eagle3Target, precompute_hidden_states
from hf_prefix_tree.report.gain import load_rows, read_tools
from hf_prefix_tree.report.text import console, preparation_tables
from hf_prefix_tree.training.checks import padding_token_of
from hf_prefix_tree.training.options import Parser, option_field
from hf_prefix_tree.tree.folding import check_choice

logger = logging.getLogger(__name__)

MASK_TOKEN = "<|mask|>"  # of a tokenizer that has none
_NO_MODEL = "`model_name_or_path` is missing: pass a model's name or folder."


@dataclass
class TrainArguments(ScriptArguments):
    """Arguments of every method, besides TRL's."""

    tools_file: str | None = option_field(None, "JSON file of tools: a list, or an object of lists by group.")
    tokenizer_name_or_path: str | None = option_field(None, "Tokenizer, if not the model's.")
    dry_run: bool = option_field(False, "Prepare the data, print the counts, and stop.")


@dataclass
class WeightsArguments(TrainArguments):
    """Arguments of the methods that load the model themselves: `diffusion`, and with more, `sft` and `eagle3`."""

    gguf_file: str | None = option_field(None, "GGUF file in the model's folder, for weights and tokenizer.")
    random_weights: bool = option_field(False, "Initialise the model from its config alone.")


@dataclass
class SFTArguments(WeightsArguments):
    """
    Arguments of `sft`.

    Args:
        baseline (`str`, *optional*):
            Train without trees, with TRL's `SFTTrainer`: `"per_branch"` makes a sample of each branch, `"flat_steps"`
            one of consecutive turns of a conversation, as long as the next prompt extends the last sample.
    """

    baseline: str | None = option_field(None, "Train without trees, with SFTTrainer.", ["per_branch", "flat_steps"])


@dataclass
class PreferenceArguments(TrainArguments):
    """Arguments of `dpo` and `kto`."""

    stock: bool = option_field(False, "Train with TRL's trainer, which computes every sequence.")


@dataclass
class PolicyArguments(PreferenceArguments):
    """Arguments of `grpo` and `rloo`."""

    reward_model_name_or_path: str | None = option_field(None, "Reward model.")
    reward_funcs: list[str] | None = option_field(None, "Functions of `trl.rewards`, or dotted import paths.")


@dataclass
class Eagle3Arguments(WeightsArguments):
    """
    Arguments of `eagle3`.

    Args:
        draft_name_or_path (`str`, *optional*):
            Checkpoint of a draft to train further.
        precompute_dir (`str`, *optional*):
            Folder for the target's hidden states, which are written first and trained on. A folder that has them can
            be `model_name_or_path`: then neither target nor dataset is needed.
        export_engine (`str`, *optional*):
            Serving engine to export the draft for, into the folder `serving` of the output.
    """

    draft_name_or_path: str | None = option_field(None, "Draft to train further.")
    precompute_dir: str | None = option_field(None, "Folder for the target's hidden states.")
    export_engine: str | None = option_field(
        None, "Engine to export the draft for.", ["vllm", "sglang", "speculators"]
    )


class Method(NamedTuple):
    """A method: its arguments, and the name of its trainer, which is imported on use."""

    arguments: type[TrainArguments]
    trainer: str  # the configuration ends in `Config` instead, and TRL's trainer does not begin with `Tree`
    columns: tuple[str, ...] = ()  # that TRL's trainer reads unchecked


METHODS = {
    "sft": Method(SFTArguments, "TreeSFTTrainer"),
    "dpo": Method(PreferenceArguments, "TreeDPOTrainer", ("chosen", "rejected")),
    "kto": Method(PreferenceArguments, "TreeKTOTrainer", ("prompt", "completion", "label")),
    "grpo": Method(PolicyArguments, "TreeGRPOTrainer", ("prompt",)),
    "rloo": Method(PolicyArguments, "TreeRLOOTrainer", ("prompt",)),
    "diffusion": Method(WeightsArguments, "DiffusionSFTTrainer"),
    "eagle3": Method(Eagle3Arguments, "Eagle3Trainer"),
}


def parse(
    method: str,
    options: Sequence[str],
    arguments: type[TrainArguments] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, ModelConfig]:
    """
    The arguments, the configuration and TRL's `ModelConfig` of a method. Without an accelerator bf16 is off.

    Args:
        method (`str`): A key of [`METHODS`].
        options (`Sequence[str]`): As on the command line.
        arguments (`type`, *optional*): A class derived from that of the method.
        defaults (`Mapping[str, Any]`, *optional*): Other defaults of options.

    Raises:
        `ValueError`: If the method or an option is unknown.
    """
    check_choice(method, "METHOD", METHODS)
    spec, has_no_gpu = METHODS[method], not torch.accelerator.is_available()
    config = getattr(importlib.import_module("hf_prefix_tree"), spec.trainer.replace("Trainer", "Config"))
    parser = Parser((arguments or spec.arguments, config, ModelConfig), prog=f"hf-prefix-tree train {method}")
    parser.set_defaults(**defaults or {})
    return parser.parse_args_and_config([*(("--bf16", "false") if has_no_gpu else ()), *options])


def run(
    method: str,
    arguments: TrainArguments,
    args: Any,
    model_args: ModelConfig,
    *,
    model: Any = None,
    tokenizer: Any = None,
    datasets: Sequence[Dataset] | None = None,
    **options: Any,
) -> Any:
    """
    Train with a method, save the model, and push it to the Hub if the configuration says so.

    Args:
        method (`str`): A key of [`METHODS`].
        arguments ([`TrainArguments`]), args (a configuration), model_args ([`~trl.ModelConfig`]): From [`parse`].
        model, tokenizer, datasets (*optional*):
            Take the place of those that the arguments name; `datasets` are the rows of the training split and, where
            the configuration evaluates, of the test split.
        **options: Further arguments of the trainer.

    Returns:
        The trainer; `None` after a dry run.

    Raises:
        `ValueError`: If an argument is missing or has no meaning for the method, or the data can't be read.
    """
    spec, is_evaluated = METHODS[method], args.eval_strategy != "no"
    if unread := [name for name in ("dataset_streaming", "ignore_bias_buffers") if getattr(arguments, name)]:
        raise ValueError(f"`{unread[0]}=True` has no effect on these trainers; leave it at `False`.")
    splits = [arguments.dataset_train_split, *([arguments.dataset_test_split] if is_evaluated else [])]
    tokenizer = tokenizer or _load_tokenizer(arguments, args, model_args)
    is_precomputed = method == "eagle3" and Path(str(model_args.model_name_or_path), TARGET_FILE).is_file()
    if datasets is None and is_precomputed:
        datasets = [load_from_disk(str(Path(model_args.model_name_or_path, "rows", split))) for split in splits]
    if datasets is None:
        datasets = [load_split(arguments, split, args) for split in splits]
    baseline = arguments.baseline if isinstance(arguments, SFTArguments) else None
    for rows in datasets if spec.columns else ():
        _check_columns(method, rows)
    late = [f"`{name}={x!r}`" for name in ("chat_template_path", "eos_token") if (x := getattr(args, name, None))]
    if late and (arguments.dry_run or baseline is not None):
        raise ValueError(f"{late[0]}: `dry_run` and `baseline` don't read it; pass a saved tokenizer that has it.")
    if arguments.dry_run:
        for index, (split, rows) in enumerate(zip(splits, datasets, strict=True)):
            _print_preparation(method, split, rows, tokenizer, args, baseline, index == 0)
        return None
    if baseline is not None:
        datasets = [stock_samples(rows, tokenizer, args, baseline, {}, not i)[0] for i, rows in enumerate(datasets)]
    is_stock = baseline is not None or (isinstance(arguments, PreferenceArguments) and arguments.stock)
    attention = "prefix_tree" if method == "sft" and not is_stock else model_args.attn_implementation
    name = model_args.model_name_or_path
    if model is None and name is None:
        raise ValueError(_NO_MODEL)
    if model is None and isinstance(arguments, PreferenceArguments):  # the trainer loads the reference from it, too
        model = name
        args.model_init_kwargs = _model_settings(args, model_args, attention) | (args.model_init_kwargs or {})
    elif model is None and not is_precomputed:
        model = _load_model(arguments, args, model_args, attention)
    if method == "diffusion" and args.mask_token_id is None and tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    if isinstance(arguments, Eagle3Arguments):
        if model_args.use_peft:
            raise ValueError("`use_peft` has no meaning here: the target is frozen, and the draft is trained whole.")
        target = name if is_precomputed else model
        if arguments.precompute_dir is not None and not is_precomputed:
            frozen = Eagle3Target(target, args.aux_layer_ids, args.attn_backend).to(args.device)
            target = arguments.precompute_dir
            pad_token_id = padding_token_of(tokenizer)
            prepared = [prepare_eagle3_trees(rows, args, tokenizer, pad_token_id) for rows in datasets]
            named = zip(prepared, splits, strict=True)
            datasets = [precompute_hidden_states(frozen, rows, target, split=split) for rows, split in named]
        options |= {"model": arguments.draft_name_or_path, "target_model": target}
    else:
        options |= {"model": model, "peft_config": get_peft_config(model_args)}
    if isinstance(arguments, PolicyArguments) and "reward_funcs" not in options:
        options["reward_funcs"] = _reward_functions(arguments)
    module, trainer_name = ("trl", spec.trainer.removeprefix("Tree")) if is_stock else ("hf_prefix_tree", spec.trainer)
    options |= dict(zip(("train_dataset", "eval_dataset"), datasets, strict=False))
    trainer = getattr(importlib.import_module(module), trainer_name)(args=args, processing_class=tokenizer, **options)
    if not (args.bf16 or torch.accelerator.is_available()):
        trainer.add_callback(_WithoutBf16)
    resumed = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint={"true": True, "false": False}.get(str(resumed).lower(), resumed))
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=os.path.basename(arguments.dataset_name or "data"))
    if isinstance(arguments, Eagle3Arguments) and arguments.export_engine and trainer.is_world_process_zero():
        folder, engine = str(Path(args.output_dir, "serving")), arguments.export_engine
        draft = Eagle3DraftModel.from_pretrained(args.output_dir)  # whole, even if training sharded it
        target = None if is_precomputed else name  # the draft knows the target of the states
        export_for_serving(draft, folder, engine, dtype=torch.bfloat16, target_name_or_path=target)
        for problem in validate_export(folder):
            logger.error("The exported draft is not what %s expects: %s", engine, problem)
    return trainer


class _WithoutBf16(TrainerCallback):
    """Says so once training starts: an error before is the only line on standard error."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            logger.warning("bf16 is off, because there is no GPU. `--bf16 true` keeps it.")


def _check_columns(method: str, rows: Dataset) -> None:
    """Raises `ValueError` for columns that TRL's trainers fail on without naming them."""
    columns: list[str] = rows.column_names
    needed = METHODS["dpo" if method == "kto" and "chosen" in columns else method].columns
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(f"`dataset_name` has the columns {columns}, but {method} reads {missing}, too; name them so.")
    texts = sorted({"prompt", *needed} & {*columns} - {"label"})
    kinds = {(getattr(rows.features[name], "dtype", None) or "list").removeprefix("large_") for name in texts}
    kinds |= {"null" for name in texts if None in rows[name]}
    has_labels = "label" not in needed or all(label in (True, False) for label in rows["label"])
    if kinds not in ({"string"}, {"list"}) or not has_labels:
        raise ValueError(
            f"`dataset_name` has {', '.join(sorted(kinds))} in {', '.join(texts)}; pass strings or lists of messages "
            "in all of them, and true or false as `label`."
        )


def main(options: Sequence[str]) -> None:
    """`hf-prefix-tree train`: the method, then its options."""
    run(options[0], *parse(options[0], options[1:]))
    leave()


def leave() -> None:
    """Ends all ranks together: a thread of gloo could abort the process at exit, and no DDP model keeps the group."""
    PartialState().wait_for_everyone()
    gc.collect()
    PartialState().destroy_process_group()


def load_split(arguments: TrainArguments, split: str, args: Any) -> Dataset:
    """
    The dataset rows of a split of a Hub dataset, or of a file, whose only split is every split; with the tools of
    `tools_file`. The configuration's `group_by` and `column_names` say which tools belong to a row.

    Raises:
        `ValueError`: If `dataset_name` is missing, or `tools_file` does not fit the rows.
    """
    if arguments.dataset_name is None:
        raise ValueError("`dataset_name` is missing: pass a Hub dataset or a file.")
    is_file = Path(arguments.dataset_name).is_file()
    rows = load_rows(arguments.dataset_name, "train" if is_file else split, arguments.dataset_config)
    if arguments.tools_file is None:
        return rows
    tools = read_tools(Path(arguments.tools_file), "tools_file")
    columns, group_by = getattr(args, "column_names", None) or {}, getattr(args, "group_by", None) or "group"
    return with_tools(rows, tools, columns, group_by)


def _print_preparation(
    method: str, split: str, rows: Dataset, tokenizer: Any, args: Any, baseline: str | None, is_training: bool
) -> None:
    """Prints the counts of the preparation of a split, and the samples of a baseline."""
    counts: dict[str, Any] = {}
    line = f"{split}: {len(rows):,} rows with the columns {', '.join(rows.column_names)}."
    if method == "sft":
        samples, trees = stock_samples(rows, tokenizer, args, baseline, counts, is_training)
        for table in preparation_tables(split, counts, trees):
            console().print(table)
        if samples is None:
            return
        lengths = [len(ids) for ids in samples["input_ids"]]
        supervised = sum(label != IGNORE_INDEX for labels in samples["labels"] for label in labels)
        line = f"Without trees: {len(lengths):,} samples of {sum(lengths):,} tokens, {supervised:,} supervised, "
        line += f"the longest {max(lengths):,}."
    elif method == "eagle3":
        prepared = prepare_eagle3_trees(rows, args, tokenizer, padding_token_of(tokenizer))
        masks = prepared["branch_count" if "branch_count" in prepared.column_names else "loss_mask"]
        positions, supervised = sum(map(len, masks)), sum(map(sum, masks))
        line = f"{split}: {len(masks):,} sequences of {positions:,} positions, {supervised:,} supervised."
    console().print(line)


def _load_model(arguments: WeightsArguments, args: Any, model_args: ModelConfig, attention: str | None) -> Any:
    """The model that the arguments name."""
    name, settings = model_args.model_name_or_path, _model_settings(args, model_args, attention)
    if arguments.random_weights:
        config = AutoConfig.from_pretrained(name, revision=settings.pop("revision"))
        dtype = torch.float32 if settings["dtype"] == "auto" else settings["dtype"]
        return AutoModelForCausalLM.from_config(config, **settings | {"dtype": dtype})
    model = AutoModelForCausalLM.from_pretrained(name, gguf_file=arguments.gguf_file, **settings)
    return model if arguments.gguf_file is None else expanded(model, attention)


def expanded(model: Any, attention: str | None) -> Any:
    """A model of a GGUF file with plain weights: Transformers counts them as quantized and would not train them."""
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype, attn_implementation=attention)
    plain.load_state_dict(model.state_dict())
    return plain


def _model_settings(args: Any, model_args: ModelConfig, attention: str | None) -> dict[str, Any]:
    """The keyword arguments of `from_pretrained` that the options stand for."""
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    settings = {"revision": model_args.model_revision, "dtype": dtype}
    if hasattr(args, "target_model_init_kwargs"):
        settings |= args.target_model_init_kwargs or {}
    else:
        settings["trust_remote_code"] = args.trust_remote_code
    further = {"quantization_config": get_quantization_config(model_args), "attn_implementation": attention}
    return settings | {name: value for name, value in further.items() if value is not None}


def _load_tokenizer(arguments: TrainArguments, args: Any, model_args: ModelConfig) -> Any:
    name = arguments.tokenizer_name_or_path or model_args.model_name_or_path
    if name is None:
        raise ValueError(_NO_MODEL)
    of_target = getattr(args, "target_model_init_kwargs", None) or {}
    settings = {"trust_remote_code": getattr(args, "trust_remote_code", of_target.get("trust_remote_code"))}
    if arguments.tokenizer_name_or_path is None:
        settings["revision"] = of_target.get("revision", model_args.model_revision)
        settings["gguf_file"] = getattr(arguments, "gguf_file", None)
    try:
        return AutoTokenizer.from_pretrained(name, **settings)
    except Exception as error:  # whatever a broken file makes a loader do
        raise ValueError(f"{name!r} has no tokenizer that can be loaded: {error}") from error


def _reward_functions(arguments: PolicyArguments) -> list[Any]:
    """The reward model and functions that the arguments name."""
    rewards: list[Any] = [name for name in [arguments.reward_model_name_or_path] if name is not None]
    for name in arguments.reward_funcs or []:
        module, _, function = name.rpartition(".")
        if module and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            rewards.append(getattr(importlib.import_module(module or "trl.rewards"), function))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"`reward_funcs` has {name!r}, which can't be imported: {error}.") from error
    if not rewards:
        raise ValueError("`reward_funcs` is missing: pass names of `trl.rewards` or import paths of functions.")
    return rewards
