"""A small store with everything that pages show, written as stages and runs write it, without training anything.

Two runs of one recipe: source -> corpus -> base -> sft -> grpo (with its rollouts) -> report. The second run reused
corpus and base, and trained sft with another learning rate. `production` was moved three times.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stages.artifacts import (
    Result,
    Store,
    append_log,
    canonical_json,
    import_files,
    promote,
    publish,
    write_result,
    write_run,
)
from stages.artifacts.manifest import sha256_hex
from stages.fingerprint import stage_key
from stages.tokenize.dataset import create_packed

FIRST, SECOND = "golden-otter", "brave-tern"
LEAKED = '{"text": "the planted sentence"}\n'
STEPS = ("corpus", "base", "sft", "grpo", "report")
DOCUMENTS = ("Water runs downhill. ", "Mills grind the corn. ", "The sluice is open: ±3 °C. ")


@dataclass
class SmallStore:
    """The store, and the digests in it: `made["golden-otter"]["sft"]`, `made["golden-otter"]["grpo/rollouts"]`."""

    store: Store
    folder: Path
    source: str = ""
    made: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)  # (run, step) -> stage key

    def publish(self, name: str, kind: str, files: dict[str, bytes]) -> str:
        """Publish files as an artifact."""
        folder = self.folder / name
        for path, data in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return publish(self.store, folder, kind)

    def result(self, step: str, kind: str, digest: str, run: str, **more: Any) -> Result:
        """Write the record of a step."""
        stage = {"corpus": "tokenize", "base": "pretrain", "report": "evaluate"}.get(step, step)
        files = {f"stages/{step}/stage.py": {"sha256": "d" * 64}}
        code = "sha256:" + sha256_hex(canonical_json({path: entry["sha256"] for path, entry in files.items()}))
        fields = {
            "artifact": digest,
            "kind": kind,
            "stage": stage,
            "step": step,
            "key": stage_key(stage, more.get("identity", {}), more.get("inputs", {}), code),
            "run": run,
            "code": {"digest": code, "files": files},
            "environment": {"python": "3.11.7", "libraries": {"torch": "2.13.0"}},
            "started": "2026-01-02T03:04:00+00:00",
            "finished": f"2026-01-02T03:0{4 + STEPS.index(step) if step in STEPS else 9}:05+00:00",
            "seconds": 65.0,
            "logs": f"logs/{run}/{step}.jsonl",
            **more,
        }
        result = write_result(self.store, Result.model_validate(fields))
        self.keys[run, step] = result.key
        return result


def tokenizer() -> Tokenizer:
    """A byte-level BPE of 280 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(DOCUMENTS, trainer)
    return made


def dataset_files(folder: Path, rows: int = 12, length: int = 96) -> dict[str, bytes]:
    """The files of a chat dataset: each row packs the three documents; all but their first 5 tokens are trained."""
    made = tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    packed = create_packed(folder / "train.safetensors", rows, length)
    tokens = trained = 0
    for row in range(rows):
        at = 0
        for number, text in enumerate(DOCUMENTS, 1):
            ids = made.encode(text).ids[: length - at]
            packed.input_ids[row, at : at + len(ids)] = ids
            packed.segment_ids[row, at : at + len(ids)] = number
            packed.loss_mask[row, at + 5 : at + len(ids)] = 1
            at += len(ids)
            trained += max(0, len(ids) - 5)
        tokens += at
    for array in (packed.input_ids, packed.segment_ids, packed.loss_mask):
        np.memmap.flush(array)
    split = {"rows": rows, "documents": 3 * rows, "tokens": tokens, "target_tokens": trained, "bytes": 100}
    info = {
        "holds": "chat",
        "row_length": length,
        "splits": {"train": split},
        "vocab_size": 280,
        "kept": 36,
        "dropped": {},
    }
    return {
        "dataset.json": json.dumps(info).encode(),
        "tokenizer/tokenizer.json": made.to_str().encode(),
        "train.safetensors": (folder / "train.safetensors").read_bytes(),
    }


