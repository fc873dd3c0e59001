"""`DiffusionSFTTrainer`: the step's normaliser, evaluation, what rows become, LoRA, two processes."""

import copy
import json
import math
import types

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_prefix_tree import (
    DataCollatorForDiffusionLM,
    DiffusionSFTConfig,
    DiffusionSFTTrainer,
    DLLMCollator,
    diffusion_generate,
)
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from hf_prefix_tree.diffusion.model import prepare_diffusion_model, unprepare_diffusion_model
from hf_prefix_tree.training.checks import refuse_engines
from tests.support.diffusion_runs import (
    BY_LENGTH,
    EVALUATION,
    MASK,
    OBJECTIVES,
    SIZE,
    collated,
    distance,
    logs_of,
    losses_of,
    rows_of_ids,
    small_model,
    tokenizer,
    train,
    train_and_evaluate,
    trainer_of,
    weights,
)
from tests.support.models import CONFIGS, make_model
from tests.support.ranks import run_ranks

# ---- one optimizer step ----


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_logged_loss_is_that_of_the_notes(objective, tmp_path):
    rows = rows_of_ids(4)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "alpha": 0.3}
    trainer = train(tmp_path, rows, objective=objective, **options)
    loss, bound = losses_of(prepare_diffusion_model(small_model()), collated(rows), objective, (0,), alpha=0.3)
    (entry,) = logs_of(trainer)
    assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry["nll_bound"] == pytest.approx(bound.item(), rel=1e-5)
    assert ("next_token_loss" in entry) == (objective == "hybrid")
    if objective == "hybrid":
        assert entry["loss"] == pytest.approx(0.3 * entry["nll_bound"] + entry["next_token_loss"], rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_accumulation_changes_nothing(objective, tmp_path):
    rows = rows_of_ids(8)
    one = train(tmp_path, rows, objective=objective, per_device_train_batch_size=4)
    four = train(tmp_path, rows, objective=objective, gradient_accumulation_steps=4)
    assert distance(weights(four.model), weights(one.model), weights(small_model())) < 1e-5
    for first, second in zip(logs_of(one), logs_of(four), strict=True):
        for name in ("loss", "nll_bound", "mean_token_accuracy"):
            assert second[name] == pytest.approx(first[name], rel=1e-5), name


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("strategy", BY_LENGTH)
def test_samplers_that_need_lengths(strategy, drop_last, tmp_path):
    """Steps of the rows that were read, each row once; an evaluation in batches of 2 as in the order of the rows."""
    rows, eval_rows = rows_of_ids(7), {"five": rows_of_ids(5, seed=1)}
    options = {"objective": "mdlm", "learning_rate": 0.0, "max_steps": -1, "num_train_epochs": 1}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "dataloader_drop_last": drop_last}
    trainer = trainer_of(
        tmp_path, rows, eval_rows=eval_rows, per_device_eval_batch_size=2, train_sampling_strategy=strategy, **options
    )
    steps, original = {}, trainer.training_step

    def training_step(model, inputs, *args, **kwargs):
        is_row = inputs["loss_mask"].any(dim=1)
        steps.setdefault(trainer.state.global_step, []).extend(inputs["sample_index"][is_row].tolist())
        return original(model, inputs, *args, **kwargs)

    trainer.training_step = training_step
    expected = trainer_of(tmp_path, rows, eval_rows=eval_rows).evaluate()["eval_five_loss"]
    assert trainer.evaluate()["eval_five_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()
    read = [index for step in steps.values() for index in step]
    assert len(set(read)) == len(read) and (set(read) < set(range(7)) if drop_last else set(read) == set(range(7)))
    for step, entry in enumerate(logs_of(trainer)):
        batch = collated(rows, indices=steps[step])
        loss, _ = losses_of(prepare_diffusion_model(small_model()), batch, "mdlm", (0,))
        assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_checkpointing_and_the_router_of_experts(tmp_path):
    rows = rows_of_ids(4)
    found = []
    for checkpointed in (False, True):
        model = make_model("qwen3_moe", dtype=torch.float32)
        options = {"router_aux_loss_coef": 0.5, "gradient_checkpointing": checkpointed, "objective": "block"}
        trainer = train(tmp_path, rows, model=model, max_steps=2, per_device_train_batch_size=2, **options)
        found.append(logs_of(trainer))
    for plain, checkpointed in zip(*found, strict=True):
        assert checkpointed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    bare = train(
        tmp_path, rows, model=make_model("qwen3_moe", dtype=torch.float32), objective="block", max_steps=1,
        per_device_train_batch_size=2, router_aux_loss_coef=0.0,
    )  # fmt: skip
    assert found[0][0]["loss"] - logs_of(bare)[0]["loss"] > 0.5  # the auxiliary loss is at least 1 times its factor
    assert found[0][0]["nll_bound"] == pytest.approx(logs_of(bare)[0]["nll_bound"], rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bf16_divides_by_the_same_count(objective, tmp_path):
    """Mixed precision casts floating tensors: the count, 273, would be 272 in bf16."""
    rows = rows_of_ids(50)
    options = {"objective": objective, "per_device_train_batch_size": 25, "gradient_accumulation_steps": 2}
    options["block_size"] = 3
    found = [logs_of(train(tmp_path, rows, max_steps=1, bf16=bf16, **options))[0] for bf16 in (False, True)]
    assert found[1]["loss"] != found[0]["loss"]
    for name in ("loss", "nll_bound"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3), name
    if objective != "block":  # metrics have a count of their own, in float64
        expected = found[1]["nll_bound"] + found[1].get("next_token_loss", 0)
        assert found[1]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_lora_under_checkpointing(use_reentrant, tmp_path):
    found = []
    for options in ({}, {"gradient_checkpointing": True}):
        if options:
            options["gradient_checkpointing_kwargs"] = {"use_reentrant": use_reentrant}
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        found.append(weights(train(tmp_path, rows_of_ids(3), objective="block", peft_config=config, **options).model))
    assert found[0].keys() == found[1].keys() and len(found[0]) == 8
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_two_trainers_in_one_process_do_not_meet(tmp_path):
    rows, more = rows_of_ids(4), rows_of_ids(3, seed=1)
    alone = [train(tmp_path, rows, objective=objective) for objective in ("mdlm", "block")]
    expected = [trainer.evaluate(more) for trainer in alone]
    first, second = (trainer_of(tmp_path, rows, objective=objective) for objective in ("mdlm", "block"))
    second.evaluate(more)
    first.train()
    second.train()
    for trainer, other, metrics in zip((first, second), alone, expected, strict=True):
        assert all(torch.equal(value, weights(other.model)[name]) for name, value in weights(trainer.model).items())
        assert trainer.evaluate(more)["eval_loss"] == metrics["eval_loss"]


def test_a_second_training_logs_its_own_steps(tmp_path):
    options = {"max_steps": 3, "logging_steps": 2, "learning_rate": 0.0}
    trainer = train(tmp_path, rows_of_ids(6), **options)
    first = logs_of(trainer)
    trainer.train()
    assert [entry["nll_bound"] for entry in logs_of(trainer)] == [entry["nll_bound"] for entry in first]


def test_after_training(tmp_path):
    trainer = train(tmp_path, rows_of_ids(4), objective="hybrid")
    model, ids = trainer.model.eval(), torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(ValueError, match=r"`diffusion_generate`.*`generate`"):
        model.generate(ids, max_new_tokens=2)
    completed = diffusion_generate(model, ids, 4, SIZE, MASK, objective="hybrid")
    trainer.save_model(tmp_path / "diffusion")
    unprepare_diffusion_model(model).save_pretrained(tmp_path / "causal")
    with torch.no_grad():
        expected = model(ids).logits
        for kind in ("diffusion", "causal"):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
            assert weights(loaded).keys() == weights(model).keys()
            assert torch.equal(diffusion_generate(loaded, ids, 4, SIZE, MASK, objective="hybrid"), completed)
        assert torch.equal(loaded(ids).logits, expected)  # the last one, which is a causal model like any other
        first, other = (loaded(torch.tensor([[5, 6, 7, last]])).logits[0, :3] for last in (8, 9))
        assert torch.equal(first, other)
        assert "is_causal" not in loaded.config.__dict__
        assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 4


def test_lora_trains_the_adapter_alone(tmp_path):
    model = small_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    options = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 12, "per_device_train_batch_size": 4}
    options |= {"objective": "block", "peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])}
    trainer = train(tmp_path, rows_of_ids(4), model=model, **options)
    losses = [entry["loss"] for entry in logs_of(trainer)]
    assert losses[-1] < 0.95 * losses[0]
    after = dict(trainer.model.get_base_model().named_parameters())
    frozen = [name for name in before if "q_proj" not in name and "v_proj" not in name]
    assert len(frozen) > 10 and all(torch.equal(before[name], after[name]) for name in frozen)
    assert trainer.evaluate(rows_of_ids(3, seed=5))["eval_perplexity"] > 1


# ---- evaluation ----


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_evaluation_is_over_the_whole_set(objective, tmp_path):
    rows = rows_of_ids(5, seed=1)
    expected = [
        losses_of(prepare_diffusion_model(small_model()), collated(rows), objective, (EVALUATION, draw))
        for draw in range(2)
    ]
    loss, bound = (torch.stack(values).mean().item() for values in zip(*expected, strict=True))
    assert expected[0][1] != expected[1][1]
    for batch_size in (1, 2, 5):
        options = {"objective": objective, "per_device_eval_batch_size": batch_size, "eval_noise_draws": 2}
        trainer = trainer_of(tmp_path, rows_of_ids(1), eval_rows=rows, **options)
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["eval_nll_bound"] == pytest.approx(bound, rel=1e-5)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(bound), rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]  # the same noise at every call


def test_an_evaluation_of_nothing_is_no_perfect_one(tmp_path):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "loss_mask": [0] * 4}])  # whole blocks: there is no fill
    options = {"response_window": False, "objective": "hybrid"}
    metrics = trainer_of(tmp_path, rows_of_ids(1), **options).evaluate(rows)
    for name in ("loss", "nll_bound", "perplexity", "mean_token_accuracy", "next_token_loss"):
        assert math.isnan(metrics[f"eval_{name}"]), name


