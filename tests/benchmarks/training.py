"""The training engine against TRL's SFTTrainer (packed and unpacked) and a bare PyTorch loop, on a CPU in fp32.

Everyone trains the same model from the same weights on the same documents in the same order and steps, with AdamW and
the loss on the second half of each document. Each run is a process of its own, so that its peak memory is its own; the
sides take turns. Speed is in tokens of documents a second, padding not counted, over the steps after the first two; and
in tokens a second of CPU time over all threads, which other work on the machine disturbs less. What saving costs is in
CPU time too, with that of the thread that uploads. Memory is what training adds to a process that has loaded the model.

python -m tests.benchmarks.training [--quick] [--side NAME JOB]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks._machine import ROOT, machine, peer_python

ROW, BATCH = 512, 8  # tokens of a row, rows of a step; each row is two documents
WARMUP = 2  # first steps that are not timed
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 688}
WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
TRL = ("trl_packed", "trl_unpacked", "trl_packed_no_recompute")


def make_documents(path: Path, rows: int, vocabulary: int) -> None:
    """Pairs of documents that fill a row each: arithmetic progressions of tokens, so that they can be learnt."""
    generator = random.Random(0)
    ids, masks = [], []
    for _ in range(rows):
        length = generator.randint(64, ROW - 64)
        for size in (length, ROW - length):
            start, stride = generator.randrange(vocabulary), generator.randint(1, 5)
            ids.append([4 + (start + stride * place) % (vocabulary - 4) for place in range(size)])
            masks.append([int(place >= size // 2) for place in range(size)])
    path.write_text(json.dumps({"input_ids": ids, "completion_mask": masks}))


def make_model(folder: Path, vocabulary: int, sizes: dict[str, int]) -> int:
    """A Llama with tied embeddings and its tokenizer. Returns its parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=ROW, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"t{index}": index for index in range(2, 8)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def arrays(job: dict[str, Any]) -> Any:
    """The rows that TRL packed, as int32 token ids and segment ids and uint8 masks, [rows, ROW] each."""
    import numpy as np

    content = json.loads(Path(job["rows"]).read_text())
    segments = [[n + 1 for n, size in enumerate(sizes) for _ in range(size)] for sizes in content["seq_lengths"]]
    assert all(len(sizes) == 2 and sum(sizes) == ROW for sizes in content["seq_lengths"])
    return (
        np.array(content["input_ids"], np.int32),
        np.array(segments, np.int32),
        np.array(content["completion_mask"], np.uint8),
    )


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """The engine, as the sft stage calls it, but for the order of the rows, which is the others'."""
    import numpy as np

    from stages.artifacts import WorkArea, open_store
    from stages.contract import Resources, StageContext
    from stages.modeling.checkpoint import load_model
    from stages.training.causal_lm import CausalLM
    from stages.training.config import TrainingConfig
    from stages.training.device import prepare
    from stages.training.loop import RECORDS, train

    times: list[tuple[float, float]] = []

    class InOrder(CausalLM):
        def micro_batches(self, step: int) -> Any:
            times.append((time.perf_counter(), time.process_time()))
            return self.batches(np.arange(step * BATCH, (step + 1) * BATCH))

    scratch = Path(job["scratch"])
    config = TrainingConfig(
        max_steps=job["steps"],
        train_batch_size=BATCH,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        save_seconds=0,
        save_steps=job.get("save_steps"),
    )
    prepare(Resources(threads=job["threads"]), 0, "cpu")
    model = load_model(job["model"])
    before = resident()
    for name in ("output", "tmp", "work"):
        (scratch / name).mkdir(parents=True)
    context: Any = StageContext(
        config=config,
        inputs={},
        output=scratch / "output",
        work=WorkArea(open_store(scratch / "store"), "ab" * 32, scratch / "work"),
        scratch=scratch / "tmp",
        resources=Resources(threads=job["threads"]),
        emit=lambda event: None,
        stop=lambda: False,
    )
    train(context, config, model, None, InOrder(*arrays(job), config), total_steps=job["steps"])
    times.append((time.perf_counter(), time.process_time()))
    losses = [json.loads(line)["loss"] for line in (context.output / RECORDS).read_text().splitlines()]
    return {"losses": losses, "times": times, "memory": peak() - before}


