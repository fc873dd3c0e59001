"""One table says of every option of every trainer whether it is honoured, refused or irrelevant."""

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, GRPOConfig, KTOConfig, RLOOConfig, SFTConfig, SFTTrainer

from hf_prefix_tree import (
    DiffusionSFTConfig,
    Eagle3Config,
    TreeDPOTrainer,
    TreeKTOTrainer,
    TreeLossMixin,
    TreeSFTConfig,
)
from hf_prefix_tree.training.options import OPTIONS, TESTED, Honoured, Refused
from tests.support.policy_runs import build
from tests.support.preference_runs import pairs, unpaired
from tests.support.preference_runs import tokenizer as text_tokenizer
from tests.support.trainer_runs import config, make_model

REPO_ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    each.__name__: each
    for each in (
        *(TrainingArguments, SFTConfig, TreeSFTConfig, GRPOConfig, RLOOConfig, DPOConfig, KTOConfig),
        *(DiffusionSFTConfig, Eagle3Config),
    )
}
# Options that came after the lowest versions that are supported.
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}
# A value of each refused option that does not pass.
REFUSED_VALUES = {
    **{"packing": True, "eval_packing": True, "padding_free": True, "assistant_only_loss": True},
    **{"completion_only_loss": False, "loss_type": "dft", "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0},
    **{"use_liger_kernel": True, "average_tokens_across_devices": False, "truncation_mode": "keep_end"},
    **{"batch_eval_metrics": True, "include_for_metrics": ["loss"], "torch_compile": True, "pad_token": "<eos>"},
    **{"packing_strategy": "wrapped", "eval_use_gather_object": True},
}
REFUSED = [(name, option) for name, table in OPTIONS.items() for option in table if isinstance(table[option], Refused)]


class TreeTrainer(TreeLossMixin, Trainer):
    """The step-wide normaliser on a plain Trainer."""


class TreeSFTLossTrainer(TreeLossMixin, SFTTrainer):
    """The step-wide normaliser on TRL's `SFTTrainer`."""


@pytest.mark.parametrize("name", OPTIONS)
def test_the_table_holds_every_option(name):
    fields = {field.name for field in dataclasses.fields(CONFIGS[name])}
    assert fields - OPTIONS[name].keys() == set(), "new options: honour or refuse them, or say why they don't matter"
    is_older = Version(transformers.__version__) < Version(TESTED["transformers"][1])
    assert OPTIONS[name].keys() - fields <= (NEWER if is_older else set()), "options that are gone"


def make(folder, name, option):
    """What checks the options of a config: the config itself, or a trainer."""
    folder = folder / "out"
    options = {option: REFUSED_VALUES[option]}
    if name == "TrainingArguments":
        arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", **options)
        return TreeTrainer(model=make_model(), args=arguments)
    if name == "SFTConfig":
        arguments = SFTConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **options)
        return TreeSFTLossTrainer(make_model(), arguments, processing_class=text_tokenizer())
    if name in ("GRPOConfig", "RLOOConfig"):
        return build(folder.parent, name[:4].lower(), "tree", **options)
    if name in ("DPOConfig", "KTOConfig"):
        trainer_class, rows = {"DPO": (TreeDPOTrainer, pairs), "KTO": (TreeKTOTrainer, unpaired)}[name[:3]]
        arguments = config(folder, CONFIGS[name], per_device_train_batch_size=2, **options)
        return trainer_class(
            make_model(), make_model(), arguments, train_dataset=rows(4), processing_class=text_tokenizer()
        )
    return CONFIGS[name](str(folder), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(("name", "option"), REFUSED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_refused_options_raise_with_a_remedy(tmp_path, name, option):
    remedy = OPTIONS[name][option].remedy
    with pytest.raises(ValueError, match=rf"^`{option}=.*` is not supported: ") as caught:
        make(tmp_path, name, option)
    assert remedy in str(caught.value) and "Leave it at" in str(caught.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_are_not_refused(name):
    for field in dataclasses.fields(CONFIGS[name]):
        option = OPTIONS[name][field.name]
        if isinstance(option, Refused):
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            assert default == option.allowed[0], field.name


def test_every_honoured_option_names_a_test_that_exists():
    found = {}
    for table in OPTIONS.values():
        for name, option in table.items():
            if not isinstance(option, Honoured):
                continue
            file, function = option.test.split("::")
            if file not in found:
                tree = ast.parse((REPO_ROOT / "tests" / file).read_text())
                found[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in found[file], (name, option.test)


def test_the_page_is_that_of_the_table():
    file = REPO_ROOT / "scripts" / "write_options.py"
    spec = importlib.util.spec_from_file_location("write_options", file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TRAINERS.keys() == OPTIONS.keys()
    assert script.PAGE.read_text() == script.page(), "run scripts/write_options.py"
