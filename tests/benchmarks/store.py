"""The store against plain boto3, a plain copy, and DVC: `python -m tests.benchmarks.store [--quick] [--dvc PATH]`.

A real S3 server on this machine does its own work on the same cores, so figures are ratios of two sides that take
turns. Before anything is timed, both sides must give the same bytes. DVC runs from an environment of its own (its pins
clash with ours); `--dvc` names its program, and without it that part is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stages.artifacts import HashCache, Result, fetch, open_store, publish, write_result
from stages.artifacts.manifest import FileEntry, Manifest, blob_key, manifest_key
from stages.artifacts.s3 import S3Store
from tests import s3_server

BUCKET = "bench"
GOALS = {
    "publish_s3_vs_upload_file": 0.9,
    "fetch_s3_vs_download_file": 0.9,
    "dvc_s3_large": 3.0,
    "dvc_s3_small": 3.0,
    "dvc_s3_large_unchanged": 20.0,
    "dvc_s3_small_unchanged": 20.0,
}

PEAK = """
import sys
from pathlib import Path
from stages.artifacts import fetch, open_store, publish
store = open_store(sys.argv[1])
if sys.argv[2] == "publish":
    print(publish(store, Path(sys.argv[3]), "source"))
else:
    fetch(store, sys.argv[3], Path(sys.argv[4]))
# Not getrusage: that counts what the process was before exec, a copy of its parent.
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(high.split()[1]) // 1024)
"""


def timed(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def timed_alone(function: Callable[[], Any]) -> float:
    """`timed`, once what was written before is on the disk: nobody pays for another's writes."""
    os.sync()
    return timed(function)


def alternate(
    rounds: int, one: Callable[[int], Any], other: Callable[[int], Any]
) -> tuple[float, float, tuple[float, float]]:
    """Median seconds of both, which take turns, each first in half of the rounds; and those of this process's CPU."""
    times: tuple[list[float], list[float]] = ([], [])
    used: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            begun = time.process_time()
            function = (one, other)[side]
            times[side].append(timed(lambda function=function, number=number: function(number)))
            used[side].append(time.process_time() - begun)
    cpu = statistics.median(used[0]), statistics.median(used[1])
    return statistics.median(times[0]), statistics.median(times[1]), cpu


def make_files(folder: Path, count: int, size: int) -> None:
    folder.mkdir(parents=True)
    generator = random.Random(count)
    for number in range(count):
        path = folder / f"{number % 100:02}" / f"{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(generator.randbytes(size))


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def sent_bytes(store: S3Store, function: Callable[[], Any]) -> int:
    """Bytes of content that a function puts to a bucket."""
    total = 0

    def count(request: Any, **_: Any) -> None:
        nonlocal total
        if request.method in ("PUT", "POST"):
            total += int(request.headers.get("Content-Length", 0))

    store.client.meta.events.register("before-send.s3", count)
    try:
        function()
    finally:
        store.client.meta.events.unregister("before-send.s3", count)
    return total


