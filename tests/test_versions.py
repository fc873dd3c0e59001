"""The versions that the package says it is tested with, and the warning of newer ones."""

import importlib
import re
from pathlib import Path

from hf_prefix_tree.training import checks
from hf_prefix_tree.version import TESTED

REPO_ROOT = Path(__file__).resolve().parent.parent


def pins(name):
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (REPO_ROOT / name).read_text(), re.MULTILINE))


def test_the_tested_range_is_that_of_the_pins():
    lowest, highest = pins("requirements-lowest.txt"), pins("requirements-dev.txt")
    assert {name: (lowest[name], highest[name]) for name in lowest} == TESTED


def test_newer_versions_are_warned_of_at_import(monkeypatch, caplog):
    for name in TESTED:
        monkeypatch.setitem(TESTED, name, ("0.1", "99.0"))
    importlib.reload(checks)
    assert not caplog.messages
    monkeypatch.setitem(TESTED, "trl", ("0.1", "0.2"))
    importlib.reload(checks)
    (message,) = caplog.messages
    assert message.startswith("trl ") and "newer than 0.2" in message
