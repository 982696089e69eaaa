"""Where the boxes and arrows of a graph go: a layered drawing, from left to right or from top to bottom.

The model is Sugiyama's: every box has a layer, one further than those that it needs; an arrow over several layers goes
through a point in each; the boxes of a layer are ordered so that few arrows cross, and then moved towards what they are
joined to as far as their neighbours let them.

Invariants:
- A pure function of its arguments: the same graph is always drawn the same way.
- Boxes never overlap, and every arrow goes forward. An arrow that would close a circle is drawn backwards from its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 6  # more change little on graphs that a page can show
_BEND = 10.0  # the room across the layers that an arrow takes in passing

Point = tuple[float, float]
_Cell = str | tuple[int, int]  # a box by its name, or where arrow number i passes layer j


@dataclass(frozen=True)
class Placement:
    """A drawing.

    Attributes:
        boxes: name -> its upper left corner.
        arrows: (from, to, points), the points from the edge of the one box to the edge of the other.
        size: width and height of the whole.
        box: width and height of every box.
        down: whether it goes from top to bottom.
    """

    boxes: dict[str, Point]
    arrows: list[tuple[str, str, list[Point]]]
    size: Point
    box: Point
    down: bool


def place(
    names: Sequence[str],
    arrows: Sequence[tuple[str, str]],
    *,
    box: Point = (150.0, 46.0),
    between_layers: float = 44.0,
    between_boxes: float = 14.0,
    down: bool = False,
) -> Placement:
    """Lay out boxes and the arrows between them.

    Args:
        names: the boxes; of equals, those named first come first.
        arrows: (from, to); those that name no box, or one box twice, are left out.
        box: width and height of a box.
        down: from top to bottom instead of from left to right.
    """
    known = set(names)
    wanted = list(dict.fromkeys(arrow for arrow in arrows if arrow[0] != arrow[1] and known.issuperset(arrow)))
    turned = _without_circles(names, wanted)
    layer_of = _layers(names, turned)
    layers, joins = _with_passages(names, turned, layer_of)
    layers = _ordered(layers, joins)
    along, across = (box[1], box[0]) if down else box
    room = {cell: across if isinstance(cell, str) else _BEND for layer in layers for cell in layer}
    middle = _across(layers, joins, room, between_boxes)

    def start_of(layer: int) -> float:
        return layer * (along + between_layers)

    def point(distance: float, position: float) -> Point:
        return (position, distance) if down else (distance, position)

    boxes = {name: point(start_of(layer_of[name]), middle[name] - across / 2) for name in names}
    drawn = []
    for number, (first, last) in enumerate(turned):
        points = [point(start_of(layer_of[first]) + along, middle[first])]
        for layer in range(layer_of[first] + 1, layer_of[last]):
            points.append(point(start_of(layer), middle[number, layer]))
            points.append(point(start_of(layer) + along, middle[number, layer]))
        points.append(point(start_of(layer_of[last]), middle[last]))
        start, end = wanted[number]
        drawn.append((start, end, points if start == first else points[::-1]))
    length = start_of(max(layer_of.values(), default=0)) + along if names else 0.0
    width = max((middle[cell] + room[cell] / 2 for layer in layers for cell in layer), default=0.0)
    return Placement(boxes, drawn, point(length, width), box, down)


def _without_circles(names: Sequence[str], arrows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows, those turned round that lead back to a box on the way to them."""
    following = defaultdict(list)
    for first, last in arrows:
        following[first].append(last)
    state: dict[str, int] = {}  # 1: on the way, 2: done
    back: set[tuple[str, str]] = set()
    for name in names:
        stack = [(name, iter(following[name]))] if name not in state else []
        state.setdefault(name, 1)
        while stack:
            current, rest = stack[-1]
            for target in rest:
                if state.get(target) == 1:
                    back.add((current, target))
                elif target not in state:
                    state[target] = 1
                    stack.append((target, iter(following[target])))
                    break
            else:
                state[current] = 2
                stack.pop()
    return [(last, first) if (first, last) in back else (first, last) for first, last in arrows]