def training(steps: int, start: float, reward: bool = False) -> bytes:
    """A training.jsonl whose loss falls from `start`."""
    rows = []
    for step in range(1, steps + 1):
        row: dict[str, float] = {"step": step, "loss": start / step**0.3, "grad_norm": 1.0 + 1 / step}
        if reward:
            row["reward"] = 1 - 1 / step
        if step % 10 == 0:
            row["eval_loss"] = start / step**0.3 + 0.1
        rows.append(json.dumps(row))
    return ("\n".join(rows) + "\n").encode()


def rollouts(count: int = 45) -> bytes:
    """A rollouts.parquet."""
    table = {
        "step": pa.array(range(count), pa.int32()),
        "id": [f"p{number}" for number in range(count)],
        "prompt": [f"What is {number} + 1?" for number in range(count)],
        "prompt_ids": pa.array([[1, 2]] * count, pa.list_(pa.int32())),
        "completion": [f"Answer: {number + 1}" for number in range(count)],
        "reward": [float(number % 2) for number in range(count)],
        "finished": [True] * count,
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table), sink, row_group_size=10)
    return sink.getvalue().to_pybytes()


def report(sft: float, grpo: float) -> bytes:
    """A report.json of two models."""
    content = {
        "models": {
            "sft": {"bits_per_byte": 2.0, "exact_match": sft, "exact_match_stderr": 0.01},
            "grpo": {"bits_per_byte": 1.9, "exact_match": grpo, "exact_match_stderr": 0.01},
        },
        "samples": [
            {
                "prompt": "What is 31 - 17?",
                "answers": {
                    "sft": {"completion": "Answer: 13", "correct": False},
                    "grpo": {"completion": "Answer: 14", "correct": True},
                },
            }
        ],
        "counts": {"prompts": 500},
    }
    return json.dumps(content, indent=2).encode()


def build(store: Store, folder: Path) -> SmallStore:
    """Write the whole of it."""
    small = SmallStore(store, folder)
    raw = folder / "raw"
    raw.mkdir(parents=True)
    (raw / "train.jsonl").write_text(LEAKED + '{"text": "another"}\n')
    (raw / "notes.txt").write_text("".join(f"line {number} of the notes\n" for number in range(6000)))
    small.source = import_files(store, [(path.name, path) for path in sorted(raw.iterdir())], "source")
    first: dict[str, str] = {}
    first["corpus"] = small.publish("corpus", "dataset", dataset_files(folder / "rows"))
    small.result(
        "corpus",
        "dataset",
        first["corpus"],
        FIRST,
        inputs={"data.files": small.source},
        metrics={"rows": 12.0, "tokens": 800.0},
    )
    first["base"] = small.publish("base", "checkpoint", _checkpoint(b"base weights", training(400, 6.0)))
    small.result("base", "checkpoint", first["base"], FIRST, inputs={"data": first["corpus"]}, metrics={"loss": 1.1})
    small.made = {FIRST: first, SECOND: {name: first[name] for name in ("corpus", "base")}}
    for run, rate, grpo in ((FIRST, 0.02, 0.9), (SECOND, 0.03, 0.95)):
        _align(small, run, rate, grpo)
        _document(small, run)
    who = "ada@mill"
    promote(store, "production", first["sft"], who=who, why="first of its kind")
    promote(store, "production", first["grpo"], who=who, why="exact match 90.0%")
    promote(store, "production", small.made[SECOND]["grpo"], who=who, why="exact match 95.0% vs 90.0%")
    return small


def _checkpoint(weights: bytes, log: bytes) -> dict[str, bytes]:
    header = b'{"w":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}'
    tensors = len(header).to_bytes(8, "little") + header + hashlib.sha256(weights).digest()[:4]
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 280}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": tensors, "training.jsonl": log}


