"""Rows with images in folded calls against stock calls of the same rows: log-probs, loss, gradients, in float64."""

import copy
import logging

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

import hf_prefix_tree.modeling.prepare as prepare_module
from conformance.build import build_model
from conformance.double import keep_double
from conformance.vision import VISION_MODELS
from hf_prefix_tree.data import images as images_module
from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes, ids_to_fold
from hf_prefix_tree.rl.folded_rows import SortedRows, fold_rows, images_of_rows
from hf_prefix_tree.rl.log_probs import _fused_head
from tests.support.image_rows import RowsWithImages, SeenImages
from tests.support.models import gradients

QUICK = ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe")  # the others are slow tests
MODELS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in sorted(VISION_MODELS)
]


def rows_of(config):
    """Two images of one grid after equal text, one image after different text, two images in a row, and none."""
    make = RowsWithImages(config)
    start, question = make.text(4), make.text(5)
    prompts = {
        "first": make.prompt(start, 0, question),
        "other pixels": make.prompt(start, 1, question),
        "other text": make.prompt(make.text(2), 0, question),
        "two": make.prompt(start, 0, make.text(1), 2, question),
        "none": make.prompt(start, make.text(3)),
    }
    names = ["first", "first", "other pixels", "other text", "first", "none", "two", "other pixels"]
    return make.batch([(prompts[name], make.text(2 + i % 4)) for i, name in enumerate(names)])


def pair(name):
    """A stock model and a folded one in float64, and the images that their vision towers see in a call."""
    stock = build_model(name, variant="images")
    tree = copy.deepcopy(stock)
    seen = [SeenImages(stock), SeenImages(tree)]
    fold_shared_prefixes(tree)
    return stock.double(), tree.double(), seen


def run(model, rows):
    """Log-probs, the loss that the model returns, and the gradients of a loss with a weight for each log-prob."""
    model.zero_grad()
    rows = {**rows, "pixel_values": rows["pixel_values"].double()}
    with keep_double(), _fused_head(model, temperature=1.0):
        log_probs = model(**rows, fused_lm_head=True).log_probs
        weights = torch.rand(log_probs.shape, generator=torch.manual_seed(1), dtype=torch.float64) - 0.3
        loss = (log_probs * weights).sum()
        loss.backward()
    return log_probs.detach(), loss.item(), gradients(model)


def error(got, expected):
    (log_probs, loss, found), (other_log_probs, other_loss, other) = got, expected
    assert log_probs.dtype == torch.float64 and found.keys() == other.keys()
    largest = max(gradient.abs().max() for gradient in other.values())
    apart = [((found[name] - other[name]).abs().max() / largest).item() for name in other]
    return max((log_probs - other_log_probs).abs().max().item(), abs(loss - other_loss), *apart)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_loss_and_gradients_are_those_of_the_rows(name):
    stock, tree, (stock_seen, tree_seen) = pair(name)
    rows = rows_of(stock.config)
    tree_seen.calls.clear()
    got, expected = run(tree, rows), run(stock, rows)
    assert error(got, expected) < 1e-12
    assert tree_seen.calls == [3] and stock_seen.calls == [8]  # of 8 images, 3 are different
    part = "visual" if any("visual" in key for key in expected[2]) else "vision_tower"
    tower = [gradient for key, gradient in got[2].items() if part in key]
    assert len(tower) > 10 and sum(gradient.abs().max() > 1e-4 for gradient in tower) > 10
    assert got[0].min() < -1 and got[0].std() > 0.1


def test_equal_ids_with_other_pixels_share_nothing_after_the_image(monkeypatch):
    """The control: as if all images of one grid were equal, which changes the numbers, and no token id."""
    stock, tree, _ = pair("qwen2_5_vl")
    rows = rows_of(stock.config)
    ids, mask = rows["input_ids"], rows["attention_mask"].bool()
    folded = fold_rows(
        ids.numpy(), mask.numpy(), mask.numpy() & False, 1, images_of_rows(tree, ids.numpy(), mask.numpy(), rows)
    )
    by_ids = {tuple(row[keep][:end].tolist()) for row, keep in zip(ids, mask, strict=True) for end in range(1, 99)}
    assert folded.batch["input_ids"].shape[1] > len(by_ids)
    assert len(folded.batch["image_grid_thw"]) == 4  # 0 after two texts, 1, 2
    expected = run(stock, rows)
    assert error(run(tree, rows), expected) < 1e-12

    def by_grid(patches, grids):
        keys = [tuple(grid) for grid in grids.tolist()]
        return [keys.index(key) for key in keys]

    monkeypatch.setattr(images_module, "first_equal", by_grid)
    assert error(run(tree, rows), expected) > 1e-2


