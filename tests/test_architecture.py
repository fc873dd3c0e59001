"""The map of `docs/architecture.md` names every room and every file of the package, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import hf_prefix_tree
from tests.test_imports import ROOMS

REPO_ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(hf_prefix_tree.__file__).parent
ROW = re.compile(r"^\| `([\w/]+)/` \| [^|]+ \| ((?:`\w+` ?)+) \|$", re.MULTILINE)


def mapped(page: str) -> dict[str, list[str]]:
    """The files of each room, as the page has them."""
    return {room: re.findall(r"\w+", files) for room, files in ROW.findall(page)}


def existing(package: Path) -> dict[str, list[str]]:
    """The files of each room, as the folders have them."""
    rooms = {init.parent for init in package.rglob("__init__.py")}
    names = {room: "hf_prefix_tree" if room == package else room.relative_to(package).as_posix() for room in rooms}
    return {names[room]: sorted(file.stem for file in room.glob("*.py") if file.stem != "__init__") for room in rooms}


def test_the_map_is_the_folders():
    page, folders = mapped((REPO_ROOT / "docs" / "architecture.md").read_text()), existing(PACKAGE)
    update = "\n".join(
        f"{room}/: " + " ".join(f"`{file}`" for file in files)
        for room, files in sorted(folders.items())
        if page.get(room) != files
    )
    assert page == folders, f"update `docs/architecture.md`; the rooms that differ have these files:\n{update}"


def test_files_in_the_text_exist():
    names = re.findall(r"`(\w+(?:/\w+)+)`", (REPO_ROOT / "docs" / "architecture.md").read_text())
    assert len(names) > 5
    assert [name for name in names if not (PACKAGE / f"{name}.py").is_file()] == []


def test_the_map_is_in_the_order_of_imports():
    page = mapped((REPO_ROOT / "docs" / "architecture.md").read_text())
    top = list(dict.fromkeys(room.split("/")[0] for room in page if room != "hf_prefix_tree"))
    assert top == [room for room in ROOMS if room in top]


def test_folders_outside_the_wheel_exist():
    page = (REPO_ROOT / "docs" / "architecture.md").read_text()
    folders = re.findall(r"^\| `(\w+)/` \| [^|]+ \|$", page, re.MULTILINE)
    assert len(folders) > 3 and all((REPO_ROOT / folder).is_dir() for folder in folders)


def test_a_missing_and_an_invented_file_are_noticed(tmp_path):
    (tmp_path / "tree").mkdir()
    for name in ("__init__.py", "cli.py", "tree/__init__.py", "tree/folding.py"):
        (tmp_path / name).touch()
    right = "| `tree/` | text | `folding` |\n| `hf_prefix_tree/` | text | `cli` |\n"
    assert mapped(right) == existing(tmp_path)
    assert mapped(right.replace("`folding`", "`folding` `layout`")) != existing(tmp_path)
    (tmp_path / "tree" / "packing.py").touch()
    assert mapped(right) != existing(tmp_path)
