"""The folded forward against TRL's fused head on the same padded rows: every field, every gradient, every padding."""

import copy
import dataclasses
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from hf_prefix_tree import prepare_model, tree_log_probs, unprepare_model
from hf_prefix_tree.rl import folded_forward as folded
from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes
from tests.support.models import VOCAB, gradients, relative_error
from tests.support.padded_rows import OUTPUTS, Tokens, distinct_prefixes, padded_rows
from tests.support.trainer_runs import make_model

TOLERANCE = 2e-5  # float32, weights times 3


def model_pair(name="qwen3", change=None, **head):
    """A stock model with TRL's fused head, and the same model folded."""
    models = []
    for _ in range(2):
        model = make_model(name, attn_implementation="eager" if name == "gpt_oss" else "sdpa")
        if change is not None:
            change(model)
        add_fused_lm_head(model, **{"outputs": OUTPUTS, **head})
        models.append(model)
    return models[0], fold_shared_prefixes(models[1])


def run(model, rows, head_weights=None, **kwargs):
    """The output, and the gradients of a loss that weighs each log-prob and entropy of each row by itself."""
    model.zero_grad()
    output = model(**rows, fused_lm_head=True, **kwargs)
    if head_weights is None:
        head_weights = torch.rand(2, *output.log_probs.shape, generator=torch.manual_seed(1)) - 0.5
    loss = (output.log_probs * head_weights[0]).sum() + (output.entropy * head_weights[1]).sum()
    if output.aux_loss is not None:
        loss = loss + output.aux_loss
    loss.backward()
    return output, gradients(model)


def assert_same(got, expected, tolerance=TOLERANCE):
    (got, got_gradients), (expected, expected_gradients) = got, expected
    for field in dataclasses.fields(expected):
        value, other = getattr(got, field.name), getattr(expected, field.name)
        if other is None:
            assert value is None
            continue
        assert (value.shape, value.dtype) == (other.shape, other.dtype), field.name
        assert (value.float() - other.float()).abs().max().item() < tolerance, field.name
    assert relative_error(got_gradients, expected_gradients) < tolerance


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_every_field_and_gradient_is_that_of_the_rows(name, side):
    stock, tree = model_pair(name)
    tokens = Tokens(tree)
    for seed in range(3):
        rows = padded_rows(seed, side)
        tokens.total = 0
        got = run(tree, rows)
        assert tokens.total == distinct_prefixes(rows) < rows["attention_mask"].sum()
        assert_same(got, run(stock, rows))


def test_temperature_scale_softcap_and_float32_head_are_those_of_the_fused_head():
    def cap(model):
        model.config.final_logit_softcapping, model.config.logit_scale = 3.0, 1.7

    rows = padded_rows()
    plain = run(model_pair()[1], rows)[0].log_probs
    head = {"temperature": 0.7, "cast_lm_head_to_fp32": True}
    stock, tree = model_pair(change=cap, **head)
    got = run(tree, rows)
    assert_same(got, run(stock, rows))
    assert (got[0].log_probs - plain).abs().max() > 0.1


def test_labels_that_are_shifted_already():
    rows = padded_rows(side="both")
    rows["shift_labels"] = torch.nn.functional.pad(rows.pop("labels")[:, 1:], (0, 1), value=-100)
    stock, tree = model_pair()
    tokens = Tokens(tree)
    got = run(tree, rows)
    assert tokens.total == distinct_prefixes(rows)
    assert got[0].log_probs.shape == rows["input_ids"].shape
    assert_same(got, run(stock, rows))


def test_given_divisor_and_rows_without_mask_or_label():
    rows = padded_rows()
    stock, tree = model_pair()
    assert_same(run(tree, rows, num_items_in_batch=7), run(stock, rows, num_items_in_batch=7))
    whole = {"input_ids": rows["input_ids"][:, :8], "labels": rows["labels"][:, :8]}
    whole["labels"][:, 0] = whole["input_ids"][:, 0]  # predicted from nothing: not scored
    tokens = Tokens(tree)
    assert_same(run(tree, whole), run(stock, whole))
    assert tokens.total < whole["input_ids"].numel()
    silent = {**rows, "labels": torch.full_like(rows["labels"], -100)}
    output, found = run(tree, silent)
    assert output.log_probs.shape == (6, rows["labels"].shape[1] - 1) and not output.log_probs.any()
    assert found and not any(gradient.any() for gradient in found.values())
    empty = {name: torch.cat([x[:1] * 0 - 100 * (name == "labels"), x]) for name, x in rows.items()}
    assert not empty["attention_mask"][0].any()
    assert_same(run(tree, empty), run(stock, empty))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_any_dtype(dtype):
    rows = padded_rows(side="both")
    rows["attention_mask"] = rows["attention_mask"].to(dtype)
    stock, tree = model_pair()
    tokens = Tokens(tree)
    assert_same(run(tree, rows), run(stock, rows))
    assert tokens.total == distinct_prefixes(rows)


