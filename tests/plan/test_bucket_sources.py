"""Data that lies in a bucket, as the input of a recipe and of an import."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import s3_server as server_module
from s3_proxy import Proxy

from flows import sources
from flows.command import store as store_verbs
from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.recipe_model import InputRef, RecipeError
from stages.artifacts import FolderStore, HashCache, fetch, open_store, read_manifest, read_result, verify_all

BUCKET = "headrace-tests"
ROWS = {"2026/a.jsonl": b'{"n": 1}\n', "2026/b.jsonl": b'{"n": 2}\n', "2026/deep/c.jsonl": b'{"n": 3}\n'}
OTHERS = {
    "2026/notes.txt": b"notes",
    "2026/.hidden.jsonl": b"{}",
    "2026/": b"",
    "2026/deep/": b"",
    "2025/z.jsonl": b"{}",
}


@pytest.fixture
def client(s3_server: server_module.Server) -> Any:
    return server_module.client(s3_server)


@pytest.fixture
def data(s3_url: str, client: Any) -> str:
    """URL of a folder of a bucket that holds ROWS and OTHERS."""
    for name, body in (ROWS | OTHERS).items():
        put(client, s3_url, name, body)
    return s3_url


def put(client: Any, url: str, name: str, body: bytes) -> None:
    client.put_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/{name}", Body=body)


def files(*patterns: str) -> InputRef:
    return InputRef("data", ", ".join(patterns), "files", patterns=patterns, where="recipe.yaml:3")


def names(*patterns: str) -> list[str]:
    return [name for name, _ in sources.find_files(patterns, Path())[1]]


def got(proxy: Proxy, since: int) -> list[str]:
    """Names of the objects that were read since a request."""
    asked = [(method, path.partition("?")) for method, path, _ in proxy.requests[since:]]
    return sorted(
        path.rpartition("/")[2] for method, (path, _, query) in asked if method == "GET" and "list" not in query
    )


def test_patterns_mean_what_they_mean_for_files(data: str, tmp_path: Path) -> None:
    """The same tree as files of this machine gives the same names."""
    for name, body in (ROWS | OTHERS).items():
        if not name.endswith("/"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
    patterns = ("2026/*.jsonl", "2026/**/*.jsonl", "**/?.jsonl", "202[56]/*.jsonl", "2026", "2026/a.jsonl", "*/deep/*")
    for pattern in patterns:
        assert names(f"{data}/{pattern}") == names(str(tmp_path / pattern)), pattern
    assert names(f"{data}/2026/") == ["a.jsonl", "b.jsonl", "deep/c.jsonl", "notes.txt"]
    assert names(f"{data}/2026/a.jsonl", f"{data}/2025") == ["2025/z.jsonl", "2026/a.jsonl"]
    assert names(f"{data}/2026/a.jsonl", f"{data}/2026/?.jsonl") == ["a.jsonl", "b.jsonl"]


def test_data_of_a_bucket_is_the_same_artifact_as_the_files_themselves(data: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "data" / name).write_bytes(ROWS[f"2026/{name}"])
    store = FolderStore(tmp_path / "store")
    far, near = (
        sources.resolve(files(f"{place}/*.jsonl"), Path(), store) for place in (f"{data}/2026", tmp_path / "data")
    )
    assert far.digest == near.digest
    assert far.kind == "source"
    assert list(store.list("")) == []
    assert sources.bring(far, store, "r") == far.digest
    fetch(store, str(far.digest), tmp_path / "out")
    assert (tmp_path / "out" / "b.jsonl").read_bytes() == ROWS["2026/b.jsonl"]
    assert list(verify_all(store)) == []


def test_what_has_not_changed_is_read_once_and_what_is_new_alone(
    data: str, client: Any, through: Proxy, tmp_path: Path
) -> None:
    store, place = FolderStore(tmp_path / "store"), tmp_path / "hashes.json"

    def night() -> tuple[str, list[str]]:
        """What a night does: find the data, bring it; and what it read."""
        since, hashes = len(through.requests), HashCache(place)
        digest = sources.bring(sources.resolve(files(f"{data}/2026/**"), Path(), store, hashes), store, "r", hashes)
        hashes.save()
        return digest, got(through, since)

    first, read = night()
    assert read == ["a.jsonl", "b.jsonl", "c.jsonl", "notes.txt"]  # once, though hashed and then stored
    assert night() == (first, [])
    put(client, data, "2026/d.jsonl", b'{"n": 4}\n')
    second, read = night()
    assert read == ["d.jsonl"]
    assert {entry.path for entry in read_manifest(store, second).files} == {
        "a.jsonl", "b.jsonl", "d.jsonl", "deep/c.jsonl", "notes.txt"
    }  # fmt: skip
    time.sleep(1.1)  # the server's times have seconds
    put(client, data, "2026/a.jsonl", b'{"n": 1}\n')  # touched: the same bytes
    assert night()[0] == second
    put(client, data, "2026/a.jsonl", b'{"n": 9}\n')  # of the same size
    third, read = night()
    assert (third != second, read) == (True, ["a.jsonl"])


def test_without_a_cache_on_this_machine_data_is_stored_all_the_same(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_SIZE", "0")
    store = FolderStore(tmp_path / "store")
    digest = sources.bring(sources.resolve(files(f"{data}/2026/*.jsonl"), Path(), store), store, "r")
    fetch(store, digest, tmp_path / "out")
    assert (tmp_path / "out" / "a.jsonl").read_bytes() == ROWS["2026/a.jsonl"]


def test_data_that_is_replaced_while_it_is_read_is_refused(
    data: str, client: Any, through: Proxy, tmp_path: Path
) -> None:
    store = FolderStore(tmp_path / "store")

    def choose(method: str, path: str, number: int) -> str:
        if method == "GET" and path.endswith("b.jsonl"):
            put(client, data, "2026/b.jsonl", b'{"n": 7}\n')
        return "pass"

    through.choose = choose
    with pytest.raises(RecipeError, match=r"recipe.yaml:3: input data: s3://.*/b.jsonl was replaced while it was read"):
        sources.resolve(files(f"{data}/2026/*.jsonl"), Path(), store)


def test_what_a_bucket_lacks_is_one_clear_sentence(data: str, client: Any, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    put(client, data, "model/config.json", b"{}")
    put(client, data, "odd/a\x01b", b"x")
    for pattern, words in (
        (f"{data}/2026/*.parquet", "matches no object below s3://.*/2026"),
        (f"{data}/2024", "is no object, and no folder of objects"),
        (f"{data}/2024/", "has no objects"),
        ("s3://no-such-bucket/x", "data s3://no-such-bucket: http://.* has no bucket no-such-bucket"),
        (f"{data}/model", "models are not read from a bucket: download it"),
        (f"{data}/odd", "has a control character"),
    ):
        with pytest.raises(RecipeError, match=words) as caught:
            sources.resolve(files(pattern), Path(), store)
        assert str(caught.value).startswith("recipe.yaml:3: input data: ")
        assert "\n" not in str(caught.value)
    (tmp_path / "a.jsonl").write_text("x")
    with pytest.raises(RecipeError, match=r"would both be a\.jsonl in the artifact"):
        sources.resolve(files(str(tmp_path / "a.jsonl"), f"{data}/2026/a.jsonl"), Path(), store)


def test_an_import_takes_data_of_a_bucket_into_a_store_in_a_bucket(
    data: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"{data}-store"
    store_verbs.import_artifact(url, [f"{data}/2026/*.jsonl"], ref="raw", why="", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["files"], told["bytes"], told["kind"]) == (2, 18, "source")
    store = open_store(url)
    key = hashlib.sha256(f"import:{told['artifact']}".encode()).hexdigest()
    found = read_result(store, "import", key)
    assert found is not None
    assert list(verify_all(store)) == []


def test_a_recipe_names_data_of_a_bucket(data: str, tmp_path: Path) -> None:
    package = tmp_path / "toy" / "words"
    package.mkdir(parents=True)
    (tmp_path / "toy" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "stage.py").write_text("def run(context):\n    pass\n")
    (package / "config.py").write_text(
        "from stages.contract import Input, StageConfig\n\n\n"
        'class Config(StageConfig):\n    INPUTS = {"data": Input(("source",))}\n    OUTPUT = "dataset"\n'
    )
    recipe = tmp_path / "recipe.yaml"
    for given in (f"{data}/2026/*.jsonl", f"[{data}/2026/a.jsonl, {data}/2026/b.jsonl]"):
        recipe.write_text(f"name: r\nsteps:\n  words:\n    stage: toy.words\n    inputs:\n      data: {given}\n")
        plan = make_plan(load_recipe(str(recipe)), FolderStore(tmp_path / "store"))
        assert plan["words"].key is not None
        assert [name for name, _ in plan.sources["words", "data"].files] == ["a.jsonl", "b.jsonl"]
    recipe.write_text("name: r\nsteps:\n  words: {stage: toy.words, inputs: {data: 's3://Not_One/x'}}\n")
    with pytest.raises(RecipeError, match=r"'s3://Not_One/x' names no bucket; write s3://BUCKET/PATH"):
        load_recipe(str(recipe))
