"""The model card of a run says what folding saved, and keeps TRL's own text."""

import importlib.metadata

import pytest

from hf_prefix_tree import __version__
from hf_prefix_tree.sft.trainer import add_tree_section
from tests.support.trainer_runs import make_trees, train

LOG = [{"tree/branches": 4, "tree/tokens": 100, "tree/token_ratio": 3.0}]


def test_card_of_a_run(tmp_path):
    trees = make_trees(3)
    trainer = train(tmp_path, trees, max_steps=3, weighting="tree")
    trainer.create_model_card(model_name="a-model")
    text = (tmp_path / "README.md").read_text()
    stats = [tree.stats() for tree in trees]
    branch_tokens, tree_tokens = sum(s.branch_tokens for s in stats), sum(s.tree_tokens for s in stats)
    assert f"| branches trained on | {sum(s.branches for s in stats)} |" in text
    assert f"| tokens computed | {tree_tokens:,} |" in text
    assert f"| token ratio | {branch_tokens / tree_tokens:.2f} |" in text
    assert "| weighting | `tree` |" in text
    assert text.index("### Prefix trees") < text.index("### Framework versions")
    assert "prefix-tree" in text.split("---")[1] and "a-model" in text


def test_a_card_is_written_from_a_checkout_that_is_not_installed(tmp_path, monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", not_found)
    card = tmp_path / "README.md"
    card.touch()
    add_tree_section(card, LOG, "tree")
    assert f"hf_prefix_tree) {__version__}." in card.read_text() and "| token ratio | 3.00 |" in card.read_text()


def test_a_card_without_the_usual_heading_gets_the_section_at_its_end(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("text\n")
    add_tree_section(card, LOG, "tree")
    assert card.read_text().startswith("text\n\n### Prefix trees\n")


@pytest.mark.parametrize("log", [[], [{"loss": 1.0}]])
def test_nothing_was_trained(tmp_path, log):
    add_tree_section(tmp_path / "README.md", log, "tree")  # a card that is not there is not read
