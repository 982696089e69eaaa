"""Code fingerprints: what changes them, what does not, and what they reach."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stages.fingerprint import (
    CodeError,
    Fingerprint,
    difference,
    source_hash,
    stage_fingerprint,
    stage_key,
    user_fingerprint,
)

FILES = {
    "lab/__init__.py": "",
    "lab/one/__init__.py": "",
    "lab/one/config.py": "from stages.contract import StageConfig\nclass Config(StageConfig):\n    beta: float = 0.1\n",
    "lab/one/stage.py": "from .loss import sigmoid_loss\ndef run(context):\n    return sigmoid_loss(1)\n",
    "lab/one/loss.py": (
        '"""Doc."""\nimport math\n\nSCALE = 2.0\n\ndef sigmoid_loss(x):\n    """Doc."""\n    return -math.log(x)\n\n'
        "def other(x):\n    return x\n"
    ),
    "lab/two/__init__.py": "",
    "lab/two/config.py": "from stages.contract import StageConfig\nclass Config(StageConfig):\n    pass\n",
    "lab/two/stage.py": "def run(context):\n    from lab.shared import deep\n    return deep.value\n",
    "lab/shared/__init__.py": "GREETING = 1\n",
    "lab/shared/deep.py": "value = 3\n",
    "lab/unused.py": "x = 1\n",
    "rewards.py": "import helper\ndef exact(prompts, completions):\n    return helper.score(completions)\n",
    "helper.py": "def score(values):\n    return [1.0 for _ in values]\n",
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def of(code: Path, stage: str = "lab.one", *user_code: str) -> Fingerprint:
    return stage_fingerprint(stage, list(user_code), [code])


def replace(code: Path, name: str, old: str, new: str) -> None:
    text = (code / name).read_text()
    assert old in text
    (code / name).write_text(text.replace(old, new))


def test_a_stage_reaches_the_modules_that_it_imports_and_no_others(code: Path) -> None:
    assert list(of(code).files) == [
        "lab/__init__.py",
        "lab/one/__init__.py",
        "lab/one/config.py",
        "lab/one/loss.py",
        "lab/one/stage.py",
    ]
    # An import inside a function, of a submodule through its package.
    assert {"lab/shared/__init__.py", "lab/shared/deep.py"} <= set(of(code, "lab.two").files)
    assert {"rewards.py", "helper.py"} <= set(of(code, "lab.one", "rewards:exact").files)
    assert set(of(code, "lab.one", "rewards:exact").files) - set(of(code).files) == {"rewards.py", "helper.py"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Doc."""\nimport', '"""Another sentence."""\nimport'),
        ('    """Doc."""\n', ""),
        ("import math\n", "# a comment\n\n\nimport math  # another\n"),
        ("return -math.log(x)", "return -math.log( (x) )"),
        ("SCALE = 2.0", "SCALE = (\n    2.0\n)"),
        ("    return x\n", '    "a bare string"\n    return x\n'),
        ("SCALE = 2.0", 'SCALE = 2.00\n"""What it scales."""'),
    ],
)
def test_comments_docstrings_and_formatting_change_nothing(code: Path, old: str, new: str) -> None:
    before = of(code)
    replace(code, "lab/one/loss.py", old, new)
    assert of(code) == before
    assert difference(before.files, of(code).files) == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("-math.log", "math.log", "lab/one/loss.py (sigmoid_loss)"),
        ("SCALE = 2.0", "SCALE = 2", "lab/one/loss.py (SCALE)"),
        ("SCALE = 2.0", "SCALE: float = 2.0", "lab/one/loss.py (SCALE)"),
        ("import math", "import math, os", "lab/one/loss.py"),
        ("def other(x)", "def another(x)", "lab/one/loss.py (another and 1 more)"),
        ("    return x\n", '    return "x"\n', "lab/one/loss.py (other)"),
        ("    return x\n", "    return b'x'\n", "lab/one/loss.py (other)"),
        ("    return x\n", "    return None\n", "lab/one/loss.py (other)"),
        ("    return x\n", "    return\n", "lab/one/loss.py (other)"),
        ("    return x\n", "    return {**x}\n", "lab/one/loss.py (other)"),
        ("def other(x)", "def other(x=None)", "lab/one/loss.py (other)"),
        ("def other(x)", "def other(*, x)", "lab/one/loss.py (other)"),
        ("def other(x)", "async def other(x)", "lab/one/loss.py (other)"),
    ],
)
def test_code_changes_only_the_stages_that_reach_it(code: Path, old: str, new: str, said: str) -> None:
    one, two = of(code), of(code, "lab.two")
    replace(code, "lab/one/loss.py", old, new)
    assert of(code).digest != one.digest
    assert of(code, "lab.two") == two
    assert difference(one.files, of(code).files) == said