# ---- rows ----


@pytest.mark.parametrize("has_collator", [False, True])
def test_samples_cut_to_nothing_supervised_are_left_out_and_counted(has_collator, tmp_path, caplog):
    masks = [[0, 1, 1], [0] * 7 + [1, 1], [0] * 8 + [1], [0] * 20 + [1, 1], [0] * 4 + [1] * 4]
    rows = [{"input_ids": [5] * len(m), "loss_mask": m, "attention_mask": [1] * len(m)} for m in masks]
    padded = {"input_ids": [5] * 9, "loss_mask": [1] * 9, "attention_mask": [1] * 8 + [0]}  # padding is not cut
    rows = Dataset.from_list([*rows, padded])
    name, options = "max_length", {"max_length": 8}
    if has_collator:  # it cuts, not `args`
        name, options = "max_seq_len", {}
        options["data_collator"] = DataCollatorForDiffusionLM(0, 2, block_size=4, max_seq_len=8, response_window=True)
    trainer = trainer_of(tmp_path, rows, eval_rows={"a": rows}, **options)
    message = (
        f"Prepared 6 samples. Some data was dropped or modified: 3 samples truncated to `{name}=8`, 2 of them left "
        f"out because no supervised token remained; raise `{name}`, or shorten the samples."
    )
    assert caplog.messages.count(message) == 2  # once per dataset
    assert trainer.train_dataset["sample_index"] == trainer.eval_dataset["a"]["sample_index"] == [0, 1, 4, 5]
    assert trainer.train_dataset.column_names == ["input_ids", "loss_mask", "attention_mask", "sample_index"]
    caplog.clear()
    trainer.evaluate({"a": rows, "b": rows})
    assert [own for own in caplog.messages if "truncated" in own] == [message] * 2
    message = (
        rf"no sample is left of 2 \(2 samples truncated to `{name}=8`, 2 of them left out because .*; raise `{name}`"
    )
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, rows.select([2, 3]), **options)
    caplog.clear()
    options["data_collator"] = DataCollatorForDiffusionLM(0, 2, block_size=4, response_window=True)
    assert len(trainer_of(tmp_path, rows, **options).train_dataset) == 6 and not caplog.messages  # nothing cuts


