"""The fork server: stages start in milliseconds because torch and transformers are imported once, before the fork.

`python -m stages serve` reads one JSON object a line from standard input and answers on standard output, one JSON object a
line. One server serves one `flows` process and dies with it.

Requests:
    {"id": "base", "spec": "/s/spec.json", "events": "/s/events.jsonl", "stderr": "/s/stderr.log"}
        Start the stage of that spec. `id` is any string not in use. `events` is a file (made if absent, appended to) or a
        FIFO whose read end is already open; it receives exactly what `python -m stages run` writes on standard output.
        `stderr` (optional; the server's own when absent) is a file that receives stray prints, warnings and native
        crash messages of the stage. Both folders must exist.
    {"id": "base", "signal": "TERM"}
        TERM or INT: ask the stage to save and stop (exit 75). KILL: kill the stage and everything in its process group.
        A signal to a stage that has ended is ignored.

Answers:
    {"type": "ready", "pid": 4711}                                          once, at the start
    {"type": "started", "id": "base", "pid": 4712}                          the stage is forked
    {"type": "exited", "id": "base", "code": 0, "signal": null}             its end; all of its events are written by then
    {"type": "exited", "id": "base", "code": null, "signal": "SIGKILL"}     killed by a signal (137 in a shell)
    {"type": "refused", "id": "base", "message": "..."}                     bad request; nothing was started

End of file on standard input, or SIGTERM, says that the parent is gone or done: every stage gets SIGTERM, is waited for while
it saves (at most `--grace` seconds, 300 by default, then killed), and the server exits 0. SIGINT is ignored: whoever
started the server decides what Ctrl-C means.

Invariants:
- The server never runs nor imports stage or user code, so a stage always runs the code that is on disk when it starts.
- Nothing but the main thread of the server exists when it forks, and no CUDA context: children may use OpenMP and CUDA.
- A stage whose `Config` says `NEEDS_TORCH = False` is forked at once. torch is imported before the first stage that needs
  it, or as soon as no request has come for a moment; requests that arrive meanwhile wait for the import.
- A child is the leader of its own session, gets SIGTERM when the server dies (PR_SET_PDEATHSIG), and sees PYTHONHASHSEED=0.
- The log of the store is written by whoever follows the events (`stages.artifacts.append_log`), not by the stage.
"""
