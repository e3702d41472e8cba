"""Lifetimes of gathered arrays, on small texts and on programs compiled for eight H100s."""

import pytest
from hlo.mlp import DIM, LAYERS, compile_mlp

from benchmarks.lifetimes import gather_lifetimes, peak_gathered_bytes

WHOLE = 2 * DIM * DIM  # one gathered layer in bf16

UNROLLED = """\
HloModule m, is_scheduled=true, num_partitions=8
%widen (h: bf16[64]) -> f32[64] {
  %h = bf16[64] parameter(0)
  ROOT %c = f32[64] convert(%h)
}
%wave (s: f32[64]) -> f32[64] {
  %s = f32[64] parameter(0)
  ROOT %t = f32[64] sine(%s)
}
ENTRY %main (p: bf16[8], q: bf16[8]) -> f32[64] {
  %p = bf16[8] parameter(0)
  %q = bf16[8] parameter(1)
  %s = ((bf16[8], bf16[8]), (bf16[64], bf16[64])) all-gather-start(%p, %q), replica_groups={}
  %d = (bf16[64], bf16[64]) all-gather-done(%s)
  %a = bf16[64] get-tuple-element(%d), index=0
  %b = bf16[64] get-tuple-element(%d), index=1
  %v = bf16[8,8] bitcast(%a)
  %f = f32[8] custom-call(%v), metadata={op_name="jit(step)/jvp(GPT)/dot"}
  %x = f32[64] fusion(%b), kind=kLoop, calls=%widen, metadata={op_name="jit(step)/jvp(GPT)/cast"}
  %y = f32[64] fusion(%x), kind=kLoop, calls=%wave, metadata={op_name="jit(step)/jvp(GPT)/sin"}
  %z = f32[64] fusion(%x), kind=kLoop, calls=%wave, metadata={op_name="jit(f)/transpose(jvp())/sin"}
  %w = bf16[64] all-gather(%y), replica_groups=[1,8]<=[8]
  ROOT %o = f32[64] custom-call(%f, %y, %z, %w)
}
"""


def test_spans_and_forms() -> None:
    a, b, w = gather_lifetimes(UNROLLED)
    assert (a.name, a.issued, a.done, a.last) == ("s", 2, 3, 7)
    assert (a.forward, a.backward, a.crosses) == (True, False, False)
    assert a.of_parameter
    assert b.of_parameter
    # The second lives on as its fp32 copy: 128 bytes to position 8, then 256 to position 10.
    assert b.crosses
    assert [(each.shape.bytes, each.first, each.last) for each in b.spans] == [
        (128, 2, 8), (256, 8, 10),
    ]  # fmt: skip
    assert [b.live_bytes(at) for at in (1, 2, 8, 9, 11)] == [0, 128, 384, 256, 0]
    assert not w.of_parameter  # an activation


def test_peak() -> None:
    assert peak_gathered_bytes(UNROLLED) == 384  # both forms of b, while one makes the other


SEVERAL_RESULTS = """\
HloModule m, is_scheduled=true, num_partitions=8
%fused (s: bf16[8], g: f32[64], u: pred[]) -> (f32[64], bf16[8], bf16[64]) {
  %s = bf16[8] parameter(0)
  %g = f32[64] parameter(1)
  %u = pred[] parameter(2)
  %zero = bf16[] constant(0)
  %zeros = bf16[8] broadcast(%zero), dimensions={}
  %never = pred[8] broadcast(%u), dimensions={}
  %held = bf16[8] select(%never, %zeros, %s)
  %sine = f32[64] sine(%g)
  %narrow = bf16[64] convert(%g)
  ROOT %all = (f32[64], bf16[8], bf16[64]) tuple(%sine, %held, %narrow)
}
ENTRY %main (p: bf16[8], q: f32[8], u: pred[]) -> bf16[64] {
  %p = bf16[8] parameter(0)
  %q = f32[8] parameter(1)
  %u = pred[] parameter(2)
  %g = f32[64] all-gather(%q), replica_groups={}, dimensions={0}
  %f = (f32[64], bf16[8], bf16[64]) fusion(%p, %g, %u), kind=kLoop, calls=%fused
  %a = f32[64] get-tuple-element(%f), index=0
  %b = bf16[8] get-tuple-element(%f), index=1
  %c = bf16[64] get-tuple-element(%f), index=2
  %h = bf16[64] all-gather(%b), replica_groups={}, dimensions={0}
  %i = f32[64] all-gather(%a), replica_groups={}, dimensions={0}
  ROOT %o = bf16[64] custom-call(%c, %h, %i), metadata={op_name="jit(step)/jvp()/dot"}
}
"""


def test_a_fusion_of_several_results_is_read_one_by_one() -> None:
    wide, held, computed = gather_lifetimes(SEVERAL_RESULTS)
    assert [str(each.shape) for each in wide.spans] == ["f32[64]", "bf16[64]"]
    assert (wide.last, wide.forward) == (10, True)
    assert held.of_parameter  # a choice between it and a constant leaves it what it is
    assert not computed.of_parameter


LOOP = """\
HloModule m, is_scheduled=true, num_partitions=8
%until (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]) parameter(0)
  ROOT %go = pred[] constant(true)
}
%body (c: (s32[], f32[8], f32[64])) -> (s32[], f32[8], f32[64]) {
  %c = (s32[], f32[8], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8] get-tuple-element(%c), index=1
  %k = f32[64] get-tuple-element(%c), index=2
  %g = f32[64] all-gather(%x), replica_groups=[1,8]<=[8]
  %u = f32[] custom-call(%g, %k), metadata={op_name="jit(step)/transpose(jvp())/while/body/dot"}
  ROOT %out = (s32[], f32[8], f32[64]) tuple(%i, %x, %k)
}
ENTRY %main (n: s32[], p: f32[8]) -> f32[64] {
  %n = s32[] parameter(0)
  %p = f32[8] parameter(1)
  %h = f32[64] all-gather(%p), replica_groups=[1,8]<=[8]
  %e = f32[] custom-call(%h), metadata={op_name="jit(step)/jvp()/dot"}
  %t = (s32[], f32[8], f32[64]) tuple(%n, %p, %h)
  %w = (s32[], f32[8], f32[64]) while(%t), condition=%until, body=%body
  %k = f32[64] get-tuple-element(%w), index=2
  ROOT %o = f32[64] custom-call(%k)
}
"""


def test_into_a_loop_and_out_again() -> None:
    outer, inner = gather_lifetimes(LOOP)
    assert (outer.computation, outer.issued, outer.last) == ("main", 2, 7)
    assert outer.crosses  # its backward use stands in the loop's body
    assert (inner.computation, inner.last, inner.crosses) == ("body", 5, False)
    assert inner.of_parameter  # through the loop's tuple to the program's argument
    assert peak_gathered_bytes(LOOP) == 2 * 256


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestCompiledForH100:
    def test_layers_stacked_by_a_scan_cross(self) -> None:
        (layer,) = gather_lifetimes(compile_mlp(scan=True, remat=False))
        assert layer.stacked
        assert layer.crosses

    def test_peak_is_all_layers_unless_they_are_gathered_one_by_one(self) -> None:
        assert peak_gathered_bytes(compile_mlp(scan=False, remat=False)) >= LAYERS * WHOLE
        assert peak_gathered_bytes(compile_mlp(scan=True, remat=True)) < LAYERS * WHOLE
