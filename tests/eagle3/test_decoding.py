"""Proof that it drafts: acceptance rises with training, the text stays the target's; and the training script."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree import DataCollatorForEagle3, Eagle3Config, Eagle3DraftConfig, Eagle3DraftModel, Eagle3Trainer
from hf_prefix_tree.eagle3.export import load_exported, validate_export
from hf_prefix_tree.eagle3.target import Eagle3Target
from tests.support.drafts import AUX
from tests.support.eagle3_runs import OPTIONS

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
VOCAB = 48


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def sentences(count, length, seed):
    """A language: the next token follows from the last two, but for one in ten."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(99))
    ids = torch.randint(0, VOCAB, (count, length), generator=generator)
    for at in range(2, length):
        follows = torch.rand(count, generator=generator) < 0.9
        ids[:, at] = torch.where(follows, rule[ids[:, at - 1], ids[:, at - 2] % 4], ids[:, at])
    return ids


@pytest.fixture(scope="module")
def target_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        ids = sentences(32, 16, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
def test_acceptance_rises_with_training_and_the_output_is_greedy_decoding(target_model, tmp_path):
    decode = example("eagle3_decode")
    prompts = sentences(6, 4, seed=1000).tolist()
    # float64: a row of another length must not tip a close choice
    greedy = []
    model = target_model.double().eval()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        greedy.append(out[0, len(prompt) :].tolist())
    model.float()
    config = Eagle3DraftConfig.from_target(model.config, aux_layer_ids=AUX, draft_vocab_size=40)
    torch.manual_seed(0)
    draft = Eagle3DraftModel(config)
    draft.init_from_target(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    rows = [{"input_ids": row, "loss_mask": [1] * 24} for row in sentences(640, 24, seed=2000).tolist()]
    trainer = Eagle3Trainer(
        model=draft,
        target_model=model,
        args=Eagle3Config(
            str(tmp_path),
            **{
                **OPTIONS,
                "optim": "adamw_torch",
                "learning_rate": 3e-3,
                "per_device_train_batch_size": 4,
                "packed_sequence_size": 96,
                "max_steps": 80,
                "logging_steps": 40,
                "ttt_steps": 4,
                "max_grad_norm": 1.0,
            },
        ),
        data_collator=DataCollatorForEagle3(0, length=96),
        train_dataset=rows,
    )

    def lengths():
        trainer.target.model.double()
        trainer.target.to(torch.device("cpu"))
        draft.double().eval()
        found = [decode.speculative_generate(trainer.target, draft, prompt, 24, 4) for prompt in prompts]
        assert [result.tokens for result in found] == greedy
        trainer.target.model.float()
        trainer.target.to(torch.device("cpu"))
        draft.float()
        accepted = [count for result in found for count in result.accepted]
        return 1 + sum(accepted) / len(accepted)

    before = lengths()
    trainer.train()
    after = lengths()
    assert before < 1.5
    assert after > 2.5
    logged = [entry["tau"] for entry in trainer.state.log_history if "tau" in entry]
    assert logged[-1] > logged[0]


def test_decoding_ends_with_the_end_token_and_at_the_limit(target_model):
    decode = example("eagle3_decode")
    target = Eagle3Target(target_model, AUX)
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_target(target_model.config, aux_layer_ids=AUX))
    plain = decode.speculative_generate(target, draft, [1, 2, 3], 9, num_draft_tokens=0)
    assert len(plain.tokens) == 9 and plain.acceptance_length == 1.0 and len(plain.accepted) == 8
    end = plain.tokens[4]
    stopped = decode.speculative_generate(target, draft, [1, 2, 3], 9, 3, eos_token_id=end)
    assert stopped.tokens == plain.tokens[: plain.tokens.index(end) + 1]


# ---- the scripts ----


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, tiny_tokenizer):
    """A tiny target and a file of dialogues."""
    folder = tmp_path_factory.mktemp("eagle3")
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    rows = [{"messages": row["messages"], "tools": json.dumps(row["tools"])} for row in generate_dialogues(4, 1)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = {"messages": rows[0]["messages"][:2]}
    (folder / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    return folder


def arguments(folder, **options):
    options = {
        "model_name_or_path": folder / "target",
        "dataset_name": folder / "rows.jsonl",
        "output_dir": folder / "out",
        "packed_sequence_size": 512,
        "draft_vocab_size": 128,
        "max_steps": 2,
        "logging_steps": 1,
        "ttt_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def run(name, words):
    module = example(name)
    if name == "eagle3_train":
        return module.main(words)
    return module.main(*module.make_parser().parse_args_and_config(words))


def test_dry_run(workspace, capsys):
    assert run("eagle3_train", [*arguments(workspace), "--dry_run"]) is None
    assert "supervised" in capsys.readouterr().out


def test_options_without_a_meaning_are_refused(workspace):
    with pytest.raises(ValueError, match="`use_peft`"):
        run("eagle3_train", [*arguments(workspace), "--use_peft"])


def test_training_exports_and_decodes(workspace, capsys):
    trainer = run("eagle3_train", arguments(workspace, export_engine="vllm"))
    assert [entry["loss"] > 0 for entry in trainer.state.log_history if "loss" in entry] == [True, True]
    assert trainer.model.config.aux_layer_ids == [1, 2, 3]
    served = workspace / "out" / "serving"
    assert validate_export(served) == []
    assert load_exported(served).dtype == torch.bfloat16
    capsys.readouterr()
    for draft in (workspace / "out", served):
        words = ["--target", workspace / "target", "--draft", draft, "--prompts_file", workspace / "prompts.jsonl"]
        run("eagle3_decode", [*map(str, words), "--max_new_tokens", "6", "--check"])
        assert "--- equal to greedy decoding" in capsys.readouterr().out


def test_training_on_precomputed_states(workspace):
    states = workspace / "states"
    first = run("eagle3_train", arguments(workspace, precompute_dir=states))
    options = {"model_name_or_path": states, "tokenizer_name_or_path": workspace / "target"}
    again = run("eagle3_train", arguments(workspace, export_engine="speculators", **options))
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (first, again)]
    assert losses[0] == losses[1]
    exported = json.loads((workspace / "out" / "serving" / "config.json").read_text())
    assert exported["speculators_config"]["verifier"]["name_or_path"] == str(workspace / "target")  # not the states
