"""The data order is a pure function of (seed, epoch, step) and loses no row."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from stages.tokenize.encode import Document
from stages.tokenize.write import PackedWriter
from stages.training.config import TrainingConfig
from stages.training.order import batch_rows, epoch_order


def test_each_epoch_sees_every_row_once_across_batch_borders():
    seen = np.concatenate([batch_rows(7, 3, 5, step) for step in range(7)])  # 21 rows: three epochs of 7
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert not np.array_equal(seen[:7], seen[7:14])


def test_a_step_does_not_depend_on_the_steps_before_it():
    later = batch_rows(1000, 32, 1, 77)
    epoch_order.cache_clear()
    assert np.array_equal(batch_rows(1000, 32, 1, 77), later)


def test_seeds_and_epochs_give_different_orders():
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_the_order_is_pinned():
    # numpy's default_rng of a seed named ("data order", seed, epoch); a change here would silently change the data
    # order of every key.
    assert epoch_order(8, 0, 0).tolist() == [4, 7, 5, 0, 1, 3, 2, 6]
    assert epoch_order(8, 3, 2).tolist() == [5, 3, 2, 0, 4, 6, 7, 1]


def test_a_batch_larger_than_the_data_spans_epochs():
    assert sorted(batch_rows(3, 6, 0, 0).tolist()) == [0, 0, 1, 1, 2, 2]


def test_a_run_by_epochs_ends_with_a_short_step():
    config = TrainingConfig(num_train_epochs=1.5, train_batch_size=4)
    assert config.total_rows(7) == 10
    assert config.total_steps(7) == 3
    sizes = [len(batch_rows(7, 4, 0, step, config.total_rows(7))) for step in range(3)]
    assert sizes == [4, 4, 2]


def test_a_step_without_rows_is_an_error():
    with pytest.raises(ValueError, match="step 3 has no rows"):
        batch_rows(7, 4, 0, 3, limit=10)
    with pytest.raises(ValueError, match="0 rows"):
        batch_rows(0, 4, 0, 0, limit=0)


@pytest.mark.parametrize("seed", range(4))
def test_one_seed_for_the_dataset_and_the_training_does_not_sort_the_rows_again(tmp_path, seed):
    writer = PackedWriter(tmp_path, "train")
    for length in range(2, 66):
        writer.add(Document(np.arange(length), np.ones(length, np.uint8), np.ones(length, np.int32)))
    writer.write(tmp_path / "train.safetensors", row_length=65, share_rows=False, pad_id=0, seed=seed)
    filled = (load_file(tmp_path / "train.safetensors")["segment_ids"] > 0).sum(axis=1)
    read = filled[epoch_order(len(filled), seed, 0)]
    falls = int((np.diff(read) < 0).sum())
    assert 16 < falls < 47  # of 63 neighbours, a random order has about half falling; a sorted one none or all
