"""Export to serving engines, and the validator."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_prefix_tree import export_for_serving
from hf_prefix_tree.eagle3.export import load_exported, validate_export
from tests.support.drafts import AUX, DRAFT_VOCAB, VOCAB, collated, make_draft, random_documents, random_states

LAYER = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "hidden_norm",
    "post_attention_layernorm",
]
OUTSIDE = ["embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"]


def exported(folder, engine, vocab=DRAFT_VOCAB, **kwargs):
    draft = make_draft(torch.float32, draft_vocab_size=vocab)
    export_for_serving(draft, folder, engine, target_name_or_path="org/target", **kwargs)
    return draft, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("vocab", [DRAFT_VOCAB, None])
@pytest.mark.parametrize(
    ("engine", "layer"), [("vllm", "midlayer"), ("sglang", "midlayer"), ("speculators", "layers.0")]
)
def test_names_and_maps(tmp_path, engine, layer, vocab):
    draft, config, tensors = exported(tmp_path, engine, vocab)
    maps = ["d2t", "t2d"] if vocab else []
    assert sorted(tensors) == sorted([*OUTSIDE, *(f"{layer}.{name}.weight" for name in LAYER), *maps])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert config["draft_vocab_size"] == (vocab or VOCAB)
    if vocab:
        ids = draft.draft_ids
        assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
        assert torch.equal(tensors["d2t"] + torch.arange(vocab), ids)
        assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert validate_export(tmp_path) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_portable_config(tmp_path, engine):
    _, config, _ = exported(tmp_path, engine, dtype=torch.bfloat16)
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "target_hidden_size": 32,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX, "use_aux_hidden_state": True},  # outputs
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in AUX],  # inputs
    }
    assert {name: config[name] for name in expected} == expected
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {
        torch.bfloat16,
        torch.int64,
        torch.bool,
    }


def test_the_config_of_speculators(tmp_path):
    _, config, _ = exported(tmp_path, "speculators", num_speculative_tokens=5)
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in AUX]
    assert config["norm_before_residual"] is False and config["target_hidden_size"] is None
    settings = config["speculators_config"]
    assert settings["verifier"]["name_or_path"] == "org/target"
    assert settings["proposal_methods"][0]["speculative_tokens"] == 5
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["rope_theta"]) == ("llama", VOCAB, 5000.0)


@pytest.mark.parametrize("vocab", [DRAFT_VOCAB, None])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_round_trip(tmp_path, engine, vocab):
    draft, _, _ = exported(tmp_path, engine, vocab)
    loaded = load_exported(tmp_path)
    batch = collated(random_documents(0), 16)
    states = random_states(batch, draft)
    assert torch.equal(loaded(**batch, **states, ttt_steps=3).loss, draft(**batch, **states, ttt_steps=3).loss)
    assert torch.equal(loaded.draft_ids, draft.draft_ids)
    keep = ("aux_layer_ids", "rope_parameters", "draft_vocab_size", "vocab_size", "target_hidden_size", "head_dim")
    assert [getattr(loaded.config, name) for name in keep] == [getattr(draft.config, name) for name in keep]
    again = tmp_path / "again"
    export_for_serving(loaded, again, engine, target_name_or_path="org/target")
    assert (again / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    # safetensors writes the entries of the metadata, among them a checksum of the tensors, in any order
    headers = [sorted((folder / "model.safetensors").read_bytes()[:800]) for folder in (tmp_path, again)]
    assert headers[0] == headers[1]


def test_scaled_rope_is_written_in_both_forms(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 9000.0}
    export_for_serving(make_draft(torch.float32, rope_parameters=rope), tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 9000.0 and config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert load_exported(tmp_path).config.rope_parameters == rope


def test_what_can_not_be_exported(tmp_path):
    draft = make_draft(torch.float32)
    with pytest.raises(ValueError, match="`engine`"):
        export_for_serving(draft, tmp_path, "tgi")
    with pytest.raises(ValueError, match="`target_name_or_path` is needed"):
        export_for_serving(draft, tmp_path, "speculators")
    draft.config.aux_layer_ids = None
    with pytest.raises(ValueError, match="`aux_layer_ids`"):
        export_for_serving(draft, tmp_path, "vllm")
    assert not list(tmp_path.iterdir())


# ---- the validator ----


def change_config(folder, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "`architectures` is ['LlamaForCausalLM']"),
        ({"model_type": "eagle3_draft"}, "`model_type` is 'eagle3_draft'"),
        ({"eagle_config": "gone"}, "SGLang would guess"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "would not fuse the hidden states"),
        ({"eagle_aux_hidden_state_layer_ids": "gone"}, "vLLM would guess"),
        ({"eagle_aux_hidden_state_layer_ids": AUX}, "must be one more each"),
        ({"draft_vocab_size": "gone"}, "`draft_vocab_size` is missing"),
        ({"num_hidden_layers": 2}, "`num_hidden_layers` is 2"),
        ({"tie_word_embeddings": True}, "use the embedding as the head"),
        ({"rope_theta": "gone"}, "`rope_theta` is missing"),
        ({"rope_theta": 1.0}, "`rope_theta` and `rope_parameters` differ"),
        ({"attention_bias": True}, "`attention_bias=True`"),
        ({"hidden_size": "gone"}, "`hidden_size` is missing"),
        ({"draft_vocab_size": VOCAB + 1}, "describes no draft: `draft_vocab_size` must be between"),
        ({"num_attention_heads": 3}, "describes no draft"),
        ({"target_hidden_size": "wide"}, "describes no draft"),
        ({"head_dim": 16}, "`midlayer.self_attn.q_proj.weight` has the shape [32, 64]; the config says [64, 64]"),
    ],
)
def test_a_wrong_config_is_reported(tmp_path, changes, message):
    exported(tmp_path, "vllm")
    change_config(tmp_path, **changes)
    assert any(message in problem for problem in validate_export(tmp_path)), validate_export(tmp_path)
    with pytest.raises(ValueError, match="holds no whole draft"):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "mlp"}, "`speculators_model_type` is 'mlp'"),
        ({"speculators_config": "gone"}, "verifier.name_or_path"),
        ({"eagle_aux_hidden_state_layer_ids": "gone"}, "vLLM would guess"),
        ({"norm_before_residual": True}, "`norm_before_residual` is True"),
        ({"transformer_layer_config": "gone"}, "`transformer_layer_config` is missing"),
    ],
)
def test_a_wrong_config_of_speculators_is_reported(tmp_path, changes, message):
    exported(tmp_path, "speculators")
    change_config(tmp_path, **changes)
    assert any(message in problem for problem in validate_export(tmp_path)), validate_export(tmp_path)


def _rename(tensors):
    tensors["model.norm.weight"] = tensors.pop("norm.weight")


def _reorder(tensors):
    tensors["d2t"] = tensors["d2t"].clone()
    first, second = tensors["d2t"][:2].tolist()
    tensors["d2t"][:2] = torch.tensor([second + 1, first - 1])


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (_rename, ["`model.norm.weight` is no part of the format", "`norm.weight` is missing"]),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), ["`midlayer.hidden_norm.weight` is missing"]),
        (lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}), ["q_proj.bias` is no part"]),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 32)}), ["`fc.weight` has the shape [32, 32]"]),
        (lambda t: t.pop("t2d"), ["`t2d` is missing"]),
        (lambda t: [t.pop("t2d"), t.pop("d2t")], ["`d2t` is missing", "`t2d` is missing"]),
        (lambda t: t.update({"d2t": t["d2t"].int()}), ["`d2t` leads to wrong target ids: the ids are torch.int32"]),
        (lambda t: t.update({"t2d": t["t2d"].long()}), ["`t2d` (torch.int64)"]),
        (lambda t: t.update({"d2t": t["d2t"] + VOCAB}), ["`d2t` leads to wrong target ids: the ids range from"]),
        (_reorder, ["`d2t` leads to wrong target ids: the ids are not ascending"]),
        (lambda t: t.update({"t2d": ~t["t2d"]}), ["and `d2t` name different tokens"]),
    ],
)
def test_wrong_tensors_are_reported(tmp_path, change, messages):
    exported(tmp_path, "vllm")
    change_tensors(tmp_path, change)
    problems = validate_export(tmp_path)
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "`config.json` can't be read"),
        ("config.json", b"[]", "`config.json` holds no object"),
        ("model.safetensors", b"\x00" * 4, "`model.safetensors` can't be read"),
        ("model.safetensors", None, "`model.safetensors` can't be read"),
    ],
)
def test_unreadable_files_are_reported(tmp_path, name, content, message):
    exported(tmp_path, "vllm")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9] if content is None else content)
    (problem,) = validate_export(tmp_path)
    assert message in problem


def test_files_of_two_exports_are_reported(tmp_path):
    for name, kwargs in (("a", {}), ("b", {"dtype": torch.bfloat16})):
        exported(tmp_path / name, "vllm", **kwargs)
        assert validate_export(tmp_path / name) == []
    for name in ("config.json", "model.safetensors"):
        shutil.copytree(tmp_path / "a", tmp_path / "c", dirs_exist_ok=True)
        shutil.copy(tmp_path / "b" / name, tmp_path / "c" / name)
        (problem,) = validate_export(tmp_path / "c")
        assert "`config.json` is not the one that was written with `model.safetensors`" in problem


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("value", [None, [], [1], {}, {"a": {}}, "x", True, -1, 0, 1.5, 10**30, float("nan"), [[[]]]])
def test_a_hostile_config_is_a_problem_and_no_exception(tmp_path, engine, value):
    _, config, tensors = exported(tmp_path, engine)
    save_file(tensors, tmp_path / "model.safetensors")  # as another tool would, without checksums
    assert validate_export(tmp_path) == []
    layer = config.get("transformer_layer_config", {})
    for name in (*config, *layer):
        changed = {**config, name: value}
        if name in layer:
            changed = {**config, "transformer_layer_config": {**layer, name: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        if not validate_export(tmp_path):
            load_exported(tmp_path)  # raises nothing
    for content in (b"\xff\xfe", b"[" * 100_000, b"null", b'{"hidden_size":'):
        (tmp_path / "config.json").write_bytes(content)
        (problem,) = validate_export(tmp_path)
        assert "`config.json`" in problem


def test_an_empty_folder_and_a_training_checkpoint_are_reported(tmp_path):
    assert validate_export(tmp_path) == ["There is no `config.json`."]
    make_draft(torch.float32).save_pretrained(tmp_path)
    problems = " ".join(validate_export(tmp_path))
    for part in ("`architectures` is ['Eagle3DraftModel']", "`model_type` is 'eagle3_draft'", "SGLang would guess"):
        assert part in problems
