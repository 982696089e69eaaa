"""Right values: transformers' own loss, float64 PyTorch, and documents that never see each other."""

import pytest
import torch
from small_models import build
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM

from stages.modeling import head
from stages.modeling.logprobs import has_plain_head, token_logprobs, token_loss
from stages.modeling.packing import attention_inputs, flatten, keeps_documents_apart, position_ids_of, runs_flat

FAMILIES = [(name, tied) for name in ("llama", "qwen3", "gpt2") for tied in (True, False)]


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def all_targets(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    return mask


def own_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """Plain PyTorch on the model's own logits: [1, length], 0 in the first column."""
    logs = functional.log_softmax(model(input_ids=ids).logits, dim=-1)
    picked = logs[:, :-1].gather(-1, ids[:, 1:, None].long())[..., 0]
    return functional.pad(picked, (1, 0))


@pytest.mark.parametrize(("name", "tied"), FAMILIES)
def test_the_summed_loss_equals_transformers_own_loss(name, tied):
    model, ids = build(name, tied), tokens(3, 11)
    mask = all_targets(ids)
    mask[0, 4:7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, labels=labels).loss
    ours = -token_logprobs(model, ids, mask).sum() / mask.sum()
    assert has_plain_head(model)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "tied"), FAMILIES)
def test_values_and_gradients_equal_plain_float64_pytorch(name, tied):
    model, ids = build(name, tied).double(), tokens(2, 9)
    mask = all_targets(ids)
    mask[1, 5:] = 0
    ours = token_logprobs(model, ids, mask)
    assert ours.dtype == torch.float64
    (-ours.sum()).backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    plain = own_logprobs(model, ids) * mask
    (-plain.sum()).backward()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral", "gemma2"])
def test_packed_documents_equal_the_same_documents_alone(name, implementation):
    model = build(name, implementation=implementation)
    ids = tokens(1, 14)
    segments = torch.tensor([[1] * 5 + [2] * 6 + [3] + [0] * 2])
    mask = torch.ones_like(ids)
    mask[:, [0, 5, 11]] = 0
    mask[:, 12:] = 0
    packed = token_logprobs(model, ids, mask, segment_ids=segments)
    for start, stop in ((0, 5), (5, 11), (11, 12)):
        alone = own_logprobs(model, ids[:, start:stop])
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-5, atol=1e-5)
    assert (packed[:, 12:] == 0).all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral"])
def test_changing_one_document_leaves_the_logits_of_the_next_alone(name):
    model, ids = build(name), tokens(1, 12)
    segments = torch.tensor([[1] * 5 + [2] * 7])
    changed = ids.clone()
    changed[:, :5] = (changed[:, :5] + 7) % 61
    extra = attention_inputs(model, segments)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False, **extra).logits[:, 5:]
        after = model(input_ids=changed, use_cache=False, **extra).logits[:, 5:]
        leaking = model(input_ids=changed).logits[:, 5:]
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)
    assert (before - leaking).abs().max() > 1e-2  # without the mask the test would notice


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_value(name, side):
    model, ids = build(name), tokens(1, 7)
    alone = own_logprobs(model, ids)
    pad = (3, 0) if side == "left" else (0, 3)
    padded = functional.pad(ids, pad)
    attention = functional.pad(torch.ones_like(ids), pad)
    mask = functional.pad(all_targets(ids), pad)
    other = tokens(1, 10, seed=5)
    batch = torch.cat([padded, other])
    values = token_logprobs(
        model,
        batch,
        torch.cat([mask, all_targets(other)]),
        attention_mask=torch.cat([attention, torch.ones_like(other)]),
    )
    torch.testing.assert_close(values[:1][attention == 1][None], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values[1:], own_logprobs(model, other), rtol=1e-5, atol=1e-5)


def test_positions_start_anew_in_each_document():
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]])
    assert position_ids_of(segments).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5]]


def test_a_model_that_caps_its_logits_goes_through_its_own_forward():
    model, ids = build("gemma2"), tokens(2, 9)
    assert not has_plain_head(model)
    values = token_logprobs(model, ids, all_targets(ids))
    torch.testing.assert_close(values, own_logprobs(model, ids), rtol=1e-5, atol=1e-5)
    logits = model.get_output_embeddings()(model.base_model(input_ids=ids)[0])
    wrong = functional.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert (values[:, 1:] - wrong).abs().max() > 1e-2  # the plain head would have been wrong


def test_chunks_of_the_head_give_the_same_values_and_gradients(monkeypatch):
    model, ids = build("qwen3").double(), tokens(3, 10)
    mask = all_targets(ids)
    whole, entropy = token_logprobs(model, ids, mask, temperature=0.7, return_entropy=True)
    whole.sum().backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 61 * 4)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)
    parts, entropy_parts = token_logprobs(model, ids, mask, temperature=0.7, return_entropy=True)
    parts.sum().backward()
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_parts, entropy, rtol=1e-12, atol=1e-12)
    for param, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-10, atol=1e-10)