def test_a_stream_warns_of_cuts_once(tmp_path, caplog):
    rows = Dataset.from_list(
        [{"input_ids": [5] * 9, "loss_mask": [0] * start + [1] * (9 - start)} for start in (8, 7)]
    )
    trainer = trainer_of(tmp_path, rows.to_iterable_dataset(), max_length=8, corruption="all_masked")
    assert [sample["sample_index"] for _ in range(2) for sample in trainer.train_dataset] == [1, 1]
    (message,) = (message for message in caplog.messages if "truncated" in message)
    assert message.startswith("A sample of a stream is truncated to `max_length=8`")
    trainer.train()
    assert all(entry["loss"] > 0 for entry in logs_of(trainer))


def test_texts_become_samples_that_end_with_the_response(tmp_path, tiny_tokenizer):
    user, first = {"role": "user", "content": "The order?"}, {"role": "assistant", "content": "Which order?"}
    second = {"role": "assistant", "content": "It is on its way."}
    conversation = [user, first, {"role": "user", "content": "The last one."}, second]
    kinds = {
        "messages": ([{"messages": conversation}], ["Which order?<|im_end|>", "It is on its way.<|im_end|>"]),
        "strings": ([{"prompt": "Two and two is", "completion": " four."}], [" four.<|im_end|>"]),
        "lists": ([{"prompt": conversation[:3], "completion": [second]}], ["It is on its way.<|im_end|>"]),
    }
    model = make_model("qwen3", dtype=torch.float32)
    model.resize_token_embeddings(len(tiny_tokenizer))
    for rows, responses in kinds.values():
        for dataset in (Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
            trainer = trainer_of(tmp_path, dataset, model=model, processing_class=tiny_tokenizer, max_steps=1)
            samples = list(trainer.train_dataset)
            assert [sample["sample_index"] for sample in samples] == list(range(len(responses)))
            for sample, response in zip(samples, responses, strict=True):
                start = sample["loss_mask"].index(1)
                assert tiny_tokenizer.decode(sample["input_ids"][start:]) == response
                assert set(sample["loss_mask"][start:]) == {1}  # unshifted, and nothing comes after it
    assert logs_of(train(tmp_path, dataset, model=model, processing_class=tiny_tokenizer, max_steps=1))[0]["loss"] > 0


def test_a_bad_row_stops_or_is_skipped(tmp_path, tiny_tokenizer, caplog):
    user, answer = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}
    dataset = Dataset.from_list([{"messages": [user]}, {"messages": [user, answer]}])
    model = make_model("qwen3", dtype=torch.float32)
    model.resize_token_embeddings(len(tiny_tokenizer))
    options = {"model": model, "processing_class": tiny_tokenizer}
    assert len(trainer_of(tmp_path, dataset, on_error="skip", **options).train_dataset) == 1
    assert "1 rows skipped" in caplog.text and "row 0: `messages`" in caplog.text
    with pytest.raises(ValueError, match="row 0: `messages`"):
        trainer_of(tmp_path, dataset, **options)


