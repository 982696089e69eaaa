"""LoRA: only adapters train, the checkpoint has them merged, the adapter names its base, and both agree."""

import json
from functools import partial

import pytest
import torch
from small_runs import folder_bytes, make_dataset, make_tokenizer, small_model
from transformers import AutoModelForCausalLM

from stages.contract import Refused
from stages.dpo.config import Config as DpoConfig
from stages.grpo.config import Config as GrpoConfig
from stages.modeling.checkpoint import load_model, save_checkpoint
from stages.modeling.logprobs import has_plain_head, token_logprobs
from stages.modeling.lora import add_adapter, merge_adapter
from stages.sft.config import Config
from stages.sft.stage import run
from stages.training.config import LoRA

SETTINGS = {"max_steps": 6, "train_batch_size": 4, "learning_rate": 1e-2, "save_seconds": 0}


@pytest.fixture
def inputs(tmp_path):
    data = make_dataset(tmp_path / "data", holds="chat")
    (tmp_path / "model").mkdir()
    save_checkpoint(small_model(), make_tokenizer(), tmp_path / "model")
    return {"model": tmp_path / "model", "data": data}


def train(attempt, inputs, *, key="ab" * 32, digests=None, stop=lambda: False, **settings):
    trial = attempt(Config(**SETTINGS | settings), inputs, key=key, stop=stop)
    adapter = trial.output.parent / "adapter"
    adapter.mkdir()
    trial.context.side_outputs["adapter"] = adapter
    trial.context.digests.update(digests or {})
    run(trial.context)
    return trial, adapter


def test_the_merged_checkpoint_equals_the_adapter_on_its_base(attempt, inputs):
    from peft import PeftModel

    trial, adapter = train(attempt, inputs, digests={"model": "sha256:" + "0" * 64}, lora={"r": 4, "alpha": 8})
    base = AutoModelForCausalLM.from_pretrained(inputs["model"])
    ids = torch.arange(20)[None]
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    merged = AutoModelForCausalLM.from_pretrained(trial.output).eval()
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    assert (merged(ids).logits - before).abs().max() > 1e-2  # it has learnt something
    assert {path.name for path in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "artifact:sha256:" + "0" * 64
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_the_models_own_weights_do_not_train(attempt, inputs):
    trial, _ = train(attempt, inputs, lora={"target_modules": ["q_proj"]})
    before, after = load_model(inputs["model"]).state_dict(), load_model(trial.output).state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "model.layers.0.self_attn.q_proj.weight"
    }


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(attempt, inputs):
    from stages.contract import Stopped

    lora = {"lora": {"r": 4, "dropout": 0.1}}
    whole, whole_adapter = train(attempt, inputs, **lora)
    asked = iter([False] * 3 + [True] * 99)
    with pytest.raises(Stopped):
        train(attempt, inputs, key="cd" * 32, stop=lambda: next(asked), **lora)
    again, adapter = train(attempt, inputs, key="cd" * 32, **lora)
    assert any(event["type"] == "resumed" for event in again.events)
    assert folder_bytes(again.output) == folder_bytes(whole.output)
    assert folder_bytes(adapter) == folder_bytes(whole_adapter)


def test_without_lora_there_is_no_adapter(attempt, inputs):
    _, adapter = train(attempt, inputs)
    assert list(adapter.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (
            ["query"],
            r"the model has no layer 'query'; its linear layers are down_proj, .*q_proj, .*v_proj$",
        ),
        (["q_proj", "query"], "the model has no layer 'query'"),
        (["norm"], "'norm' is a Qwen3RMSNorm, which takes no adapter; the model's linear layers are down_proj"),
        (["q_proj", "lm_head"], "'lm_head' shares its weights with the model's embedding"),
        (["embed_tokens"], "'embed_tokens' shares its weights with the model's head"),
    ],
)
def test_a_layer_that_cannot_be_adapted_and_merged_is_refused_before_training(attempt, inputs, names, why):
    with pytest.raises(Refused, match=rf"lora\.target_modules: {why}"):
        train(attempt, inputs, lora={"target_modules": names})


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_head_and_an_embedding_of_their_own_can_be_adapted(name):
    model = small_model(tied=False)
    ids = torch.arange(20)[None]
    adapted = add_adapter(model, LoRA(target_modules=[name]), 0)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.3)
        before = model(ids).logits
        torch.testing.assert_close(merge_adapter(adapted)(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_an_adapted_head_is_seen_and_goes_through_its_own_forward():
    model = small_model(tied=False)
    assert has_plain_head(model)
    adapted = add_adapter(model, LoRA(target_modules=["lm_head"]), 0)
    torch.nn.init.ones_(model.lm_head.lora_B["default"].weight)
    assert not has_plain_head(model)
    ids = torch.arange(4, 14)[None]
    logs = torch.log_softmax(model(ids).logits, -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(token_logprobs(model, ids, torch.ones_like(ids))[0, 1:], logs, rtol=1e-5, atol=1e-5)
    merged = merge_adapter(adapted)
    assert has_plain_head(merged)
    torch.testing.assert_close(token_logprobs(merged, ids, torch.ones_like(ids))[0, 1:], logs, rtol=1e-4, atol=1e-4)


def test_equal_seeds_give_equal_adapters():
    weights = []
    for seed in (0, 0, 1):
        model = small_model()
        add_adapter(model, LoRA(r=2), seed)
        weights.append(torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("config", [DpoConfig, partial(GrpoConfig, reward_funcs=["a:b"])])
def test_dropout_of_adapters_is_not_asked_for_where_dropout_is_switched_off(config):
    with pytest.raises(ValueError, match=r"lora\.dropout is 0\.1 and disable_dropout is on; set lora\.dropout to 0"):
        config(lora={"dropout": 0.1})
    assert config(lora={"dropout": 0.1}, disable_dropout=False).lora.dropout == 0.1
    assert config(lora={}).lora.dropout == 0


def test_a_layer_whose_weights_are_taken_without_running_it_is_refused_before_training():
    from transformers import JambaConfig, JambaForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_experts": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    model = JambaForCausalLM(JambaConfig(**sizes, use_mamba_kernels=False, pad_token_id=None))
    with pytest.raises(Refused, match=r"\(jamba\) takes the weights of dt_proj without running it .*down_proj"):
        add_adapter(model, LoRA(r=2), 0)
