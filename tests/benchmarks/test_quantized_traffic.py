"""What is sent quantized on 64 H100s in 8 hosts, read off the compiled program."""

import functools
from typing import Any

import pytest

from benchmarks.quantized_traffic import (
    FOUR_BITS,
    GATHERS,
    GRADIENTS,
    HEADINGS,
    HOST,
    NEAR,
    REDUCTIONS,
    SETTINGS,
    WEIGHTS,
    Found,
    compiled,
    table,
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


PLAIN: tuple[tuple[str, Any], ...] = ()
ALL = (*WEIGHTS.items(), *NEAR.items(), *GRADIENTS.items(), *FOUR_BITS.items())


@pytest.mark.sweep
def test_gathers_are_halved() -> None:
    """Scales, and what is gathered as it is, add at most 3%: a table of 2048 rows, norms."""
    plain, quantized = of(), of(*WEIGHTS.items(), *GRADIENTS.items())
    ratio = between(quantized, GATHERS) / between(plain, GATHERS)
    assert 0.5 < ratio < 0.53
    scales = quantized.units(quantized.inside, GATHERS, ("f32",))
    assert scales < 0.02 * quantized.units(quantized.inside, GATHERS, ("s8",))


@pytest.mark.sweep
def test_reductions_are_halved_from_16_bits() -> None:
    plain, quantized = of(), of(*WEIGHTS.items(), *GRADIENTS.items())
    # Between hosts alone 7/8 of a half, of a ring 63/64 of a whole.
    assert between(quantized, REDUCTIONS) == pytest.approx(0.5 * 7 / 8, rel=0.03)
    assert between(plain, REDUCTIONS) > 1.9 * between(quantized, REDUCTIONS)
    assert quantized.units(quantized.inside, REDUCTIONS, ("bf16",)) < 0.001


def test_all_three_reach_three_quarters() -> None:
    """ZeRO++'s claim, 0.75 units between hosts in place of 3."""
    found = of(*ALL)
    assert between(found, (*GATHERS, *REDUCTIONS)) < 0.75
    wide = found.units(found.inside, GATHERS, ("bf16",)) / found.units(found.inside, GATHERS)
    assert wide < 0.02  # a table of 2048 rows, norms


@pytest.mark.sweep
def test_no_second_pass_over_memory() -> None:
    """An element is read once as a code and written once in bf16 wherever it is gathered: 3 bytes,
    in the forward and in the backward pass; what a device quantizes is 1/64."""
    plain, weights = of(), of(*WEIGHTS.items())
    assert weights.touched - plain.touched < 3.1 * 2 * weights.parameters


def test_the_record_has_all_settings() -> None:
    rows = table(dict.fromkeys(SETTINGS, of(*ALL)))
    assert rows[0] == HEADINGS
    assert {len(row) for row in rows} == {len(HEADINGS)}
    assert [row[0] for row in rows[1:]] == [*SETTINGS]