def test_router_loss_counts_a_shared_token_once_per_row():
    rows = padded_rows(side="both")
    stock, tree = model_pair("qwen3_moe")
    tokens = Tokens(tree)
    got = run(tree, rows, output_router_logits=True)
    assert tokens.total == distinct_prefixes(rows)
    expected = run(stock, rows, output_router_logits=True)
    assert_same(got, expected)
    # the mean over the tree's tokens is another number
    ids, mask, tree_labels = (x for x in rows.values())
    once = {
        "input_ids": torch.cat([ids[:1], ids[:1]]),
        "attention_mask": torch.cat([mask[:1], mask[:1]]),
        "labels": torch.cat([tree_labels[:1]] * 2),
    }
    assert abs(run(stock, once, output_router_logits=True)[0].aux_loss - expected[0].aux_loss) > 1e-3


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    rows = padded_rows()
    _, tree = model_pair()
    expected = run(tree, rows)
    tree.train()
    tree.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tree.enable_input_require_grads()
    got = run(tree, rows)
    assert_same(got, expected, tolerance=1e-9)


def test_lora_and_the_disabled_adapter():
    rows = padded_rows()

    def adapted(model):
        torch.manual_seed(3)
        peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return peft_model

    stock, tree = (make_model() for _ in range(2))
    for model in (stock, tree):
        add_fused_lm_head(model, outputs=OUTPUTS)
    stock, tree = adapted(stock), fold_shared_prefixes(adapted(tree))
    tokens = Tokens(tree.get_base_model())
    assert_same(run(tree, rows), run(stock, rows))
    with stock.disable_adapter(), tree.disable_adapter(), torch.no_grad():
        reference = tree(**rows, fused_lm_head=True).log_probs
        assert (reference - stock(**rows, fused_lm_head=True).log_probs).abs().max() < TOLERANCE
    assert (reference - tree(**rows, fused_lm_head=True).log_probs).abs().max() > 0.1
    assert tokens.total == 3 * distinct_prefixes(rows)


@pytest.fixture
def process_group():
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_for_data_parallel_training(wrapper, process_group):
    rows = padded_rows(side="both")
    stock, tree = model_pair()
    expected = run(stock, rows)
    tokens = Tokens(tree)
    if wrapper == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(tree)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in tree.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        wrapped = torch.distributed.fsdp.fully_shard(tree, mesh=mesh)
    fold_shared_prefixes(wrapped)  # finds the model inside
    output, found = run(wrapped, rows)
    found = {name.removeprefix("module."): getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}
    assert_same((output, found), expected)
    assert tokens.total == distinct_prefixes(rows)
    log_probs = tree_log_probs(
        wrapped, rows["input_ids"], rows["attention_mask"], completion_mask=rows["labels"] != -100
    )
    assert (log_probs[:, 1:] - expected[0].log_probs).abs().max() < TOLERANCE
    assert tokens.total == 2 * distinct_prefixes(rows)


def test_the_hooks_stay_under_a_head_that_is_added_later_and_a_copy_of_the_model():
    rows = padded_rows()
    late = fold_shared_prefixes(make_model())
    add_fused_lm_head(late, outputs=OUTPUTS)
    tokens = Tokens(late)
    assert_same(run(late, rows), run(model_pair()[0], rows))
    assert tokens.total == distinct_prefixes(rows)
    twin = copy.deepcopy(late)
    add_fused_lm_head(twin, outputs=OUTPUTS)  # the head's forward is bound to the model that was copied
    assert_same(run(twin, rows), run(late, rows), tolerance=1e-9)


