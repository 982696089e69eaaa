"""TRL's SFTTrainer on given rows. Run by the interpreter of an environment with TRL; imports nothing of this project.

python _trl_side.py pack JOB.json    packs the documents of the job as TRL does, into the job's `rows`
python _trl_side.py train JOB.json   trains, and prints one JSON object
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.data_utils import pack_dataset


def documents(job):
    content = json.loads(Path(job["documents"]).read_text())
    return Dataset.from_dict({"input_ids": content["input_ids"], "completion_mask": content["completion_mask"]})


def pack(job):
    rows = pack_dataset(documents(job), job["row_length"], "bfd")
    Path(job["rows"]).write_text(json.dumps({name: list(rows[name]) for name in rows.column_names}))


class Clock(TrainerCallback):
    def __init__(self):
        self.times = []

    def on_step_begin(self, *args, **kwargs):
        self.times.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, *args, **kwargs):
        self.times.append((time.perf_counter(), time.process_time()))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(job):
    torch.set_num_threads(job["threads"])
    model = LlamaForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    settings = SFTConfig(
        output_dir=job["scratch"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch"],
        packing=job["packing"],
        max_length=job["row_length"],
        completion_only_loss=True,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=job["gradient_checkpointing"],
        bf16=False,
        use_cpu=True,
        seed=0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock, before = Clock(), resident()
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=documents(job), processing_class=tokenizer, callbacks=[clock]
    )
    sys.stdout, kept = sys.stderr, sys.stdout
    trainer.train()
    sys.stdout = kept
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"losses": losses, "times": clock.times, "memory": peak - before}))


if __name__ == "__main__":
    {"pack": pack, "train": train}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
