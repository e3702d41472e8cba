"""Work and time counted in small texts."""

import pytest

from zerojax.devices.rates import FusedAttention, Sent, rates
from zerojax.hlo.program import parse
from zerojax.hlo.timeline import program_time
from zerojax.hlo.traffic import collectives
from zerojax.hlo.transfers import host_copies
from zerojax.hlo.work import products, work_of

NODE = (0,) * 8
HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n"
FUSED = """\
%product (a: bf16[64,128], b: bf16[128,32]) -> bf16[64,32] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,32]{1,0} parameter(1)
  ROOT %dot = bf16[64,32]{1,0} dot(%a, %b), ATTRIBUTES
}

%slice (s: f32[8,1000], i: s32[]) -> f32[1,1000] {
  %s = f32[8,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %taken = f32[1,1000]{1,0} dynamic-slice(%s, %i), dynamic_slice_sizes={1,1000}
}

%write (w: f32[8,1000], u: f32[1,1000], j: s32[]) -> f32[1000,8] {
  %w = f32[8,1000]{0,1} parameter(0)
  %turned = f32[1000,8]{1,0} bitcast(%w)
  %u = f32[1,1000]{1,0} parameter(1)
  %column = f32[1000,1]{1,0} bitcast(%u)
  %j = s32[] parameter(2)
  ROOT %written = f32[1000,8]{1,0} dynamic-update-slice(%turned, %column, %j, %j)
}

%body (t: (s32[], bf16[64,128], bf16[128,32])) -> (s32[], bf16[64,128], bf16[128,32]) {
  %t = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %l = bf16[64,128]{1,0} get-tuple-element(%t), index=1
  %r = bf16[128,32]{1,0} get-tuple-element(%t), index=2
  %p = bf16[64,32]{1,0} fusion(%l, %r), kind=kCustom, calls=%product
  ROOT %out = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) tuple(%n, %l, %r)
}

%cond (t: (s32[], bf16[64,128], bf16[128,32])) -> pred[] {
  %t2 = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}
""".replace(
    "ATTRIBUTES",
    "lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
    'metadata={op_name="jit(f)/jvp(g)/dot_general"}',
)
PRODUCT = "%p1 = bf16[64,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%product"
SLICED = "%taken1 = f32[1,1000]{1,0} fusion(%stack, %i), kind=kLoop, calls=%slice"
TURNED = "%turned1 = f32[1000,8]{1,0} fusion(%stack, %taken1, %i), kind=kLoop, calls=%write"
LIBRARY = (
    '%gemm = (bf16[64,32]{1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$'
    'gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{'
    '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)
START = (
    "%ag = (f32[1000]{0}, f32[8000]{0}) all-gather-start(%v), replica_groups={{0,1,2,3,4,5,6,7}}, "
    "dimensions={0}"
)
DONE = "%agd = f32[8000]{0} all-gather-done(%ag)"


def program(*lines: str) -> str:
    entry = [
        "%x = bf16[64,128]{1,0} parameter(0)",
        "%y = bf16[128,32]{1,0} parameter(1)",
        "%stack = f32[8,1000]{1,0} parameter(2)",
        "%i = s32[] parameter(3)",
        "%v = f32[1000]{0} parameter(4)",
        *lines,
        "ROOT %end = s32[] copy(%i)",
    ]
    body = "\n".join(f"  {line}" for line in entry)
    return f"{HEAD}\n{FUSED}\nENTRY %main (x: bf16[64,128]) -> s32[] {{\n{body}\n}}\n"


@pytest.mark.parametrize("line", [PRODUCT, LIBRARY])
def test_a_product_counts_two_for_each_multiplication(line: str) -> None:
    parsed = parse(program(line))
    work = work_of(parsed, parsed.entry, parsed.entry.instructions[5])
    assert work.flops == {"bf16": 2 * 64 * 32 * 128}


def test_the_forward_pass_is_told_by_its_name() -> None:
    parsed = parse(program(PRODUCT))
    assert work_of(parsed, parsed.entry, parsed.entry["p1"]).forward == 2 * 64 * 32 * 128
    again = parse(program(PRODUCT).replace("jvp(g)", "transpose(jvp(g))/rematted_computation"))
    assert work_of(again, again.entry, again.entry["p1"]).forward == 0


def test_a_fusion_reads_what_it_slices_and_no_more() -> None:
    parsed = parse(program(SLICED, PRODUCT))
    assert work_of(parsed, parsed.entry, parsed.entry["taken1"]).bytes == 2 * 4000 + 4
    assert work_of(parsed, parsed.entry, parsed.entry["p1"]).bytes == 2 * (
        64 * 128 + 128 * 32 + 64 * 32
    )


def test_a_fusion_that_writes_in_place_does_not_read_what_it_keeps() -> None:
    parsed = parse(program(SLICED, TURNED))
    assert work_of(parsed, parsed.entry, parsed.entry["turned1"]).bytes == 2 * 4000 + 4


def seconds(*lines: str) -> float:
    text = program(*lines)
    return program_time(
        parse(text), collectives(text), host_copies(text), rates("h100"), NODE
    ).seconds


def test_a_loop_takes_its_body_as_often_as_it_runs() -> None:
    carried = "%c0 = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) tuple(%i, %x, %y)"
    loop = (
        "%w = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) while(%c0), condition=%cond, "
        'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    )
    once = seconds(PRODUCT) - seconds()
    assert seconds(carried, loop) - seconds() == pytest.approx(12 * once)


def test_a_collective_is_hidden_by_what_runs_before_its_done() -> None:
    many = [PRODUCT.replace("%p1", f"%q{n}") for n in range(20)]
    waited = seconds(START, DONE)
    beside = seconds(START, *many, DONE)
    alone = seconds(*many)
    assert alone <= beside < alone + waited - seconds()
    text = program(START, *many, DONE)
    spent = program_time(parse(text), collectives(text), host_copies(text), rates("h100"), NODE)
    assert spent.under_way["main", "ag"] == pytest.approx(
        rates("h100").collective_seconds(Sent(7 / 8 * 8000 * 4, 0, 7, 0, 8), "all-gather")
    )


def test_reduce_scatters_reach_less_of_nvlink() -> None:
    """285 and 369 GB/s of 450, as measured on 8 H100s; on PCIe all kinds reach one share."""
    sent = Sent(2**30, 0, 7, 0, 8)
    for kind, ratio in (("h100", 285 / 369), ("l4", 1.0)):
        scatter, reduced = (
            rates(kind).collective_seconds(sent, each) for each in ("reduce-scatter", "all-reduce")
        )
        assert reduced / scatter == pytest.approx(ratio, rel=0.02)


def test_a_loop_without_a_note_counts_up_to_its_condition() -> None:
    carried = "%c0 = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) tuple(%i, %x, %y)"
    loop = (
        "%w = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) while(%c0), condition=%until, "
        "body=%body"
    )
    until = """\
%until (t: (s32[], bf16[64,128], bf16[128,32])) -> pred[] {
  %t3 = (s32[], bf16[64,128]{1,0}, bf16[128,32]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%t3), index=0
  %most = s32[] constant(7)
  ROOT %less = pred[] compare(%at, %most), direction=LT
}

"""
    parsed = parse(program(carried, loop).replace("ENTRY", until + "ENTRY"))
    assert parsed.trips(parsed.entry["w"]) == 7
    other = parse(program(carried, loop).replace("ENTRY", until.replace("LT", "GE") + "ENTRY"))
    assert other.trips(other.entry["w"]) is None


@pytest.mark.parametrize(
    ("window", "labels", "summed"),
    [
        ("{size=1}", "0bf_oi0->0bf", 128),
        ("{size=4}", "0fb_0io->bf0", 4),
        ("{size=4x8 stride=3x7 lhs_dilate=4x8}", "01bf_01io->01bf", 64),
    ],
)
def test_products_written_as_convolutions(window: str, labels: str, summed: int) -> None:
    shapes = {"0bf_oi0->0bf": "32,128,1", "0fb_0io->bf0": "4,1,32", "01bf_01io->01bf": "4,8,64,32"}
    kernel = f"%k = bf16[{shapes[labels]}]{{0}} broadcast(%y)"
    line = f"%p1 = bf16[1,64,32]{{0}} convolution(%x, %k), window={window}, dim_labels={labels}"
    parsed = parse(program(kernel, line))
    assert work_of(parsed, parsed.entry, parsed.entry["p1"]).flops == {"bf16": 2 * 64 * 32 * summed}


@pytest.mark.parametrize(
    ("target", "operands", "made"),
    [
        ("Forward", "%image, %kernel", "8,14,14,64"),
        ("BackwardInput", "%out, %kernel", "8,16,16,32"),
        ("BackwardFilter", "%image, %out", "64,3,3,32"),
    ],
)
def test_cudnns_convolutions(target: str, operands: str, made: str) -> None:
    arrays = (
        "%image = f32[8,16,16,32]{0} broadcast(%v)",
        "%kernel = f32[64,3,3,32]{0} broadcast(%v)",
        "%out = f32[8,14,14,64]{0} broadcast(%v)",
    )
    line = (
        f"%c1 = (f32[{made}]{{0}}, u8[99]{{0}}) custom-call({operands}), window={{size=3x3}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"'
    )
    parsed = parse(program(*arrays, line))
    work = work_of(parsed, parsed.entry, parsed.entry["c1"])
    assert work.flops == {"f32": 2 * 8 * 14 * 14 * 64 * 3 * 3 * 32}


@pytest.mark.parametrize(
    ("target", "products"), [("Softmax", 2), ("ScaleBiasSoftmaxDropoutBackward", 5)]
)
def test_cudnns_attention(target: str, products: int) -> None:
    """64 queries and 32 keys of 16 numbers, 2 rows of 4 heads."""
    scores = (
        '{"cudnn_fmha_backend_config":{"fmha_scale":0.25,"intermediate_tensor_shape":{'
        '"element_type":"BF16","dimensions":["2","4","64","32"],"tuple_shapes":[]}}}'
    )
    line = (
        "%a = (bf16[2,4,64,16]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), "
        f'custom_call_target="__cudnn$fmha{target}", backend_config={scores}'
    )
    parsed = parse(
        program(
            "%q = bf16[2,64,4,16]{3,2,1,0} constant(0)",
            "%k = bf16[2,32,4,16]{3,2,1,0} constant(0)",
            line,
        )
    )
    work = work_of(parsed, parsed.entry, parsed.entry["a"])
    assert not work.flops
    kind = FusedAttention("bf16", 16, target.endswith("Backward"))
    assert work.attention == {kind: products * 2 * 2 * 4 * 64 * 32 * 16}


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (
            'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
            '{"intermediate_tensor_shape":{"dimensions":["1","4","1024","1024"]},'
            '"mask_type":"CAUSAL"}}',
            "cudnn",
        ),
        (
            'custom_call_target="mosaic_gpu_v2", '
            'metadata={op_name="jit(s)/jvp(f)/fused_attention_causal/mpmd_map"}',
            "mosaic",
        ),
    ],
)
def test_a_causal_kernel_skips_the_tiles_behind_the_mask(call: str, kernel: str) -> None:
    """1024 queries and keys, tiles of 128 queries: (1024 + 128) / (2 * 1024) of the scores run."""
    line = f"%a = (bf16[1,1024,4,64], f32[1,4,1024]) custom-call(%q, %q, %q), {call}"
    parsed = parse(program("%q = bf16[1,1024,4,64]{3,2,1,0} constant(0)", line))
    scores = 2 * 2 * 4 * 1024 * 1024 * 64
    attention = work_of(parsed, parsed.entry, parsed.entry["a"]).attention
    assert attention == {FusedAttention("bf16", 64, False): scores * 9 // 16}
    (counted,) = products(parsed, parsed.entry, parsed.entry["a"])
    assert counted.flops == scores


@pytest.mark.parametrize(
    ("kernel", "results", "products"),
    [
        ("fwd_residuals", "bf16[2,8,1024,64], f32[2,8,1024,128]", 2),
        (
            "dkv_no_residuals",
            "f32[2,512,64], bf16[2,2,8,1024,64], bf16[2,4,1024,64], bf16[2,4,1024,64]",
            5,
        ),
    ],
)
def test_splash_attention_on_tpus(kernel: str, results: str, products: int) -> None:
    """Its place in Python stands two lines below it."""
    call = (
        f"%a = ({results}) custom-call(%blocks, %q, %k, %k, %positions), "
        'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        '"xprof_metadata":"{}"\n}}, '
        f'metadata={{op_name="jit(s)/jvp(f)/splash_mha_{kernel}/pallas_call"}}'
    )
    arrays = (
        "%blocks = s8[1,2,2]{2,1,0} constant(0)",
        "%q = bf16[2,8,1024,64]{3,2,1,0} constant(0)",
        "%k = bf16[2,4,1024,64]{3,2,1,0} constant(0)",
        "%positions = s32[1024,128]{1,0} iota()",
    )
    parsed = parse(program(*arrays, call))
    work = work_of(parsed, parsed.entry, parsed.entry["a"])
    scores = products * 2 * 2 * 8 * 1024 * 1024 * 64
    assert work.attention == {FusedAttention("bf16", 64, products > 2): scores * 9 // 16}
    assert work.forward == scores


COPIED = (
    "%h = f32[8,1000000]{1,0:S(5)} constant(0)",
    "%in = (f32[8,1000000]{1,0}, f32[8,1000000]{1,0:S(5)}, u32[]) copy-start(%h)",
    "%arrived = f32[8,1000000]{1,0} copy-done(%in)",
    "%out = (f32[8,1000000]{1,0:S(5)}, f32[8,1000000]{1,0}, u32[]) copy-start(%d)",
    "%gone = f32[8,1000000]{1,0:S(5)} copy-done(%out)",
)


@pytest.mark.parametrize("graphs", [True, False])
def test_copies_hide_only_where_no_graphs_are_recorded(graphs: bool) -> None:
    host, start, done, back, gone = COPIED
    products = [PRODUCT.replace("%p1", f"%q{n}") for n in range(20)]
    device = "%d = f32[8,1000000]{1,0} constant(0)"
    text = program(host, device, start, back, *products, done, gone)
    spent = program_time(
        parse(text), collectives(text), host_copies(text), rates("h100"), NODE,
        records_graphs=graphs,
    )  # fmt: skip
    one = rates("h100").host_seconds(32e6)
    computing = 20 * rates("h100").compute_seconds({}, 0)
    if graphs:
        assert spent.seconds > 2 * one + computing
    else:
        assert one <= spent.seconds < 1.1 * one
