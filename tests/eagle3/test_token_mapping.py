"""The draft vocabulary: selection, cache, broken caches, two processes."""

import json
import logging
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from hf_prefix_tree import build_token_mapping, load_or_build_token_mapping, load_token_mapping, save_token_mapping
from hf_prefix_tree.eagle3.vocabulary import (
    count_supervised,
    d2t_from_ids,
    data_fingerprint,
    ids_from_d2t,
    t2d_from_ids,
)
from tests.support.mapping_files import BROKEN, BROKEN_IN_ITSELF, CONFIG, DRAFT, VOCAB, loader, samples
from tests.support.mapping_ranks import build_and_break
from tests.support.ranks import run_ranks

SIZES = {"target_vocab_size": VOCAB, "draft_vocab_size": DRAFT}


class Unreadable:
    def __init__(self, dataset=()):
        self.dataset = dataset

    def __iter__(self):
        raise AssertionError("the data was read")


def transcription(batches, target_vocab_size, draft_vocab_size, special_token_ids):
    """The rule, token by token."""
    counts = Counter()
    for batch in batches:
        for ids, mask in zip(batch["input_ids"].tolist(), batch["loss_mask"].tolist(), strict=True):
            counts.update(i for i, m in zip(ids, mask, strict=True) if m and 0 <= i < target_vocab_size)
    chosen = []
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    for i in [*(special_token_ids or []), *ranked, *range(target_vocab_size)]:
        if i is not None and 0 <= i < target_vocab_size and i not in chosen and len(chosen) < draft_vocab_size:
            chosen.append(i)
    return sorted(chosen)


def test_goldens(shared_data):
    cases = json.loads(shared_data("goldens/eagle3_token_mapping.json").read_text())
    assert len(cases) == 9
    for case in cases:
        batch = {name: torch.tensor([row[name] for row in case["rows"]]) for name in ("input_ids", "loss_mask")}
        names = ("target_vocab_size", "draft_vocab_size", "special_token_ids")
        ids, mask = build_token_mapping([batch], **{name: case[name] for name in names})
        assert ids.tolist() == case["selected_sorted"] == sorted(case["selected_in_choice_order"])
        assert mask.int().tolist() == case["mask"]
        assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("seed", range(20))
def test_random_cases_equal_the_transcription(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 40))
    draft = int(rng.integers(1, vocab))
    special = [None if i == 0 else int(i) for i in rng.integers(-3, vocab + 5, size=rng.integers(0, 5))]
    batches = [
        {
            "input_ids": torch.from_numpy(rng.integers(-2, vocab + 3, size=(2, 7))),  # some outside the vocabulary
            "loss_mask": torch.from_numpy(rng.integers(0, 2, size=(2, 7))),
        }
        for _ in range(int(rng.integers(0, 4)))
    ]
    ids, mask = build_token_mapping(
        batches, target_vocab_size=vocab, draft_vocab_size=draft, special_token_ids=special
    )
    expected = transcription(batches, vocab, draft, special)
    assert ids.tolist() == expected
    assert mask.nonzero().flatten().tolist() == expected


def test_labels_say_what_is_supervised_where_there_is_no_loss_mask():
    batch = {"input_ids": [[7, 8, 9]], "labels": [[-100, 8, -100]]}
    assert build_token_mapping([batch], target_vocab_size=10, draft_vocab_size=1)[0].tolist() == [8]


@pytest.mark.parametrize("draft", [None, VOCAB, VOCAB + 1])
def test_the_identity_reads_nothing(draft, tmp_path):
    path = tmp_path / "map.safetensors"
    ids, mask = load_or_build_token_mapping(
        Unreadable(), target_vocab_size=VOCAB, draft_vocab_size=draft, cache_path=path
    )
    assert ids.tolist() == list(range(VOCAB)) and mask.all()
    assert not path.exists()


