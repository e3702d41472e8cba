"""What a step of adapters over a 4-bit base holds and gathers, compiled for H100s."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantize.adapters import Sizes, adapters_of_llama, quantized_bytes

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.xla.jaxprs import nbytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

SIZES = Sizes(n_layer=4, n_embd=1024, n_inner=2048)
MATRICES = 4 * SIZES.n_embd**2 + 3 * SIZES.n_embd * SIZES.n_inner  # elements of a layer
FORMS = {"scan": (True, False), "scan, remat": (True, True), "unrolled": (False, False)}


class Cost(NamedTuple):
    """Of one device, in bytes: the arguments and what they should be, gathered, temporary."""

    arguments: int
    state: float
    gathered: int
    temporary: int
    stacks: set[str]


@functools.cache
def cost(form: str, devices: int) -> Cost:
    scan, remat = FORMS[form]
    create, step = adapters_of_llama(SIZES, scan=scan, remat=remat, dtype=jnp.bfloat16)
    zero = zerojax.zero(stage=3, mesh=zerojax.topology("h100", devices=devices))
    state = zero.abstract_state(create, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, 9), jnp.int32)
    compiled: Any = zero(step).lower(state, batch).compile()
    text = compiled.as_text()
    found = [x for x in collectives(text) if x.kind == "all-gather"]
    memory = compiled.memory_analysis()
    shards = [
        nbytes(jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype))
        for x in jax.tree.leaves(state)
    ]
    stacks = re.findall(r"(?:bf16|f32)\[4,(?:1024|2048),(?:1024|2048)\]", text)
    return Cost(
        memory.argument_size_in_bytes,
        sum(shards),
        sum(x.payload_bytes * x.times for x in found),
        memory.temp_size_in_bytes,
        {*stacks},
    )


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("form", FORMS)
def test_the_base_is_held_in_codes(form: str, devices: int) -> None:
    found = cost(form, devices)
    np.testing.assert_allclose(found.arguments, found.state, rtol=0.02)
    assert not found.stacks
    assert found.temporary < 1.8 * 2 * MATRICES  # less than two layers in bf16, of four


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_gathered_once_a_pass(form: str) -> None:
    create, _ = adapters_of_llama(SIZES, scan=True, remat=True, dtype=jnp.bfloat16)
    base = jax.eval_shape(create, jax.random.key(0)).base
    both_passes = 2 * quantized_bytes(base)
    others = 2 * 2 * 2 * 512 * SIZES.n_embd  # table and head in bf16, twice
    assert cost(form, 8).gathered < 1.1 * both_passes + others
