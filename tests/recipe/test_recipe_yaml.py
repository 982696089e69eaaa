"""YAML as recipes read it. Right values: the YAML 1.2 core schema, https://yaml.org/spec/1.2.2/#103-core-schema."""

import math

import pytest

from flows.recipe_yaml import YamlError, parse, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("4.0e-3", 0.004),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("True", True),
        ("~", None),
        ("", None),
        ("012", 12),
        ("0o14", 12),
        ("0xff", 255),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ("[1, two, 3.0]", [1, "two", 3.0]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_a_scalar_has_the_type_that_yaml_1_2_gives_it(text: str, value: object) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_every_value_knows_its_line() -> None:
    document = parse("a:\n  b: 1\n  c:\n    - x\n    - y\n")
    assert document.line(("a", "b")) == 2
    assert document.line(("a", "c", 1)) == 5
    assert document.line(("a", "c", 7, "deeper")) == 3  # the nearest value around it


def test_a_merge_key_fills_in_what_is_not_written() -> None:
    document = parse("base: &base {x: 1, y: 2}\nother:\n  <<: *base\n  y: 3\n")
    assert document.value["other"] == {"x": 1, "y": 3}


def test_changing_a_merged_value_leaves_the_others_alone() -> None:
    value = parse("base: &base {inner: {x: 1}}\nother: {<<: *base}\n").value
    value["other"]["inner"]["x"] = 2
    assert value["base"]["inner"]["x"] == 1


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", 4, "b.c is written twice, first on line 3"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", 2, "a tab ('\\t') stands where a value begins; indent with spaces"),
        ("a: &x [*x]\n", 1, "an alias refers to a value that contains it"),
        ("? [a]\n: 1\n", 1, "a key must be a plain word"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "has no use in a recipe"),
        ("a: !!int x\n", 1, "'x' is not a value of type int"),
        ("a: \x00\n", 1, "unacceptable character"),
        ("a: 1\n---\nb: 2\n", 2, "document"),
    ],
)
def test_what_is_not_a_recipe_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse(text)
    assert caught.value.line == line
    assert message in caught.value.message


@pytest.mark.parametrize("opened", ["[", "{a: "])
def test_values_nested_too_deeply_are_refused_in_a_sentence(opened: str) -> None:
    for text in ("a: " + opened * 20_000, "a: " + opened * 3000 + ("]" if opened == "[" else "}") * 3000):
        with pytest.raises(YamlError, match="nested too deeply"):
            parse(text)


@pytest.mark.parametrize(
    ("first", "more"),
    [("a0: &a0 [x]", "a{n}: &a{n} [{many}]"), ("a0: &a0 {{x: 1}}", "a{n}: &a{n} {{{{<<: [{many}]}}}}")],
)
def test_aliases_of_aliases_do_not_fill_the_memory(first: str, more: str) -> None:
    lines = [first.replace("{{", "{").replace("}}", "}")]
    for n in range(1, 9):
        line = more.replace("{n}", str(n)).replace("{many}", ", ".join([f"*a{n - 1}"] * 9))
        lines.append(line.replace("{{{{", "{").replace("}}}}", "}"))
    with pytest.raises(YamlError, match="more than 100,000 values"):
        parse("\n".join(lines))


def test_a_number_of_thousands_of_digits_is_refused_and_not_printed() -> None:
    with pytest.raises(YamlError, match="has 5,000 digits") as refused:
        parse("a: " + "9" * 5000)
    assert len(str(refused.value)) < 200
