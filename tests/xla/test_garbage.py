import gc

import pytest

from zerojax.xla.garbage import seldom_collected


@pytest.fixture(autouse=True)
def threshold():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_is_seldom_looked_for_inside_and_as_before_after_it():
    gc.set_threshold(700, 10, 11)
    inside = []

    @seldom_collected()
    def trace(again):
        inside.append(gc.get_threshold())
        if again:
            trace(again=False)
            inside.append(gc.get_threshold())
        else:
            raise KeyError

    with pytest.raises(KeyError):
        trace(again=True)
    assert gc.get_threshold() == (700, 10, 11)
    with seldom_collected():
        with seldom_collected():
            pass
        inside.append(gc.get_threshold())
    assert inside == [(100_000, 10, 11)] * 3
    assert gc.get_threshold() == (700, 10, 11)
