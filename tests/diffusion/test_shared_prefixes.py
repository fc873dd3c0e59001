"""Completions of one prompt on one clean copy of it: masks by their definition, packed against separate samples."""

import types

import pytest
import torch
from datasets import Dataset

from conformance.double import keep_double
from hf_prefix_tree import DataCollatorForDiffusionLM, DiffusionSFTConfig
from hf_prefix_tree.diffusion.collator import supervised_tokens
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from hf_prefix_tree.diffusion.loss import objective_inputs, objective_loss
from hf_prefix_tree.diffusion.noise import corrupt, noise_seeds, window_starts
from hf_prefix_tree.modeling.attention.masks.spans import UNTIL, block_mask, dense_mask
from tests.support.diffusion_models import block_of, pair, sees
from tests.support.diffusion_runs import (
    MASK,
    SIZE,
    distance,
    logs_of,
    small_model,
    tokenizer,
    train,
    trainer_of,
    weights,
)
from tests.support.models import CONFIGS, gradients, make_model
from tests.support.ranks import run_ranks

LAYOUT = {"block": "block_diffusion", "hybrid": "hybrid"}


def options_of(objective, group_by="group", block_size=SIZE, response_window=True):
    names = {"objective": objective, "group_by": group_by, "block_size": block_size}
    return types.SimpleNamespace(**names, response_window=response_window, alpha=0.3)


