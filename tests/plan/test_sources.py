"""Inputs from outside: files, the standard library, models, artifacts, and the hub's local cache."""

import hashlib
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from flows.recipe_model import InputRef, RecipeError
from flows.sources import Source, bring, find_files, resolve
from stages.artifacts import FolderStore, HashCache, fetch, open_store, promote, publish, read_manifest, s3, s3_transfer

REVISION = "0123456789abcdef0123456789abcdef01234567"


def files(*patterns: str) -> InputRef:
    return InputRef("data", ", ".join(patterns), "files", patterns=patterns, where="recipe.yaml:5")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    opened = open_store(tmp_path / "store")
    assert isinstance(opened, FolderStore)
    return opened


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in ("a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt", ".hidden", "__pycache__/x.txt", "other.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("data/a.txt",), ["a.txt"]),
        (("data/*.txt",), ["a.txt", "b.txt"]),
        (("data",), ["a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt", "other.json"]),
        (("data/**/*.txt",), ["a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt"]),
        (("data/a.txt", "data/deep/c.txt"), ["a.txt", "deep/c.txt"]),
        (("data/b.txt", "data/*.txt"), ["a.txt", "b.txt"]),
        (("data/[ab].txt",), ["a.txt", "b.txt"]),
        (("data/../data/a.txt",), ["a.txt"]),
    ],
)
def test_paths_in_an_artifact_do_not_say_where_the_data_lay(
    data: Path, patterns: tuple[str, ...], names: list[str]
) -> None:
    assert find_files(patterns, data.parent) == ("source", [(name, data / name) for name in names])
    absolute = tuple(str(data.parent / pattern) for pattern in patterns)
    assert find_files(absolute, Path("/")) == ("source", [(name, data / name) for name in names])


def test_files_of_the_standard_library_keep_their_path_in_it() -> None:
    kind, found = find_files(("stdlib:pydoc_data/topics.py", "stdlib:js*/d*.py"), Path("/"))
    root = Path(sysconfig.get_path("stdlib"))
    assert kind == "source"
    assert found == [(name, root / name) for name in ("json/decoder.py", "pydoc_data/topics.py")]


def test_a_folder_whose_name_has_a_bracket_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x[1]").mkdir()
    (tmp_path / "x[1]" / "a.txt").write_text("a")
    assert [name for name, _ in find_files(("x[1]/a.txt",), tmp_path)[1]] == ["a.txt"]
    assert [name for name, _ in find_files(("*.txt",), tmp_path / "x[1]")[1]] == ["a.txt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("data/nothing.txt", "there is no file"),
        ("data/*.parquet", "matches no file below"),
        ("nowhere/*.txt", "which does not exist"),
        ("stdlib:nothing.py", "matches no file of Python's standard library"),
        ("data/empty", "holds no files"),
        ("/dev/null", "/dev/null is neither a file nor a folder"),
        ("stdlib:../*", "leads out of Python's standard library"),
        ("stdlib:/etc/hostname", "leads out of Python's standard library"),
        ("data/gone.txt*", "is a link to a file that does not exist"),
    ],
)
def test_what_is_not_there_is_refused(data: Path, store: FolderStore, pattern: str, message: str) -> None:
    (data / "empty").mkdir()
    (data / "gone.txt1").symlink_to(data / "gone")
    with pytest.raises(RecipeError, match=r"^recipe.yaml:5: input data: ") as caught:
        resolve(files(pattern), data.parent, store)
    assert message in str(caught.value)


def test_a_path_that_exists_where_the_command_was_given_is_pointed_out(
    data: Path, store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    with pytest.raises(RecipeError, match=r"paths start from the recipe.s folder, and .*/data/a.txt exists: give that"):
        resolve(files("a.txt"), tmp_path / "elsewhere", store)


def test_two_files_with_one_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text("mine")
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match=r"would both be json/decoder.py in the artifact; rename one"):
        find_files(("stdlib:json/decoder.py", "json/decoder.py", "x"), tmp_path)


