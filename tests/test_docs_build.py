"""The site builds without a warning: no dead link, no name in the reference that is not there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO_ROOT = Path(__file__).resolve().parent.parent


def build(config, site):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        cwd=REPO_ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


def test_the_site_builds(tmp_path):
    done = build(REPO_ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "model" / "index.html").read_text()
    assert "prepare_model" in page and "<em>optional</em>" in page
    assert "`" not in page.split("</head>")[1], "markup of a docstring shows"


def test_a_dead_link_fails(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[nowhere](nowhere.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The search index of the built site."""
    site = tmp_path_factory.mktemp("site")
    assert build(REPO_ROOT / "mkdocs.yml", site).returncode == 0
    return json.loads((site / "search" / "search_index.json").read_text())


def sections_with(index, word):
    """Addresses of the sections that have the word between the separators of the search."""
    split = re.compile(index["config"]["separator"]).split
    texts = {entry["location"]: re.sub("<[^>]+>", " ", f"{entry['title']} {entry['text']}") for entry in index["docs"]}
    return [location for location, text in texts.items() if word.lower() in split(text.lower())]


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("wandb", "trainers/#logging-and-the-hub"),
        ("trackio", "trainers/#logging-and-the-hub"),
        ("push_to_hub", "trainers/#logging-and-the-hub"),
        ("Liger", "trainers/#logging-and-the-hub"),
        ("Colab", "examples/#notebooks"),
        ("ShareGPT", "data/#formats"),
        ("Axolotl", "migrating/#from-axolotl"),
    ],
)
def test_search_finds(index, word, page):
    assert page in sections_with(index, word)


def test_search_does_not_find_what_is_not_there(index):
    assert sections_with(index, "megabatch") == []
