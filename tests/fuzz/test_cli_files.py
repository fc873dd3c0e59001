"""Files for the command line, right and torn: the reference's counts, or one line that names the file or option."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from hf_prefix_tree import cli
from hf_prefix_tree.report.gain import load_rows
from tests.fuzz.inputs import ROWS, Refused, inputs, mutated
from tests.fuzz.reference import branches_of, prepared
from tests.support.byte_tokenizer import byte_tokenizer

KINDS = ("tokens", "branches", "rollouts", "nodes")
NAMES = st.sampled_from(["a", "b", "", "\x1b[31mred", "two\nlines", "\x07", "é", 1, None, "\u202egnp", "\x9b2J"])
PIECES = st.sampled_from(
    [
        *(b"\xff", b"\x00", b'"', b"{", b"}", b"\n", b"\r", b"\xef\xbb\xbf", b"\\ud83d", b"null", b"1e999", b","),
        *(b"123456789012345678901234567890", b"NaN", b"-", b"", b"\x1b[2J"),
    ]
)
DEEP = st.builds(lambda: Deep(b"[" * 5000))  # drawn, and not shown


class Deep(bytes):
    def __repr__(self) -> str:
        return "Deep()"


@pytest.fixture(scope="module", autouse=True)
def cache_in_a_folder_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@st.composite
def contents(draw: Any) -> bytes:
    """JSON Lines of one kind, some rows of which are changed, and then some bytes."""
    row = ROWS[draw(st.sampled_from(KINDS))]
    rows = draw(st.lists(st.one_of(row, mutated(row)), min_size=1, max_size=3))
    with_group = [{**row, "group": draw(NAMES)} for row in rows] if draw(st.booleans()) else rows
    try:
        content = "\n".join(json.dumps(row, default=str) for row in with_group).encode()
    except (TypeError, ValueError, RecursionError):  # no JSON
        reject()
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(PIECES | DEEP) + content[at + draw(st.integers(0, 3)) :]
    return content


def run(*arguments: Any) -> tuple[int, str, str]:
    """Exit code and output of the command."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["hf-prefix-tree", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
    return exit_info.value.code or 0, out.getvalue(), err.getvalue()


def check_failure(code: int, out: str, err: str, name: str) -> None:
    assert code == 2 and not out, (code, out)
    assert err.startswith("hf-prefix-tree: ") and err.count("\n") == 1 and name in err, err
    assert_harmless(err)


def assert_harmless(text: str) -> None:
    """Nothing that a terminal obeys."""
    assert all(letter.isprintable() or letter in "\n" for letter in text), ascii(text)


def totals_of(rows: list[dict[str, Any]], group_by: str | None) -> dict[str, int]:
    """Trees, branches and their tokens of a file. Raises `Refused` for a file with a wrong row."""
    kinds = [kind for kind in KINDS if set(rows[0]) >= COLUMNS[kind]]
    if len(kinds) != 1:
        raise Refused
    groups: dict[Any, list[Any]] = {}
    for index, row in enumerate(rows):
        if group_by and row[group_by] is None:
            raise Refused
        groups.setdefault(row[group_by] if group_by else index, []).extend(branches_of(kinds[0], row, None))
    trees = [tree for tree in map(prepared, groups.values()) if tree is not None]
    if not trees:
        raise Refused
    return totals_of_trees(trees)


def totals_of_trees(trees: list[Any]) -> dict[str, int]:
    return {
        "trees": len(trees),
        "branches": sum(number for _, number, _ in trees),
        "branch_tokens": sum(len(ids) for _, _, of_tree in trees for ids in of_tree),
        "tree_tokens": sum(len(tokens) for tokens, _, _ in trees),
        "supervised_tokens": sum(bool(weight) for tokens, _, _ in trees for weight, _ in tokens.values()),
    }


