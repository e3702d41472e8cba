"""How a line is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.tiles import WARPGROUP, Cut, Tile, of_block, tiles, vector_of


@given(st.integers(WARPGROUP, 20_000), st.sampled_from([1, 2, 4, 8]))
def test_every_element_is_in_a_tile_and_none_beyond_the_end(length: int, vector: int) -> None:
    found = list(tiles(length, WARPGROUP * vector * 4, vector))
    seen = 0
    for tile in found:
        assert tile.start + tile.again == seen
        assert tile.size % (WARPGROUP * tile.vector) == 0
        assert tile.start % tile.vector == 0
        seen = tile.start + tile.size
    assert seen == length


@given(st.lists(st.integers(WARPGROUP, 20_000), min_size=1, max_size=4), st.integers(1, 8))
def test_every_element_is_in_a_tile_of_one_block(lengths: list[int], many: int) -> None:
    largest = WARPGROUP * 4
    cuts = [Cut(length, many * largest, largest, 2) for length in lengths]
    seen = [0] * len(lengths)

    def work(k: int, found: list[Tile]) -> None:
        for tile in found:
            assert tile.start + tile.again == seen[k]
            seen[k] = tile.start + tile.size

    for block in range(sum(cut.blocks for cut in cuts)):
        of_block(cuts, block, work)
    assert seen == lengths


@pytest.mark.parametrize(
    ("itemsize", "width", "vector"), [(4, 1024, 4), (2, 1024, 8), (2, 1600, 8), (2, 50257, 1)]
)
def test_vectors_never_begin_off_their_boundary(itemsize: int, width: int, vector: int) -> None:
    assert vector_of(itemsize, width) == vector
