"""Random streams by purpose: each use of randomness draws from a stream of its own.

Two uses that seed their generators with the same number draw the same numbers, and can undo each other: a dataset whose
rows are shuffled with a seed and a loader that shuffles again with that seed would read the rows in sorted order. A
stream is therefore named by its purpose beside the seed, such as ("row order", seed).
"""

from __future__ import annotations

import hashlib
import json


def stream_seed(*names: int | str) -> int:
    """A 63-bit seed that depends on all of `names`, purpose first by custom: ("data order", seed, epoch)."""
    digest = hashlib.sha256(json.dumps(names).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
