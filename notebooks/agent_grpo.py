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
# # GRPO for an agent with a tool
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-prefix-tree/hf_prefix_tree/blob/main/notebooks/agent_grpo.ipynb)
#
# An agent calls a tool, reads the result and answers. Each of these turns has a context of its own: the chat template over the
# messages so far. `TreeGRPOTrainer` with `rollout_rows="as_sampled"` samples each turn after that context, as a serving loop does, and trains
# it on these tokens. Contexts repeat each other, and so do the rollouts of a task; each shared token is computed once. Here a tiny model
# learns on a CPU to use a tool, in a world without network. `examples/agent_grpo.py` does the same with a model of your choice.

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
import os
import warnings

from datasets.utils.logging import disable_progress_bar

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # environments are experimental in TRL
warnings.filterwarnings("ignore", category=FutureWarning)  # from libraries; they would fill the page
disable_progress_bar()

# %%
import random
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from transformers import AutoModelForCausalLM, PrinterCallback

import examples.demo
from hf_prefix_tree import TreeGRPOConfig, TreeGRPOTrainer

sys.path.insert(0, str(Path(examples.demo.__file__).parents[1]))  # scripts import each other as they do when they run
import agent_grpo

# %% [markdown]
# ## The world
#
# A box holds one of eight colours, drawn anew for each task. Only the tool `look` tells it. The reward is 1 if the last message names
# the colour, so a policy that guesses gets 1/8. TRL makes one environment per rollout; its methods are the tools.

# %%
train_tasks, held_out = agent_grpo.tasks(256, first_seed=0), agent_grpo.tasks(64, first_seed=10_000)
world = agent_grpo.World()
world.reset(**train_tasks[0])
print(train_tasks[0]["prompt"][0]["content"], "| look tells:", world.look(train_tasks[0]["box"]))

# %% [markdown]
# ## A model that has seen the format
#
# A tiny model is trained on demonstrations first: it looks in about half of the tasks, and guesses in the others. These are turns of a
# demonstration. In the second one the model copies the tool's result.

# %%
folder = tempfile.TemporaryDirectory()
tokenizer = agent_grpo.tiny_model(folder.name, seed=0)
model = AutoModelForCausalLM.from_pretrained(folder.name)
draw = random.Random(1)
talk = next(talk for talk in (agent_grpo.demonstration(draw) for _ in range(100)) if len(talk) == 4)
print(tokenizer.apply_chat_template(talk, tokenize=False))

# %% [markdown]
# ## Training
#
# Four tasks with eight rollouts each are one optimizer step. A reward function gets the environments as well as the messages.

# %%
trainer = TreeGRPOTrainer(
    model=model,
    reward_funcs=agent_grpo.names_the_colour,
    args=TreeGRPOConfig(
        folder.name,
        rollout_rows="as_sampled",
        num_generations=8,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        max_completion_length=48,
        max_steps=20,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=train_tasks,
    processing_class=tokenizer,
    environment_factory=agent_grpo.World,
)
trainer.remove_callback(PrinterCallback)  # the log is shown below
before = trainer.evaluate(held_out)
trainer.train()
after = trainer.evaluate(held_out)

# %% [markdown]
# ## Result
#
# `rollouts/rows` is the mean number of rows per rollout. Here turns extend each other, so a rollout is one row, unless the model writes a
# call in another way than the template does. `rollouts/drift` is the share of sampled tokens that the next context does not repeat.
# `tree/token_ratio` says for how many tokens of rows a computed one stands.

# %%
steps = [entry for entry in trainer.state.log_history if "loss" in entry]
names = ("reward", "tools/call_frequency", "rollouts/rows", "rollouts/drift", "tree/token_ratio")
for name in names:
    print(f"{name:22} first step {steps[0][name]:.2f}, last step {steps[-1][name]:.2f}")
guess = agent_grpo.random_reward(held_out, rollouts=8)
print(
    f"held-out reward: {guess:.2f} by guessing, {before['eval_reward']:.2f} before, {after['eval_reward']:.2f} after"
)
assert after["eval_reward"] > max(0.75, before["eval_reward"])

figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, label in (("reward", "reward"), ("tools/call_frequency", "calls of the tool per rollout")):
    axis.plot(np.arange(1, len(steps) + 1), [entry[name] for entry in steps], label=label)
axis.axhline(guess, color="gray", linestyle="--", label="reward by guessing")
axis.set(xlabel="optimizer step", ylim=(0, 1.05), title="The agent learns to look")
axis.legend(frameon=False)
plt.show()