def test_the_order_of_statements_matters(code: Path) -> None:
    (code / "helper.py").write_text("a = 1\nb = a\n")
    before = user_fingerprint(["rewards:exact"], [code])
    (code / "helper.py").write_text("b = a\na = 1\n")
    assert user_fingerprint(["rewards:exact"], [code]).digest != before.digest


def test_a_shared_package_changes_all_that_pass_through_it(code: Path) -> None:
    one, two = of(code), of(code, "lab.two")
    replace(code, "lab/shared/__init__.py", "GREETING = 1", "GREETING = 2")
    assert of(code) == one
    assert difference(two.files, of(code, "lab.two").files) == "lab/shared/__init__.py (GREETING)"
    (code / "lab" / "__init__.py").write_text("X = 1\n")
    assert of(code).digest != one.digest


@pytest.mark.parametrize(
    "line",
    [
        "from . import extra",
        "from .extra import thing",
        "from .. import elsewhere",
        "from ..elsewhere import thing",
        "import lab.elsewhere",
        "import lab.elsewhere as e",
        "from lab import elsewhere as e",
        "def f():\n    import lab.elsewhere",
        "class A:\n    from lab.elsewhere import thing",
        "try:\n    import lab.elsewhere\nexcept ImportError:\n    pass",
        "if True:\n    pass\nelse:\n    import lab.elsewhere",
        "import importlib\nm = importlib.import_module('lab.elsewhere')",
        "m = __import__('lab.elsewhere')",
        "from lab.collected import *",
        "from lab.plain import part",
        "import lab.elsewhere.absent",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import lab.elsewhere",
    ],
)
def test_every_form_of_import_is_followed(code: Path, line: str) -> None:
    (code / "lab" / "elsewhere.py").write_text("thing = 1\n")
    (code / "lab" / "one" / "extra.py").write_text("import lab.elsewhere\nthing = 1\n")
    (code / "lab" / "collected").mkdir()
    (code / "lab" / "collected" / "__init__.py").write_text('__all__ = ["inner"]\n')
    (code / "lab" / "collected" / "inner.py").write_text("import lab.elsewhere\n")
    (code / "lab" / "plain").mkdir()  # a folder without __init__.py
    (code / "lab" / "plain" / "part.py").write_text("from ..elsewhere import thing\n")
    (code / "lab" / "one" / "stage.py").write_text(line + "\ndef run(context):\n    pass\n")
    found = set(of(code).files)
    assert "lab/elsewhere.py" in found
    if "absent" in line:
        return
    # What runs agrees: every module of ours that Python loads by this import is in the fingerprint.
    script = "import sys, lab.one.stage as s\n"
    script += "getattr(s, 'f', lambda: None)()\n"
    script += "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'lab' and m.__file__))"
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, cwd=code, capture_output=True, text=True, check=True).stdout.split()
    assert loaded
    assert {Path(path).relative_to(code).as_posix() for path in loaded} - {"lab/elsewhere.py"} <= found


