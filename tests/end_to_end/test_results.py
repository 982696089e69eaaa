"""What a user takes away: a checkpoint that other programs open, and proof that it is whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import torch
from mini_runs import headrace
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_the_final_checkpoint_opens_with_plain_transformers_and_answers(finished: Path, tmp_path: Path) -> None:
    headrace(finished, "pull", "grpo", str(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "What is 31 - 17?"}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**encoded, max_new_tokens=5, do_sample=False)
    assert answer.shape[1] > encoded["input_ids"].shape[1]
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert all(torch.isfinite(value).all() for value in model.parameters())
    assert [json.loads(line)["step"] for line in (tmp_path / "model/training.jsonl").open()] == list(range(1, 9))


def test_a_pulled_folder_passes_sha256sum(finished: Path, tmp_path: Path) -> None:
    headrace(finished, "pull", "grpo", str(tmp_path / "model"))
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path / "model", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.safetensors: OK" in done.stdout


def test_one_flipped_byte_is_found_and_named(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    assert "ok" in headrace(folder, "verify").lower()
    sums = tmp_path / "model"
    headrace(folder, "pull", "sft", str(sums))
    digest = next(
        line.split()[0] for line in (sums / "SHA256SUMS").read_text().splitlines() if "model.safetensors" in line
    )
    blob = folder / ".headrace/blobs" / digest[:2] / digest
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    printed = headrace(folder, "verify", code=1)
    assert digest in printed
    assert "model.safetensors" in printed
    assert "1 damaged" in printed


def test_lineage_leads_from_the_model_to_the_raw_file_and_the_generators(finished: Path) -> None:
    tree = headrace(finished, "lineage", "grpo")
    for name in ("dpo", "reference", "pairs", "samples", "sft", "base", "corpus", "this.py", "arithmetic:documents"):
        assert name in tree
    assert json.loads(headrace(finished, "lineage", "grpo", "--json"))["root"].startswith("sha256:")


def test_a_result_is_reproduced_from_its_record_and_a_forged_record_is_found(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    before = sorted(folder.glob(".headrace/results/*/*.json"))
    said = json.loads(headrace(folder, "reproduce", "dpo", "--json"))
    assert said["same"] is True
    assert said["reproduced"] == said["recorded"]
    assert sorted(folder.glob(".headrace/results/*/*.json")) == before
    (record,) = folder.glob(".headrace/results/dpo/*.json")
    result = json.loads(record.read_text())
    result["config"]["beta"] = 0.5
    record.chmod(0o644)
    record.write_text(json.dumps(result))
    said = json.loads(headrace(folder, "reproduce", "dpo", "--json", code=1))
    assert said["same"] is False
    assert "model.safetensors" in said["differing"]
