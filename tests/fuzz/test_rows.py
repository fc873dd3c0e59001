"""Rows of every kind, right and wrong, for trees, diffusion and EAGLE-3: the reference's value, or a named error."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from datasets import Dataset, IterableDataset, disable_progress_bars, enable_progress_bars, load_from_disk
from hypothesis import given, reject
from hypothesis import strategies as st

from hf_prefix_tree import fold, pack_eagle3_dataset, prepare_trees
from hf_prefix_tree.data.rows import MESSAGE_KINDS, ROW_KINDS, RowOptions, row_branches
from hf_prefix_tree.data.selection import SCORES, _score_row
from hf_prefix_tree.data.turns import REASONING_MODES
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from tests.fuzz.inputs import CHATS, ODD, ROWS, Refused, Unspecified, agree, inputs, mutated, outcome, supervised
from tests.fuzz.reference import as_folded, branches_of, prepared, samples
from tests.support.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
LENGTHS = st.sampled_from([None, None, 2, 4])


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory):
    """No progress bars, and no files of a cache."""
    disable_progress_bars()
    yield
    enable_progress_bars()


def named(kind: str, row: dict[str, Any]) -> str:
    return "completion" if kind == "completions" and "completion" in row else kind


# --- One row


@pytest.mark.parametrize("kind", ROWS)
def test_trees(kind):
    def read(row, max_length):
        options = RowOptions(named(kind, row), TOKENIZER, max_length=max_length)
        branches = row_branches(row, options, Counter())
        return as_folded(fold(branches).to_dict()) if any(branch.weights.any() for branch in branches) else None

    @inputs(100)
    @given(mutated(ROWS[kind]), LENGTHS)
    def run(row, max_length):
        agree(lambda: read(row, max_length), lambda: prepared(branches_of(kind, row, TOKENIZER), "tree", max_length))

    run()


# --- Datasets: every row is read or named


GROUPS = st.one_of(*[st.integers(0, 1)] * 6, st.none(), st.just(float("nan")), st.just([1]), st.just(([1],)))


@st.composite
def tables(draw: Any, kinds: tuple[str, ...] = tuple(ROWS)) -> tuple[str, list[dict[str, Any]]]:
    """One to four rows of a kind, with a group; some of them are changed."""
    kind = draw(st.sampled_from(kinds))
    row = supervised() if kinds == SAMPLED and kind == "tokens" else ROWS[kind]
    if kind == "completions":
        name = draw(st.sampled_from(("completion", "completions")))
        row = row.filter(lambda row: name in row)
    rows = draw(st.lists(mutated(row) if draw(st.booleans()) else row, min_size=1, max_size=4))
    return kind, [{**row, "g": draw(GROUPS)} for row in rows]


SAMPLED = ("tokens", "conversation", "completions")


def read_rows(kind: str, rows: list[Any], read: Callable[[Any], Any]) -> list[Any]:
    """What the reference reads of each row, `Refused` for those that are wrong."""
    found: list[Any] = []
    for row in rows:
        try:
            found.append(read(row))
        except Refused:
            found.append(Refused)
    return found


OR_NONE = "`[^`]+`|no tree is left"


def check_all(call: Callable[[str], Any], read: list[Any], joined: Callable[[list[Any]], Any]) -> None:
    """Under "skip" the right rows are joined; under "raise" a wrong one is named."""
    wrong = [index for index, value in enumerate(read) if value is Refused]
    expected = joined(read)
    try:
        assert outcome(lambda: call("skip"), OR_NONE) == expected
    except Refused as error:
        assert not expected, str(error)
    if wrong:
        with pytest.raises(Refused) as refused:
            outcome(lambda: call("raise"))
        assert re.match(f"row ({'|'.join(map(str, wrong))}): .*`", str(refused.value)), str(refused.value)
    else:
        try:
            assert outcome(lambda: call("raise"), OR_NONE) == expected
        except Refused as error:
            assert not expected, str(error)


def dataset_of(rows: list[dict[str, Any]]) -> Dataset:
    try:
        return Dataset.from_list(rows)
    except Exception:  # Arrow can't hold them
        reject()


class Rows:
    """What a stream yields. `datasets` hashes it, which some rows don't survive."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __call__(self) -> Any:
        return iter(self.rows)

    def __reduce__(self) -> Any:
        return Rows, ([],)


def stream_of(rows: list[Any]) -> IterableDataset:
    return IterableDataset.from_generator(Rows(rows))


def has_columns(kind: str, columns: Any) -> bool:
    return set(columns).issuperset(ROW_KINDS[named(kind, dict.fromkeys(columns))].columns)


def group_of(value: Any) -> Any:
    return Refused if value is None or value != value or isinstance(value, (list, tuple)) else value


def trees_of(read: list[Any], keys: list[Any], is_stream: bool) -> list[Any]:
    pairs = [(key, of_row) for key, of_row in zip(keys, read, strict=True) if Refused not in (key, of_row)]
    if not is_stream:
        order = list(dict.fromkeys(key for key, _ in pairs))
        pairs.sort(key=lambda pair: order.index(pair[0]))
    groups = [[b for _, of_row in items for b in of_row] for _, items in groupby(pairs, key=lambda pair: pair[0])]
    return [tree for tree in map(prepared, groups) if tree is not None]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("group_by", [None, "g"])
