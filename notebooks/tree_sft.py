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
# # Tree SFT on agent trajectories
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-prefix-tree/hf_prefix_tree/blob/main/notebooks/tree_sft.ipynb)
#
# An agent's dialogues repeat many tokens: several trials of one task share the system prompt and the tools, and every turn starts
# with all earlier turns. Training sample by sample computes those tokens again and again. Here the samples are folded into
# prefix trees, and each shared token is computed once, with the same loss and the same gradients.
#
# With a GPU this notebook trains Qwen3-0.6B; without one, a small random model, in about a minute.

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
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.demo.dialogues import dialogue_texts, generate_dialogues
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import PrefixTree, TreeSFTConfig, TreeSFTTrainer, prepare_trees

HAS_GPU = torch.cuda.is_available()

# %% [markdown]
# ## Data
#
# Eight dialogues with invented help desks: four tasks, two trials each, with tool calls and reasoning. Your own
# data needs the same columns: `messages`, and a column that says which dataset rows belong together.

# %%
rows = generate_dialogues(num_groups=4, trials=2)
for message in rows[0]["messages"][1:5]:
    print(
        message["role"],
        "|",
        message.get("reasoning_content", ""),
        "|",
        message.get("content") or message["tool_calls"],
    )

# %% [markdown]
# The tokenizer's chat template drops the reasoning of earlier turns, as Qwen3's does. The context in which the model sampled turn
# 3 is therefore not a prefix of the finished dialogue. `prepare_trees` renders every turn as it was sampled, and folds the
# renderings of a task into one tree.

# %%
if HAS_GPU:
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
else:
    tokenizer = train_tokenizer(dialogue_texts(rows))
dataset = Dataset.from_list(rows, on_mixed_types="use_json")
trees = prepare_trees(dataset, tokenizer, group_by="group", weighting="branch")
for row in trees:
    stats = PrefixTree.from_dict(row).stats()
    print(
        f"{stats.branches:3} turns, {stats.branch_tokens:6,} tokens one by one, {stats.tree_tokens:5,} folded: "
        f"{stats.token_ratio:.1f}x tokens, {stats.pair_ratio:.1f}x attention pairs"
    )

# %% [markdown]
# ## Training
#
# `TreeSFTTrainer` is TRL's `SFTTrainer` on trees. With `weighting="branch"` its numbers are those of ordinary training on all
# the turns; the default, `"tree"`, gives every task the same weight.


# %%
def make_model():
    torch.manual_seed(0)
    if HAS_GPU:
        return AutoModelForCausalLM.from_pretrained(
            "Qwen/Qwen3-0.6B", dtype=torch.float32, attn_implementation="prefix_tree"
        ).cuda()
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="prefix_tree")


args = TreeSFTConfig(
    "tree-sft",
    group_by="group",
    weighting="branch",
    max_steps=8,
    learning_rate=1e-4 if HAS_GPU else 3e-3,
    bf16=HAS_GPU,
    gradient_checkpointing=HAS_GPU,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
)
trainer = TreeSFTTrainer(model=make_model(), args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# ## The same numbers, faster
#
# One step of a fresh model, folded and branch by branch, on the same weights.

# %%
from examples.demo.compare import compare_step
from hf_prefix_tree import prepare_model

model = prepare_model(make_model())
tree = PrefixTree.from_dict(trees[0])
if HAS_GPU:
    compare_step(model, [tree])  # compiles the kernels
comparison = compare_step(model, [tree])
stats = tree.stats()
print(f"{'':12}{'branch by branch':>18}{'folded':>12}")
print(f"{'tokens':12}{stats.branch_tokens:18,}{stats.tree_tokens:12,}")
print(f"{'seconds':12}{comparison.branch_seconds:18.2f}{comparison.tree_seconds:12.2f}")
print(f"{'loss':12}{comparison.branch_loss:18.6f}{comparison.tree_loss:12.6f}")
print(f"largest difference of any gradient, relative: {comparison.gradient_difference:.1e}")
assert comparison.loss_difference < 1e-5 and comparison.gradient_difference < (0.05 if HAS_GPU else 1e-4)

# %% [markdown]
# ## The mask
#
# This is the attention mask of the first tree. The large triangle is the longest path. Each small triangle along the diagonal is
# a side branch: it sees the trunk (at the left) and itself, and nothing in between.

# %%
import matplotlib.pyplot as plt

from hf_prefix_tree.report.plot import sampled_mask

figure, axes = plt.subplots(figsize=(5.5, 5.5), layout="constrained")
axes.imshow(
    sampled_mask(tree), cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest", extent=(0, len(tree), len(tree), 0)
)
axes.set(xlabel="key", ylabel="query", title=f"{stats.branches} turns in {stats.tree_tokens:,} tokens")
plt.show()
