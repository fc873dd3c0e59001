# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
`python -m examples.demo.files`: the files that the commands and snippets of the documentation name, so that they run
without a GPU and without the Hub.

Written into the current folder: `dialogues.jsonl` with `dialogues.tools.json` (help-desk dialogues), `pairs.jsonl`
(preferences), `completions.jsonl` (several of each prompt), `prompts.jsonl`, and in `Qwen/Qwen3-0.6B` a tiny model
with random weights and its tokenizer, which Transformers loads in place of the Hub's model of that name. Delete the
folder `Qwen` to train the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from .dialogues import dialogue_texts, generate_dialogues
from .tokenizer import train_tokenizer

MODEL = "Qwen/Qwen3-0.6B"


def main(folder: Path = Path()) -> None:
    """Writes the files into the folder."""
    dialogues = generate_dialogues(num_groups=2, trials=2)
    rows = [{name: row[name] for name in ("group", "trial", "messages")} for row in dialogues]
    _write_lines(folder / "dialogues.jsonl", rows)
    tools = {row["group"]: row["tools"] for row in dialogues}
    (folder / "dialogues.tools.json").write_text(json.dumps(tools), encoding="utf-8")
    questions = [row["messages"][:2] for row in dialogues[::2]]
    _write_lines(folder / "prompts.jsonl", [{"messages": messages} for messages in questions])
    answers = {"chosen": _answer("One moment, please."), "rejected": _answer("No.")}
    _write_lines(folder / "pairs.jsonl", [{"prompt": messages, **answers} for messages in questions])
    texts = [messages[-1]["content"] for messages in questions]
    completions = [{"prompt": text, "completions": ["One moment, please.", "Yes."]} for text in texts]
    _write_lines(folder / "completions.jsonl", completions)

    tokenizer = train_tokenizer(dialogue_texts(dialogues))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **tokens))
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)


def _answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
