"""Ranges of flattened arrays as boxes."""

import itertools

import numpy as np
import pytest

from zerojax.offload.disk.slices import boxes, full_index, meet, moved, shape_of


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (3, 5), (4, 1, 3), (2, 3, 2, 2)])
def test_a_range_is_its_boxes(shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(x.size + 1), 2):
        found = [*boxes(shape, start, stop)]
        values = [x[box].reshape(-1) for box in found]
        assert [*itertools.chain(*values)] == [*range(start, stop)]
        assert [shape_of(box) for box in found] == [x[box].shape for box in found]
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_where_boxes_meet() -> None:
    one, other = (slice(0, 4), slice(2, 6)), (slice(3, 9), slice(0, 3))
    assert meet(one, other) == (slice(3, 4), slice(2, 3))
    assert meet(one, (slice(4, 9), slice(0, 3))) is None
    assert meet((), ()) == ()


def test_moved_and_back() -> None:
    box, part = full_index((2, 3)), (slice(4, 6), slice(1, 4))
    assert moved(box, part) == part
    assert moved(part, part, -1) == box
