"""Architectures of different kinds, run anew and held against `docs/models.md`; and that the harness can fail."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_prefix_tree.modeling.attention.interface as interface_module
import hf_prefix_tree.modeling.context as context_module
import hf_prefix_tree.modeling.prepare as model_module
from conformance.build import VARIANTS
from conformance.check import CONTROL, EXACT, FAILED, NOT_BUILT, REFUSED, TOLERANCE, Result, check_architecture
from conformance.configs import CHUNK, WINDOW, tiny_config
from conformance.forest import conformance_forest
from conformance.runner import run_all
from conformance.table import markdown_table, read_statuses
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask
from hf_prefix_tree.modeling.batch import Supervised, decode_weights

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
FROM_BEST = (EXACT, REFUSED, NOT_BUILT, FAILED)
SUBSET = (
    "llama",
    "gemma3_text",  # sliding window
    "gemma2",  # softcap
    "gpt_oss",  # sinks, experts
    "llama4_text",  # chunks, queries tempered by position
    "deepseek_v3",  # MLA
    "deepseek_v32",  # keys picked by an indexer
    "nemotron",  # drops the keyword arguments of the call
    "bloom",  # ALiBi, attention of its own
    "roberta",  # positions that count from the padding
    "bart",  # a table of positions, a loss of its own
    "qwen3_5_text",  # delta rule and convolution on the tree
    "bamba",  # Mamba2
    "minimax",  # refused by its layer types
    "gpt_neo",  # refused by a mask of its own
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are too small to share
    yield
    torch.set_num_threads(threads)


VARIANTS_SUBSET = (
    ("qwen2_5_vl", "images"),
    ("qwen3_vl", "images"),  # features of the vision tower added in several layers
    ("glm_ocr", "images"),
    ("ernie4_5_vl_moe", "images"),  # experts by kind of token
    ("gpt_oss", "lora"),
    ("qwen3_moe", "lora"),
    ("gemma3_text", "dora"),
    ("nemotron", "dora"),
)


@pytest.mark.parametrize(("model_type", "variant"), VARIANTS_SUBSET)
def test_images_and_adapters_are_exact(model_type, variant):
    result = check_architecture(model_type, variant=variant)
    assert result.status == EXACT, result
    if f"Transformers {transformers.__version__}," in PAGE:
        assert result.compared == "float64"
    assert result.error < TOLERANCE[result.compared] and result.control > CONTROL
    assert result.checkpointed == "bit-identical"


def test_4_bit_weights_under_lora_are_exact():
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    for model_type in VARIANTS["nf4"]:
        result = check_architecture(model_type, variant="nf4")
        assert result.status == EXACT, result
        assert result.error < 2e-5 and result.control > CONTROL and result.checkpointed == "bit-identical"


@pytest.mark.parametrize("model_type", [name for name in SUBSET if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_no_architecture_is_worse_than_documented(model_type):
    result = check_architecture(model_type)
    documented = read_statuses(PAGE)[model_type]
    assert FROM_BEST.index(result.status) <= FROM_BEST.index(documented), result
    if result.status == EXACT:
        assert result.error < TOLERANCE[result.compared.removesuffix(" (eval)")]
        if f"Transformers {transformers.__version__}," in PAGE:
            assert result.compared == "float64"
        assert result.control > CONTROL
        assert result.checkpointed == "bit-identical" or result.checkpointed.startswith("to ")


def test_the_page_has_every_architecture_and_no_failure():
    statuses = read_statuses(PAGE)
    assert FAILED not in statuses.values()
    assert sum(status == EXACT for status in statuses.values()) >= 120
    statuses = {name: status for name, status in statuses.items() if " " not in name}
    if f"Transformers {transformers.__version__}," in PAGE:
        assert list(sorted(statuses)) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_forest_outgrows_windows_and_chunks():
    trees = conformance_forest(97)
    lengths = [len(branch.input_ids) for tree in trees for branch in tree.branches()]
    assert max(lengths) > 2 * max(WINDOW, CHUNK) and min(lengths) == 2 and len(lengths) == 10
    node_lengths = [length for tree in trees for length in tree.node_lengths]
    assert node_lengths.count(1) == 2
    assert tiny_config("gemma3_text").sliding_window == WINDOW
    assert tiny_config("llama4_text").attention_chunk_size == CHUNK


# ---- negative controls: with self-verification out of the way, the harness itself must see what is broken ----


def index_window(prefix_tree, window=None, chunk=None):
    index = torch.arange(prefix_tree.shape[-1])
    mask = dense_mask(prefix_tree, chunk=chunk)
    return mask if window is None else mask & (index[:, None] - index[None, :] < window)


def no_chunks(prefix_tree, window=None, chunk=None):
    return dense_mask(prefix_tree, window=window)


def positions_by_depth(model, prefix_tree, input_ids, image_grid_thw):
    return {"mm_token_type_ids": (input_ids == model.config.image_token_id).long()}


def plain_causal(prefix_tree, window=None, chunk=None):
    length = prefix_tree.shape[-1]
    return torch.ones((prefix_tree.shape[0], 1, length, length), dtype=torch.bool).tril()


def index_gather(prefix_tree, labels, loss_weights=None):
    where = (labels[0] != IGNORE_INDEX).nonzero().squeeze(-1)
    return Supervised(where - 1, labels[:, where], decode_weights(loss_weights)[:, where])


dense = interface_module.attend_dense


def no_sinks(*args, sinks, **kwargs):
    return dense(*args, **kwargs)


def no_softcap(*args, softcap, **kwargs):
    return dense(*args, **kwargs)


CONTROLS = [
    ("gemma3_text", context_module, "dense_mask", index_window),
    ("llama4_text", context_module, "dense_mask", no_chunks),
    ("llama", context_module, "dense_mask", plain_causal),
    ("gpt_oss", interface_module, "attend_dense", no_sinks),
    ("gemma2", interface_module, "attend_dense", no_softcap),
    ("llama", model_module, "gather_supervised", index_gather),
    ("qwen2_5_vl", model_module, "place_images", positions_by_depth),
    ("qwen3_vl", model_module, "place_images", positions_by_depth),
]


@pytest.mark.parametrize(("model_type", "module", "attribute", "broken"), CONTROLS)
def test_what_is_broken_is_reported(monkeypatch, model_type, module, attribute, broken):
    variant = "images" if attribute == "place_images" else "text"
    monkeypatch.setattr(module, attribute, broken)
    assert check_architecture(model_type, variant=variant).status in (REFUSED, FAILED)
    monkeypatch.setattr(model_module, "verify_tree_forward", lambda *args: None)
    monkeypatch.setattr(model_module, "verify_images", lambda *args: None)
    result = check_architecture(model_type, variant=variant)
    assert result.status == FAILED, result
    assert "differ by" in result.reason and result.error > 1e-4


def test_a_crash_is_the_result_of_one_architecture_only(monkeypatch):
    results = list(run_all([("llama", "text"), ("gemma2", "text")], time_limit=0.001))
    assert [(result.model_type, result.status) for result in results] == [("llama", FAILED), ("gemma2", FAILED)]
    assert all("took more than" in result.reason for result in results)
    assert read_statuses(markdown_table(results)) == {"llama": FAILED, "gemma2": FAILED}


def test_the_page_has_the_text_that_the_harness_writes():
    results = []
    for name, status in read_statuses(PAGE).items():
        model_type, _, variant = name.partition(" ")
        results.append(Result(model_type, variant=variant or "text", status=status))
    expected, text = markdown_table(results), PAGE
    assert _prose(text) == _prose(expected)


def _prose(page):
    return [line for line in page.splitlines()[3:] if not line.startswith("|")]