def test_tables(is_stream, group_by):
    @inputs(16)
    @given(tables())
    def run(table):
        kind, rows = table
        if not is_stream:
            rows = list(dataset_of(rows))
        if not has_columns(kind, rows[0]) or not all(rows[0].keys() >= row.keys() for row in rows):
            return
        keys = [group_of(row["g"]) for row in rows] if group_by else list(range(len(rows)))
        try:
            read = read_rows(kind, rows, lambda row: branches_of(kind, row, TOKENIZER))
        except Unspecified:
            return
        read = [Refused if key is Refused else value for key, value in zip(keys, read, strict=True)]

        def call(on_error):
            dataset = stream_of(rows) if is_stream else Dataset.from_list(rows)
            trees = prepare_trees(dataset, TOKENIZER, group_by=group_by, on_error=on_error)
            return [as_folded(tree) for tree in trees]

        check_all(call, read, lambda read: trees_of(read, keys, is_stream))

    run()


@st.composite
def packings(draw: Any) -> dict[str, Any]:
    return {
        "max_packed_tokens": draw(st.sampled_from([None, 12, 30])),
        "overflow": draw(st.sampled_from(["split", "drop"])),
        "pack_trees": draw(st.booleans()),
        "weighting": draw(st.sampled_from(["tree", "once"])),
        "max_length": draw(st.sampled_from([None, 4])),
        "group_by": draw(st.sampled_from([None, "g"])),
    }


@inputs(3)
@given(st.lists(ROWS["rollouts"], min_size=1, max_size=4), st.lists(packings(), min_size=3, max_size=3, unique_by=str))
def test_caches(rows, options):
    """What one way to prepare left in the cache serves no other: each gives what it gives without a cache."""
    rows = [{**row, "g": index % 2} for index, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        Dataset.from_list(rows).save_to_disk(folder)

        def call(options, dataset):
            try:
                return outcome(lambda: list(prepare_trees(dataset, on_error="skip", **options)), OR_NONE)
            except Refused:
                return Refused

        expected = [call(of_call, Dataset.from_list(rows)) for of_call in options]
        for of_call, trees in [*zip(options, expected, strict=True)] * 2:  # cold, then warm
            assert call(of_call, load_from_disk(folder)) == trees


def prepared_for_diffusion(rows, on_error):
    prepared = prepare_diffusion_rows(stream_of(rows), TOKENIZER, on_error=on_error, cap=("max_length", 1000))
    return [without_padding(row) for row in prepared]


def without_padding(row):
    from hf_prefix_tree.data.supervision import read_sample

    sample = read_sample(row)
    return sample.input_ids.tolist(), sample.weights.tolist()


def prepared_for_eagle3(rows, on_error):
    """The documents of packed rows, each of which has a row of its own."""
    documents = pack_eagle3_dataset(rows, 1000, 0, tokenizer=TOKENIZER, on_error=on_error)
    found = []
    for row in documents:
        start = 0
        for length in row["seq_lens"]:
            real = sum(row["attention_mask"][start : start + length])
            found.append(tuple(row[name][start : start + real] for name in ("input_ids", "loss_mask")))
            start += length
    return found


@pytest.mark.parametrize("prepare", [prepared_for_diffusion, prepared_for_eagle3])
def test_samples(prepare):
    @inputs(40)
    @given(tables(SAMPLED))
    def run(table):
        kind, rows = table
        if not has_columns(kind, rows[0]) or not all(rows[0].keys() >= row.keys() for row in rows):
            return
        if kind == "tokens" and not {"loss_mask", "labels", "completion_mask", "assistant_masks"} & rows[0].keys():
            return
        try:
            read = read_rows(kind, rows, lambda row: samples(kind, row, TOKENIZER))
        except Unspecified:
            return

        def joined(read):
            found = [sample for of_row in read if of_row is not Refused for sample in of_row]
            return [(ids, weights) for ids, weights in found if ids or prepare is prepared_for_diffusion]

        check_all(lambda on_error: prepare(rows, on_error), read, joined)

    run()


@inputs(100)
@given(st.lists(st.one_of(ODD, mutated(ROWS["tokens"])), min_size=1, max_size=2))
def test_lists_of_anything(rows):
    """Rows for EAGLE-3 may come as a list: of what is no row, too."""
    try:
        outcome(lambda: pack_eagle3_dataset(rows, 8, 0))
    except Refused:
        return


@pytest.mark.parametrize("kind", CHATS)
def test_chats_of_any_format(kind, tiny_tokenizer):
    """Right and wrong chats under a template that knows tools and reasoning: branches, scores, or a named error."""

    @inputs(50)
    @given(mutated(CHATS[kind]), st.sampled_from(REASONING_MODES))
    def run(row, reasoning):
        options = RowOptions(kind, tiny_tokenizer, reasoning=reasoning)
        with contextlib.suppress(Refused):
            for branch in outcome(lambda: row_branches(row, options, Counter())):
                assert set(branch.weights) <= {0.0, 1.0}
        if kind in MESSAGE_KINDS:
            for metric in SCORES:
                scored = outcome(lambda metric=metric: _score_row(row, 7, metric, options, "skip"))
                assert scored["score"] >= -1

    run()
