"""Training with quantized collectives, small: what is sent in codes, and how far losses part."""

import dataclasses
import functools
from pathlib import Path

import pytest

import zerojax
from benchmarks.quantized_training import BASE, CLAIM, VARIANTS, Run, draw, run, table
from examples.run_clm import data
from zerojax.models.gpt import GPTConfig

SMALL_GPT = GPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=64)


@functools.cache
def trained(name: str) -> Run:
    text = data.split([b"to be, or not to be, that is the question: " * 40], 16)
    return run(name, text, 20, zerojax.mesh(8), SMALL_GPT, evaluations=2)


@pytest.mark.usefixtures("quick_compile")
def test_quantized_collectives_follow_bf16(tmp_path: Path) -> None:
    base, quantized = trained(BASE), trained(CLAIM)
    assert base.held_out[-1][1] < base.held_out[0][1] - 0.2  # it learns
    assert (base.gathered, base.exchanged, base.weights) == (0, 0, [])
    kernels = 64 * (192 + 256 + 256)  # of c_attn and the MLP; the fourth has 4096 elements
    assert quantized.gathered >= kernels
    assert quantized.exchanged == kernels + 256 * 64
    assert len(quantized.weights) == 3
    assert quantized.train != base.train
    assert abs(quantized.excess_over(base)) < 0.02
    draw([base, quantized], tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000


def test_the_table_has_the_distance_at_the_end() -> None:
    base = Run(
        name=BASE, weights=[], gathered=0, exchanged=0, train=[2.0] * 40,
        held_out=[(20, 9.0), (40, 2.0)], seconds=1.0,
    )  # fmt: skip
    other = dataclasses.replace(
        base, name="qgZ", exchanged=5000, train=[2.0] * 20 + [1.0] * 20,
        held_out=[(20, 1.0), (40, 2.1)],
    )  # fmt: skip
    rows = table([base, other])
    assert rows[1][2:] == ["", "2.0000", "", "", ""]
    assert rows[2] == ["qgZ", "2.1000", "+5.00%", "1.5000", "-25.00%", "", "5 kB"]
    assert {BASE, CLAIM} <= VARIANTS.keys()
