"""The stages themselves on two ranks: pretrain, dpo and grpo train as they do on one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sampling"))

from tiny_alignment import attempt, checkpoint, dataset, preference_rows, prompt_rows  # noqa: F401

from stages.artifacts import fetch, publish
from stages.modeling.checkpoint import load_model
from stages.reference.config import Config as ReferenceConfig
from stages.reference.stage import run as reference

# Each stage is tried with one kind of ranks by default and with the other too among the slow tests.
DDP_FIRST = pytest.mark.parametrize("distribution", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
FSDP2_FIRST = pytest.mark.parametrize("distribution", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
GRPO = {
    "stage": "grpo",
    "train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 6,
    "reward_funcs": ["tiny_rewards:low_bytes"],
    "learning_rate": 3e-3,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
}


def figures(records: list[dict], *names: str) -> list[float]:
    return [record[name] for record in records for name in names]


def key_of(text: str) -> str:
    return text.encode().hex()


@DDP_FIRST
def test_pretrain_of_two_ranks_follows_the_curve_of_one(stages, distribution):
    settings = {"stage": "pretrain", "max_steps": 4, "hidden_size": 16, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "per_device_train_batch_size": 2}
    one = stages.records(stages.run(key_of("pretrain 1" + distribution), 1, **settings))
    two = stages.records(stages.run(key_of("pretrain 2" + distribution), 2, distribution=distribution, **settings))
    assert figures(two, "loss") == pytest.approx(figures(one, "loss"), abs=1e-5)


@FSDP2_FIRST
def test_dpo_of_two_ranks_follows_the_curve_of_one(stages, attempt, dataset, checkpoint, distribution):  # noqa: F811
    inputs = {"model": checkpoint, "data": dataset(preference_rows(12), checkpoint, format="preference")}
    log = attempt(ReferenceConfig(), inputs)
    reference(log.context)
    kinds = {"model": "checkpoint", "data": "dataset", "reference": "logprobs"}
    folders = inputs | {"reference": log.output}
    published = {name: publish(stages.store, folders[name], kind) for name, kind in kinds.items()}
    # The whole batch in one pass on one rank, half of it on each of two.
    settings = {"stage": "dpo", "max_steps": 4, "beta": 0.5, "rpo_alpha": 0.3, "learning_rate": 1e-3}
    one = stages.records(stages.run(key_of("dpo 1" + distribution), 1, inputs=published, **settings))
    two = stages.records(
        stages.run(key_of("dpo 2" + distribution), 2, inputs=published, distribution=distribution, **settings)
    )
    names = ("loss", "rewards/margins", "logps/chosen", "nll_loss")
    assert figures(two, *names) == pytest.approx(figures(one, *names), rel=1e-4, abs=1e-4)
    assert one[0]["weight"] == two[0]["weight"] == 8


@DDP_FIRST
def test_adapters_of_two_ranks_train_as_those_of_one_and_are_published(stages, dataset, checkpoint, distribution):  # noqa: F811
    prompts = dataset(prompt_rows(9), checkpoint, format="prompt")
    inputs = {
        "model": publish(stages.store, checkpoint, "checkpoint"),
        "prompts": publish(stages.store, prompts, "dataset"),
    }
    settings = GRPO | {"inputs": inputs, "lora": {"r": 4}, "max_steps": 3, "learning_rate": 1e-2}
    one = stages.run(key_of("lora 1" + distribution), 1, **settings)
    two = stages.run(key_of("lora 2" + distribution), 2, distribution=distribution, **settings)
    names = ("loss", "grad_norm", "reward")
    expected = figures(stages.records(one), *names)
    assert figures(stages.records(two), *names) == pytest.approx(expected, abs=2e-4)
    fetch(stages.store, two["outputs"]["adapter"], stages.folder / f"adapter-{distribution}")
    content = json.loads((stages.folder / f"adapter-{distribution}" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == f"artifact:{inputs['model']}"


@pytest.mark.parametrize(
    ("distribution", "iterations"),
    [("fsdp2", 2), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("ddp", "fsdp2"))],
)
def test_grpo_of_two_ranks_samples_and_learns_as_one(stages, dataset, checkpoint, distribution, iterations):  # noqa: F811
    prompts = dataset(prompt_rows(9), checkpoint, format="prompt")
    inputs = {
        "model": publish(stages.store, checkpoint, "checkpoint"),
        "prompts": publish(stages.store, prompts, "dataset"),
    }
    settings = GRPO | {"inputs": inputs, "num_iterations": iterations, "beta": 0.1}
    runs = []
    for ranks in (1, 2):
        key = key_of(f"grpo {ranks} {distribution} {iterations}")
        outcome = stages.run(key, ranks, distribution=distribution, **settings)
        lines = stages.records(outcome)
        fetch(stages.store, outcome["outputs"]["rollouts"], stages.folder / f"rollouts-{stages.count}")
        table = pq.read_table(stages.folder / f"rollouts-{stages.count}" / "rollouts.parquet").to_pylist()
        runs.append((lines, table))
    (one, sampled), (two, divided) = runs
    assert [row["completion"] for row in divided] == [row["completion"] for row in sampled]
    assert len(divided) == 16 * 4 // iterations
    names = ("loss", "grad_norm", "reward", "entropy", "kl")
    assert figures(two, *names) == pytest.approx(figures(one, *names), abs=2e-4)
    assert figures(one, "grad_norm") != [0.0] * 4


@pytest.mark.slow
def test_an_open_batch_of_completions_goes_on_with_another_number_of_ranks(stages, dataset, checkpoint):  # noqa: F811
    prompts = dataset(prompt_rows(9), checkpoint, format="prompt")
    inputs = {
        "model": publish(stages.store, checkpoint, "checkpoint"),
        "prompts": publish(stages.store, prompts, "dataset"),
    }
    settings = GRPO | {"inputs": inputs, "num_iterations": 2, "max_steps": 3}
    whole = stages.records(stages.run(key_of("open, 1 rank"), 1, **settings))
    key = key_of("open, 2 ranks, then 1")
    tripped = stages.run(key, 2, distribution="fsdp2", tripwire_grad_norm=1e-9, **settings)
    assert (tripped["code"], stages.progress(key)[0]) == (80, 1)  # between the two iterations of the first batch
    fetch(stages.store, tripped["kept"], stages.folder / "kept")
    assert load_model(stages.folder / "kept").num_parameters() > 0  # sharded weights were put together first
    records = stages.records(stages.run(key, 1, **settings))
    names = ("loss", "grad_norm", "reward", "entropy", "clip_ratio/region_mean")
    assert figures(records, *names) == pytest.approx(figures(whole, *names), abs=2e-4)
