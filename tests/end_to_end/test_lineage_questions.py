"""Questions about the miniature's models, each answered by the command and checked against what was planted or against
a computation of our own. Proofs: what is tampered with is found."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from mini_runs import RUN
from mini_runs import headrace as in_a_process

from flows.cli import main
from stages.examples.arithmetic import prompts as arithmetic_prompts
from stages.tokenize.dataset import read_packed

# Two runs of the miniature come before the first test; on a machine that is busy they take long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def changed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature run again with a line of the reward's code and DPO's beta changed; `production` names both models,
    entry 1 the first."""
    folder = tmp_path_factory.mktemp("changed") / "project"
    shutil.copytree(finished, folder)
    headrace(folder, "promote", "grpo", "production", "--why", "the first")
    reward = folder / "mini_rewards.py"
    code = reward.read_text()
    assert "len(set(" in code
    reward.write_text(code.replace("len(set(", "2.0 * len(set(", 1))
    in_a_process(folder, *RUN, "--set", "dpo.beta=0.2")
    headrace(folder, "promote", "grpo", "production", "--why", "beta 0.2")
    return folder


def headrace(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run the command in this process, for starting one takes longer than what most of these do."""
    out, errors = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["headrace", *arguments]
    try:
        with chdir(folder), redirect_stdout(out), redirect_stderr(errors):
            main()
        ended: Any = 0
    except SystemExit as end:
        ended = end.code or 0
    finally:
        sys.argv = before
    assert ended == code, f"{arguments} gave {ended}:\n{out.getvalue()}{errors.getvalue()}"
    return out.getvalue()


def said(folder: Path, *arguments: str, code: int = 0) -> Any:
    return json.loads(headrace(folder, *arguments, "--json", code=code))


def pulled(folder: Path, name: str, target: Path) -> Path:
    headrace(folder, "pull", name, str(target))
    return target


# Which data, which models


def test_a_raw_file_leads_to_every_model_that_has_seen_it(changed: Path, tmp_path: Path) -> None:
    source = pulled(changed, artifact_of(changed, "corpus.data.files"), tmp_path / "source") / "this.py"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    answers = [said(changed, "impact", what) for what in (str(source), digest, "this.py")]
    assert {answer["sha256"] for answer in answers} == {digest}
    answer = answers[0]
    assert {made["name"] for made in answer["made"] if made["kind"] == "checkpoint"} == {"base", "sft", "dpo", "grpo"}
    assert answer["kinds"]["checkpoint"] == 6  # base, sft, and two each of dpo and grpo
    assert {(ref["ref"], ref["now"]) for ref in answer["refs"]} == {("production", True), ("production", False)}
    text = headrace(changed, "impact", str(source))
    assert "6 checkpoints" in text
    assert "refs: production (since " in text
    (tmp_path / "new.txt").write_text("never seen")
    headrace(changed, "impact", str(tmp_path / "new.txt"), code=2)


def artifact_of(folder: Path, source: str) -> str:
    (run,) = said(folder, "status", "-n", "1")
    return str(run["sources"][source])


def test_lineage_goes_up_and_down(changed: Path) -> None:
    up, down = (said(changed, "lineage", "sft", way) for way in ("--up", "--down"))
    assert {node["made_by"]["step"] for node in up["nodes"] if node["made_by"]} == {"sft", "base", "chat", "corpus"}
    made = {node["made_by"]["step"] for node in down["nodes"]}
    assert made == {"sft", "samples", "pairs", "reference", "dpo", "grpo", "report"}
    assert "model of dpo  checkpoint" in headrace(changed, "lineage", "sft", "--down")
    assert headrace(changed, "lineage", "sft", "--down", "--mermaid").startswith("flowchart TD")


def test_a_planted_data_file_is_found_by_impact_and_by_diff(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        rows = "".join(json.dumps({"text": f"document {number} {row} of plain words"}) + "\n" for row in range(20))
        (tmp_path / f"data/part{number}.jsonl").write_text(rows)
    (tmp_path / "text.yaml").write_text(
        "name: text\nsteps:\n"
        "  corpus: {stage: tokenize, inputs: {data: data/*.jsonl}, format: text, row_length: 64,"
        " train_tokenizer: {vocab_size: 280}}\n"
        "  lines: {stage: tokenize, inputs: {data: data/part0.jsonl, tokenizer: corpus}, format: text,"
        " row_length: 64}\n"
    )
    headrace(tmp_path, "run", "text.yaml", "--no-prefect")
    headrace(tmp_path, "promote", "corpus", "good")
    leaked = tmp_path / "data/leaked.jsonl"
    leaked.write_text(json.dumps({"text": "the answer to question 7 is 42"}) + "\n")
    part = tmp_path / "data/part1.jsonl"
    part.write_text(part.read_text().replace("document 1 3 of", "document 1 3 out of"))
    headrace(tmp_path, "run", "text.yaml", "--no-prefect")
    headrace(tmp_path, "promote", "corpus", "good")
    answer = said(tmp_path, "impact", "data/leaked.jsonl")
    assert [(made["kind"], made["name"]) for made in answer["made"] if made["kind"] == "dataset"] == [
        ("dataset", "lines"),  # it takes its tokenizer from the corpus
        ("dataset", "corpus"),
    ]
    differences = headrace(tmp_path, "diff", "good@1", "good")
    assert re.search(r"data +corpus.data.files +leaked.jsonl added, \+1 -0 rows", differences)
    assert re.search(r"part1.jsonl \+1 -1 rows", differences)
    assert "part0" not in differences
    assert "config" not in differences


# What changed, and why


def test_diff_names_the_changed_beta_the_changed_line_and_the_metrics(changed: Path) -> None:
    text = headrace(changed, "diff", "production@1", "production")
    assert re.search(r"config +dpo +beta 0.1 -> 0.2", text)
    assert re.search(r"code +grpo +mini_rewards.py", text)
    assert re.search(r"(?m)^-.*float\(len\(set\(text", text)
    assert re.search(r"(?m)^\+.*float\(2\.0 \* len\(set\(text", text)
    assert re.search(r"grpo +reward ", text)
    assert "data " not in text.split("metrics")[0]
    value = said(changed, "diff", "production@1", "production")
    causes = {step["name"]: step for step in value["steps"] if step["config"] or step["code"] or step["data"]}
    assert set(causes) == {"dpo", "grpo"}  # other rewards, and yet the same pairs: the rollouts cannot matter
    assert causes["dpo"]["config"] == ["beta 0.1 -> 0.2"]
    assert [step["name"] for step in value["steps"]] == ["dpo", "grpo"]
    assert "byte for byte" in headrace(changed, "diff", "production", "grpo")
    assert "---" not in headrace(changed, "diff", "production@1", "production", "--no-code")


def test_why_tells_what_made_a_step_run_or_be_reused(changed: Path) -> None:
    assert "was reused" in headrace(changed, "why", "sft")
    answer = said(changed, "why", "dpo")
    assert answer["status"] == "done"
    assert answer["differences"][0] == "beta 0.1 -> 0.2"
    assert "code changed: mini_rewards.py" in said(changed, "why", "samples")["differences"]
    first = said(changed, "status", "-n", "2")[1]["id"]
    assert f"ran in run {first}: never run" in headrace(changed, "why", "dpo", first)


def test_runs_and_models_have_their_cost_and_what_reuse_saved(changed: Path) -> None:
    second, first = said(changed, "runs")
    assert not first["cost"]["saved"]
    by_step = {step["step"]: step for step in second["cost"]["steps"]}
    base = json.loads(next((changed / ".headrace/results/pretrain").glob("*.json")).read_text())
    assert by_step["base"]["saved"]["cpu"] == pytest.approx(base["seconds"])
    assert by_step["dpo"]["spent"]["cpu"] > 0
    assert second["cost"]["saved"]["cpu"] == pytest.approx(
        sum(step["saved"].get("cpu", 0.0) for step in by_step.values())
    )
    model = said(changed, "cost", "production")
    paid = {(step["step"], step["run"]) for step in model["steps"]}
    assert ("base", first["name"]) in paid
    assert ("grpo", second["name"]) in paid
    assert 0 < model["saved"]["cpu"] < model["spent"]["cpu"]
    assert "reuse saved" in headrace(changed, "cost", second["name"])
    assert "production" in headrace(changed, "cost")


# Which rows


def permutation(rows: int, epoch: int) -> np.ndarray:
    """The order of the data as the architecture page has it, computed here anew."""
    seed = int.from_bytes(hashlib.sha256(json.dumps(["data order", 0, epoch]).encode()).digest()[:8], "big") >> 1
    return np.random.default_rng(seed).permutation(rows)


def rows_of(step: int, rows: int, batch: int) -> list[int]:
    stream = np.concatenate([permutation(rows, epoch) for epoch in range(step * batch // rows + 1)])
    return stream[(step - 1) * batch : step * batch].tolist()


def test_trace_of_sft_is_what_the_step_trained_on(finished: Path, tmp_path: Path) -> None:
    packed = read_packed(pulled(finished, "chat", tmp_path / "chat"))
    model = pulled(finished, "sft", tmp_path / "sft")
    records = [json.loads(line) for line in (model / "training.jsonl").open()]
    for step in (1, 5, 8):
        answer = said(finished, "trace", "sft", "--step", str(step))
        rows = [row["row"] for row in answer["rows"]]
        assert rows == rows_of(step, len(packed.input_ids), 4)
        # The run's own word: it counted the targets of the step.
        assert records[step - 1]["weight"] == int(packed.loss_mask[rows].sum())
        for row in answer["rows"]:
            assert sum(piece["length"] for piece in row["pieces"]) == int((packed.segment_ids[row["row"]] > 0).sum())
            assert {piece["place"]["source"] for piece in row["pieces"]} == {"stages.examples.arithmetic:chats"}
    headrace(finished, "trace", "sft", "--step", "9", code=2)
    headrace(finished, "trace", "chat", "--step", "1", code=2)


def test_trace_of_dpo_leads_through_the_rollouts_to_the_prompts(finished: Path, tmp_path: Path) -> None:
    pairs = pq.read_table(pulled(finished, "pairs", tmp_path / "pairs") / "train.parquet").to_pylist()
    rollouts = pq.read_table(pulled(finished, "samples", tmp_path / "samples") / "rollouts.parquet").to_pylist()
    texts = [row["prompt"] for row in arithmetic_prompts(count=32, seed=0)]
    answer = said(finished, "trace", "dpo", "--step", "6")
    assert [row["row"] for row in answer["rows"]] == rows_of(6, len(pairs), 2)
    for row in answer["rows"]:
        (piece,) = row["pieces"]
        place = piece["place"]
        line = rollouts[place["number"] - 1]
        assert (place["path"], place["unit"]) == ("rollouts.parquet", "row")
        assert line["completion_ids"] == pairs[row["row"]]["chosen_ids"]
        assert line["prompt"] == texts[place["via"]["number"] - 1]


def test_trace_of_grpo_names_the_prompts_that_were_sampled(finished: Path, tmp_path: Path) -> None:
    sampled = pq.read_table(pulled(finished, "grpo/rollouts", tmp_path / "rollouts") / "rollouts.parquet").to_pylist()
    texts = [row["prompt"] for row in arithmetic_prompts(count=32, seed=0)]
    batch_of = "batch" if "batch" in sampled[0] else "step"
    batches = list(dict.fromkeys(row[batch_of] for row in sampled))
    for step in (1, 2, 7):  # two optimiser steps share a batch of completions
        answer = said(finished, "trace", "grpo", "--step", str(step))
        expected = {row["prompt"] for row in sampled if row[batch_of] == batches[(step - 1) // 2]}
        assert {texts[row["pieces"][0]["place"]["number"] - 1] for row in answer["rows"]} == expected


# Proof


def blob_of(folder: Path, name: str, path: str, tmp_path: Path) -> Path:
    manifest = json.loads(manifest_of(folder, name).read_text())
    sha256 = next(entry["sha256"] for entry in manifest["files"] if entry["path"] == path)
    return folder / ".headrace/blobs" / sha256[:2] / sha256


def manifest_of(folder: Path, name: str) -> Path:
    digest = said(folder, "lineage", name)["root"].removeprefix("sha256:")
    return folder / ".headrace/manifests" / digest[:2] / f"{digest}.json"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def result_of(folder: Path, step: str) -> Path:
    made = said(folder, "lineage", step)["nodes"][0]["made_by"]
    return folder / f".headrace/results/{made['stage']}/{made['key']}.json"


def test_verify_deep_finds_whatever_was_tampered_with(changed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(changed, folder)
    text = headrace(folder, "verify", "production", "--deep")
    assert re.match(r"ok: \d+ artifacts, .*, 1 sources, 1\d records, every hash recomputed", text)
    code = json.loads(result_of(folder, "dpo").read_text())["code"]
    kept = json.loads((folder / f".headrace/manifests/{code['artifact'][7:9]}/{code['artifact'][7:]}.json").read_text())
    loss = next(entry["sha256"] for entry in kept["files"] if entry["path"] == "stages/dpo/loss.py")
    metric = json.loads(result_of(folder, "grpo").read_text())["metrics"]["reward"]
    cases = [
        (blob_of(folder, "sft", "model.safetensors", tmp_path), flip, "model.safetensors"),
        (folder / f".headrace/blobs/{loss[:2]}/{loss}", flip, "stages/dpo/loss.py"),
        (manifest_of(folder, "chat"), flip, "manifests/"),
        (manifest_of(folder, "chat"), Path.unlink, "missing"),
        (result_of(folder, "dpo"), lambda path: edit(path, '"beta": 0.2', '"beta": 0.7'), "identity"),
        (result_of(folder, "dpo"), replace_beta, "not the hash of its settings"),
        (result_of(folder, "base"), flip_input, "not the hash of its settings"),
        (result_of(folder, "grpo"), lambda path: edit(path, f'"reward": {metric}', '"reward": 99.5'), "its log says"),
        (folder / ".headrace/refs/production.json", break_history, "refs/production.json"),
    ]
    for path, tamper, named in cases:
        before = path.read_bytes()
        tamper(path)
        found = headrace(folder, "verify", "production", "--deep", code=1)
        assert named in found, (path, found)
        path.write_bytes(before)
    assert "ok:" in headrace(folder, "verify", "production", "--deep")


def flip_input(path: Path) -> None:
    value = json.loads(path.read_text())
    value["inputs"] = {
        name: digest[:-1] + ("0" if digest[-1] != "0" else "1") for name, digest in value["inputs"].items()
    }
    path.write_text(json.dumps(value))


def replace_beta(path: Path) -> None:
    path.write_text(path.read_text().replace('"beta": 0.2', '"beta": 0.7'))


def break_history(path: Path) -> None:
    path.write_text(re.sub('"previous": "sha256:[0-9a-f]{64}"', f'"previous": "sha256:{"0" * 64}"', path.read_text()))


def test_an_attestation_is_valid_in_toto_and_slsa_and_names_code_and_raw_data(changed: Path, tmp_path: Path) -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    provenance = pytest.importorskip("in_toto_attestation.predicates.provenance.v1.provenance_pb2")
    statement = pytest.importorskip("in_toto_attestation.v1.statement")
    headrace(changed, "attest", "production", "--output", str(tmp_path / "statement.json"))
    value = json.loads((tmp_path / "statement.json").read_text())
    parsed = json_format.ParseDict(value, statement.Statement([], "", {}).pb)
    statement.Statement.copy_from_pb(parsed).validate()
    json_format.ParseDict(value["predicate"], provenance.Provenance())
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in value["subject"]}
    model = pulled(changed, "production", tmp_path / "model")
    assert subjects["model.safetensors"] == hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert "sha256:" + subjects["manifest"] == said(changed, "refs", "production")[0]["artifact"]
    needed = {
        item["name"]: item["digest"]["sha256"] for item in value["predicate"]["buildDefinition"]["resolvedDependencies"]
    }
    source = pulled(changed, artifact_of(changed, "corpus.data.files"), tmp_path / "source") / "this.py"
    assert needed["imported/this.py"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert {"code", "dpo", "sft", "base", "corpus"} <= needed.keys()
    headrace(changed, "attest", artifact_of(changed, "corpus.data.files"), code=2)


def test_a_signature_is_checked_by_the_models_own_tool_and_fails_on_a_changed_file(
    changed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    plain = serialization.NoEncryption()
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(serialization.Encoding.PEM, form))
    model = pulled(changed, "grpo", tmp_path / "model")
    headrace(changed, "attest", "grpo", "--sign", str(model), "--key", str(key))

    def check() -> subprocess.CompletedProcess[str]:
        tool = [sys.executable, "-m", "model_signing", "verify", "key", str(model)]
        options = ["--signature", str(model / "model.sig"), "--public_key", str(public)]
        return subprocess.run([*tool, *options], capture_output=True, text=True)

    assert check().returncode == 0, check().stderr
    for name in ("config.json", "provenance.intoto.json"):
        before = (model / name).read_bytes()
        (model / name).write_bytes(before + b" ")
        assert check().returncode != 0
        (model / name).write_bytes(before)
    (model / "config.json").write_text("{}")
    headrace(changed, "attest", "grpo", "--sign", str(model), "--key", str(key), code=2)


def test_the_events_of_a_run_are_valid_openlineage(changed: Path, tmp_path: Path) -> None:
    pytest.importorskip("openlineage.client")
    from jsonschema import Draft202012Validator, FormatChecker

    headrace(changed, "events", "--output", str(tmp_path / "events.jsonl"))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    validator = Draft202012Validator(RUN_EVENT, format_checker=FormatChecker())
    for event in events:
        assert [error.message for error in validator.iter_errors(event)] == []
    by_run: dict[str, list[str]] = {}
    for event in events:
        by_run.setdefault(event["run"]["runId"], []).append(event["eventType"])
    assert set(map(tuple, by_run.values())) == {("START", "COMPLETE")}
    (grpo,) = [event for event in events if event["job"]["name"] == "mini.grpo" and event["eventType"] == "COMPLETE"]
    versions = {item["name"]: item["facets"]["version"]["datasetVersion"] for item in grpo["outputs"]}
    assert versions["mini.grpo"] == said(changed, "refs", "production")[0]["artifact"]
    assert {item["name"] for item in grpo["inputs"]} == {"mini.dpo", "mini.prompts"}
    (corpus,) = [
        event for event in events if event["job"]["name"] == "mini.corpus" and event["eventType"] == "COMPLETE"
    ]
    assert [item["name"] for item in corpus["inputs"]] == ["mini.corpus.data.files"]


# What https://openlineage.io/spec/2-0-2/OpenLineage.json requires of a run event, of its datasets and of every facet.
FACETS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "required": ["_producer", "_schemaURL"],
        "properties": {
            "_producer": {"type": "string", "format": "uri"},
            "_schemaURL": {"type": "string", "format": "uri"},
        },
    },
}
NAMED = {
    "type": "object",
    "required": ["namespace", "name"],
    "properties": {
        "namespace": {"type": "string"},
        "name": {"type": "string"},
        "facets": FACETS,
        "inputFacets": FACETS,
        "outputFacets": FACETS,
    },
}
RUN_EVENT = {
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job"],
    "properties": {
        "eventTime": {"type": "string", "format": "date-time"},
        "producer": {"type": "string", "format": "uri"},
        "schemaURL": {"type": "string", "format": "uri"},
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "run": {
            "type": "object",
            "required": ["runId"],
            "properties": {"runId": {"type": "string", "format": "uuid"}, "facets": FACETS},
        },
        "job": NAMED,
        "inputs": {"type": "array", "items": NAMED},
        "outputs": {"type": "array", "items": NAMED},
    },
}