COLUMNS = {
    "tokens": {"input_ids"},
    "branches": {"branches"},
    "rollouts": {"prompt_ids", "completions"},
    "nodes": {"parents", "nodes"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def test_files(folder):
    @inputs(20)
    @given(contents(), st.booleans(), st.sampled_from([".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".parquet"]))
    def check_one(content: bytes, as_json: bool, suffix: str) -> None:
        path = folder / f"rows{suffix}"
        path.write_bytes(content)
        group_by = "group" if b'"group"' in content else None
        try:
            rows = list(load_rows(path))
            expected = totals_of(rows, group_by if rows and group_by in rows[0] else None)
        except (Refused, ValueError):
            expected = None
        code, out, err = run("gain", path, "--group-by", group_by or "none", *["--json"] * as_json)
        if code:
            check_failure(code, out, err, path.name)
            assert expected is None or (group_by and group_by not in rows[0]), err
            return
        assert_harmless(out)
        assert expected is not None, out
        if as_json:
            total = json.loads(out)["total"]
            assert {name: total[name] for name in expected} == expected

    check_one()


def write_json(path, rows):
    path.write_text(json.dumps(rows))


def write_lines(path, rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


WRITERS = {
    "json": write_json,
    "jsonl": write_lines,
    "jsonl.gz": write_lines,
    "csv": lambda path, rows: datasets.Dataset.from_list(rows).to_csv(path),
    "parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_files_of_every_format(folder, suffix):
    """The file has the totals of the rows that were written; a file of text, those of its messages."""
    kinds = ["conversation"] if suffix == "csv" else KINDS
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "bytes")

    @inputs(3)
    @given(st.data(), st.sampled_from(kinds))
    def check_one(data: Any, kind: str) -> None:
        rows = data.draw(st.lists(ROWS[kind], min_size=1, max_size=3))
        groups = [data.draw(st.sampled_from("ab")) for _ in rows]
        names = set().union(*rows)  # a file of a table has every column in each row
        table = [{**dict.fromkeys(names), **row, "group": group} for row, group in zip(rows, groups, strict=True)]
        if suffix == "csv":  # which holds no lists
            table = [{**row, "messages": json.dumps(row["messages"])} for row in table]
        try:
            WRITERS[suffix](folder / f"right.{suffix}", table)
        except pyarrow.ArrowException:  # types that no table mixes
            reject()
        by_group: dict[Any, list[Any]] = {}
        try:
            for row, group in zip(rows, groups, strict=True):
                by_group.setdefault(group, []).extend(branches_of(kind, row, tokenizer))
        except Refused:  # no token that attends
            reject()
        trees = [tree for tree in map(prepared, by_group.values()) if tree is not None]
        options = ["--tokenizer", folder / "bytes", "--group-by", "group", "--json"]
        code, out, err = run("gain", folder / f"right.{suffix}", *options)
        if trees:
            assert code == 0, err
            total, expected = json.loads(out)["total"], totals_of_trees(trees)
            assert {name: total[name] for name in expected} == expected
        else:
            check_failure(code, out, err, f"right.{suffix}")

    check_one()


TOOLS = st.one_of(
    DEEP,
    st.sampled_from(["[]", "{}", "[1]", "{", '{"a": []}', '{"a": 1}', '"x"', "1", "\ud83d", "", "[null]"]),
    st.text(max_size=5),
).map(lambda content: content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))


def test_files_of_tools(folder):
    from examples.demo.dialogues import dialogue_texts, generate_dialogues
    from examples.demo.tokenizer import train_tokenizer

    rows = generate_dialogues(num_groups=1, trials=1, seed=0)
    train_tokenizer(dialogue_texts(rows)).save_pretrained(folder / "tokenizer")
    data, tools = folder / "talk.jsonl", folder / "tools.json"
    data.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )

    @inputs(8)
    @given(TOOLS)
    def check_one(content: bytes) -> None:
        tools.write_bytes(content)
        code, out, err = run("gain", data, "--tokenizer", folder / "tokenizer", "--tools", tools)
        if code:
            check_failure(code, out, err, "tools")
        else:
            assert content.strip() == b"[]" or json.loads(content)

    check_one()


@pytest.mark.parametrize("option", ["--max-length", "--max-packed-tokens", "--reasoning", "--group-by"])
def test_options(folder, option):
    path = folder / "few.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1, 2], "completions": [[3], [4, 5]]}))

    @inputs(6)
    @given(st.sampled_from(["0", "-1", "3.9", "1", "2", "99", "x", "", "9" * 30, "\x1b[2J", "None", "per_turn"]))
    def check_one(value: str) -> None:
        code, out, err = run("gain", path, option, value)
        assert code in (0, 2)
        if code:
            name = option.removeprefix("--")
            assert not out and any(each in err for each in (option, name.replace("-", "_"))), err
            assert_harmless(err)

    check_one()
