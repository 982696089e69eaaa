"""Graphs as pictures: what the SVG of a page needs, worked out from boxes, arrows and where they are.

Text is cut here to what its box holds; escaping is the template's. The whole text of a box is its label, which a screen
reader speaks and a pointer shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flows.lineage.browser.layout import Placement, Point, place

_MARGIN = 6.0
_LETTER = 7.4  # pixels of a letter of the title, rather too many than too few
_SMALL_LETTER = 6.5
_FITS = 1500.0  # width of a drawing that still reads well when a page scales it to its own
_LEAST = 104.0  # width of a box
_PADDING = 22.0  # beside the text of a box


@dataclass(frozen=True)
class Box:
    """A thing in a graph.

    Attributes:
        name: what arrows call it.
        title, note: its two lines.
        look: the CSS class, such as "done" or "checkpoint".
        link: where it leads, "" for nowhere.
        here: whether it is what the page is about.
        sign: a character before the title that tells the look without colour.
    """

    name: str
    title: str
    note: str = ""
    look: str = ""
    link: str = ""
    here: bool = False
    sign: str = ""


@dataclass(frozen=True)
class DrawnBox:
    """A box in its place, its text cut to fit."""

    box: Box
    x: float
    y: float
    title: str
    note: str
    label: str


@dataclass(frozen=True)
class DrawnArrow:
    """An arrow as an SVG path."""

    path: str
    first: str
    last: str
    label: str


@dataclass(frozen=True)
class Drawing:
    """A graph for the template `graph.html`."""

    boxes: list[DrawnBox]
    arrows: list[DrawnArrow]
    width: float
    height: float
    box: Point
    down: bool


def draw(boxes: Sequence[Box], arrows: Iterable[tuple[str, str, str]], *, down: bool = False) -> Drawing:
    """Draw boxes and labelled arrows (from, to, label).

    Args:
        down: from top to bottom, in narrower boxes, for narrow windows.
    """
    joined: dict[tuple[str, str], list[str]] = {}
    for first, last, label in arrows:
        joined.setdefault((first, last), []).append(label)
    gaps = (34.0, 12.0) if down else (28.0, 12.0)
    names = [box.name for box in boxes]
    size = (_width(boxes, 148.0 if down else 164.0), 46.0)
    placement = place(names, list(joined), box=size, between_layers=gaps[0], between_boxes=gaps[1], down=down)
    if not down and placement.size[0] > _FITS:  # many layers: narrower boxes, before all of it is drawn smaller
        layers = round((placement.size[0] + gaps[0]) / (size[0] + gaps[0]))
        size = (max(_LEAST, min(size[0], (_FITS + gaps[0]) / layers - gaps[0])), size[1])
        placement = place(names, list(joined), box=size, between_layers=gaps[0], between_boxes=gaps[1])
    drawn = [_box(box, placement) for box in sorted(boxes, key=lambda box: _order(box, placement))]
    paths = [
        DrawnArrow(_path(points, down), first, last, ", ".join(filter(None, joined[first, last])))
        for first, last, points in placement.arrows
    ]
    width, height = (side + 2 * _MARGIN for side in placement.size)
    return Drawing(drawn, paths, width, height, placement.box, down)


def _order(box: Box, placement: Placement) -> Point:
    x, y = placement.boxes[box.name]
    return (y, x) if placement.down else (x, y)


def _width(boxes: Sequence[Box], most: float) -> float:
    """The width that the longest texts need, within reason."""
    longest = max(
        (max(len(box.title) * _LETTER + 16 * bool(box.sign), len(box.note) * _SMALL_LETTER) for box in boxes), default=0
    )
    return min(most, max(_LEAST, longest + _PADDING))


def _box(box: Box, placement: Placement) -> DrawnBox:
    x, y = placement.boxes[box.name]
    room = placement.box[0] - _PADDING
    label = " ".join(filter(None, [box.title, box.note]))
    title_room = room - (16 if box.sign else 0)
    return DrawnBox(
        box,
        x + _MARGIN,
        y + _MARGIN,
        _cut(box.title, title_room / _LETTER),
        _cut(box.note, room / _SMALL_LETTER),
        label,
    )


def _cut(text: str, letters: float) -> str:
    return text if len(text) <= letters else f"{text[: max(1, int(letters) - 1)]}…"


def _path(points: Sequence[Point], down: bool) -> str:
    """Curves between layers, straight lines through them."""
    moved = [(x + _MARGIN, y + _MARGIN) for x, y in points]
    parts = [f"M{_at(moved[0])}"]
    for number, (start, end) in enumerate(pairwise(moved)):
        if number % 2:
            parts.append(f"L{_at(end)}")
        elif down:
            half = (start[1] + end[1]) / 2
            parts.append(f"C{_at((start[0], half))} {_at((end[0], half))} {_at(end)}")
        else:
            half = (start[0] + end[0]) / 2
            parts.append(f"C{_at((half, start[1]))} {_at((half, end[1]))} {_at(end)}")
    return " ".join(parts)


def _at(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"
