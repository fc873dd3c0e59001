# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # EAGLE-3: train a draft and decode with it
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-prefix-tree/hf_prefix_tree/blob/main/notebooks/eagle3.ipynb)
#
# A draft is one decoder layer that guesses the next tokens of a large target model; the target checks several guesses in one
# forward. The target still determines the text, but needs fewer forwards for it. Here a small target learns an invented
# language, and a draft is trained for it. For a real target, `examples/eagle3_train.py` takes a model name and a dataset.

# %%
# On Colab this installs the package from the repository's archive, which also has the demo's data. Elsewhere both are in
# the folder above this one.
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlretrieve

repository = Path("..")
if "google.colab" in sys.modules:
    repository = Path("hf_prefix_tree-main")
    archive = "https://github.com/hf-prefix-tree/hf_prefix_tree/archive/main.zip"
    if not repository.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"hf_prefix_tree[viz] @ {archive}"], check=True)
        urlretrieve(archive, "main.zip")
        shutil.unpack_archive("main.zip")
sys.path.insert(0, str(repository.resolve()))

# %%
import warnings

from datasets.utils.logging import disable_progress_bar

warnings.filterwarnings("ignore", category=FutureWarning)  # from libraries; they would fill the page
disable_progress_bar()

# %%
import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_prefix_tree import DataCollatorForEagle3, Eagle3Config, Eagle3DraftConfig, Eagle3DraftModel, Eagle3Trainer
from hf_prefix_tree.eagle3.model import speculative_generate

torch.set_num_threads(1)  # the tensors are tiny
VOCABULARY = 48

# %% [markdown]
# ## A language and a target
#
# A fixed rule derives the next token from the last two. One token in ten is random instead.


# %%
def sentences(count, length, seed):
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randint(0, VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(99))
    ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    for position in range(2, length):
        follows = torch.rand(count, generator=generator) < 0.9
        by_rule = rule[ids[:, position - 1], ids[:, position - 2] % 4]
        ids[:, position] = torch.where(follows, by_rule, ids[:, position])
    return ids


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=0,
)
target = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
for step in range(120):
    ids = sentences(32, 16, seed=step)
    loss = target(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss of the target: {loss:.2f}")

# %% [markdown]
# ## Training the draft
#
# The draft reads the hidden states of three target layers. Its vocabulary holds only the most frequent tokens of the target's.
# Training unrolls the draft for four steps on its own hidden states, as decoding does. The documents are packed into longer
# sequences. `tau` is the expected number of tokens per forward of the target.

# %%
draft = Eagle3DraftModel(Eagle3DraftConfig.from_target(config, aux_layer_ids=[0, 1, 2], draft_vocab_size=40))
draft.init_from_target(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
trainer = Eagle3Trainer(
    model=draft,
    target_model=target,
    args=Eagle3Config(
        "eagle3-draft",
        learning_rate=3e-3,
        per_device_train_batch_size=4,
        packed_sequence_size=128,
        max_steps=80,
        logging_steps=4,
        ttt_steps=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    ),
    data_collator=DataCollatorForEagle3(0, length=128),
    train_dataset=[{"input_ids": row, "loss_mask": [1] * 24} for row in sentences(640, 24, seed=2000).tolist()],
)


def acceptance():
    """Tokens per round over a few held-out prompts; checks that the text is the target's."""
    rounds, tokens = 0, 0
    for prompt in sentences(6, 4, seed=1000).tolist():
        drafted = speculative_generate(trainer.target, draft.eval(), prompt, 24, num_draft_tokens=4)
        plain = speculative_generate(trainer.target, draft, prompt, 24, num_draft_tokens=0)
        assert drafted.tokens == plain.tokens
        rounds, tokens = rounds + len(drafted.accepted), tokens + len(drafted.accepted) + sum(drafted.accepted)
    return tokens / rounds


before = acceptance()
trainer.train()
after = acceptance()

# %% [markdown]
# ## Tokens per forward of the target

# %%
history = [entry for entry in trainer.state.log_history if "tau" in entry]
figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
axes.plot(
    [entry["step"] for entry in history], [entry["tau"] for entry in history], label="expected, on training data (tau)"
)
axes.axhline(before, color="gray", linestyle=":", label=f"measured before training: {before:.2f}")
axes.axhline(after, color="black", linestyle="--", label=f"measured after training: {after:.2f}")
axes.set(xlabel="training step", ylabel="tokens per round of the target", ylim=(0.9, 5))
axes.set_title("A draft of one layer triples the tokens per round" if after > 3 else "Tokens per round")
axes.legend(frameon=False)
plt.show()
print(f"{before:.2f} tokens per round before training, {after:.2f} after; the text equals that of greedy decoding.")
assert after > before + 1