@pytest.mark.parametrize("name", ["target_vocab_size", "draft_vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "7"])
def test_sizes_are_validated(name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*{value!r}"):
        build_token_mapping([], **{**SIZES, name: value})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": [[1]]}, "keys \\['tokens'\\]"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1]]}, "`loss_mask`.*1"),
    ],
)
def test_a_malformed_batch_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        build_token_mapping([batch], **SIZES)


@pytest.mark.parametrize("has_own_generator", [False, True])
def test_neither_the_scan_nor_a_hit_moves_a_generator(tmp_path, has_own_generator):
    data = loader(samples(), shuffle=True)
    own = torch.Generator().manual_seed(5)
    if has_own_generator:
        data.generator = data.sampler.generator = own

    def states():
        return (
            torch.get_rng_state().tolist(),
            own.get_state().tolist(),
            random.getstate(),
            str(np.random.get_state()),
        )

    before = states()
    load_or_build_token_mapping(data, cache_path=tmp_path / "map.safetensors", **CONFIG)
    assert states() == before
    load_or_build_token_mapping(data, cache_path=tmp_path / "map.safetensors", **CONFIG)
    assert states() == before
    next(iter(data))
    assert states() != before  # reading it does move them, without the care


def test_coverage_is_logged_and_a_progress_bar_shown(caplog, capsys):
    enable_progress_bar()  # the command line turns it off, in tests, too
    batch = {"input_ids": [[1, 1, 1, 2]], "loss_mask": [[1, 1, 1, 1]]}
    with caplog.at_level(logging.INFO, logger="hf_prefix_tree"):
        build_token_mapping([batch], target_vocab_size=5, draft_vocab_size=1)
    assert caplog.messages == ["Draft vocabulary: 1 of 5 tokens cover 75.00% of 4 supervised tokens."]
    assert "Counting tokens: 100%" in capsys.readouterr().err


def test_d2t_and_t2d():
    ids = torch.tensor([0, 3, 5, 9])
    d2t, t2d = d2t_from_ids(ids), t2d_from_ids(ids, 11)
    assert d2t.tolist() == [0, 2, 3, 6]
    assert torch.equal(ids_from_d2t(d2t), ids)
    assert t2d.nonzero().flatten().tolist() == [0, 3, 5, 9] and len(t2d) == 11
    logits = torch.randn(11)
    assert torch.equal(logits[t2d], logits[ids])  # ascending: slicing and adding offsets agree


# ---- cache ----


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "map.safetensors"
    built = build_token_mapping(loader(samples()), **CONFIG)
    save_token_mapping(path, built[0], VOCAB, "data")
    for fingerprint in (None, "data"):
        loaded = load_token_mapping(path, **SIZES, fingerprint=fingerprint)
        assert torch.equal(loaded[0], built[0]) and torch.equal(loaded[1], built[1])
    assert load_token_mapping(path, **SIZES, fingerprint="other data") is None
    assert os.listdir(path.parent) == ["map.safetensors"]


def test_a_missing_file_is_none_without_a_warning(tmp_path, caplog):
    assert load_token_mapping(tmp_path / "none.safetensors", **SIZES) is None
    assert caplog.messages == []


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_token_mapping(tmp_path / "map", torch.arange(DRAFT), VOCAB)
    finally:
        os.umask(before)
    assert (tmp_path / "map").stat().st_mode & 0o777 == 0o666 & ~umask


def writes_half_and_fails(path, content):
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError("disk full")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "map.safetensors"
    save_token_mapping(path, torch.arange(DRAFT), VOCAB)
    content = path.read_bytes()

    monkeypatch.setattr(Path, "write_bytes", writes_half_and_fails)
    with pytest.raises(OSError, match="disk full"):
        save_token_mapping(path, torch.arange(1, DRAFT + 1), VOCAB)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["map.safetensors"]


def test_files_that_a_killed_run_left_are_removed(tmp_path):
    old, new = (tmp_path / f".{name}.hf_prefix_tree_partial" for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    save_token_mapping(tmp_path / "map.safetensors", torch.arange(DRAFT), VOCAB)
    assert not old.exists() and new.exists()  # another run may be writing the second one


def test_wrong_ids_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="not ascending"):
        save_token_mapping(tmp_path / "map.safetensors", torch.tensor([3, 1]), VOCAB)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", BROKEN_IN_ITSELF)
def test_broken_files_are_not_loaded(name, tmp_path, caplog):
    path = tmp_path / "map.safetensors"
    BROKEN[name](path)
    assert load_token_mapping(path, **SIZES) is None
    assert len(caplog.messages) == 1 and "is not used: " in caplog.messages[0]
    assert not Path(str(path) + ".ran").exists()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_rebuilt(name, tmp_path, caplog):
    path = tmp_path / "map.safetensors"
    BROKEN[name](path)
    data = loader(samples())
    expected = build_token_mapping(data, **CONFIG)[0]
    assert torch.equal(load_or_build_token_mapping(data, cache_path=path, **CONFIG)[0], expected)
    assert "is built again: " in caplog.messages[0]
    if name == "folder":  # cannot be replaced by a file: said, and built each time
        assert "could not be written" in caplog.messages[1]
    else:
        assert torch.equal(
            load_or_build_token_mapping(Unreadable(data.dataset), cache_path=path, **CONFIG)[0], expected
        )


def test_a_file_of_other_data_tokenizer_or_specials_is_rebuilt(tmp_path, tiny_tokenizer, caplog):
    path = tmp_path / "map.safetensors"
    call = lambda data, **changes: load_or_build_token_mapping(data, **{**CONFIG, "cache_path": path, **changes})[0]  # noqa: E731
    rows = samples()
    first = call(loader(rows))
    assert torch.equal(call(Unreadable(rows)), first) and not caplog.messages
    other_rows = samples(seed=1)
    other = call(loader(other_rows))
    assert not torch.equal(other, first) and "other data" in caplog.messages.pop()
    changed = [dict(row) for row in other_rows]
    changed[0]["loss_mask"] = [1 - m for m in changed[0]["loss_mask"]]
    for changes in ({}, {"special_token_ids": [7]}, {"tokenizer": tiny_tokenizer}):
        with pytest.raises(AssertionError, match="the data was read"):
            call(Unreadable(changed), **changes)
        call(loader(changed), **changes)
        call(Unreadable(changed), **changes)


def test_a_dataset_is_known_by_its_fingerprint(tmp_path):
    from datasets import Dataset

    data = loader(Dataset.from_list(samples()))
    first = load_or_build_token_mapping(data, cache_path=tmp_path / "map.safetensors", **CONFIG)[0]
    same, other = Dataset.from_list(samples()), Dataset.from_list(samples(seed=1))
    assert torch.equal(
        load_or_build_token_mapping(Unreadable(same), cache_path=tmp_path / "map.safetensors", **CONFIG)[0], first
    )
    with pytest.raises(AssertionError, match="the data was read"):
        load_or_build_token_mapping(Unreadable(other), cache_path=tmp_path / "map.safetensors", **CONFIG)


def test_a_file_is_not_taken_for_data_that_can_not_be_told_from_other_data(tmp_path, caplog):
    sizes = {"target_vocab_size": 9, "draft_vocab_size": 1, "cache_path": tmp_path / "map.safetensors"}
    streams = [[{"input_ids": [[token]], "loss_mask": [[1]]}] for token in (7, 5)]
    found = [load_or_build_token_mapping(iter(stream), **sizes)[0].tolist() for stream in streams]
    assert found == [[7], [5]]
    (message,) = caplog.messages
    assert "is built again: the data can't be told from other data (pass `fingerprint`" in message
    first = load_or_build_token_mapping(iter(streams[1]), **sizes, fingerprint="five")[0]
    assert torch.equal(load_or_build_token_mapping(Unreadable(), **sizes, fingerprint="five")[0], first)


@pytest.mark.parametrize("name", ["completion_mask", "attention_mask", "text", "score", "ragged"])
def test_every_column_of_the_rows_is_part_of_what_they_are(name):
    values = {"text": ("a", "b"), "score": (0.25, 0.5), "ragged": ([[1], [2, 3]], [[1, 2], [3]])}
    first, second = values.get(name, ([0, 1], [1, 1]))
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1], name: first}]
    same = [{name: first, "loss_mask": torch.tensor([0, 1]), "input_ids": np.array([1, 2])}]
    fingerprints = [data_fingerprint(source) for source in (rows, same, [{**rows[0], name: second}], rows * 2)]
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 3


