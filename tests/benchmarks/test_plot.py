"""The picture of speed-ups: which rows it shows."""

import csv

import pytest

from benchmarks import plot

NAMES = ("model", "shape", "mode", "checkpointing", "backend", "token_ratio", "flop_ratio", "speedup", "device")


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([NAMES, *rows])
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
    found = [(row["shape"], row["mode"], row["speedup"]) for row in plot.points([path])]
    assert found == [("short", "compiled", "0.9"), ("long", "compiled", "18.5"), ("long", "eager", "12.0")]
    picture = tmp_path / "sub" / "step.png"
    plot.main([str(path), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_show(tmp_path, capsys):
    path = write(tmp_path / "step.csv", ("m", "long", "compiled", "off", "", 19.4, "", "", "H100"))
    with pytest.raises(SystemExit):
        plot.main([str(path), "--output", str(tmp_path / "step.png")])
    assert "no row with a speed-up" in capsys.readouterr().err