def test_a_stream_may_have_no_row_left():
    stream = Dataset.from_list([{"input_ids": [5, 6], "loss_mask": [1]}]).to_iterable_dataset()
    assert list(prepare_diffusion_rows(stream, None, on_error="skip")) == []
    with pytest.raises(ValueError, match="row 0"):
        prepare_diffusion_rows(stream, None)


def test_the_columns_of_trl_say_what_is_supervised(tmp_path):
    rows = rows_of_ids(4)
    expected = logs_of(train(tmp_path, rows, max_steps=1))
    for name in ("completion_mask", "assistant_masks", "labels"):
        renamed = [{"input_ids": row["input_ids"], name: row["loss_mask"]} for row in rows]
        if name == "labels":
            for row in renamed:
                row["labels"] = [i if m else -100 for i, m in zip(row["input_ids"], row["labels"], strict=True)]
        assert logs_of(train(tmp_path, Dataset.from_list(renamed), max_steps=1))[0]["loss"] == expected[0]["loss"]
    with pytest.raises(ValueError, match=r"row 0: .*`loss_mask`"):
        trainer_of(tmp_path, Dataset.from_list([{"input_ids": [3, 4]}]))
    with pytest.raises(ValueError, match=r"rollouts rows.*`input_ids`"):
        trainer_of(tmp_path, Dataset.from_list([{"prompt_ids": [3], "completions": [[4]]}]))


