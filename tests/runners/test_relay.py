"""What a flow and a stage on another machine tell each other through the store, on a folder and on S3."""

from __future__ import annotations

import time

import pytest

from flows.runners.lines import EventLines
from flows.runners.relay import Beats, Channel
from stages.artifacts import Store


def test_batches_arrive_in_order_each_once_and_leave_nothing_behind(store: Store) -> None:
    ours = Channel.new(store, "run-1", "sft")
    theirs = Channel(store, ours.name)
    ours.pack(b"luggage")
    assert theirs.unpack() == b"luggage"
    assert ours.receive(1) is None
    theirs.send(1, [{"type": "log", "text": "größer\n"}, {"type": "progress", "done": 1}])
    theirs.send(2, [])
    assert ours.receive(1) == [{"type": "log", "text": "größer\n"}, {"type": "progress", "done": 1}]
    assert ours.receive(2) == []
    assert ours.receive(3) is None
    ours.remove()
    assert list(store.list("")) == []


def test_a_stop_is_heard_with_its_grace(store: Store) -> None:
    ours = Channel.new(store, "run-1", "sft")
    assert ours.asked_to_stop() is None
    ours.ask_to_stop(12.5)
    assert Channel(store, ours.name).asked_to_stop() == 12.5


def test_a_secret_in_what_a_stage_says_is_blanked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "very-secret-value-1")
    channel = Channel.new(store, "run-1", "sft")
    channel.send(1, [{"type": "log", "text": "key very-secret-value-1"}])
    assert channel.receive(1) == [{"type": "log", "text": "key [secret]"}]


def test_signs_of_life_count_only_when_they_change(store: Store) -> None:
    ours = Channel.new(store, "run-1", "sft")
    theirs = Channel(store, ours.name)
    life = Beats(0.2)
    ours.beat()
    life.see(theirs.last_beat())
    assert not life.stopped
    time.sleep(0.3)
    life.see(theirs.last_beat())
    assert life.stopped
    ours.beat()
    life.see(theirs.last_beat())
    assert not life.stopped


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "x" * 300])
def test_a_channel_cannot_leave_its_place(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a channel"):
        Channel(store, name)


def test_events_are_put_together_from_any_pieces() -> None:
    text = b'{"type":"log","text":"\xc3\xa4"}\nnot json\n\n{"type":"outcome","code":0}\n{"cut'
    for size in (1, 2, 7, 1000):
        lines = EventLines()
        events = [event for at in range(0, len(text), size) for event in lines.feed(text[at : at + size])]
        assert [event["type"] for event in events] == ["log", "log", "outcome"]
        assert (events[0]["text"], events[1]["text"]) == ("ä", "not json")
        assert [event["text"] for event in lines.rest()] == ['{"cut']
        assert list(lines.rest()) == []
