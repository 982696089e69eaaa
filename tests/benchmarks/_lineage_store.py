"""A store of any size for measuring lineage: real manifests, results, runs and references, with small blobs.

Every run has twenty steps: four datasets that fifty runs share, then sixteen of its own, of which four have a side
output. Records are as large as real ones (the fingerprints are those of the stages). Every object has the form
of docs/artifacts.md, is written without fsync, and every blob is there, so the store can be verified.

    python -m tests.benchmarks._lineage_store FOLDER [--runs 5000]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.artifacts import FileEntry, Manifest
from stages.artifacts.manifest import blob_key, manifest_key, sha256_hex
from stages.contract import config_class
from stages.fingerprint import stage_fingerprint

SHARED = 50  # runs that train on the same data
SECOND = 3600.0
BEGIN = 1_700_000_000.0
# step -> (stage, kind, inputs, side output)
DATA = {
    "corpus": ("tokenize", "dataset", ("source",), None),
    "chat": ("tokenize", "dataset", ("corpus",), None),
    "prompts": ("tokenize", "dataset", ("corpus",), None),
    "questions": ("tokenize", "dataset", ("corpus",), None),
}
MODELS: dict[str, tuple[str, str, tuple[str, ...], str | None]] = {
    "base": ("pretrain", "checkpoint", ("corpus",), None),
    "sft": ("sft", "checkpoint", ("base", "chat"), "adapter"),
    "samples": ("rollout", "rollouts", ("sft", "prompts"), None),
    "pairs": ("tokenize", "dataset", ("samples", "corpus"), None),
    "reference": ("reference", "logprobs", ("sft", "pairs"), None),
    "dpo": ("dpo", "checkpoint", ("sft", "pairs", "reference"), "adapter"),
    "grpo": ("grpo", "checkpoint", ("dpo", "prompts"), "rollouts"),
    "report": ("evaluate", "report", ("base", "sft", "dpo", "grpo", "questions"), None),
    "sft2": ("sft", "checkpoint", ("grpo", "chat"), None),
    "samples2": ("rollout", "rollouts", ("sft2", "prompts"), None),
    "pairs2": ("tokenize", "dataset", ("samples2", "corpus"), None),
    "reference2": ("reference", "logprobs", ("sft2", "pairs2"), None),
    "dpo2": ("dpo", "checkpoint", ("sft2", "pairs2", "reference2"), None),
    "grpo2": ("grpo", "checkpoint", ("dpo2", "prompts"), "rollouts"),
    "report2": ("evaluate", "report", ("sft2", "dpo2", "grpo2", "questions"), None),
    "final": ("convert", "checkpoint", ("grpo2",), None),
}
PATHS = {
    "source": ["data.jsonl"],
    "dataset": ["dataset.json", "rows.parquet", "tokenizer.json"],
    "checkpoint": ["config.json", "model.safetensors", "tokenizer.json", "training.jsonl", "SHA256SUMS"],
    "logprobs": ["logprobs.parquet"],
    "rollouts": ["rollouts.jsonl"],
    "report": ["report.json"],
    "adapter": ["adapter_config.json", "adapter_model.safetensors"],
}


class Builder:
    """Writes a store into a folder."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root = root
        self._rng = random.Random(seed)
        self._folders: set[str] = set()
        self._codes = {stage: self._code(stage) for stage in {entry[0] for entry in (DATA | MODELS).values()}}
        self.artifacts = 0
        self.results = 0

    def runs(self, count: int, first: int = 0) -> None:
        """Write runs number `first` to `first + count - 1`, each after those before it."""
        shared: dict[str, str] = {}
        for number in range(first, first + count):
            if not shared or number % SHARED == 0:
                shared = self._data(number)
            self._run(number, dict(shared))

    def ref(self, name: str, digests: list[str]) -> None:
        """Write a reference that named these artifacts, the last of them now."""
        history = [
            {
                "number": number,
                "artifact": digest,
                "previous": digests[number - 2] if number > 1 else None,
                "who": "ada@node-7",
                "when": _iso(BEGIN + number * SECOND),
                "why": "better",
                "restores": None,
            }
            for number, digest in enumerate(digests, 1)
        ]
        value = {"name": name, "artifact": digests[-1], "history": history}
        self._put(f"refs/{name}.json", json.dumps(value, indent=1).encode())

    def _data(self, number: int) -> dict[str, str]:
        made = {"source": self._artifact("source", f"source {number}")}
        for step, (stage, kind, needs, _) in DATA.items():
            made[step] = self._step(number, step, stage, kind, {name: made[name] for name in needs}, None)["artifact"]
        return made

    def _run(self, number: int, made: dict[str, str]) -> None:
        steps: dict[str, Any] = {}
        for position, (step, (stage, kind, needs, side)) in enumerate((DATA | MODELS).items()):
            inputs = {name: made[name] for name in needs}
            if step in DATA:
                result, status = {"artifact": made[step], "key": _key(step, inputs)}, "cached"
            else:
                result, status = self._step(number, step, stage, kind, inputs, side), "done"
                made[step] = result["artifact"]
            begun = BEGIN + number * SECOND + position * 60
            steps[step] = {
                "stage": stage,
                "needs": [name for name in needs if name != "source"],
                "inputs": {name: name for name in needs},
                "status": status,
                "reason": "" if status == "cached" else "never run",
                "key": result["key"],
                "artifact": result["artifact"],
                "outputs": result.get("outputs", {}),
                "seconds": 55.0,
                "metrics": result.get("metrics", {}),
                "message": "",
                "code": 0,
                "attempts": 1,
                "saved_step": None,
                "logs": f"logs/{run_name(number)}/{step}.jsonl",
                "started": _iso(begun),
                "finished": _iso(begun + 55),
            }
        document = {
            "id": run_name(number),
            "recipe": f"recipe-{number % 7}",
            "recipe_text": "steps:\n" + "  step: {}\n" * 60,
            "state": "done",
            "sources": {"corpus.data": made["source"]},
            "started": _iso(BEGIN + number * SECOND),
            "finished": _iso(BEGIN + number * SECOND + 1200),
            "seconds": 1200.0,
            "steps": steps,
        }
        self._put(f"runs/{run_name(number)}.json", json.dumps(document, indent=1).encode())

    def _step(
        self, number: int, step: str, stage: str, kind: str, inputs: dict[str, str], side: str | None
    ) -> dict[str, Any]:
        key = _key(step, inputs) if step in DATA else _key(f"{step} {number}", inputs)
        artifact = self._artifact(kind, f"{step} {number}")
        outputs = {side: self._artifact(side, f"{step} {side} {number}")} if side else {}
        begun = BEGIN + number * SECOND + list(DATA | MODELS).index(step) * 60
        config = {"learning_rate": self._rng.choice([1e-3, 2e-3, 5e-4]), "seed": number}
        result = {
            "artifact": artifact,
            "outputs": outputs,
            "kind": kind,
            "stage": stage,
            "step": step,
            "key": key,
            "run": run_name(number),
            "config": config,
            "identity": config,
            "inputs": inputs,
            "code": None,
            "environment": {"python": "3.11.7", "libraries": {"torch": "2.10.0"}, "host": "node-7", "processes": 1},
            "started": _iso(begun),
            "finished": _iso(begun + 55),
            "seconds": 55.0,
            "attempts": 1,
            "metrics": {
                name: round(self._rng.random(), 6)
                for name in ("loss", "reward", "exact_match", "tokens_per_second", "entropy", "steps")
            },
            "logs": f"logs/{run_name(number)}/{step}.jsonl",
            "record": {"git": {"commit": "0" * 40, "changed": False}},
            "accepted_from": None,
            "token": 1,
            "history": [],
        }
        # Indenting the fingerprint anew for each of 80,000 results would take minutes.
        text = json.dumps(result, indent=1).replace('"code": null', f'"code": {self._codes[stage]}', 1)
        self._put(f"results/{stage}/{key}.json", text.encode())
        self.results += 1
        return result

    def _artifact(self, kind: str, what: str) -> str:
        files = []
        for path in PATHS[kind]:
            own = path not in ("dataset.json", "config.json", "tokenizer.json", "training.jsonl", "SHA256SUMS")
            text = what if own else f"{path} {self._rng.randrange(20)}"
            files.append(FileEntry(path, len(text) + 1, self._blob(text + "\n")))
        manifest = Manifest(kind, tuple(files))
        self._put(manifest_key(manifest.digest), manifest.to_json())
        self.artifacts += 1
        return manifest.digest

    def _blob(self, text: str) -> str:
        data = text.encode()
        sha256 = sha256_hex(data)
        if not os.path.exists(self.root / blob_key(sha256)):
            self._put(blob_key(sha256), data)
        return sha256

    def _code(self, stage: str) -> str:
        found = stage_fingerprint(stage, [], [])
        version = config_class(stage).VERSION
        record = {"mode": "closure", "digest": found.digest, "version": version, "files": found.files}
        return json.dumps(record, indent=1).replace("\n", "\n ")

    def _put(self, key: str, data: bytes) -> None:
        folder = key.rpartition("/")[0]
        if folder not in self._folders:
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            self._folders.add(folder)
        with open(f"{self.root}/{key}", "wb") as file:
            file.write(data)


def run_name(number: int) -> str:
    return f"run-{number:05d}"


def _key(what: str, inputs: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([what, inputs]).encode()).hexdigest()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def build(folder: Path, runs: int) -> Builder:
    """A new store of that many runs in a folder, with the references `production` and `nightly`.

    Returns:
        The builder, to add more runs with.
    """
    builder = Builder(folder)
    builder.runs(runs)
    digests = []
    for number in sorted({0, runs // 2, runs - 1}):
        document = json.loads((folder / f"runs/{run_name(number)}.json").read_text())
        digests.append(document["steps"]["final"]["artifact"])
    builder.ref("production", digests)
    builder.ref("nightly", digests[::-1])
    return builder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5000)
    given = parser.parse_args()
    begun = time.perf_counter()
    builder = build(given.folder, given.runs)
    print(f"{builder.artifacts} artifacts, {builder.results} results in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
