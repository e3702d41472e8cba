"""Reading HLO text: shapes, tuples, comments, layouts and called computations."""

import jax
import jax.numpy as jnp
import pytest

from zerojax.hlo.program import Shape, parse, shapes

PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "train.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main.3 (x: f32[4], y: (bf16[2,3], s32[])) -> (f32[], bf16[2,3]) {
  %y = (bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s32[]) parameter(1)
  %x = f32[4]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %zero = f32[] constant(0)
  %part = bf16[2,3]{1,0} get-tuple-element(%y), index=0
  %total = f32[] reduce(%x, %zero), dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/sum"}
  ROOT %out = (f32[], bf16[2,3]{1,0}) tuple(%total, /*index=1*/%part)
}
"""


def test_instructions_in_order() -> None:
    program = parse(PROGRAM)
    assert program.devices == 8
    assert program.entry.name == "main.3"
    assert [each.name for each in program.entry.instructions] == [
        "y", "x", "zero", "part", "total", "out",
    ]  # fmt: skip
    assert program.entry.root.operands == ("total", "part")
    assert program.entry["y"].shapes == (Shape("bf16", (2, 3)), Shape("s32", ()))
    assert program.entry["part"].index == 0
    assert program.entry["total"].op_name == "jit(f)/sum"
    assert program.entry["total"].called == ()  # what it reduces with is not a program of its own
    assert [each.name for each in program.entry.users["x"]] == ["total"]
    assert program.entry.parameter(1) is program.entry["y"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[3,4]{1,0}", 48),
        ("bf16[]", 2),
        ("s4[3]", 2),
        ("f8e4m3fn[16]", 16),
        ("token[]", 0),
    ],
)
def test_bytes(text: str, size: int) -> None:
    (shape,) = shapes(text)
    assert shape.bytes == size


def test_a_real_program_of_this_machine() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=300)[0]

    program = parse(jax.jit(loop).lower(jnp.ones((4, 4))).compile().as_text())
    runs = [*program.walk()]
    (loop_run,) = (run for run in runs if run.instruction.opcode == "while")
    assert loop_run.instruction.trip_count == 300
    (body,) = program.callees(loop_run.instruction)
    inside = [run for run in runs if run.computation == body]
    assert [run.instruction for run in inside] == [*body.instructions]
    assert {run.times for run in inside} == {300}
    at = runs.index(loop_run) + 1
    assert runs[at : at + len(inside)] == inside
