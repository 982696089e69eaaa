"""The DPO stage: where it starts, what it refuses, that it learns, and that it resumes to the same bytes."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_alignment import folder_bytes, make_checkpoint, preference_rows

from stages.contract import Refused, Stopped
from stages.dpo.config import Config
from stages.dpo.objective import PairObjective, match_reference
from stages.dpo.stage import run
from stages.modeling.checkpoint import load_model
from stages.reference.config import Config as ReferenceConfig
from stages.reference.logprobs import read_logprobs
from stages.reference.stage import run as run_reference
from stages.tokenize.dataset import read_preferences
from stages.training.order import epoch_order

SETTINGS = {"train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 6, "save_seconds": 0}


@pytest.fixture
def inputs(dataset, checkpoint, attempt):
    """A checkpoint, pairs, and the checkpoint's own reference."""
    pairs = dataset(preference_rows(10), checkpoint, format="preference")
    one = attempt(ReferenceConfig(), {"model": checkpoint, "data": pairs}, key="ef" * 32)
    run_reference(one.context)
    return {"model": checkpoint, "data": pairs, "reference": one.output}


def records(folder):
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def objective(inputs, **settings):
    pairs = read_preferences(inputs["data"])
    return PairObjective(
        Config(**SETTINGS | settings), pairs, match_reference(pairs, read_logprobs(inputs["reference"])[0])
    )


def edited(inputs, tmp_path, edit):
    """The same inputs with an edited reference table."""
    folder = tmp_path / "edited"
    folder.mkdir()
    (folder / "logprobs.json").write_bytes((inputs["reference"] / "logprobs.json").read_bytes())
    table = pq.read_table(inputs["reference"] / "logprobs.parquet")
    rows = table.to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "logprobs.parquet")
    return inputs | {"reference": folder}


def test_a_run_starts_at_ln_2_with_margin_0_and_then_prefers_the_chosen(attempt, inputs):
    one = attempt(Config(**SETTINGS | {"max_steps": 30}), inputs)
    run(one.context)
    lines = records(one.output)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["loss"] < 0.5
    assert lines[-1]["rewards/margins"] > 0.5
    assert lines[-1]["rewards/accuracies"] == 1
    assert any("first margin 0, loss ln 2" in text for text in one.logs())
    assert load_model(one.output).num_parameters() == load_model(inputs["model"]).num_parameters()


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(attempt, inputs):
    config = Config(**SETTINGS | {"save_steps": 2, "logging_steps": 1})
    whole = attempt(config, inputs, key="cd" * 32)
    run(whole.context)

    def at_step_3(events):
        return any(event["type"] == "metric" and event["at"] == 3 for event in events)

    with pytest.raises(Stopped):
        run(attempt(config, inputs, stop_when=at_step_3).context)
    second = attempt(config, inputs)
    run(second.context)
    assert {"type": "resumed", "at": 3} in second.events
    assert folder_bytes(second.output) == folder_bytes(whole.output)


def test_a_model_with_dropout_still_starts_at_ln_2_unless_dropout_is_asked_for(attempt, inputs):
    config_file = inputs["model"] / "config.json"
    content = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(content | {"attention_dropout": 0.5}))
    losses = []
    for i, settings in enumerate(({}, {"disable_dropout": False})):
        one = attempt(Config(**SETTINGS | settings), inputs, key=f"{i:064x}")
        run(one.context)
        losses.append(records(one.output)[0]["loss"])
        saved = json.loads((one.output / "config.json").read_text())
        assert saved["attention_dropout"] == 0.5
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(losses[1] - math.log(2)) > 1e-4


def test_cutting_a_step_into_forward_passes_leaves_loss_and_gradient_alone(inputs):
    model = load_model(inputs["model"])
    found = []
    for size in (None, 1, 3):
        one = objective(inputs, per_device_train_batch_size=size, rpo_alpha=0.7, beta=0.4, label_smoothing=0.1)
        batches = one.micro_batches(1)
        assert len(batches) == {None: 1, 1: 4, 3: 2}[size]
        total = sum(batch.weight for batch in batches)
        assert total == 4
        model.zero_grad()
        loss = 0.0
        for batch in batches:
            part, _ = one.loss(model, batch)
            (part / total).backward()
            loss += part.item() / total
        found.append((loss, model.get_input_embeddings().weight.grad.clone()))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-5, rtol=1e-3)


