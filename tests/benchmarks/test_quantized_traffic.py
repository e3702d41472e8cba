"""What is sent quantized on 64 H100s in 8 hosts, read off the compiled program."""

import functools
from typing import Any

import pytest

from benchmarks.quantized_traffic import (
    FOUR_BITS,
    GATHERS,
    GRADIENTS,
    HOST,
    NEAR,
    REDUCTIONS,
    WEIGHTS,
    Found,
    compiled,
)
from zerojax.models import llama

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

LAYERS = 16
MODEL = llama.Llama(
    llama.LlamaConfig(
        **(llama.SIZES["llama-7b"] | {"n_layer": LAYERS, "vocab_size": 2048}), scan=True, remat=True
    )
)


@functools.cache
def of(*keys: tuple[str, Any]) -> Found:
    return compiled({"stage": 3} | dict(keys), MODEL, seq=512)


def between(found: Found, kinds: Any) -> float:
    """Units that a host sends to others."""
    return HOST * found.units(found.between, kinds)


ALL = (*WEIGHTS.items(), *NEAR.items(), *GRADIENTS.items(), *FOUR_BITS.items())


def test_all_three_reach_three_quarters() -> None:
    """ZeRO++'s claim, 0.75 units between hosts in place of 3."""
    found = of(*ALL)
    assert between(found, (*GATHERS, *REDUCTIONS)) < 0.75
    wide = found.units(found.inside, GATHERS, ("bf16",)) / found.units(found.inside, GATHERS)
    assert wide < 0.02  # a table of 2048 rows, norms