def _align(small: SmallStore, run: str, rate: float, grpo: float) -> None:
    made = small.made[run]
    settings = {"learning_rate": rate, "max_steps": 40}
    made["sft"] = small.publish(f"{run}/sft", "checkpoint", _checkpoint(run.encode(), training(40, 2.0 + rate)))
    small.result(
        "sft",
        "checkpoint",
        made["sft"],
        run,
        inputs={"model": made["base"], "data": made["corpus"]},
        config=settings | {"device": "auto"},
        identity=settings,
        metrics={"loss": 0.2 + rate},
    )
    made["grpo"] = small.publish(f"{run}/grpo", "checkpoint", _checkpoint(b"g" + run.encode(), training(30, 1.0, True)))
    made["grpo/rollouts"] = small.publish(f"{run}/rollouts", "rollouts", {"rollouts.parquet": rollouts()})
    small.result(
        "grpo",
        "checkpoint",
        made["grpo"],
        run,
        outputs={"rollouts": made["grpo/rollouts"]},
        inputs={"model": made["sft"]},
        metrics={"reward": grpo},
    )
    made["report"] = small.publish(f"{run}/report", "report", {"report.json": report(0.3, grpo)})
    small.result(
        "report",
        "report",
        made["report"],
        run,
        inputs={"models.sft": made["sft"], "models.grpo": made["grpo"]},
        metrics={"sft/exact_match": 0.3, "grpo/exact_match": grpo},
    )


def document(run: str, state: str, steps: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The document of a run, as runs write it."""
    return {
        "id": run,
        "recipe": "mill",
        "recipe_path": "/recipes/mill.yaml",
        "recipe_text": "name: mill\nsteps: {}\n",
        "overrides": [],
        "sources": {},
        "host": "mill",
        "state": state,
        "started": "2026-01-02T03:04:00.000+00:00",
        "finished": "2026-01-02T03:14:00.000+00:00" if state != "running" else None,
        "seconds": 600.0 if state != "running" else None,
        "steps": steps,
        **more,
    }


def step(stage: str, needs: tuple[str, ...] = (), status: str = "waiting", **more: Any) -> dict[str, Any]:
    """A step in the document of a run."""
    return {
        "stage": stage,
        "needs": list(needs),
        "inputs": {},
        "status": status,
        "reason": "",
        "key": None,
        "artifact": None,
        "outputs": {},
        "seconds": None,
        "metrics": {},
        "message": "",
        "code": None,
        "attempts": 0,
        "saved_step": None,
        "logs": None,
        **more,
    }


_NEEDS = {"corpus": (), "base": ("corpus",), "sft": ("base", "corpus"), "grpo": ("sft",), "report": ("sft", "grpo")}


def _document(small: SmallStore, run: str) -> None:
    steps = {}
    for name in STEPS:
        reused = run == SECOND and name in ("corpus", "base")
        why = (
            "never run"
            if run == FIRST
            else ""
            if reused
            else "learning_rate 0.02 -> 0.03"
            if name == "sft"
            else "input model changed"
        )
        outputs = {"rollouts": small.made[run]["grpo/rollouts"]} if name == "grpo" else {}
        steps[name] = step(
            {"corpus": "tokenize", "base": "pretrain", "report": "evaluate"}.get(name, name),
            _NEEDS[name],
            "cached" if reused else "done",
            reason=why,
            key=small.keys[FIRST if reused else run, name],
            artifact=small.made[run][name],
            outputs=outputs,
            seconds=0.1 if reused else 65.0,
            metrics={"loss": 1.1} if name == "base" else {},
            attempts=0 if reused else 1,
            logs=None if reused else f"logs/{run}/{name}.jsonl",
            started=None if reused else "2026-01-02T03:04:00.000+00:00",
        )
        if not reused:
            append_log(small.store, run, name, log(name))
    steps["corpus"]["inputs"] = {"data.files": "raw/*.jsonl"}
    started = "2026-01-02T03:04:00.000+00:00" if run == FIRST else "2026-01-03T03:04:00.000+00:00"
    overrides = [] if run == FIRST else ["sft.learning_rate=0.03"]
    write_run(
        small.store,
        document(run, "done", steps, sources={"corpus.data.files": small.source}, overrides=overrides, started=started),
    )


def log(name: str, first: int = 1, count: int = 20) -> list[dict[str, Any]]:
    """Events of a step's log."""
    events: list[dict[str, Any]] = [
        {"time": 1767323040.0, "step": name, "type": "log", "level": "info", "text": f"{name} begins"}
    ]
    for at in range(first, first + count):
        values = {"loss": 3.0 / at, "learning_rate": 0.01}
        events.append({"time": 1767323040.0 + at, "step": name, "type": "metric", "at": at, "values": values})
    return events
