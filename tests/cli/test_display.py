"""The displays are fed the events of a run and read as a person would."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from flows import figures
from flows.command.display import Board, JsonDisplay, Line, LiveDisplay, PlainDisplay, bar, says, table


def board() -> Board:
    return Board([Line("corpus", "tokenize"), Line("base", "pretrain", ("corpus",)), Line("sft", "sft", ("base",))])


def step(name: str, state: str, **more: object) -> dict[str, object]:
    return {"type": "step", "step": name, "state": state, "time": 1000.0, **more}


def progress(name: str, done: int, total: int | None, time: float, **shown: float) -> dict[str, object]:
    event = {"type": "progress", "step": name, "done": done, "total": total, "unit": "step", "figures": shown}
    return {**event, "time": time}


def test_a_running_step_shows_progress_figures_and_the_time_left() -> None:
    state = board()
    state.apply(step("base", "running"))
    state.apply(progress("base", 100, 450, 1010.0, loss=3.0, tokens_per_second=14210.0))
    state.apply(progress("base", 281, 450, 1040.0, loss=2.413, tokens_per_second=14210.0))
    # 181 steps took 30 s, so 169 more take 28 s
    assert says(state, state.lines["base"], 1040.0) == "step 281/450 · loss 2.41 · 14.2k tok/s · 28 s left"


def test_a_stage_that_knows_its_time_left_is_believed_and_shows_what_matters() -> None:
    state = board()
    state.apply(step("base", "running"))
    state.apply(progress("base", 4, 6, 1010.0, learning_rate=0.00276, seconds_left=4.94, loss=5.56))
    assert says(state, state.lines["base"], 1010.0) == "step 4/6 · loss 5.56 · 5 s left"


def test_the_pace_of_a_resumed_step_counts_from_where_it_resumed() -> None:
    state = board()
    state.apply(step("base", "running"))
    state.apply({"type": "resumed", "step": "base", "at": 400, "time": 1001.0})
    state.apply(progress("base", 400, 450, 1001.0))
    state.apply(progress("base", 410, 450, 1011.0))
    assert says(state, state.lines["base"], 1011.0) == "step 410/450 · 40 s left"


def test_a_waiting_step_names_what_it_waits_for() -> None:
    state = board()
    assert says(state, state.lines["sft"], 0.0) == "waits for base"
    state.apply(step("base", "cached"))
    assert says(state, state.lines["sft"], 0.0) == "waits for a free place"


def test_a_stopped_step_says_where_it_was_saved() -> None:
    state = board()
    state.apply(step("base", "running"))
    state.apply({"type": "saved", "step": "base", "at": 281, "seconds": 1.1})
    state.apply(step("base", "stopped"))
    assert says(state, state.lines["base"], 0.0) == "saved at step 281 (1.1 s)"
    state.apply({"type": "saved", "step": "base", "at": 282, "seconds": 0.04})  # too short to be shown
    assert says(state, state.lines["base"], 0.0) == "saved at step 282"
    state.apply(step("corpus", "running"))
    state.apply(step("corpus", "stopped"))
    assert says(state, state.lines["corpus"], 0.0) == "stopped before its first save; it starts again next time"


def test_a_step_that_never_started_says_so() -> None:
    state = board()
    state.apply(step("sft", "stopped", message="not started", seconds=0.0))
    assert says(state, state.lines["sft"], 0.0) == "not started"


def test_a_second_attempt_forgets_the_progress_of_the_first() -> None:
    state = board()
    state.apply(step("base", "running"))
    state.apply(progress("base", 200, 450, 1010.0))
    state.apply(step("base", "running", time=1020.0))
    assert state.lines["base"].done == 0


def test_events_of_unknown_steps_and_without_a_step_are_passed_over() -> None:
    state = board()
    assert state.apply({"type": "progress", "step": "nobody", "done": 1, "total": 2}) is None
    assert state.apply({"type": "run"}) is None


def test_plain_lines_tell_changes_of_state_and_progress_every_ten_seconds() -> None:
    out, clock = io.StringIO(), [1000.0]
    with PlainDisplay(board(), out, lambda: clock[0]) as display:
        display.event(step("base", "running"))
        for done in range(1, 41):
            clock[0] += 1.0
            display.event(progress("base", done, 40, clock[0], loss=2.5))
        display.event(step("base", "done", seconds=40.0, metrics={"loss": 2.5}))
    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert lines[0] == "base    running (pretrain)"
    assert lines[1] == "base    step 10/40 · loss 2.50 · 30 s left"
    assert lines[2:4] == ["base    step 20/40 · loss 2.50 · 20 s left", "base    step 30/40 · loss 2.50 · 10 s left"]
    assert lines[-1] == "base    done in 40 s: loss 2.50"
    assert len(lines) == 6


def test_a_clock_that_is_set_back_neither_silences_progress_nor_makes_times_negative() -> None:
    out, clock = io.StringIO(), [1e6]
    with PlainDisplay(board(), out, lambda: clock[0]) as display:
        display.event(step("base", "running") | {"time": clock[0]})
        display.event(progress("base", 1, 40, clock[0]))
        clock[0] -= 3600
        display.event(progress("base", 2, 40, clock[0]))
        display.event(step("base", "done") | {"time": clock[0]})
    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert lines == ["base    running (pretrain)", "base    step 2/40 · 1 s left", "base    done in 0.0 s"]


def test_plain_lines_say_that_a_step_resumed() -> None:
    out = io.StringIO()
    display = PlainDisplay(board(), out)
    display.event(step("base", "running"))
    display.event({"type": "resumed", "step": "base", "at": 281})
    assert out.getvalue().splitlines()[-1][9:] == "base    resumed at step 281"


def test_json_lines_give_every_event_and_keep_words_off_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    display = JsonDisplay(board())
    event = step("base", "done", seconds=1.0)
    display.event(event)
    display.say("words")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == event
    assert captured.err == "words\n"


def test_the_table_has_one_line_a_step_and_fits_the_width() -> None:
    state = board()
    state.apply(step("corpus", "running"))
    state.apply(step("corpus", "done", seconds=3.14, metrics={"tokens": 1_200_000, "rows": 9214}))
    state.apply(step("base", "running"))
    state.apply(progress("base", 225, 450, 1010.0, **{f"figure_{i}": 1.0 for i in range(20)}))
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(table(state, 1010.0))
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 60 for line in lines)
    assert lines[0].split()[:5] == ["corpus", "tokenize", "done", "3.1", "s"]
    console = Console(width=40, file=io.StringIO(), record=True)
    console.print(table(state, 1010.0, narrow=True))
    lines = console.export_text().splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[0] == "  corpus  done       3.1 s  1.2M tokens…"
    assert "████████░░░░░░░░" in lines[1]


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    state = board()
    state.apply(step("base", "failed", message="[red]x[/red] [0]"))
    console = Console(width=100, file=io.StringIO(), record=True)
    with LiveDisplay(state, console) as display:
        display.say("[bold]said[/bold]")
    text = console.export_text()
    assert "[red]x[/red] [0]" in text
    assert "[bold]said[/bold]" in text


@pytest.mark.parametrize(
    ("done", "total", "full"), [(0, 450, 0), (449, 450, 15), (450, 450, 16), (500, 450, 16), (5, None, None)]
)
def test_a_bar_is_full_only_at_the_end(done: int, total: int | None, full: int | None) -> None:
    assert bar(done, total) == (" " * 16 if full is None else "█" * full + "░" * (16 - full))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (figures.count(9214), "9,214"),
        (figures.count(1_234_567), "1.2M"),
        (figures.count(100_000), "100k"),
        (figures.count(3_300_000_000), "3.3G"),
        (figures.number(2.413), "2.41"),
        (figures.number(0.0832), "0.0832"),
        (figures.number(3.2e-05), "3.20e-05"),
        (figures.number(float("nan")), "nan"),
        (figures.number(512.4), "512"),
        (figures.number(12), "12"),
        (figures.number(-12.34), "-12.3"),
        (figures.percent(0.4224), "42.2%"),
        (figures.duration(0.94), "0.9 s"),
        (figures.duration(59.6), "1m 00s"),
        (figures.duration(242), "4m 02s"),
        (figures.duration(11100), "3h 05m"),
        (figures.duration(187200), "2d 04h"),
        (figures.about(50.2), "50 s"),
        (figures.about(240), "4 min"),
        (figures.size(999), "999 B"),
        (figures.size(1_750_000), "1.8 MB"),
        (figures.size(999_600), "1.0 MB"),
        (figures.size(4_100_000_000), "4.1 GB"),
        (figures.rate(14210, "tok"), "14.2k tok/s"),
        (figures.short("sha256:" + "ab" * 32), "abababababab"),
        (figures.listed(["a", "b", "c"]), "a, b and c"),
        (figures.headline({"odd_one": 3.0}), "odd one 3.00"),
        (figures.headline({}), ""),
        (figures.headline({"sft/exact_match": 0.4, "dpo/exact_match": 0.6, "sft/sampled": 0.3}), "2 models"),
    ],
)
def test_numbers_read_as_people_write_them(value: str, text: str) -> None:
    assert value == text


def test_what_a_stage_says_cannot_steer_the_terminal() -> None:
    board = Board([Line("base", "pretrain")])
    board.apply({"type": "step", "step": "base", "state": "running"})
    board.apply({"type": "log", "step": "base", "level": "warning", "text": "\x1b[31mred\x1b[0m\x1b]0;title\x07"})
    assert board.lines["base"].note == "red⟨001B⟩]0;title⟨0007⟩"
    board.apply({"type": "step", "step": "base", "state": "failed", "message": "gnp\u202eexe\x1b[2J"})
    assert board.lines["base"].message == "gnp⟨202E⟩exe⟨001B⟩[2J"
