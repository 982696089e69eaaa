"""Checkpoints are plain Hugging Face folders, the same bytes every time, and proven to open."""

import json
import subprocess

import pytest
import torch
from small_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel, PreTrainedTokenizerFast

from stages.contract import Refused
from stages.modeling.checkpoint import check_export, end_of_turn_ids, load_model, load_tokenizer, save_checkpoint

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}<eot>{% endfor %}"


def tokenizer(size: int = 61) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<eot>", "<u>"])}
    vocab |= {chr(0x100 + i): i for i in range(4, size)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>", "<eot>", "<u>"])
    result = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    result.chat_template = TEMPLATE
    return result


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_opens_a_saved_checkpoint_with_the_same_logits(tmp_path, name, tied):
    model = build(name, tied)
    save_checkpoint(model, tokenizer(), tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, reloaded(ids).logits)
    same = reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight
    assert same == tied
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE


def test_saving_twice_gives_the_same_bytes_and_no_path(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_checkpoint(build("qwen3"), tokenizer(), tmp_path / name)
    loaded = load_model(tmp_path / "a")
    (tmp_path / "c").mkdir()
    save_checkpoint(loaded, load_tokenizer(tmp_path / "a"), tmp_path / "c")
    files = [path.name for path in sorted((tmp_path / "a").iterdir())]
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "SHA256SUMS"} <= set(files)
    for file in files:
        first = (tmp_path / "a" / file).read_bytes()
        assert first == (tmp_path / "b" / file).read_bytes()
        assert first == (tmp_path / "c" / file).read_bytes()
        assert str(tmp_path).encode() not in first


def test_sha256sum_accepts_the_sums_and_they_cover_every_file(tmp_path):
    (tmp_path / "training.jsonl").write_text("{}\n")
    save_checkpoint(build("llama"), tokenizer(), tmp_path)
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)
    named = {line.split("  ")[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()}
    assert named == {path.name for path in tmp_path.iterdir()} - {"SHA256SUMS"}


def test_generation_ends_at_the_end_of_turn_of_the_chat_template_too(tmp_path):
    assert end_of_turn_ids(tokenizer()) == [1, 2]
    save_checkpoint(build("llama"), tokenizer(), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_a_temperature_without_do_sample_does_not_stop_a_save(tmp_path):
    model = build("llama")
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = False
    save_checkpoint(model, tokenizer(), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_template_that_refuses_the_conversation_leaves_the_end_of_sequence():
    other = tokenizer()
    other.chat_template = "{{ raise_exception('only one turn') }}"
    assert end_of_turn_ids(other) == [1]


def test_the_gate_refuses_a_folder_that_is_not_the_live_model(tmp_path):
    model = build("qwen3")
    save_checkpoint(model, tokenizer(), tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] += 1
    with pytest.raises(RuntimeError, match="logits of the saved folder differ by"):
        check_export(model, tokenizer(), tmp_path)


def test_the_gate_refuses_a_tokenizer_larger_than_the_embedding(tmp_path):
    with pytest.raises(RuntimeError, match="the tokenizer has 70 tokens, the embedding only 61 rows"):
        save_checkpoint(build("qwen3"), tokenizer(70), tmp_path)


def test_loading_refuses_what_it_cannot_trust_or_use(tmp_path):
    with pytest.raises(Refused, match=r"config\.json is missing"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refused, match=r"config\.json is not JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}))
    with pytest.raises(Refused, match="code of its own"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(Refused, match=r"no \*\.safetensors"):
        load_model(tmp_path)
    with pytest.raises(Refused, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_truncated_or_incomplete_weight_file_is_refused(tmp_path):
    save_checkpoint(build("qwen3"), tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(Refused, match="weights are missing"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Refused, match="cannot be loaded"):
        load_model(tmp_path)


def test_weights_of_another_size_than_the_config_says_are_named(tmp_path):
    save_checkpoint(build("llama"), tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(Refused, match=r"mlp\.down_proj\.weight is \[32, 48\] in the file and \[32, 96\] by the config"):
        load_model(tmp_path)


def test_an_encoder_that_sees_the_tokens_it_predicts_is_refused(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for decoder in (False, True):
        config = BertConfig(**sizes, num_attention_heads=4, is_decoder=decoder, initializer_range=0.2)
        BertLMHeadModel(config).save_pretrained(tmp_path)
        if decoder:
            assert load_model(tmp_path).config.is_decoder
        else:
            with pytest.raises(Refused, match=r"\(bert\) is no causal language model"):
                load_model(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(Refused, match="gives values that are not finite"):
        load_model(tmp_path)


def test_loaded_weights_lie_on_64_byte_boundaries(tmp_path):
    save_checkpoint(build("qwen3"), tokenizer(), tmp_path)
    model = load_model(tmp_path)
    assert all(param.data_ptr() % 64 == 0 for param in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_model_that_ran_on_flattened_documents_saves_the_same_bytes(tmp_path):
    from stages.modeling.packing import runs_flat

    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        model = build("llama")
        assert name == "before" or runs_flat(model)
        save_checkpoint(model, tokenizer(), tmp_path / name)
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()


def test_the_gate_refuses_names_that_a_wrapper_gave(tmp_path):
    from safetensors.torch import load_file, save_file

    model = build("llama", tied=False)
    save_checkpoint(model, tokenizer(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["_orig_mod.lm_head.weight"] = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="export gate"):
        check_export(model, tokenizer(), tmp_path)


def test_the_gate_refuses_a_config_with_another_vocabulary_size_or_dtype(tmp_path):
    model = build("llama")
    save_checkpoint(model, tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(RuntimeError, match=r"saved in torch\.bfloat16, the live model is torch\.float32"):
        check_export(model, tokenizer(), tmp_path)


def test_the_gate_refuses_a_lost_end_of_turn_and_a_lost_template(tmp_path):
    model = build("llama")
    save_checkpoint(model, tokenizer(), tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 1}))
    with pytest.raises(RuntimeError, match="does not end at token 2"):
        check_export(model, tokenizer(), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RuntimeError, match="the chat template is lost"):
        check_export(model, tokenizer(), tmp_path)


def test_the_gate_refuses_a_tie_that_is_lost(tmp_path):
    model = build("llama", tied=True)
    save_checkpoint(build("llama", tied=False), tokenizer(), tmp_path)
    with pytest.raises(RuntimeError, match="the tie between embedding and head is lost"):
        check_export(model, tokenizer(), tmp_path)


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "Qwen2Tokenizer", None])
def test_a_tokenizer_is_what_its_file_says_whatever_class_the_folder_names(tmp_path, named):
    """SmolLM2 splits digits by its tokenizer.json and names GPT2Tokenizer, which transformers builds without that."""
    before, after = tmp_path / "before", tmp_path / "after"
    after.mkdir()
    written_by = tokenizer()
    written_by.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    written_by.save_pretrained(before)
    config = json.loads((before / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (before / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_checkpoint(build("llama"), load_tokenizer(before), after)
    written, kept = (json.loads((folder / "tokenizer.json").read_text()) for folder in (before, after))
    assert kept["pre_tokenizer"] == written["pre_tokenizer"]
    opened = AutoTokenizer.from_pretrained(after)
    assert json.loads(opened.backend_tokenizer.to_str())["pre_tokenizer"] == written["pre_tokenizer"]


def test_the_end_of_a_turn_is_found_in_templates_that_take_contents_in_parts_and_nowhere_else():
    parts = tokenizer()
    parts.chat_template = (
        "{% for m in messages %}<u>{% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<eot>{% endfor %}"
    )
    assert end_of_turn_ids(parts) == [1, 2]
    mute = tokenizer()
    mute.chat_template = "<u>{% for m in messages %}<u>{% endfor %}<eot>"
    assert end_of_turn_ids(mute) == [1]