def test_loss_and_metrics_agree_with_float64_on_the_model_itself(inputs, tmp_path):
    policy = load_model(make_checkpoint(tmp_path / "policy", seed=5, scale=0.25)).eval()
    one = objective(inputs, rpo_alpha=0.5, beta=0.2)
    (batch,) = one.micro_batches(0)
    loss, figures = one.loss(policy, batch)
    exact, reference = policy.double(), load_model(inputs["model"]).double().eval()

    def logp(model, prompt, completion):
        with torch.no_grad():
            logs = torch.log_softmax(model(torch.tensor([[*prompt, *completion]])).logits[0], dim=-1)
        return sum(logs[len(prompt) + i - 1, token].item() for i, token in enumerate(completion))

    chosen_rows = epoch_order(10, 0, 0)[:4]
    pairs = [read_preferences(inputs["data"])[row] for row in chosen_rows]
    losses, nll, margins, tokens = 0.0, 0.0, 0.0, 0
    for pair in pairs:
        values = [
            logp(m, pair.prompt_ids, ids) for m in (exact, reference) for ids in (pair.chosen_ids, pair.rejected_ids)
        ]
        margin = 0.2 * ((values[0] - values[2]) - (values[1] - values[3]))
        losses += math.log1p(math.exp(-margin))
        margins += margin
        nll -= values[0]
        tokens += len(pair.chosen_ids)
    # TRL's rpo_alpha adds the mean over the chosen tokens of the batch to the loss of every pair.
    assert loss.item() == pytest.approx(losses + 0.5 * 4 * nll / tokens, rel=1e-4)
    assert figures["rewards/margins"].item() == pytest.approx(margins, rel=1e-4)
    assert figures["nll_loss"].item() == pytest.approx(4 * nll / tokens, rel=1e-4)


def test_epochs_see_every_pair_once(inputs):
    one = objective(inputs, max_steps=None, num_train_epochs=1)
    assert one.config.total_steps(10) == 3
    assert [sum(batch.weight for batch in one.micro_batches(step)) for step in range(3)] == [4, 4, 2]


def test_a_reference_without_a_row_for_a_pair_is_refused(attempt, inputs, tmp_path):
    with pytest.raises(Refused, match="input reference has no row for pair"):
        run(attempt(Config(**SETTINGS), edited(inputs, tmp_path, lambda rows: rows.pop())).context)


def test_a_reference_of_another_length_is_refused(attempt, inputs, tmp_path):
    with pytest.raises(Refused, match=r"has \d+ log-probabilities for the rejected completion of pair \w+, which"):
        run(
            attempt(
                Config(**SETTINGS), edited(inputs, tmp_path, lambda rows: rows[3]["rejected_logprobs"].pop())
            ).context
        )


def test_a_reference_of_other_tokens_under_the_same_id_is_refused(attempt, inputs, tmp_path):
    with pytest.raises(Refused, match="computed for other token ids of pair"):
        run(attempt(Config(**SETTINGS), edited(inputs, tmp_path, lambda rows: rows[2].update(pair="0" * 32))).context)


def test_log_probabilities_that_are_off_are_refused_before_training(attempt, inputs, tmp_path):
    def shift(rows):
        for row in rows:
            row["chosen_logprobs"][0] -= 0.05

    one = attempt(Config(**SETTINGS), edited(inputs, tmp_path, shift))
    with pytest.raises(Refused, match=r"token 0 of the chosen completion of pair \w+ has log-probability"):
        run(one.context)
    assert not list(one.output.iterdir())


def test_rows_of_a_reference_are_matched_by_id_and_not_by_place(attempt, inputs, tmp_path):
    one = attempt(Config(**SETTINGS), inputs, key="aa" * 32)
    run(one.context)
    other = attempt(Config(**SETTINGS), edited(inputs, tmp_path, lambda rows: rows.reverse()), key="bb" * 32)
    run(other.context)
    assert folder_bytes(other.output) == folder_bytes(one.output)


def test_another_model_than_the_references_is_trained_and_said(attempt, inputs, tmp_path):
    one = attempt(Config(**SETTINGS), inputs | {"model": make_checkpoint(tmp_path / "other", seed=3)})
    run(one.context)
    assert any("another model than the one trained" in text for text in one.logs())
    assert records(one.output)[0]["loss"] != pytest.approx(math.log(2), abs=1e-3)


def test_a_batch_larger_than_the_data_is_refused(attempt, inputs):
    with pytest.raises(Refused, match="train_batch_size is 64, but input data has only 10 rows"):
        run(attempt(Config(**SETTINGS | {"train_batch_size": 64}), inputs).context)


def test_a_folder_that_is_no_reference_is_refused(attempt, inputs):
    with pytest.raises(Refused, match=r"holds no reference log-probabilities: it has no logprobs\.json"):
        run(attempt(Config(**SETTINGS), inputs | {"reference": inputs["data"]}).context)
