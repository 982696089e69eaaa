"""Data is described in Croissant and runs are sent to MLflow, as these packages themselves read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pydantic
import pytest
from test_lineage import made, put

from flows.lineage import croissant, mlflow
from flows.lineage.graph import trace
from stages.artifacts import FolderStore, StoreError, import_files, open_store, publish, write_run
from stages.tokenize.dataset import write_table

ROOT = Path(__file__).parents[2]
PAIRS = {
    "id": ["a", "b"],
    "prompt_ids": [[1, 2], [3]],
    "chosen_ids": [[4], [5, 6]],
    "rejected_ids": [[7], [8]],
    "prompt": ["What is 1 + 1?", "±3 °C or -3?"],
    "chosen": ["2", "±3 °C"],
    "rejected": ["3", "-3"],
}
TRAINING = [
    {"step": 1, "loss": 2.5, "grad_norm": 1.0},
    {"step": 2, "loss": float("nan"), "grad_norm": float("inf")},
    {"step": 3, "loss": 1.5, "grad_norm": 0.5},
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return open_store(tmp_path / "store")


@pytest.fixture
def pairs(store: FolderStore, tmp_path: Path) -> str:
    """A dataset of preferences made of a raw file."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    write_table(folder / "train.parquet", PAIRS)
    split = {"rows": 2, "documents": 2, "tokens": 10}
    info = {"holds": "preference", "row_length": None, "splits": {"train": split}, "vocab_size": 9, "kept": 2}
    (folder / "dataset.json").write_text(json.dumps(info | {"dropped": {}}))
    raw = tmp_path / "raw.jsonl"
    raw.write_text("{}\n")
    digest = publish(store, folder, "dataset")
    source = import_files(store, [("raw.jsonl", raw)], "source")
    made(store, "pairs", digest, "dataset", "a", inputs={"data": source})
    return digest


@pytest.fixture
def run(store: FolderStore, pairs: str, tmp_path: Path) -> dict[str, Any]:
    """A run whose step dpo trained and whose step grpo failed."""
    folder = tmp_path / "dpo"
    folder.mkdir()
    (folder / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRAINING))
    digest = publish(store, folder, "checkpoint")
    config = {"beta": 0.1, "lora": {"rank": 8}, "prompts": ["a", "b"], "note": "n" * 7000, "päth/../x": None}
    metrics = {"loss": 1.5, "gr/../eat": float("nan")}
    more = {"inputs": {"data": pairs}, "config": config, "metrics": metrics, "stage": "dpo"}
    key = made(store, "dpo", digest, "checkpoint", "b", **more).key
    times = {"started": "2026-01-02T03:04:00+00:00", "finished": "2026-01-02T03:05:00+00:00"}
    steps = {
        "dpo": {"stage": "dpo", "status": "done", "key": key, "artifact": digest, **times},
        "grpo": {"stage": "grpo", "status": "failed", "message": "it broke: ☹", **times},
    }
    document = {"id": "golden-otter", "recipe": "quickstart", "state": "failed", "steps": steps, **times}
    write_run(store, document)
    return document


def test_a_description_has_every_file_column_and_raw_file(store: FolderStore, pairs: str) -> None:
    value = croissant.describe(store, trace(store, pairs), license="CC0-1.0")
    files = {item["@id"]: item for item in value["distribution"]}
    assert set(files) == {"train.parquet", "dataset.json"}
    assert files["train.parquet"]["encodingFormat"] == "application/x-parquet"
    (table,) = value["recordSet"]
    types = {field["name"]: (field["dataType"], field.get("repeated", False)) for field in table["field"]}
    assert types == {name: ("sc:Integer", True) if name.endswith("_ids") else ("sc:Text", False) for name in PAIRS}
    assert value["isBasedOn"][0]["name"] == "raw.jsonl"
    assert "2 rows" in value["description"]
    assert value["license"] == "CC0-1.0"


def test_what_is_no_data_is_not_described(store: FolderStore, tmp_path: Path) -> None:
    model = put(store, tmp_path / "m", "checkpoint", "weights")
    with pytest.raises(StoreError, match="is a checkpoint; Croissant describes data"):
        croissant.describe(store, trace(store, model))
    with pytest.raises(StoreError, match="not in this store"):
        croissant.describe(store, trace(store, "sha256:" + "0" * 64))


