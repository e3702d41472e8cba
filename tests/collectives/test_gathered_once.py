"""What whole steps send that transpose, round or widen their parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.models.loss import loss_fn

WIDTH, WORDS, TOKENS = 512, 2032, 16
"""The table has fewer elements than a weight that stays sharded."""


def compiled_gathers(
    stage: int, accumulation: int = 1, *, scan: bool, casts: bool = False, head: Any = jnp.bfloat16
) -> dict[str, float]:
    """Returns what a step of a tied table and two layers gathers on 8 absent H100s, by dtype, in
    units of its parameters once in 2 bytes each.

    Args:
      casts: Whether the step casts its float32 parameters; otherwise the config does.
      head: The dtype of the layers and of the output.
    """
    zero = zerojax.zero(
        stage=stage, mesh=zerojax.topology("h100", 8), bf16=not casts,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip

    def create() -> TrainState:
        params = {"table": jnp.zeros((WORDS, WIDTH)), "layers": jnp.zeros((2, WIDTH, WIDTH))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(x.dtype)), None

    @zero
    def step(state: TrainState, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["table"].astype(jnp.bfloat16)[tokens].astype(head)
            if scan:
                x = jax.lax.scan(layer, x, params["layers"])[0]
            else:
                for i in range(2):
                    x = layer(x, params["layers"][i])[0]
            return loss_fn(x @ params["table"].astype(head).T, tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    tokens = jax.ShapeDtypeStruct((8 * accumulation, TOKENS), jnp.int32)
    text = step.lower(zero.abstract_state(create), tokens).compile().as_text()
    found: dict[str, float] = {}
    for each in collectives(text):
        if each.kind == "all-gather":
            for dtype, size in each.bytes_by_dtype.items():
                found[dtype] = found.get(dtype, 0) + each.times * size / (2 * PARAMETERS)
    return found


PARAMETERS = WORDS * WIDTH + 2 * WIDTH * WIDTH
LOOKED_UP = 8 * TOKENS * WIDTH / PARAMETERS
"""The rows that all devices look up in a micro-batch, gathered for the table's gradient."""


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestCompiled:
    @pytest.mark.parametrize(("scan", "casts"), [(True, True), (False, False)])
    def test_stage_2_gathers_once_an_update(self, scan: bool, casts: bool) -> None:
        gathered = compiled_gathers(2, 8, scan=scan, casts=casts)
        assert gathered["bf16"] == pytest.approx(1 + 8 * LOOKED_UP, rel=0.05)
        assert gathered.get("f32", 0) < 0.01

    def test_a_float32_head_is_gathered_in_bf16(self) -> None:
        """Stage 3; the table, widened and transposed, is gathered for the output and for its
        backward pass."""
        gathered = compiled_gathers(3, scan=False, head=jnp.float32)
        assert gathered["bf16"] == pytest.approx(2 + LOOKED_UP, rel=0.05)
        assert "f32" not in gathered
