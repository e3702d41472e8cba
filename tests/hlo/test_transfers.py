"""Copies between device and host memory, found in small texts."""

from hlo.copies import LOAD, LOADED, STORE, STORED, text

from zerojax.hlo.transfers import host_copies


def test_a_load_and_a_store() -> None:
    load, store = host_copies(text(LOAD, STORE, LOADED, STORED))
    assert (load.name, load.end, load.computation) == ("load", "loaded", "main")
    assert (load.inward, load.bytes, load.times) == (True, 32, 1)
    assert (store.inward, store.bytes) == (False, 32)  # what is written, not what into


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
