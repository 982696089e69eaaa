"""A store that was rewritten in every place that ties it together is told by a signature made before: by the command,
and on the page of the check."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from served_pages import Pages
from small_store import FIRST, SECOND
from test_pages import plain

from flows.command.listing import pull_to
from flows.lineage import verbs
from stages.artifacts import FolderStore, promote, read_manifest
from stages.fingerprint import stage_key

pytest.importorskip("model_signing")
pytest.importorskip("in_toto_attestation")


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public half."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    files = tmp_path / "key.pem", tmp_path / "key.pub"
    encoding, plainly = serialization.Encoding.PEM, serialization.NoEncryption()
    files[0].write_bytes(private.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plainly))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    files[1].write_bytes(private.public_key().public_bytes(encoding, form))
    return files


def rewrite_record(store: FolderStore, key: str) -> None:
    """Another learning rate in a record, with the key that belongs to it, as a careful forger does."""
    value = json.loads(store.get(key))
    value["identity"]["learning_rate"] = value["config"]["learning_rate"] = 0.5
    value["key"] = stage_key(value["stage"], value["identity"], value["inputs"], value["code"]["digest"])
    store.delete(key)
    store.put(f"results/{value['stage']}/{value['key']}.json", json.dumps(value).encode())


def test_whatever_is_rewritten_in_a_store_is_not_what_was_signed(
    own_pages: Pages, key: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, folder = own_pages.small, tmp_path / "model"
    store: Any = small.store
    production = small.made[SECOND]["grpo"]
    pull_to(store.url, "production", folder, as_json=False)
    verbs.attest(store.url, "production", None, folder=folder, key=key[0])
    own_pages.site.signed = ((folder, key[1]),)

    def said(name: str = "production") -> str:
        capsys.readouterr()
        code = verbs.verify_signed(store.url, name, folder, key[1], as_json=False)
        told = capsys.readouterr().out
        assert (code == 0) == told.startswith("ok: "), told
        return told

    def page(digest: str = production) -> str:
        return plain(own_pages.text(f"/artifact/{digest}/check"))

    assert said().startswith("ok: ")
    with chdir(tmp_path):  # as it is typed: with names from where one is
        verbs.attest(store.url, "production", None, folder=Path("model"), key=Path("key.pem"))
        assert verbs.verify_signed(store.url, "production", Path("model"), Path("key.pub"), as_json=True) == 0
    assert "As it was signed" in page()

    weights = next(entry.blob for entry in read_manifest(store, production).files if entry.path == "model.safetensors")
    base = small.made[FIRST]["base"]
    sft = f"results/sft/{small.keys[SECOND, 'sft']}.json"
    other = small.made[FIRST]["grpo"]
    cases: list[tuple[str, Callable[[], Any], str, str]] = [
        (weights, lambda: store.put(weights, b"x" * store.size(weights)), production, "not those that were signed"),
        (manifest_key(base), lambda: store.put(manifest_key(base), b"{}"), production, "base: "),
        (sft, lambda: rewrite_record(store, sft), production, "sft: the record that was signed"),
        ("refs/production.json", lambda: promote(store, "production", other, who="eve"), other, "none that was signed"),
    ]
    for damaged, tamper, asked, told in cases:
        before = store.get(damaged)
        results = {info.key for info in store.list("results/")}
        tamper()
        text = said()
        assert "not as signed" in text
        assert told in text or "is not the one that was signed" in text
        shown = page(asked)
        assert "The signature check fails" in shown, damaged
        assert told in shown
        for info in list(store.list("results/")):
            if info.key not in results:
                store.delete(info.key)
        store.put(damaged, before)
    assert said().startswith("ok: ")
    assert "As it was signed" in page()

    (folder / "config.json").write_text("{}")  # the signed folder itself
    assert "does not hold" in said()
    assert "does not hold" in page()


def manifest_key(digest: str) -> str:
    return f"manifests/{digest[7:9]}/{digest[7:]}.json"


def test_that_a_model_was_made_again_since_is_no_fault(
    own_pages: Pages, key: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, folder = own_pages.small, tmp_path / "model"
    pull_to(small.store.url, "production", folder, as_json=False)
    verbs.attest(small.store.url, "production", None, folder=folder, key=key[0])
    document = json.loads(small.store.get(f"results/sft/{small.keys[SECOND, 'sft']}.json"))
    kept = {name: document[name] for name in ("inputs", "config", "identity", "metrics")}
    made = small.made[SECOND]["sft"]
    small.result("sft", "checkpoint", made, "later-run", finished="2026-03-01T00:00:00+00:00", **kept)
    capsys.readouterr()
    assert verbs.verify_signed(small.store.url, "production", folder, key[1], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
