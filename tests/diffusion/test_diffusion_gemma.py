"""DiffusionGemma under `DiffusionSFTTrainer`: against its own forward, canvas by canvas, and its own `generate`."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from conformance.double import keep_double
from hf_prefix_tree.diffusion.collator import supervised_tokens
from hf_prefix_tree.diffusion.model import prepare_diffusion_model, unprepare_diffusion_model
from hf_prefix_tree.diffusion.noise import corrupt, noise_seeds, window_starts
from tests.diffusion.test_shared_prefixes import options_of, run
from tests.support.diffusion_runs import SIZE, collated, logs_of, rows_of_ids, trainer_of
from tests.support.engine_runs import needs_transformers
from tests.support.models import VOCAB, gradients

pytestmark = needs_transformers("5.24", "in older ones the cache of DiffusionGemma has another name")


def draw(count=4):
    """Samples that are longer than the window, each with a prompt."""
    rows = rows_of_ids(3 * count, longest=22)
    keep = [i for i, row in enumerate(rows) if row["loss_mask"][0] == 0 and len(row["input_ids"]) > 9]
    assert len(keep) >= count
    return rows.select(keep[:count])


def noise_of(batch):
    supervised = supervised_tokens(batch)
    seeds = noise_seeds(batch["sample_index"], 42, 0)
    blocks = {"block_size": SIZE, "block_start": window_starts(supervised)}
    return corrupt("random", batch["input_ids"], supervised, seeds=seeds, vocab_size=VOCAB, **blocks)


def model_of(dtype=torch.float64, scale=4.0):
    from examples.diffusion_gemma import tiny_model  # not before it is known that Transformers has it

    model = tiny_model(VOCAB, canvas_length=SIZE).to(dtype)
    model.config.text_config._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)  # errors hide behind small weights
    return model


def fed(model):
    from examples.diffusion_gemma import feed_canvases

    feed_canvases(model)


def own_loss(model, batch, noise):
    """Transformers' forward as `generate` calls it: the tokens before a canvas, and the canvas."""
    total = 0.0
    starts, lengths = window_starts(supervised_tokens(batch)), batch["attention_mask"].sum(dim=1)
    for row, (first, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for start in range(first, length, SIZE):
            block = slice(start, start + SIZE)
            clean, canvas = batch["input_ids"][row : row + 1, :start], noise.input_ids[row : row + 1, block]
            logits = model(input_ids=clean, decoder_input_ids=canvas).logits[0]
            total = total + cross_entropy(logits, batch["input_ids"][row, block], reduction="sum")
    return total / supervised_tokens(batch).sum()


def losses(spoil=None):
    """Of one call, and of one call per canvas; and the gradients of both."""
    batch, found = collated(draw()), []
    noise = noise_of(batch)
    for is_one in (True, False):
        model = model_of()
        if is_one:
            fed(prepare_diffusion_model(model))
            if spoil is not None:
                spoil(model)
        with keep_double():
            if is_one:
                args = options_of("block", group_by=None)
                loss = run(model, batch, args, supervised_tokens(batch).sum(), noise=noise)
            else:
                loss = own_loss(model, batch, noise)
            loss.backward()
        found.append((loss.detach(), gradients(model)))
    (loss, got), (expected, reference) = found
    assert got.keys() == reference.keys() and len(got) > 20
    largest = max(((got[key] - value).abs() / (1 + value.abs())).max() for key, value in reference.items())
    return (loss - expected).abs(), largest


def test_one_call_equals_one_per_canvas():
    loss, gradient = losses()
    assert loss < 1e-10 and gradient < 1e-10


def test_a_window_that_moves_within_the_canvas_fails():
    def spoil(model):
        model.config.text_config.sliding_window += 1

    loss, _ = losses(spoil)
    assert loss > 1e-5


def trained(folder, rows, model):
    """The losses of twenty steps on all rows. Weights have their usual size: large ones learn slowly."""
    options = {"objective": "block", "corruption": "random", "per_device_train_batch_size": len(rows)}
    options |= {"optim": "adamw_torch", "learning_rate": 0.02, "max_steps": 20}
    trainer = trainer_of(folder, rows, model=model, **options)
    trainer.train()
    return [entry["loss"] for entry in logs_of(trainer)]


def learned(batch, losses):
    """How far the last losses, each of other noise, are below that of knowing only how often each token occurs."""
    _, counts = batch["input_ids"][supervised_tokens(batch)].unique(return_counts=True)
    return torch.distributions.Categorical(counts.double()).entropy().item() - sum(losses[-4:]) / 4


def test_it_trains_and_generates(tmp_path):
    rows, model = draw(), model_of(torch.float32, scale=1.0)
    batch = collated(rows)
    with torch.no_grad():
        expected = own_loss(model, batch, noise_of(batch))
    fed(model)
    losses = trained(tmp_path, rows, model)
    assert losses[0] == pytest.approx(expected.item(), rel=1e-4)
    assert learned(batch, losses) > 0.5
    prompt = torch.tensor([rows[0]["input_ids"][:5]])
    with pytest.raises(ValueError, match="prepare"):
        model.generate(prompt, max_new_tokens=8)
    unprepare_diffusion_model(model)
    stock = model_of(torch.float32)
    stock.load_state_dict(model.state_dict())
    stock.generation_config = model.generation_config  # Trainer has told it the tokenizer's end token
    generated = []
    for one in (model, stock):
        torch.manual_seed(0)
        generated.append(one.eval().generate(prompt, max_new_tokens=8).sequences)
    assert generated[0].shape[1] > prompt.shape[1] and torch.equal(*generated)  # an end token may come early


def test_shuffled_labels_teach_no_more_than_which_tokens_occur(tmp_path):
    rows, model, generator = draw(), model_of(torch.float32, scale=1.0), torch.Generator().manual_seed(0)

    def shuffle(module, args, kwargs):
        order = torch.randperm(kwargs["labels"].shape[1], generator=generator)
        return args, {**kwargs, **{name: kwargs[name][:, order] for name in ("labels", "shift_labels")}}

    fed(model)
    model.register_forward_pre_hook(shuffle, with_kwargs=True)
    assert -0.5 < learned(collated(rows), trained(tmp_path, rows, model)) < 0.1


def test_a_call_without_canvases_is_refused(tmp_path):
    model = prepare_diffusion_model(model_of(torch.float32))
    with pytest.raises(ValueError, match=r"`decoder_input_ids`.*`examples/diffusion_gemma.py`"):
        model(input_ids=torch.tensor([[5, 6, 7]]))
    trainer = trainer_of(tmp_path, draw(), objective="hybrid", corruption="random", model=model)
    fed(model)
    with pytest.raises(ValueError, match="`objective='block'`"):
        trainer.train()
