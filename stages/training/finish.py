"""The end of a training stage: what it publishes.

The checkpoint holds the model, its tokenizer, training.jsonl, training.png and `SHA256SUMS` over them. With LoRA, the
adapter is published beside it as the side output `adapter`, and the checkpoint has it merged.

A run that halts itself publishes no result. Its weights of that moment are written all the same, apart from the output,
so that a person can see what became of the model, or go on with it under another name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.contract import NonFinite, StageContext, Tripwire
from stages.modeling.checkpoint import check_tokenizer_export, save_checkpoint
from stages.modeling.lora import merge_adapter, save_adapter
from stages.training import distributed
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


@contextmanager
def kept_when_halted(context: StageContext[Any], model: Any, tokenizer: Any, adapted: Any | None) -> Iterator[None]:
    """Around `train`: where it halts itself, the weights and training.jsonl go into a folder named by the exception.

    A tokenizer that could not be saved in the end is found before.

    A step whose loss or gradient was not finite has changed no weight, so they are the last good ones. Where the model
    cannot be saved, the log says why, and the verdict is the same.

    Args: as `finish`.

    Raises:
        Refused: see `stages.modeling.checkpoint.check_tokenizer_export`.
    """
    if distributed.rank() == 0:
        check_tokenizer_export(model, tokenizer, context.scratch)
    try:
        yield
    except (Tripwire, NonFinite) as end:
        if distributed.rank() == 0:
            try:
                end.checkpoint = _write_halted(context, model, tokenizer, adapted)
            except Exception as error:  # whatever a broken model does to its export: the verdict must be heard
                context.log(f"the weights of the halted run cannot be kept as a checkpoint: {error}", "warning")
        raise


def _write_halted(context: StageContext[Any], model: Any, tokenizer: Any, adapted: Any | None) -> Path:
    folder = context.scratch / "halted"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(context.output / RECORDS, folder / RECORDS)
    save_checkpoint(model if adapted is None else merge_adapter(adapted), tokenizer, folder)
    return folder