def test_forwards_are_planned_by_the_images(folded):
    """Which completions go together, and how many tokens that computes, is counted with the images told apart."""
    rows = rows_of(folded.config)
    ids, mask = rows["input_ids"], rows["attention_mask"]
    call = folded._hf_prefix_tree_folded._fold(folded, (), {**rows, "fused_lm_head": True})
    told_apart = ids_to_fold(folded, ids, mask, rows)
    assert torch.equal(told_apart[ids != folded.config.image_token_id], ids[ids != folded.config.image_token_id])
    assert SortedRows.of(told_apart, mask).tokens(1).tolist() == [call.rows.batch["input_ids"].shape[1]]
    assert SortedRows.of(ids, mask).tokens(1).item() < call.rows.batch["input_ids"].shape[1]
    assert ids_to_fold(folded, ids, mask, {}) is ids
    assert ids_to_fold(folded, ids, mask, {**rows, "image_grid_thw": None}) is None


def test_one_pixel_makes_another_image():
    make = RowsWithImages(build_model("qwen2_5_vl", variant="images").config)
    image = make.pixels[0]
    near, swapped = image.clone(), image.flip(0)  # the same sum
    near[-1, -1] += 1e-6
    grids = make.grids[[0, 0, 0, 0, 2]]
    wide = make.pixels[0]  # the same pixels in another grid
    assert images_module.first_equal([image, near, image.clone(), swapped, wide], grids) == [0, 1, 0, 3, 4]


def test_a_prompt_of_1300_tokens_with_8_completions_of_200_folds_four_times():
    model = build_model("qwen2_5_vl", variant="images")
    make, seen = RowsWithImages(model.config), SeenImages(model)
    make.grids[0] = torch.tensor([1, 40, 120])  # 1,200 tokens
    make.pixels[0] = torch.rand(4800, make.pixels[0].shape[1], generator=torch.manual_seed(0))
    prompt = make.prompt(make.text(50), 0, make.text(50))
    rows = make.batch([(prompt, [3 + i, *make.text(199)]) for i in range(8)])
    computed = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    add_fused_lm_head(fold_shared_prefixes(model))
    seen.calls.clear()
    computed.clear()
    with torch.no_grad():
        model(**rows, fused_lm_head=True)
    assert (computed, seen.calls) == ([2900], [1])
    assert rows["attention_mask"].sum().item() / computed[0] == pytest.approx(4.1379, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mm_token_type_ids": None}, "images come without one of"),
        ({"pixel_values": None}, "images come without one of"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6]] * 8)}, "image tokens are not those of the images"),
        ({"pixel_values_videos": torch.zeros(4, 4)}, "the model gets other inputs than padded rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_images_that_do_not_fit_the_rows_are_not_folded(folded, change, words):
    rows = {**rows_of(folded.config), "fused_lm_head": True}
    assert not isinstance(folded._hf_prefix_tree_folded._fold(folded, (), rows), str)
    assert folded._hf_prefix_tree_folded._fold(folded, (), {**rows, **change}).startswith(words)


def test_token_types_beside_the_image_tokens_are_not_folded(folded):
    rows = {**rows_of(folded.config), "fused_lm_head": True}
    rows["mm_token_type_ids"][rows["labels"] != -100] = 1
    assert "image tokens are not" in folded._hf_prefix_tree_folded._fold(folded, (), rows)


def test_a_batch_of_text_needs_no_images(folded):
    rows = rows_of(folded.config)
    text = rows["mm_token_type_ids"].sum(dim=1) == 0
    rows = {
        name: rows[name][text].repeat(2, 1) for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
    }
    call = folded._hf_prefix_tree_folded._fold(folded, (), {**rows, "fused_lm_head": True})
    assert "pixel_values" not in call.rows.batch and call.rows.reuse == 2
    none = {"pixel_values": torch.zeros(0, 96), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    assert not isinstance(
        folded._hf_prefix_tree_folded._fold(folded, (), {**rows, **none, "fused_lm_head": True}), str
    )


@pytest.fixture(scope="module")
def folded():
    return fold_shared_prefixes(build_model("qwen2_5_vl", variant="images"), min_reuse=0)


def test_a_model_whose_images_are_not_served_falls_through(monkeypatch, caplog):
    """One warning, and TRL's numbers."""
    monkeypatch.setattr(prepare_module, "place_images", lambda *args: {})
    stock = build_model("qwen2_5_vl", variant="images")
    tree = copy.deepcopy(stock)
    seen = SeenImages(tree)
    for model in (stock, fold_shared_prefixes(tree)):
        add_fused_lm_head(model)
    rows = rows_of(stock.config)
    seen.calls.clear()
    with caplog.at_level(logging.WARNING):
        outputs = [model(**rows, fused_lm_head=True).log_probs for model in (stock, tree, tree)]
    assert torch.equal(outputs[0], outputs[1]) and seen.calls == [8, 8]
    assert caplog.text.count("Falling back") == 1
    assert "the model's images cannot be placed in a tree: self-verification" in caplog.text
    assert images_of_rows(build_model("gemma3"), None, None, rows).endswith("no multimodal rotary positions")
