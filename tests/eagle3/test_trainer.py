"""`Eagle3Trainer`: the step's normaliser, packed and padded, precomputed states, what is saved, two processes."""

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree import (
    DataCollatorForEagle3,
    Eagle3Config,
    Eagle3DraftModel,
    Eagle3Trainer,
    build_eagle3_dataloader,
    build_token_mapping,
    export_for_serving,
    load_token_mapping,
)
from hf_prefix_tree.eagle3.export import validate_export
from hf_prefix_tree.eagle3.loss import StepSums
from hf_prefix_tree.eagle3.target import Eagle3Target, precompute_hidden_states
from tests.support.drafts import AUX, TARGETS, VOCAB, collated, make_target
from tests.support.eagle3_ranks import train_and_evaluate
from tests.support.eagle3_runs import (
    BY_LENGTH,
    branch_rows,
    distance,
    documents,
    small_draft,
    train,
    trainer_of,
    weights,
)
from tests.support.ranks import run_ranks


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_the_loss_is_normalised_over_the_optimizer_step(tmp_path):
    rows = documents(8)
    one = train(tmp_path, rows, per_device_train_batch_size=4)
    four = train(tmp_path, rows, gradient_accumulation_steps=4)
    assert distance(weights(four.model), weights(one.model), weights(small_draft())) < 1e-5
    for first, second in zip(logs_of(one), logs_of(four), strict=True):
        for name in ("loss", "tau", "accuracy/step_0", "accuracy/step_2"):
            assert second[name] == pytest.approx(first[name], rel=1e-5), name
    # what is logged is what the model says about the same rows
    draft, target = small_draft(), Eagle3Target(make_target(dtype=torch.float32), AUX)
    batch = collated(rows[:4], None)
    states = target.states(batch)
    logits = target.draft_logits(states.pop("last_hidden_states"), draft.draft_ids)
    output = draft(**batch, **states, target_logits=logits, ttt_steps=3)
    assert logs_of(one)[0]["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert {name: logs_of(one)[0][name] for name in output.sums.metrics()} == output.sums.metrics()


def test_packed_and_padded_training_agree(tmp_path):
    rows = documents(6)
    padded = train(tmp_path, rows, per_device_train_batch_size=6, max_steps=1)
    start = weights(small_draft())
    for source in (rows, Dataset.from_list(rows)):
        packed = train(tmp_path, source, per_device_train_batch_size=9, max_steps=1, packed_sequence_size=32)
        assert len(packed.train_dataset) < len(rows)
        assert distance(weights(packed.model), weights(padded.model), start) < 1e-5


@pytest.mark.parametrize("packed_sequence_size", [0, 32])
def test_precomputed_states_train_the_same_draft(tmp_path, packed_sequence_size):
    options = {"gradient_accumulation_steps": 2, "packed_sequence_size": packed_sequence_size}
    online = train(tmp_path, documents(6), **options)
    target = Eagle3Target(make_target(dtype=torch.float32), AUX)
    described = precompute_hidden_states(target, online.train_dataset, tmp_path / "states")
    start = weights(small_draft())
    for rows in (described, load_from_disk(str(tmp_path / "states" / "rows" / "train"))):
        offline = train(tmp_path, rows, target=str(tmp_path / "states"), **options)
        assert offline.target.model is None
        assert distance(weights(offline.model), weights(online.model), start) < 1e-5
    file = Path(described[0]["hidden_states"])
    other = [{**described[0], "input_ids": [9, *described[0]["input_ids"][1:]]}]
    with pytest.raises(ValueError, match="other tokens"):
        train(tmp_path, Dataset.from_list(other), target=str(tmp_path / "states"), **options)
    names = {"input_ids", "seq_lens", "aux_hidden_states", "last_hidden_states", "target_ids"}
    assert set(load_file(file)) == names
    if packed_sequence_size:
        lens = described[0]["seq_lens"]
        other = [{**described[0], "seq_lens": [lens[0] - 1, lens[1] + 1, *lens[2:]]}]
        with pytest.raises(ValueError, match="`seq_lens`"):
            train(tmp_path, Dataset.from_list(other), target=str(tmp_path / "states"), **options)


def test_precomputed_states_are_computed_once_and_may_be_moved(tmp_path, monkeypatch):
    rows, target = documents(5), Eagle3Target(make_target(dtype=torch.float32), AUX)
    calls, states = [], target.states
    monkeypatch.setattr(target, "states", lambda batch: calls.append(1) or states(batch))
    first = precompute_hidden_states(target, rows, tmp_path / "a")
    files = [Path(file) for file in first["hidden_states"]]
    whole = [file.read_bytes() for file in files]
    assert len(calls) == 5
    files[1].unlink()
    files[2].write_bytes(whole[2][:-1])
    files[3].write_bytes(whole[4])  # of another row
    precompute_hidden_states(target, rows, tmp_path / "a")
    assert len(calls) == 8 and [len(file.read_bytes()) for file in files] == [*map(len, whole)]
    assert [load_file(file)["target_ids"].tolist() for file in files] == [
        load_file(Path(file))["target_ids"].tolist()
        for file in precompute_hidden_states(target, rows, tmp_path / "again")["hidden_states"]
    ]
    (tmp_path / "a").rename(tmp_path / "b")
    moved = train(tmp_path, load_from_disk(str(tmp_path / "b" / "rows" / "train")), target=str(tmp_path / "b"))
    assert moved.state.global_step
    with pytest.raises(ValueError, match=r"train_0000.*as `target_model`"):
        train(tmp_path, first, target=target)
    with pytest.raises(ValueError, match="`rows` is empty"):
        precompute_hidden_states(target, [], tmp_path / "a")


def test_precomputed_states_of_another_target_are_refused(tmp_path):
    rows = documents(2)
    for name, seed, aux in (("a", 0, AUX), ("b", 1, AUX), ("c", 0, [0, 1, 3])):
        target = Eagle3Target(make_target(dtype=torch.float32, seed=seed), aux)
        described = precompute_hidden_states(target, rows, tmp_path / name)
        same = make_target(dtype=torch.float32, seed=0) if name == "a" else str(tmp_path / "a")
        trainer = trainer_of(tmp_path, described, target=same, draft=small_draft())
        if name == "a":
            trainer.train()
        else:
            with pytest.raises(ValueError, match=r"another target.*layers"):
                trainer.train()
    # also where the model itself is there: it does not run for rows that have states
    trainer = trainer_of(tmp_path, described, draft=small_draft())
    with pytest.raises(ValueError, match="another target"):
        trainer.train()


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_other_targets(tmp_path, name):
    trainer = train(
        tmp_path,
        documents(4),
        target=make_target(name, dtype=torch.float32),
        draft=small_draft(name),
        max_steps=3,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=0.1,
    )
    losses = [entry["loss"] for entry in logs_of(trainer)]
    assert losses[-1] < losses[0]


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    results = []
    for batch_size in (1, 2, 5):
        trainer = trainer_of(
            tmp_path,
            documents(2),
            draft=small_draft(),
            eval_rows=documents(5, seed=1),
            per_device_eval_batch_size=batch_size,
        )
        results.append(trainer.evaluate())
    for result in results[1:]:
        for name in ("eval_loss", "eval_tau", "eval_accuracy/step_1"):
            assert result[name] == pytest.approx(results[0][name], rel=1e-5)
    assert 1 <= results[0]["eval_tau"] <= 4


def test_a_draft_is_made_for_the_target_and_only_the_draft_is_saved(tmp_path, tiny_tokenizer):
    torch.manual_seed(0)
    config = {**TARGETS["llama"].to_dict(), "vocab_size": len(tiny_tokenizer)}
    target = type(make_target(dtype=torch.float32))(type(TARGETS["llama"]).from_dict(config))
    rows = [{"messages": row["messages"], "tools": row["tools"]} for row in generate_dialogues(3, 1)]
    path = tmp_path / "map.safetensors"
    options = {
        "tokenizer": tiny_tokenizer,
        "target": target,
        "draft_vocab_size": 200,
        "selected_token_ids_path": str(path),
        "packed_sequence_size": 512,
        "max_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
    }
    trainer = trainer_of(tmp_path / "out", rows, **options)
    ids, _ = load_token_mapping(path, target_vocab_size=len(tiny_tokenizer), draft_vocab_size=200)
    expected, _ = build_token_mapping(
        [collated(trainer.train_dataset)],
        target_vocab_size=len(tiny_tokenizer),
        draft_vocab_size=200,
        special_token_ids=tiny_tokenizer.all_special_ids,
    )
    draft = trainer.model
    assert torch.equal(draft.draft_ids, ids) and torch.equal(ids, expected)
    assert torch.equal(draft.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(draft.lm_head.weight, target.get_output_embeddings().weight[ids])
    before = {name: p.clone() for name, p in target.named_parameters()}
    embedding = draft.embed_tokens.weight.clone()
    trainer.train()
    assert all(torch.equal(before[name], p) for name, p in target.named_parameters())
    assert torch.equal(draft.embed_tokens.weight, embedding)
    trainer.save_model()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == set(draft.state_dict())
    again = trainer_of(tmp_path, rows, draft=str(tmp_path / "out"), **{**options, "draft_vocab_size": None})
    assert isinstance(again.model, Eagle3DraftModel)
    assert all(torch.equal(saved[name], value) for name, value in again.model.state_dict().items())
    export_for_serving(trainer.model, tmp_path / "served", "sglang")
    assert validate_export(tmp_path / "served") == []


def test_a_checkpoint_is_resumed(tmp_path):
    options = {
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "random",
        "draft_vocab_size": 49,
    }
    # the draft and its vocabulary are made from the data; the checkpoint is from the middle of an epoch of 7 rows
    whole = trainer_of(tmp_path, documents(7), **options)
    start = weights(whole.model)
    whole.train()
    other = documents(7, seed=3)  # would give another vocabulary: the checkpoint's counts
    resumed = trainer_of(tmp_path, other, **options)
    assert not torch.equal(resumed.model.draft_ids, whole.model.draft_ids)
    resumed.train_dataset = documents(7)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(resumed.model.draft_ids, whole.model.draft_ids)
    assert torch.equal(resumed.model.t2d, whole.model.t2d)
    assert distance(weights(resumed.model), weights(whole.model), start) < 1e-6


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("strategy", BY_LENGTH)
def test_samplers_that_need_lengths(strategy, as_dataset, tmp_path):
    """Steps of the rows that were read, each row once; an evaluation in batches of 2 as in the order of the rows."""
    rows, eval_rows = documents(7), documents(5, seed=1)
    given = [Dataset.from_list(own) if as_dataset else own for own in (rows, eval_rows)]
    options = {"learning_rate": 0.0, "max_steps": -1, "num_train_epochs": 1, "train_sampling_strategy": strategy}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    trainer = trainer_of(tmp_path, given[0], draft=small_draft(), eval_rows={"five": given[1]}, **options)
    steps, original = {}, trainer.training_step

    def training_step(model, inputs, *args, **kwargs):
        ids, mask = inputs["input_ids"], inputs["loss_mask"]
        read = [row["input_ids"] for own in ids[mask.any(dim=1)].tolist() for row in rows if starts_with(own, row)]
        steps.setdefault(trainer.state.global_step, []).extend(read)
        return original(model, inputs, *args, **kwargs)

    def starts_with(ids, row):
        return ids[: len(row["input_ids"])] == row["input_ids"]

    trainer.training_step = training_step
    expected = trainer_of(tmp_path, rows, draft=small_draft(), eval_rows=eval_rows).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_five_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()
    assert sorted(ids for step in steps.values() for ids in step) == sorted(row["input_ids"] for row in rows)
    draft, target = small_draft(), Eagle3Target(make_target(dtype=torch.float32), AUX)
    for step, entry in enumerate(logs_of(trainer)):
        batch = collated([row for row in rows if row["input_ids"] in steps[step]], None)
        states = target.states(batch)
        logits = target.draft_logits(states.pop("last_hidden_states"), draft.draft_ids)
        loss = draft(**batch, **states, target_logits=logits, ttt_steps=3).loss
        assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_streams_and_autocast(tmp_path, tiny_tokenizer):
    """A stream of conversations: counted for the vocabulary, packed as it is read, trained in bf16."""
    config = {**TARGETS["llama"].to_dict(), "vocab_size": len(tiny_tokenizer)}
    target = type(make_target())(type(TARGETS["llama"]).from_dict(config)).float()
    rows = [{"messages": row["messages"]} for row in generate_dialogues(4, 1)]
    options = {"draft_vocab_size": 300, "packed_sequence_size": 512, "bf16": True, "optim": "adamw_torch"}
    options |= {"learning_rate": 3e-3, "max_steps": 6}
    trainer = trainer_of(
        tmp_path,
        Dataset.from_list(rows).to_iterable_dataset(),
        target=target,
        tokenizer=tiny_tokenizer,
        **options,
    )
    whole = trainer_of(tmp_path, rows, target=target, tokenizer=tiny_tokenizer, **options)
    assert torch.equal(trainer.model.draft_ids, whole.model.draft_ids)
    trainer.train()
    losses = [entry["loss"] for entry in logs_of(trainer)]
    assert losses[-1] < losses[0]


def test_the_uneven_last_step_of_a_stream_ends_with_it(tmp_path):
    rows = documents(3)
    options = {"gradient_accumulation_steps": 2, "max_steps": 4}
    whole = train(tmp_path, rows, **options)  # two epochs of 2 rows and 1
    stream = train(tmp_path, Dataset.from_list(rows).to_iterable_dataset(), **options)
    assert distance(weights(stream.model), weights(whole.model), weights(small_draft())) < 1e-5


def test_evaluation_sets_have_names(tmp_path):
    sets = {"short": documents(3, seed=1), "long": documents(4, seed=2)}
    trainer = trainer_of(tmp_path, documents(2), draft=small_draft(), eval_rows=sets, packed_sequence_size=32)
    results = trainer.evaluate()
    for name, rows in sets.items():
        alone = trainer_of(tmp_path, None, draft=small_draft(), eval_rows=rows, packed_sequence_size=32).evaluate()
        assert results[f"eval_{name}_tau"] == alone["eval_tau"]
        assert results[f"eval_{name}_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)


@pytest.mark.slow
def test_evaluation_prepares_what_it_is_given(tmp_path, tiny_tokenizer):
    config = {**TARGETS["llama"].to_dict(), "vocab_size": len(tiny_tokenizer)}
    target = type(make_target())(type(TARGETS["llama"]).from_dict(config)).float()
    rows = [{"messages": row["messages"]} for row in generate_dialogues(2, 1)]
    options = {"target": target, "tokenizer": tiny_tokenizer}
    for size in ({"seq_length": 512}, {"packed_sequence_size": 512}):
        trainer = trainer_of(tmp_path, rows, eval_rows=Dataset.from_list(rows), **options, **size)
        trainer.data_collator.length = 512
        expected = trainer.evaluate()
        for raw in (rows, Dataset.from_list(rows), {"a": rows}, Dataset.from_list(rows).to_iterable_dataset()):
            prefix = "eval_a" if isinstance(raw, dict) else "eval"
            assert trainer.evaluate(raw)[f"{prefix}_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
        assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
        assert trainer.predict(rows).metrics["test_tau"] == expected["eval_tau"]


def test_a_bad_row_stops_or_is_skipped(tmp_path, tiny_tokenizer, caplog):
    user, answer = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}
    rows = [{"messages": [user]}, {"messages": [user, answer]}]
    for source in (rows, Dataset.from_list(rows)):
        options = {"draft": small_draft(), "tokenizer": tiny_tokenizer, "seq_length": 64}
        assert len(trainer_of(tmp_path, source, on_error="skip", **options).train_dataset) == 1
        assert "1 rows skipped" in caplog.text and "row 0: `messages`" in caplog.text
        caplog.clear()
        with pytest.raises(ValueError, match="row 0: `messages`"):
            trainer_of(tmp_path, source, **options)
    (batch,) = build_eagle3_dataloader(rows, tiny_tokenizer, seq_length=64, on_error="skip")
    assert len(batch["input_ids"]) == 1


def test_evaluation_on_states_of_another_target_is_refused(tmp_path):
    other = Eagle3Target(make_target(dtype=torch.float32, seed=1), AUX)
    described = precompute_hidden_states(other, documents(2), tmp_path)
    for method in ("evaluate", "predict"):
        trainer = trainer_of(tmp_path, documents(2), draft=small_draft())
        with pytest.raises(ValueError, match="another target"):
            getattr(trainer, method)(described)


@pytest.mark.parametrize("name", ["seq_length", "packed_sequence_size"])
def test_documents_cut_to_nothing_supervised_are_left_out_and_counted(name, tmp_path, caplog):
    masks = [[0, 1, 1], [0] * 15 + [1, 1], [1] + [0] * 15 + [1], [0] * 30 + [1, 1]]  # no step predicts a first token
    rows = [{"input_ids": [5] * len(mask), "loss_mask": mask} for mask in masks]
    message = (
        f"Prepared 4 samples. Some data was dropped or modified: 3 samples truncated to `{name}=16`, 2 of them left "
        f"out because no supervised token remained; raise `{name}`, or shorten the samples."
    )
    for source in (rows, Dataset.from_list(rows)):
        caplog.clear()
        trainer = trainer_of(tmp_path, source, draft=small_draft(), eval_rows={"a": source}, **{name: 16})
        assert caplog.messages.count(message) == 2  # once per dataset
        trainer.evaluate({"a": source})
        assert caplog.messages.count(message) == 3
        for prepared in (trainer.train_dataset, trainer.eval_dataset["a"]):
            assert sorted(sum(row["loss_mask"]) for row in prepared) == [1, 2]
            assert "_cut" not in prepared[0]
        left_out = source[2:] if source is rows else source.select([2, 3])
        with pytest.raises(ValueError, match=rf"2 samples.*`{name}=16`.*2"):
            trainer_of(tmp_path, left_out, draft=small_draft(), **{name: 16})
    caplog.clear()
    stream = trainer_of(tmp_path, source.to_iterable_dataset(), draft=small_draft(), **{name: 16}).train_dataset
    assert [sum(row["loss_mask"]) for _ in range(2) for row in stream] == [2, 1, 2, 1]
    (message,) = (message for message in caplog.messages if "truncated" in message)
    assert message.startswith(f"A sample of a stream is truncated to `{name}=16`")


def test_an_evaluation_of_nothing_is_no_perfect_one(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}]
    metrics = trainer_of(tmp_path, documents(1), draft=small_draft()).evaluate(rows)
    for name in ("loss", "tau", "accuracy/step_0"):
        assert math.isnan(metrics[f"eval_{name}"]), name


def test_evaluation_under_autocast_asks_the_same_target(tmp_path):
    """In training the target runs outside of autocast; in evaluation its choices must be the same."""
    seen = []

    class Spy(Eagle3Target):
        def hidden_states(self, batch):
            seen.append(super().hidden_states(batch))
            return seen[-1]

    target = Spy(make_target(dtype=torch.float32), AUX)
    rows = documents(1)
    trainer = trainer_of(tmp_path, rows, target=target, draft=small_draft(), eval_rows=rows, bf16=True, max_steps=1)
    trainer.evaluate()
    trainer.train()
    assert len(seen) == 2
    for evaluated, trained in zip(*seen, strict=True):
        assert evaluated.dtype == trained.dtype and torch.equal(evaluated, trained)


def test_sums_of_a_window_that_was_not_logged_are_forgotten(tmp_path):
    rows = documents(2)
    trainer = trainer_of(tmp_path, rows, draft=small_draft(), max_steps=2, logging_steps=2, learning_rate=0.0)
    trainer.train()
    (first,) = logs_of(trainer)
    trainer._sums["train"] = torch.full((len(StepSums._fields), 3), 99.0, dtype=torch.float64)
    trainer.train()
    assert logs_of(trainer)[-1]["tau"] == pytest.approx(first["tau"])


def test_an_embedding_that_is_not_the_targets_is_warned_of(tmp_path, caplog):
    target, draft = make_target(dtype=torch.float32), small_draft()
    trainer_of(tmp_path, documents(1), target=target, draft=draft)
    assert "The embedding of `model` is not the target's" in caplog.messages[-1]
    caplog.clear()
    draft.init_from_target(target.get_input_embeddings().weight)
    trainer_of(tmp_path, documents(1), target=target, draft=draft)
    trainer_of(tmp_path, documents(1), target=target, draft=draft.bfloat16())
    assert not [message for message in caplog.messages if "embedding" in message]


def test_wrong_arguments_are_refused(tmp_path):
    rows = documents(2)
    for changes, message in (
        ({"ttt_steps": 0}, "`ttt_steps` is 0"),
        ({"step_decay": 0.0}, "`step_decay` must be above 0"),
        ({"packing_strategy": "first_fit"}, "`packing_strategy`"),
        ({"packed_sequence_size": -1}, "`packed_sequence_size` is -1"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor=0.1` is not supported: the draft learns"),
        ({"average_tokens_across_devices": False}, "`average_tokens_across_devices=False` is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(tmp_path, rows, **changes)
    args, collator = Eagle3Config(str(tmp_path)), DataCollatorForEagle3(0)
    for arguments, message in (
        ({"data_collator": object()}, "`data_collator`.*`DataCollatorForEagle3`.*object"),
        ({"data_collator": collator}, "`target_model`"),
        ({}, "pad_token"),
        ({"args": None, "data_collator": collator, "target_model": object()}, "`target_model`"),
        ({"compute_metrics": len}, "`compute_metrics`"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3Trainer(**{"args": args, "train_dataset": rows, **arguments})
    with pytest.raises(ValueError, match=r"`aux_layer_ids`.*\[0, 1, 2\].*\[0, 1, 3\]"):
        trainer_of(tmp_path, rows, draft=small_draft(), aux_layer_ids=[0, 1, 3])
    with pytest.raises(ValueError, match=r"`draft_vocab_size=7`.*`model`.*49"):
        trainer_of(tmp_path, rows, draft=small_draft(), draft_vocab_size=7)
    with pytest.raises(ValueError, match=r"`aux_layer_ids=\[0, 1, 3\]`.*`target_model`"):
        target = Eagle3Target(make_target(dtype=torch.float32), AUX)
        trainer_of(tmp_path, rows, draft=small_draft(), target=target, aux_layer_ids=[0, 1, 3])
    with pytest.raises(ValueError, match="PeftModel"):
        adapted = get_peft_model(make_target(dtype=torch.float32), LoraConfig(target_modules=["q_proj"]))
        trainer_of(tmp_path, rows, target=adapted)
    with pytest.raises(ValueError, match="`train_dataset` is needed to choose the draft vocabulary"):
        trainer_of(tmp_path, None, draft_vocab_size=VOCAB - 1)


# ---- two processes ----


def test_two_processes_equal_one(tmp_path):
    # 7 rows, 4 a step: the second step holds 3, and the two processes fill it up with an empty row, not a repeated one
    sets = {"rows": documents(7), "eval_rows": documents(5, seed=1)}
    in_order = train(tmp_path, **sets, gradient_accumulation_steps=4)
    target = Eagle3Target(make_target(dtype=torch.float32), AUX)
    precompute_hidden_states(target, documents(7), tmp_path / "states")
    precompute_hidden_states(target, documents(5, seed=1), tmp_path / "states", split="test")
    run_ranks(train_and_evaluate, tmp_path)
    start = weights(small_draft())
    by_length = {}
    for strategy in BY_LENGTH:
        options = {"gradient_accumulation_steps": 4, "train_sampling_strategy": strategy}
        by_length[strategy] = train(tmp_path, **sets, **options)
    trees = {"rows": branch_rows(7), "eval_rows": branch_rows(5, seed=1)}
    by_length["trees"] = train(tmp_path, **trees, gradient_accumulation_steps=4)
    for kind in ("rows", "trees", "stream", "precomputed", *BY_LENGTH):
        one = by_length.get(kind, in_order)
        metrics = one.evaluate()
        two, log = torch.load(tmp_path / f"{kind}.pt"), json.loads((tmp_path / f"{kind}.json").read_text())
        assert distance(two, weights(one.model), start) < 1e-5, kind
        for first, second in zip(logs_of(one), log, strict=False):
            for name in ("loss", "tau", "accuracy/step_1"):
                assert second[name] == pytest.approx(first[name], rel=1e-5), (kind, name)
        for name in ("eval_loss", "eval_tau", "eval_accuracy/step_0"):
            assert log[-1][name] == pytest.approx(metrics[name], rel=1e-5), (kind, name)


def test_fsdp2_is_told_to_round_no_loss(tmp_path, monkeypatch):
    """What that does to a model is tested in tests/trainers/test_engines.py."""
    from hf_prefix_tree.training import step as module

    told = []
    monkeypatch.setattr(module, "keep_output_dtype", told.append)
    assert trainer_of(tmp_path, documents(2)).accelerator is told[0]
