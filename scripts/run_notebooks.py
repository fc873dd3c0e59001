# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Makes the `.ipynb` files of `notebooks/` from their sources: runs them and keeps their output and pictures.

Usage: python scripts/run_notebooks.py [NAME ...]    (needs `pip install nbclient ipykernel`)
"""

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def main(names: list[str]) -> None:
    # for `examples.demo`
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    for source in sorted(FOLDER.glob("*.py")):
        if names and source.stem not in names:
            continue
        notebook = jupytext.read(source)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=600, coalesce_streams=True, resources=resources).execute()
        for number, cell in enumerate(notebook.cells):
            cell.id = f"{source.stem.replace('_', '-')}-{number}"  # stable across runs
            if cell.cell_type == "code":
                # warnings contain paths of the machine
                cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
                cell.metadata.pop("execution", None)
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        print(f"wrote {source.stem}.ipynb", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
