"""Scalars of a step under DeepSpeed's tags."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from zerojax.monitor.tags import figures, scalars

STATE = {"learning_rate": 0.1, "grad_norm": 2.0, "loss_scale": 8.0}


class Pair(NamedTuple):
    loss: float
    accuracy: float


@pytest.mark.parametrize(
    ("out", "names"),
    [
        (jnp.float32(0.5), {"train_loss": 0.5}),
        ((0.5, {"accuracy": 1}), {"train_loss": 0.5, "accuracy": 1}),
        ((0.5, (jnp.ones(3), {"aux": {"z": 2.0}})), {"train_loss": 0.5, "aux/z": 2.0}),
        (
            {"loss": 0.5, "a": {"b": 1, "c": [2, 3]}},
            {"loss": 0.5, "a/b": 1, "a/c/0": 2, "a/c/1": 3},
        ),
        (Pair(0.5, 0.25), {"loss": 0.5, "accuracy": 0.25}),
        (({"a": 1}, {"a": 2}), {"a": 1, "1/a": 2}),
        (None, {}),
    ],
)
def test_names(out, names):
    assert scalars(out) == names


def test_what_is_no_real_scalar_is_left_out():
    out = {
        "logits": jnp.ones((2, 3)),
        "one": jnp.ones(1),
        "note": "warm",
        "nothing": None,
        "key": jax.random.key(0),
        "complex": jnp.complex64(1j),
        "object": object(),
        "overflow": jnp.bool_(True),
    }
    assert list(scalars(out)) == ["overflow"]


@pytest.mark.parametrize(
    ("out", "loss", "others"),
    [
        ({"loss": 0.5, "accuracy": 1}, 0.5, {"accuracy"}),
        ((0.5, {"loss": 9}), 0.5, {"loss"}),
        ({"accuracy": 1}, None, {"accuracy"}),
    ],
)
def test_the_loss(out, loss, others):
    found = figures(STATE, out, fp16=False)
    assert found.pop("Train/Samples/train_loss", None) == loss
    assert found.keys() == {f"Train/Samples/{name}" for name in {"lr", "grad_norm", *others}}


def test_the_loss_scale_is_for_fp16_alone():
    assert figures(STATE, None, fp16=True)["Train/Samples/loss_scale"] == 8.0
    assert "Train/Samples/loss_scale" not in figures(STATE, None, fp16=False)


def test_a_name_of_ours_keeps_its_meaning():
    found = figures(STATE, {"grad_norm": 7.0, "lr": 8.0, "loss_scale": 9.0}, fp16=True)
    assert found == {
        "Train/Samples/lr": 0.1,
        "Train/Samples/loss_scale": 8.0,
        "Train/Samples/grad_norm": 2.0,
        "Train/Samples/metrics/grad_norm": 7.0,
        "Train/Samples/metrics/lr": 8.0,
        "Train/Samples/metrics/loss_scale": 9.0,
    }
