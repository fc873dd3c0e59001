"""The map of `docs/architecture.md` names every room and every file of the package, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import hf_prefix_tree
from scripts.write_map import PAGE, REPO_ROOT, existing, mapped, updated
from tests.test_imports import ROOMS

PACKAGE = Path(hf_prefix_tree.__file__).parent
TEXT = PAGE.read_text()


def test_the_map_is_the_folders():
    assert mapped(TEXT) == existing(PACKAGE), "run `python scripts/write_map.py`; add or remove lines of rooms by hand"


def test_the_map_is_in_the_order_of_imports():
    rooms = list(dict.fromkeys(room.split("/")[0] for room in mapped(TEXT) if room != "hf_prefix_tree"))
    assert rooms == [room for room in ROOMS if room in rooms]


def test_files_in_the_text_exist():
    names = re.findall(r"`(\w+(?:/\w+)+)`", TEXT)
    assert len(names) > 5
    assert [name for name in names if not (PACKAGE / f"{name}.py").is_file()] == []


def test_folders_outside_the_wheel_exist():
    folders = re.findall(r"^\| `(\w+)/` \| [^|]+ \|$", TEXT, re.MULTILINE)
    assert len(folders) > 3 and all((REPO_ROOT / folder).is_dir() for folder in folders)


def test_a_missing_and_an_invented_file_are_noticed(tmp_path):
    (tmp_path / "tree").mkdir()
    for name in ("__init__.py", "cli.py", "tree/__init__.py", "tree/folding.py"):
        (tmp_path / name).touch()
    right = "| `tree/` | text | `folding` |\n| `hf_prefix_tree/` | text | `cli` |\n"
    assert mapped(right) == existing(tmp_path)
    invented = right.replace("`folding`", "`folding` `layout`")
    assert mapped(invented) != existing(tmp_path)
    assert updated(invented, existing(tmp_path)) == right
    (tmp_path / "tree" / "packing.py").touch()
    assert mapped(right) != existing(tmp_path)
