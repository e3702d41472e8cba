"""Counting collectives, on small texts."""

import pytest

from zerojax.hlo.groups import Groups
from zerojax.hlo.traffic import collectives

ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(*body: str, before: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    head = "HloModule m, is_scheduled=true, num_partitions=8"
    return f"{head}\n{ADD}\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{lines}\n}}\n"


EIGHT = (tuple(range(8)),)
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", HALVES),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", EIGHT),
        ("replica_groups=[1,8]<=[8]", EIGHT),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", EIGHT),
        ("replica_groups=mesh['data'=4,'model'=2] {'model'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", HALVES),
        ("replica_groups=mesh['a:(1)2'=2,'a:(2)4'=4] {'a:(2)4'}", HALVES),
        ("replica_groups=mesh['a'=8] {'a':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", HALVES),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(4,5,6,7,0,1,2,3) {'b'}", HALVES[::-1]),
        ("replica_groups={}", EIGHT),
    ],
)
def test_groups(written: str, groups: Groups) -> None:
    (found,) = collectives(program(f"ROOT %r = f32[4] all-reduce(%p), {written}, to_apply=%add"))
    assert found.groups == groups
    assert found.group_size == len(groups[0])


@pytest.mark.parametrize(
    ("line", "payload", "moved"),
    [
        ("all-gather(%p), dimensions={0}", 64, 56),
        ("reduce-scatter(%p), to_apply=%add, dimensions={0}", 8 * 64, 7 * 64),
        ("all-reduce(%p), to_apply=%add", 64, 112),
        ("all-to-all(%p), dimensions={0}", 64, 56),
    ],
)
def test_ring_bytes(line: str, payload: int, moved: int) -> None:
    call, attributes = line.split("), ")
    (found,) = collectives(
        program(f"ROOT %r = f32[16]{{0}} {call}), replica_groups=[1,8]<=[8], {attributes}")
    )
    assert (found.payload_bytes, found.moved_bytes) == (payload, moved)


def test_permute_and_group_of_one() -> None:
    permute, alone = collectives(
        program(
            "%s = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
            "ROOT %r = f32[16]{0} all-gather(%s), replica_groups=[8,1]<=[8], dimensions={0}",
        )
    )
    assert (permute.group_size, permute.moved_bytes) == (2, 64)
    assert (alone.group_size, alone.moved_bytes) == (1, 0)


def test_start_and_done_are_one_and_combined_ones_add_up() -> None:
    text = program(
        "%s = ((bf16[2,8], f32[1]), (bf16[16,8], f32[8])) all-gather-start(%p, %q), "
        'replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(step)/(a:b)"}',
        "%d = (bf16[16,8], f32[8]) all-gather-done(%s)",
        "%t = ((f32[16]), f32[2]) reduce-scatter-start(%p), replica_groups=[1,8]<=[8], "
        "dimensions={0}, to_apply=%add",
        "%u = f32[2] reduce-scatter-done(%t)",
        "%v = f32[4] all-reduce-start(%p), replica_groups=[1,8]<=[8], to_apply=%add",
        "ROOT %w = f32[4] all-reduce-done(%v)",
    )
    gather, scatter, reduce = collectives(text)
    assert gather.kind == "all-gather"
    assert gather.dtypes == ("bf16", "f32")
    assert gather.bytes_by_dtype == {"bf16": 256, "f32": 32}
    assert (gather.name, gather.op_name) == ("s", "jit(step)/(a:b)")
    assert (scatter.kind, scatter.payload_bytes, scatter.moved_bytes) == ("reduce-scatter", 64, 56)
    assert (reduce.kind, reduce.payload_bytes, reduce.moved_bytes) == ("all-reduce", 16, 28)


def test_inside_an_asynchronous_computation() -> None:
    wrapped = """\
%wrapped (q: f32[16]) -> f32[2] {
  %q = f32[16] parameter(0)
  ROOT %rs = f32[2] reduce-scatter(%q), replica_groups={}, dimensions={0}, to_apply=%add
}
"""
    (found,) = collectives(
        program(
            "%s = ((f32[16]), f32[2], u32[]) async-start(%p), calls=%wrapped",
            "ROOT %d = f32[2] async-done(%s)",
            before=wrapped,
        )
    )
    assert (found.name, found.computation, found.payload_bytes) == ("rs", "wrapped", 64)


def loop(name: str, inside: str, trips: str) -> str:
    return f"""\
%{name}_until (c: (s32[], f32[16])) -> pred[] {{
  %c = (s32[], f32[16]) parameter(0)
  ROOT %go = pred[] constant(true)
}}
%{name}_body (c: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %c = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[16] get-tuple-element(%c), index=1
{inside}
  ROOT %out = (s32[], f32[16]) tuple(%i, %x)
}}
%{name}_caller (c: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %c = (s32[], f32[16]) parameter(0)
  ROOT %w = (s32[], f32[16]) while(%c), condition=%{name}_until, body=%{name}_body{trips}
}}
"""


GATHER = "  %g = f32[16] all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}"


@pytest.mark.parametrize(
    ("outer", "times"), [(', backend_config={"known_trip_count":{"n":"5"}}', 15), ("", 3)]
)
def test_nested_loops_multiply(outer: str, times: int) -> None:
    inner = loop("inner", GATHER, ', backend_config={"known_trip_count":{"n":"3"}}')
    call = "  %n = (s32[], f32[16]) call(%c), to_apply=%inner_caller"
    text = program(
        "ROOT %r = (s32[], f32[16]) call(%p), to_apply=%outer_caller",
        before=inner + loop("outer", call, outer),
    )
    (found,) = collectives(text)
    assert (found.times, found.moved_bytes) == (times, times * 56)