def test_imports_for_type_checkers_alone_are_not_followed(code: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lab.unused\ndef run(context):\n    pass\n"
    (code / "lab" / "one" / "stage.py").write_text(text)
    assert "lab/unused.py" not in of(code).files


def test_modules_that_import_each_other_end(code: Path) -> None:
    (code / "helper.py").write_text("import rewards\ndef score(values):\n    return rewards\n")
    assert {"rewards.py", "helper.py"} == set(user_fingerprint(["rewards:exact"], [code]).files)


def test_added_and_dropped_modules_are_named(code: Path) -> None:
    before = of(code)
    after = of(code, "lab.one", "helper:score")
    assert difference(before.files, after.files) == "helper.py (new)"
    assert difference(after.files, before.files) == "helper.py (no longer used)"


def test_moving_the_code_changes_nothing(code: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = of(code)
    place = tmp_path_factory.mktemp("elsewhere") / "moved"
    code.rename(place)
    assert of(place) == before


def test_the_first_folder_that_has_a_module_gives_it(code: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "helper.py").write_text("def score(values):\n    return None\n")
    first = user_fingerprint(["rewards:exact"], [other, code])
    second = user_fingerprint(["rewards:exact"], [code, other])
    assert difference(second.files, first.files) == "helper.py (score)"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent:exact", "there is no module 'absent' for 'absent:exact' beside the recipe or installed"),
        ("lab.absent:f", "there is no module 'lab.absent' for 'lab.absent:f' beside the recipe or installed"),
        ("rewards:exakt", "{code}/rewards.py has no function 'exakt'; did you mean exact?"),
        ("broken:f", "{code}/broken.py:3: not valid Python: '(' was never closed"),
        ("nul:f", "{code}/nul.py: not valid Python: source code string cannot contain null bytes"),
    ],
)
def test_user_code_that_cannot_be_used_is_one_sentence(code: Path, reference: str, message: str) -> None:
    (code / "broken.py").write_text("x = 1\n\nf = (1,\n")
    (code / "nul.py").write_bytes(b"x = 1\0\n")
    with pytest.raises(CodeError) as caught:
        of(code, "lab.one", reference)
    # Python 3.12 and later call null bytes a syntax error of a line.
    said = str(caught.value).replace("nul.py:1:", "nul.py:")
    assert said == message.format(code=code)


def test_a_stage_that_is_not_there_is_one_sentence(code: Path) -> None:
    with pytest.raises(CodeError, match=r"there is no stage 'lab\.three' \(no module lab\.three\.stage\)"):
        of(code, "lab.three")
    with pytest.raises(CodeError, match="there is no stage 'nonsense'"):
        of(code, "nonsense")


def test_functions_that_are_imported_or_made_by_a_star_count_as_there(code: Path) -> None:
    (code / "again.py").write_text("from helper import score\n")
    (code / "star.py").write_text("from helper import *\n")
    (code / "chosen.py").write_text(
        "try:\n    import nothing\nexcept ImportError:\n    def score(values):\n        pass\n"
    )
    for reference in ("again:score", "star:score", "chosen:score"):
        assert user_fingerprint([reference], [code]).files


def test_an_installed_package_can_hold_user_code(code: Path) -> None:
    files = set(user_fingerprint(["colorsys:rgb_to_hsv"], [code]).files)  # of the standard library, a file by itself
    assert files == {"colorsys.py"}


def test_a_module_of_the_users_with_the_name_of_one_of_pythons_is_refused(code: Path) -> None:
    (code / "statistics.py").write_text("def mean(values):\n    return 0.0\n")
    (code / "uses.py").write_text("import statistics\ndef score(values):\n    return statistics.mean(values)\n")
    for reference in ("statistics:mean", "uses:score"):
        with pytest.raises(CodeError, match=r"statistics\.py has the name of a module of Python's own.*rename it"):
            user_fingerprint([reference], [code])


def test_the_contract_and_the_artifacts_are_never_part_of_it(code: Path) -> None:
    (code / "lab" / "one" / "stage.py").write_text(
        "from stages.contract import Refused\nfrom stages import artifacts, contract, fingerprint\n"
        "from stages.artifacts.store import open_store\nimport stages.process\ndef run(context):\n    pass\n"
    )
    found = [name for name in of(code).files if name.startswith("stages/")]
    assert found == ["stages/__init__.py"]