class Bench:
    """One run of all parts; `figures` and `ratios` fill up."""

    def __init__(self, work: Path, server: s3_server.Server, quick: bool, dvc: str | None) -> None:
        self.work, self.server, self.dvc = work, server, dvc
        self.rounds = 1 if quick else 3
        self.large = (8, (16 if quick else 128) << 20)
        self.small = (500 if quick else 20_000, 10_000)
        self.many = 2_000 if quick else 100_000
        self.peaks = (64 << 20, 256 << 20) if quick else (256 << 20, 2048 << 20)
        self.figures: dict[str, Any] = {}
        self.ratios: dict[str, float] = {}
        self.boto = s3_server.client(server)

    def note(self, name: str, value: Any) -> None:
        self.figures[name] = value
        print(f"{name:<44} {value}", flush=True)

    def ratio(self, name: str, ours: float, theirs: float, cpu: tuple[float, float] | None = None) -> None:
        """How many times as fast as the other side we are."""
        self.ratios[name] = round(theirs / ours, 3)
        said = f"ours {ours:.2f} s, theirs {theirs:.2f} s"
        if cpu is not None:
            said += f"; CPU of the client {cpu[0]:.2f} s and {cpu[1]:.2f} s"
        self.figures[name] = said
        print(f"{name:<44} {theirs / ours:8.2f}   {said}", flush=True)

    def plain_s3(self) -> None:
        """8 large files: publish against `upload_file`, fetch against `download_file`."""
        folder = self.work / "large"
        make_files(folder, *self.large)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        digests: dict[int, str] = {}

        def ours(number: int) -> None:
            digests[number] = publish(open_store(f"s3://{BUCKET}/large-{number}"), folder, "source")

        def theirs(number: int) -> None:
            for path in files:
                self.boto.upload_file(str(path), BUCKET, f"plain-{number}/{path.name}")

        # What both must get right, before they are timed.
        ours(1000)
        theirs(1000)
        fetch(open_store(f"s3://{BUCKET}/large-1000"), digests[1000], self.work / "check")
        for path in files:
            self.boto.download_file(BUCKET, f"plain-1000/{path.name}", str(self.work / "plain"))
            assert (self.work / "plain").read_bytes() == path.read_bytes()
        assert hashes(self.work / "check") == hashes(folder)
        shutil.rmtree(self.work / "check")
        self.ratio("publish_s3_vs_upload_file", *alternate(self.rounds, ours, theirs))

        def fetch_ours(number: int) -> None:
            fetch(open_store(f"s3://{BUCKET}/large-1000"), digests[1000], self.work / f"out-{number}")
            shutil.rmtree(self.work / f"out-{number}")

        def fetch_theirs(number: int) -> None:
            target = self.work / f"plain-{number}"
            target.mkdir()
            for path in files:
                self.boto.download_file(BUCKET, f"plain-1000/{path.name}", str(target / path.name))
            shutil.rmtree(target)

        self.ratio("fetch_s3_vs_download_file", *alternate(self.rounds, fetch_ours, fetch_theirs))
        store = open_store(f"s3://{BUCKET}/large-1000")
        assert isinstance(store, S3Store)
        self._unchanged("s3", store, folder)

    def _unchanged(self, name: str, store: Any, folder: Path) -> None:
        cache = HashCache(self.work / f"hashes-{name}.json")
        publish(store, folder, "source", cache)
        moved = sent_bytes(store, lambda: publish(store, folder, "source", cache)) if isinstance(store, S3Store) else 0
        self.note(f"publish_unchanged_{name}_bytes_sent", moved)
        self.note(f"publish_unchanged_{name}_seconds", round(timed(lambda: publish(store, folder, "source", cache)), 3))
        self.note(
            f"publish_unchanged_{name}_rehashed_seconds", round(timed(lambda: publish(store, folder, "source")), 3)
        )

    def plain_folder(self) -> None:
        """The same on a folder, against copying with fsync."""
        folder = self.work / "large"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        digest = ""

        def ours(number: int) -> None:
            nonlocal digest
            digest = publish(open_store(self.work / f"store-{number}"), folder, "source")
            if number:
                shutil.rmtree(self.work / f"store-{number}")

        def theirs(number: int) -> None:
            target = self.work / f"copy-{number}"
            target.mkdir()
            for path in files:
                shutil.copyfile(path, target / path.name)
                descriptor = os.open(target / path.name, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            shutil.rmtree(target)

        self.ratio("publish_folder_vs_copy_fsync", *alternate(self.rounds, ours, theirs))

        def fetch_ours(number: int) -> None:
            fetch(open_store(self.work / "store-0"), digest, self.work / f"out-{number}")
            shutil.rmtree(self.work / f"out-{number}")

        def fetch_theirs(number: int) -> None:
            shutil.copytree(folder, self.work / f"copy-{number}")
            shutil.rmtree(self.work / f"copy-{number}")

        self.ratio("fetch_folder_vs_copytree", *alternate(self.rounds, fetch_ours, fetch_theirs))
        self._unchanged("folder", open_store(self.work / "store-0"), folder)
        shutil.rmtree(self.work / "store-0")

    def small_files(self) -> None:
        """Many small files, up and down, and again unchanged."""
        folder = self.work / "small"
        make_files(folder, *self.small)
        files = [path for path in folder.rglob("*") if path.is_file()]
        for name, url in (("s3", f"s3://{BUCKET}/small"), ("folder", str(self.work / "small-store"))):
            store = open_store(url)
            digest = ""

            def up(store: Any = store) -> None:
                nonlocal digest
                digest = publish(store, folder, "source")

            self.note(f"small_publish_{name}_seconds", round(timed(up), 2))
            self.note(
                f"small_fetch_{name}_seconds",
                round(timed(lambda store=store, digest=digest: fetch(store, digest, self.work / "small-out")), 2),
            )
            assert hashes(self.work / "small-out") == hashes(folder)
            shutil.rmtree(self.work / "small-out")
            self._unchanged(f"small_{name}", store, folder)

        def put(path: Path) -> None:
            self.boto.upload_file(str(path), BUCKET, f"plain-small/{path.name}")

        with ThreadPoolExecutor(8) as pool:
            theirs = timed(lambda: list(pool.map(put, files)))
        self.ratio("small_publish_s3_vs_upload_file", self.figures["small_publish_s3_seconds"], theirs)

    def against_dvc(self) -> None:
        """`dvc add` and `dvc push` of the same files, first and when nothing changed."""
        if self.dvc is None:
            print("DVC was not given (--dvc PATH): left out")
            return
        ours_alone = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")  # empty files trip it
        environment = {name: value for name, value in os.environ.items() if name not in ours_alone}
        environment |= {"DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(self.work / "dvc-site")}

        def run(project: Path, *arguments: str) -> None:
            command = [str(self.dvc), *arguments]
            done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

        def one(name: str, number: int) -> tuple[list[float], list[float]]:
            """Seconds of both sides, first and again (ours twice: as a process of its own, and within one)."""
            folder = self.work / f"{name}-{number}"  # of ours, and beside it the same files in a project of DVC
            project = self.work / f"dvc-{name}-{number}"
            project.mkdir()
            run(project, "init", "--no-scm", "-q")
            run(project, "remote", "add", "-d", "r", f"s3://{BUCKET}/{project.name}")
            run(project, "remote", "modify", "r", "endpointurl", self.server.endpoint)
            shutil.copytree(self.work / name, project / name)
            shutil.copytree(self.work / name, folder)
            url, remembered = f"s3://{BUCKET}/ours-{folder.name}", self.work / f"{folder.name}.json"

            def ours() -> None:
                subprocess.check_output([sys.executable, "-c", OURS, url, folder, remembered])

            def theirs() -> None:
                run(project, "add", "-q", name)
                run(project, "push", "-q")

            time.sleep(3)  # both remember files that are older than a moment
            sides = (ours, theirs) if number % 2 == 0 else (theirs, ours)
            first = {side: timed_alone(side) for side in sides}
            again = {side: timed_alone(side) for side in sides}
            # As a run publishes: in a process that has started already, with the store open.
            store, cache = open_store(url), HashCache(remembered)
            within = timed(lambda: publish(store, folder, "source", cache))
            shutil.rmtree(project)
            shutil.rmtree(folder)
            return [first[ours], again[ours], within], [first[theirs], again[theirs], again[theirs]]

        for name, rounds in (("large", self.rounds), ("small", 1)):
            taken = [one(name, number) for number in range(rounds)]
            for index, what in enumerate(("", "_unchanged", "_unchanged_within_a_run")):
                sides = (statistics.median(side[index] for side in both) for both in zip(*taken, strict=True))
                self.ratio(f"dvc_s3_{name}{what}", *sides)

    def plan(self) -> None:
        """The plan of a recipe whose input and result hold very many files, all of them looked for."""
        from flows.plan import make_plan
        from flows.recipe import load_recipe
        from stages.artifacts.fetch import _parse

        contents = [str(number).encode() for number in range(self.many // 2)]  # as many again in the result
        entries = [
            FileEntry(f"{number % 1000:03}/{number}", len(data), hashlib.sha256(data).hexdigest())
            for number, data in enumerate(contents)
        ]
        source, rows = Manifest("source", tuple(entries)), Manifest("dataset", tuple(entries))
        package = self.work / "toy" / "words"
        package.mkdir(parents=True)
        (self.work / "toy" / "__init__.py").write_text("")
        (package / "__init__.py").write_text("")
        (package / "config.py").write_text(CONFIG)
        (package / "stage.py").write_text("def run(context):\n    pass\n")
        recipe = self.work / "many.yaml"
        step = f"{{stage: toy.words, inputs: {{data: 'artifact:{source.digest}'}}}}"
        recipe.write_text(f"name: many\nsteps:\n  words: {step}\n")
        self.note("plan_files", f"{self.many // 2:,} in the input and as many in the result")

        def in_folder(store: Any) -> None:
            for entry, data in zip(entries, contents, strict=True):
                path = self.work / "many" / blob_key(entry.sha256)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)  # as the store would, but without 100,000 fsyncs
            for manifest in (source, rows):
                store.put(manifest_key(manifest.digest), manifest.to_json())

        def in_bucket(store: Any) -> None:
            for entry, data in zip(entries, contents, strict=True):
                path = self.work / "many-files" / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            for manifest in (source, rows):
                assert publish(store, self.work / "many-files", manifest.kind) == manifest.digest

        for name, url, fill in (
            ("folder", str(self.work / "many"), in_folder),
            ("s3", f"s3://{BUCKET}/many", in_bucket),
        ):
            store = open_store(url)
            fill(store)
            key = make_plan(load_recipe(str(recipe)), store)["words"].key
            now = "2026-01-01T00:00:00.000+00:00"
            made = {"stage": "toy.words", "step": "words", "run": "bench", "started": now, "finished": now}
            write_result(store, Result(artifact=rows.digest, kind="dataset", key=str(key), **made))
            assert make_plan(load_recipe(str(recipe)), store)["words"].status == "hit"

            def plan_anew(url: str = url) -> None:
                _parse.cache_clear()  # as in a process that has just started
                make_plan(load_recipe(str(recipe)), open_store(url))

            seconds = [timed(plan_anew) for _ in range(5)]
            self.note(f"plan_{name}_seconds", round(statistics.median(seconds), 3))
            begun = time.process_time()
            plan_anew()
            self.note(f"plan_{name}_cpu_seconds", round(time.process_time() - begun, 3))

    def memory(self) -> None:
        """Peak resident memory of publishing and fetching one file, small and eight times as large."""
        for name, url in (("s3", f"s3://{BUCKET}/peak"), ("folder", str(self.work / "peak-store"))):
            for size in self.peaks:
                folder = self.work / "peak"
                folder.mkdir()
                with open(folder / "file", "wb") as file:
                    for _ in range(size >> 20):
                        file.write(os.urandom(1 << 20))
                command = [sys.executable, "-c", PEAK, url]
                up = subprocess.check_output([*command, "publish", str(folder)], text=True).split()
                down = subprocess.check_output([*command, "fetch", up[0], str(self.work / "peak-out")], text=True)
                self.note(f"peak_{name}_{size >> 20}_MiB", f"publish {up[1]} MiB, fetch {down.strip()} MiB")
                shutil.rmtree(folder)
                shutil.rmtree(self.work / "peak-out")


CONFIG = """
from stages.contract import Input, StageConfig

class Config(StageConfig):
    INPUTS = {"data": Input(("source",))}
    OUTPUT = "dataset"
"""

OURS = """
import sys
from pathlib import Path
from stages.artifacts import HashCache, open_store, publish
cache = HashCache(Path(sys.argv[3]))
print(publish(open_store(sys.argv[1]), Path(sys.argv[2]), "source", cache))
cache.save()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work")
    parser.add_argument("--dvc", help="program of DVC, in an environment of its own")
    parser.add_argument("--only", nargs="*", help="parts to run")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="headrace-bench-store-"))
    server = s3_server.start(work / "server")
    try:
        os.environ.update(server.environment | {"HEADRACE_CACHE_SIZE": "0"})
        bench = Bench(work, server, arguments.quick, arguments.dvc)
        bench.boto.create_bucket(Bucket=BUCKET)
        bench.boto.put_object(Bucket=BUCKET, Key="first", Body=b"x")  # the first object of a bucket takes seconds
        for part in (
            bench.plain_s3,
            bench.plain_folder,
            bench.small_files,
            bench.against_dvc,
            bench.plan,
            bench.memory,
        ):
            if not arguments.only or part.__name__ in arguments.only:
                part()
        load = os.getloadavg()[0]  # of the last minute; more than two means that others were at work too
        machine = {
            "load": round(load, 1),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        }
        goals = {name: goal for name, goal in GOALS.items() if name in bench.ratios}
        result = {"benchmark": "store", "ratios": bench.ratios, "goals": goals, "figures": bench.figures}
        print(json.dumps(result | {"machine": machine}))
    finally:
        server.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
