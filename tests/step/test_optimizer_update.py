"""The arrays of an update by name."""

from zerojax.step.optimizer_update import UpdateArrays


def test_flat_and_back() -> None:
    arrays = UpdateArrays([1, 2], [3, 4], [5, 6, 7], [None, None], [8])
    flat = arrays.flat()
    assert flat == [1, 2, 3, 4, 5, 6, 7, None, None, 8]
    assert arrays.like(flat) == arrays


def test_arguments_end_before_the_copies() -> None:
    arrays = UpdateArrays(["g"], ["p"], ["m", "v"], ["s"], ["c"])
    assert arrays.like([1, 2, 3, 4, 5]) == UpdateArrays([1], [2], [3, 4], [5], [])
