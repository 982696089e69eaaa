"""`python -m stages`: the commands of a stage container.

run SPEC.json           run one stage; events on standard output (see `stages.process`)
serve [--grace N]       the fork server (see `stages.server`)
sample FOLDER PROMPT    generate from a checkpoint folder (see `stages.sampling.cli`)
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    _write_any_text()
    if command == "run" and len(rest) == 1:
        _fix_environment()
        return _run(Path(rest[0]))
    if command == "serve":
        _fix_environment()
        from stages.server import main as serve

        return serve(rest)
    if command == "sample":
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save: Ctrl-C ends it without a traceback
        from stages.sampling.cli import main as sample

        return sample(rest)
    print(f"python -m stages: cannot understand {' '.join(arguments)!r}\n{__doc__}", file=sys.stderr)
    return 2


# OpenMP threads that wait by spinning take the cores from other steps: with two steps on two cores, training ran
# several times slower. Read by the library when torch is loaded.
_QUIET_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
# Asking CUDA itself whether it is there would make a fork unusable, and ranks are forked; NVML can be asked.
_FORKABLE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _fix_environment() -> None:
    """Set what must be set before the interpreter or torch starts.

    The interpreter starts again with PYTHONHASHSEED=0, so that no order of a set can differ between a stage and its
    resumption.
    """
    for name, value in (_QUIET_WAITING | _FORKABLE).items():
        os.environ.setdefault(name, value)
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})


def _write_any_text() -> None:
    """Have no `print` fail for its text: generated answers and data hold what an encoding, or UTF-8 itself, lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _run(spec: Path) -> int:
    from stages.children import adopt_orphans, end_children
    from stages.process import run_spec

    adopt_orphans()
    try:
        events = os.dup(1)
        os.dup2(2, 1)  # stray prints go to standard error
    except OSError:  # a standard stream is closed
        events = -1
    code = run_spec(spec, events)
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is durable by now; exit hooks of libraries can only hang


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
