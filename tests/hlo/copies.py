"""Small texts of compiled programs that copy between device and host memory."""

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
