# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Writes the files of each room into the map of `docs/architecture.md`. Run it after adding, moving or deleting files.

It changes the last column only: a new room needs a line by hand, a deleted one loses its line by hand.
"""

import re
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
PAGE = REPO_ROOT / "docs" / "architecture.md"
LINE = re.compile(r"^(\| `([\w/]+)/` \| [^|]+ \|)((?: `\w+`)+) \|$", re.MULTILINE)


def mapped(page: str) -> dict[str, list[str]]:
    """The files of each room in the page."""
    return {room: re.findall(r"\w+", files) for _, room, files in LINE.findall(page)}


def existing(package: Path) -> dict[str, list[str]]:
    """The files of each room in the folders; the package's top level is the room `hf_prefix_tree`."""
    rooms = {}
    for init in package.rglob("__init__.py"):
        room = init.parent
        name = "hf_prefix_tree" if room == package else room.relative_to(package).as_posix()
        rooms[name] = sorted(file.stem for file in room.glob("*.py") if file != init)
    return rooms


def updated(page: str, rooms: dict[str, list[str]]) -> str:
    """The page with the files of these rooms."""

    def line(match: re.Match) -> str:
        start, room, _ = match.groups()
        return f"{start} {' '.join(f'`{file}`' for file in rooms[room])} |" if room in rooms else match.group()

    return LINE.sub(line, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(), existing(REPO_ROOT / "hf_prefix_tree")))
