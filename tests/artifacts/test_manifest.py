"""Manifests: canonical, checked, safe to unpack."""

from __future__ import annotations

import hashlib
import random
import re
import sys
import unicodedata

import pytest

from stages.artifacts import FileEntry, Manifest, canonical_json, check_path

HASH = hashlib.sha256(b"hello").hexdigest()


def entry(path: str, size: int = 5) -> FileEntry:
    return FileEntry(path, size, HASH)


def test_the_digest_is_that_of_the_written_out_canonical_form() -> None:
    manifest = Manifest("source", (entry("b.txt"), entry("a/ä.txt")))
    # RFC 8785: keys sorted, no spaces, UTF-8 as it is; files sorted by path.
    text = (
        '{"files":[{"path":"a/ä.txt","sha256":"' + HASH + '","size":5},'
        '{"path":"b.txt","sha256":"' + HASH + '","size":5}],"kind":"source"}'
    )
    assert manifest.to_json() == text.encode()
    assert manifest.digest == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert Manifest.parse(text.encode()) == manifest
    assert HASH == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # FIPS 180-4, `sha256sum`
    assert manifest.size == 10
    assert entry("x").blob == f"blobs/2c/{HASH}"


def test_a_manifest_is_written_as_rfc_8785_says_whatever_its_names() -> None:
    names = ['a"b', "ü/日本/😀", "\u2028line", "'&<>", "-", "e\u0301".upper(), "z" * 255]
    names = [unicodedata.normalize("NFC", name) for name in names]
    entries = tuple(FileEntry(name, 2**53 - 1 if name == "-" else 0, "0" * 64) for name in names)
    files = [{"path": entry.path, "sha256": entry.sha256, "size": entry.size} for entry in sorted(entries)]
    assert Manifest("source", entries).to_json() == canonical_json({"files": files, "kind": "source"})


def test_a_plain_path_is_let_through_only_if_the_checks_one_by_one_would() -> None:
    generator = random.Random(0)
    refused = 0
    for _ in range(20_000):
        path = "".join(generator.choice("ab./.:\\\n~ ") for _ in range(generator.randint(1, 8)))
        parts = path.split("/")
        drive = path[1:2] == ":" and path[0] in "ab"
        bad = drive or any(part in ("", ".", "..") for part in parts) or any(mark in path for mark in "\\\n")
        refused += bad
        try:
            assert check_path(path) == path
            assert not bad, path
        except ValueError:
            assert bad, path
    assert 5_000 < refused < 19_000


def test_canonical_json_is_that_of_rfc_8785() -> None:
    # Example values of RFC 8785, sections 3.2.2 and 3.2.3.
    assert canonical_json({"numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 1e-27]}) == (
        b'{"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27]}'
    )
    assert canonical_json({"€": 1, "\r": 2, "1": 3}) == b'{"\\r":2,"1":3,"\xe2\x82\xac":1}'
    for value in (float("nan"), float("inf"), 2**53, {1: 2}, object()):
        with pytest.raises(ValueError):
            canonical_json(value)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a//b",
        "a/",
        "./a",
        "a/.",
        "..",
        "a\\b",
        "C:/x",
        "c:x",
        "line\nbreak",
        "nul\0",
        "tab\t",
        "\x7f",
        unicodedata.normalize("NFD", "ä"),
        "\udc80",
        "x" * 256,
        "/".join(["x" * 200] * 6),
        5,
        None,
        b"bytes",
    ],
)
def test_a_path_that_could_leave_its_folder_or_not_be_made_is_refused(path: object) -> None:
    with pytest.raises(ValueError):
        check_path(path)
    with pytest.raises(ValueError):
        Manifest("source", (FileEntry(path, 1, HASH),))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["a", "a/b/c.txt", "...", "a b", "ä/日本/😀.txt", "-x", ".hidden", "x" * 255, "ab:c"])
def test_ordinary_paths_are_kept_as_they_are(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "paths",
    [("a", "a"), ("a", "A"), ("Straße", "STRASSE"), ("a", "a/b"), ("A", "a/b"), ("d/x", "D/y"), ("k/x", "K/x")],
)
def test_files_that_would_meet_where_case_is_ignored_are_refused(paths: tuple[str, str]) -> None:
    with pytest.raises(ValueError):
        Manifest("source", tuple(entry(path) for path in paths))


@pytest.mark.parametrize("size", [-1, 2**53, 1.0, "5", True, None])
def test_a_size_must_be_an_integer_in_range(size: object) -> None:
    with pytest.raises(ValueError):
        Manifest("source", (FileEntry("a", size, HASH),))  # type: ignore[arg-type]


