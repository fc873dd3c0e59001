"""The versions that the package says it is tested with, and the warning of newer ones."""

import importlib
import re
import tomllib
from pathlib import Path

import yaml

from hf_prefix_tree import __version__
from hf_prefix_tree.training import checks
from hf_prefix_tree.training.options import TESTED

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


def test_workflows_run_pinned_actions_with_the_least_rights():
    for path in sorted((REPO_ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        for name, job in workflow["jobs"].items():
            rights = job["permissions"]
            assert rights == ({"id-token": "write"} if name == "publish" else {"contents": "read"}), (path.name, name)
            for action in (step["uses"] for step in job["steps"] if "uses" in step):
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), (path.name, action)


def test_the_build_is_pinned_and_the_sdist_has_no_tests():
    build = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["build-system"]
    assert all("==" in requirement for requirement in build["requires"])
    # setuptools would take `tests/test_*.py` without the files that these import
    assert "prune tests" in (REPO_ROOT / "MANIFEST.in").read_text().splitlines()


def test_the_changelog_begins_with_this_version():
    (latest, *_) = re.findall(r"^## (\S+)", (REPO_ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest in (__version__, "Unreleased")
