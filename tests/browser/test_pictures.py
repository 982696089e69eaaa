"""Graphs and charts: what is drawn is where it should be, whatever the graph or the figures."""

from __future__ import annotations

import itertools
import math
import random
import re

from flows.lineage.browser.charts import chart, curves
from flows.lineage.browser.drawing import Box, draw
from flows.lineage.browser.layout import Placement, place


def check(placement: Placement, arrows: list[tuple[str, str]]) -> None:
    """No two boxes overlap, everything is inside, and arrows begin and end at their boxes."""
    width, height = placement.box
    for (x, y), (other_x, other_y) in itertools.combinations(placement.boxes.values(), 2):
        assert abs(x - other_x) >= width - 1e-6 or abs(y - other_y) >= height - 1e-6
    for x, y in placement.boxes.values():
        assert -1e-6 <= x <= placement.size[0] - width + 1e-6
        assert -1e-6 <= y <= placement.size[1] - height + 1e-6
    assert [(first, last) for first, last, _ in placement.arrows] == arrows


def test_steps_that_need_each_other_follow_from_left_to_right() -> None:
    arrows = [("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")]
    placement = place(["a", "b", "c", "d"], arrows)
    check(placement, arrows)
    at = {name: x for name, (x, _) in placement.boxes.items()}
    assert at["a"] < at["b"] < at["c"]
    assert at["d"] == at["b"]  # what needs nothing stands right before what needs it
    down = place(["a", "b", "c", "d"], arrows, down=True)
    assert down.boxes["a"][1] < down.boxes["b"][1] < down.boxes["c"][1]


def test_random_graphs_never_overlap_and_are_drawn_the_same_way_again() -> None:
    rng = random.Random(3)
    for size in (1, 2, 5, 12, 30, 60):
        names = [f"n{number}" for number in range(size)]
        arrows = sorted({(a, b) for a, b in itertools.combinations(names, 2) if rng.random() < 2.0 / size})
        placement = place(names, arrows, down=size % 2 == 0)
        check(placement, arrows)
        assert placement == place(names, arrows, down=size % 2 == 0)


def test_arrows_do_not_cross_where_they_need_not() -> None:
    arrows = [("a", "z"), ("b", "y"), ("c", "x")]
    placement = place(["a", "b", "c", "x", "y", "z"], arrows)
    for (a, z), (b, y) in itertools.combinations(arrows, 2):
        before = placement.boxes[a][1] - placement.boxes[b][1]
        after = placement.boxes[z][1] - placement.boxes[y][1]
        assert before * after > 0


def test_an_arrow_passes_between_the_boxes_and_not_through_them() -> None:
    names = ["a", *(f"m{number}" for number in range(5)), "z"]
    arrows = [("a", "z"), *(("a", name) for name in names[1:-1]), *((name, "z") for name in names[1:-1])]
    placement = place(names, arrows)
    points = placement.arrows[0][2]
    for x, y in placement.boxes.values():
        assert not any(x < px < x + placement.box[0] and y < py < y + placement.box[1] for px, py in points)


def test_a_circle_and_unknown_boxes_are_no_trouble() -> None:
    placement = place(["a", "b"], [("a", "b"), ("b", "a"), ("a", "a"), ("a", "nothing")])
    check(placement, [("a", "b"), ("b", "a")])
    assert place([], []).boxes == {}


def test_long_names_are_cut_and_told_in_full() -> None:
    name = "a-very-long-name-of-a-step-that-no-box-could-hold"
    drawing = draw([Box("x", name, "note")], [])
    assert drawing.boxes[0].title.endswith("…")
    assert drawing.boxes[0].label == f"{name} note"


def test_a_chart_has_round_values_and_tells_its_figures_in_words() -> None:
    made = chart("loss", {"loss": [(float(step), 5.0 / step) for step in range(1, 41)]})
    assert made is not None
    assert [text for _, text in made.rows] == ["0", "2", "4", "6"]
    assert [text for _, text in made.columns] == ["1", "40"]
    assert made.told == "loss. 5.00 at step 1, 0.125 at step 40; least 0.125, most 5.00."


def test_a_share_that_never_changes_is_drawn_between_none_and_all() -> None:
    made = chart("exact match", {"exact match": [(1.0, 0.0), (2.0, 0.0)]}, share=True)
    assert made is not None
    assert [text for _, text in made.rows] == ["0.0%", "50.0%", "100.0%"]


def test_what_is_not_finite_is_a_gap() -> None:
    made = chart("loss", {"loss": [(1.0, 1.0), (2.0, math.nan), (3.0, 2.0), (4.0, math.inf), (5.0, 3.0)]})
    assert made is not None
    assert made.lines[0].path.count("M") == 3
    assert chart("loss", {"loss": [(1.0, math.nan)]}) is None


def test_a_spike_survives_the_thinning_of_a_long_curve() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[61_234] = (61_234.0, 50.0)
    made = chart("loss", {"loss": points})
    assert made is not None
    path = made.lines[0].path
    assert path.count("L") < 700
    heights = [float(y) for y in re.findall(r",(-?[\d.]+)", path)]
    rows = {text: y for y, text in made.rows}
    assert min(heights) == round(rows["0"] - 50 / 60 * (rows["0"] - rows["60"]), 1)


def test_curves_put_the_telling_figures_first_and_the_validation_beside_its_loss() -> None:
    rows = [
        {"step": n, "learning_rate": 0.1, "loss": 2.0, "eval_loss": 2.1 if n == 3 else None, "reward": 1, "x": "NaN"}
        for n in range(5)
    ]
    made = curves({"": rows})
    assert [item.title for item in made] == ["loss", "reward", "learning rate"]
    assert [line.name for line in made[0].lines] == ["training", "validation"]
    two = curves({"a": rows, "b": rows})
    assert [line.name for line in two[0].lines] == ["a", "b", "a validation", "b validation"]
