# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Trains two copies of one model side by side, with the same data and optimizer, in float32: one copy on folded trees,
the other on their branches one by one. Reports the loss of every step and the distance between the final weights.

```shell
python examples/parity.py --steps 20                                   # a tiny model, on CPU
python examples/parity.py --shape qwen3-0.6b --steps 200               # a Qwen3-0.6B shape, random weights, on a GPU
python examples/parity.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --steps 200
python examples/parity.py --model_name_or_path FOLDER --gguf_file FILE.gguf --steps 200
```
"""

import argparse
import csv
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from demo.dialogues import dialogue_texts, generate_dialogues
from demo.tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from hf_prefix_tree import PrefixTree, conversation_branches, fold, prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees

SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


def load_model(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    if args.model_name_or_path is None:
        config = Qwen3Config(**{"vocab_size": 1024, "num_key_value_heads": 2, **SHAPES[args.shape]})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="prefix_tree")
    else:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path,
            gguf_file=args.gguf_file,
            dtype=torch.float32,
            attn_implementation="prefix_tree",
        )
    return prepare_model(model.to("cuda" if torch.cuda.is_available() else "cpu").train())


def make_trees(args: argparse.Namespace) -> list[PrefixTree]:
    dialogues = generate_dialogues(num_groups=args.trees or args.steps, trials=1)
    if args.model_name_or_path is None:
        tokenizer = train_tokenizer(dialogue_texts(dialogues))
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, gguf_file=args.gguf_file)
        if tokenizer.chat_template is None or args.demo_template:
            tokenizer.chat_template = train_tokenizer(dialogue_texts(dialogues)).chat_template
    trees = []
    for row in dialogues:
        tools = None if args.without_tools else row["tools"]
        branches = conversation_branches(row["messages"], tokenizer, tools=tools).branches
        trees.append(fold(branches[: args.turns]))
    return trees


def tree_step(model: torch.nn.Module, tree: PrefixTree) -> float:
    batch = {name: value.to(model.device) for name, value in concatenate_trees([tree], pad_token_id=0).items()}
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


def per_branch_step(model: torch.nn.Module, tree: PrefixTree) -> float:
    """Each branch has the weight 1/K; the sum is divided by the summed weights. Runs backward branch by branch."""
    divisor = tree.weights.sum()
    total = 0.0
    for branch in tree.branches():
        ids = torch.from_numpy(branch.input_ids.copy())[None].to(model.device)
        weights = torch.from_numpy(branch.weights[1:] / tree.num_branches / divisor).to(model.device)
        logits = model(input_ids=ids).logits[0, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        loss = (nll.double() * weights).sum()
        loss.backward()
        total += loss.item()
    return total


def main(args: argparse.Namespace) -> float:
    torch.set_float32_matmul_precision("highest")
    trees = make_trees(args)
    stats = sum((tree.stats() for tree in trees[1:]), trees[0].stats())
    models = [load_model(args), load_model(args)]
    initial = [p.detach().clone() for p in models[0].parameters()]
    optimizer_class = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[args.optimizer]
    optimizers = [optimizer_class(model.parameters(), lr=args.learning_rate, fused=True) for model in models]
    rows, seconds = [], np.zeros(2)
    for step in range(args.steps):
        tree, losses = trees[step % len(trees)], []
        for which, (run, model) in enumerate(zip((tree_step, per_branch_step), models, strict=True)):
            start = time.perf_counter()
            losses.append(run(model, tree))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[which].step()
            optimizers[which].zero_grad()
            seconds[which] += time.perf_counter() - start
        rows.append((step, *losses, abs(losses[0] - losses[1]) / abs(losses[1])))
        if step % 20 == 0:
            print("step {}: tree {:.7f}, branches {:.7f}, relative difference {:.1e}".format(*rows[-1]), flush=True)
    pairs = list(zip(*(model.parameters() for model in models), initial, strict=True))
    moved = sum((a.detach() - c).double().square().sum() for a, _, c in pairs).sqrt().item()
    apart = sum((a.detach() - b.detach()).double().square().sum() for a, b, _ in pairs).sqrt().item()
    worst = max(row[3] for row in rows)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    summary = {
        "model": (args.model_name_or_path and Path(args.model_name_or_path).name) or f"{args.shape} (random weights)",
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": args.steps,
        "optimizer": f"{args.optimizer}, learning rate {args.learning_rate:g}, gradients clipped at norm 1",
        "branch_tokens_per_step": f"{stats.branch_tokens / len(trees):.0f}",
        "token_ratio": f"{stats.token_ratio:.2f}",
        "first_loss": f"{rows[0][2]:.4f}",
        "last_loss": f"{rows[-1][2]:.4f}",
        "largest_relative_loss_difference": f"{worst:.2e}",
        "median_relative_loss_difference": f"{np.median([row[3] for row in rows]):.2e}",
        "drift_over_movement": f"{apart / moved:.2e}",
        "seconds_per_step_tree": f"{seconds[0] / args.steps:.3f}",
        "seconds_per_step_branches": f"{seconds[1] / args.steps:.3f}",
    }
    for name, value in summary.items():
        print(f"{name:34} {value}")
    if args.output is not None:
        path = Path(args.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            file.writelines(f"# {name}: {value}\n" for name, value in summary.items())
            writer = csv.writer(file)
            writer.writerow(["step", "tree_loss", "branch_loss", "relative_difference"])
            writer.writerows(rows)
    return worst


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="Hub id or folder; without it, random weights of --shape")
    parser.add_argument("--gguf_file", help="file name of GGUF weights in that folder")
    parser.add_argument("--demo_template", action="store_true", help="render with the demo's chat template")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trees", type=int, help="dialogues that the steps cycle through (default: one per step)")
    parser.add_argument("--turns", type=int, default=4, help="assistant turns per dialogue, each a branch")
    parser.add_argument("--without_tools", action="store_true", help="leave tool schemas out: shorter prompts")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--bound", type=float, default=1e-6, help="largest relative loss difference that passes")
    parser.add_argument("--output", help="CSV file for the losses of every step")
    return parser


if __name__ == "__main__":
    arguments = make_parser().parse_args()
    largest = main(arguments)
    if not largest <= arguments.bound:
        sys.exit(f"the losses differ by {largest:.1e}, more than {arguments.bound:.0e}")
