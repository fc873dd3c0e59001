"""The site builds without a warning: no dead link, no name in the reference that is not there."""

import os
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
