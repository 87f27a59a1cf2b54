from __future__ import annotations

import math
import random
from itertools import pairwise, product

from vescale_fsdp.checkpoint.manifest import boxes_fault, spans_fault


def tiles(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether each element is in one box: by counting."""
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for index in product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))):
            if index not in counts:
                return False
            counts[index] += 1
    return all(count == 1 for count in counts.values())


def test_boxes_are_judged_as_counting_judges_them() -> None:
    chance = random.Random(0)
    good = 0
    for _ in range(3000):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(0, 3)))
        rows = shape[0] if shape else 1
        cuts = sorted({0, rows, *(chance.randint(0, rows) for _ in range(2))})
        boxes = [((a, *[0] * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in pairwise(cuts)]
        boxes = boxes if shape else [((), ())]
        if chance.random() < 0.7:  # something is wrong with one of them, maybe
            index = chance.randrange(len(boxes))
            offsets, sizes = (list(part) for part in boxes[index])
            if shape:
                dim = chance.randrange(len(shape))
                offsets[dim] = max(0, offsets[dim] + chance.choice([-1, 0, 1]))
                sizes[dim] = max(0, sizes[dim] + chance.choice([-1, 0, 1]))
            boxes[index] = (tuple(offsets), tuple(sizes))
            boxes += [boxes[0]] if chance.random() < 0.2 else []
        chance.shuffle(boxes)
        expected = tiles(shape, boxes)
        assert (not boxes_fault(shape, boxes)) == expected, (shape, boxes)
        good += expected
    assert 500 < good < 2500


def test_a_tensor_without_elements_needs_no_box() -> None:
    assert boxes_fault((0, 3), []) == ""
    assert boxes_fault((0, 3), [((0, 0), (0, 3))]) == ""
    assert "hold 0 elements, expected 6" in boxes_fault((2, 3), [])


def test_spans_tile_a_file_or_the_fault_is_named() -> None:
    assert spans_fault(10, [(4, 6, "b"), (0, 4, "a"), (10, 0, "none")]) == ""
    assert spans_fault(10, [(3, 7, "b"), (0, 4, "a")]) == "b overlaps a"
    assert "bytes 4 to 5, between a and b" in spans_fault(10, [(5, 5, "b"), (0, 4, "a")])
    assert spans_fault(10, [(0, 11, "a")]) == "a ends at byte 11 of 10"
    assert spans_fault(10, [(0, 9, "a")]) == "bytes 9 to 10 belong to nothing"
    assert spans_fault(0, []) == ""


def test_many_boxes_are_judged_quickly() -> None:
    rows = 20_000
    boxes = [((row, 0), (1, 8)) for row in range(rows)]
    assert boxes_fault((rows, 8), boxes) == ""
    assert math.prod((rows, 8)) == 160_000
