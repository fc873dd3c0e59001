# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Every file that the package writes and reads: truncated, with flipped bits, after a kill at each file operation and in
the middle of a write, on a full disk, in a folder without write permission, and with two writers.

A reader gets the right value, or an error of the package that names the file or its folder; nothing else, and it ends.
Most cases run under `slow`; `make test` takes a sample of each.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset, disable_progress_bars, load_from_disk
from tqdm import tqdm

from hf_prefix_tree import TreeSFTTrainer, export_for_serving
from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.trees import write_files
from hf_prefix_tree.eagle3.collator import DataCollatorForEagle3
from hf_prefix_tree.eagle3.export import load_exported
from hf_prefix_tree.eagle3.target import Eagle3Target, precompute_hidden_states
from hf_prefix_tree.eagle3.vocabulary import load_or_build_token_mapping
from hf_prefix_tree.report.plot import plot_trees
from hf_prefix_tree.tree.html import page
from tests.support.drafts import AUX, make_draft, make_target, random_documents
from tests.support.trainer_runs import config, make_model, make_trees, tokenizer, tree_dataset, weights

RIGHT, REFUSED, WRONG, RAW = range(4)  # the outcomes of a reader; the first two are good


class Files(NamedTuple):
    """A kind of files: what writes them, what reads them, and the source that is not theirs."""

    prepare: object  # makes the source in a folder
    write: object
    read: object
    source: str | None = None  # a folder within the folder


def _dataset(folder):
    rng = random.Random(0)
    rows = [
        {"prompt_ids": [rng.randrange(99) for _ in range(6)], "completions": [[i, i + 1, j] for j in range(3)]}
        for i in range(40)
    ]
    Dataset.from_list(rows).save_to_disk(str(folder / "rows"))


def _trees(folder):
    """Folded, split and packed: three results in the cache."""
    return prepare_trees(load_from_disk(str(folder / "rows")), max_packed_tokens=10)[:]


def _vocabulary(folder):
    documents = random_documents(0, count=30)
    loader = torch.utils.data.DataLoader(documents, 4, collate_fn=DataCollatorForEagle3(pad_token_id=0))
    sizes = {"target_vocab_size": 64, "draft_vocab_size": 16}
    return load_or_build_token_mapping(loader, cache_path=folder / "vocabulary.safetensors", **sizes)[0].tolist()


def _write_states(folder):
    precompute_hidden_states(_target(), random_documents(0, count=3), folder / "states")


def _read_states(folder):
    target = Eagle3Target.from_precomputed(folder / "states")
    rows = [
        {**document, "hidden_states": str(folder / "states" / f"train_{index:08d}.safetensors")}
        for index, document in enumerate(random_documents(0, count=3))
    ]
    batch = DataCollatorForEagle3(pad_token_id=0, target_fingerprint=target.fingerprint)(rows)
    return [target.aux_layer_ids, target.config.to_dict(), target.head.tolist(), target.embedding.tolist()] + [
        value.tolist() for value in batch.values()
    ]


def _target(known={}):  # noqa: B006 - made once
    return known.setdefault("target", Eagle3Target(make_target(dtype=torch.float32), AUX))


def _export(folder, seed=0):
    export_for_serving(make_draft(torch.float32, seed=seed), folder / "export", "vllm")


def _exported(folder):
    draft = load_exported(folder / "export")
    return draft.config.to_dict(), {name: tensor.tolist() for name, tensor in draft.state_dict().items()}


def _trainer(folder, **options):
    dataset = tree_dataset(make_trees(2, num_branches=2))
    arguments = config(folder / "run", **options, learning_rate=1e-3)
    return TreeSFTTrainer(make_model(), arguments, train_dataset=dataset, processing_class=tokenizer())


def _train(folder):
    _trainer(folder, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=2).train()