def test_a_disk_that_is_full_costs_the_file_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Path, "write_bytes", writes_half_and_fails)
    built = load_or_build_token_mapping(loader(samples()), cache_path=tmp_path / "map.safetensors", **CONFIG)[0]
    assert torch.equal(built, build_token_mapping(loader(samples()), **CONFIG)[0])
    assert "could not be written" in caplog.messages[0] and os.listdir(tmp_path) == []


# ---- two processes ----


@pytest.mark.slow
def test_two_processes_equal_one_and_never_hang(tmp_path):
    for name, breaks in BROKEN.items():
        breaks(tmp_path / name)
    load_or_build_token_mapping(loader(samples()), cache_path=tmp_path / "single", **CONFIG)
    for rank in range(2):  # the file is good for one rank, and garbage or missing for the other
        load_or_build_token_mapping(
            loader(samples()), cache_path=tmp_path / f"rank{rank}_has_it" / str(rank), **CONFIG
        )
        BROKEN["garbage"](tmp_path / f"rank{rank}_has_it" / str(1 - rank))
    run_ranks(build_and_break, tmp_path)
    # 11 rows over 2 ranks: the sampler repeats one, which must not count twice
    expected = build_token_mapping(loader(samples()), **CONFIG)[0].tolist()
    counts = count_supervised(loader(samples()), VOCAB).tolist()
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for found in results:
        assert found["counts"] == counts
        assert found["built"] == found["hit"] == found["built_by_loader"] == expected
        assert found["rank0_has_it"] == found["rank1_has_it"] == found["single"] == expected
        assert len(found["broken"]) == len(BROKEN) >= 10
        for name, result in found["broken"].items():
            assert result == {"ids": expected, "warned": True, "undisturbed": True}, name
    # ranks of a context-parallel group get the same rows, data-parallel ranks, or all without a mesh, different ones
    whole = sorted(row["input_ids"] + [0] * (8 - len(row["input_ids"])) for row in samples())
    first, second = results
    assert first["meshes"]["context"] == second["meshes"]["context"]
    assert sorted(row for batch in first["meshes"]["context"] for row in batch) == whole
    for key in ("data", "world"):
        parts = [found["world"] if key == "world" else found["meshes"][key] for found in results]
        assert len(parts[0]) == len(parts[1]) == 6  # 11 rows, and one without tokens
        assert sorted(row for part in parts for batch in part for row in batch if any(row)) == whole
    assert "pass the data-parallel one alone" in first["error"]


@pytest.mark.gpu
def test_counts_are_summed_over_nccl(tmp_path):
    """One process, the NCCL backend: the collectives take tensors of the GPU only."""
    import torch.distributed as dist

    from hf_prefix_tree.eagle3 import vocabulary as mapping_cache
    from hf_prefix_tree.eagle3 import vocabulary as token_mapping

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert token_mapping.collective_device().type == "cuda"
        verdict = [(torch.arange(5), None)]
        dist.broadcast_object_list(verdict, src=0, device=token_mapping.collective_device())
        counts = torch.arange(5).to(token_mapping.collective_device())
        dist.all_reduce(counts)
        assert counts.tolist() == [0, 1, 2, 3, 4]
        data = loader(samples())
        ids = mapping_cache.load_or_build_token_mapping(data, cache_path=tmp_path / "map.safetensors", **CONFIG)[0]
        assert ids.tolist() == transcription(data, VOCAB, DRAFT, CONFIG["special_token_ids"])
    finally:
        dist.destroy_process_group()