def test_other_calls_are_not_touched():
    stock, tree = model_pair()
    ids = padded_rows()["input_ids"][:, :9]
    assert torch.equal(tree(input_ids=ids, labels=ids).loss, stock(input_ids=ids, labels=ids).loss)
    sampled = [model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False) for model in (stock, tree)]
    assert torch.equal(*sampled)


def test_undone_with_the_preparation_and_back_with_it():
    rows = padded_rows()
    stock, tree = model_pair()
    tokens = Tokens(unprepare_model(tree))
    assert_same(run(tree, rows), run(stock, rows), tolerance=1e-6)
    assert tokens.total == rows["input_ids"].numel()
    prepare_model(tree)
    tokens.total = 0
    assert_same(run(tree, rows), run(stock, rows))
    assert tokens.total == distinct_prefixes(rows)


def test_an_error_inside_a_folded_call_leaves_the_model_usable():
    rows = padded_rows()
    stock, tree = model_pair()
    broken = {**rows, "input_ids": torch.where(rows["input_ids"] > 0, rows["input_ids"] + VOCAB, 0)}
    broken["labels"] = torch.where(rows["labels"] > 0, rows["labels"] + VOCAB, -100)
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError)):
            tree(**broken, fused_lm_head=True)
    assert tree._hf_prefix_tree_folded._running == []
    assert_same(run(tree, rows), run(stock, rows))


def unfoldable():
    """By name: what is changed in foldable rows, and words of the reason."""

    def positions(rows):
        rows["position_ids"] = torch.arange(rows["input_ids"].shape[1]).expand_as(rows["input_ids"])

    def hole(rows):
        rows["attention_mask"][0, 4] = 0
        rows["labels"][0, 4:6] = -100

    def from_padding(rows):
        rows["attention_mask"][:, :2] = 0
        rows["labels"][:, :3] = rows["input_ids"][:, :3]

    def foreign(rows):
        row, at = (rows["labels"] != -100).nonzero()[0]
        rows["labels"][row, at] = rows["labels"][row, at] % (VOCAB - 4) + 3

    def nothing_shared(rows):
        rows["input_ids"][:, 0] = torch.arange(3, 9)

    return {
        "positions": (positions, "other inputs than padded rows: ['position_ids']"),
        "hole": (hole, "the attention mask has holes"),
        "from_padding": (from_padding, "a label is at padding or predicted from it"),
        "foreign": (foreign, "a label is not the row's own token"),
        "nothing_shared": (nothing_shared, "too few tokens are shared"),
    }


@pytest.mark.parametrize("name", list(unfoldable()))
def test_falls_through_and_says_so_once(name, caplog):
    change, words = unfoldable()[name]
    rows = padded_rows()
    change(rows)
    stock, tree = model_pair()
    tokens = Tokens(tree)
    with caplog.at_level(logging.WARNING, logger=folded.__name__):
        for _ in range(2):
            assert_same(run(tree, rows), run(stock, rows), tolerance=1e-6)
    assert tokens.total == 2 * rows["input_ids"].numel()
    assert [words in record.getMessage() for record in caplog.records] == [True]


def test_shifted_labels_beyond_the_row_fall_through():
    rows = padded_rows()
    rows["shift_labels"] = torch.nn.functional.pad(rows.pop("labels")[:, 1:], (0, 1), value=7)
    rows["shift_labels"][:, 0] = -100
    stock, tree = model_pair()
    tokens = Tokens(tree)
    assert_same(run(tree, rows), run(stock, rows), tolerance=1e-6)
    assert tokens.total == rows["input_ids"].numel()


def test_dynamic_frequencies_fall_through_where_the_rows_are_too_long():
    def scaled(model):
        parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        model.config.rope_parameters = parameters | {"original_max_position_embeddings": 16}

    tree = fold_shared_prefixes(make_model())
    calls = tree._hf_prefix_tree_folded
    rows = padded_rows()
    assert not isinstance(calls._fold(tree, (), rows), str)
    scaled(tree)
    limited = folded._FoldedCalls(tree, min_reuse=0)
    assert "rotary frequencies" in limited._fold(tree, (), rows)


