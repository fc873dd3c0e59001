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
# # DPO on prefix trees
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-prefix-tree/hf_prefix_tree/blob/main/notebooks/tree_dpo.ipynb)
#
# A preference pair consists of two answers to one prompt. TRL's `DPOTrainer` computes the prompt with each answer, in the policy
# and again in the reference model. `TreeDPOTrainer` computes it once per model and micro-batch, for all pairs of the prompt, and
# logs the same numbers. Here both trainers train the same model on the same pairs.

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
import random
import tempfile

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from trl import DPOConfig, DPOTrainer

from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeDPOTrainer

HAS_GPU = torch.cuda.is_available()

# %% [markdown]
# ## Pairs
#
# Worked sums with right and wrong answers. Every right answer is chosen over every wrong answer to the same question. The pairs
# of one question stand next to each other, so that they are in the same micro-batch.

# %%
draw = random.Random(0)
RULES = (
    "Solve the problem step by step. Write one equation per line, name what it stands for, check each result before you "
    "use it in the next line, and end with a line that begins with 'A:' and holds the number alone, without a unit."
)
pairs = []
for _ in range(8):
    a, b, c = (draw.randint(2, 9) for _ in range(3))
    prompt = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": f"Tom has {a} apples. He picks {b} more and gives {c} away. How many are left?"},
    ]
    first = f"He has {a} + {b} = {a + b} apples at first.\n"
    right = [first + f"{a + b} - {c} = {a + b - c}\nA: {a + b - c}", f"{a} + {b} - {c} = {a + b - c}\nA: {a + b - c}"]
    wrong = [first + f"A: {a + b}", f"He has {a} - {c} = {a - c} apples.\nA: {a - c}"]
    for chosen in right:
        for rejected in wrong:
            answers = {"chosen": chosen, "rejected": rejected}
            pairs.append({"prompt": prompt, **{k: [{"role": "assistant", "content": v}] for k, v in answers.items()}})
dataset = Dataset.from_list(pairs)
print(len(dataset), "pairs of", len(dataset) // 4, "questions")

# %% [markdown]
# ## Two trainers, one run each
#
# Both runs have the same configuration, model and order of batches.

# %%
if HAS_GPU:
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
else:
    texts = [m["content"] for pair in pairs for m in (*pair["prompt"], *pair["chosen"], *pair["rejected"])]
    tokenizer = train_tokenizer(texts)


def make_model():
    torch.manual_seed(0)
    if HAS_GPU:
        return AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.float32)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    return AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes)
    )


def train(trainer_class):
    positions = []  # tokens that the policy and the reference compute
    model, reference = make_model(), make_model()
    for part in (model, reference):
        part.model.layers[0].register_forward_pre_hook(
            lambda module, args: positions.append(args[0].shape[:2].numel())
        )
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            folder,
            per_device_train_batch_size=8,
            train_sampling_strategy="sequential",
            learning_rate=1e-6 if HAS_GPU else 1e-3,
            num_train_epochs=2,
            logging_steps=1,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to="none",
        )
        trainer = trainer_class(
            model=model, ref_model=reference, args=args, train_dataset=dataset, processing_class=tokenizer
        )
        positions.clear()
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], sum(positions)


stock, stock_tokens = train(DPOTrainer)
tree, tree_tokens = train(TreeDPOTrainer)

# %% [markdown]
# ## The same numbers, fewer tokens

# %%
difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(stock, tree, strict=True))
print(
    f"tokens through the two models: {stock_tokens:,} stock, {tree_tokens:,} folded: {stock_tokens / tree_tokens:.1f}x fewer"
)
print(f"largest difference of the loss at any of {len(tree)} steps: {difference:.1e}")
assert difference < 1e-4 and tree_tokens < stock_tokens / 3

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(2, 1))
for name, entries, style in (("DPOTrainer", stock, "o"), ("TreeDPOTrainer", tree, "-")):
    left.plot([e["step"] for e in entries], [e["loss"] for e in entries], style, label=name)
left.set(xlabel="optimizer step", ylabel="loss", title="The losses are equal")
left.legend(frameon=False)
right.bar(["DPOTrainer", "TreeDPOTrainer"], [stock_tokens, tree_tokens], color=["tab:blue", "tab:orange"])
right.set(ylabel="tokens computed", title=f"{stock_tokens / tree_tokens:.1f}x fewer tokens")
plt.show()
