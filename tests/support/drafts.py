"""Tiny targets and drafts, random rows, and the plain transcription of the draft's formulas."""

import copy
import math

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3Config

from hf_prefix_tree import DataCollatorForEagle3, Eagle3DraftConfig, Eagle3DraftModel, pack_eagle3_dataset

VOCAB, DRAFT_VOCAB, AUX = 61, 24, [0, 1, 2]

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGETS = {
    "llama": LlamaConfig(**_SMALL, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "qwen3": Qwen3Config(**_SMALL),
    "gpt_oss": GptOssConfig(
        **_SMALL,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}


def make_target(name="llama", dtype=torch.float64, seed=0, amplify=3.0):
    torch.manual_seed(seed)
    config = copy.deepcopy(TARGETS[name])
    config._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(amplify)
    return model


def make_draft(dtype=torch.float64, seed=0, draft_vocab_size=DRAFT_VOCAB, target="llama", **overrides):
    torch.manual_seed(seed)
    config = Eagle3DraftConfig.from_target(
        TARGETS[target], draft_vocab_size=draft_vocab_size, aux_layer_ids=AUX, **overrides
    )
    draft = Eagle3DraftModel(config).to(dtype)
    if draft_vocab_size is not None:
        draft.set_draft_vocabulary(torch.randperm(VOCAB)[:draft_vocab_size].sort().values)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return draft


def random_documents(seed, count=5, longest=9, shortest=1):
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(3, VOCAB, size=length).tolist(),
            "loss_mask": (rng.random(length) < 0.7).astype(int).tolist(),
        }
        for length in rng.integers(shortest, longest, size=count).tolist()
    ]


def collated(documents, size=None):
    rows = documents if size is None else pack_eagle3_dataset(documents, size, 0)
    return DataCollatorForEagle3(pad_token_id=0)(rows)


def random_states(batch, draft, seed=0):
    """What a target would say, drawn per token from its document: the same packed or padded."""
    batch_size, length = batch["input_ids"].shape
    config = draft.config
    states = {
        "aux_hidden_states": torch.zeros(batch_size, length, 3 * config.target_hidden_size, dtype=draft.dtype),
        "target_logits": torch.zeros(batch_size, length, config.draft_vocab_size, dtype=draft.dtype),
        "target_ids": torch.zeros(batch_size, length, dtype=torch.int64),
    }
    for row, at, ids in tokens_of(batch):
        for slot in range(len(ids)):
            generator = torch.Generator().manual_seed(hash((seed, slot, *ids)) % 2**31)
            for name in ("aux_hidden_states", "target_logits"):
                value = torch.randn(states[name].shape[-1], generator=generator, dtype=torch.float64)
                states[name][row, at + slot] = 2 * value
            states["target_ids"][row, at + slot] = torch.randint(0, VOCAB, (1,), generator=generator)
            if slot % 2:  # often inside of the draft vocabulary, and its first choice there
                best = states["target_logits"][row, at + slot].argmax()
                states["target_ids"][row, at + slot] = draft.draft_ids[best]
    return states


def tokens_of(batch):
    """Row, first slot and token ids of every document of a batch."""
    for row in range(len(batch["input_ids"])):
        at = 0
        for length in batch["seq_lens"][row].tolist():
            real = int(batch["attention_mask"][row, at : at + length].sum())
            if real:
                yield row, at, batch["input_ids"][row, at : at + real].tolist()
            at += length


# ---- the formulas, slot by slot ----


def _norm(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean() + eps)


def _rotate(x, position, draft):
    """RoPE of one head. The angles are float32, as in the models: their cosines are read off the model's own table."""
    half, theta = len(x) // 2, draft.config.rope_parameters["rope_theta"]
    table = draft.rotary_emb(x[None], torch.tensor([[position]]))
    cos, sin = (value[0, 0, :half].double() for value in table)
    angles = position / theta ** (torch.arange(half).double() / half)
    assert (cos - angles.cos()).abs().max() < 1e-5 and (sin - angles.sin()).abs().max() < 1e-5
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


