# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Speculative decoding with an EAGLE-3 draft: the draft proposes tokens, the target verifies them and decides.

```shell
python examples/eagle3_decode.py --target Qwen/Qwen3-0.6B --draft eagle3-draft --prompts_file prompts.jsonl
```

Prints the texts and the acceptance length (tokens per round of the target). `--check` compares with greedy decoding.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from hf_prefix_tree import Eagle3DraftModel
from hf_prefix_tree.eagle3.export import load_exported
from hf_prefix_tree.eagle3.model import speculative_generate
from hf_prefix_tree.eagle3.target import Eagle3Target


@dataclass
class DecodeArguments:
    """
    Arguments of this script.

    Args:
        target (`str`):
            The target model.
        draft (`str`):
            The draft: a checkpoint of `Eagle3Trainer`, or an exported folder.
        prompts_file (`str`):
            JSON Lines file with conversations (`messages`, ending with the user) or texts (`prompt`).
        max_new_tokens (`int`, *optional*, defaults to `128`):
            Tokens to generate for each prompt.
        num_draft_tokens (`int`, *optional*, defaults to `4`):
            Tokens to propose in each round.
        check (`bool`, *optional*, defaults to `False`):
            Whether to compare with greedy decoding.
    """

    target: str = field(metadata={"help": "The target model."})
    draft: str = field(metadata={"help": "The draft: a checkpoint or an exported folder."})
    prompts_file: str = field(metadata={"help": "JSON Lines file with `messages` or `prompt`."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens to generate for each prompt."})
    num_draft_tokens: int = field(default=4, metadata={"help": "Tokens to propose in each round."})
    check: bool = field(default=False, metadata={"help": "Whether to compare with greedy decoding."})


def main(arguments: DecodeArguments) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    config = json.loads(Path(arguments.draft, "config.json").read_text())
    is_checkpoint = config.get("model_type") == "eagle3_draft"
    draft = Eagle3DraftModel.from_pretrained(arguments.draft) if is_checkpoint else load_exported(arguments.draft)
    draft.to(device).eval()
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype="auto").to(device)
    target = Eagle3Target(model, draft.config.aux_layer_ids)
    rounds, accepted = 0, 0
    for line in Path(arguments.prompts_file).read_text().splitlines():
        row = json.loads(line)
        if "messages" in row:
            prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        else:
            prompt = tokenizer(row["prompt"])["input_ids"]
        settings = (prompt, arguments.max_new_tokens)
        result = speculative_generate(
            target, draft, *settings, arguments.num_draft_tokens, eos_token_id=tokenizer.eos_token_id
        )
        print(tokenizer.decode(result.tokens))
        print(f"--- {len(result.tokens)} tokens in {len(result.accepted)} rounds, {result.acceptance_length:.2f} each")
        if arguments.check:
            plain = speculative_generate(target, draft, *settings, 0, eos_token_id=tokenizer.eos_token_id)
            print("--- equal to greedy decoding" if plain.tokens == result.tokens else "--- NOT greedy decoding")
        rounds, accepted = rounds + len(result.accepted), accepted + sum(result.accepted)
    print(f"Acceptance length: {1 + accepted / max(rounds, 1):.2f} tokens per round of the target.")


def make_parser(subparsers: argparse._SubParsersAction | None = None) -> argparse.ArgumentParser:
    if subparsers is not None:
        return subparsers.add_parser("eagle3-decode", help="Decode with a draft", dataclass_types=DecodeArguments)
    return TrlParser(DecodeArguments)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
