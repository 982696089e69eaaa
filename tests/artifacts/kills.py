"""Kills the command at random moments, verb by verb, and looks each time whether anything is lost, or there in part.

`python kills.py FOLDER KILLS SEED [--s3]` prints one JSON object: how often each verb was killed or ended before, and
what went wrong. The store is a folder below FOLDER, or a bucket of a server of its own, which is killed and started
again, too.

After each kill `verify` finds nothing, and the same command again ends as if there had been none. At the end nothing is
left of those that were killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts import (
    FolderStore,
    NotInStore,
    collect,
    is_complete,
    open_store,
    publish,
    read_ref,
    verify_all,
)

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]  # of s3_server
MINI = ROOT / "tests" / "end_to_end"
# The command spares what is younger than ten minutes, which here is all.
GC = ["import sys; from stages.artifacts import *; collect(open_store(sys.argv[1]), delete=True, retention=0, grace=0)"]
RUN = ("run", "mini.yaml", "--no-prefect", "--set", "steps=8")
SECONDS = 300.0  # that any command may take


@dataclass
class Verb:
    """A command to kill.

    Attributes:
        arguments: of `headrace`.
        good: what must be true once it has ended well.
        whole: what must be true also after a kill.
        seconds: how long it takes when nothing disturbs it.
    """

    name: str
    arguments: list[str]
    good: Callable[[], bool]
    whole: Callable[[], bool] = lambda: True
    seconds: float = 0.0


@dataclass
class Walk:
    """One walk; `wrong` fills up."""

    folder: Path
    url: str
    server: Any
    draw: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.store = open_store(self.url)
        self.seconds: dict[str, float] = {}

    def files(self, name: str, text: str, *, large: bool = False) -> Path:
        """A folder of many small files, or of one that goes up in parts."""
        place = self.folder / "files" / name
        place.mkdir(parents=True)
        if large:
            with open(place / "large.jsonl", "wb") as file:
                file.write(text.encode())
                file.write(random.Random(7).randbytes(1 << 20) * 130)
        for number in range(1 if large else 200):
            (place / f"{number}.jsonl").write_text(f'{{"text": "{text} {number}"}}\n')
        return place

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "flows.cli", *arguments, "--store", self.url]
        if arguments is GC:
            command = [sys.executable, "-c", *GC, self.url]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, arguments: list[str]) -> tuple[int, str]:
        process = self.start(arguments)
        said = process.communicate(timeout=SECONDS)[0]
        return process.returncode, said

    def promoted(self) -> str | None:
        try:
            return read_ref(self.store, "production").artifact
        except NotInStore:
            return None

    def next_verb(self, kind: str) -> Verb:
        self.turn += 1
        text = f"turn {self.turn}"
        if kind in ("import", "import large"):
            place = self.files(text, text, large=kind == "import large")
            digest = publish(open_store(self.folder / "reference"), place, "source")
            shutil.rmtree(self.folder / "reference")
            arguments = ["import", str(place), "--ref", "fresh"]
            return Verb(kind, arguments, lambda: read_ref(self.store, "fresh").artifact == digest)
        if kind == "promote":
            one = self.imported[self.turn % 2]
            return Verb(kind, ["promote", one, "production"], lambda: self.promoted() == one)
        if kind == "rollback":
            ref = read_ref(self.store, "production")
            number = self.draw.randint(1, len(ref.history))
            wanted = ref.history[number - 1].artifact
            return Verb(kind, ["rollback", "production", "--to", str(number)], lambda: self.promoted() == wanted)
        if kind == "repair":
            arguments = ["verify", "--repair", "--from", str(self.folder / "files" / "first")]
            return Verb(kind, arguments, lambda: all(is_complete(self.store, digest) for digest in self.imported))
        if kind == "pull":
            target, source = self.folder / "pulled", self.folder / "files" / "first"
            shutil.rmtree(target, ignore_errors=True)

            def same() -> bool:
                names = {path.name for path in source.iterdir()}
                there = {path.name for path in target.iterdir()}
                return there == names | {"SHA256SUMS"} and all(
                    (target / name).read_bytes() == (source / name).read_bytes() for name in names
                )

            whole = lambda: not target.exists() or same()  # noqa: E731
            return Verb(kind, ["pull", self.imported[0], str(target)], same, whole)
        if kind == "gc":
            self.garbage(text)
            return Verb(kind, GC, lambda: all(is_complete(self.store, digest) for digest in self.imported))
        return Verb("run", [*RUN], lambda: True)

    def garbage(self, text: str) -> None:
        place = self.files(f"garbage {text}", f"garbage {text}")
        publish(self.store, place, "source")
        shutil.rmtree(place)

    def harm(self) -> None:
        """Lose some blobs of the first artifact, for `verify --repair` to put back."""
        for info in list(self.store.list("blobs/"))[::9]:
            if info.key in self.first_blobs:
                self.store.delete(info.key)

    def prepare(self) -> None:
        self.imported = []
        for name in ("first", "second"):
            self.imported.append(publish(self.store, self.files(name, name), "source"))
        from stages.artifacts import read_manifest

        self.first_blobs = {entry.blob for entry in read_manifest(self.store, self.imported[0]).files}
        for digest in self.imported:
            code, said = self.run(["promote", digest, "production"])
            assert code == 0, said

    def kill_one(self, kind: str, expected: float) -> None:
        verb = self.next_verb(kind)
        if kind == "repair":
            self.harm()
        of_server = self.server is not None and self.draw.random() < 0.3
        process = self.start(verb.arguments)
        moment = self.draw.uniform(0.4, 1.0) * expected if kind != "run" else self.draw.uniform(5.0, 25.0)
        try:
            process.wait(moment)
            self.ended[kind] += 1
        except subprocess.TimeoutExpired:
            self.killed[kind + (" (server)" if of_server else "")] += 1
        if of_server:
            self.server.stop()
            time.sleep(self.draw.uniform(0, 2))
            self.server.start_again()
        elif process.poll() is None:
            process.send_signal(signal.SIGKILL)
        said = process.communicate(timeout=SECONDS)[0]
        where = f"turn {self.turn}, {verb.name} killed after {moment:.2f} s"
        if "Traceback" in said:
            self.wrong.append(f"{where}: {said[-1500:]}")
        if kind != "repair":
            self.look(where)
        if not verb.whole():
            self.wrong.append(f"{where}: what it was to make is there in part")
        if kind == "run" or (
            kind == "pull" and (self.folder / "pulled").exists()
        ):  # whole: it refuses to go there again
            return
        begun = time.monotonic()
        code, said = self.run(verb.arguments)
        self.seconds[kind] = time.monotonic() - begun
        if code != 0:
            self.wrong.append(f"{where}: again, it gave {code}: {said[-1500:]}")
        elif not verb.good():
            self.wrong.append(f"{where}: again, it did not do what it says: {said[-500:]}")
        self.look(f"{where}, and run again")
        if kind.startswith("import"):
            shutil.rmtree(self.folder / "files" / f"turn {self.turn}")
        if kind == "pull" and (left := list(self.folder.glob(".pulled.*"))):
            self.wrong.append(f"{where}: left {left}")

    def look(self, when: str) -> None:
        for problem in verify_all(self.store):
            self.wrong.append(f"{when}: verify says {problem}")

    def look_at_the_end(self) -> None:
        """A gc takes all that was left; only what is named stays, and nothing waits for anybody."""
        time.sleep(3.1)  # uploads are dated to the second
        collect(self.store, delete=True, retention=1.0, grace=1.0)
        self.look("at the end")
        left = [info.key for info in self.store.leftovers(0.0)]
        left += [info.key for info in self.store.list("leases/")]
        if isinstance(self.store, FolderStore):
            left += [path.name for path in (self.store.root / "tmp").glob("*")]
        if left:
            self.wrong.append(f"left at the end: {left[:5]} and {max(0, len(left) - 5)} more")


def artifacts(walk: Walk) -> dict[str, str]:
    code, said = walk.run(["plan", "mini.yaml", "--json", "--set", "steps=8"])
    assert code == 0, said
    return {entry["step"]: entry["artifact"] for entry in json.loads(said)}


def main(folder: Path, kills: int, seed: int, server: Any) -> dict[str, Any]:
    begun = time.monotonic()
    url = "s3://kills/store" if server is not None else str(folder / "store")
    walk = Walk(folder, url, server, random.Random(seed))
    for name in ("mini.yaml", "mini_rewards.py"):
        shutil.copy(MINI / name, folder)
    quiet = Walk(folder, str(folder / "quiet"), None, random.Random(seed))
    code, said = quiet.run([*RUN])
    assert code == 0, said
    walk.prepare()
    kinds = ["import", "promote", "rollback", "repair", "pull", "gc", "import large"]
    expected: dict[str, float] = {}
    for kind in kinds:
        verb = walk.next_verb(kind)
        at = time.monotonic()
        code, said = walk.run(verb.arguments)
        expected[kind] = time.monotonic() - at
        assert code == 0, said
        assert verb.good(), said
    turn = 0
    while sum(walk.killed.values()) < kills:
        turn += 1
        kind = kinds[turn % len(kinds)]
        walk.kill_one(kind, walk.seconds.get(kind, expected[kind]))
    # gc without grace would take what a run has just put, so the run has its kills for itself.
    for _ in range(max(3, kills // 5)):
        walk.kill_one("run", 0.0)
    code, said = walk.run([*RUN])
    if code != 0:
        walk.wrong.append(f"run, again: {said[-1500:]}")
    elif artifacts(walk) != artifacts(quiet):
        walk.wrong.append("the run that was killed gave other artifacts than the quiet one")
    walk.look("after the run")
    walk.look_at_the_end()
    return {
        "killed": dict(walk.killed),
        "ended before": dict(walk.ended),
        "wrong": walk.wrong,
        "seconds": round(time.monotonic() - begun),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    os.environ["HEADRACE_CACHE_DIR"] = str(place / "cache")
    running = None
    if "--s3" in sys.argv:
        import s3_server

        running = s3_server.start(place / "server")
        os.environ.update(running.environment)
        s3_server.client(running).create_bucket(Bucket="kills")
    try:
        print(json.dumps(main(place, int(sys.argv[2]), int(sys.argv[3]), running)))
    finally:
        if running is not None:
            running.stop()
