"""The order of the data: a pure function of (seed, epoch, step).

The rows are read as one endless stream: the permutation of epoch 0, then that of epoch 1, and so on. Step s takes the
rows [s * batch, (s + 1) * batch) of the stream, so a cursor is one integer, a resumed run sees the rows that it would
have seen, and no row is lost where a batch meets the end of an epoch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stages.seeds import stream_seed


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `rows` rows in one epoch, int64 [rows]. Do not change it in place."""
    return np.random.default_rng(stream_seed("data order", seed, epoch)).permutation(rows)


def batch_rows(rows: int, batch_size: int, seed: int, step: int, limit: int | None = None) -> np.ndarray:
    """The rows of optimiser step `step` (from 0), int64 [batch_size], fewer where the stream ends at `limit` rows.

    Raises:
        ValueError: there are no rows, or the step lies beyond the limit.
    """
    start, stop = step * batch_size, (step + 1) * batch_size
    if limit is not None:
        stop = min(stop, limit)
    if rows < 1 or start >= stop:
        raise ValueError(f"step {step} has no rows ({rows} rows, batches of {batch_size}, limit {limit})")
    parts = []
    while start < stop:
        epoch, offset = divmod(start, rows)
        part = epoch_order(rows, seed, epoch)[offset : offset + stop - start]
        parts.append(part)
        start += len(part)
    return np.concatenate(parts)
