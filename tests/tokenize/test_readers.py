from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.contract import Refused
from stages.tokenize.origins import number_of
from stages.tokenize.readers import BadRow, Row, clean_text, generate, read_file


def read(tmp_path: Path, name: str, data: bytes, **settings: Any) -> list[Row]:
    path = tmp_path / name
    path.write_bytes(data)
    return list(read_file(path, name, **settings))


def reasons(rows: list[Row]) -> list[str | None]:
    return [row.error.reason if row.error else None for row in rows]


def test_json_lines_are_read_with_their_line_numbers_over_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "\xc3\xa9"}')
    assert rows == [Row("a.jsonl line 1", {"text": "one"}), Row("a.jsonl line 4", {"text": "é"})]


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"text": "a"', "not_json", "not valid JSON"),
        (b'{"text": "a\x00b"}', "not_json", "not valid JSON"),
        (b'{"text": "\xff\xfe"}', "not_utf8", "byte 11 is not valid UTF-8"),
        (b'"a"', "not_an_object", "not str"),
        (b"1" * 5000, "not_json", "not usable JSON"),
        (b"\xff\xfe{\x00", "not_utf8", "looks like UTF-16"),
        (b'{"a":' * 100_000, "not_json", "JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_lines_after_it_are_still_read(
    tmp_path: Path, line: bytes, reason: str, message: str
) -> None:
    bad, good = read(tmp_path, "a.jsonl", line + b'\n{"text": "good"}\n')
    assert bad.where == "a.jsonl line 1"
    assert bad.error is not None
    assert bad.error.reason == reason
    assert message in str(bad.error)
    assert good.columns == {"text": "good"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.txt.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_reported(tmp_path: Path, name: str, data: bytes) -> None:
    rows = read(tmp_path, name, gzip.compress(data) if name.endswith(".gz") else data)
    assert reasons(rows) == ["empty_file"]


def test_gzip_files_are_read_and_a_truncated_one_is_reported_after_its_good_lines(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % (number * 7919) for number in range(5000))
    whole = gzip.compress(lines)
    assert len(read(tmp_path, "a.jsonl.gz", whole)) == 5000
    rows = read(tmp_path, "a.jsonl.gz", whole[: len(whole) // 2])
    assert 0 < len(rows) < 5000
    assert reasons(rows)[-1] == "damaged_file"
    assert set(reasons(rows)[:-1]) == {None}
    assert reasons(read(tmp_path, "a.jsonl.gz", b"not gzip")) == ["damaged_file"]


@pytest.mark.parametrize(
    ("unit", "texts"),
    [
        ("file", ["one\ntwo\n\nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\ntwo", "three"]),
    ],
)
def test_text_files_give_files_lines_or_paragraphs(tmp_path: Path, unit: str, texts: list[str]) -> None:
    rows = read(tmp_path, "a.txt", b"one\r\ntwo\r\n\r\nthree\r\n", text_unit=unit)
    assert [row.columns["text"] for row in rows] == texts


def test_invalid_utf8_spoils_its_line_or_its_whole_file(tmp_path: Path) -> None:
    data = b"one\n\xff\nthree\n"
    assert reasons(read(tmp_path, "a.txt", data, text_unit="line")) == [None, "not_utf8", None]
    (row,) = read(tmp_path, "a.txt", data)
    assert row.error is not None
    assert "line 2" in str(row.error)


def test_parquet_rows_are_read_and_a_damaged_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"], "messages": [[{"role": "user"}], None]}), path)
    rows = read(tmp_path, "a.parquet", path.read_bytes())
    assert rows[1] == Row("a.parquet row 2", {"text": "two", "messages": None})
    assert reasons(read(tmp_path, "a.parquet", path.read_bytes()[:-20])) == ["damaged_file"]
    assert reasons(read(tmp_path, "b.parquet", b"")) == ["damaged_file"]


def test_a_file_of_unknown_kind_is_refused_with_the_kinds_there_are(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"notes\.docx: no reader .* \.jsonl, .*`reader`"):
        read(tmp_path, "notes.docx", b"x")


def test_a_reader_function_is_given_the_path_and_its_failure_is_a_bad_row(tmp_path: Path) -> None:
    def reader(path: Path) -> Iterator[Any]:
        yield {"text": path.read_text()}
        yield "not a row"
        raise ValueError("no more")

    rows = read(tmp_path, "a.anything", b"hello", reader=reader)
    assert rows[0] == Row("a.anything row 1", {"text": "hello"})
    assert reasons(rows) == [None, "not_an_object", "damaged_file"]


def test_nul_and_lone_surrogates_are_not_text() -> None:
    assert clean_text("a\tb\u2028") == "a\tb\u2028"
    with pytest.raises(BadRow, match="NUL") as nul:
        clean_text("a\0b")
    with pytest.raises(BadRow, match="character 2 of the text is half of a surrogate pair") as surrogate:
        clean_text("a\ud800")
    assert (nul.value.reason, surrogate.value.reason) == ("nul", "lone_surrogate")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("no_such_module_here:f", {}, "cannot import 'no_such_module_here'"),
        ("stages.examples.arithmetic:nothing", {}, "has no function 'nothing'"),
        ("stages.examples.arithmetic:chats", {}, "missing a required argument: 'count'"),
        ("stages.examples.arithmetic:chats", {"count": 1, "colour": 2}, "unexpected keyword argument 'colour'"),
        ("stages.examples.arithmetic:chats", {"count": -1}, "count must not be negative"),
        ("stages.examples.arithmetic:prompts", {"count": 1, "split": "test"}, "'test'"),
    ],
)
def test_a_generator_that_cannot_be_used_is_refused(function: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        list(generate(function, arguments, seed=0))


def test_generators_get_the_seed_of_the_step_unless_their_arguments_have_one() -> None:
    function = "stages.examples.arithmetic:chats"
    assert list(generate(function, {"count": 3}, 1)) == list(generate(function, {"count": 3, "seed": 1}, 2))
    assert list(generate(function, {"count": 3}, 1)) != list(generate(function, {"count": 3}, 2))


def test_a_key_that_is_given_twice_in_an_object_is_a_bad_row(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "a.jsonl", b'{"text": "one", "meta": {"a": 1, "a": 2}}\n')
    assert row.error is not None
    assert (row.error.reason, "'a' is given twice" in str(row.error)) == ("duplicate_key", True)


@pytest.mark.parametrize(("depth", "bad"), [(60, False), (70, True), (900, True)])
def test_a_row_is_bad_where_what_follows_could_not_walk_it(tmp_path: Path, depth: int, bad: bool) -> None:
    data = b'{"text": "a", "z": ' + b"[" * depth + b"]" * depth + b"}\n"
    assert reasons(read(tmp_path, "a.jsonl", data)) == ["nested_too_deep" if bad else None]


def test_a_parquet_column_that_python_has_no_value_for_is_named(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"], "when": pa.array([1], pa.timestamp("ns"))})  # one nanosecond after 1970
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = list(read_file(tmp_path / "a.parquet", "a.parquet"))
    assert row.error is not None
    assert row.error.reason == "damaged_file"
    assert "column 'when' (timestamp[ns]) cannot be read" in str(row.error)


def test_a_parquet_file_with_two_columns_of_one_name_is_refused_not_halved(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert reasons(list(read_file(tmp_path / "a.parquet", "a.parquet"))) == ["duplicate_key"]


FAILING = """
import sys

def gen(seed, how):
    yield {"text": "a"}
    if how == "exit":
        sys.exit(0)
    {}[how]

def reader(path):
    yield {"text": "a"}
    return {}["answer"]

def nothing(path):
    return None
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "failing_rows.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "failing_rows"


@pytest.mark.parametrize(("how", "error"), [("answer", "KeyError: 'answer'"), ("exit", "SystemExit: 0")])
def test_a_generator_that_fails_is_named_with_its_row_and_line(failing: str, how: str, error: str) -> None:
    rows = generate(f"{failing}:gen", {"how": how}, 0)
    assert next(rows).columns == {"text": "a"}
    line = 8 if how == "answer" else 7
    with pytest.raises(Refused) as refused:
        next(rows)
    assert str(refused.value) == (
        f"generator {failing}:gen with {{'how': '{how}'}} failed at row 2: {error} ({failing}.py line {line})"
    )


def test_a_reader_that_fails_is_named_with_the_file_and_its_line(failing: str, tmp_path: Path) -> None:
    module = __import__(failing)
    with pytest.raises(
        Refused, match=rf"^a\.x: the reader failed after row 1: KeyError: 'answer' \({failing}.py line 12\)"
    ):
        list(read_file(tmp_path / "a.x", "a.x", reader=module.reader))
    with pytest.raises(Refused, match=r"^a\.x: the reader failed after row 0: TypeError: 'NoneType' object"):
        list(read_file(tmp_path / "a.x", "a.x", reader=module.nothing))


CHATS = [{"messages": [{"role": "user", "content": f"é {number}"}], "n": number} for number in range(3)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_a_file_that_is_one_list_of_objects_gives_its_items_as_rows(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    data = b"\xef\xbb\xbf\n " + json.dumps(CHATS, indent=indent, ensure_ascii=False).encode() + b"\r\n"
    rows = read(tmp_path, name, gzip.compress(data) if name.endswith(".gz") else data)
    assert rows == [Row(f"{name} row {number}", chat) for number, chat in enumerate(CHATS, 1)]
    assert [number_of(row.where, name) for row in rows] == [1, 2, 3]
    assert reasons(read(tmp_path, "empty.json", b"[ ]")) == ["empty_file"]


@pytest.mark.parametrize(
    ("data", "where", "reason", "message"),
    [
        (b'[{"text": "a"},\n {"text": "b"', "a.json row 2", "not_json", "at line 2, character 14"),
        (b'[{"text": "a"}\n {"text": "b"}]', "a.json row 1", "not_json", "Expecting ',' or ']' at line 2"),
        (b'[{"text": "a"},]', "a.json row 2", "not_json", "character 16"),
        (b'[{"text": "a"}] x', "a.json row 1", "not_json", "follows the list at line 1, character 17"),
        (b'[{"text": "a"}, "b"]', "a.json row 2", "not_an_object", "not str"),
        (b'[{"text": "a"}, {"text": "\xff"}]', "a.json", "not_utf8", "byte 27"),
        (b'[{"text": "a"}, {"n": ' + b"1" * 5000 + b"}]", "a.json row 2", "not_json", "not usable"),
    ],
)
def test_a_list_of_objects_that_breaks_is_told_with_the_row_and_place(
    tmp_path: Path, data: bytes, where: str, reason: str, message: str
) -> None:
    bad = read(tmp_path, "a.json", data)[-1]
    assert bad.where == where
    assert bad.error is not None
    assert bad.error.reason == reason
    assert message in str(bad.error)


def test_a_name_given_twice_in_one_item_of_a_list_spoils_that_item_alone(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.json", b'[{"text": "a"}, {"text": "b", "text": "c"}, {"text": "d"}]')
    assert reasons(rows) == [None, "duplicate_key", None]


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t"), ("A.CSV.GZ", ",")])
def test_csv_gives_its_records_as_text_with_the_line_that_each_begins_in(tmp_path: Path, name: str, mark: str) -> None:
    lines = ["id,text", '1,"two\r\nlines, and a ""quote"""', "", "007,"]
    data = b"\xef\xbb\xbf" + "\r\n".join(lines).replace(",", mark).encode()
    rows = read(tmp_path, name, gzip.compress(data) if name.endswith("GZ") else data)
    assert rows == [
        Row(f"{name} line 2", {"id": "1", "text": f'two\r\nlines{mark} and a "quote"'}),
        Row(f"{name} line 5", {"id": "007", "text": ""}),
    ]


@pytest.mark.parametrize(
    ("data", "found", "message"),
    [
        (b"a,b\n1,2\n3\n4,5\n", [None, "not_csv", None], "1 values for 2 columns (a, b)"),
        (b'a,b\n1,2\n3,"4\n5,6\n', [None, "not_csv"], "unexpected end of data"),
        (b"a,a\n1,2\n", ["duplicate_key"], "two columns 'a'"),
        (b"a,b\n1,\xff\n2,3\n", ["not_utf8"], "byte 3 is not valid UTF-8; the rest is not read"),
        (b"a,b\n", ["empty_file"], "no rows"),
    ],
)
def test_csv_that_cannot_be_read_is_told_with_its_line(
    tmp_path: Path, data: bytes, found: list[str | None], message: str
) -> None:
    rows = read(tmp_path, "a.csv", data)
    assert reasons(rows) == found
    assert any(message in str(row.error) for row in rows)


def test_a_cell_of_a_table_may_be_long(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "a.csv", b"text\n" + b"a" * 300_000 + b"\n")
    assert len(row.columns["text"]) == 300_000


def test_zstandard_files_are_read_and_a_truncated_one_is_reported(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % (number * 7919) for number in range(5000))
    whole = pa.compress(lines, codec="zstd", asbytes=True)
    assert len(read(tmp_path, "a.jsonl.zst", whole)) == 5000
    assert reasons(read(tmp_path, "a.jsonl.zst", whole[: len(whole) // 2]))[-1] == "damaged_file"
    assert reasons(read(tmp_path, "a.jsonl.zst", b"not zstd")) == ["damaged_file"]
    assert [
        row.columns["a"] for row in read(tmp_path, "a.csv.zst", pa.compress(b"a\n1\n", codec="zstd", asbytes=True))
    ] == ["1"]


def test_nulls_that_parquet_fills_messages_and_tools_with_are_taken_out(tmp_path: Path) -> None:
    """An object of Parquet has the fields of all; a template would write `"date": null` into a call that has none."""
    calls = [{"city": "Rome"}, {"date": "today"}]
    rows = [
        {
            "messages": [{"role": "assistant", "tool_calls": [{"arguments": call}]}],
            "tools": [{"parameters": call}],
            "checks": [call],
        }
        for call in calls
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [row.columns for row in read_file(tmp_path / "a.parquet", "a.parquet")]
    assert [{**row, "checks": None} for row in found] == [{**row, "checks": None} for row in rows]
    assert found[0]["checks"] == [{"city": "Rome", "date": None}]
