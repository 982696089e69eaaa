"""What is checked before the first step, so that a run that cannot work ends at once with a sentence (code 83).

Everything here costs seconds at most and needs no training step: data, tokenizer against tokenizer, vocabulary against
embedding rows, row length against positions, batch arithmetic, that the model keeps packed documents apart, and that
disk and memory hold what training will surely need.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.contract import Refused, StageContext
from stages.modeling.packing import keeps_documents_apart
from stages.tokenize.tokenizer import load_tokenizer
from stages.training.config import TrainingConfig
from stages.training.distributed import rank, world_size


def check_rows(rows: int, targets: int, config: TrainingConfig, what: str) -> None:
    """There is data to train on, and a batch fits into it.

    Args:
        rows: rows of the training split.
        targets: target tokens (or pairs, or prompts) in it.
        config: the batch sizes.
        what: how to call the data in a message, such as "input data".

    Raises:
        Refused: no rows, no targets, or a batch larger than the data.
    """
    if rows == 0:
        raise Refused(f"{what}: the train split has no rows")
    if targets == 0:
        raise Refused(f"{what}: no token of the train split is trained on; check its loss mask or chat format")
    if config.train_batch_size > rows:
        raise Refused(
            f"train_batch_size is {config.train_batch_size}, but {what} has only {rows} rows; lower it, or add data"
        )


def check_model(model: Any, tokenizer: Any, *, max_token: int, length: int, packed: bool, what: str) -> None:
    """The model can read these tokens at this length.

    Args:
        model: a transformers causal LM.
        tokenizer: the tokenizer that will be saved with it.
        max_token: largest token id in the data.
        length: longest row of the data, in tokens.
        packed: whether rows hold several documents.
        what: how to call the data in a message.

    Raises:
        Refused: the vocabulary or the positions do not suffice, or the model mixes packed documents.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if max(max_token + 1, len(tokenizer)) > rows:
        raise Refused(
            f"{what} was tokenized with {max(max_token + 1, len(tokenizer))} tokens, but the model's embedding has "
            f"only {rows} rows; tokenize with the model's own tokenizer"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise Refused(
            f"{what} has rows of {length} tokens, but the model has only {positions} positions "
            "(max_position_embeddings); tokenize with a shorter row_length"
        )
    if packed and not keeps_documents_apart(model):
        raise Refused(
            f"{what} packs several documents into a row, and the model ({model.config.model_type}) cannot keep them "
            "apart; tokenize without packing"
        )


def check_room(context: StageContext[Any], config: TrainingConfig, model: Any) -> None:
    """Disk and memory hold what the run needs for sure, on top of what is there already.

    Disk: one snapshot (weights and optimiser state, written to the scratch folder before it is uploaded) and the
    checkpoint. Memory: gradients and optimiser state of this machine's ranks; activations come on top, and cannot be
    foretold from sizes alone.

    Args:
        context: its scratch folder is where snapshots are written.
        config: optimiser and distribution.
        model: on the device that it trains on.

    Raises:
        Refused: with what is needed, what is free, and what would help.
    """
    if rank() != 0:
        return
    weights = sum(param.numel() * param.element_size() for param in model.parameters())
    trained = sum(param.numel() * param.element_size() for param in model.parameters() if param.requires_grad)
    state = trained * (1 if config.optimizer == "muon" else 2)
    on_gpu = model.device.type == "cuda"
    copies = 1 if on_gpu or config.distribution == "fsdp2" else world_size()
    memory = (trained + state) * copies // (world_size() if on_gpu and config.distribution == "fsdp2" else 1)
    available = torch.cuda.mem_get_info(model.device)[0] if on_gpu else _available_memory()
    if available is not None and memory > available:
        raise Refused(
            f"gradients and optimiser state take {_gib(memory)} of {'GPU ' if on_gpu else ''}memory, before any "
            f"activation, and {_gib(available)} are free; train a smaller model, or use a larger machine or, with "
            "several processes, distribution: fsdp2"
        )
    disk, free = 2 * weights + state, shutil.disk_usage(context.scratch).free
    if disk > free:
        raise Refused(
            f"a snapshot and the checkpoint take {_gib(disk)} of disk, and {context.scratch} has {_gib(free)} free; "
            "free some, or keep the store on a larger disk"
        )


def _available_memory() -> int | None:
    """Bytes that this machine can still give, or the control group that we are in; None where nothing says so."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            # What the group holds for caches is given back when it is needed.
            statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            used = int(Path("/sys/fs/cgroup/memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            found.append(int(limit) - used)
    except (OSError, ValueError, IndexError):
        pass
    return min(found, default=None)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_same_tokenizer(
    model_folder: Path, data_tokenizer: Path, what: str, *, new_special_tokens: bool = False
) -> None:
    """The data was tokenized with the model's own tokenizer (its chat template may differ).

    Args:
        model_folder: a checkpoint; one without a tokenizer passes.
        data_tokenizer: the tokenizer folder of the dataset.
        what: how to call the data in a message.
        new_special_tokens: whether the data's tokenizer may have special tokens that the model's lacks.

    Raises:
        Refused: naming the first difference.
    """
    ours, theirs = _tokenizer_json(model_folder), _tokenizer_json(data_tokenizer)
    if ours is None or ours == theirs:
        return
    advice = "give the tokenize step this model as its tokenizer"
    if theirs is None:
        raise Refused(f"{what} holds no tokenizer.json, so it cannot be compared with the model's; {advice}")
    # One tokenizer is written in several ways: by releases that list merges as text, or with its own special tokens
    # in tokenizer_config.json alone. So what is compared is what comes of loading both.
    ours, theirs = _loaded(model_folder), _loaded(data_tokenizer)
    if ours == theirs:
        return
    own, other = _vocabulary(ours), _vocabulary(theirs)
    if new_special_tokens:
        new = [t for t in theirs.get("added_tokens", []) if t.get("special") and t["content"] not in own]
        theirs = theirs | {"added_tokens": [t for t in theirs.get("added_tokens", []) if t not in new]}
        other = _vocabulary(theirs)
        if ours == theirs:
            return
    if own != other:
        odd = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))[0]
        raise Refused(
            f"{what} was tokenized with another vocabulary than the model's ({len(other)} tokens against {len(own)}; "
            f"token {odd!r} is {other.get(odd, 'absent')} there and {own.get(odd, 'absent')} in the model); {advice}"
        )
    part = next(name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))
    raise Refused(f"{what} was tokenized with another tokenizer than the model's (its {part} differs); {advice}")


def _tokenizer_json(folder: Path) -> dict[str, Any] | None:
    """tokenizer.json without what changes no token id."""
    path = folder / "tokenizer.json"
    return _of_ids(path.read_text(encoding="utf-8")) if path.exists() else None


def _loaded(folder: Path) -> dict[str, Any]:
    """The same of the tokenizer that a tokenize step would load from the folder."""
    return _of_ids(load_tokenizer(folder).backend.to_str())


def _of_ids(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    for name in ("version", "truncation", "padding"):
        content.pop(name, None)
    return content


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    vocab = content.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # a unigram model lists [token, score]
        vocab = {entry[0]: index for index, entry in enumerate(vocab)}
    return dict(vocab) | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def largest_token(*arrays: np.ndarray) -> int:
    """The largest token id in integer arrays of any shape; -1 where all are empty."""
    return max((int(array.max()) for array in arrays if array.size), default=-1)
