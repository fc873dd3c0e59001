# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Benchmarks, one command each: `python -m benchmarks.attention`, `.step`, `.mask`, `.fold`, `.prepare`, `.grpo`,
`.recurrent`, `.scaling`, `.largest_row`; each has `--help`. `.plot` draws the results of `.step`,
`.plot_scaling` those of `.scaling`."""
