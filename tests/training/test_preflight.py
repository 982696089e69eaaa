"""A run that cannot work ends before its first step, with a sentence that says what to change (code 83)."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_runs import make_dataset, make_tokenizer, small_model

from stages.contract import Refused, Resources
from stages.modeling.checkpoint import check_tokenizer_export
from stages.pretrain.config import Config as PretrainConfig
from stages.pretrain.stage import run as pretrain
from stages.sft.config import Config as SftConfig
from stages.sft.stage import run as sft
from stages.tokenize.config import TokenizerTrainingConfig
from stages.tokenize.tokenizer import load_tokenizer, train_tokenizer
from stages.training.device import prepare
from stages.training.preflight import check_same_tokenizer

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def pretrain_config(**more):
    return PretrainConfig(**SIZES, **{"max_steps": 2, "train_batch_size": 4, "learning_rate": 1e-2} | more)


@pytest.fixture
def base(attempt, tmp_path):
    """A checkpoint trained for two steps."""
    trial = attempt(pretrain_config(), {"data": make_dataset(tmp_path / "base-data")}, key="ba" * 32)
    pretrain(trial.context)
    return trial.output


def change_rows(folder, change):
    tensors = load_file(folder / "train.safetensors")
    change(tensors)
    save_file(tensors, folder / "train.safetensors")


def test_sft_trains_the_assistants_turns_and_saves_the_datasets_template(attempt, base, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    data = make_dataset(tmp_path / "chats", holds="chat", tokenizer=tokenizer)
    trial = attempt(SftConfig(max_steps=2, train_batch_size=4), {"model": base, "data": data})
    sft(trial.context)
    first = json.loads((trial.output / "training.jsonl").read_text().splitlines()[0])
    targets = load_file(data / "train.safetensors")["loss_mask"].sum(axis=1)
    assert first["weight"] in {int(np.sort(targets)[i : i + 4].sum()) for i in range(9)} | set(
        range(int(targets.sum()))
    )
    assert (trial.output / "chat_template.jinja").read_text() == tokenizer.chat_template
    assert trial.context.final_metrics["steps"] == 2


def test_pretraining_goes_on_from_a_checkpoint(attempt, base, tmp_path):
    data = make_dataset(tmp_path / "more", seed=3)
    trial = attempt(pretrain_config(learning_rate=0.0), {"data": data, "model": base})
    pretrain(trial.context)
    assert (trial.output / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_another_vocabulary_than_the_models_is_refused_by_name(attempt, base, tmp_path):
    data = make_dataset(tmp_path / "chats", holds="chat", tokenizer=make_tokenizer(extra=["<|tool|>"]))
    with pytest.raises(Refused, match=r"another vocabulary than the model's \(261 tokens against 260; token '!'") as e:
        sft(attempt(SftConfig(), {"model": base, "data": data}).context)
    assert "give the tokenize step this model as its tokenizer" in str(e.value)


def test_another_splitting_with_the_same_vocabulary_is_refused(attempt, base, tmp_path):
    data = make_dataset(tmp_path / "chats", holds="chat")
    path = data / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"another tokenizer than the model's \(its pre_tokenizer differs\)"):
        sft(attempt(SftConfig(), {"model": base, "data": data}).context)


def test_token_ids_beyond_the_embedding_are_refused(attempt, base, tmp_path):
    data = make_dataset(tmp_path / "data", holds="chat")
    change_rows(data, lambda tensors: tensors["input_ids"].__setitem__((0, 0), 999))
    with pytest.raises(Refused, match="tokenized with 1000 tokens, but the model's embedding has only 260 rows"):
        sft(attempt(SftConfig(train_batch_size=2), {"model": base, "data": data}).context)


def test_rows_longer_than_the_models_positions_are_refused(attempt, base, tmp_path):
    data = make_dataset(tmp_path / "data", length=24, holds="chat")
    with pytest.raises(Refused, match=r"rows of 24 tokens, but the model has only 16 positions.*shorter row_length"):
        sft(attempt(SftConfig(train_batch_size=2), {"model": base, "data": data}).context)


def test_a_batch_larger_than_the_data_is_refused(attempt, tmp_path):
    data = make_dataset(tmp_path / "data", rows=5)
    with pytest.raises(Refused, match="train_batch_size is 6, but input data has only 5 rows"):
        pretrain(attempt(pretrain_config(train_batch_size=6), {"data": data}).context)


def test_an_empty_split_is_refused(attempt, tmp_path):
    data = make_dataset(tmp_path / "data", rows=0)
    with pytest.raises(Refused, match="the train split has no rows"):
        pretrain(attempt(pretrain_config(), {"data": data}).context)


def test_data_in_which_nothing_is_trained_is_refused(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    change_rows(data, lambda tensors: tensors["loss_mask"].fill(0))
    with pytest.raises(Refused, match="no token of the train split is trained on"):
        pretrain(attempt(pretrain_config(), {"data": data}).context)


def test_rows_without_targets_among_others_are_passed_over(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    change_rows(data, lambda tensors: tensors["loss_mask"][:3].fill(0))
    trial = attempt(pretrain_config(per_device_train_batch_size=1, max_steps=3), {"data": data})
    pretrain(trial.context)
    losses = [json.loads(line)["loss"] for line in (trial.output / "training.jsonl").read_text().splitlines()]
    assert all(5 < loss < 6 for loss in losses)  # ln 260 = 5.56


def test_a_gpu_that_is_not_there_is_refused():
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(Refused, match=r"resources\.gpus: 1, but PyTorch sees no GPU here"):
            prepare(Resources(gpus=1), 0)
        with pytest.raises(Refused, match="device: cuda, but"):
            prepare(Resources(), 0, "cuda")


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(ValueError, match="2 processes cannot share 1 gpus: each needs one of its own"):
        Resources(gpus=1, processes=2)
    assert Resources(processes=2).processes == 2  # on the CPU


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "must be a multiple of num_attention_heads"),
        ({"hidden_size": 12, "num_attention_heads": 4}, r"head_dim \(3\) must be even"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**settings)


def test_a_tokenizer_that_is_written_in_an_older_form_is_still_the_models_own(tmp_path):
    """Releases of tokenizers before 0.20 wrote merges as text; most published models have such a file."""
    model, data = tmp_path / "model", tmp_path / "data"
    train_tokenizer(iter(["the cat sat on the mat"] * 3), TokenizerTrainingConfig(vocab_size=270)).save(model)
    load_tokenizer(model).save(data)
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    assert content["model"]["merges"]
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["model"]["ignore_merges"]
    path.write_text(json.dumps(content))
    check_same_tokenizer(model, data, "input data")
    content["model"]["merges"] = content["model"]["merges"][:-1]
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match="another tokenizer than the model's"):
        check_same_tokenizer(model, data, "input data")


def test_a_tokenizer_that_transformers_opens_as_another_one_is_refused_before_training(tmp_path):
    """transformers gives a Qwen2 model the tokenizer class of Qwen2, which adds its own end of text."""
    from transformers import Qwen2Config

    model = SimpleNamespace(config=Qwen2Config(vocab_size=260))
    with pytest.raises(Refused, match=r"type qwen2, the saved tokenizer has another vocabulary .*'<\|endoftext\|>' is"):
        check_tokenizer_export(model, make_tokenizer(), tmp_path)
    check_tokenizer_export(model, make_tokenizer(["<|endoftext|>"]), tmp_path)
    check_tokenizer_export(small_model(), make_tokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []
