"""The evaluate stage: figures against independent computations, the report's files, resumption and refusals."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_alignment import (
    END,
    folder_bytes,
    make_checkpoint,
    make_model,
    make_tokenizer,
    preference_rows,
    prompt_rows,
    text_rows,
)

from stages.contract import Refused, Stopped
from stages.evaluate.config import Config
from stages.evaluate.measures import mean_and_error
from stages.evaluate.report import Measured, markdown
from stages.evaluate.stage import run
from stages.modeling.checkpoint import load_model, load_tokenizer, save_checkpoint
from stages.tokenize.dataset import read_info, read_packed, read_preferences, read_prompts

SETTINGS = {"score": "tiny_rewards:right", "style": "tiny_rewards:ended", "max_new_tokens": 5, "sampled": 2}


@pytest.fixture
def data(dataset, checkpoint):
    return {
        "text": dataset(text_rows(30), checkpoint, format="text", row_length=24, validation_fraction=0.4),
        "prompts": dataset(prompt_rows(6), checkpoint, format="prompt"),
        "preferences": dataset(preference_rows(8), checkpoint, format="preference"),
    }


@pytest.fixture
def models(tmp_path, checkpoint):
    return {"models.first": checkpoint, "models.second": make_checkpoint(tmp_path / "second", seed=7)}


def report(one):
    return json.loads((one.output / "report.json").read_text())


def uniform_checkpoint(folder):
    """A model that gives every token the same probability."""
    folder.mkdir()
    tokenizer = make_tokenizer()
    model = make_model(vocab=len(tokenizer))
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    save_checkpoint(model, tokenizer, folder)
    return folder


def test_a_uniform_model_costs_the_logarithm_of_its_vocabulary(tmp_path, attempt, data):
    one = attempt(Config(), {"models.uniform": uniform_checkpoint(tmp_path / "uniform"), "text": data["text"]})
    run(one.context)
    split = read_info(data["text"]).splits["validation"]
    found = report(one)["models"]["uniform"]
    assert found["bits_per_byte"] == pytest.approx(math.log2(260) * split.target_tokens / split.bytes, rel=1e-6)
    assert found["nats_per_token"] == pytest.approx(math.log(260), rel=1e-6)
    assert "exact_match" not in found
    assert report(one)["counts"] == {"text_bytes": split.bytes, "text_tokens": split.target_tokens}


def test_bits_per_byte_agree_with_each_document_read_alone_in_float64(attempt, data, models):
    one = attempt(Config(per_device_eval_batch_size=3), {**models, "text": data["text"]})
    run(one.context)
    rows = read_packed(data["text"], "validation")
    bytes_ = read_info(data["text"]).splits["validation"].bytes
    for label in ("first", "second"):
        model = load_model(models[f"models.{label}"]).double().eval()
        total = 0.0
        for ids, segments, mask in zip(rows.input_ids, rows.segment_ids, rows.loss_mask, strict=True):
            for segment in set(segments.tolist()) - {0}:
                tokens = torch.from_numpy(ids[segments == segment].astype(np.int64))
                targets = mask[segments == segment]
                with torch.no_grad():
                    logs = torch.log_softmax(model(tokens[None]).logits[0], dim=-1)
                total -= sum(logs[place - 1, tokens[place]].item() for place in np.flatnonzero(targets))
        assert report(one)["models"][label]["bits_per_byte"] == pytest.approx(total / math.log(2) / bytes_, rel=1e-5)


def test_answers_are_scored_greedily_and_sampled(attempt, data, models):
    one = attempt(Config(**SETTINGS), {**models, "prompts": data["prompts"]})
    run(one.context)
    rows = pq.read_table(one.output / "completions.parquet").to_pylist()
    prompts = read_prompts(data["prompts"])
    assert len(rows) == 2 * 6 * 3
    for label in ("first", "second"):
        mine = [row for row in rows if row["model"] == label]
        greedy = [row for row in mine if row["sample"] == -1]
        assert [row["id"] for row in greedy] == [prompt.id for prompt in prompts]
        assert [row["sample"] for row in mine[6:]] == [0, 1] * 6
        model, tokenizer = load_model(models[f"models.{label}"]).eval(), load_tokenizer(models[f"models.{label}"])
        for row, prompt in zip(greedy, prompts, strict=True):
            ids = torch.tensor([prompt.prompt_ids])
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
            completion = expected[0, len(prompt.prompt_ids) :].tolist()
            assert row["completion"] == tokenizer.decode(completion, skip_special_tokens=True)
            assert row["tokens"] == len(completion)
            assert row["style"] == float(completion[-1] == END) == float(row["finished"])
            assert row["score"] == float(row["completion"] == prompt.columns["answer"])
        found = report(one)["models"][label]
        assert found["exact_match"] == sum(row["score"] for row in greedy) / 6
        assert found["shows_work"] == sum(row["style"] for row in greedy) / 6
        assert found["sampled"] == sum(row["score"] for row in mine[6:]) / 12
        working = [row["score"] for row in mine[6:] if row["style"]]
        assert found.get("sampled_showing_work") == (sum(working) / len(working) if working else None)
        assert found["mean_completion_tokens"] == sum(row["tokens"] for row in greedy) / 6
    assert report(one)["counts"] == {"prompts": 6, "sampled": 2}


def test_preference_accuracy_is_the_share_of_pairs_ranked_rightly(attempt, data, models):
    one = attempt(Config(per_device_eval_batch_size=3), {**models, "preferences": data["preferences"]})
    run(one.context)
    for label in ("first", "second"):
        model = load_model(models[f"models.{label}"]).double().eval()
        wins = []
        for pair in read_preferences(data["preferences"]):
            sums = []
            for completion in (pair.chosen_ids, pair.rejected_ids):
                with torch.no_grad():
                    ids = torch.tensor([pair.prompt_ids + completion])
                    logs = torch.log_softmax(model(ids).logits[0], dim=-1)
                start = len(pair.prompt_ids)
                sums.append(sum(logs[start + i - 1, token].item() for i, token in enumerate(completion)))
            wins.append(float(sums[0] > sums[1]))
        found = report(one)["models"][label]
        assert found["preference_accuracy"] == sum(wins) / 8
        assert found["preference_accuracy_stderr"] == pytest.approx(np.std(wins, ddof=1) / math.sqrt(8))


def test_a_stopped_evaluation_goes_on_and_ends_with_the_same_bytes(attempt, data, models):
    inputs = {**models, **data}
    whole = attempt(Config(**SETTINGS), inputs, key="cd" * 32)
    run(whole.context)
    assert set(folder_bytes(whole.output)) == {"report.json", "report.md", "report.png", "completions.parquet"}
    assert (whole.output / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(Stopped, match="saved after model 1 of 2"):
        run(attempt(Config(**SETTINGS), inputs, stop_when=lambda events: True).context)
    second = attempt(Config(**SETTINGS), inputs)
    run(second.context)
    assert {"type": "resumed", "at": 1} in second.events
    assert folder_bytes(second.output) == folder_bytes(whole.output)
    assert second.context.final_metrics["first/bits_per_byte"] == report(whole)["models"]["first"]["bits_per_byte"]


def test_the_report_shows_the_first_prompts_with_every_models_answer(attempt, data, models):
    one = attempt(Config(**SETTINGS, num_samples_shown=2), {**models, **data})
    run(one.context)
    samples = report(one)["samples"]
    assert [sample["prompt"] for sample in samples] == [prompt.prompt for prompt in read_prompts(data["prompts"])[:2]]
    assert list(samples[0]["answers"]) == ["first", "second"]
    text = (one.output / "report.md").read_text()
    assert "| model | bits/byte | exact match | sampled | shows work | preference accuracy | tokens |" in text
    assert "6 prompts answered greedily, 2 sampled answers to each prompt, 8 preference pairs" in text


def test_text_of_models_cannot_break_the_table():
    report = {
        "models": {"a|b": {"exact_match": 0.5, "exact_match_stderr": 0.1}},
        "samples": [{"prompt": "x\n# y", "answers": {"a|b": {"completion": "<b>|*1*", "correct": False}}}],
        "counts": {"prompts": 25},
    }
    text = markdown(report)
    assert "| a\\|b | 50.0% ±10.0 |" in text
    assert "- a\\|b: &lt;b&gt;\\|\\*1\\* ✗" in text
    assert "**Q** x \\# y" in text


def test_standard_errors_are_those_of_a_mean():
    # 1, 0, 0, 1: unbiased variance 1/3, over 4 items.
    assert mean_and_error([1, 0, 0, 1]) == (0.5, pytest.approx(math.sqrt(1 / 12)))
    assert mean_and_error([3.0]) == (3.0, 0.0)


def test_measurements_survive_being_saved():
    measured = Measured("m", {"exact_match": 0.1 + 0.2}, [])
    assert Measured.from_bytes(measured.to_bytes()) == measured


def test_what_cannot_be_measured_is_refused(tmp_path, attempt, data, models, dataset, checkpoint):
    def refused(message, inputs, **settings):
        with pytest.raises(Refused, match=message):
            run(attempt(Config(**SETTINGS | settings), inputs).context)

    refused("nothing to measure", models)
    refused("input models is empty", data)
    refused("input prompts needs `score`", {**models, **data}, score=None)
    refused("a score is between 0 and 1", {**models, "prompts": data["prompts"]}, score="tiny_rewards:two")
    refused("needs a column 'solution'", {**models, "prompts": data["prompts"]}, style="tiny_rewards:needs_solution")
    refused("more than the model's 96 positions", {**models, "prompts": data["prompts"]}, max_new_tokens=95)
    other = make_checkpoint(tmp_path / "other", tokenizer=make_tokenizer(extra=["<|odd|>"]))
    refused(r"input text \(beside model odd\) was tokenized with another vocabulary", {"models.odd": other, **data})
    whole = dataset(text_rows(5), checkpoint, format="text", row_length=24)
    refused("has no validation split", {**models, "text": whole})
