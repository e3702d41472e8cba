"""Work by origin, counted in a small text."""

import pytest

from zerojax.devices.rates import rates
from zerojax.hlo.origins import by_origin
from zerojax.hlo.program import parse

TEXT = """\
HloModule m, is_scheduled=true, num_partitions=8

%product (a: bf16[64,128], b: bf16[128,32]) -> bf16[64,32] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,32]{1,0} parameter(1)
  %dot = bf16[64,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/jvp(g)/fc/dot_general"}
  ROOT %t = bf16[64,32]{1,0} tanh(%dot), metadata={op_name="jit(f)/jvp(g)/act/tanh"}
}

%body (t: (s32[], bf16[64,128], bf16[128,32])) -> (s32[], bf16[64,128], bf16[128,32]) {
  %t = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %l = bf16[64,128]{1,0} get-tuple-element(%t), index=1
  %r = bf16[128,32]{1,0} get-tuple-element(%t), index=2
  %p = bf16[64,32]{1,0} fusion(%l, %r), kind=kCustom, calls=%product, \
metadata={op_name="jit(f)/jvp(g)/act/tanh"}
  ROOT %out = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) tuple(%n, %l, %r)
}

%cond (t: (s32[], bf16[64,128], bf16[128,32])) -> pred[] {
  %t2 = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (s: (s32[], bf16[64,128], bf16[128,32]), v: f32[1000]) -> f32[1000] {
  %s = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) parameter(0)
  %v = f32[1000]{0} parameter(1)
  %w = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) while(%s), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %ar = f32[1000]{0} all-reduce(%v), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add, \
metadata={op_name="jit(f)/psum"}
  ROOT %neg = f32[1000]{0} negate(%ar), metadata={op_name="jit(f)/neg"}
}
"""
FC, FLOPS = "jit(f)/jvp(g)/fc/dot_general", 3 * 2 * 64 * 128 * 32


def test_a_loop_counts_as_often_as_it_runs_and_collectives_do_not():
    work = by_origin(parse(TEXT), None)
    assert list(work) == [FC]
    assert (work[FC].flops, work[FC].forward, work[FC].seconds) == (FLOPS, FLOPS, 0)


def test_a_fusion_takes_the_name_of_its_product():
    h100 = rates("h100")
    work = by_origin(parse(TEXT), h100)
    assert set(work) == {FC, "jit(f)/neg"}
    moved = 2 * (64 * 128 + 128 * 32 + 64 * 32)
    one = h100.compute_seconds({"bf16": FLOPS // 3}, moved)
    assert work[FC].seconds == pytest.approx(3 * one)
