"""The end of a training stage: what it publishes.

The checkpoint holds the model, its tokenizer, training.jsonl, training.png and `SHA256SUMS` over them. With LoRA, the
adapter is published beside it as the side output `adapter`, and the checkpoint has it merged.
"""

from __future__ import annotations

from typing import Any

from stages.contract import StageContext
from stages.modeling.checkpoint import save_checkpoint
from stages.modeling.lora import merge_adapter, save_adapter
from stages.training.loop import RECORDS
from stages.training.plot import PLOT, draw_training


def finish(context: StageContext[Any], model: Any, tokenizer: Any, adapted: Any | None = None) -> None:
    """Write the outputs of a training stage; call it last.

    Args:
        context: its output has training.jsonl.
        model: the trained model.
        tokenizer: saved beside it.
        adapted: what `stages.modeling.lora.add_adapter` gave.

    Raises:
        RuntimeError: the export gate; see `stages.modeling.checkpoint.check_export`.
    """
    draw_training(context.output / RECORDS, context.output / PLOT)
    if adapted is not None:
        base = context.digests.get("model")
        save_adapter(adapted, context.side_output("adapter"), None if base is None else f"artifact:{base}")
        model = merge_adapter(adapted)
    save_checkpoint(model, tokenizer, context.output)
