# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""How much of small LoRA updates bfloat16 keeps, by dtype of weights, adapters and residual stream.

    python -m benchmarks.adapter_updates --output adapter_updates.csv
    python -m benchmarks.adapter_updates --models smollm2 --gguf FILE.gguf --steps 32 --trees 4 --modes eager

All runs start from the same weights (rounded to bfloat16, as checkpoints are) and the same adapters, and take AdamW
steps on the same branches: `tree` as one packed sequence, `stock` as a padded batch under SDPA, without this package.
`compiled` compiles each decoder layer. `SETTINGS` lists the dtypes; each is compared with `float32` of the same side.

The first two steps use the same branches, so the second shows the effect of the first. `moved` is the change of the
loss, `hidden_moved` the change of the last hidden states relative to their norm, `follows` the projection of that
change onto the change in float32 (1: all of it, on average), and `cosine` the cosine of both (below 1: rounding
differs from step to step). `lost` is the share of outputs of adapted linear layers that equal those of the layer
without its adapter (stock, eager). `gap` is the distance of the loss from the loss in float32, averaged over the
steps. `judged` is the mean loss of all batches with the trained adapters, evaluated in float32, and `judged_before`
the same without adapters: they show what was learned, whatever the forward showed.

Models: `smollm2` has real weights and trains on generated dialogues; `0.6b` and `8b-wide` (2 layers) have random ones.
`sum` is not a model but the sum at the end of a block, residual + (output of the linear layer + output of its
adapter), for a million random numbers (standard deviation 1, and `delta` for the adapter): `follows` is the projection
of its change onto the adapter's output, for a residual and an output of the linear layer in either dtype.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config

from benchmarks.common import Results, Row, environment, make_parser, print_table, progress
from benchmarks.flops import shape_config
from benchmarks.shapes import build, rollouts
from examples.demo.dialogues import dialogue_texts, generate_dialogues
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import DataCollatorForPrefixTree, PrefixTree, conversation_branches, fold, prepare_model

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


class Setting(NamedTuple):
    """Dtypes of a run. `residual`, of embeddings and norms, is the dtype of the residual stream under autocast."""

    weights: torch.dtype
    adapters: torch.dtype
    residual: torch.dtype
    autocast: bool


SETTINGS = {
    "float32": Setting(FLOAT32, FLOAT32, FLOAT32, autocast=False),
    "bf16": Setting(BFLOAT16, BFLOAT16, BFLOAT16, autocast=False),
    "bf16, float32 adapters": Setting(BFLOAT16, FLOAT32, BFLOAT16, autocast=False),
    "bf16, float32 adapters, autocast": Setting(BFLOAT16, FLOAT32, BFLOAT16, autocast=True),
    "bf16, float32 adapters and residual, autocast": Setting(BFLOAT16, FLOAT32, FLOAT32, autocast=True),
    "float32, autocast": Setting(FLOAT32, FLOAT32, FLOAT32, autocast=True),
}
MODELS = ("smollm2", "0.6b", "8b-wide")
SUM = "sum"
DELTAS = (1e-5, 1e-4, 1e-3, 1e-2)
QUICK_MODEL = "quick"
SIDES, MODES = ("stock", "tree"), ("eager", "compiled")
VOCAB = 4096  # of random weights: the head is no part of the question
COLUMNS = [
    "model",
    "setting",
    "side",
    "mode",
    "lr",
    "delta",
    "loss",
    "moved",
    "hidden_moved",
    "follows",
    "cosine",
    "lost",
]
COLUMNS += ["steps", "last", "gap", "judged"]

Batch = dict[str, torch.Tensor]


class Task(NamedTuple):
    """A model whose weights are representable in bfloat16, and the trees of the steps."""

    model: PreTrainedModel
    trees: list[PrefixTree]


def load(name: str, gguf: Path | None, count: int, device: torch.device) -> Task:
    torch.manual_seed(0)
    if name == "smollm2":
        assert gguf is not None
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=FLOAT32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        dialogues = generate_dialogues(num_groups=count, trials=1)
        tokenizer.chat_template = train_tokenizer(dialogue_texts(dialogues)).chat_template
        turns = [conversation_branches(row["messages"], tokenizer).branches for row in dialogues]
        trees = [fold(branches[:2], weighting="branch") for branches in turns]
    else:
        config: Qwen3Config = shape_config({"8b-wide": "8b"}.get(name, name))
        config.vocab_size, config.tie_word_embeddings = VOCAB, True
        config.num_hidden_layers = min(config.num_hidden_layers, 2 if name == "8b-wide" else 28)
        model = AutoModelForCausalLM.from_config(config, dtype=FLOAT32)
        sizes = (16, 4, 8) if name == QUICK_MODEL else (64, 4, 16)
        trees = [build(rollouts(*sizes), seed, VOCAB) for seed in range(count)]
    cast(model, BFLOAT16)
    return Task(model.to(device), trees)


def cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters only: rotary frequencies stay in float32, as in models that are loaded in 16 bits."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def make_model(task: Task, setting: Setting, side: str, mode: str) -> PeftModel:
    base = copy.deepcopy(task.model)
    base.set_attn_implementation("prefix_tree" if side == "tree" else "sdpa")
    cast(base, setting.weights)
    for module in base.modules():
        if isinstance(module, torch.nn.Embedding) or type(module).__name__.endswith("RMSNorm"):
            cast(module, setting.residual)
    torch.manual_seed(1)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base, lora)  # adapters in float32
    for parameter in adapters(model):
        parameter.data = parameter.data.to(BFLOAT16).to(setting.adapters)
    model.train()
    if side == "tree":
        # the self-check runs as training does
        with torch.autocast(base.device.type, BFLOAT16, enabled=setting.autocast):
            prepare_model(model, compile_layers=mode == "compiled")
    elif mode == "compiled":
        for layer in base.model.layers:
            layer.compile()
    return model


def adapters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch_of(tree: PrefixTree, side: str) -> Batch:
    if side == "tree":
        return DataCollatorForPrefixTree(pad_token_id=0, weighting="branch")([tree])
    branches = tree.branches()
    ids, labels, mask = (torch.zeros(len(branches), max(map(len, branches)), dtype=torch.int64) for _ in range(3))
    labels -= 100
    for index, branch in enumerate(branches):
        tokens = torch.from_numpy(branch.input_ids.copy()).long()
        ids[index, : len(branch)], mask[index, : len(branch)] = tokens, 1
        labels[index, : len(branch)] = torch.where(torch.from_numpy(branch.weights.copy()) > 0, tokens, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Trace:
    """Last hidden states of a forward, and how many outputs of adapted layers equal those of the layers below."""

    def __init__(self, model: PeftModel, counts: bool) -> None:
        self.hidden, self.same, self.outputs = torch.zeros(()), 0, 0
        self._below: dict[int, torch.Tensor] = {}
        modules = [module for module in model.modules() if isinstance(module, LoraLinear)] if counts else []
        self._handles = [model.get_base_model().model.norm.register_forward_hook(self._keep)]
        for module in modules:
            self._handles.append(module.base_layer.register_forward_hook(self._remember(id(module))))
            self._handles.append(module.register_forward_hook(self._compare))

    def _keep(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.hidden = output.detach().double()

    def _remember(self, key: int) -> Callable:
        def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._below[key] = output.detach()

        return hook

    def _compare(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.same += int((self._below.pop(id(module)) == output).sum())
        self.outputs += output.numel()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Run(NamedTuple):
    losses: list[float]
    hidden: list[torch.Tensor]  # of the first batch, before and after the first step
    lost: float | None
    trained: list[torch.Tensor]


def train(
    model: PeftModel, batches: list[Batch], setting: Setting, learning_rate: float, steps: int, counts: bool
) -> Run:
    """Steps 1 and 2 use the first batch, so the second shows the effect of the first."""
    # no weight decay, no clipping: a step of Adam is one learning rate for each parameter
    optimizer = torch.optim.AdamW(adapters(model), lr=learning_rate, weight_decay=0.0)
    losses, hidden, lost = [], [], None
    for step in range(steps):
        batch = batches[max(0, step - 1) % len(batches)]
        trace = Trace(model, counts and step == 1) if step < 2 else None
        with torch.autocast(model.device.type, BFLOAT16, enabled=setting.autocast):
            loss = model(**batch).loss
        loss.backward()
        if trace is not None:
            trace.remove()
            hidden.append(trace.hidden)
            lost = trace.same / trace.outputs if trace.outputs else None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, hidden, lost, [parameter.detach().float() for parameter in adapters(model)])


@torch.no_grad()
def judge(model: PeftModel, batches: list[Batch], trained: list[torch.Tensor] | None) -> float:
    """The mean loss in float32 under trained adapters, or without any."""
    if trained is None:
        with model.disable_adapter():
            return sum(model(**batch).loss.item() for batch in batches) / len(batches)
    for parameter, value in zip(adapters(model), trained, strict=True):
        parameter.copy_(value)
    return sum(model(**batch).loss.item() for batch in batches) / len(batches)


def compare(run: Run, reference: Run) -> Row:
    """The effect of the first step that the second shows, and the distance of the losses."""
    (before, after), (exact_before, exact_after) = run.hidden, reference.hidden
    change, exact = (after - before).flatten(), (exact_after - exact_before).flatten()
    gaps = [abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)]
    last = run.losses[-min(10, len(run.losses) // 2) :]
    return {
        "loss": run.losses[0],
        "moved": run.losses[1] - run.losses[0],
        "hidden_error": ((before - exact_before).norm() / exact_before.norm()).item(),
        "hidden_moved": (change.norm() / before.norm()).item(),
        "follows": (change @ exact / (exact @ exact)).item(),
        "cosine": (change @ exact / (change.norm() * exact.norm()).clamp(min=1e-30)).item(),
        "lost": run.lost,
        "steps": len(run.losses),
        "last": sum(last) / len(last),
        "gap": sum(gaps) / len(gaps),
        "largest_gap": max(gaps),
    }


def end_of_block(residual: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """PEFT's linear layer with an adapter in float32, and the residual."""
    return residual + (base + delta).to(base.dtype)


def sums(modes: Sequence[str], device: torch.device) -> list[Row]:
    rows: list[Row] = []
    generator = torch.Generator().manual_seed(0)
    residual, base, unit = (torch.randn(2**20, generator=generator).to(device) for _ in range(3))
    for mode, of_residual, of_base in itertools.product(modes, (BFLOAT16, FLOAT32), (BFLOAT16, FLOAT32)):
        function = torch.compile(end_of_block) if mode == "compiled" else end_of_block
        fixed = residual.to(of_residual), base.to(of_base)
        for delta in DELTAS:
            before, after = (function(*fixed, unit * scale).to(of_residual).double() for scale in (0.0, delta))
            exact = unit.double() * delta
            setting = f"residual {_name(of_residual)}, linear {_name(of_base)}"
            row: Row = {"model": SUM, "setting": setting, "mode": mode, "delta": delta}
            row["follows"] = ((after - before) @ exact / (exact @ exact)).item()
            row["cosine"] = ((after - before) @ exact / ((after - before).norm() * exact.norm())).item()
            rows.append(row)
    return rows


def _name(dtype: torch.dtype) -> str:
    return "float32" if dtype == FLOAT32 else "bf16"


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SETTINGS)
    parser.add_argument("--models", nargs="+", choices=(SUM, *MODELS), default=[SUM, *MODELS[1:]])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-5])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trees", type=int, default=8, help="that the steps take in turn")
    parser.add_argument("--gguf", type=Path, help="GGUF file of SmolLM2, for `--models smollm2`")
    args = parser.parse_args(argv)
    if args.quick:
        args.models, args.modes, args.steps, args.trees = [SUM, QUICK_MODEL], ["eager"], min(args.steps, 3), 2
    if "smollm2" in args.models and args.gguf is None:
        parser.error("`--models smollm2` needs `--gguf`")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.quick else "cpu")
    where = environment(device, args.commit)
    if device.type == "cpu":
        where["device"] = f"CPU, {os.cpu_count()} cores"
    results = Results(args.output, where)
    if SUM in args.models:
        for row in sums(args.modes, device):
            progress(results.rows, row)
        results.write()
    for name in args.models:
        if name == SUM:
            continue
        task = load(name, args.gguf, min(args.trees, max(1, args.steps - 1)), device)
        for side in args.sides:
            batches = [{key: x.to(device) for key, x in batch_of(tree, side).items()} for tree in task.trees]
            exact = SETTINGS["float32"]
            judging = make_model(task, exact, side, "eager").eval() if args.steps > 2 else None
            before = None if judging is None else judge(judging, batches, None)
            for learning_rate in args.learning_rates:
                model = make_model(task, exact, side, "eager")
                reference = train(model, batches, exact, learning_rate, args.steps, side == "stock")
                for key, mode in itertools.product(args.only, args.modes):
                    run = reference
                    if (key, mode) != ("float32", "eager"):
                        torch._dynamo.reset()
                        model = make_model(task, SETTINGS[key], side, mode)
                        counts = side == "stock" and mode == "eager"
                        run = train(model, batches, SETTINGS[key], learning_rate, args.steps, counts)
                    row: Row = {"model": name, "setting": key, "side": side, "mode": mode, "lr": learning_rate}
                    row |= compare(run, reference)
                    if judging is not None:
                        row |= {"judged_before": before, "judged": judge(judging, batches, run.trained)}
                    progress(results.rows, row)
                    results.write()
    print_table([{column: row.get(column) for column in COLUMNS} for row in results.rows])
    return results.rows


if __name__ == "__main__":
    main(sys.argv[1:])
