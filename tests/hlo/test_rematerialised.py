"""What XLA computes again by itself, read off a compiled text."""

from zerojax.devices.rates import rates
from zerojax.hlo.program import parse
from zerojax.hlo.rematerialised import computed_again
from zerojax.hlo.timeline import program_time

TEXT = """
HloModule jit_step

%fused.remat_helper (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %tanh.1 = f32[4] tanh(%p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %wide.2 = f32[4] add(%x, %x), metadata={op_name="jit(step)/rematted_computation/add"}
  %wide.2.remat = f32[4] add(%x, %x)
  %wide.2.remat2.1 = f32[4] add(%x, %wide.2.remat)
  %bitcast.remat.1 = f32[2,2] bitcast(%wide.2.remat2.1)
  ROOT %fusion.3.remat3 = f32[4] fusion(%wide.2.remat2.1), kind=kLoop, calls=%fused.remat_helper
}
"""


def test_names_tell_what_is_computed_again() -> None:
    assert computed_again(parse(TEXT)) == 3


def test_its_time_is_a_part_of_the_step() -> None:
    """Three of four instructions, of 16 bytes each; a fusion reads 16 and writes 16."""
    spent = program_time(parse(TEXT), [], [], rates("h100"), (0,))
    assert spent.bytes_again == 3 * 16
    assert 0.5 * spent.seconds < spent.again < spent.seconds
