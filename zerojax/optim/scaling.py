"""Update rules of DeepSpeed's optimizers for which optax has other formulas.

Each rule is an optax transformation without a learning rate. Muon's rule is in `muon.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

Beta: TypeAlias = float | optax.Schedule
"""A moment's decay: a constant, or a function of the number of completed updates."""


def with_beta(
    rule: Callable[[jax.typing.ArrayLike], optax.GradientTransformation], b1: Beta
) -> optax.GradientTransformation:
    """Builds a rule whose first beta may change from one update to the next.

    The schedule reads the count in the rule's state, so that a skipped update, which leaves the
    state unchanged, does not count. `optax.inject_hyperparams` would add a second count, and the
    beta, to the state.

    Args:
      rule: A function from the beta to a transformation whose state has a `count`.
      b1: The first beta, or a schedule of it.

    Example:
      >>> tx = with_beta(lambda b1: optax.scale_by_lion(b1=b1), lambda count: 1.0 * (count > 0))
      >>> state = tx.init(jnp.zeros(()))
      >>> for g in (1.0, -1.0):
      ...     u, state = tx.update(jnp.array(g), state)
      ...     print(float(u))  # the gradient's own sign, then the momentum's
      1.0
      1.0
    """
    if not callable(b1):
        return rule(b1)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return cast(
            "tuple[optax.Updates, optax.OptState]",
            rule(b1(state.count)).update(updates, state, params),
        )

    return optax.GradientTransformation(rule(0.0).init, update)


class ScaleByRootSumState(NamedTuple):
    """State of `scale_by_root_sum`.

    Attributes:
      sum_of_squares: The sums; a tree like the parameters.
    """

    sum_of_squares: optax.Updates


def scale_by_root_sum(eps: float = 1e-10) -> optax.GradientTransformation:
    """Scales by Adagrad: s += g^2; u = g / (sqrt(s) + eps).

    `optax.scale_by_rss` has eps under the root and starts its sum at 0.1.

    Example:
      >>> tx = scale_by_root_sum()
      >>> updates, _ = tx.update(jnp.array([3.0]), tx.init(jnp.array([1.0])))
      >>> float(updates[0])
      1.0
    """

    def init(params: optax.Params) -> ScaleByRootSumState:
        return ScaleByRootSumState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: ScaleByRootSumState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByRootSumState]:
        total = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, updates)
        scaled = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, total)
        return scaled, ScaleByRootSumState(total)

    return optax.GradientTransformation(init, update)


def scale_by_raw_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
) -> optax.GradientTransformation:
    """Scales by Adam's direction without bias correction: u = m / (sqrt(v) + eps).

    m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2; with `eps_inside_sqrt` the divisor is
    sqrt(v + eps). The state is `optax.ScaleByAdamState`.

    Example:
      >>> tx = scale_by_raw_adam(b1=0.0, b2=0.0, eps=0.0)
      >>> updates, _ = tx.update(jnp.array([-3.0]), tx.init(jnp.array([1.0])))
      >>> float(updates[0])
      -1.0
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        # Separate arrays: a state that is donated may contain a buffer only once.
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def direction(m: jax.Array, v: jax.Array) -> jax.Array:
        return m / (jnp.sqrt(v + eps) if eps_inside_sqrt else jnp.sqrt(v) + eps)

    def update(
        updates: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        count = optax.safe_increment(state.count)
        return jax.tree.map(direction, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_clamped_trust_ratio(
    min_coeff: float = 0.01, max_coeff: float = 10.0
) -> optax.GradientTransformation:
    """Multiplies each leaf u by Lamb's clamp(|p| / |u|, min_coeff, max_coeff); by 1 if a norm is 0.

    `optax.scale_by_trust_ratio` does not clamp.

    Raises:
      ValueError: An update without parameters.

    Example:
      >>> tx = scale_by_clamped_trust_ratio()
      >>> p = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([0.0, 1.0]), tx.init(p), p)
      >>> updates.tolist()
      [0.0, 5.0]
    """

    def scaled(u: jax.Array, p: jax.Array) -> jax.Array:
        # Norms in fp32 at least, for leaves of every dtype.
        norms = [jnp.linalg.norm(x.astype(jnp.promote_types(x.dtype, jnp.float32)).ravel())
                 for x in (p, u)]  # fmt: skip
        ratio = norms[0] / jnp.where(norms[1] == 0, 1.0, norms[1])
        known = (norms[0] != 0) & (norms[1] != 0)
        return u * jnp.where(known, jnp.clip(ratio, min_coeff, max_coeff), 1.0).astype(u.dtype)

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if params is None:
            raise ValueError("Lamb needs the parameters: call update(updates, state, params)")
        return jax.tree.map(scaled, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_late_bias_correction(b1: Beta, b2: float) -> optax.GradientTransformation:
    """Multiplies u by sqrt(1 - b2^n) / (1 - b1^n) at the n-th update, n from 1.

    DeepSpeed's Lamb corrects the bias in the step, after the trust ratio and the weight decay.

    Example:
      >>> tx = scale_by_late_bias_correction(0.5, 0.75)
      >>> updates, _ = tx.update(jnp.array([1.0]), tx.init(jnp.array([1.0])))
      >>> round(float(updates[0]), 6)
      1.0
    """

    def weight(b: jax.typing.ArrayLike, n: jax.Array) -> jax.Array:
        # 1 - b^n. For b near 1 the difference would cancel if float32 held b^n, or b itself.
        if isinstance(b, float):
            return -jnp.expm1(n * (math.log(b) if b else -math.inf))
        return -jnp.expm1(n * jnp.log(b))

    def factor(count: jax.Array) -> jax.Array:
        n = jnp.asarray(count + 1, dtype=float)
        return jnp.sqrt(weight(b2, n)) / weight(b1(count) if callable(b1) else b1, n)

    return optax.scale_by_schedule(factor)
