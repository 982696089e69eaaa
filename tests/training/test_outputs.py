"""What a training stage leaves beside the weights: the plot, the trackers' logs, the figures of speed and memory."""

import json
import sys

import pytest
import torch
from small_runs import make_dataset, make_tokenizer, small_model

from stages.contract import Refused
from stages.modeling.checkpoint import save_checkpoint
from stages.modeling.dropout import disable_dropout
from stages.modeling.vocabulary import fit_embeddings
from stages.sft.config import Config
from stages.sft.stage import run
from stages.training.plot import draw_training
from stages.training.throughput import flops_per_token, peak_flops, peak_memory, utilisation
from stages.training.trackers import Trackers, run_name, start_trackers

SETTINGS = {"max_steps": 6, "train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 2}


def write_records(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step, loss, **more):
    return {"step": step, "loss": loss, "learning_rate": 1e-3 / step, "grad_norm": 1.0, **more}


def test_the_same_records_give_the_same_picture_and_others_another(tmp_path):
    records = tmp_path / "training.jsonl"
    pictures = []
    for loss in (2.0, 2.0, 1.0):
        write_records(records, line(1, 3.0), line(2, None, skipped=True), line(3, loss, eval_loss=2.5))
        draw_training(records, tmp_path / "training.png")
        pictures.append((tmp_path / "training.png").read_bytes())
    assert pictures[0].startswith(b"\x89PNG")
    assert pictures[0] == pictures[1]
    assert pictures[0] != pictures[2]
    assert b"matplotlib" not in pictures[0].lower()


def test_a_run_of_one_step_and_one_without_any_finite_loss_are_drawn(tmp_path):
    for lines in ([line(1, 3.0)], [line(1, None, skipped=True)]):
        write_records(tmp_path / "training.jsonl", *lines)
        draw_training(tmp_path / "training.jsonl", tmp_path / "training.png")


def test_a_checkpoint_holds_its_plot_and_the_sums_cover_it(attempt, tmp_path):
    data = make_dataset(tmp_path / "data", holds="chat")
    (tmp_path / "model").mkdir()
    save_checkpoint(small_model(), make_tokenizer(), tmp_path / "model")
    trial = attempt(Config(**SETTINGS), {"model": tmp_path / "model", "data": data})
    run(trial.context)
    assert "training.png" in {name.split()[1] for name in (trial.output / "SHA256SUMS").read_text().splitlines()}
    shown = [event["figures"] for event in trial.events if event["type"] == "progress"][-1]
    assert shown["memory_bytes"] > 2**20
    assert shown["tokens_per_second"] > 0
    assert "mfu" not in shown  # nobody knows the peak of this processor


def test_new_special_tokens_get_rows_that_are_the_mean_of_the_old_ones(attempt, tmp_path):
    (tmp_path / "model").mkdir()
    save_checkpoint(small_model(), make_tokenizer(), tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|think|>", "<|/think|>"]})
    data = make_dataset(tmp_path / "data", holds="chat", tokenizer=tokenizer)
    trial = attempt(Config(**SETTINGS | {"learning_rate": 0.0}), {"model": tmp_path / "model", "data": data})
    run(trial.context)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trial.output)
    embedding = model.get_input_embeddings().weight
    assert model.config.vocab_size == len(embedding) == 262
    torch.testing.assert_close(embedding[260:], embedding[:260].mean(0).expand(2, -1))
    assert model.get_output_embeddings().weight is embedding
    assert AutoTokenizer.from_pretrained(trial.output).convert_tokens_to_ids("<|/think|>") == 261
    config = Config(**SETTINGS | {"lora": {}})
    with pytest.raises(Refused, match="2 special tokens that the model lacks"):
        run(attempt(config, {"model": tmp_path / "model", "data": data}, key="cd" * 32).context)


def test_a_tokenizer_whose_ordinary_tokens_differ_is_still_refused(attempt, tmp_path):
    (tmp_path / "model").mkdir()
    save_checkpoint(small_model(), make_tokenizer(), tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["ordinary"])
    data = make_dataset(tmp_path / "data", holds="chat", tokenizer=tokenizer)
    with pytest.raises(Refused, match="'ordinary' is 260 there and absent in the model"):
        run(attempt(Config(**SETTINGS), {"model": tmp_path / "model", "data": data}).context)


def test_an_untied_head_with_enough_rows_is_left_alone():
    model = small_model(tied=False)
    before = model.lm_head.weight.clone()
    assert fit_embeddings(model, make_tokenizer()) == 0
    assert torch.equal(model.lm_head.weight, before)
    assert fit_embeddings(model, make_tokenizer(["<|a|>"])) == 1
    torch.testing.assert_close(model.lm_head.weight[260], before.mean(0))


def test_dropout_is_off_and_the_config_keeps_what_it_said():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, attention_dropout=0.5, **sizes)).train()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5)).train()
    ids = torch.arange(10)[None]
    for model in (llama, gpt2):
        assert not torch.equal(model(ids).logits, model(ids).logits)
        disable_dropout(model)
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert llama.config.attention_dropout == 0.5
    assert gpt2.config.resid_pdrop == 0.5


