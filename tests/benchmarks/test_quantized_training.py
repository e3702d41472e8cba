"""Training with quantized collectives, small: what is sent in codes, and how far losses part."""

import dataclasses
import functools
from pathlib import Path

import pytest

import zerojax
from benchmarks.quantized_training import BASE, CLAIM, VARIANTS, Run, check, draw, run, table
from examples.run_clm import data
from zerojax.models.gpt import GPTConfig

SMALL_GPT = GPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=64)
SIZES = {"params['a']['kernel']": 16384, "params['wte']['embedding']": 8704, "params['b']": 64}
KERNEL = ["params['a']['kernel']"]
BOTH = 16384 + 8704


@functools.cache
def trained(name: str) -> Run:
    text = data.split([b"to be, or not to be, that is the question: " * 40], 16)
    return run(name, text, 20, zerojax.mesh(8), SMALL_GPT, evaluations=2)


@pytest.mark.usefixtures("quick_compile")
def test_error_feedback_follows_bf16(tmp_path: Path) -> None:
    base, quantized = trained(BASE), trained(CLAIM)
    assert base.held_out[-1][1] < base.held_out[0][1] - 0.2  # it learns
    assert (base.gathered, base.exchanged, base.weights) == (0, 0, [])
    kernels = 64 * (192 + 256 + 256)  # of c_attn and the MLP; the fourth has 4096 elements
    assert quantized.gathered >= kernels
    assert quantized.exchanged == kernels + 256 * 64
    assert len(quantized.weights) == 3
    assert quantized.train != base.train
    assert abs(quantized.apart(base)) < 0.02
    draw(tmp_path / "losses.png", [base, quantized])
    assert (tmp_path / "losses.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "weights", "gathered", "exchanged"),
    [
        (CLAIM, KERNEL, 16384, 0),  # gradients as they are
        (CLAIM, KERNEL, 16384, BOTH - 1),  # not all of them
        (CLAIM, KERNEL, 0, BOTH),  # weights as they are
        (CLAIM, [], 16384, BOTH),
        ("qgZ int4", [], 0, BOTH // 2 - 1),
        ("qgZ", [], 16384, BOTH),
        (BASE, [], 0, BOTH),
        (BASE, KERNEL, 0, 0),
    ],
)
def test_what_is_not_sent_as_asked_is_an_error(
    name: str, weights: list[str], gathered: int, exchanged: int
) -> None:
    with pytest.raises(ValueError, match="in codes"):
        check(name, SIZES, weights, gathered, exchanged)


def test_what_is_sent_as_asked() -> None:
    check(CLAIM, SIZES, KERNEL, 2 * 16384, BOTH)
    check("qgZ int4", SIZES, [], 0, BOTH // 2)
    check(BASE, SIZES, [], 0, 0)


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