@pytest.mark.parametrize("sha256", ["", HASH[:-1], HASH.upper(), "sha256:" + HASH, "g" * 64, None, HASH + "\n"])
def test_a_hash_must_be_64_lowercase_hexadecimal_digits(sha256: object) -> None:
    with pytest.raises(ValueError):
        Manifest("source", (FileEntry("a", 5, sha256),))  # type: ignore[arg-type]


def test_sizes_whose_sum_has_no_canonical_form_are_refused() -> None:
    with pytest.raises(ValueError, match="in all"):
        Manifest("source", (entry("a", 2**53 - 1), entry("b", 1)))


def test_an_unknown_kind_and_an_empty_artifact_are_refused() -> None:
    with pytest.raises(ValueError, match="not a kind"):
        Manifest("modle", (entry("a"),))
    with pytest.raises(ValueError, match="at least one file"):
        Manifest("source", ())


GOOD = '{"files":[{"path":"a","sha256":"' + HASH + '","size":5}],"kind":"source"}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        GOOD.replace(":5", ": 5"),  # not canonical
        GOOD.replace(":5", ":5.0"),
        GOOD.replace(":5", ":true"),
        GOOD.replace(":5", ":1e400"),
        GOOD.replace('"kind":"source"', '"kind":"source","x":1'),
        GOOD.replace('"size":5', '"size":5,"x":1'),
        GOOD.replace('"kind":"source"', '"kind":["source"]'),
        GOOD.replace('"path":"a"', '"path":"../a"'),
        GOOD.replace('{"path"', '{"path":"a","path"'),
        '{"files":{},"kind":"source"}',
        '{"files":[],"kind":"source"}',
        '{"files":[1],"kind":"source"}',
        GOOD + "\n",
        "[" * 100000,
    ],
)
def test_only_canonical_manifests_are_parsed(text: str) -> None:
    assert Manifest.parse(GOOD.encode()).files[0].path == "a"
    with pytest.raises(ValueError):
        Manifest.parse(text.encode())


def test_files_out_of_order_are_not_canonical() -> None:
    a, b = (f'{{"path":"{name}","sha256":"{HASH}","size":5}}' for name in "ab")
    Manifest.parse(f'{{"files":[{a},{b}],"kind":"source"}}'.encode())
    with pytest.raises(ValueError, match="canonical"):
        Manifest.parse(f'{{"files":[{b},{a}],"kind":"source"}}'.encode())


def test_bytes_that_are_not_text_are_no_manifest() -> None:
    with pytest.raises(ValueError):
        Manifest.parse(b"\xff\xfe")


def test_the_quick_reading_of_plain_manifests_agrees_with_the_checks_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On manifests with a byte, a word or an entry changed, dropped, doubled or swapped: the same value, or refused."""
    paths = ("a", "a.b/c", "B/x y", "B/z", "deep/er/and/deeper", "z=1,2@3+4")
    entries = tuple(FileEntry(path, 10 * number, f"{number:064x}") for number, path in enumerate(paths))
    data = Manifest("source", entries).to_json()
    words = re.split(rb'([",:{}\[\]/]|[0-9]+)', data)
    items = re.findall(rb'\{"path[^}]*\}', data)
    rng = random.Random(0)
    cases = [data, data + b" ", data[:-1], b"", b"{}", data.replace(b"source", b"dataset"), data.replace(b"10", b"0")]
    cases += [
        data.replace(b"deep/er/and/deeper", path) for path in (b"..", b"a", b"A", b"a.b", b"a.b/c/d", b"b/q", b"/x")
    ]
    cases += [data.replace(b":50}", size) for size in (b":9007199254740991}", b":9007199254740992}", b":05}", b":5.0}")]
    for _ in range(2000):
        parts = list(rng.choice((words, [bytes([byte]) for byte in data])))
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        match rng.randrange(4):
            case 0:
                parts[at] = parts[other]
            case 1:
                del parts[at]
            case 2:
                parts.insert(at, parts[other])
            case 3:
                parts[at], parts[other] = parts[other], parts[at]
        cases.append(b"".join(parts))
    for _ in range(200):
        cases.append(b'{"files":[' + b",".join(rng.choices(items, k=rng.randrange(8))) + b'],"kind":"source"}')

    def parsed() -> list[Manifest | None]:
        found: list[Manifest | None] = []
        for case in cases:
            try:
                found.append(Manifest.parse(case))
            except ValueError:
                found.append(None)
        return found

    quick = parsed()
    assert [item.to_json() for item in quick if item] == [case for case, item in zip(cases, quick, strict=True) if item]
    monkeypatch.setattr(sys.modules["stages.artifacts.manifest"], "_parse_plain", lambda data: None)
    assert parsed() == quick
    assert 20 < sum(item is not None for item in quick) < len(cases) / 2