def test_rows_of_texts_get_an_index_of_their_own(tmp_path, tiny_tokenizer):
    """A row may become several samples."""
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    rows = [{"messages": turns * 2, "sample_index": 7}, {"messages": turns, "sample_index": 7}]
    for dataset in (Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
        found = list(prepare_diffusion_rows(dataset, tiny_tokenizer))
        assert [sample["sample_index"] for sample in found] == [0, 1, 2]
    rows = [{"input_ids": [5, 6], "loss_mask": [0, 1], "sample_index": index} for index in (7, 3)]
    found = list(prepare_diffusion_rows(Dataset.from_list(rows), tiny_tokenizer))
    assert [sample["sample_index"] for sample in found] == [7, 3]  # of tokens it stays


def test_what_a_template_loses_is_logged(tiny_tokenizer, caplog):
    answer = {"role": "assistant", "content": "B.", "reasoning_content": "Hm."}
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": "A?"}, answer]}])
    bare = "{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant{% endif %}"
    for template, message in ((bare, "1 turns whose reasoning the chat template has no place for"), (None, "")):
        caplog.clear()
        prepare_diffusion_rows(rows, tiny_tokenizer, chat_template_kwargs={"chat_template": template})
        assert message in caplog.text and bool(caplog.text) == bool(message)


# ---- what is refused ----


def test_the_mask_token(tmp_path, tiny_tokenizer):
    rows = rows_of_ids(2)
    with pytest.raises(ValueError, match=r"`tokenizer.add_special_tokens"):
        trainer_of(tmp_path, rows, mask_token_id=None)
    with pytest.raises(ValueError, match=r"`mask_token_id`.*500.*97"):
        trainer_of(tmp_path, rows, mask_token_id=500)
    with pytest.raises(ValueError, match=r"`mask_token_id`.*2"):
        trainer_of(tmp_path, rows, mask_token_id=2)
    with pytest.raises(ValueError, match=r"`mask_token_id`.*0.*`supervise_padding`"):
        trainer_of(tmp_path, rows, mask_token_id=0, supervise_padding=True)
    assert trainer_of(tmp_path, rows, mask_token_id=0).mask_token_id == 0
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": "!"}
    with_mask = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer, **special)
    trainer = trainer_of(tmp_path, rows, mask_token_id=None, processing_class=with_mask)
    assert trainer.mask_token_id == with_mask.mask_token_id == with_mask.convert_tokens_to_ids("!")


