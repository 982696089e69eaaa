"""Sampling: agreement with the trainer's log-probabilities, with transformers, and with the distribution asked for."""

import math

import pytest
import torch
from tiny_alignment import END, make_model
from transformers.cache_utils import DynamicCache

from stages.contract import Refused
from stages.modeling.logprobs import token_logprobs
from stages.sampling import generate as generation
from stages.sampling.batches import completion_batch
from stages.sampling.cache import GrowingLayer, new_cache
from stages.sampling.checks import check_sampling
from stages.sampling.generate import choose, generate, seeded_generator, stream

PROMPTS = [[5, 9, 17], [200, 31, 8, 44, 4, 100, 6], [5, 9, 17], [77], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]


def sample(model, prompts=PROMPTS, **changes):
    settings = {"max_new_tokens": 9, "temperature": 0.8, "eos_ids": [END, 7, 30, 90]} | changes
    return generate(model, prompts, generator=seeded_generator(3, "test"), **settings)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gpt2"])
def test_sampled_logprobs_are_those_of_the_trainer(family):
    model = make_model(family)
    completions = sample(model, eos_ids=[], max_new_tokens=12)
    batch = completion_batch([(p, c.tokens) for p, c in zip(PROMPTS, completions, strict=True)])
    ours = token_logprobs(
        model, batch["input_ids"], batch["target_mask"], attention_mask=batch["attention_mask"], temperature=0.8
    )
    for row, completion in enumerate(completions):
        expected = ours[row, batch["target_mask"][row]]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gpt2"])
def test_greedy_completions_are_those_of_transformers(family):
    model = make_model(family)
    for prompt, completion in zip(PROMPTS, sample(model, temperature=0.0), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=[END, 7, 30, 90],
            pad_token_id=0,
        )[0, len(prompt) :]
        assert completion.tokens == expected.tolist()
        assert completion.finished == (completion.tokens[-1] in (END, 7, 30, 90))


def test_a_completion_does_not_depend_on_its_neighbours_or_the_batch_size():
    model = make_model()
    prompts = PROMPTS * 4
    whole = sample(model, prompts)
    for batch_size in (1, 3, 20):
        again = sample(model, prompts, batch_size=batch_size)
        assert [c.tokens for c in again] == [c.tokens for c in whole]
        for a, b in zip(again, whole, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    first = sample(model, prompts[:7])
    assert [c.tokens for c in first] == [c.tokens for c in whole[:7]]


def test_dropping_finished_rows_changes_nothing(monkeypatch):
    model = make_model()
    ends = list(range(0, 260, 9))  # about a ninth of the tokens end a row, so rows leave at every step
    monkeypatch.setattr(generation, "KEEP_SHARE", 1.0)
    dropped = sample(model, PROMPTS * 6, eos_ids=ends, max_new_tokens=20)
    monkeypatch.setattr(generation, "KEEP_SHARE", 0.0)
    kept = sample(model, PROMPTS * 6, eos_ids=ends, max_new_tokens=20)
    assert [c.tokens for c in dropped] == [c.tokens for c in kept]
    assert len({len(c.tokens) for c in kept}) > 3
    for completion in kept:
        assert completion.finished == (completion.tokens[-1] in ends)
        assert not any(token in ends for token in completion.tokens[:-1])
        assert len(completion.logprobs) == len(completion.tokens)


def test_the_same_generator_gives_the_same_completions_and_another_does_not():
    model = make_model()
    one, two = sample(model), sample(model)
    assert one == two
    other = generate(model, PROMPTS, max_new_tokens=9, generator=seeded_generator(4, "test"))
    assert [c.tokens for c in other] != [c.tokens for c in one]


def test_equal_prompts_get_different_completions():
    completions = sample(make_model(), [[5, 9]] * 8, temperature=1.0)
    assert len({tuple(c.tokens) for c in completions}) > 4


def test_streaming_gives_the_tokens_of_a_batch_of_one():
    model = make_model()
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 15, "temperature": temperature, "eos_ids": [7, 30, 90]}
        (whole,) = generate(model, [PROMPTS[1]], generator=seeded_generator(0), **settings)
        assert list(stream(model, PROMPTS[1], generator=seeded_generator(0), **settings)) == whole.tokens


