"""What published model folders look like: they open, or are refused in a sentence before anything is trained."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import build
from test_checkpoint import tokenizer
from transformers import AutoModelForCausalLM

from stages.contract import Refused
from stages.modeling.checkpoint import load_model, save_checkpoint
from stages.sampling.checks import eos_token_ids


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    save_checkpoint(build("llama"), tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size": "32"}, "cannot be loaded: .*'hidden_size' expected int, got str"),
        ({"hidden_act": "nosuch"}, "cannot be loaded: KeyError: 'nosuch'"),
        ({"pad_token_id": 999}, "cannot be loaded: Padding_idx must be within"),
        ({"return_dict": False}, "cannot be run: .*; correct its config.json"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"is quantised \(quant_method gptq in its config\.json\); training needs plain weights",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is quantised"),
    ],
)
def test_a_config_that_makes_no_model_to_train_is_refused(folder, changes, why):
    edit(folder / "config.json", **changes)
    with pytest.raises(Refused, match=f"model model {why}"):
        load_model(folder)


@pytest.mark.parametrize(("kind", "called"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_are_codes_of_a_quantiser_are_refused(folder, kind, called):
    def change(weights):
        weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].to(kind)

    edit_weights(folder, change)
    with pytest.raises(Refused, match=rf"is quantised \(model\.layers\.1\.mlp\.up_proj\.weight is of type {called}\)"):
        load_model(folder)


def test_weights_that_the_config_has_no_place_for_are_refused_unless_they_are_left_out_aloud(folder):
    edit(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(Refused, match=r"without model\.layers\.1\.input_layernorm\.weight, which is in the file"):
        load_model(folder)
    told = []
    assert load_model(folder, leave_out=told.extend).config.num_hidden_layers == 1
    assert len(told) == 9


def test_a_folder_with_an_adapter_in_it_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(Refused, match="holds an adapter beside its weights"):
        load_model(folder)


def test_a_head_of_its_own_under_a_config_that_ties_it_is_kept_and_said_in_the_config(folder, tmp_path):
    head = torch.randn(61, 32)
    edit_weights(folder, lambda weights: weights.update({"lm_head.weight": head}))
    model = load_model(folder)
    assert torch.equal(model.lm_head.weight, head)
    (tmp_path / "saved").mkdir()
    save_checkpoint(model, tokenizer(), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_model(tmp_path / "saved").lm_head.weight, head)


def test_a_head_that_is_written_beside_the_embedding_it_equals_stays_tied(folder):
    edit_weights(
        folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    )
    model = load_model(folder)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("published", "kept"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}),
        ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, {}),
        ({"num_beams": 4, "length_penalty": 2.0}, {"num_beams": 4, "length_penalty": 2.0}),
        ({"output_scores": True, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"use_cache": False, "cache_implementation": "static"}, {"use_cache": False}),
        ({"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": -1}, {}),
        ({"eos_token_id": "</s>"}, {}),
    ],
)
def test_settings_of_generation_that_transformers_reads_and_does_not_write_lose_no_run(
    folder, tmp_path, published, kept
):
    (folder / "generation_config.json").write_text(json.dumps(published))
    model = load_model(folder)
    assert eos_token_ids(model, tokenizer()) == [1, 2]
    (tmp_path / "saved").mkdir()
    save_checkpoint(model, tokenizer(), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved.pop("eos_token_id"), saved.pop("pad_token_id")) == ([1, 2], 0)
    names = ("temperature", "top_p", "do_sample", "length_penalty", "early_stopping", "output_scores")
    names += ("repetition_penalty", "cache_implementation")
    assert {name: saved[name] for name in names if name in saved} == {
        name: value for name, value in kept.items() if name in names
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.validate(strict=True)
