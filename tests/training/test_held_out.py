"""The loss on the validation split: right, recorded, and without any effect on the training."""

import json

import pytest
import torch
from small_runs import folder_bytes, make_dataset
from transformers import AutoModelForCausalLM

from stages.artifacts import publish
from stages.contract import Refused
from stages.pretrain.config import Config as PretrainConfig
from stages.pretrain.stage import run as pretrain
from stages.tokenize.dataset import read_packed

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def config(**more):
    return PretrainConfig(
        **SIZES | {"train_batch_size": 4, "max_steps": 5, "learning_rate": 1e-2, "save_seconds": 0} | more
    )


def with_validation(folder, rows=7):
    """A dataset of which some rows, of another seed, are the validation split."""
    data = make_dataset(folder)
    other = make_dataset(folder.parent / "other", rows=rows, seed=1)
    (other / "train.safetensors").rename(data / "validation.safetensors")
    info = json.loads((data / "dataset.json").read_text())
    info["splits"]["validation"] = json.loads((other / "dataset.json").read_text())["splits"]["train"]
    (data / "dataset.json").write_text(json.dumps(info))
    return data


def records(folder):
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def loss_of(checkpoint, data):
    """Mean cross-entropy over the documents of the validation split, one by one, in float64."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    rows, total, count = read_packed(data, "validation"), 0.0, 0
    for ids, segments in zip(rows.input_ids, rows.segment_ids, strict=True):
        for document in range(1, segments.max() + 1):
            tokens = torch.as_tensor(ids[segments == document]).long()[None]
            with torch.no_grad():
                logs = torch.log_softmax(model(input_ids=tokens).logits, -1)[0, :-1]
            total -= logs.gather(-1, tokens[0, 1:, None]).sum().item()
            count += tokens.shape[1] - 1
    return total / count


def test_the_held_out_loss_is_that_of_the_weights_after_the_step_and_changes_none_of_them(attempt, tmp_path):
    data = with_validation(tmp_path / "data")
    outputs = []
    for key, settings in (("aa", {}), ("bb", {"eval_steps": 2}), ("cc", {"eval_steps": 2, "label_smoothing": 0.1})):
        trial = attempt(config(**settings), {"data": data}, key=key * 32)
        pretrain(trial.context)
        outputs.append(trial.output)
    plain, measured, smooth = outputs
    lines = records(measured)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 5]
    assert lines[-1]["eval_loss"] == pytest.approx(loss_of(measured, data), rel=1e-6)
    assert records(smooth)[-1]["eval_loss"] == pytest.approx(loss_of(smooth, data), rel=1e-6)
    assert lines[0]["loss"] != lines[1]["eval_loss"]
    assert (plain / "model.safetensors").read_bytes() == (measured / "model.safetensors").read_bytes()
    assert config(eval_steps=2).identity() != config().identity()  # training.jsonl is part of the artifact


def test_a_run_that_resumes_writes_the_same_held_out_losses(attempt, tmp_path):
    data = with_validation(tmp_path / "data")
    settings = config(eval_steps=2)
    whole = attempt(settings, {"data": data}, key="aa" * 32)
    pretrain(whole.context)
    checks = iter([False] * 3 + [True])
    with pytest.raises(BaseException, match="saved at step 3"):
        pretrain(attempt(settings, {"data": data}, key="bb" * 32, stop=lambda: next(checks)).context)
    again = attempt(settings, {"data": data}, key="bb" * 32)
    pretrain(again.context)
    assert folder_bytes(again.output) == folder_bytes(whole.output)
    assert again.context.final_metrics["eval_loss"] == records(whole.output)[-1]["eval_loss"]


def test_a_dataset_without_a_validation_split_is_refused(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    with pytest.raises(Refused, match=r"no validation split .* set validation_fraction in the step that made it"):
        pretrain(attempt(config(eval_steps=1), {"data": data}).context)


@pytest.mark.parametrize("distribution", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_ranks_share_the_measurement(stages, tmp_path, distribution):
    # 7 rows in passes of 2: two ranks have two passes each, one of which is only there to keep the ranks together.
    data = publish(stages.store, with_validation(tmp_path / "data"), "dataset")
    settings = SIZES | {"stage": "pretrain", "max_steps": 3, "eval_steps": 1, "inputs": {"data": data}}
    settings |= {"train_batch_size": 4, "per_device_train_batch_size": 2}
    losses = []
    for ranks in (1, 2):
        key = f"held out {distribution} {ranks}".encode().hex()
        lines = stages.records(stages.run(key, ranks, distribution=distribution, **settings))
        losses.append([line["eval_loss"] for line in lines])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
