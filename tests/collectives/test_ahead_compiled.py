"""The schedule that XLA:GPU compiles: gathers and reduce-scatters run beside a layer's products,
and are not waited for. Without ``overlap_comm`` they are, so that the tests see when XLA stops to
overlap."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from collectives import unrolled

import zerojax
from benchmarks.measure import create_state_of, train_step_of
from zerojax.hlo.program import Computation, HloProgram, Instruction, parse
from zerojax.hlo.traffic import collectives
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.xla import compat
from zerojax.xla.compiler import REMATERIALIZATION

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

WIDTH, LAYERS, ROWS, TOKENS, HEADS = 1024, 8, 4, 512, 16
LAYER = 2 * 12 * WIDTH**2  # bytes of its matrices in bf16


DEVICE = pytest.mark.parametrize("device", ["h100", pytest.param("a100", marks=pytest.mark.sweep)])

REDUCED_LATE = pytest.mark.xfail(
    jax.version.__version_info__ >= (0, 12),
    reason="XLA of jax 0.12 starts these reduce-scatters after the products",
    strict=True,
)


class Span(NamedTuple):
    """A collective, and the matrix products between its start and its done.

    Attributes:
      kind: "all-gather" or "reduce-scatter".
      loop: The name of the loop's body, or of the program.
      times: Its runs in a step.
      bytes: Of what it moves, whole.
      products: Between start and done.
      of: In the whole body.
    """

    kind: str
    loop: str
    times: int
    bytes: int
    products: int
    of: int


def zero_of(device: str, **keywords: Any) -> zerojax.Zero:
    mesh = zerojax.topology(device, 8)
    return zerojax.zero(stage=3, bf16=True, mesh=mesh, **keywords)


def lowered(zero: zerojax.Zero, **options: Any) -> jax.stages.Lowered:
    sizes: Any = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "block_size": TOKENS}
    model = GPT(GPTConfig(**sizes | options, vocab_size=1024, remat=True))
    state = zero.abstract_state(create_state_of(model), jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((8 * ROWS, TOKENS + 1), jnp.int32)}
    return zero(train_step_of(model)).lower(state, batch)


@functools.cache
def compiled(device: str, overlap: bool | None, /) -> Any:
    return lowered(zero_of(device, overlap_comm=overlap), scan=True).compile()


def spans(text: str) -> list[Span]:
    """The collectives of a layer's matrices."""
    program, found = parse(text), []
    for each in collectives(text):
        body = program.computations[each.computation]
        if each.payload_bytes < LAYER // 12:
            continue
        start = body.position[each.name]
        done = max(body.position[user.name] for user in body.users[each.name])
        at = [i for i, one in enumerate(body.instructions) if multiplies(program, one)]
        between = sum(start < i < done for i in at)
        moved = each.times, each.payload_bytes
        found.append(Span(each.kind, each.computation, *moved, between, len(at)))
    return found


def of_kind(kind: str, device: str, overlap: bool | None = None) -> list[Span]:
    """Those in loops."""
    text = compiled(device, overlap).as_text()
    return [span for span in spans(text) if span.kind == kind and span.times > 1]


def multiplies(program: HloProgram, each: Instruction) -> bool:
    inside: tuple[Computation, ...] = tuple(program.callees(each))
    return (
        each.opcode == "dot"
        or (each.opcode == "custom-call" and "gemm" in each.attributes)
        or any(i.opcode == "dot" for body in inside for i in body.instructions)
    )


@DEVICE
def test_the_next_layer_is_gathered_beside_this_ones_products(device: str) -> None:
    found = of_kind("all-gather", device)
    assert len({span.loop for span in found}) == 2  # forward and backward
    for loop in {span.loop for span in found}:
        inside = [span for span in found if span.loop == loop]
        assert sum(span.bytes for span in inside) == pytest.approx(2 * LAYER, rel=0.01)
        assert all(span.products >= 1 for span in inside), inside


@REDUCED_LATE
@DEVICE
def test_a_layers_gradients_are_reduced_beside_the_next_ones_products(device: str) -> None:
    found = of_kind("reduce-scatter", device)
    assert len({span.loop for span in found}) == 1
    assert sum(span.bytes for span in found) == pytest.approx(2 * LAYER, rel=0.01)
    assert all(span.products >= 1 for span in found), found


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_the_same_test_fails_without(kind: str) -> None:
    assert any(span.products == 0 for span in of_kind(kind, "h100", overlap=False))


@REDUCED_LATE
def test_only_the_first_gather_and_the_last_reduction_stand_without_products() -> None:
    """Of 8 layers, each gathered twice and reduced once."""
    found = spans(compiled("h100", None).as_text())
    beside = sum(span.times * span.bytes for span in found if span.products)
    assert beside / sum(span.times * span.bytes for span in found) > 1 - 2.5 / (3 * LAYERS)


@pytest.mark.sweep
def test_it_costs_layers_of_memory_and_no_traffic() -> None:
    ahead, before = compiled("h100", None), compiled("h100", False)
    more = [each.memory_analysis().temp_size_in_bytes for each in (ahead, before)]
    # Parameters of the next one, gradients of the last; the masks of attention, in bf16 and as
    # booleans, which the iterations outside the loops share.
    assert more[0] - more[1] < 3.1 * LAYER + 3 * ROWS * HEADS * TOKENS**2
    sent = [
        sum(each.times * each.payload_bytes for each in collectives(program.as_text()))
        for program in (ahead, before)
    ]
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_a_loop_that_gathers_ahead_or_reduces_later_has_its_options() -> None:
    def has_loop(live: int = 0, overlap: bool | None = None, **options: Any) -> bool:
        zero = zero_of("h100", stage3_max_live_parameters=live, overlap_comm=overlap)
        chosen = compat.compiler_options(lowered(zero, **options))
        return REMATERIALIZATION in str(chosen.get("xla_disable_hlo_passes"))

    assert has_loop(scan=True)
    assert not has_loop(scan=False)
    assert has_loop(live=10**9, scan=True)  # its gradients
    assert not has_loop(overlap=False, scan=True)


def test_an_unrolled_model_waits_for_the_first_gathers_of_a_pass_only() -> None:
    """Matrices so large that XLA combines no two of them; of 8 layers, each gathered twice."""
    rows = 8 * ROWS * TOKENS
    program: Any = unrolled.lowered(zero_of("h100"), 4 * WIDTH, LAYERS, rows).compile()
    found = spans(program.as_text())
    gathers = [span for span in found if span.kind == "all-gather"]
    beside = sum(span.bytes for span in gathers if span.products)
    assert beside / sum(span.bytes for span in gathers) > 0.95