def test_noise_that_is_no_dropout_module_is_off_too():
    from transformers import (
        GPTBigCodeConfig,
        GPTBigCodeForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        OPTConfig,
        OPTForCausalLM,
    )

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    opt = OPTForCausalLM(
        OPTConfig(**sizes, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16, dropout=0.5, layerdrop=0.5)
    )
    starcoder = GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.5))
    mixtral = MixtralForCausalLM(
        MixtralConfig(
            **sizes, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, router_jitter_noise=0.5
        )
    )
    ids = torch.arange(10)[None]
    for model in (opt, starcoder, mixtral):
        without = model.eval()(ids).logits
        assert not torch.equal(model.train()(ids).logits, without)
        before = torch.get_rng_state()
        disable_dropout(model)
        assert torch.equal(torch.get_rng_state(), before)
        assert model.training
        torch.testing.assert_close(model(ids).logits, without)


def test_a_model_whose_dropout_cannot_be_switched_off_is_refused():
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    disable_dropout(FalconForCausalLM(FalconConfig(**sizes)))
    model = FalconForCausalLM(FalconConfig(**sizes, hidden_dropout=0.5))
    with pytest.raises(
        Refused, match=r"\(falcon\) stays random .* set hidden_dropout \(0\.5\) to 0 in its config\.json"
    ):
        disable_dropout(model)


def test_the_peak_is_that_of_the_data_sheet_and_unknown_devices_have_none():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("Some Future GPU") is None
    assert utilisation(6e9, 1000.0, torch.device("cpu")) is None


def test_a_step_costs_six_operations_for_each_weight_that_a_token_meets():
    tied, untied = small_model(True), small_model(False)
    weights = sum(param.numel() for param in tied.parameters())
    assert flops_per_token(tied) == 6 * weights
    assert flops_per_token(untied) == 6 * weights  # the head counts, the lookup does not
    assert peak_memory(torch.device("cpu")) > 10 * 2**20


def test_a_tracker_that_is_not_installed_is_refused_with_its_package(attempt):
    missing = [name for name in ("wandb", "mlflow", "trackio") if name not in sys.modules]
    for name in missing:
        try:
            __import__(name)
        except ImportError:
            config = Config(report_to=[name])
            with pytest.raises(Refused, match=f"report_to names {name}, which is not installed; pip install {name}"):
                start_trackers(attempt(config, {}).context, config)


def test_a_tracker_that_fails_is_named_once_and_training_goes_on(attempt):
    class Failing:
        name = "tensorboard"

        def log(self, values, step):
            raise OSError("no space left")

    trial = attempt(Config(), {})
    trackers = Trackers(trial.context, [Failing()])
    for step in (1, 2):
        trackers.log({"step": step, "loss": 1.0})
    trackers.close()
    assert [event["text"] for event in trial.events] == ["tracker tensorboard failed and is left out: no space left"]


def test_tensorboard_is_shown_every_logged_step(attempt, tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "boards"))
    data = make_dataset(tmp_path / "data", holds="chat")
    (tmp_path / "model").mkdir()
    save_checkpoint(small_model(), make_tokenizer(), tmp_path / "model")
    trial = attempt(Config(**SETTINGS | {"report_to": ["tensorboard"]}), {"model": tmp_path / "model", "data": data})
    run(trial.context)
    files = [path for path in (tmp_path / "boards").rglob("events.*") if b"tokens_per_second" in path.read_bytes()]
    assert len(files) == 1
    assert files[0].read_bytes().count(b"grad_norm") == 3  # steps 2, 4 and 6
    again, other = Config(**SETTINGS), Config(**SETTINGS | {"learning_rate": 1e-3})
    assert files[0].is_relative_to(tmp_path / "boards" / run_name(trial.context, again))
    assert run_name(trial.context, other) != run_name(trial.context, again)


def test_where_a_run_reports_to_is_no_identity():
    assert Config(report_to=["wandb"]).identity() == Config().identity()
    assert Config(lora={"r": 4}).identity()["lora"] == {"r": 4, "alpha": 32.0, "dropout": 0.0, "target_modules": None}