def test_wrong_arguments_are_refused(tmp_path):
    rows = rows_of_ids(2)
    for changes, message in (
        ({"objective": "ddpm"}, "`objective`"),
        ({"corruption": "gaussian"}, "`corruption`"),
        ({"block_size": 0}, "`block_size`.*0"),
        ({"eval_noise_draws": 0}, "`eval_noise_draws`.*0"),
        ({"noise_eps": 0.0}, "`noise_eps`"),
        ({"alpha": 0.0}, "`alpha`"),
        ({"packing": True}, "`packing=True`"),
        ({"completion_only_loss": False}, "`completion_only_loss=False`"),
        ({"average_tokens_across_devices": False}, "`average_tokens_across_devices=False`"),
        ({"chat_template_kwargs": "[1]"}, "`chat_template_kwargs`.*`dict`"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(tmp_path, rows, **changes)
    for collator, message in (
        (object(), "`data_collator`.*`DataCollatorForDiffusionLM`.*`object`"),
        (DLLMCollator(0, 2, block_size=4, response_window=True), "`data_collator`.*`DLLMCollator`"),
        (DataCollatorForDiffusionLM(0, 2, block_size=8, response_window=True), "`block_size=8`.*`args`.*4"),
        (DataCollatorForDiffusionLM(0, 2, block_size=4), "`response_window=False`.*`args`.*True"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(tmp_path, rows, data_collator=collator)
    with pytest.raises(ValueError, match=r"`args`.*`DiffusionSFTConfig`.*`list`"):
        DiffusionSFTTrainer(small_model(), args=[], train_dataset=rows)
    with pytest.raises(ValueError, match="`compute_metrics`"):
        args = DiffusionSFTConfig(str(tmp_path), use_cpu=True, bf16=False)
        DiffusionSFTTrainer(small_model(), args=args, train_dataset=rows, compute_metrics=len)
    trainer = trainer_of(tmp_path, rows, dataset_kwargs={"skip_prepare_dataset": True})
    with pytest.raises(ValueError, match="`sample_index`"):
        trainer.train()


def test_engines_are_refused(tmp_path, monkeypatch):
    accelerator = types.SimpleNamespace(parallelism_config=None, distributed_type="NO")
    refuse_engines(accelerator)
    monkeypatch.setattr(DiffusionSFTTrainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ValueError, match=r"Tensor parallelism.*2"):
        trainer_of(tmp_path, rows_of_ids(1))
    for cp, sp in ((True, False), (False, True)):
        accelerator.parallelism_config = types.SimpleNamespace(cp_enabled=cp, sp_enabled=sp)
        with pytest.raises(ValueError, match=r"`cp_size=1`.*`sp_size=1`"):
            refuse_engines(accelerator)
    accelerator = types.SimpleNamespace(parallelism_config=None, distributed_type="MEGATRON_LM")
    with pytest.raises(ValueError, match="Megatron-LM"):
        refuse_engines(accelerator)
    args = DiffusionSFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel"):
        DiffusionSFTTrainer(small_model(), args, train_dataset=rows_of_ids(2), processing_class=tokenizer())


# ---- two processes ----


def test_two_processes_equal_one(tmp_path):
    # 7 rows, 4 a step: the second step holds 3, and the two processes fill it up with an empty row, not a repeated one
    run_ranks(train_and_evaluate, tmp_path, OBJECTIVES)
    for kind in (*OBJECTIVES, *BY_LENGTH):
        strategy = {"train_sampling_strategy": kind} if kind in BY_LENGTH else {}
        one = train(
            tmp_path,
            rows_of_ids(7),
            eval_rows=rows_of_ids(5, seed=1),
            objective="mdlm" if strategy else kind,
            gradient_accumulation_steps=4,
            supervise_padding=kind == "block",
            **strategy,
        )
        metrics = one.evaluate()
        two, log = torch.load(tmp_path / f"{kind}.pt"), json.loads((tmp_path / f"{kind}.json").read_text())
        assert distance(two, weights(one.model), weights(small_model())) < 1e-5
        if kind == "mdlm":
            assert distance(torch.load(tmp_path / "stream.pt"), weights(one.model), weights(small_model())) < 1e-5
        for first, second in zip(logs_of(one), log, strict=False):
            for name in ("loss", "nll_bound", "mean_token_accuracy"):
                assert second[name] == pytest.approx(first[name], rel=1e-5), name
        for name in ("eval_loss", "eval_nll_bound", "eval_perplexity", "eval_mean_token_accuracy"):
            assert log[-1][name] == pytest.approx(metrics[name], rel=1e-5), name


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("bf16", [False, True])
def test_flex_trains_as_the_dense_mask(objective, bf16, tmp_path):
    """Rows padded to 128 under FlexAttention, and as short as they can be under SDPA."""
    rows, found, lengths = rows_of_ids(4, longest=200), [], []
    for backend in ("sdpa", "flex"):
        torch.manual_seed(0)
        config = copy.deepcopy(CONFIGS["qwen3"])
        config.head_dim = 32  # FlexAttention takes 16 and more
        model = AutoModelForCausalLM.from_config(config)
        options = {"objective": objective, "attn_backend": backend, "per_device_train_batch_size": 2, "bf16": bf16}
        trainer = trainer_of(tmp_path, rows, model=model, use_cpu=False, block_size=16, **options)
        lengths.append(trainer.data_collator(rows)["input_ids"].shape[1])
        trainer.train()
        found.append([entry["loss"] for entry in logs_of(trainer)])
    assert lengths[0] % 128 != 0 and lengths[1] == 256
    assert found[1] == pytest.approx(found[0], rel=2e-2 if bf16 else 1e-4)


def test_fsdp2_is_told_to_round_no_log_prob(tmp_path, monkeypatch):
    """What that does to a model is tested in tests/trainers/test_engines.py."""
    from hf_prefix_tree.training import step as module

    told = []
    monkeypatch.setattr(module, "keep_output_dtype", told.append)
    assert trainer_of(tmp_path, rows_of_ids(2)).accelerator is told[0]