def test_temperature_and_entropy_are_those_of_a_categorical_distribution():
    model, ids = build("llama").double(), tokens(1, 6)
    values, entropy = token_logprobs(model, ids, all_targets(ids), temperature=2.0, return_entropy=True)
    expected = torch.distributions.Categorical(logits=model(input_ids=ids).logits[:, :-1] / 2.0)
    torch.testing.assert_close(values[:, 1:], expected.log_prob(ids[:, 1:]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy[:, 1:], expected.entropy(), rtol=1e-10, atol=1e-10)
    assert not entropy.requires_grad


def test_a_batch_without_targets_gives_zeros_that_can_be_differentiated():
    model, ids = build("llama"), tokens(2, 5)
    values = token_logprobs(model, ids, torch.zeros_like(ids))
    assert (values == 0).all()
    values.sum().backward()


def test_the_first_token_of_a_row_is_never_a_target():
    model, ids = build("llama"), tokens(2, 5)
    values = token_logprobs(model, ids, torch.ones_like(ids))
    assert (values[:, 0] == 0).all()
    assert (values[:, 1:] != 0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_an_error(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(build("llama"), tokens(1, 4), torch.ones(1, 4), temperature=temperature)


def test_a_recurrent_model_is_seen_to_mix_documents():
    assert keeps_documents_apart(build("qwen3"))
    assert keeps_documents_apart(build("gpt2"))
    assert keeps_documents_apart(build("mistral"))
    assert not keeps_documents_apart(build("mamba"))
    assert not keeps_documents_apart(BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)))


def test_looking_at_the_head_leaves_dropout_and_the_random_stream_as_they_were():
    model = build("gpt2").train()
    model.transformer.h[0].eval()
    before = torch.get_rng_state()
    assert has_plain_head(model)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    assert not model.transformer.h[0].training


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [61 * 4, 2**22])
def test_the_loss_of_a_batch_is_the_sum_of_its_log_probabilities_with_smoothing_and_z_loss(monkeypatch, name, chunk):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", chunk)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)
    model, ids = build(name).double(), tokens(2, 9)
    segments = torch.tensor([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2])
    mask = torch.ones_like(ids)
    mask[0, [0, 4]] = mask[1, 0] = mask[1, 7] = mask[1, 8] = 0
    loss, nll, extra = token_loss(model, ids, mask, segment_ids=segments, label_smoothing=0.1, z_loss=0.01)
    loss.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    logits = torch.cat([model(input_ids=part[None]).logits[0, :-1] for part in (ids[0, :4], ids[0, 4:], ids[1, :7])])
    labels = torch.cat([ids[0, 1:4], ids[0, 5:], ids[1, 1:7]])
    z = 0.01 * logits.logsumexp(-1).square().sum()
    expected = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1) + z
    expected.backward()
    # Not closer: both families' norms compute in fp32, whose rounding depends on the batch's shape.
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(extra, z.detach(), rtol=1e-8, atol=1e-8)
    plain = functional.cross_entropy(logits, labels, reduction="sum").detach()
    torch.testing.assert_close(nll, plain, rtol=1e-8, atol=1e-8)
    for param, grad in zip(model.parameters(), grads, strict=True):  # both families' norms compute in fp32
        torch.testing.assert_close(param.grad, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_gradients_of_flattened_documents_equal_those_of_documents_alone(name):
    model = build(name).double()
    lengths = [1, 2, 3, 5, 7, 9, 11, 13, 17, 19, 3]  # more lengths than have a call of their own
    ids = tokens(1, sum(lengths))
    segments = torch.tensor([[number + 1 for number, length in enumerate(lengths) for _ in range(length)]])
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    mask[:, 1:][segments[:, 1:] != segments[:, :-1]] = 0
    assert runs_flat(model)
    token_loss(model, ids, mask, segment_ids=segments)[0].backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    start, total = 0, 0.0
    for length in lengths:
        total = total - own_logprobs(model, ids[:, start : start + length])[:, 1:].sum()
        start += length
    total.backward()
    for param, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-8, atol=1e-10)


def test_flattening_leaves_the_padding_out_on_either_side():
    ids = torch.tensor([[7, 8, 9, 0], [0, 5, 6, 4]])
    flat = flatten(ids, torch.tensor([[1, 1, 2, 0], [0, 1, 1, 1]]))
    assert flat.input_ids.tolist() == [[7, 8, 9, 5, 6, 4]]
    assert flat.position_ids.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert flat.documents.lengths == [2, 1, 3]
    assert flat.place.tolist() == [0, 1, 2, -1, -1, 3, 4, 5]


def test_models_with_masks_of_their_own_keep_their_rows():
    assert not runs_flat(build("mistral"))
    assert not runs_flat(build("gemma2"))
    assert not runs_flat(build("llama", implementation="eager"))
    assert not runs_flat(build("mamba"))


def test_a_target_that_nothing_predicts_and_a_batch_of_padding_are_errors():
    model, ids = build("llama"), tokens(1, 5)
    with pytest.raises(ValueError, match="follows padding"):
        token_logprobs(model, ids, torch.ones_like(ids), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="nothing but padding"):
        token_logprobs(model, ids, torch.zeros_like(ids), attention_mask=torch.zeros_like(ids))


def test_generation_and_plain_rows_of_a_model_that_runs_flat_are_unchanged():
    model, other, ids = build("qwen3"), build("qwen3"), tokens(2, 6)
    assert runs_flat(model)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
        ours = model.generate(ids, attention_mask=padding, max_new_tokens=5, do_sample=False)
        assert torch.equal(ours, other.generate(ids, attention_mask=padding, max_new_tokens=5, do_sample=False))
