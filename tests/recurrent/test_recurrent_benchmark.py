"""The benchmark of recurrent scans runs on a CPU, and what it counts is right."""

import csv

from benchmarks import recurrent


def test_quick_run(tmp_path):
    output = tmp_path / "recurrent.csv"
    recurrent.main(["--quick", "--only", "search", "--output", str(output)])
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rule"], row["way"]) for row in rows] == [(r, w) for r in recurrent.RULES for w in recurrent.WAYS]
    for row in rows:
        # a prompt, two steps below it, two below each of those
        expected = {"fork": ("3", "3"), "link": ("3", "2"), "branches": ("1", "1")}[row["way"]]
        assert (row["levels"], row["calls"]) == expected
        assert float(row["ms"]) > 0
        if row["way"] == "link":
            assert 0 <= float(row["error"]) < 1e-5
