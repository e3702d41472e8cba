"""What runs beside copies between device and host memory, in small texts."""

import pytest
from hlo.copies import ADD, INDEX, LOAD, LOADED, STORE, STORED, text

from benchmarks.overlap import ScheduledCopy, scheduled_copies


def only(*lines: str) -> ScheduledCopy:
    (found,) = scheduled_copies(text(*lines))
    return found


def test_a_load_spans_what_stands_between_its_start_and_its_done() -> None:
    found = only(LOAD, ADD, LOADED)
    assert (found.inward, found.bytes, found.spans) == (True, 32, 1)
    assert (found.products, found.of) == (1, 1)
    assert (found.name, found.computation, found.backward) == ("load", "main", True)


def test_what_stands_before_or_after_is_not_spanned() -> None:
    assert only(ADD, LOAD, LOADED).spans == 0
    assert only(LOAD, LOADED, ADD).spans == 0
    assert only(LOAD, LOADED, ADD).of == 1


def test_arithmetic_on_an_index_hides_nothing() -> None:
    assert only(LOAD, INDEX, LOADED).spans == 0


def test_a_store_moves_what_it_writes_not_what_it_writes_into() -> None:
    found = only(STORE, ADD, STORED)
    assert (found.inward, found.bytes, found.spans) == (False, 32, 1)
    assert not found.backward


@pytest.mark.parametrize(
    ("source", "result", "inward"),
    [("%far", "f32[4,8]{1,0}", True), ("%near", "f32[1,8]{1,0:S(5)}", False)],
)
def test_plain_copies(source: str, result: str, inward: bool) -> None:
    start = f"%start = ({result}, f32[4,8], u32[]) copy-start({source})"
    found = only(start, ADD, f"%end = {result} copy-done(%start)")
    assert (found.inward, found.spans) == (inward, 1)
    assert found.bytes == (128 if inward else 32)


def test_a_copy_that_is_waited_for_at_once_spans_nothing() -> None:
    found = only("%now = f32[4,8]{1,0} copy(%far)", ADD)
    assert (found.inward, found.issued, found.spans) == (True, found.done, 0)


def test_copies_under_way_together() -> None:
    load, store = scheduled_copies(text(LOAD, STORE, LOADED, STORED))
    assert load.beside(store)
    assert store.beside(load)
    load, store = scheduled_copies(text(LOAD, LOADED, STORE, STORED))
    assert not load.beside(store)
    assert not load.beside(load)