def test_nothing_is_imported_or_executed(code: Path) -> None:
    (code / "lab" / "one" / "stage.py").write_text("raise SystemExit('executed')\n")
    script = (
        "import sys; from pathlib import Path; from stages.fingerprint import stage_fingerprint\n"
        "stage_fingerprint('lab.one', [], [Path(sys.argv[1])])\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'lab', 'prefect')])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_hash_is_that_of_a_form_which_no_python_version_changes(code: Path) -> None:
    (code / "tiny.py").write_text("'''Doc.'''\nx = 1\n")
    text = "Assign(targets=[Name(id=str:'x'),]value=Constant(value=int:1))"
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert user_fingerprint(["tiny:x"], [code]).files["tiny.py"] == {"sha256": expected, "definitions": {"x": expected}}


def test_an_edit_is_seen_even_at_the_same_size_and_moment(code: Path) -> None:
    seen = set()
    for digit in range(10):
        (code / "helper.py").write_text(f"def score(values):\n    return {digit}\n")
        seen.add(user_fingerprint(["helper:score"], [code]).digest)
    assert len(seen) == 10


def test_every_stage_of_the_project_has_a_fingerprint_without_the_others() -> None:
    root = Path(__file__).parents[2] / "stages"
    names = [path.parent.name for path in root.glob("*/stage.py") if (path.parent / "config.py").exists()]
    closures = {name: set(stage_fingerprint(name, [], []).files) for name in names}
    for name, files in closures.items():
        assert f"stages/{name}/stage.py" in files
        assert not any(path.startswith(("stages/artifacts/", "stages/contract")) for path in files)
        assert not any(f"stages/{other}/stage.py" in files for other in names if other != name)


def test_a_stage_key_depends_on_every_part_and_not_on_order() -> None:
    parts: dict[str, Any] = {
        "stage": "dpo",
        "identity": {"beta": 0.1, "seed": 0},
        "inputs": {"model": "sha256:" + "1" * 64, "data": "sha256:" + "2" * 64},
        "code": "sha256:" + "3" * 64,
    }
    key = stage_key(**parts)
    text = (
        '{"code":"sha256:' + "3" * 64 + '","config":{"beta":0.1,"seed":0},"inputs":{"data":"sha256:' + "2" * 64
        + '","model":"sha256:' + "1" * 64 + '"},"stage":"dpo"}'
    )  # fmt: skip
    assert key == hashlib.sha256(text.encode()).hexdigest()
    assert stage_key(**(parts | {"identity": {"seed": 0, "beta": 0.1}})) == key
    for change in (
        {"stage": "sft"},
        {"identity": {"beta": 0.2, "seed": 0}},
        {"identity": {"beta": 0.1}},
        {"inputs": {"model": "sha256:" + "1" * 64}},
        {"inputs": {"model": "sha256:" + "2" * 64, "data": "sha256:" + "1" * 64}},
        {"code": {"version": 1, "user": ""}},
        {"code": {"version": 2, "user": ""}},
    ):
        assert stage_key(**(parts | change)) != key
    with pytest.raises(ValueError):
        stage_key(**(parts | {"identity": {"beta": float("nan")}}))


def test_code_is_hashed_in_several_threads_while_the_collector_lets_them_take_turns() -> None:
    source = b"x = [" + b"(1, (2, (3, 4))), " * 400 + b"]"
    before = gc.get_threshold()
    pause = lambda phase, info: time.sleep(0.0001)  # noqa: E731 (gives the turn to another thread)
    gc.callbacks.append(pause)
    gc.set_threshold(200)
    try:
        with ThreadPoolExecutor(4) as pool:
            hashes = list(pool.map(source_hash, [source] * 16))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(pause)
    assert len(set(hashes)) == 1
