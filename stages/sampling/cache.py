"""A key/value cache that grows in place.

transformers' `DynamicCache` joins the whole cache to the new keys at every token, which copies every earlier key once a
token. Here each layer owns a buffer with room to grow and hands out a view of what is filled. The views read exactly as
the joined tensors would, so the result of attention is the same.

Invariants:
- `keys` and `values` are views of the first `get_seq_length()` positions of the buffers, [rows, heads, length,
  head_dim].
- Models whose layers are not plain attention (sliding windows, linear attention, shared caches) get transformers' own
  cache: `new_cache` decides.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """The keys and values of one attention layer, in buffers with room for `room` positions (and more when needed)."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [rows, heads, new, head_dim] keys and values; returns views of all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            self.room = max(self.room, end if self._buffers is None else 2 * end)
            self._buffers = (self._grown(key_states, self.keys, start), self._grown(value_states, self.values, start))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self._view(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 [rows]), in that order; a row may be taken several times."""
        if self._buffers is None:
            return
        length = self.get_seq_length()
        keys, values = (self._selected(buffer, indices, length) for buffer in self._buffers)
        self._buffers = (keys, values)
        self._view(length)

    def _view(self, length: int) -> None:
        assert self._buffers is not None
        self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)

    def _grown(self, new: Tensor, old: Tensor, length: int) -> Tensor:
        rows, heads, _, width = new.shape
        buffer = new.new_empty(rows, heads, self.room, width)
        if length:
            buffer[..., :length, :] = old
        return buffer

    def _selected(self, buffer: Tensor, indices: Tensor, length: int) -> Tensor:
        chosen = buffer.new_empty(len(indices), *buffer.shape[1:])
        chosen[..., :length, :] = buffer[..., :length, :][indices]
        return chosen


def new_cache(config: Any, room: int) -> Cache:
    """An empty cache for a model of this config, with room for `room` positions where its layers allow it."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    plain = (
        all(kind == "full_attention" for kind in kinds)
        and not getattr(config, "num_kv_shared_layers", None)
        and not (getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None))
    )
    if not plain:
        return DynamicCache(config=config)
    return Cache(layers=[GrowingLayer(room) for _ in kinds])
