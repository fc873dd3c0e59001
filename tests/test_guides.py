"""The Python examples of the README and of the guides do what they say."""

import ast
import doctest
import inspect
import os
import re
from pathlib import Path

import pytest
from transformers import training_args
from transformers.models.qwen3 import modeling_qwen3

import hf_prefix_tree
from examples.demo import files
from scripts import run_printed_commands
from scripts.run_printed_commands import PAGES, REPO_ROOT, blocks, steps_of

TEXTS = {page: (REPO_ROOT / page).read_text(encoding="utf-8") for page in PAGES}
SNIPPETS = {page: blocks(text, "python") for page, text in TEXTS.items()}


def run_session(page):
    """The number of examples with `>>>` of a page, run as one session, whose output is another one than printed."""
    text = "\n".join(code for code in blocks(page.read_text(encoding="utf-8"), "python") if ">>>" in code)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0))
    return runner.failures


@pytest.mark.parametrize("page", [page for page in PAGES if any(">>>" in code for code in SNIPPETS[page])])
def test_examples(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_session(REPO_ROOT / page) == 0


@pytest.mark.parametrize("page", [page for page in PAGES if SNIPPETS[page]])
def test_other_blocks_are_valid_python(page):
    for code in SNIPPETS[page]:
        if ">>>" not in code:
            compile(code, page, "exec")


def test_a_wrong_example_fails(tmp_path, capsys):
    page = tmp_path / "wrong.md"
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    assert run_session(page) == 1


def test_the_front_page_is_short_and_its_links_hold():
    """Pictures have absolute addresses, because package indexes show the page, too."""
    text = TEXTS["README.md"]
    assert len(text.splitlines()) < 130
    links = re.findall(r"(!?)\[[^]]*\]\(([^)#]+)", text)
    assert len(links) > 20
    wrong = [target for _, target in links if "://" not in target and not (REPO_ROOT / target).is_file()]
    assert wrong + [target for picture, target in links if picture and "://" not in target] == []


def test_steps_of_a_page():
    page = """```shell
one --long \\
    --option
# a comment
two  # needs a GPU
```
```diff
  same
- old
+ new
```
```python
three
```
"""
    steps = steps_of("page", page)
    assert [step.code and step.code[-1] for step in steps] == [
        *("one --long --option", None, "same\nold", "same\nnew", "three\n"),
    ]
    assert [step.needs for step in steps if step.code is None] == ["needs a GPU"]


def test_the_files_that_commands_read_are_written(tmp_path):
    """Those of `python -m examples.demo.files`."""
    files.main(tmp_path)
    steps = [step for page, text in TEXTS.items() for step in steps_of(page, text)]
    shell = [step.text for step in steps if step.code and step.code[0] == "bash"]
    read = {name for command in shell for name in re.findall(r"(?<![\w/])[\w.]+\.jsonl?\b", command)}
    assert read > {"dialogues.jsonl", "completions.jsonl"}
    assert {name for name in read if not (tmp_path / name).is_file()} == set()


@pytest.mark.slow
def test_printed_commands_run(capsys):
    """All pages, in a copy of the repository. What is not run says in the page what it needs."""
    if not (REPO_ROOT / "hf_prefix_tree").is_dir():
        pytest.skip("an installed wheel is tested; the commands need a clone")
    failed = run_printed_commands.main([])
    printed = capsys.readouterr().out
    assert failed == 0, printed[-6000:]
    assert printed.count("\nran, ") > 35


@pytest.mark.slow
def test_a_wrong_command_is_a_failure(monkeypatch, capsys):
    wrong = steps_of("page", "```shell\nfalse\ntrue\n```\n```python\nraise SystemExit(3)\n```\n")
    monkeypatch.setattr(run_printed_commands, "make_copy", lambda folder: (folder.mkdir(), dict(os.environ))[1])
    assert len(run_printed_commands.run(wrong)) == 2


QUOTED = re.compile(r"^> (?:`` (.+) ``|`(.+)`)$", re.MULTILINE)


def texts_of(folder):
    """The string constants of the modules in a folder; a formatted value is `\\0`."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sdr]", "\0", node.value)


def is_printed(message, texts):
    parts = [re.escape(part) for part in message.split("...")]
    return any(re.search("[^\\n]*".join(parts), text) for text in texts)


def test_quoted_messages_are_those_of_the_code():
    package = list(texts_of(Path(hf_prefix_tree.__file__).parent))
    libraries = "".join(map(inspect.getsource, (training_args, modeling_qwen3)))
    quoted = ["".join(match) for match in QUOTED.findall((REPO_ROOT / "docs" / "troubleshooting.md").read_text())]
    assert len(quoted) > 25
    assert [text for text in quoted if not is_printed(text, package) and text not in libraries] == []
    assert not is_printed("no such message", package) and not is_printed("dropout in ... is supported", package)
