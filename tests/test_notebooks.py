"""The notebooks run from top to bottom on a CPU, and each `.ipynb` holds the cells of its `py:percent` source."""

import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import jupytext
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))


def cells(path):
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_there_are_notebooks():
    assert len(SOURCES) >= 5
    assert {path.stem for path in SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_and_source_are_in_sync(source):
    notebook = source.with_suffix(".ipynb")
    assert cells(notebook) == cells(source), f"run `jupytext --to ipynb --update {source.name}` in {FOLDER.name}/"
    assert f"notebooks/{notebook.name}" in cells(source)[0][1], "the Colab badge points elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs(source, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parent),
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(source)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_archive_is_installed_on_colab_only(source, tmp_path, monkeypatch):
    """`examples` is not in the wheel, so it comes from the archive as well."""
    first = next(text for kind, text in cells(source) if kind == "code")
    repository = re.search(r"github\.com/([^/]+/[^/]+)/archive/main\.zip", first).group(1)
    assert f"github/{repository}/blob/main" in cells(source)[0][1], "not the repository of the Colab badge"
    commands = []

    def download(url, file):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("hf_prefix_tree-main/examples/demo/dialogues.py", url)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(urllib.request, "urlretrieve", download)
    exec(first, {})
    assert (commands, list(tmp_path.iterdir()), sys.path[0]) == ([], [], str(tmp_path.parent))
    monkeypatch.setitem(sys.modules, "google.colab", None)
    exec(first, {})
    (install,) = commands
    url = Path(sys.path[0], "examples", "demo", "dialogues.py").read_text()
    assert install[1:] == ["-m", "pip", "install", "-q", f"hf_prefix_tree[viz] @ {url}"]
