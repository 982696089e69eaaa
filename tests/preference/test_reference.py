"""Reference log-probabilities: right row by row, whatever the batch, and resumable."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from tiny_alignment import folder_bytes, make_checkpoint, make_tokenizer, preference_rows

from stages.contract import Refused, Stopped
from stages.modeling.checkpoint import load_model
from stages.reference.config import Config
from stages.reference.stage import run
from stages.tokenize.dataset import read_preferences


@pytest.fixture
def pairs(dataset, checkpoint):
    return dataset(preference_rows(11), checkpoint, format="preference")


def table(attempt_, **settings):
    run(attempt_.context)
    return pq.read_table(attempt_.output / "logprobs.parquet").to_pylist()


def test_each_token_has_its_log_probability_under_the_model(attempt, checkpoint, pairs):
    rows = table(attempt(Config(per_device_eval_batch_size=4), {"model": checkpoint, "data": pairs}))
    model = load_model(checkpoint).double().eval()
    source = read_preferences(pairs)
    assert [row["id"] for row in rows] == [pair.id for pair in source]
    for row, pair in zip(rows, source, strict=True):
        for name in ("chosen", "rejected"):
            completion = getattr(pair, f"{name}_ids")
            assert completion[-1] == 1  # the end of turn is scored too
            ids = torch.tensor([[*pair.prompt_ids, *completion]])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)
            start = len(pair.prompt_ids)
            expected = [logprobs[start + i - 1, token].item() for i, token in enumerate(completion)]
            assert row[f"{name}_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_row_does_not_depend_on_the_batch_size_or_its_neighbours(attempt, checkpoint, pairs, dataset):
    whole = table(attempt(Config(per_device_eval_batch_size=11), {"model": checkpoint, "data": pairs}, key="aa" * 32))
    single = table(attempt(Config(per_device_eval_batch_size=1), {"model": checkpoint, "data": pairs}, key="bb" * 32))
    fewer = dataset(preference_rows(11)[::-2], checkpoint, format="preference")
    part = table(attempt(Config(), {"model": checkpoint, "data": fewer}, key="cc" * 32))
    by_id = {row["id"]: row for row in whole}
    assert len(part) == 6
    for row in [*single, *part]:
        for name in ("chosen_logprobs", "rejected_logprobs"):
            assert row[name] == pytest.approx(by_id[row["id"]][name], abs=2e-5)


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(attempt, checkpoint, pairs):
    config, inputs = Config(per_device_eval_batch_size=3), {"model": checkpoint, "data": pairs}
    whole = attempt(config, inputs, key="cd" * 32)
    run(whole.context)
    with pytest.raises(Stopped, match="saved after batch 3 of 4"):
        run(attempt(config, inputs, stop_when=lambda events: len(events) >= 2).context)
    second = attempt(config, inputs)
    run(second.context)
    assert {"type": "resumed", "at": 3} in second.events
    assert folder_bytes(second.output) == folder_bytes(whole.output)


def test_the_artifact_says_whose_log_probabilities_it_holds(tmp_path, attempt, checkpoint, pairs):
    one = attempt(Config(), {"model": checkpoint, "data": pairs}, key="aa" * 32)
    run(one.context)
    info = json.loads((one.output / "logprobs.json").read_text())
    assert info["rows"] == 11
    other = attempt(Config(), {"model": make_checkpoint(tmp_path / "other", seed=1), "data": pairs}, key="bb" * 32)
    run(other.context)
    assert json.loads((other.output / "logprobs.json").read_text())["weights"] != info["weights"]


def test_pairs_longer_than_the_model_are_refused(tmp_path, attempt, pairs):
    short = make_checkpoint(tmp_path / "short", positions=16)
    with pytest.raises(Refused, match=r"pair \w+ \(\w+\) has \d+ tokens, more than the model's 16 positions"):
        run(attempt(Config(), {"model": short, "data": pairs}).context)


def test_pairs_of_another_tokenizer_are_refused(tmp_path, attempt, pairs):
    other = make_checkpoint(tmp_path / "other", tokenizer=make_tokenizer(extra=["<|odd|>"]))
    with pytest.raises(Refused, match="input data was tokenized with another vocabulary"):
        run(attempt(Config(), {"model": other, "data": pairs}).context)
