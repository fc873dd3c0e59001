# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Pages of trees: what they hold, by parsing; that the mask is the mask; paths in a browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from hf_prefix_tree import fold
from hf_prefix_tree.tree.html import page, tree_html
from hf_prefix_tree.tree.prefix_tree import Branch
from hf_prefix_tree.tree.synthetic import caterpillar
from tests.support.models import random_forest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
VOID = {"meta"}


class Parsed(HTMLParser):
    """Every element with its attributes and text; fails where tags are not balanced."""

    def __init__(self, content):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), [], [element[0] for element in self.open]))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2].append(data)

    def all(self, tag, **wanted):
        return [
            (attributes, "".join(text))
            for name, attributes, text, _ in self.elements
            if name == tag and all(attributes.get(key.rstrip("_")) == value for key, value in wanted.items())
        ]


def test_nodes_have_their_text_weights_and_paths():
    tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1]), Branch([5, 6, 7], [0, 0, 1])])
    parsed = Parsed(tree_html(tree, decode=lambda ids: "".join(f"<{i}>" for i in ids)))
    nodes = {attributes["data-i"]: (attributes, text) for attributes, text in parsed.all("div", class_="n")}
    assert [nodes[str(node)][0]["data-p"] for node in range(3)] == ["-1", "0", "0"]
    assert nodes["0"][1] == "node 0, 2 tokens, g 0-2 of 3<5><6>"
    assert [text for _, text in parsed.all("mark")] == ["<6>", "<7>", "<8><9>"]  # heaviest child last
    assert parsed.all("mark")[0][0]["title"] == "g = 2 of K = 3, weight 0.6667"
    assert nodes["1"][0]["title"] == "path: 0 > 1, depth 2"
    assert (nodes["1"][0]["style"], nodes["2"][0]["style"]) == ("--d:0", "--d:1")
    assert tree._repr_html_() == tree_html(tree) and ">8 9 </mark>" in tree._repr_html_()


@pytest.mark.parametrize("seed", range(3))
def test_the_mask_is_the_mask(seed):
    (tree,) = random_forest(seed, num_trees=1)
    drawn = np.zeros((len(tree), len(tree)), dtype=bool)
    shapes = Parsed(tree_html(tree)).all("path")
    assert len(shapes) == len(tree.node_lengths)
    for attributes, _ in shapes:
        start, same, end, stop, corner = map(int, re.findall(r"\d+", attributes["d"]))
        assert same == start and corner == stop
        for key in range(start, stop):
            drawn[key:end, key] = True
    at = np.arange(len(tree))
    np.testing.assert_array_equal(drawn, (at[None] <= at[:, None]) & (at[:, None] < tree.subtree_end[None]))


def test_a_page_stands_alone_and_holds_what_it_is_given():
    tree = fold([Branch([5, 6], [0, 1])])
    content = page("<b>&", ["a \x1b[1m"], [("Groups", [["", "n"], ["g<", "1"]])], ["a note"], [tree, tree])
    parsed = Parsed(content)
    assert [text for _, text in parsed.all("h1")] == ["<b>&"] and parsed.all("b") == []
    assert [text for _, text in parsed.all("td")] == ["g<", "1"] and [text for _, text in parsed.all("th")] == [
        "",
        "n",
    ]
    assert [text for _, text in parsed.all("li")] == ["a note"] and "\x1b" not in content and "␛[1m" in content
    assert len(parsed.all("svg")) == 2 and content.count("<script>") == 1
    for resource in ("http", "src=", "href=", "url(", "@import"):
        assert resource not in content


def test_large_trees_are_cut_and_say_so():
    tree = fold([Branch([7] * n + [8], [1] * (n + 1)) for n in range(1, 1100)])
    content = tree_html(tree)
    assert content.count('class="n"') == 1000 and f"... and {len(tree.node_lengths) - 1000:,} more nodes" in content
    assert "... 500 more tokens" in tree_html(fold([Branch([5] * 1500, [1] * 1500)]))


def test_indentation_is_logarithmic():
    content = tree_html(
        caterpillar(50, seed=1, prompt_tokens=10, reasoning_tokens=10, output_tokens=5, reply_tokens=5)
    )
    assert max(map(int, re.findall(r"--d:(\d+)", content))) == 1  # a trunk with leaves


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium to hover over a node")
def test_hovering_marks_the_path_in_a_browser(tmp_path):
    tree = caterpillar(250, seed=1, prompt_tokens=100, reasoning_tokens=20, output_tokens=10, reply_tokens=10)
    assert len(tree.node_lengths) == 501
    script = """<script>var deep=[...document.querySelectorAll(".n")].pop(),start=performance.now();
    deep.dispatchEvent(new MouseEvent("mouseover",{bubbles:true}));
    document.title=[...document.querySelectorAll(".n.on")].map(e=>e.dataset.i).sort((a,b)=>a-b)+" "
      +document.querySelectorAll("path.on").length+" "+(performance.now()-start)+" "
      +document.documentElement.scrollWidth;</script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page("t", [], [], [], [tree]).replace("</body>", script))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,900", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
    path, shapes, milliseconds, width = re.search(r"<title>(.*?)</title>", done.stdout)[1].split()
    deepest = int(re.findall(r'class="n".*?data-i="(\d+)"', tree_html(tree))[-1])
    expected = [deepest]
    while tree.node_parents[expected[-1]] >= 0:
        expected.append(int(tree.node_parents[expected[-1]]))
    assert list(map(int, path.split(","))) == sorted(expected) and int(shapes) == len(expected) > 200
    assert float(milliseconds) < 500 and int(width) <= 500  # Chromium's windows are at least 500 wide
