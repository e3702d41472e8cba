"""The schedule that XLA:GPU compiles: gathers and reduce-scatters run beside a layer's products,
and are not waited for. Without ``overlap_comm`` they are, so that the tests see when XLA stops to
overlap."""

import functools
from typing import Any, NamedTuple

import jax
import pytest
from collectives import large_layers

import zerojax
from zerojax.hlo.program import Computation, HloProgram, Instruction, parse
from zerojax.hlo.traffic import collectives
from zerojax.xla import compat
from zerojax.xla.compiler import REMATERIALIZATION

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

WIDTH, LAYERS, ROWS = 1024, 8, 2048  # of a device
LAYER = 2 * 8 * WIDTH**2  # bytes of its matrices in bf16


class Span(NamedTuple):
    """A collective, and the matrix products between its start and its done.

    Attributes:
      kind: "all-gather" or "reduce-scatter".
      loop: The name of the loop's body, or of the program.
      times: Its runs in a step.
      bytes: Of what it moves, whole.
      products: Between start and done; none if XLA runs the collective as a blocking operation.
      of: In the whole body.
    """

    kind: str
    loop: str
    times: int
    bytes: int
    products: int
    of: int


def zero_of(**keywords: Any) -> zerojax.Zero:
    return zerojax.zero(stage=3, bf16=True, mesh=zerojax.topology("h100", 8), **keywords)


def lowered(zero: zerojax.Zero, *, scan: bool = True) -> jax.stages.Lowered:
    return large_layers.lowered(zero, WIDTH, LAYERS, 8 * ROWS, scan=scan)


@functools.cache
def compiled(overlap: bool | None = None) -> Any:
    return lowered(zero_of(overlap_comm=overlap)).compile()


def spans(text: str) -> list[Span]:
    """The collectives of a layer's matrices."""
    program, found = parse(text), []
    for each in collectives(text):
        body = program.computations[each.computation]
        if each.payload_bytes < LAYER // 8:
            continue
        start = body.position[each.name]
        done = max(body.position[user.name] for user in body.users[each.name])
        at = [i for i, one in enumerate(body.instructions) if multiplies(program, one)]
        own = body.instructions[start]
        waits = own.opcode == own.operation or '"is_sync":true' in own.attributes
        between = 0 if waits else sum(start < i < done for i in at)
        moved = each.times, each.payload_bytes
        found.append(Span(each.kind, each.computation, *moved, between, len(at)))
    return found


def of_kind(kind: str, overlap: bool | None = None) -> list[Span]:
    """Those in loops."""
    text = compiled(overlap).as_text()
    return [span for span in spans(text) if span.kind == kind and span.times > 1]


def multiplies(program: HloProgram, each: Instruction) -> bool:
    inside: tuple[Computation, ...] = tuple(program.callees(each))
    return (
        each.opcode == "dot"
        or (each.opcode == "custom-call" and "gemm" in each.attributes)
        or any(i.opcode == "dot" for body in inside for i in body.instructions)
    )


def test_the_next_layer_is_gathered_beside_this_ones_products() -> None:
    found = of_kind("all-gather")
    assert len({span.loop for span in found}) == 2  # forward and backward
    for loop in {span.loop for span in found}:
        inside = [span for span in found if span.loop == loop]
        assert sum(span.bytes for span in inside) == pytest.approx(2 * LAYER, rel=0.01)
        assert all(span.products >= 1 for span in inside), inside


def test_a_layers_gradients_are_reduced_beside_the_next_ones_products() -> None:
    found = of_kind("reduce-scatter")
    assert len({span.loop for span in found}) == 1
    assert sum(span.bytes for span in found) == pytest.approx(2 * LAYER, rel=0.01)
    assert all(span.products >= 1 for span in found), found


def test_the_same_test_fails_without() -> None:
    assert any(span.products == 0 for span in of_kind("all-gather", overlap=False))


def test_it_costs_layers_of_memory_and_no_traffic() -> None:
    """Parameters of the next layer, gradients of the last, both twice in the unrolled loop."""
    more = [each.memory_analysis().temp_size_in_bytes for each in (compiled(), compiled(False))]
    assert more[0] - more[1] < 4 * LAYER
    sent = [
        sum(each.times * each.payload_bytes for each in collectives(program.as_text()))
        for program in (compiled(), compiled(False))
    ]
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_a_loop_that_gathers_ahead_or_reduces_later_has_its_options() -> None:
    def has_loop(live: int = 0, overlap: bool | None = None, *, scan: bool = True) -> bool:
        zero = zero_of(stage3_max_live_parameters=live, overlap_comm=overlap)
        chosen = compat.compiler_options(lowered(zero, scan=scan))
        return REMATERIALIZATION in str(chosen.get("xla_disable_hlo_passes"))

    assert has_loop()
    assert not has_loop(scan=False)
    assert has_loop(live=10**9)  # its gradients
    assert not has_loop(overlap=False)


# Matrices so large that XLA combines no two of them, and larger than the window of gathers ahead.
@pytest.mark.parametrize(("width", "least"), [(4 * WIDTH, 0.95), (8 * WIDTH, 0.85)])
def test_an_unrolled_model_waits_for_the_first_gathers_of_a_pass_only(
    width: int, least: float
) -> None:
    """8 layers, each gathered twice."""
    program: Any = large_layers.lowered(zero_of(), width, LAYERS, 8 * ROWS).compile()
    found = spans(program.as_text())
    gathers = [span for span in found if span.kind == "all-gather"]
    beside = sum(span.bytes for span in gathers if span.products)
    assert beside / sum(span.bytes for span in gathers) > least
