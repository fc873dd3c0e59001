"""Packing, collating and loading of EAGLE-3 rows."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset

from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree import DataCollatorForEagle3, build_eagle3_dataloader, pack_eagle3_dataset
from hf_prefix_tree.data.turns import conversation_branches

KEYS = ("input_ids", "loss_mask", "attention_mask", "position_ids", "doc_remaining", "seq_lens")


def random_samples(seed, count=30, longest=12):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(rng.integers(0, longest))
        ids = rng.integers(1, 90, size=length).tolist()
        rows.append({"input_ids": ids, "loss_mask": rng.integers(0, 2, size=length).tolist()})
    return rows


def transcription(samples, size, pad):
    """Next fit, slot by slot."""
    rows, row = [], None
    for sample in samples:
        ids, mask = sample["input_ids"][:size], sample["loss_mask"][:size]
        if not ids:
            continue
        if row is None or len(row["input_ids"]) + len(ids) > size:
            row = {name: [] for name in KEYS}
            rows.append(row)
        for at, (token, supervised) in enumerate(zip(ids, mask, strict=True)):
            row["input_ids"].append(token)
            row["loss_mask"].append(supervised)
            row["attention_mask"].append(1)
            row["position_ids"].append(at)
            row["doc_remaining"].append(len(ids) - 1 - at)
        row["seq_lens"].append(len(ids))
    for row in rows:
        while len(row["input_ids"]) < size:
            values = {"input_ids": pad, "position_ids": row["position_ids"][-1] + 1}
            for name in KEYS[:-1]:
                row[name].append(values.get(name, 0))
            row["seq_lens"][-1] += 1
    return rows


def documents(rows):
    """The documents of packed rows, in no order."""
    found = []
    for row in rows:
        start = 0
        for length in row["seq_lens"]:
            real = sum(row["attention_mask"][start : start + length])
            ids, mask = (row[name][start : start + real] for name in ("input_ids", "loss_mask"))
            assert row["position_ids"][start : start + length] == list(range(length))
            assert row["doc_remaining"][start : start + real] == list(range(real - 1, -1, -1))
            found.append((list(ids), list(mask)))
            start += length
        assert start == len(row["input_ids"])
    return sorted(found)


def test_goldens(shared_data):
    cases = json.loads(shared_data("goldens/eagle3_packing.json").read_text())
    assert len(cases) == 5
    for case in cases:
        arguments = (case["samples"], case["packed_sequence_size"], case["pad_token_id"])
        if "raises" in case:
            with pytest.raises(ValueError, match=case["raises"]):
                pack_eagle3_dataset(*arguments)
            continue
        rows = pack_eagle3_dataset(*arguments)
        assert rows == case["rows"]
        collated = DataCollatorForEagle3(case["pad_token_id"])(rows)
        assert {name: value.tolist() for name, value in collated.items()} == case["collated"]
        assert {value.dtype for value in collated.values()} == {torch.int64}


@pytest.mark.parametrize("seed", range(20))
def test_random_cases_equal_the_transcription(seed):
    samples = random_samples(seed)
    size = 4 + seed
    assert pack_eagle3_dataset(samples, size, 99) == transcription(samples, size, 99)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_packs_the_same_documents_tighter(seed):
    samples = random_samples(seed, count=60)
    loose, tight = (pack_eagle3_dataset(samples, 16, 0, strategy) for strategy in ("next_fit", "best_fit"))
    assert documents(tight) == documents(loose)
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    assert len(tight) < len(loose)
    assert len(tight) <= -(-tokens // 16) + 1


@pytest.mark.parametrize("strategy", ["next_fit", "best_fit"])
def test_datasets_in_one_process_in_two_and_as_a_stream(strategy):
    samples = random_samples(3, count=40)
    expected = pack_eagle3_dataset(samples, 16, 0, strategy)
    dataset = Dataset.from_list(samples)
    assert pack_eagle3_dataset(dataset, 16, 0, strategy).to_list() == expected
    stream = list(pack_eagle3_dataset(dataset.to_iterable_dataset(), 16, 0, strategy))
    assert [{name: list(row[name]) for name in KEYS} for row in stream] == expected
    halves = pack_eagle3_dataset(dataset, 16, 0, strategy, num_proc=2).to_list()
    assert halves == [
        row for half in (samples[:20], samples[20:]) for row in pack_eagle3_dataset(half, 16, 0, strategy)
    ]
    step = partial(pack_eagle3_dataset, packed_sequence_size=16, pad_token_id=0, strategy=strategy)
    mapped = dataset.map(step, batched=True, batch_size=40, remove_columns=dataset.column_names)
    assert mapped.to_list() == expected


def test_a_large_dataset_is_packed_in_parts(monkeypatch):
    monkeypatch.setattr("hf_prefix_tree.eagle3.data._MAX_BATCH", 25)
    samples = random_samples(3, count=40)
    parts = [row for part in (samples[:25], samples[25:]) for row in pack_eagle3_dataset(part, 16, 0)]
    assert pack_eagle3_dataset(Dataset.from_list(samples), 16, 0).to_list() == parts


def test_a_dataset_without_any_token_is_an_error():
    dataset = Dataset.from_list([{"input_ids": [], "loss_mask": []}] * 3)
    with pytest.raises(ValueError, match="`samples`"):
        pack_eagle3_dataset(dataset, 8, 0)


@pytest.mark.parametrize(
    ("columns", "mask"),
    [
        ({"labels": [-100, 6, 7, -100]}, [0, 1, 1, 0]),
        ({"completion_mask": [0, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]}, [0, 0, 1, 0]),
        ({"loss_mask": [1, 1, 1, 1], "attention_mask": [1, 1, 1, 0]}, [1, 1, 1]),
    ],
)
def test_columns_of_trl(columns, mask):
    (row,) = pack_eagle3_dataset([{"input_ids": [5, 6, 7, 8], **columns}], 6, 0)
    assert row["loss_mask"] == mask + [0] * (6 - len(mask))
    assert sum(row["attention_mask"]) == len(mask)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": [1, 2]}, "`loss_mask`"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "`loss_mask`.*1.*2.*`input_ids`"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "unshifted"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "attention_mask": [1]}, "`attention_mask`"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "attention_mask": [0, 1]}, "at the end"),
        ({"messages": [{"role": "user", "content": "x"}]}, "`tokenizer`"),
        ({"text": "x"}, "`tokenizer`"),
        ({"branches": [{"input_ids": [1], "weights": [1.0]}]}, "branches rows.*`input_ids`"),
    ],
)
def test_malformed_samples_are_refused(sample, message):
    with pytest.raises(ValueError, match=message):
        pack_eagle3_dataset([sample], 8, 0)


def test_arguments_are_validated():
    samples = random_samples(0)
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match="`packed_sequence_size`"):
            pack_eagle3_dataset(samples, size, 0)
    with pytest.raises(ValueError, match="`strategy`"):
        pack_eagle3_dataset(samples, 8, 0, "first_fit")
    with pytest.raises(ValueError, match="length"):
        pack_eagle3_dataset({"input_ids": [[1]], "loss_mask": [[1], [1]]}, 8, 0)


# ---- the collator ----


def test_collated_documents_equal_packed_rows_of_one_document():
    samples = [sample for sample in random_samples(1) if sample["input_ids"]]
    batch = DataCollatorForEagle3(pad_token_id=9, length=12)(samples)
    rows = [pack_eagle3_dataset([sample], 12, 9)[0] for sample in samples]
    assert {name: value.tolist() for name, value in batch.items()} == {n: [row[n] for row in rows] for n in KEYS}
    longest = DataCollatorForEagle3(pad_token_id=9, pad_to_multiple_of=8)(samples[:2])["input_ids"].shape[1]
    assert longest == -(-max(len(sample["input_ids"]) for sample in samples[:2]) // 8) * 8


def test_a_feature_without_tokens_supervises_nothing():
    packed = pack_eagle3_dataset(random_samples(0), 12, 9)[:1]
    for empty in ({"input_ids": [], "loss_mask": []}, {"input_ids": []}):
        batch = DataCollatorForEagle3(pad_token_id=9)([*packed, empty])
        assert batch["input_ids"][1].tolist() == [9] * 12
        assert batch["loss_mask"][1].sum() == batch["doc_remaining"][1].sum() == batch["attention_mask"][1].sum() == 0
        assert batch["seq_lens"].sum(dim=1).tolist() == [12, 12]


def test_the_collator_refuses_what_does_not_fit():
    rows = [pack_eagle3_dataset(random_samples(0), size, 0)[0] for size in (12, 16)]
    collator = DataCollatorForEagle3(pad_token_id=0, length=4)
    for features, message in (
        (rows, "\\[12, 16\\]"),
        ([{"input_ids": [1] * 5, "loss_mask": [1] * 5}], "5 tokens.*4"),
        ([{"input_ids": [1]}], "`loss_mask`"),
        ([{**rows[0], "doc_remaining": [1]}], "`doc_remaining`"),
        ([{**rows[0], "seq_lens": [1]}], "`seq_lens`.*1"),
    ):
        with pytest.raises(ValueError, match=message):
            collator(features)


# ---- conversations and the loader ----


@pytest.fixture(scope="module")
def dialogues():
    return [{"messages": row["messages"], "tools": row["tools"]} for row in generate_dialogues(6, 1)]


def supervised_texts(batch, tokenizer):
    found = []
    for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.numpy(), [0]])))
        found.append([tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)])
    return found


def test_every_assistant_turn_is_a_document_with_the_context_that_is_served(dialogues, tiny_tokenizer):
    """Earlier reasoning, which the template drops, is in no context."""
    options = {"batch_size": 99, "seq_length": 4096, "shuffle": False}
    (batch,) = build_eagle3_dataloader(dialogues, tiny_tokenizer, **options)
    expected = [
        (branch.input_ids, branch.weights)
        for row in dialogues
        for branch in conversation_branches(row["messages"], tiny_tokenizer, tools=row["tools"]).branches
    ]
    assert batch["input_ids"].shape == (len(expected), 4096) and len(expected) > 3 * len(dialogues)
    for ids, mask, (branch, weights) in zip(batch["input_ids"], batch["loss_mask"], expected, strict=True):
        end = int(mask.nonzero().max()) + 1
        assert ids[:end].tolist() == branch[:end].tolist() and not weights[end:].any()
        assert mask[:end].tolist() == weights[:end].astype(int).tolist()
    thoughts = [m["reasoning_content"] for m in dialogues[0]["messages"] if m.get("reasoning_content")]
    last = tiny_tokenizer.decode(expected[sum(m["role"] == "assistant" for m in dialogues[0]["messages"]) - 1][0])
    assert len(thoughts) > 1 and sum(thought in last for thought in thoughts) < len(thoughts)


def test_losses_are_logged(tiny_tokenizer, caplog):
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>four, or"}]
    rows = [{"messages": turns}, {"messages": [turns[0], {"role": "assistant", "content": "4"}]}]
    for samples in (rows, Dataset.from_list(rows)):
        caplog.clear()
        pack_eagle3_dataset(samples, 64, 0, tokenizer=tiny_tokenizer)
        assert "Prepared 2 rows: 2 branches. Some data" in caplog.text and "1 turns" in caplog.text
        assert "never closed" in caplog.text


def test_reasoning_can_be_left_unsupervised(dialogues, tiny_tokenizer):
    options = {"batch_size": 99, "seq_length": 4096, "shuffle": False}
    (whole,) = build_eagle3_dataloader(dialogues, tiny_tokenizer, **options)
    (visible,) = build_eagle3_dataloader(dialogues, tiny_tokenizer, supervise_reasoning=False, **options)
    assert torch.equal(whole["input_ids"], visible["input_ids"])
    turns = zip(supervised_texts(whole, tiny_tokenizer), supervised_texts(visible, tiny_tokenizer), strict=True)
    changed = 0
    for before, after in turns:
        for long, short in zip(before, after, strict=True):
            assert short == long.rpartition("</think>")[2]
            changed += short != long
    assert changed > 6
    with pytest.raises(ValueError, match="`reasoning_end`"):
        build_eagle3_dataloader(
            dialogues, tiny_tokenizer, supervise_reasoning=False, reasoning_end="<|end|>", **options
        )


def test_real_conversations_pack(shared_data, qwen3_tokenizer):
    rows = [json.loads(line) for line in shared_data("data/conversational_reasoning.jsonl").read_text().splitlines()]
    samples = [{"messages": row["messages"]} for row in rows]
    turns = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    packed = pack_eagle3_dataset(samples, 4096, 0, "best_fit", tokenizer=qwen3_tokenizer)
    assert len(documents(packed)) == turns
    assert sum(sum(row["loss_mask"]) for row in packed) > 1000


def test_prompt_and_completion(tiny_tokenizer):
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    for sample in (row, {"prompt": messages[:1], "completion": messages[1:]}):
        batch = next(iter(build_eagle3_dataloader([sample], tiny_tokenizer, seq_length=64)))
        ((text,),) = supervised_texts(batch, tiny_tokenizer)
        assert text.strip() == "4<|im_end|>"


def test_documents_keep_their_head_in_padded_rows():
    rows = [{"input_ids": list(range(9)), "loss_mask": [1] * 9}, {"input_ids": [], "loss_mask": []}]
    (batch,) = build_eagle3_dataloader(rows, seq_length=4, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3]]
    (batch,) = build_eagle3_dataloader(Dataset.from_list(rows), seq_length=4, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3]]


def test_shuffling_is_seeded_and_moves_no_global_generator():
    rows = [{"input_ids": [i], "loss_mask": [1]} for i in range(20)]
    order = lambda loader: [int(i) for batch in loader for i in batch["input_ids"][:, 0]]  # noqa: E731
    state = torch.get_rng_state()
    make = partial(build_eagle3_dataloader, rows, seq_length=1, pad_token_id=0, batch_size=3)
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert order(first) == order(again) != order(other)
    assert sorted(order(first)) == list(range(20)) != order(first)
    epoch = order(first)
    first.sampler.set_epoch(1)
    assert order(first) != epoch
    assert order(make(shuffle=False)) == list(range(20)) == sorted(order(make(num_workers=2)))
    assert torch.equal(state, torch.get_rng_state())


def test_a_name_and_a_split_are_loaded_from_the_hub(monkeypatch):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_list([{"input_ids": [7, 8], "loss_mask": [0, 1]}])

    monkeypatch.setattr("hf_prefix_tree.eagle3.data.load_dataset", load)
    (batch,) = build_eagle3_dataloader("someone/dialogues", split="validation", seq_length=2, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[7, 8]] and asked == [(("someone/dialogues",), {"split": "validation"})]


def test_a_path_and_packed_rows_are_loaded(tmp_path):
    samples = random_samples(2)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    expected = pack_eagle3_dataset(samples, 16, 0)
    options = {"packed_sequence_size": 16, "pad_token_id": 0, "shuffle": False}
    for source in (str(path), expected, Dataset.from_list(expected), Dataset.from_list(samples).to_iterable_dataset()):
        batches = list(build_eagle3_dataloader(source, **options))
        assert [batch["input_ids"][0].tolist() for batch in batches] == [row["input_ids"] for row in expected]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_get_every_row_once_and_equally_many(ranks, is_stream, workers, monkeypatch):
    from hf_prefix_tree.eagle3 import data

    rows = [{"input_ids": [i + 1], "loss_mask": [1]} for i in range(7)]
    if is_stream:
        rows = Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
    seen, batches = [], []
    for rank in range(ranks):
        monkeypatch.setattr(data, "_place", lambda mesh, rank=rank: (rank, ranks))
        loader = build_eagle3_dataloader(rows, seq_length=1, pad_token_id=0, batch_size=2, num_workers=workers)
        found = list(loader)
        batches.append(len(found))
        seen += [int(i) for batch in found for i in batch["input_ids"][batch["loss_mask"] == 1]]
    assert sorted(seen) == list(range(1, 8))
    assert len(set(batches)) == 1


def test_arguments_of_the_loader_are_validated():
    rows = [{"input_ids": [1], "loss_mask": [1]}]
    with pytest.raises(ValueError, match="pad_token_id"):
        build_eagle3_dataloader(rows)
    for changes in ({"batch_size": 0}, {"seq_length": 0}, {"packed_sequence_size": -1}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            build_eagle3_dataloader(rows, pad_token_id=0, **changes)
    with pytest.raises(ValueError, match="`dataset`"):
        build_eagle3_dataloader([{"input_ids": [], "loss_mask": []}], pad_token_id=0)
