"""The pictures of speed-ups and of scaling: which rows they show."""

import csv

import pytest

from benchmarks import plot, plot_scaling

NAMES = ("model", "shape", "mode", "checkpointing", "backend", "token_ratio", "flop_ratio", "speedup", "device")


SCALING = (
    "mode",
    "coverage",
    "shape",
    "dtype",
    "gpus",
    "compiled",
    "rows_per_step",
    "rows_per_micro_batch",
    "ms_per_branch",
    "checkpointing",
    "max_packed_tokens",
)


def write(path, *rows, names=NAMES):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])
    return path


def test_the_fastest_backend_of_each_shape_and_mode(tmp_path):
    path = write(
        tmp_path / "step.csv",
        ("m", "long", "compiled", "off", "flex", 19.4, 15.0, 15.5, "H100"),
        ("m", "long", "compiled", "off", "flash", 19.4, 15.0, 18.5, "H100"),
        ("m", "long", "eager", "off", "flex", 19.4, 15.0, 12.0, "H100"),
        ("m", "long", "compiled", "off", "", 19.4, "", "", "H100"),  # the branches
        ("m", "short", "compiled", "off", "flex", 1.2, 1.1, 0.9, "H100"),
    )
    got = [(row["shape"], row["mode"], row["speedup"]) for row in plot.points([path])]
    assert got == [("short", "compiled", "0.9"), ("long", "compiled", "18.5"), ("long", "eager", "12.0")]
    picture = tmp_path / "sub" / "step.png"
    plot.main([str(path), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_show(tmp_path, capsys):
    path = write(tmp_path / "step.csv", ("m", "long", "compiled", "off", "", 19.4, "", "", "H100"))
    with pytest.raises(SystemExit):
        plot.main([str(path), "--output", str(tmp_path / "step.png")])
    assert "no row with a speed-up" in capsys.readouterr().err


def test_the_fastest_of_each_number_of_gpus(tmp_path, capsys):
    one = write(
        tmp_path / "one.csv",
        ("tree", "published", "0.6b", "bfloat16", 1, "True", 16, 4, 10.0),
        ("tree", "published", "0.6b", "bfloat16", 1, "True", 16, 4, 8.0),
        ("tree", "published", "0.6b", "bfloat16", 1, "True", 32, 4, 6.0),  # larger steps, nowhere else
        ("per_branch", "published", "0.6b", "bfloat16", 1, "False", 16, 1, 100.0),
        ("per_branch", "equal", "0.6b", "bfloat16", 1, "False", 82, 1, 80.0),
        ("grouped", "published", "0.6b", "bfloat16", 1, "False", 4, 1, 100.0),
        names=SCALING,
    )
    two = write(
        tmp_path / "two.csv",
        ("tree", "published", "0.6b", "bfloat16", 2, "True", 16, 4, 4.0),
        ("tree", "published", "0.6b", "bfloat16", 2, "True", 16, 4, 3.0, "True"),
        ("tree", "published", "0.6b", "bfloat16", 2, "True", 16, 4, 3.0, "False", 8448),
        ("tree", "published", "0.6b", "float32", 2, "True", 16, 4, 1.0),
        ("tree", "published", "8b", "bfloat16", 2, "True", 16, 4, 1.0),
        ("per_branch", "equal", "0.6b", "bfloat16", 2, "False", 80, 1, 50.0),
        ("per_branch", "equal", "0.6b", "bfloat16", 2, "False", 328, 1, 40.0),  # larger steps
        ("grouped", "published", "0.6b", "bfloat16", 2, "False", 4, 1, ""),  # failed
        names=SCALING,
    )
    got = plot_scaling.lines([two, one], "0.6b", "bfloat16")
    assert got == {
        ("tree", "16 a step, 4 a micro-batch, compiled"): {1: 125.0, 2: 250.0},
        ("per_branch", "as many as of 4 trees a step, 1 a micro-batch, eager"): {1: 12.5, 2: 20.0},
    }
    picture = tmp_path / "sub" / "scaling.png"
    plot_scaling.main([str(two), str(one), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        plot_scaling.main([str(one), "--output", str(picture)])
    assert "nothing was measured on several numbers of GPUs" in capsys.readouterr().err
