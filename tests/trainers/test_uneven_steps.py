"""Streams on several ranks: every rank reads for itself, and a dispatcher that would glue batches is refused."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from hf_prefix_tree.trainers.padding import PaddedStream, fill_uneven_steps


def trainer(dispatch_batches):
    config = SimpleNamespace(dispatch_batches=dispatch_batches)
    accelerator = SimpleNamespace(num_processes=2, dataloader_config=config)
    return SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=1), accelerator=accelerator)


def test_dispatched_streams_are_refused():
    stream = Dataset.from_list([{"input_ids": [5]}] * 3).to_iterable_dataset()
    with pytest.raises(ValueError, match="`dispatch_batches=True`, which concatenates the batches of all ranks"):
        fill_uneven_steps(trainer(True), stream, 2, is_training=False, description="evaluation")
    for given in (None, False):  # not set means `True` for streams
        one = trainer(given)
        filled = fill_uneven_steps(one, stream, 2, is_training=False, description="evaluation")
        assert isinstance(filled, PaddedStream) and len(list(filled)) == 4
        assert one.accelerator.dataloader_config.dispatch_batches is False