def _layers(names: Sequence[str], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Each box one layer after the last that it needs; one that needs nothing, right before what needs it."""
    needs, needed_by = defaultdict(list), defaultdict(list)
    for first, last in arrows:
        needs[last].append(first)
        needed_by[first].append(last)
    layers: dict[str, int] = {}
    waiting = {name: len(needs[name]) for name in names}
    ready = [name for name in names if not waiting[name]]
    for name in ready:  # grows while it is walked
        layers[name] = max((layers[needed] + 1 for needed in needs[name]), default=0)
        for follower in needed_by[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    for name in reversed(ready):
        if needed_by[name] and len(needed_by[name]) > len(needs[name]):
            layers[name] = min(layers[follower] for follower in needed_by[name]) - 1
    return layers


def _with_passages(
    names: Sequence[str], arrows: Sequence[tuple[str, str]], layer_of: Mapping[str, int]
) -> tuple[list[list[_Cell]], list[tuple[_Cell, _Cell]]]:
    """The cells of each layer, and what joins cells of neighbouring layers."""
    layers: list[list[_Cell]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for name in names:
        layers[layer_of[name]].append(name)
    joins: list[tuple[_Cell, _Cell]] = []
    for number, (first, last) in enumerate(arrows):
        before: _Cell = first
        for layer in range(layer_of[first] + 1, layer_of[last]):
            passage = (number, layer)
            layers[layer].append(passage)
            joins.append((before, passage))
            before = passage
        joins.append((before, last))
    return layers, joins


def _ordered(layers: list[list[_Cell]], joins: Sequence[tuple[_Cell, _Cell]]) -> list[list[_Cell]]:
    """The layers in the order with the fewest crossings that sorting by the neighbours' middle finds."""
    before, after = _neighbours(joins)
    best, fewest = layers, _crossings(layers, after)
    for sweep in range(2 * _SWEEPS):
        if not fewest:
            break
        layers = [list(layer) for layer in layers]
        forward = sweep % 2 == 0
        order = range(1, len(layers)) if forward else range(len(layers) - 2, -1, -1)
        neighbours = before if forward else after
        for number in order:
            place_of = {cell: index for index, cell in enumerate(layers[number + (-1 if forward else 1)])}
            here = {cell: index for index, cell in enumerate(layers[number])}
            weight = {
                cell: sum(place_of[other] for other in neighbours[cell]) / len(neighbours[cell])
                if neighbours[cell]
                else float(here[cell])
                for cell in layers[number]
            }
            layers[number].sort(key=lambda cell, weight=weight: weight[cell])  # type: ignore[misc]
        crossings = _crossings(layers, after)
        if crossings < fewest:
            best, fewest = layers, crossings
    return best


def _neighbours(joins: Sequence[tuple[_Cell, _Cell]]) -> tuple[dict[_Cell, list[_Cell]], dict[_Cell, list[_Cell]]]:
    before: dict[_Cell, list[_Cell]] = defaultdict(list)
    after: dict[_Cell, list[_Cell]] = defaultdict(list)
    for first, last in joins:
        after[first].append(last)
        before[last].append(first)
    return before, after


def _crossings(layers: Sequence[Sequence[_Cell]], after: Mapping[_Cell, list[_Cell]]) -> int:
    total = 0
    for layer, following in pairwise(layers):
        place_of = {cell: index for index, cell in enumerate(following)}
        passed: list[int] = []
        for cell in layer:
            ends = sorted(place_of[other] for other in after.get(cell, ()))
            total += sum(1 for end in ends for earlier in passed if earlier > end)
            passed.extend(ends)
    return total


def _across(
    layers: Sequence[Sequence[_Cell]],
    joins: Sequence[tuple[_Cell, _Cell]],
    room: Mapping[_Cell, float],
    gap: float,
) -> dict[_Cell, float]:
    """The middle of each cell across the layers: as near to the middle of its neighbours as the order lets it."""
    before, after = _neighbours(joins)
    middle: dict[_Cell, float] = {}
    for layer in layers:
        reached = 0.0
        for cell in layer:
            middle[cell] = reached + room[cell] / 2
            reached += room[cell] + gap
    for sweep in range(2 * _SWEEPS):
        neighbours = before if sweep % 2 == 0 else after
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wishes = [
                sum(middle[other] for other in neighbours[cell]) / len(neighbours[cell])
                if neighbours.get(cell)
                else middle[cell]
                for cell in layer
            ]
            middle.update(zip(layer, _spread(wishes, [room[cell] for cell in layer], gap), strict=True))
    first = min((middle[cell] - room[cell] / 2 for layer in layers for cell in layer), default=0.0)
    return {cell: value - first for cell, value in middle.items()}


def _spread(wishes: Sequence[float], rooms: Sequence[float], gap: float) -> list[float]:
    """Positions in this order and far enough apart, with the least sum of squares of distances from the wishes.

    Taking from each wish the room of all before it leaves a sequence that must only not fall, and pooling neighbours
    that do gives the nearest such sequence.
    """
    offsets = [0.0]
    for room, following in pairwise(rooms):
        offsets.append(offsets[-1] + (room + following) / 2 + gap)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(wishes, offsets, strict=False):
        value, count = wish - offset, 1
        while pools and pools[-1][0] > value:
            other, others = pools.pop()
            value, count = (value * count + other * others) / (count + others), count + others
        pools.append((value, count))
    free = [value for value, count in pools for _ in range(count)]
    return [value + offset for value, offset in zip(free, offsets, strict=False)]