def test_no_password_stands_in_a_command_line(store: FolderStore, run: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="MLFLOW_TRACKING_PASSWORD"):
        mlflow.export(store, "golden-otter", uri="https://ada:secret@mlflow.example.org")


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has MLflow and Croissant's library, which are large, beside what this one has.

    HEADRACE_TEST_PEERS may name one that is there.
    """
    if os.environ.get("HEADRACE_TEST_PEERS"):
        return Path(os.environ["HEADRACE_TEST_PEERS"])
    folder = tmp_path_factory.mktemp("peers")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    wanted = ["mlflow-skinny", "mlcroissant", "SQLAlchemy", "alembic", "pandas"]
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *wanted]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"MLflow and Croissant's library cannot be installed here: {done.stderr[-300:]}")
    (inside,) = folder.glob("lib/python*/site-packages")
    (inside / "zz-this.pth").write_text(f"{Path(pydantic.__file__).parents[1]}\n")
    return python


@pytest.fixture
def ask(peers: Path, tmp_path: Path) -> Callable[..., str]:
    """Run that Python, and return what it printed."""

    def asked(*arguments: str, code: int = 0) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
        done = subprocess.run([str(peers), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    return asked


@pytest.mark.slow
@pytest.mark.timeout(1800)  # packages are installed
def test_croissants_own_library_takes_the_description_and_reads_the_rows(
    store: FolderStore, pairs: str, ask: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "pulled"
    headrace = ("-m", "flows.cli")
    ask(*headrace, "pull", pairs, str(folder), "--store", store.url)
    options = ("--license", "CC0-1.0", "--store", store.url, "-o", str(folder / "croissant.json"))
    ask(*headrace, "croissant", pairs, *options)
    read = (
        "import json, sys, mlcroissant; data = mlcroissant.Dataset(sys.argv[1]);"
        "assert not data.metadata.ctx.issues.errors;"
        "plain = lambda value: value.decode() if isinstance(value, bytes) else list(value);"
        "print(json.dumps([{k.partition('/')[2]: plain(v) for k, v in row.items()} for row in data.records('train')]))"
    )
    rows = json.loads(ask("-c", read, str(folder / "croissant.json")))
    assert rows == pq.read_table(folder / "train.parquet").to_pylist()
    (folder / "train.parquet").write_bytes(b"others")
    refused = ask("-c", read, str(folder / "croissant.json"), code=1)  # the hash is another than was described
    assert "Download(train.parquet)" in refused


@pytest.mark.slow
@pytest.mark.timeout(1800)  # packages are installed
def test_mlflow_has_the_run_with_settings_metrics_inputs_and_digests(
    store: FolderStore, run: dict[str, Any], pairs: str, ask: Callable[..., str], tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    send = ("-m", "flows.cli", "mlflow", "golden-otter", "--uri", uri, "--store", store.url)
    assert "with 2 steps" in ask(*send)
    read = """import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
number = client.get_experiment_by_name("quickstart").experiment_id
found = {}
for run in client.search_runs([number]):
    losses = client.get_metric_history(run.info.run_id, "training/loss")
    found[run.info.run_name] = {
        "status": run.info.status, "seconds": (run.info.end_time - run.info.start_time) / 1000,
        "params": run.data.params, "tags": run.data.tags, "id": run.info.run_id,
        "losses": [(item.step, str(item.value)) for item in sorted(losses, key=lambda item: item.step)],
        "metrics": {name: str(value) for name, value in run.data.metrics.items()},
        "inputs": [json.loads(item.dataset.source) for item in run.inputs.dataset_inputs],
    }
print(json.dumps(found))"""
    found = json.loads(ask("-c", read, uri))
    whole, dpo, grpo = found["golden-otter"], found["dpo"], found["grpo"]
    assert (whole["status"], dpo["status"], grpo["status"]) == ("FAILED", "FINISHED", "FAILED")
    assert whole["seconds"] == 60
    assert {dpo["tags"]["mlflow.parentRunId"], grpo["tags"]["mlflow.parentRunId"]} == {whole["id"]}
    assert dpo["params"]["beta"] == "0.1"
    assert dpo["params"]["lora.rank"] == "8"
    assert len(dpo["params"]["note"]) == 6000
    assert dpo["losses"] == [[1, "2.5"], [2, "nan"], [3, "1.5"]]
    assert dpo["metrics"]["loss"] == "1.5"
    assert dpo["metrics"]["gr/_/eat"] == "nan"
    assert dpo["tags"]["headrace.artifact"] == run["steps"]["dpo"]["artifact"]
    assert dpo["inputs"] == [{"artifact": pairs, "store": store.url}]
    assert grpo["tags"]["headrace.message"] == "it broke: ☹"
    assert "was sent before" in ask(*send, code=2)
