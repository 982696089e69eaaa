"""Small real stages, written as a package of the user's own: they count, save progress, and fail when told to."""

from __future__ import annotations

import textwrap
import uuid
from pathlib import Path

CONFIG = """
from typing import Annotated, ClassVar, Literal
from pydantic import BaseModel, Field
from stages.contract import ImportPath, Input, NotIdentity, StageConfig

class Inner(BaseModel):
    width: int = 4
    depth: int = 2

class Config(StageConfig):
    NEEDS_TORCH: ClassVar[bool] = False
    VERSION: ClassVar[int] = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "data": Input(("source", "report", "checkpoint"), required=False),
        "models": Input(("report",), required=False, many=True),
    }
    OUTPUT: ClassVar[str] = "report"
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = {"trail": "rollouts"}
    total: int = Field(4, ge=1, description="How far to count.")
    beta: float = 0.1
    mode: Literal["plain", "fancy"] = "plain"
    model: Inner = Inner()
    reward: ImportPath | None = None
    ignore_data: bool = False
    save_steps: Annotated[int, NotIdentity()] = 1
    delay: Annotated[float, NotIdentity()] = 0.0
    trouble: Annotated[str, NotIdentity()] = ""  # "crash@3", "kill@2", ... and a file: only while that is absent
    marker: Annotated[str, NotIdentity()] = ""
"""

STAGE = """
import os, signal, sys, time
from pathlib import Path
from stages.contract import NonFinite, Refused, Stopped, Tripwire, import_function
from {package}.count.arithmetic import add

def run(context):
    config = context.config
    what, _, at = config.trouble.partition("@")
    armed = bool(what) and not (config.marker and Path(config.marker).exists())
    if what == "refuse" and armed:
        raise Refused("data line 3: it is blank")
    print("a stray print")
    start, total = 0, 0
    latest = context.work.latest()
    if latest is not None:
        start, folder = latest
        total = int((folder / "total").read_text())
        context.resumed(start)
    for step in range(start + 1, config.total + 1):
        total = add(total, step)
        time.sleep(config.delay)
        context.progress(step, config.total, loss=1.0 / step)
        context.metric(step, loss=1.0 / step)
        if armed and at and int(at) == step:
            if config.marker:
                Path(config.marker).write_text("done")
            if what == "crash":
                raise RuntimeError("the disk of toys is on fire")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "abort":
                os.abort()
            if what == "tripwire":
                end = Tripwire("entropy fell to 0.08")
                end.checkpoint = context.scratch / "halted"
                end.checkpoint.mkdir()
                (end.checkpoint / "step.txt").write_text(str(step))
                raise end
            if what == "memory":
                held = bytearray(os.urandom(1 << 20)) * 300
                time.sleep(20)
        if step % config.save_steps == 0 and step < config.total:
            folder = context.scratch / f"save-{step}"
            folder.mkdir()
            (folder / "total").write_text(str(total))
            context.work.save(step, folder)
            context.work.wait()
            context.saved(step, 0.0)
        if context.stop_requested:
            raise Stopped(f"stopped at step {step}")
    read = ""
    if not config.ignore_data:
        read = "".join(p.read_text() for f in context.inputs.values() for p in sorted(f.rglob("*.txt")))
    if config.reward:
        total = import_function(config.reward)(total)
    (context.output / "value.txt").write_text(f"{total} {config.beta} {read}")
    (context.side_output("trail") / "trail.txt").write_text(str(config.total))
    context.summary(total=total)
"""

ARITHMETIC = '''
def add(a, b):
    """The sum."""
    return a + b

def unused():
    return 0
'''


class Toys:
    """A folder with a package of stages, recipes and data, and a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = f"toys_{uuid.uuid4().hex[:10]}"
        self.store = folder / "store"
        stage = folder / self.package / "count"
        stage.mkdir(parents=True)
        (folder / self.package / "__init__.py").write_text("")
        (stage / "__init__.py").write_text("")
        (stage / "config.py").write_text(CONFIG)
        (stage / "stage.py").write_text(STAGE.replace("{package}", self.package))
        self.arithmetic = stage / "arithmetic.py"
        self.arithmetic.write_text(ARITHMETIC)

    def recipe(self, steps: str, name: str = "recipe.yaml", head: str = "") -> str:
        """Write a recipe, "COUNT" in its steps standing for the toy stage; returns its path."""
        path = self.folder / name
        body = textwrap.indent(textwrap.dedent(steps).strip("\n"), "  ").replace("COUNT", f"{self.package}.count")
        path.write_text(f"{head}steps:\n{body}\n")
        return str(path)
