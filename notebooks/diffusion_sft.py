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
# # A diffusion language model, from data to text
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-prefix-tree/hf_prefix_tree/blob/main/notebooks/diffusion_sft.ipynb)
#
# An autoregressive model writes from left to right. A masked diffusion model starts from mask tokens and fills in the most
# certain ones first. This notebook trains a tiny model with block diffusion to turn sentences into the passive voice, and
# then generates with it. `examples/diffusion_sft.py` does the same with a model of your choice.

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
import itertools
import math
import random
from collections import Counter

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config

from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import DiffusionSFTConfig, DiffusionSFTTrainer, diffusion_generate

# %% [markdown]
# ## Data
#
# "Anna calls Ben." becomes "Ben is called by Anna." Training sees most combinations; 64 are held out.

# %%
NAMES = ("Anna", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo")
VERBS = {"calls": "called", "helps": "helped", "thanks": "thanked", "asks": "asked", "visits": "visited"}
rows = [
    {"prompt": f"{subject} {verb} {other}.", "completion": f" {other} is {VERBS[verb]} by {subject}."}
    for subject, verb, other in itertools.product(NAMES, VERBS, NAMES)
    if subject != other
]
random.Random(0).shuffle(rows)
train_rows, held_out = Dataset.from_list(rows[64:]), Dataset.from_list(rows[:64])

tokenizer = train_tokenizer([row["prompt"] + row["completion"] for row in train_rows], vocab_size=384)
tokenizer.add_special_tokens({"mask_token": "<|mask|>"})

# %% [markdown]
# ## Training
#
# In block diffusion the model reads the packed sequence `[x_t | x_0]`: the noisy text followed by the clean text. A noisy block
# of four tokens sees itself and the clean blocks before it. The loss is an upper bound of the negative log-likelihood, so it can
# be compared with the entropy of the tokens, which a model reaches that knows their frequencies and nothing else.

# %%
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
trainer = DiffusionSFTTrainer(
    model=AutoModelForCausalLM.from_config(config),
    args=DiffusionSFTConfig(
        "diffusion-sft",
        objective="block",
        block_size=4,
        learning_rate=5e-3,
        warmup_steps=20,
        max_steps=150,
        per_device_train_batch_size=64,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=train_rows,
    eval_dataset=held_out,
    processing_class=tokenizer,
)
trainer.train()
bound = trainer.evaluate()["eval_nll_bound"]

counts = Counter(token for row in held_out for token in tokenizer(row["completion"])["input_ids"])
total = sum(counts.values())
entropy = -sum(count / total * math.log(count / total) for count in counts.values())
print(f"NLL bound on held-out sentences {bound:.3f}, entropy of their tokens {entropy:.3f} nats per token")
assert bound < entropy / 2

# %%
history = [entry for entry in trainer.state.log_history if "nll_bound" in entry]
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
axes.plot([e["step"] for e in history], [e["nll_bound"] for e in history], label="NLL bound in training")
axes.axhline(entropy, color="gray", linestyle="--", label="entropy of single tokens")
axes.set(xlabel="optimizer step", ylabel="nats per token", title="The model learns more than token frequencies")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Generating
#
# The response starts as mask tokens and is filled block by block, in two steps per block. Each step fills the most certain
# tokens, not the leftmost ones.


# %%
model = trainer.accelerator.unwrap_model(trainer.model)


def write(prompt, steps_per_block):
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=model.device)
    generated = diffusion_generate(
        model,
        ids,
        max_new_tokens=8,
        block_size=4,
        steps_per_block=steps_per_block,
        mask_token_id=tokenizer.mask_token_id,
        objective="block",
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)


right = 0
for number, row in enumerate(held_out):
    written = write(row["prompt"], steps_per_block=2)
    right += written == row["completion"]
    if number < 6:
        print(f"{row['prompt']:22}->{written}")
print(f"{right} of {len(held_out)} held-out sentences are right")
assert right > len(held_out) * 0.8