def bare(job: dict[str, Any]) -> dict[str, Any]:
    """What a person writes in twenty lines: whole logits, transformers' own masks for packed rows."""
    import torch
    from transformers import LlamaForCausalLM

    from stages.modeling.packing import position_ids_of

    torch.set_num_threads(job["threads"])
    model = LlamaForCausalLM.from_pretrained(job["model"], dtype=torch.float32).train()
    before = resident()
    ids, segments, masks = (torch.from_numpy(array).long() for array in arrays(job))
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"], weight_decay=0.0, fused=True)
    times, losses = [], []
    for step in range(job["steps"]):
        times.append((time.perf_counter(), time.process_time()))
        part = slice(step * BATCH, (step + 1) * BATCH)
        labels = ids[part].masked_fill(masks[part] == 0, -100)
        positions = position_ids_of(segments[part])
        loss = model(input_ids=ids[part], position_ids=positions, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    times.append((time.perf_counter(), time.process_time()))
    return {"losses": losses, "times": times, "memory": peak() - before}


def peak() -> int:
    """The most bytes of memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Arena:
    """One model and its rows, and runs of the sides on them."""

    def __init__(self, folder: Path, vocabulary: int, sizes: dict[str, int], steps: int, threads: int) -> None:
        folder.mkdir()
        self.folder, self.runs = folder, 0
        self.trl = peer_python("trl", "trl==1.16.*")
        make_documents(folder / "documents.json", steps * BATCH, vocabulary)
        self.parameters = make_model(folder / "model", vocabulary, sizes)
        self.job: dict[str, Any] = {
            "documents": str(folder / "documents.json"),
            "rows": str(folder / "rows.json"),
            "ordered": str(folder / "ordered.json"),
            "model": str(folder / "model"),
            "steps": steps,
            "row_length": ROW,
            "threads": threads,
            "learning_rate": 1e-3,
        }
        self._call([self.trl, str(Path(__file__).with_name("_trl_side.py")), "pack"], self.job)
        # The documents in the order in which TRL's packing has put them, for the side that does not pack.
        rows = json.loads((folder / "rows.json").read_text())
        unpacked: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
        for ids, mask, lengths in zip(rows["input_ids"], rows["completion_mask"], rows["seq_lengths"], strict=True):
            at = 0
            for length in lengths:
                unpacked["input_ids"].append(ids[at : at + length])
                unpacked["completion_mask"].append(mask[at : at + length])
                at += length
        (folder / "ordered.json").write_text(json.dumps(unpacked))

    def _call(self, command: list[str], job: dict[str, Any]) -> str:
        path = self.folder / f"job-{self.runs}.json"
        path.write_text(json.dumps(job))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run([*command, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return done.stdout

    def run(self, side: str, **more: Any) -> dict[str, float]:
        """One run of a side: its speeds, memory (MB), first and last loss, and CPU seconds of all its steps."""
        self.runs += 1
        job = self.job | {"scratch": str(self.folder / f"run-{self.runs}")} | more
        if side in TRL:
            packed = side != "trl_unpacked"
            job |= {"packing": packed, "batch": BATCH if packed else 2 * BATCH}
            job |= {"gradient_checkpointing": side != "trl_packed_no_recompute"}
            job["documents"] = job["documents"] if packed else job["ordered"]
            command = [self.trl, str(Path(__file__).with_name("_trl_side.py")), "train"]
        else:
            command = [sys.executable, "-m", "tests.benchmarks.training", "--side", side]
        result = json.loads(self._call(command, job).strip().splitlines()[-1])
        times = result["times"]
        tokens = (job["steps"] - WARMUP) * BATCH * ROW
        wall, cpu = (end - start for start, end in zip(times[WARMUP], times[-1], strict=True))
        return {
            "tokens_per_second": tokens / wall,
            "tokens_per_cpu_second": tokens / cpu,
            "memory_mb": result["memory"] / 1e6,
            "first_loss": result["losses"][0],
            "final_loss": result["losses"][-1],
            "cpu_seconds": times[-1][1] - times[0][1],
        }


def check_equal(runs: dict[str, dict[str, float]]) -> float:
    """The greatest difference of a loss from ours, at the first and the last step.

    Raises:
        SystemExit: one is above 1e-3, so the sides do not compute the same.
    """
    worst = 0.0
    for name, run in runs.items():
        for key in ("first_loss", "final_loss"):
            difference = abs(run[key] - runs["ours"][key])
            worst = max(worst, difference)
            if difference > 1e-3:
                raise SystemExit(f"{name} has a {key} of {run[key]:.5f}, ours is {runs['ours'][key]:.5f}: not equal")
    return worst


def measure(quick: bool) -> dict[str, Any]:
    """All comparisons; the result is what the last line prints."""
    threads = len(os.sched_getaffinity(0))
    steps, rounds = (6, 1) if quick else (12, 3)
    sides = ("ours", *TRL, "bare")
    here = machine()  # the load of others, before ours adds to it
    with tempfile.TemporaryDirectory() as temporary:
        small = Arena(Path(temporary) / "small", 8192, SIZES, steps, threads)
        print(f"{small.parameters:,} parameters, {steps} steps of {BATCH} rows of {ROW} tokens", flush=True)
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in sides:
                runs[side].append(small.run(side))
                print(f"round {number + 1}: {side:<24} {runs[side][-1]['tokens_per_second']:8.0f} tokens/s", flush=True)
            if number == 0:
                worst = check_equal({side: found[0] for side, found in runs.items()})
        figures = {
            side: {
                "tokens_per_second": statistics.median(run["tokens_per_second"] for run in found),
                "tokens_per_cpu_second": statistics.median(run["tokens_per_cpu_second"] for run in found),
                "memory_mb": statistics.median(run["memory_mb"] for run in found),
                "final_loss": found[0]["final_loss"],
            }
            for side, found in runs.items()
        }

        saving = Arena(Path(temporary) / "saving", 8192, SIZES | {"num_hidden_layers": 1}, 22 if quick else 62, threads)
        plain, saved = [], []
        for _ in range(rounds):
            plain.append(saving.run("ours")["cpu_seconds"])
            saved.append(saving.run("ours", save_steps=20)["cpu_seconds"])
        overhead = statistics.median(saved) / statistics.median(plain) - 1

        wide = Arena(Path(temporary) / "wide", 150_000, WIDE, 3, threads)
        memory = {}
        for side in ("ours", "trl_packed", "bare"):
            memory[side] = wide.run(side)
            print(f"vocabulary of 150,000: {side:<12} {memory[side]['memory_mb']:8.0f} MB", flush=True)
            figures[side]["memory_mb_at_150k"] = memory[side]["memory_mb"]
        check_equal(memory)

    speed = {side: row["tokens_per_second"] for side, row in figures.items()}
    per_cpu = {side: row["tokens_per_cpu_second"] for side, row in figures.items()}
    wide_ours = memory["ours"]["memory_mb"]
    return {
        "benchmark": "training",
        "quick": quick,
        "ratios": {
            "speed_over_trl_packed": speed["ours"] / speed["trl_packed"],
            "speed_over_trl_packed_without_recomputation": speed["ours"] / speed["trl_packed_no_recompute"],
            "speed_over_trl_unpacked": speed["ours"] / speed["trl_unpacked"],
            "speed_over_bare_loop": speed["ours"] / speed["bare"],
            "speed_over_trl_packed_per_cpu_second": per_cpu["ours"] / per_cpu["trl_packed"],
            "speed_over_bare_loop_per_cpu_second": per_cpu["ours"] / per_cpu["bare"],
            "memory_over_trl_at_vocabulary_150k": wide_ours / memory["trl_packed"]["memory_mb"],
            "memory_over_bare_loop_at_vocabulary_150k": wide_ours / memory["bare"]["memory_mb"],
            "overhead_of_saving_every_20_steps": overhead,
            "greatest_difference_of_a_loss": worst,
        },
        "goals": {
            "speed_over_trl_packed": [">=", 2.3],
            "speed_over_bare_loop": [">=", 1.0],
            "memory_over_trl_at_vocabulary_150k": ["<=", 0.5],
            "overhead_of_saving_every_20_steps": ["<=", 0.02],
            "greatest_difference_of_a_loss": ["<=", 1e-3],
        },
        "figures": figures,
        "notes": [
            f"A Llama of {small.parameters / 1e6:.1f}M parameters in fp32, {steps} steps of {BATCH} rows of {ROW}"
            " tokens, two documents a row, the loss on half of the tokens. TRL runs as it comes (it recomputes"
            " activations), and once without recomputation. Memory is what training adds to a process that has loaded"
            " the model."
        ],
        "machine": here,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training")
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument("--side", nargs=2, metavar=("NAME", "JOB"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        name, path = given.side
        print(json.dumps({"ours": ours, "bare": bare}[name](json.loads(Path(path).read_text()))))
        return
    print(json.dumps(measure(given.quick)))


if __name__ == "__main__":
    main()
