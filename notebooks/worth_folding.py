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
# # Is my data worth folding?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-prefix-tree/hf_prefix_tree/blob/main/notebooks/worth_folding.ipynb)
#
# Folding pays where sequences share long prefixes. This notebook counts the shared tokens of four kinds of data, and predicts the
# speed-up for a model. It needs no GPU and no model weights. On the command line, `hf-prefix-tree gain`
# does the same for a file.

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
import numpy as np
from datasets import Dataset
from transformers import AutoConfig

from examples.demo.dialogues import dialogue_texts, generate_dialogues
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import Branch, PrefixTree, caterpillar, fold, prepare_trees
from hf_prefix_tree.report.gain import estimate

rng = np.random.default_rng(0)
VOCABULARY = 1000


def rollouts(prompt, completion, number):
    """One prompt and its completions, of random tokens."""
    ids = rng.integers(VOCABULARY, size=prompt)
    completions = [rng.integers(VOCABULARY, size=completion) for _ in range(number)]
    weights = np.concatenate([np.zeros(prompt), np.ones(completion)])
    return fold([Branch(np.concatenate([ids, tokens]), weights) for tokens in completions])


# %% [markdown]
# ## Four kinds of data
#
# - **Agent dialogues**: every turn as it was sampled, several trials of a task in one tree.
# - **Group rollouts**: a prompt of 1,000 tokens with 16 completions of 300.
# - **Stripped reasoning**: 20 turns on one trunk, each turn's reasoning a leaf of its own.
# - **Long answers**: 4 answers of 3,000 tokens to a prompt of 100. They share little.

# %%
rows = generate_dialogues(num_groups=6, trials=4)
tokenizer = train_tokenizer(dialogue_texts(rows))
dialogues = prepare_trees(Dataset.from_list(rows, on_mixed_types="use_json"), tokenizer, group_by="group")
kinds = {
    "agent dialogues": [PrefixTree.from_dict(row) for row in dialogues],
    "group rollouts": [rollouts(1000, 300, 16) for _ in range(4)],
    "stripped reasoning": [caterpillar(num_turns=20, seed=seed) for seed in range(4)],
    "long answers": [rollouts(100, 3000, 4) for _ in range(4)],
}

# %% [markdown]
# ## Savings
#
# Linear layers save by the token ratio, attention by the pair ratio. The estimate combines both for a model, here one of the
# shape of Qwen3-0.6B.

# %%
config = AutoConfig.for_model(
    "qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
print(f"{'':20}{'branches':>9}{'tokens':>11}{'folded':>10}{'tokens':>9}{'pairs':>8}{'speed-up':>10}")
speedups = {}
for name, trees in kinds.items():
    stats = [tree.stats() for tree in trees]
    branch_tokens, tree_tokens = sum(s.branch_tokens for s in stats), sum(s.tree_tokens for s in stats)
    pairs = sum(s.branch_pairs for s in stats) / sum(s.tree_pairs for s in stats)
    predicted = estimate(trees, config)
    speedups[name] = predicted.speedup
    print(
        f"{name:20}{sum(s.branches for s in stats):9,}{branch_tokens:11,}{tree_tokens:10,}"
        f"{branch_tokens / tree_tokens:8.1f}x{pairs:7.1f}x{predicted.speedup:9.1f}x"
    )
print()
for name, trees in kinds.items():
    print(f"{name}: {estimate(trees, config).verdict()}")
assert speedups["agent dialogues"] > 3 and speedups["long answers"] < 1.2

# %% [markdown]
# ## The token ratio
#
# For group rollouts the ratio depends on the share of the prompt and on the number of completions. With more and more
# completions it approaches the length of a whole branch divided by the length of a completion.

# %%
import matplotlib.pyplot as plt

numbers = [1, 2, 4, 8, 16, 32, 64]
figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
for prompt, completion in ((4000, 250), (1000, 250), (1000, 1000), (250, 1000)):
    ratios = [(prompt + completion) * n / (prompt + completion * n) for n in numbers]
    axes.plot(numbers, ratios, marker="o", markersize=4, label=f"prompt {prompt:,}, completion {completion:,}")
axes.set(xlabel="completions of a prompt", ylabel="token ratio", xscale="log", yscale="log")
axes.set_xticks(numbers, [str(n) for n in numbers])
axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
axes.minorticks_off()
axes.legend(frameon=False, fontsize=9)
axes.set_title("Longer prompts share more")
plt.show()
