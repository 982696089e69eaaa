"""Low-rank adapters through peft (Hu et al., "LoRA", 2021, arXiv:2106.09685).

The model is changed in place: its linear layers get an adapter each and all of its own weights are frozen, so the
training loop trains what has a gradient and knows nothing of adapters. At the end the adapter is an artifact of its
own, which names its base, and the merged model is the checkpoint, an ordinary one for every later stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stages.contract import Refused
from stages.modeling.logprobs import forget_head
from stages.modeling.packing import evaluating
from stages.seeds import stream_seed
from stages.training.config import LoRA


def add_adapter(model: Any, lora: LoRA | None, seed: int) -> Any | None:
    """Freeze `model` and give it an adapter that starts as the identity; None, and nothing done, without `lora`.

    Args:
        model: a transformers causal LM; stays the object to train.
        lora: the settings.
        seed: of the adapter's initial weights.

    Returns:
        peft's view of the model, for `save_adapter` and `merge_adapter`.

    Raises:
        Refused: a name in `target_modules` is of no layer of the model, or of one that no adapter can be merged into.
    """
    if lora is None:
        return None
    from peft import LoraConfig, get_peft_model

    _check_targets(model, lora.target_modules or [])
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(stream_seed("lora", seed))
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise Refused(f"lora: {' '.join(str(error).split())}") from error
    _check_run(model)
    forget_head(model)  # the head may be adapted now
    return adapted


def _check_run(model: Any) -> None:
    """Check that adapted layers are run as layers. Some code takes the weights out of one and multiplies by itself.

    A layer that is not run although what it lies in is (experts may be idle as a whole) would not be adapted.

    Raises:
        Refused: naming them.
    """
    from peft.tuners.lora import LoraLayer

    run: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: run.add(name)) for name, module in model.named_modules()
    ]
    embedding = model.get_input_embeddings().weight
    ids = (torch.arange(16, device=embedding.device) * 7919 % embedding.shape[0])[None]
    try:
        with evaluating(model):
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    idle = {name.rpartition(".")[2] for name in adapted if name not in run and name.rpartition(".")[0] in run}
    if idle:
        others = sorted({name.rpartition(".")[2] for name in adapted} - idle)
        raise Refused(
            f"lora: the model ({model.config.model_type}) takes the weights of {', '.join(sorted(idle))} without"
            " running it as a layer, so an adapter on it would do nothing; set lora.target_modules to others, such as "
            f"{', '.join(others)}"
        )


def _check_targets(model: Any, targets: list[str]) -> None:
    """Check that each name is of layers that can be adapted, and be merged in the end.

    Raises:
        Refused: naming the one that is not.
    """
    modules = dict(model.named_modules())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    linear = sorted(
        {name.rpartition(".")[2] for name, part in modules.items() if _is_linear(part) and part is not head}
    )
    for target in targets:
        found = [part for name, part in modules.items() if name == target or name.endswith(f".{target}")]
        if not found:
            raise Refused(
                f"lora.target_modules: the model has no layer {target!r}; its linear layers are {', '.join(linear)}"
            )
        for part in found:
            if not _is_linear(part) and not isinstance(part, torch.nn.Embedding):
                raise Refused(
                    f"lora.target_modules: {target!r} is a {type(part).__name__}, which takes no adapter; the model's"
                    f" linear layers are {', '.join(linear)}"
                )
            if tied and (part is embedding or part is head):
                raise Refused(
                    f"lora.target_modules: {target!r} shares its weights with the model's"
                    f" {'head' if part is embedding else 'embedding'}, so an adapter of one of them cannot be merged;"
                    " leave it out, or train all weights"
                )


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def save_adapter(adapted: Any, folder: Path, base: str | None) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which `peft.PeftModel.from_pretrained` reads.

    Args:
        adapted: what `add_adapter` gave, not merged yet.
        folder: an existing folder.
        base: the artifact that the adapter belongs to, written as base_model_name_or_path.
    """
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    save_file(
        {name: weights[name].detach().cpu().contiguous() for name in sorted(weights)},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "adapter_model.safetensors").chmod(0o644)
    content = adapted.peft_config["default"].to_dict()
    content |= {"base_model_name_or_path": base, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}
    text = json.dumps(plain, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def merge_adapter(adapted: Any) -> Any:
    """The model with its adapter added into its weights: an ordinary model again.

    Raises:
        RuntimeError: its logits are not those of the adapted model.
    """
    model = adapted.get_base_model()
    embedding = model.get_input_embeddings().weight
    ids = (torch.arange(32, device=embedding.device) * 7919 % embedding.shape[0])[None]
    with evaluating(model):
        before = model(input_ids=ids, use_cache=False).logits.float()
    merged = adapted.merge_and_unload()
    forget_head(merged)
    with evaluating(merged):
        after = merged(input_ids=ids, use_cache=False).logits.float()
    tolerance = 1e-3 if merged.dtype == torch.float32 else 5e-2
    if not torch.allclose(before, after, rtol=tolerance, atol=tolerance):
        worst = (before - after).abs().max()
        raise RuntimeError(f"export gate: merging the adapter changes logits by {worst:.3g}; nothing is published")
    return merged
