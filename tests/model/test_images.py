"""Images on trees: what folds, where their tokens stand, and what is refused. Exactness is in tests/conformance."""

import copy
import types

import numpy as np
import pytest
import torch

import hf_prefix_tree.modeling.prepare as model_module
from conformance.build import build_forest, build_model
from hf_prefix_tree import prepare_model, unprepare_model
from hf_prefix_tree.data.images import fold_images
from hf_prefix_tree.modeling import positions
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.positions import image_model, place_images
from hf_prefix_tree.tree.prefix_tree import Branch, fold

IMAGE = 90
GRID = torch.tensor([[1, 4, 4]])  # 4 tokens after merging 2 x 2 patches


def branch(ids, *brightness):
    """Text with an image of four tokens wherever `ids` have an `IMAGE`."""
    tokens = [token for one in ids for token in ([IMAGE] * 4 if one == IMAGE else [one])]
    found = {"input_ids": tokens, "weights": [0.0] + [1.0] * (len(tokens) - 1)}
    if brightness:
        found["pixel_values"] = torch.cat([torch.full((16, 2), value) for value in brightness])
        found["image_grid_thw"] = GRID.repeat(len(brightness), 1)
    return found


@pytest.mark.parametrize("joined", [False, True], ids=["5.24", "5.17"])
def test_features_stand_where_their_images_do(monkeypatch, joined):
    """Of images of other sizes, two of them equal. Some versions join the features of a layer for all images."""
    monkeypatch.setattr(positions, "active_tree", lambda: object())
    grids = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 2, 4]])
    pixels = torch.cat([torch.full((4, 1), 3.0), torch.full((8, 1), 1.0), *(torch.full((n, 1), 3.0) for n in (4, 8))])
    seen = []

    def see(pixel_values, image_grid_thw):
        seen.append(len(image_grid_thw))
        features = pixel_values[::2].split((image_grid_thw.prod(dim=1) // 2).tolist())
        deep = [10 * torch.cat(features)] if joined else [[10 * x for x in features]]
        return types.SimpleNamespace(pooler_output=features, deepstack_features=deep)

    output = positions._see_once(see, pixels, grids)
    (deep,) = output.deepstack_features
    assert seen == [3] and torch.equal(torch.cat(output.pooler_output), pixels[::2])
    assert torch.equal(deep if joined else torch.cat(deep), 10 * pixels[::2])


@pytest.fixture(scope="module")
def qwen():
    return prepare_model(build_model("qwen2_5_vl", variant="images")).eval()


@pytest.fixture(scope="module")
def forest(qwen):
    return build_forest(qwen, variant="images")


def row_of(forest):
    return {**concatenate_trees(forest.trees, pad_token_id=0, pad_to_multiple_of=8), **forest.images}


# ---- folding ----


def test_image_tokens_merge_where_the_images_are_equal():
    tree, images = fold_images(
        [
            branch([5, IMAGE, 6, 7], 0.1),
            branch([5, IMAGE, 6, 8, IMAGE], 0.1, 0.3),
            branch([5, IMAGE, 6, 7], 0.2),  # the same tokens, another image
            branch([5, 9]),
            branch([5, 9, IMAGE], 0.1),  # an image that the row has already
        ],
        image_token_id=IMAGE,
    )
    four = [IMAGE] * 4
    assert tree.input_ids.tolist() == [5, *four, 6, 8, *four, 7, *four, 6, 7, 9, *four]
    assert images["pixel_values"][::16, 0].tolist() == pytest.approx([0.1, 0.3, 0.2, 0.1])
    assert images["pixel_values"].shape == (64, 2) and torch.equal(images["image_grid_thw"], GRID.repeat(4, 1))
    assert tree.weights[6] == pytest.approx(1 / 5) and tree.weights[5] == pytest.approx(2 / 5)
    assert [b.input_ids.tolist() for b in tree.branches()][3] == [5, 9]


def test_the_shape_of_an_image_counts_too():
    wide, tall = branch([5, IMAGE], 0.1), branch([5, IMAGE], 0.1)
    wide["image_grid_thw"] = torch.tensor([[1, 2, 8]])
    tree, images = fold_images([wide, tall], image_token_id=IMAGE)
    assert len(tree) == 9 and len(images["image_grid_thw"]) == 2


def test_folding_text_gives_what_fold_gives():
    tree, images = fold_images([branch([5, 6, 7]), branch([5, 6, 8])], image_token_id=IMAGE)
    expected = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 1, 1])])
    assert images == {} and str(tree.to_dict()) == str(expected.to_dict())