def draw_samples(generator, prompts=2, completions=3, longest=6):
    """Completions of some prompts of few different tokens, so that many of them start alike."""

    def draw(least, low=3, high=5):
        count = int(torch.randint(least, longest + 1, (1,), generator=generator))
        return torch.randint(low, high, (count,), generator=generator).tolist()

    samples = []
    for _ in range(prompts):
        prompt = draw(0)
        for _ in range(completions):
            response = draw(1)
            samples.append({"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + [1] * len(response)})
    return samples


def collated(samples, args, start=0):
    collator = DataCollatorForDiffusionLM(0, 2, block_size=args.block_size, response_window=args.response_window)
    return collator([{**sample, "sample_index": start + i} for i, sample in enumerate(samples)])


def noise_of(batch, args):
    supervised = supervised_tokens(batch)
    starts = window_starts(supervised) if args.response_window else None
    seeds = noise_seeds(batch["sample_index"], 42, 0)
    blocks = {"block_size": args.block_size, "block_start": starts}
    return corrupt("uniform", batch["input_ids"], supervised, seeds=seeds, mask_token_id=MASK, **blocks)


# ---- the packed sequence ----


def shared_units(batch, args, row, end):
    """The clean tokens before `end`, in the units that merge: tokens, or whole blocks."""
    start = int(window_starts(supervised_tokens(batch))[row]) if args.response_window else 0
    units = {}
    for i in range(end):
        name = i if args.objective == "hybrid" else block_of(i, args.block_size, start)
        token = int(batch["input_ids"][row, i]), int(batch["attention_mask"][row, i])
        units.setdefault(name, []).append(token)
    return [tuple(unit) for unit in units.values()]


@pytest.mark.parametrize("objective", LAYOUT)
@pytest.mark.parametrize("response_window", [True, False])
def test_every_token_sees_what_it_sees_in_its_own_sequence(objective, response_window):
    """75 random layouts each, 300 in all: the keys of each kept token, one by one, and how many tokens are kept."""
    generator = torch.Generator().manual_seed(0)
    merged = 0
    for _ in range(75):
        size = int(torch.randint(1, 6, (1,), generator=generator))
        args = options_of(objective, block_size=size, response_window=response_window)
        samples = draw_samples(generator)
        samples += [samples[0], {**samples[-1], "loss_mask": [0] * len(samples[-1]["input_ids"])}]
        batch = collated(samples, args)
        noise, supervised = noise_of(batch, args), supervised_tokens(batch)
        inputs, _, is_predicted, places = objective_inputs(batch, noise, args)
        rows, length = batch["input_ids"].shape
        mask, places = dense_mask(inputs["diffusion_layout"])[0, 0], places.view(rows, 2 * length)
        assert (places[is_predicted] >= 0).all()
        flat_ids, kept, clean = torch.cat([noise.input_ids, batch["input_ids"]], dim=1), set(), set()
        for row in range(rows):
            if not supervised[row].any():
                assert (places[row] == -1).all()
                continue
            start = int(window_starts(supervised)[row]) if response_window else 0
            last = int(supervised[row].nonzero().max())
            # a noisy block needs the clean blocks before it, next-token prediction all before the last token
            blocks = {block_of(i, size, start) for i in supervised[row].nonzero().flatten().tolist()}
            needed = [i for i in range(length) if block_of(i, size, start) in blocks]
            end = last if objective == "hybrid" else start + max(blocks) * size
            units = shared_units(batch, args, row, end)
            clean |= {(*units[: i + 1], j) for i, unit in enumerate(units) for j in range(len(unit))}
            assert (places[row] >= 0).nonzero().flatten().tolist() == [*needed, *(length + i for i in range(end))]
            for q in (places[row] >= 0).nonzero().flatten().tolist():
                at = places[row, q]
                attended = batch["attention_mask"][row].repeat(2)
                keys = [k for k in range(2 * length) if sees(LAYOUT[objective], size, start, length, q, k)]
                seen = [int(places[row, k]) for k in range(2 * length) if k == q or (k in keys and attended[k])]
                assert sorted(seen) == mask[at].nonzero().flatten().tolist()
                assert inputs["input_ids"][0, at] == flat_ids[row, q]
                assert inputs["position_ids"][0, at] == q % length
                assert inputs["attention_mask"][0, at] == batch["attention_mask"][row, q % length]
                kept.add(int(at))
        noisy = sum(len(row.unique()) for row in places[:, :length]) - sum(-1 in row for row in places[:, :length])
        assert len(kept) == noisy + len(clean) and kept == set(range(len(kept)))
        assert not inputs["attention_mask"][0, len(kept) :].any()
        merged += int((places[:, length:] >= 0).sum()) - len(clean)
    assert merged > 200


@pytest.mark.parametrize("objective", LAYOUT)
def test_block_masks_are_the_dense_mask(objective):
    generator = torch.Generator().manual_seed(0)
    args = options_of(objective, block_size=32)
    batch = collated(draw_samples(generator, prompts=2, longest=300), args)
    layout = objective_inputs(batch, noise_of(batch, args), args).inputs["diffusion_layout"]
    built, dense = block_mask(layout), dense_mask(layout)[0, 0]
    total = len(dense)
    assert total > 10 * 128
    index = torch.arange(total)
    assert torch.equal(built.mask_mod(0, 0, index[:, None], index[None, :]), dense)
    blocks = dense.view(total // 128, 128, total // 128, 128)
    lists = ((built.kv_num_blocks, built.kv_indices), (built.full_kv_num_blocks, built.full_kv_indices))
    partial, full = torch.zeros(2, total // 128, total // 128, dtype=torch.bool)
    for found, (counts, indices) in zip((partial, full), lists, strict=True):
        for query in range(len(found)):
            found[query, indices[0, 0, query, : counts[0, 0, query]].long()] = True
    assert not (partial & full).any() and (blocks.any(dim=3).any(dim=1) <= (partial | full)).all()
    assert (full <= blocks.all(dim=3).all(dim=1)).all()
    assert full.any() and (partial | full).float().mean() < 0.4  # most blocks are skipped


def test_the_prompt_is_computed_once():
    prompt, rows = list(range(3, 35)), []
    for number in range(8):
        rows.append({"input_ids": [*prompt, 40 + number, *[50] * 7], "loss_mask": [0] * 32 + [1] * 8})
    for objective, tokens in (("block", 32 + 8 * (8 + 4)), ("hybrid", 32 + 8 * (8 + 7))):
        args = options_of(objective)
        batch = collated(rows, args)
        inputs = objective_inputs(batch, noise_of(batch, args), args).inputs
        assert inputs["attention_mask"].sum() == tokens  # 8 times 2 x 40 apart
        clean = (inputs["position_ids"] < 32) & (inputs["attention_mask"] > 0)
        assert inputs["input_ids"][clean].tolist() == prompt


# ---- the loss ----


def run(model, batch, args, items, spoil=None, noise=None):
    noise = noise_of(batch, args) if noise is None else noise
    inputs, targets, is_predicted, places = objective_inputs(batch, noise, args)
    if spoil is not None:
        spoil(inputs["diffusion_layout"])
    where = is_predicted.flatten().nonzero().squeeze(1)
    logits = model(**inputs, predict_positions=where if places is None else places[where]).logits[0]
    log_probs = logits.log_softmax(-1).gather(1, targets.flatten()[where][:, None])[:, 0]
    log_probs = torch.zeros(targets.numel(), dtype=torch.float64).index_copy(0, where, log_probs).view_as(targets)
    return objective_loss(log_probs, batch, noise, args, items)


def packed_and_apart(name, objective, response_window, spoil=None):
    generator = torch.Generator().manual_seed(3)
    samples = draw_samples(generator, longest=9)
    args = options_of(objective, response_window=response_window)
    apart = options_of(objective, group_by=None, response_window=response_window)
    batch = collated(samples, args)
    items = supervised_tokens(batch).sum()
    found = []
    for is_packed in (True, False):
        model, _ = pair(name)
        model.train()
        with keep_double():
            if is_packed:
                loss = run(model, batch, args, items, spoil)
            else:
                loss = sum(run(model, collated([x], apart, i), apart, items) for i, x in enumerate(samples))
            loss.backward()
        found.append((loss.detach(), gradients(model)))
    (loss, got), (expected, reference) = found
    assert got.keys() == reference.keys() and len(got) > 10
    largest = max(((got[key] - value).abs() / (1 + value.abs())).max() for key, value in reference.items())
    return (loss - expected).abs(), largest


@pytest.mark.parametrize("objective", LAYOUT)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_packed_sequence_equals_separate_ones(name, objective):
    loss, gradient = packed_and_apart(name, objective, response_window=True)
    assert loss < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize("objective", LAYOUT)
def test_one_packed_sequence_equals_separate_ones_in_blocks_from_the_start(objective):
    loss, gradient = packed_and_apart("qwen3", objective, response_window=False)
    assert loss < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize("objective", LAYOUT)
def test_a_block_that_sees_a_siblings_clean_tokens_fails(objective):
    def sees_siblings(layout):
        layout[:, UNTIL] = torch.where(layout[:, UNTIL] > 0, layout.shape[2], 0)

    loss, gradient = packed_and_apart("qwen3", objective, response_window=True, spoil=sees_siblings)
    assert loss > 1e-4 and gradient > 1e-4


# ---- the trainer ----


def grouped_rows(count=12, groups=3, seed=0):
    """Rows of token ids with the column `group`, and the same rows apart, with the indices that a group gives them."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, MASK, (5,), generator=generator).tolist() for _ in range(groups)]
    grouped, apart, counts = [], [], [0] * groups
    for index in range(count):
        group = index % groups
        length = int(torch.randint(1, 9, (1,), generator=generator))
        response = torch.randint(3, MASK, (length,), generator=generator).tolist()
        row = {"input_ids": prompts[group] + response, "loss_mask": [0] * 5 + [1] * length}
        grouped.append({**row, "group": f"prompt {group}"})
        apart.append({**row, "sample_index": (group << 20) + counts[group]})
        counts[group] += 1
    return Dataset.from_list(grouped), Dataset.from_list(sorted(apart, key=lambda row: row["sample_index"]))


@pytest.mark.parametrize("objective", LAYOUT)
def test_group_by_trains_and_evaluates_as_the_samples_apart(objective, tmp_path):
    grouped, apart = grouped_rows()
    options = {"objective": objective, "max_steps": 2}
    one = train(tmp_path, grouped, eval_rows=grouped, group_by="group", gradient_accumulation_steps=3, **options)
    assert len(one.train_dataset) == 3 and one.train_dataset.column_names == ["input_ids", "loss_mask", "sample_index"]
    flat = train(tmp_path, apart, eval_rows=apart, per_device_train_batch_size=12, **options)
    assert distance(weights(one.model), weights(flat.model), weights(small_model())) < 1e-5
    for first, second in zip(logs_of(one), logs_of(flat), strict=True):
        for name in ("loss", "nll_bound", "mean_token_accuracy"):
            assert first[name] == pytest.approx(second[name], rel=1e-5), name
    first, second = one.evaluate(), flat.evaluate()
    for name in ("eval_loss", "eval_nll_bound", "eval_perplexity"):
        assert first[name] == pytest.approx(second[name], rel=1e-5), name


def test_an_uneven_last_step_and_padding_that_is_supervised(tmp_path):
    """Two groups a micro-batch, and four a step, of which there are three: the empty row takes part."""
    grouped, apart = grouped_rows()
    options = {"objective": "block", "max_steps": 1, "supervise_padding": True}
    one = train(tmp_path, grouped, group_by="group", per_device_train_batch_size=3, **options)
    flat = train(tmp_path, apart, per_device_train_batch_size=12, **options)
    assert logs_of(one)[0]["loss"] == pytest.approx(logs_of(flat)[0]["loss"], rel=1e-6)
    batch = one.data_collator([grouped_feature := dict(one.train_dataset[0]), {"input_ids": []}])
    assert batch["input_lengths"].tolist() == [*map(len, grouped_feature["input_ids"]), 0]
    assert batch["sample_index"].tolist() == [*grouped_feature["sample_index"], -1]
    with torch.no_grad():
        both, alone = (
            one.compute_loss(one.model, one.data_collator(x))
            for x in ([grouped_feature, {"input_ids": []}], [grouped_feature])
        )
        empty = one.compute_loss(one.model, one.data_collator([{"input_ids": []}]))
    assert both == alone and empty == 0


def train_groups(folder):
    """What one of two gloo processes does."""
    trainer = train(folder, grouped_rows()[0], objective="block", group_by="group", **TWO_STEPS)
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/groups.pt")


TWO_STEPS = {"max_steps": -1, "num_train_epochs": 2}


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """Three groups: of the second round, one process reads an empty row."""
    run_ranks(train_groups, tmp_path)
    options = {**TWO_STEPS, "gradient_accumulation_steps": 2}
    one = train(tmp_path, grouped_rows()[0], objective="block", group_by="group", **options)
    assert distance(torch.load(tmp_path / "groups.pt"), weights(one.model), weights(small_model())) < 1e-5


def test_texts_of_one_prompt_are_a_group(tmp_path):
    rows = [{"prompt": "a b", "completions": [" c", " a c"]}, {"prompt": "c", "completions": [" a"]}]
    rows.append({"prompt": "a b", "completions": [" b c a", " c"]})
    train_dataset = trainer_of(tmp_path, Dataset.from_list(rows), objective="hybrid", group_by="prompt").train_dataset
    texts = [list(map(tokenizer().decode, group)) for group in train_dataset["input_ids"]]
    end = tokenizer().eos_token
    assert texts == [[f"a b{text}{end}" for text in (" c", " a c", " b c a", " c")], [f"c a{end}"]]
    assert train_dataset["sample_index"] == [[0, 1, 2, 3], [1 << 20]]
    flat = trainer_of(tmp_path, Dataset.from_list(rows[:1]), objective="hybrid").train_dataset
    assert flat["input_ids"][:] == train_dataset["input_ids"][0][:2]
    assert flat["loss_mask"][:] == train_dataset["loss_mask"][0][:2]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    streamed = list(prepare_diffusion_rows(stream, tokenizer(), group_by="prompt"))
    assert [len(row["input_ids"]) for row in streamed] == [2, 1, 2]  # consecutive rows only
    cut = prepare_diffusion_rows(Dataset.from_list(rows), tokenizer(), group_by="prompt", cap=("max_length", 4))
    assert cut["input_ids"][0][1] == train_dataset["input_ids"][0][1][:4]


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_a_group_is_as_long_as_its_samples(strategy, tmp_path):
    grouped, _ = grouped_rows()
    trainer = trainer_of(tmp_path, grouped, objective="block", group_by="group", train_sampling_strategy=strategy)
    sampler = trainer.step_sampler(trainer.train_dataset, 1)
    expected = [sum(map(len, ids)) for ids in trainer.train_dataset["input_ids"]]
    assert sampler.costs.tolist() == [*expected, 0] and len(set(expected)) > 1


def test_what_cannot_be_shared_is_refused(tmp_path):
    grouped, _ = grouped_rows()
    with pytest.raises(ValueError, match=r"`group_by`.*sees the response from the prompt, so sharing is not exact"):
        DiffusionSFTConfig(str(tmp_path), group_by="group", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"`group_by` is 'groups'.*'group'"):
        trainer_of(tmp_path, grouped, objective="block", group_by="groups")
    with pytest.raises(ValueError, match=r"`weights`.*`loss_mask`"):
        weighted = grouped.map(lambda row: {"weights": [1.0] * len(row["input_ids"])})
        trainer_of(tmp_path, weighted, objective="block", group_by="group")
    model = make_model("qwen3_moe", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`group_by`.*`router_aux_loss_coef=0.0`"):
        trainer_of(tmp_path, grouped, model=model, objective="block", group_by="group", router_aux_loss_coef=0.1)
