# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Speculative decoding with an EAGLE-3 draft: the draft proposes, the target verifies, the text is the target's own.

```shell
python examples/eagle3_decode.py --target Qwen/Qwen3-0.6B --draft eagle3-draft --prompts_file prompts.jsonl
```

Every round, the draft proposes `num_draft_tokens` tokens and one forward of the target checks them all: those that the
target would have chosen itself are kept, and one token of the target's own follows. So a round brings at least one
token, and the output equals greedy decoding. There is no KV cache: this shows how many tokens are accepted, which is
the same in a serving engine, and not how fast it is.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from hf_prefix_tree.eagle3 import Eagle3DraftModel, Eagle3Target, load_exported


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


@dataclass
class Generation:
    """
    What was generated, and how.

    Args:
        tokens (`list[int]`): The generated tokens.
        accepted (`list[int]`): Accepted draft tokens of each round.
    """

    tokens: list[int]
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round of the target: the accepted ones and its own."""
        return 1 + sum(self.accepted) / max(len(self.accepted), 1)


@torch.no_grad()
def speculative_generate(
    target: Eagle3Target,
    draft: Eagle3DraftModel,
    prompt_ids: list[int],
    max_new_tokens: int,
    num_draft_tokens: int = 4,
    eos_token_id: int | None = None,
) -> Generation:
    """
    Greedy decoding of the target, with the draft's help.

    Args:
        target ([`Eagle3Target`]): The target.
        draft ([`Eagle3DraftModel`]): Its draft, on the same device.
        prompt_ids (`list[int]`): The prompt.
        max_new_tokens (`int`): Tokens to generate at most.
        num_draft_tokens (`int`, *optional*, defaults to `4`): Tokens to propose in each round; 0: no draft.
        eos_token_id (`int`, *optional*): Token that ends the text.
    """
    ids = list(prompt_ids)  # what the target has seen and agreed with
    aux, choices = _run_target(target, ids)
    own = choices[-1]  # the target's next token
    accepted = []
    while len(ids) - len(prompt_ids) < max_new_tokens - 1 and eos_token_id not in [*ids[len(prompt_ids) :], own]:
        context = torch.tensor([[*ids, own]], device=aux.device)
        drafted = draft.propose(context, aux, num_draft_tokens).tolist() if num_draft_tokens else []
        aux, choices = _run_target(target, [*ids, own, *drafted])
        at = len(ids)  # the target's choice after `own`
        count = 0
        while count < len(drafted) and drafted[count] == choices[at + count]:
            count += 1
        ids += [own, *drafted[:count]]
        own = choices[at + count]
        aux = aux[:, : len(ids)]
        accepted.append(count)
    tokens = [*ids, own][len(prompt_ids) :][:max_new_tokens]
    if eos_token_id in tokens:
        tokens = tokens[: tokens.index(eos_token_id) + 1]
    return Generation(tokens, accepted)


def _run_target(target: Eagle3Target, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Auxiliary hidden states of a sequence, and the target's first choice after each of its tokens."""
    input_ids = torch.tensor([ids], device=target.head.device)
    states = target.states({"input_ids": input_ids, "seq_lens": torch.tensor([[len(ids)]], device=input_ids.device)})
    return states["aux_hidden_states"], states["target_ids"][0].tolist()


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