def document_steps(draft, ids, aux, steps):
    """Logits `[slot][step]` of one document, by itself. The token after the last one is taken to be 0."""
    c, layer = draft.config, draft.midlayer
    attention = layer.self_attn
    heads, groups = c.num_attention_heads, c.num_attention_heads // c.num_key_value_heads
    padded = [*ids, *[0] * (steps + 1)]
    hidden = [draft.fc.weight @ aux[t] for t in range(len(ids))]
    keys, values = [], []  # [step][slot][kv head]
    logits = [[] for _ in ids]
    for k in range(steps):
        queries, own_keys, own_values = [], [], []
        for t in range(len(ids)):
            embedding = draft.embed_tokens.weight[padded[t + 1 + k]]
            x = torch.cat(
                [
                    _norm(embedding, layer.input_layernorm.weight, c.rms_norm_eps),
                    _norm(hidden[t], layer.hidden_norm.weight, c.rms_norm_eps),
                ]
            )
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, key, v = ((p.weight @ x).view(-1, c.head_dim) for p in projections)
            queries.append([_rotate(h, t + k, draft) for h in q])
            own_keys.append([_rotate(h, t + k, draft) for h in key])
            own_values.append(v)
        keys.append(own_keys)
        values.append(own_values)
        for t in range(len(ids)):
            seen = [(0, j) for j in range(t + 1)] + [(i, t) for i in range(1, k + 1)]
            outputs = []
            for h in range(heads):
                scores = torch.stack(
                    [queries[t][h] @ keys[i][j][h // groups] / math.sqrt(c.head_dim) for i, j in seen]
                )
                weights = torch.softmax(scores, dim=0)
                outputs.append(sum(w * values[i][j][h // groups] for w, (i, j) in zip(weights, seen, strict=True)))
            state = hidden[t] + layer.self_attn.o_proj.weight @ torch.cat(outputs)
            x = _norm(state, layer.post_attention_layernorm.weight, c.rms_norm_eps)
            gate = layer.mlp.gate_proj.weight @ x
            hidden[t] = state + layer.mlp.down_proj.weight @ (
                gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ x)
            )
            logits[t].append(draft.lm_head.weight @ _norm(hidden[t], draft.norm.weight, c.rms_norm_eps))
    return logits


def agree_often(draft, batch, states, steps):
    """Makes the target's choices those of the draft at one of its steps, so that there are hits; but for some that are
    outside of the draft vocabulary."""
    outside = (set(range(VOCAB)) - set(draft.draft_ids.tolist())) or {0}
    with torch.no_grad():
        for row, at, ids in tokens_of(batch):
            logits = document_steps(draft, ids, states["aux_hidden_states"][row, at : at + len(ids)], steps)
            for target in range(1, len(ids)):
                step = (1, 0, 1, None)[target % 4]
                if step is None:
                    states["target_ids"][row, at + target] = min(outside)
                elif target - 1 - step >= 0:
                    choice = int(logits[target - 1 - step][step].argmax())
                    states["target_ids"][row, at + target] = draft.draft_ids[choice]


def transcription(draft, batch, states, steps, decay=0.8):
    """Loss, and per step: valid, supervised, correct, hits."""
    draft_ids = draft.draft_ids.tolist()
    losses, counts = [[] for _ in range(steps)], np.zeros((4, steps), dtype=int)
    for row, at, ids in tokens_of(batch):
        mask = batch["loss_mask"][row, at : at + len(ids)].tolist()
        logits = document_steps(draft, ids, states["aux_hidden_states"][row, at : at + len(ids)], steps)
        for t in range(len(ids)):
            on_track = True
            for k in range(steps):
                if not k < len(ids) - 1 - t:  # doc_remaining
                    break
                target = at + t + 1 + k
                wanted = int(states["target_ids"][row, target])
                match = draft_ids[int(logits[t][k].argmax())] == wanted
                on_track = on_track and match
                if not mask[t + 1 + k]:
                    continue
                counts[1:, k] += [1, match, on_track]
                if wanted in draft_ids:
                    p = torch.softmax(states["target_logits"][row, target], dim=0)
                    losses[k].append(-(p * torch.log_softmax(logits[t][k], dim=0)).sum())
                    counts[0, k] += 1
    weights = [decay**k for k in range(steps)]
    means = [sum(own) / len(own) if own else 0.0 for own in losses]
    return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights), counts