def test_images_that_do_not_fit_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"`branches\[1\]`.*1.*2.*90"):
        fold_images([branch([5, 6]), branch([IMAGE, 5, IMAGE], 0.1)], image_token_id=IMAGE)
    with pytest.raises(ValueError, match=r"2 images.*1 runs"):  # nothing between them
        fold_images([branch([5, IMAGE, IMAGE], 0.1, 0.2)], image_token_id=IMAGE)


# ---- positions ----


def test_positions_are_those_of_the_branches(qwen, forest):
    row, part = row_of(forest), image_model(qwen)
    placed = place_images(qwen, row["prefix_tree"], row["input_ids"], row["image_grid_thw"])
    assert placed["position_ids"].shape == (3, *row["input_ids"].shape)
    assert torch.equal(placed["mm_token_type_ids"], (row["input_ids"] == qwen.config.image_token_id).long())
    start, differ = 0, False
    for tree, inputs in zip(forest.trees, forest.branch_inputs(), strict=True):
        for path, own in zip(tree.paths(), inputs, strict=True):
            got = placed["position_ids"][:, 0, torch.from_numpy(path) + start]
            if "image_grid_thw" in own:
                expected = part.get_rope_index(**{k: x for k, x in own.items() if k != "pixel_values"})[0][:, 0]
                differ |= not torch.equal(expected[0], expected[1])
            else:
                expected = torch.arange(len(path)).expand(3, -1)
            assert torch.equal(got, expected)
        start += len(tree)
    assert differ


def test_images_that_follow_one_another_in_the_row_only(qwen):
    token = qwen.config.image_token_id
    pictures = [torch.full((16, 96), value) for value in (0.1, 0.2)]
    branches = [
        {"input_ids": [5, *[token] * 4], "weights": [0.0] * 5, "pixel_values": picture, "image_grid_thw": GRID}
        for picture in pictures
    ]
    tree, images = fold_images(branches, image_token_id=token)
    assert tree.input_ids.tolist() == [5, *[token] * 8]
    row = concatenate_trees([tree], pad_token_id=0, pad_to_multiple_of=1)
    placed = place_images(qwen, row["prefix_tree"], row["input_ids"], images["image_grid_thw"])
    assert placed["position_ids"][:, 0].tolist() == [
        [0, *[1, 1, 1, 1] * 2],
        [0, *[1, 1, 2, 2] * 2],
        [0, *[1, 2, 1, 2] * 2],
    ]
    one = {"pixel_values": torch.zeros(32, 96), "image_grid_thw": torch.tensor([[1, 4, 8]])}
    with pytest.raises(ValueError, match=r"1 images of 8 tokens.*`input_ids`.*2 images of 8 tokens"):
        qwen(**row, **one)


def test_rows_of_a_batch_have_their_own_images(qwen, forest):
    trees, images, counts = forest.trees[:2], [], []
    for tree in trees:
        runs = (tree.input_ids == qwen.config.image_token_id) & (tree.input_ids[tree.predecessor] != tree.input_ids)
        counts.append(int(runs.sum()))
    grids = forest.images["image_grid_thw"].split(counts)
    patches = forest.images["pixel_values"].split([int(grid.prod(dim=1).sum()) for grid in grids])
    rows = [concatenate_trees([tree], 0) for tree in trees]
    names = ("input_ids", "attention_mask", "prefix_tree")
    together = {name: torch.cat([row[name] for row in rows]) for name in names}
    with torch.no_grad():
        batch = qwen(**together, **forest.images).logits
        for i, row in enumerate(rows):
            images = {"pixel_values": patches[i], "image_grid_thw": grids[i]}
            alone = qwen(**{name: row[name] for name in names}, **images).logits[0]
            real = row["attention_mask"][0].bool()
            torch.testing.assert_close(batch[i][real], alone[real], rtol=0, atol=1e-5)


def test_positions_that_depend_on_what_follows_are_refused(monkeypatch, qwen, forest):
    part, row = image_model(qwen), row_of(forest)
    real = type(part).get_rope_index

    def from_the_end(self, input_ids, mm_token_type_ids, image_grid_thw, **kwargs):
        found, delta = real(self, input_ids, mm_token_type_ids, image_grid_thw, **kwargs)
        return found - input_ids.shape[1], delta

    monkeypatch.setattr(type(part), "get_rope_index", from_the_end)
    with pytest.raises(ValueError, match=r"shared prefix.*positions"):
        qwen(**row)


