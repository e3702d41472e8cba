"""Arrangements of axes: any piece of a parameter, beside NumPy's transposes, splits and stacks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerojax.weights.arrangement import Arrangement

Tensors = dict[str, np.ndarray]
QKV = {"part": ("q", "k", "v")}
GROUPED = {"part": {"q": 8, "k": 2, "v": 4}}

CASES: dict[str, tuple[Any, ...]] = {
    "as it is": ("... -> ...", "w", {}, (3, 4, 5), {}, lambda t: t["w"]),
    "transposed": ("o i -> i o", "w", {}, (3, 4), {}, lambda t: t["w"].T),
    "layers stacked": (
        "o i -> layer i o", "h.{layer}.w", {}, (3, 4, 5), {},
        lambda t: np.stack([t[f"h.{i}.w"].T for i in range(3)]),
    ),
    "one of stacked": (
        "e o i -> i o", "w", {"e": "2"}, (4, 5), {"e": ["0", "1", "2"]}, lambda t: t["w"][2].T
    ),
    "heads": (
        "(h d) i -> i h d", "w", {}, (6, 4, 3), {}, lambda t: t["w"].T.reshape(6, 4, 3)
    ),
    "one of fused": (
        "i (part h d) -> i h d", "w", {"part": "k"}, (6, 4, 3), QKV,
        lambda t: t["w"].reshape(6, 3, 4, 3)[:, 1],
    ),
    "one of fused by head": (
        "(h part d) i -> i h d", "w", {"part": "v"}, (6, 4, 3), QKV,
        lambda t: t["w"].reshape(4, 3, 3, 6)[:, 2].transpose(2, 0, 1),
    ),
    "fused": (
        "o i -> i (part o)", "{part}_proj", {}, (6, 12), QKV,
        lambda t: np.concatenate([t[f"{p}_proj"].T for p in "qkv"], 1),
    ),
    "fused of several lengths": (
        "o i -> layer i (part o)", "{layer}.{part}", {}, (2, 5, 14), GROUPED,
        lambda t: np.stack([np.concatenate([t[f"{i}.{p}"] for p in "qkv"]).T for i in range(2)]),
    ),
    "one of fused of several lengths": (
        "(part h d) i -> i h d", "w", {"part": "q"}, (5, 4, 2), GROUPED,
        lambda t: t["w"][:8].reshape(4, 2, 5).transpose(2, 0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_piece_is_numpys(case: tuple[Any, ...]) -> None:
    text, name, given, shape, parts, expected = case
    rng = np.random.default_rng(0)
    links = Arrangement.parse(text).links(name, given, shape, parts)
    tensors = {link.tensor: rng.integers(0, 10**6, link.tensor_shape) for link in links}
    whole = expected(tensors)
    assert whole.shape == shape
    for _ in range(20):
        bounds = tuple(tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for n in shape)
        piece = np.full([stop - start for start, stop in bounds], -1)
        for link in links:
            if block := link.block(piece, bounds):
                view, offset, strides = block
                elements = tensors[link.tensor].reshape(-1)[offset:]
                by = [stride * elements.itemsize for stride in strides]
                view[...] = np.lib.stride_tricks.as_strided(elements, view.shape, by)
        np.testing.assert_array_equal(piece, whole[tuple(slice(*each) for each in bounds)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("o i", 'is no arrangement: write "o i -> i o"'),
        ("o i -> i", r"1 dimensions, the parameter is \[3, 4\]"),
        ("o -> i o", "i is on one side of ->: write it on both"),
        (
            "(h d) i -> (h d) i",
            "h d share a dimension of the parameter: write h as {h} in the name",
        ),
    ],
)
def test_what_is_no_arrangement(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrangement.parse(text).links("w", {}, (3, 4), {})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("o i -> i (part o)", "{part}", {}, (6, 13), QKV), r"3 does not fit 13 of \[6, 13\]"),
        (("o i -> i (part o)", "{part}", {}, (6, 13), GROUPED), r"o = 14 does not fit 13 of \[6"),
        (("(part o) i -> i o", "w", {"part": "x"}, (5, 2), GROUPED), "no value 'x' of part"),
        (("e o -> o", "w", {"e": "3"}, (5,), {}), "no value '3' of e"),
        (("o -> (e o)", "{e}", {}, (6,), {}), "the length of e is unknown: pass its values"),
        (("part o -> o", "w", {"part": "q"}, (8,), GROUPED), "part = q has 8, its axes 1"),
    ],
)
def test_what_does_not_fit_a_parameter(case: tuple[Any, ...], message: str) -> None:
    links: Callable[..., Any] = Arrangement.parse(case[0]).links
    with pytest.raises(ValueError, match=message):
        links(*case[1:])
