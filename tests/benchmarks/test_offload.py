"""What offload takes of the device, asserted on the very figures that the benchmark prints."""

import functools

import pytest

from benchmarks.offload import Results, quick, run
from benchmarks.offload_programs import Costs, OffloadCase
from benchmarks.offload_tables import overlap, parts

BOTH = quick().sizes[0][1]


@functools.cache
def compiled() -> tuple[Results, dict[OffloadCase, Costs]]:
    known: dict[OffloadCase, Costs] = {}
    return run(quick(), known=known), known


def both() -> Costs:
    return compiled()[1][BOTH]


@pytest.mark.sweep
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestCompiled:
    def test_all_sections_are_there_and_no_limit_is_missed(self) -> None:
        found = compiled()[0]
        assert list(found.tables) == ["sizes", "optimizer", "overlap", "largest"]
        assert len(found.limits) == 3
        assert not found.missed()

    def test_device_holds_next_to_nothing_between_programs(self) -> None:
        found = both()
        assert found.state_bytes < 1000
        assert found.between_bytes < 0.01 * 4 * found.parameters
        assert found.host_bytes == pytest.approx(16 * found.parameters, rel=0.01)

    def test_updates_hold_three_halves_of_a_sub_group(self) -> None:
        """A third more than the state: gradients and compute parameters stream, too."""
        found = both()
        assert 1 < found.sub_groups < 1.5 * 16 / 12 * 1.05

    def test_loads_span_computation_in_the_forward_and_the_backward_loop(self) -> None:
        loops = parts(both())
        for name in ("gradients, forward loop", "gradients, backward loop"):
            inward = overlap(loops[name], inward=True)
            assert inward.bytes > 0
            assert inward.products == inward.compute == 1, name
            assert inward.fewest > 1

    def test_gradients_leave_in_the_backward_loop_while_it_computes(self) -> None:
        outward = overlap(parts(both())["gradients, backward loop"], inward=False)
        assert outward.bytes > 0
        assert outward.products == 1

    def test_no_load_of_an_update_is_waited_for_alone(self) -> None:
        """Each is under way over the update or over a copy the other way."""
        moving = [u.copies for u in both().updates if any(not c.inward for c in u.copies)]
        loads = [c for copies in moving for c in copies if c.inward]
        assert loads
        for copies in moving:
            for load in (c for c in copies if c.inward):
                others = (c for c in copies if not c.inward)
                assert load.spans or any(load.beside(other) for other in others)
