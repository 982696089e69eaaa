"""What tests/benchmarks/gpu.sh runs. Of this project it imports only what needs no package beyond torch and
transformers; the resume check uses the engine's own snapshots where the engine can be imported, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.modeling.attention import NAME
from stages.modeling.logprobs import has_plain_head, token_loss
from stages.modeling.packing import flatten, runs_flat
from stages.training.throughput import flops_per_token, peak_memory, utilisation

VOCABULARY = 151_936
MODELS = {
    "0.1B": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536},
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 6144},
}
TINY = {"tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}}
BUDGET = 420.0  # seconds after which no further measurement is begun


def build(sizes: dict[str, int], vocabulary: int, device: torch.device) -> Any:
    """A Qwen3 with tied embeddings and fp32 weights; its attention's weights are large enough to matter."""
    torch.manual_seed(0)
    heads = sizes["num_attention_heads"]
    config = Qwen3Config(
        vocab_size=vocabulary,
        num_key_value_heads=max(1, heads // 2),
        head_dim=sizes["hidden_size"] // heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        **sizes,
    )
    with device:
        return Qwen3ForCausalLM(config).train()


def packed_rows(rows: int, length: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, segment ids and target mask [rows, length]: documents of 1/16 to 1/2 of a row, all tokens targets."""
    generator = random.Random(0)
    segments = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows):
        at, number = 0, 1
        while at < length:
            size = min(generator.randint(length // 16, length // 2), length - at)
            segments[row, at : at + size], mask[row, at] = number, 0
            at, number = at + size, number + 1
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    return ids.to(device), segments.to(device), mask.to(device)


def half_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bf16 products on a GPU, fp32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def chunked_loss(model: Any, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
    """The loss as the engine computes it."""
    return token_loss(model, ids, mask, segment_ids=segments)[0] / mask.sum()


def whole_loss(model: Any, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
    """The same, with the same attention, but with the logits of the whole batch."""
    flat = flatten(ids, segments)
    logits = model(input_ids=flat.input_ids, use_cache=False, **flat.inputs()).logits[0]
    row, column = (mask[:, 1:] != 0).nonzero(as_tuple=True)
    place = flat.place[row * ids.shape[1] + column]
    return functional.cross_entropy(logits[place].float(), ids[row, column + 1])


def measure(model: Any, loss_of: Callable[..., Tensor], batch: Any, steps: int, device: torch.device) -> dict[str, Any]:
    """Train for a few steps and take the time of all but the first three."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first = last = begin = 0.0
    for step in range(steps + 3):
        if step == 3:
            _wait(device)
            begin = time.perf_counter()
        with half_precision(device):
            loss = loss_of(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            first = loss.item()
    last = loss.item()
    _wait(device)
    rate = steps * batch[0].numel() / (time.perf_counter() - begin)
    return {
        "tokens_per_second": rate,
        "mfu": utilisation(flops_per_token(model), rate, device),
        "peak_memory_gib": peak_memory(device) / 2**30,
        "first_loss": first,
        "final_loss": last,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def documents_apart(model: Any, device: torch.device) -> float:
    """The greatest difference of a logit between packed documents and the same documents alone, over their spread."""
    vocabulary = model.config.vocab_size
    ids, segments, _ = packed_rows(2, 128, vocabulary, device)
    flat = flatten(ids, segments)
    worst, at = 0.0, 0
    with torch.no_grad(), half_precision(device):
        packed = model(input_ids=flat.input_ids, use_cache=False, **flat.inputs()).logits[0].float()
        for size in flat.documents.lengths:
            alone = model(input_ids=flat.input_ids[:, at : at + size], use_cache=False).logits[0].float()
            worst = max(worst, float((packed[at : at + size] - alone).abs().max() / alone.std()))
            at += size
    return worst


def resume_check(device: torch.device) -> dict[str, Any]:
    """Six steps at once against three, a snapshot on disk, a new model, and three more."""
    sizes, vocabulary = TINY["tiny"], 512

    def start() -> tuple[Any, torch.optim.Optimizer]:
        model = build(sizes, vocabulary, device)
        runs_flat(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def go_on(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            ids, segments, mask = packed_rows(4, 256, vocabulary, device)
            with half_precision(device):
                loss = chunked_loss(model, (ids + step) % vocabulary, segments, mask)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    whole, optimizer = start()
    go_on(whole, optimizer, range(6))
    first, optimizer = start()
    go_on(first, optimizer, range(3))
    second, fresh = start()
    with tempfile.TemporaryDirectory() as folder:
        how = _carry_over(Path(folder), first, optimizer, second, fresh)
    go_on(second, fresh, range(3, 6))
    pairs = zip(whole.parameters(), second.parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return {"snapshot": how, "greatest_difference": worst, "equal_to_the_bit": worst == 0.0}


def _carry_over(folder: Path, model: Any, optimizer: Any, other: Any, fresh: Any) -> str:
    """Write the state of `model` and read it into `other`. Returns whose format was used."""
    try:
        from stages.training.distributed import wrap
        from stages.training.resume import Progress, read_snapshot, write_snapshot
    except ImportError as error:
        names = [name for name, _ in model.named_parameters()]
        tensors = {f"model/{name}": param.detach() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            tensors |= {f"optimizer/{name}/{slot}": value for slot, value in optimizer.state[param].items()}
        save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, folder / "state.safetensors")
        saved = load_file(folder / "state.safetensors")
        params = dict(other.named_parameters())
        with torch.no_grad():
            for name in names:
                params[name].copy_(saved[f"model/{name}"])
                slots = optimizer.state[dict(model.named_parameters())[name]]
                fresh.state[params[name]] = {
                    slot: saved[f"optimizer/{name}/{slot}"].to(params[name].device) for slot in slots
                }
        return f"plain tensors (the engine's own needs {error.name})"
    records = folder / "training.jsonl"
    records.write_text("")
    write_snapshot(folder / "snapshot", Progress(step=3), wrap(model, "ddp"), [optimizer], {}, records)
    read_snapshot(folder / "snapshot", wrap(other, "ddp"), [fresh], records)
    return "the engine's own"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/benchmarks/gpu.sh")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU")
    tiny = parser.parse_args().tiny
    begun = time.monotonic()
    if not torch.cuda.is_available() and not tiny:
        raise SystemExit("PyTorch sees no GPU here; --tiny runs on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    figures: dict[str, dict[str, Any]] = {}
    rows, length, steps, vocabulary = (4, 256, 2, 5000) if tiny else (8, 2048, 10, VOCABULARY)
    for name, sizes in (TINY if tiny else MODELS).items():
        for head, loss_of in (("chunked", chunked_loss), ("whole", whole_loss)):
            if time.monotonic() - begun > BUDGET:
                print(f"{name} {head}: left out, the time is up", flush=True)
                continue
            model = build(sizes, vocabulary, device)
            assert has_plain_head(model)
            assert model.config._attn_implementation == NAME
            batch = packed_rows(rows, length, vocabulary, device)
            row = measure(model, loss_of, batch, steps, device)
            if head == "chunked":
                row["difference_packed_from_alone"] = documents_apart(model.eval(), device)
            figures[f"{name} {head}"] = {key: value for key, value in row.items() if value is not None}
            print(f"{name} {head}: {json.dumps(figures[f'{name} {head}'])}", flush=True)
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    resumed = resume_check(device)
    print(f"resume: {json.dumps(resumed)}", flush=True)
    ratios = {}
    for name in TINY if tiny else MODELS:
        ours, whole = figures.get(f"{name} chunked"), figures.get(f"{name} whole")
        if ours and whole:
            ratios[f"{name}_speed_over_whole_logits"] = ours["tokens_per_second"] / whole["tokens_per_second"]
            ratios[f"{name}_memory_over_whole_logits"] = ours["peak_memory_gib"] / whole["peak_memory_gib"]
            ratios[f"{name}_first_loss_difference"] = abs(ours["first_loss"] - whole["first_loss"])
    machine = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    result = {"benchmark": "gpu", "ratios": ratios, "goals": {}, "figures": figures, "resume": resumed}
    print(json.dumps(result | {"seconds": round(time.monotonic() - begun, 1), "machine": machine}))


if __name__ == "__main__":
    main()
