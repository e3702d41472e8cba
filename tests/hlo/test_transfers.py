"""Copies between device and host memory, found in small texts."""

import pytest

from zerojax.hlo.transfers import HostCopy, host_copies

HEAD = "HloModule m, is_scheduled=true, num_partitions=1\n"
SLICE = """\
%wrapped (a: f32[4,8], i: s32[]) -> f32[1,8] {
  %a = f32[4,8]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,8]{1,0} dynamic-slice(%a, %i), dynamic_slice_sizes={1,8}
}

%product (a: f32[1,8]) -> f32[1,8] {
  %b = f32[1,8]{1,0} parameter(0)
  ROOT %dot = f32[1,8]{1,0} dot(%b, %b), lhs_contracting_dims={}, rhs_contracting_dims={}
}
"""
LOAD = (
    "%load = ((f32[4,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%far, %i), "
    'kind=kLoop, calls=%wrapped, metadata={op_name="jit(f)/transpose(jvp(g))/slice"}'
)
LOADED = "%loaded = f32[1,8]{1,0} fusion-done(%load)"
STORE = (
    "%store = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[4,8]{1,0:S(5)}, u32[]) "
    "fusion-start(%far, %near, %i), kind=kCustom, calls=%update"
)
STORED = "%stored = f32[4,8]{1,0:S(5)} fusion-done(%store)"
ADD = "%add = f32[1,8]{1,0} fusion(%near), kind=kLoop, calls=%product"
INDEX = "%index = s32[] fusion(%i), kind=kLoop, calls=%wrapped"


def text(*lines: str, before: str = SLICE) -> str:
    body = (
        "%far = f32[4,8]{1,0:S(5)} parameter(0)",
        "%near = f32[1,8]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        *lines,
        "ROOT %out = (f32[1,8]{1,0}) tuple(%near)",
    )
    listed = "\n".join(f"  {line}" for line in body)
    return f"{HEAD}\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{listed}\n}}\n"


def only(*lines: str) -> HostCopy:
    (found,) = host_copies(text(*lines))
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


def test_copies_within_the_device_are_none() -> None:
    near = "%s = (f32[1,8]{1,0}, f32[1,8]{1,0}, u32[]) copy-start(%near)"
    assert not host_copies(text(near, "%d = f32[1,8]{1,0} copy-done(%s)", ADD))


def test_copies_under_way_together() -> None:
    load, store = host_copies(text(LOAD, STORE, LOADED, STORED))
    assert load.beside(store)
    assert store.beside(load)
    load, store = host_copies(text(LOAD, LOADED, STORE, STORED))
    assert not load.beside(store)
    assert not load.beside(load)


def test_in_a_loop_as_often_as_it_runs() -> None:
    body = (
        "%body (q: (f32[4,8])) -> (f32[4,8]) {\n"
        "  %q = (f32[4,8]{1,0:S(5)}) parameter(0)\n"
        "  %mine = f32[4,8]{1,0:S(5)} get-tuple-element(%q), index=0\n"
        "  %start = (f32[4,8]{1,0}, f32[4,8]{1,0:S(5)}, u32[]) copy-start(%mine)\n"
        "  %done = f32[4,8]{1,0} copy-done(%start)\n"
        "  ROOT %t = (f32[4,8]{1,0:S(5)}) tuple(%mine)\n}\n"
    )
    loop = (
        "%loop = (f32[4,8]{1,0:S(5)}) while(%t0), condition=%c, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}'
    )
    (found,) = host_copies(text("%t0 = (f32[4,8]{1,0:S(5)}) tuple(%far)", loop, before=body))
    assert (found.computation, found.times, found.inward) == ("body", 7, True)