def test_noise_on_embeddings_falls_through_in_training(caplog):
    from transformers.integrations.neftune import neftune_post_forward_hook

    rows = padded_rows()
    models = model_pair()
    for model in models:
        embeddings = model.train().get_input_embeddings()
        embeddings.neftune_noise_alpha = 5.0
        embeddings.register_forward_hook(neftune_post_forward_hook)
    found = []
    for model in models:
        torch.manual_seed(0)
        found.append(run(model, rows))
    assert_same(found[1], found[0], tolerance=1e-6)
    assert "NEFTune adds noise to each row" in caplog.text
    tokens = Tokens(models[1].eval())
    assert_same(run(models[1], rows), run(models[0].eval(), rows))
    assert tokens.total == distinct_prefixes(rows)


def test_a_graph_of_the_whole_model_holds_no_tree():
    rows = padded_rows()
    stock, tree = model_pair()
    compiled = torch.compile(tree, backend="eager")
    tokens = Tokens(tree)
    with torch.no_grad():
        expected = stock(**rows, fused_lm_head=True).log_probs
        assert (compiled(**rows, fused_lm_head=True).log_probs - expected).abs().max() < TOLERANCE
        assert tokens.total == rows["input_ids"].numel()
        got = tree_log_probs(
            compiled, rows["input_ids"], rows["attention_mask"], completion_mask=rows["labels"] != -100
        )
    assert (got[:, 1:] - expected).abs().max() < TOLERANCE
    assert tokens.total == rows["input_ids"].numel() + distinct_prefixes(rows)


def test_images_and_text_of_one_model_fold():
    """Every field, under TRL's head in float32; float64 is in `test_folded_images.py`."""
    from conformance.build import build_model

    stock, tree = (build_model("qwen2_5_vl", variant="images").float() for _ in range(2))
    for model in (stock, tree):
        add_fused_lm_head(model, outputs=OUTPUTS)
    fold_shared_prefixes(tree, min_reuse=0)
    computed = []
    tree.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    rows = padded_rows(side="left")
    assert_same(run(tree, rows), run(stock, rows))
    image = stock.config.image_token_id
    ids = torch.tensor([[5, *[image] * 4, 6, 7], [5, *[image] * 4, 6, 8]])
    images = {
        "pixel_values": torch.rand(32, 96, generator=torch.manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == image).int(),
    }
    labels = torch.where(ids == image, -100, ids)
    rows_with_images = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **images}
    same = {**rows_with_images, "pixel_values": images["pixel_values"][:16].repeat(2, 1)}
    for batch in (rows_with_images, same):
        assert_same(run(tree, batch), run(stock, batch))
    assert computed == [distinct_prefixes(rows), 2 * 7 - 1, 7 + 1]  # the last two images are equal


def test_absolute_positions_fold_unless_padded_on_the_left(caplog):
    from transformers import GPT2Config, GPT2LMHeadModel

    def make():
        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
        dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, initializer_range=0.3, **sizes, **dropout))
        add_fused_lm_head(model, outputs=OUTPUTS)
        return model

    stock, tree = make(), fold_shared_prefixes(make())
    tokens = Tokens(tree)
    right, left = padded_rows(side="right"), padded_rows(side="left")
    assert_same(run(tree, right), run(stock, right))
    assert tokens.total == distinct_prefixes(right)
    assert_same(run(tree, left), run(stock, left), tolerance=1e-6)
    assert tokens.total == distinct_prefixes(right) + left["input_ids"].numel()
    assert "left of absolute positions" in caplog.text


def test_the_threshold_is_an_option():
    rows = padded_rows()
    _, tree = model_pair()
    tokens = Tokens(tree)
    reuse = rows["attention_mask"].sum().item() / distinct_prefixes(rows)
    for min_reuse, expected in ((reuse + 1e-6, rows["input_ids"].numel()), (reuse - 1e-6, distinct_prefixes(rows))):
        tokens.total = 0
        run(fold_shared_prefixes(tree, min_reuse=min_reuse), rows)
        assert tokens.total == expected
    with pytest.raises(ValueError, match=r"`min_reuse`.*nan"):
        fold_shared_prefixes(tree, min_reuse=float("nan"))


def test_wrong_indices_would_show(monkeypatch):
    """Negative control: results that are handed to the neighbouring token."""
    rows = padded_rows()
    stock, tree = model_pair()
    fold_rows = folded.fold_rows

    def rolled(*args):
        found = fold_rows(*args)
        return dataclasses.replace(found, where=found.where.roll(1))

    monkeypatch.setattr(folded, "fold_rows", rolled)
    with pytest.raises(AssertionError):
        assert_same(run(tree, rows), run(stock, rows))