def _resume(folder):
    """A run of as many steps ends with the same weights, whichever checkpoint it resumes from."""
    trainer = _trainer(folder, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    return {name: value.tolist() for name, value in weights(trainer.model).items()}


def _write_report(folder):
    trees = make_trees(3)
    plot_trees(trees, trees[0], folder / "picture.png")
    write_files({folder / "page.html": page("Trees", [], [], [], trees, None).encode()})


def _read_report(folder):
    return [(folder / name).read_bytes() for name in ("page.html", "picture.png")]


KINDS = {
    "trees": Files(_dataset, _trees, _trees, "rows"),
    "vocabulary": Files(None, _vocabulary, _vocabulary),
    "states": Files(None, _write_states, _read_states),
    "export": Files(None, _export, _exported),
    "checkpoint": Files(None, _train, _resume),
    "report": Files(None, _write_report, _read_report),
}


@pytest.fixture(params=KINDS)
def kind(request, caplog):
    caplog.set_level(logging.CRITICAL, "hf_prefix_tree")
    disable_progress_bars()
    tqdm.set_lock(threading.RLock())  # processes share the usual one, and those that are killed would keep it
    return KINDS[request.param]


@pytest.fixture
def folder(kind):
    """A folder with the source of the files; other users may enter it, as they can't enter `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        if kind.prepare is not None:
            kind.prepare(Path(name))
        yield Path(name)


def files_of(folder, kind):
    """The files that the package has written, with their content."""
    ours = (path for path in sorted(folder.rglob("*")) if path.is_file())
    skipped = ("rows/data-", "rows/state.json", "rows/dataset_info.json", "states/rows/")  # written by `datasets`
    skipped += ("run/README.md", "run/checkpoint-2/")  # nothing reads the card; the last checkpoint is damaged alone
    return {path: path.read_bytes() for path in ours if not str(path.relative_to(folder)).startswith(skipped)}


def outcome(kind, folder, expected):
    try:
        return RIGHT if kind.read(folder) == expected else WRONG
    except (ValueError, OSError) as error:
        return REFUSED if is_ours(error, folder) else RAW
    except Exception:
        return RAW


def is_ours(error, folder):
    """Not one of the many that derive from `ValueError`; it names a file. In a save, Transformers' with our note."""
    noted = any(f"The checkpoint {folder}" in note for note in getattr(error, "__notes__", ()))
    return noted or ((type(error) is ValueError or isinstance(error, OSError)) and str(folder) in str(error))


def in_child(function, *, limit=None, dies=False, user=None, kill_at=None, timeout=120):
    """Calls a function in a fork; returns its exit code: 0, 1 for an error of the package, 2 for any other."""
    child = os.fork()
    if child == 0:
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - pytest's are files, too
            if limit is not None:  # of the size of a file: beyond it a write fails, as on a full disk, or kills
                if dies:
                    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            if user is not None:
                os.setresuid(user, user, user)
            if kill_at is not None:
                sys.addaudithook(_killer(kill_at))
            function()
            code = 0
        except BaseException as error:
            code = 1 if is_ours(error, "/") else 2
        os._exit(code)
    for _ in range(timeout * 100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def _killer(number):
    """Ends the process, as a kill would, before the file operation with this number."""
    left = number

    def hook(event, arguments):
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            left -= 1
            if left < 0:
                os._exit(9)

    return hook


def sample(cases, number, is_full):
    return cases if is_full else random.Random(0).sample(cases, min(number, len(cases)))


FULL = pytest.param(True, marks=pytest.mark.slow, id="full")
SIZES = pytest.mark.parametrize("is_full", [pytest.param(False, id="sample"), FULL])


def kinds_but(*names):
    return pytest.mark.parametrize("kind", [name for name in KINDS if name not in names], indirect=True)


@SIZES
@pytest.mark.parametrize("damage", ["truncated", "flipped", "zeroed"])
@kinds_but("report")  # of which the package reads nothing
def test_damaged_files(kind, folder, is_full, damage):
    kind.write(folder)
    expected, originals = kind.read(folder), files_of(folder, kind)
    rng, cases = random.Random(1), []
    for path, content in originals.items():
        step = 1024
        if damage == "flipped":
            cases += [(path, rng.randrange(8 * len(content))) for _ in range(500 // len(originals) + 1)]
        else:
            cases += [(path, size) for size in range(0, len(content), step)]
    found = []
    for path, where in sample(cases, 5, is_full):
        content = bytearray(originals[path])
        if damage == "flipped":
            content[where // 8] ^= 1 << where % 8
        elif damage == "truncated":
            del content[where:]
        else:
            content[where:] = bytes(len(content) - where)
        path.write_bytes(content)
        found.append(outcome(kind, folder, expected))
        assert found[-1] in (RIGHT, REFUSED), (path, where, found[-1])
        for file in files_of(folder, kind).keys() - originals:
            file.unlink()
        for file, whole in originals.items():
            file.write_bytes(whole)
    assert found and (kind.source is None or REFUSED not in found)  # caches are made again


@SIZES
def test_killed_writers(kind, folder, is_full):
    """Before each file operation, and in the middle of a write; the next run gives the right value."""
    whole = folder / "whole"
    whole.mkdir()
    if kind.prepare is not None:
        kind.prepare(whole)
    kind.write(whole)
    expected, largest = kind.read(whole), max(map(len, files_of(whole, kind).values()))
    cases = [{"limit": limit, "dies": True} for limit in range(0, largest, max(1024, largest // 40))]
    cases = [*({"kill_at": number} for number in range(100 if is_full else 3)), *sample(cases, 2, is_full)]
    kills, is_over = 0, False
    for number, case in enumerate(cases):
        if is_over and "kill_at" in case:
            continue
        place = folder / f"run{number}"
        place.mkdir()
        if kind.prepare is not None:
            kind.prepare(place)
        code = in_child(lambda place=place: kind.write(place), **case)
        assert code in (0, 1, 9, -signal.SIGXFSZ), code
        is_over = code == 0  # the writer has fewer operations than that
        kills += code in (9, -signal.SIGXFSZ)
        if kind.write is not kind.read:  # what there is, is right
            assert outcome(kind, place, expected) in (RIGHT, REFUSED), case
        kind.write(place)
        assert outcome(kind, place, expected) == RIGHT, case
    assert kills >= 3


@SIZES
def test_a_full_disk(kind, folder, is_full):
    """A write ends with an error that names the file, and leaves what was there before; the next one is right."""
    kind.write(folder)
    expected, originals = kind.read(folder), files_of(folder, kind)
    largest = max(map(len, originals.values()))
    errors = 0
    for limit in sample(list(range(0, largest, max(1024, largest // 30))), 4, is_full):
        if kind.write not in (_export, _write_report):  # the others keep what is there
            next(iter(originals)).unlink()
        code = in_child(lambda: kind.write(folder), limit=limit)
        assert code in (0, 1), limit
        errors += code == 1
        left = outcome(kind, folder, expected)
        assert left == RIGHT or (left == REFUSED and kind.write is _write_states), limit
        kind.write(folder)
        assert outcome(kind, folder, expected) == RIGHT, limit
    assert errors or kind.write is _vocabulary  # a mapping is right without its file


def test_a_folder_without_write_permission(kind, folder):
    """Files that are there are read; others are refused with an error that names the folder."""
    if os.getuid() == 0 and not os.access(Path(__file__).parent, os.X_OK):
        pytest.skip("another user can't read the package here")
    user = 65534 if os.getuid() == 0 else None
    place = folder / "rows" if kind.prepare is not None else folder
    kind.write(folder)
    kind.read(folder)  # imports what another user may not read
    for path in files_of(folder, kind):
        path.unlink()
    place.chmod(0o555)
    try:
        expected = (0,) if kind.write is _vocabulary else (1,)  # a mapping is right without its file
        assert in_child(lambda: kind.write(folder), user=user) in expected
        place.chmod(0o755)
        kind.write(folder)
        for path in files_of(folder, kind):
            path.chmod(0o644)  # of weights in a checkpoint, which safetensors keeps from others
        place.chmod(0o555)
        assert in_child(lambda: kind.read(folder), user=user) == 0
    finally:
        place.chmod(0o755)


@kinds_but("checkpoint")  # Trainer takes a folder of its own for granted
def test_two_writers(kind, folder):
    kind.write(folder)
    expected = kind.read(folder)
    writers = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(3):
                    for path in files_of(folder, kind):
                        if kind.source is not None:  # a cache that serves is not written
                            path.unlink(missing_ok=True)
                    kind.write(folder)
                code = 0
            except (ValueError, OSError) as error:
                code = 2 if is_ours(error, folder) else 1
            finally:
                os._exit(code)
        writers.append(child)
    found = []
    for _ in range(8):
        found.append(outcome(kind, folder, expected))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in writers]
    assert set(found) <= {RIGHT, REFUSED}
    assert 1 not in codes
    assert outcome(kind, folder, expected) == RIGHT