def test_resolving_writes_nothing_and_bringing_gives_the_same_digest(data: Path, store: FolderStore) -> None:
    source = resolve(files("data/*.txt"), data.parent, store)
    assert not store.root.exists()
    assert bring(source, store, "run") == source.digest
    manifest = read_manifest(store, str(source.digest))
    # The digest of a file's content, computed here.
    assert {entry.path: entry.sha256 for entry in manifest.files} == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in ("a.txt", "b.txt")
    }


def test_a_file_that_changes_between_plan_and_run_is_refused(data: Path, store: FolderStore) -> None:
    source = resolve(files("data/a.txt"), data.parent, store)
    (data / "a.txt").write_text("changed")
    with pytest.raises(RecipeError, match="changed while the run was starting; run it again"):
        bring(source, store, "run")


def test_the_digest_follows_a_file_that_changes_with_a_cache_too(data: Path, store: FolderStore) -> None:
    path = data / "a.txt"
    before = resolve(files("data/a.txt"), data.parent, store, HashCache(data / "cache.json"))
    path.write_text("other")
    after = resolve(files("data/a.txt"), data.parent, store, HashCache(data / "cache.json"))
    assert before.digest != after.digest


def test_a_source_is_hashed_once_and_not_read_again_while_it_is_unchanged(
    data: Path, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plan and run together, and by later ones not at all. To copy it into a folder reads it, once."""
    hashed: list[str] = []

    def spy(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, *more, **how: (hashed.append(path.name), real(path, *more))[1])

    spy(sys.modules["stages.artifacts.hash_cache"], "hash_file")
    spy(s3, "_hashes")
    spy(s3_transfer, "hash_for_upload")
    store = open_store(store_url)
    time.sleep(2.1)  # what changed just now could change again unseen, and is not remembered
    cache = HashCache(tmp_path / "hashes.json")
    source = resolve(files("data/*.txt"), data.parent, store, cache)
    cache.save()
    assert hashed == ["a.txt", "b.txt"]
    digest = bring(source, store, "run", cache)
    assert digest == source.digest
    again = HashCache(tmp_path / "hashes.json")
    assert resolve(files("data/*.txt"), data.parent, store, again).digest == digest
    assert hashed == ["a.txt", "b.txt"]
    before = (data / "a.txt").stat()
    (data / "a.txt").write_text("A.txt")  # as long as before, and with its old times put back
    os.utime(data / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert resolve(files("data/*.txt"), data.parent, store, again).digest != digest
    assert hashed == ["a.txt", "b.txt", "a.txt"]
    (data / "a.txt").write_text("B.txt")  # within the same moment: it was not remembered
    assert resolve(files("data/*.txt"), data.parent, store, again).files
    assert hashed == ["a.txt", "b.txt", "a.txt", "a.txt"]


def model_folder(folder: Path, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / weights).write_bytes(b"weights")
    (folder / "modeling_x.py").write_text("code")
    return folder


def test_a_folder_with_a_config_is_a_checkpoint_without_pickles_and_code(tmp_path: Path, store: FolderStore) -> None:
    model = model_folder(tmp_path / "model")
    (model / "optimizer.pt").write_bytes(b"pickle")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    source = resolve(files("model"), tmp_path, store)
    assert source.kind == "checkpoint"
    assert [name for name, _ in source.files] == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_copy_of_a_model_that_lacks_a_shard_is_refused_before_anything_runs(
    tmp_path: Path, store: FolderStore
) -> None:
    model = model_folder(tmp_path / "model", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RecipeError, match=r"lacks 1 of its 2 shards, such as model-00002-of-00002\.safetensors"):
        resolve(files("model"), tmp_path, store)
    (model / "model-00002-of-00002.safetensors").write_bytes(b"more weights")
    assert len(resolve(files("model"), tmp_path, store).files) == 5


@pytest.mark.parametrize("links", [["up"], ["one", "two"]])
@pytest.mark.parametrize("pattern", ["data", "data/**/*.txt"])
def test_links_that_lead_back_to_a_folder_around_them_are_refused(
    tmp_path: Path, links: list[str], pattern: str
) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("a")
    for name in links:  # with two of them, following both to the end would take 2 ** 40 steps
        (tmp_path / "data" / "sub" / name).symlink_to("..")
    with pytest.raises(ValueError, match=rf"sub/{links[0]} is a link to a folder around it"):
        find_files((pattern,), tmp_path)


def test_a_link_that_leads_nowhere_matters_only_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "b.bin").symlink_to("nowhere")
    assert [name for name, _ in find_files(("data/**/*.txt",), tmp_path)[1]] == ["a.txt"]
    for pattern in ("data", "data/*", "data/**"):
        with pytest.raises(ValueError, match=r"data/b\.bin is a link to a file that does not exist"):
            find_files((pattern,), tmp_path)


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    assert [name for name, _ in find_files(("data",), tmp_path)[1]] == ["linked/a.txt"]


def test_weights_that_are_a_pickle_are_refused_with_the_way_out(tmp_path: Path, store: FolderStore) -> None:
    model_folder(tmp_path / "model", "pytorch_model.bin")
    with pytest.raises(RecipeError, match=r"its weights as a pickle \(pytorch_model.bin\).*convert it to safetensors"):
        resolve(files("model"), tmp_path, store)
    model_folder(tmp_path / "empty", "nothing.dat")
    with pytest.raises(RecipeError, match=r"has a config.json but no \*.safetensors weights"):
        resolve(files("empty"), tmp_path, store)


def test_an_artifact_is_found_by_the_start_of_its_digest_and_says_what_it_holds(
    tmp_path: Path, store: FolderStore
) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps({"holds": "chat"}))
    digest = publish(store, folder, "dataset")
    ref = InputRef("data", "artifact", "artifact", target=digest[7:15], where="recipe.yaml:5")
    assert resolve(ref, tmp_path, store) == Source(ref, "dataset", digest, holds="chat")
    for entry in read_manifest(store, digest).files:
        store.delete(entry.blob)
    with pytest.raises(RecipeError, match="is not whole in store"):
        resolve(ref, tmp_path, store)


def test_a_reference_of_the_store_is_followed(tmp_path: Path, store: FolderStore) -> None:
    model = model_folder(tmp_path / "model")
    digest = publish(store, model, "checkpoint")
    promote(store, "production", digest, who="me@here")
    ref = InputRef("model", "ref:production", "ref", target="production", where="recipe.yaml:5")
    assert resolve(ref, tmp_path, store).digest == digest
    missing = InputRef("model", "ref:prod", "ref", target="prod", where="recipe.yaml:5")
    with pytest.raises(RecipeError, match="has no reference prod; it has production"):
        resolve(missing, tmp_path, store)


def hub_cache(folder: Path) -> None:
    """A model in the layout of the hub's cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache."""
    repository = folder / "models--org--name"
    snapshot = repository / "snapshots" / REVISION
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, content in (("config.json", b"{}"), ("model.safetensors", b"weights")):
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_a_model_of_the_hub_is_taken_from_the_local_cache_and_remembered(
    tmp_path: Path, store: FolderStore, offline_hub: Path
) -> None:
    hub_cache(offline_hub)
    ref = InputRef("model", "hf:org/name", "hf", target=f"org/name@{REVISION}", where="recipe.yaml:5")
    unknown = resolve(ref, tmp_path, store)
    assert unknown.digest is None
    digest = bring(unknown, store, "run")
    fetch(store, digest, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights"
    known = resolve(ref, tmp_path, store)
    assert (known.kind, known.digest) == ("checkpoint", digest)


def test_a_model_that_cannot_be_had_is_one_clear_sentence(
    tmp_path: Path, store: FolderStore, offline_hub: Path
) -> None:
    ref = InputRef("model", "hf:org/name", "hf", target=f"org/name@{REVISION}", where="recipe.yaml:5")
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:5: input model: org/name@.* is not in the local cache"
    ) as caught:
        bring(resolve(ref, tmp_path, store), store, "run")
    assert "\n" not in str(caught.value)
