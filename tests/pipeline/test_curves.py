"""The picture of a run's training curves."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from flows.flow_run.curves import draw_curves

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawn: str) -> list[str]:
    return [str(item.text) for item in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def test_a_step_has_a_panel_for_its_loss_and_one_for_its_reward() -> None:
    sft = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 1.5}]
    grpo = [{"step": step, "loss": 0.1, "reward": step / 10} for step in range(1, 6)]
    said = texts(draw_curves({"sft": sft, "grpo": grpo}))
    assert [text for text in said if " · " in text] == [
        "sft · loss",
        "training 1.00 · validation 1.50",
        "grpo · loss",
        "grpo · reward",
    ]
    assert "0.500" in said  # the last reward


def test_a_skipped_step_is_a_gap_and_the_least_loss_is_drawn_lowest() -> None:
    rows = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": None}, {"step": 4, "loss": 1.0}]
    drawn = ElementTree.fromstring(draw_curves({"base": rows}))
    (line,) = [item.get("d") for item in drawn.iter(f"{SVG}path") if item.get("stroke-width") == "1.6"]
    assert line is not None
    assert [len(piece.split("L")) for piece in line.split("M")[1:]] == [2, 1]
    heights = [float(y) for y in re.findall(r",([\d.]+)", line)]
    assert heights == sorted(heights)  # y grows downwards


def test_names_are_text_and_never_markup() -> None:
    drawn = draw_curves({'<script>&"': [{"step": 1, "loss": 1.0}]})
    assert "<script>" not in drawn
    assert '<script>&" · loss' in texts(drawn)


def test_a_long_training_is_thinned_and_keeps_its_spike() -> None:
    rows = [{"step": step, "loss": 9.0 if step == 5000 else 1.0} for step in range(1, 10_001)]
    drawn = draw_curves({"base": rows})
    assert len(drawn) < 20_000
    assert "most 9.00" in drawn