# ---- the call ----


def test_the_vision_tower_keeps_its_attention():
    stock = build_model("qwen3_vl", variant="images")
    before = {name: part.config._attn_implementation for name, part in _parts(stock)}
    assert set(before.values()) == {"sdpa"}
    model = prepare_model(stock)
    after = {name: part.config._attn_implementation for name, part in _parts(model)}
    assert {name for name, found in after.items() if found == "sdpa"} == {"model.visual"}
    assert {found for name, found in after.items() if name != "model.visual"} == {"prefix_tree"}
    unprepare_model(model)
    assert {name: part.config._attn_implementation for name, part in _parts(model)} == before


def test_loaded_with_the_tree_attention_the_vision_tower_gets_its_default():
    model = build_model("qwen3_vl", variant="images")
    model.set_attn_implementation("prefix_tree")
    prepare_model(model)
    assert model.config.vision_config._attn_implementation == "sdpa"
    unprepare_model(model)
    assert model.config.vision_config._attn_implementation == "prefix_tree"


def _parts(model):
    return [(name, part) for name, part in model.named_modules() if hasattr(part, "config") and hasattr(part, "dtype")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": None}, "`pixel_values`.*`image_grid_thw`"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6]])}, r"1 images of 6 tokens.*5 images"),
        ({"pixel_values_videos": torch.zeros(4, 4)}, r"\['pixel_values_videos'\]"),
    ],
)
def test_calls_that_are_refused(qwen, forest, change, message):
    with pytest.raises(ValueError, match=message):
        qwen(**{**row_of(forest), **change})
    assert qwen(**row_of(forest)).loss > 0


def test_a_fork_or_an_end_inside_an_image_is_refused(qwen):
    token = qwen.config.image_token_id
    whole = Branch([5, 6, *[token] * 4, 7], [0.0] * 7)
    forked = [whole, Branch([5, 6, token, token, 8], [0.0] * 5)]
    cut = [Branch([5, *[token] * 3, 7, token], [0.0] * 6)]
    for branches in (forked, cut):
        row = concatenate_trees([fold(branches)], pad_token_id=0, pad_to_multiple_of=8)
        images = {"pixel_values": torch.zeros(16, 96), "image_grid_thw": GRID}
        if branches is cut:
            images = {"pixel_values": torch.zeros(24, 96), "image_grid_thw": torch.tensor([[1, 4, 2], [1, 4, 2]])}
        with pytest.raises(ValueError, match=r"image \d.*`image_grid_thw`"):
            qwen(**row, **images)
    row = concatenate_trees([fold([whole])], pad_token_id=0, pad_to_multiple_of=8)
    qwen(**row, pixel_values=torch.zeros(16, 96), image_grid_thw=GRID)


def test_a_model_whose_images_do_not_pass_the_self_check_trains_text(monkeypatch):
    def by_depth(model, prefix_tree, input_ids, image_grid_thw):
        return {"mm_token_type_ids": (input_ids == model.config.image_token_id).long()}

    monkeypatch.setattr(model_module, "place_images", by_depth)
    model = prepare_model(build_model("qwen2_5_vl", variant="images"))
    forest = build_forest(model, variant="images")
    with pytest.raises(ValueError, match=r"\['image_grid_thw', 'pixel_values'\]"):
        model(**row_of(forest))
    assert model(**concatenate_trees(forest.trees[-1:], pad_token_id=0)).loss > 0


def test_a_copy_without_images_is_the_stock_model(qwen, forest):
    stock = build_model("qwen2_5_vl", variant="images").eval()
    model = copy.deepcopy(qwen)
    own = forest.branch_inputs()[0][1]
    with torch.no_grad():
        assert torch.equal(model(**own).logits, stock(**own).logits)
    assert np.isfinite(model(**row_of(forest)).loss.item())


def test_the_self_check_leaves_no_positions_behind():
    """Models keep the offset of an image's positions, and would add it when they decode the next text."""
    model = build_model("qwen2_5_vl", variant="images").eval()
    ids = torch.arange(5, 20)[None]

    def decode():
        with torch.no_grad():
            first = model(ids, use_cache=True)
            name = "cache" if "cache" in first else "past_key_values"  # before Transformers 5.24
            return model(torch.tensor([[30]]), **{name: first[name]}, use_cache=True).logits

    expected = decode()
    prepare_model(model)
    assert image_model(model).rope_deltas is None
    assert torch.equal(decode(), expected)
