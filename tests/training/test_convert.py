"""Model files become checkpoints, or a sentence that says why not."""

import json

import numpy as np
import pytest
import torch
from small_runs import make_tokenizer, small_model
from transformers import AutoModelForCausalLM

from stages.contract import Refused
from stages.convert.config import Config
from stages.convert.stage import run
from stages.modeling.checkpoint import save_checkpoint


def write_gguf(path, seed=0):
    """A Llama of two layers in the layout of llama.cpp, and the same weights under Hugging Face's names."""
    import gguf

    generator = np.random.default_rng(seed)
    tokens = ["<|endoftext|>", "<s>", "</s>", *[chr(0x100 + i) for i in range(19)], "\u0100\u0101"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 20)
    writer.add_token_merges([f"{tokens[3]} {tokens[4]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    shapes = {"token_embd": (23, 16), "output_norm": (16,), "output": (23, 16)}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(2):
        for short, name, shape in (
            ("attn_q", "self_attn.q_proj", (16, 16)),
            ("attn_k", "self_attn.k_proj", (8, 16)),
            ("attn_v", "self_attn.v_proj", (8, 16)),
            ("attn_output", "self_attn.o_proj", (16, 16)),
            ("ffn_gate", "mlp.gate_proj", (24, 16)),
            ("ffn_up", "mlp.up_proj", (24, 16)),
            ("ffn_down", "mlp.down_proj", (16, 24)),
            ("attn_norm", "input_layernorm", (16,)),
            ("ffn_norm", "post_attention_layernorm", (16,)),
        ):
            shapes[f"blk.{layer}.{short}"] = shape
            names[f"blk.{layer}.{short}"] = f"model.layers.{layer}.{name}"
    weights = {}
    for short, shape in shapes.items():
        value = generator.standard_normal(shape).astype(np.float32)
        weights[names[short] + ".weight"] = value
        heads = {"attn_q": 4, "attn_k": 2}.get(short.rpartition(".")[2])
        if heads:  # llama.cpp interleaves the two halves of a rotary pair
            value = value.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(short + ".weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_becomes_a_checkpoint_with_its_weights_and_tokenizer(attempt, tmp_path):
    pytest.importorskip("gguf")
    folder = tmp_path / "files"
    folder.mkdir()
    weights = write_gguf(folder / "tiny.gguf")
    trial = attempt(Config(), {"files": folder})
    run(trial.context)
    model = AutoModelForCausalLM.from_pretrained(trial.output)
    assert model.config.model_type == "llama"
    state = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(state[name], torch.from_numpy(value)), name
    assert json.loads((trial.output / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "m['content']" in (trial.output / "chat_template.jinja").read_text()
    assert trial.context.final_metrics["parameters"] == sum(value.size for value in weights.values())


def test_a_hugging_face_folder_is_saved_again_in_the_type_asked_for(attempt, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    save_checkpoint(small_model(), make_tokenizer(), folder)
    trial = attempt(Config(dtype="bfloat16"), {"files": folder})
    run(trial.context)
    model = AutoModelForCausalLM.from_pretrained(trial.output, dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = small_model().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name].bfloat16())


def test_which_file_is_meant_must_be_clear(attempt, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    with pytest.raises(Refused, match=r"neither a \*\.gguf file nor a config\.json"):
        run(attempt(Config(), {"files": folder}).context)
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"not a model")
    with pytest.raises(Refused, match=r"2 GGUF files \(a\.gguf, b\.gguf\); say which with gguf_file"):
        run(attempt(Config(), {"files": folder}).context)
    with pytest.raises(Refused, match=r"'\.\./x\.gguf' is not among the input's files \(a\.gguf, b\.gguf\)"):
        run(attempt(Config(gguf_file="../x.gguf"), {"files": folder}).context)
    with pytest.raises(Refused, match=r"a\.gguf is not a GGUF file"):
        run(attempt(Config(gguf_file="a.gguf"), {"files": folder}).context)


def test_a_gguf_file_cut_short_is_refused(attempt, tmp_path):
    pytest.importorskip("gguf")
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    whole = (folder / "tiny.gguf").read_bytes()
    (folder / "tiny.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused, match=r"tiny\.gguf cannot be read as a GGUF model"):
        run(attempt(Config(), {"files": folder}).context)
