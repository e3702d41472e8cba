"""The cost of feeding, as the benchmark measures it."""

from benchmarks import feeding


def test_every_figure_is_of_its_column() -> None:
    found = feeding.measure(turns=3)
    assert found.processes == 1
    assert 0 < found.agreed < found.zerojax
    assert min(found.plain, found.local, found.ratio) > 0
    assert len(found.row()) == len(feeding.HEAD)