def test_tokens_are_drawn_as_often_as_the_softmax_says():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    uniforms = torch.rand(40_000, generator=seeded_generator(1))
    tokens, logprobs = choose(logits.expand(len(uniforms), -1), 2.0, 1.0, uniforms)
    expected = torch.softmax(logits.double() / 2, dim=0)
    counts = torch.bincount(tokens, minlength=5).double()
    # Five standard deviations of a binomial count.
    spread = 5 * (len(uniforms) * expected * (1 - expected)).sqrt()
    assert ((counts - len(uniforms) * expected).abs() <= spread + 1).all()
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=1e-5, rtol=1e-5)


def test_the_nucleus_is_the_smallest_set_that_holds_top_p():
    # Probabilities .5, .3, .15, .05: 0.49 needs one token, 0.79 needs two, 0.81 three.
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    uniforms = torch.linspace(0, 1 - 2**-24, 1000)
    for top_p, kept in ((0.49, {1}), (0.79, {1, 3}), (0.81, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        tokens, logprobs = choose(logits.expand(1000, -1), 1.0, top_p, uniforms)
        assert set(tokens.tolist()) == kept
        torch.testing.assert_close(logprobs, torch.log_softmax(logits, 0)[tokens])
    tokens, _ = choose(logits.expand(1000, -1), 1.0, 0.79, uniforms)
    assert (tokens == 1).double().mean().item() == pytest.approx(0.5 / 0.8, abs=2e-3)


def test_a_token_without_probability_is_never_drawn_even_at_the_edges_of_the_interval():
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5, -math.inf]])
    edges = torch.tensor([0.0, 1 - 2**-24])
    tokens, logprobs = choose(logits.expand(2, -1), 1.0, 1.0, edges)
    assert tokens.tolist() == [1, 3]
    assert torch.isfinite(logprobs).all()


def test_the_growing_cache_reads_like_the_one_of_transformers():
    model = make_model()
    ids = torch.tensor([[5, 9, 17, 3], [8, 1, 2, 200]])
    name = "cache"
    logits = []
    for cache in (new_cache(model.config, room=5), DynamicCache(config=model.config)):
        steps = []
        with torch.no_grad():
            steps.append(model(ids, use_cache=True, **{name: cache}).logits)
            cache.batch_select_indices(torch.tensor([1, 0, 1]))
            for token in (4, 50, 60, 70):  # beyond the room, so that the buffers grow
                steps.append(model(torch.full((3, 1), token), use_cache=True, **{name: cache}).logits)
        logits.append(torch.cat([step.flatten() for step in steps]))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=1e-6)
    assert isinstance(new_cache(model.config, 5).layers[0], GrowingLayer)
    assert not isinstance(new_cache(make_model("mistral").config, 5).layers[0], GrowingLayer)


def test_training_after_sampling_still_gets_gradients():
    model = make_model().train()
    sample(model)
    assert model.training
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([[1] * 90], {}, "more than the model's 96 positions"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"top_p": 0.0}, "top_p"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompts, changes, message):
    with pytest.raises(ValueError, match=message):
        sample(make_model(), prompts, **changes)


def test_sampling_without_a_generator_is_refused():
    with pytest.raises(ValueError, match="needs a generator"):
        generate(make_model(), [[1]], max_new_tokens=2)


def test_no_prompts_give_no_completions():
    assert sample(make_model(), []) == []


def test_a_model_that_says_something_else_token_by_token_is_refused():
    from transformers import Mamba2Config, Mamba2ForCausalLM, RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    keeps = Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=8, num_heads=4, state_size=4, n_groups=1))
    loses = RwkvForCausalLM(RwkvConfig(**sizes | {"num_hidden_layers": 2}, context_length=16))
    with torch.no_grad():
        for param in (*keeps.parameters(), *loses.parameters()):
            if param.ndim == 2:
                param.copy_(torch.randn_like(param))
    check_sampling(make_model("llama"))
    check_sampling(keeps)
    with pytest.raises(Refused, match=r"the model \(rwkv\) cannot be sampled from here: token by token"):
        check_sampling(loses)


def test_a_model_that_cannot_be_run_token_by_token_is_refused_in_a_sentence():
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(Refused, match=r"the model \(openai-gpt\) cannot be sampled from here: RuntimeError: "):
        check_sampling(model)
