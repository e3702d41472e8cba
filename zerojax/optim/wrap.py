"""Loss scale, skipping, clipping and telemetry around any optax transformation."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.config import ZeroConfig
from zerojax.optim.frozen import Run, TracedUpdate
from zerojax.optim.loss_scale import LossScale, LossScaleState
from zerojax.optim.moments import bf16_moments
from zerojax.optim.norm import global_norm, norm_of
from zerojax.train_state.bound import BoundTransformation
from zerojax.xla.types import PyTree

UNKNOWN = float(np.finfo(np.float32).min)
"""The value of a learning rate that the optimizer does not report, and of the norm of gradients
that zerojax does not see. Not NaN, at which ``jax_debug_nans`` stops."""


class ZeroOptState(NamedTuple):
    """State of a wrapped transformation.

    Attributes:
      inner: The state of the wrapped transformation.
      steps: int32 [], the number of steps, including skipped ones.
      skipped: int32 [], the number of steps that changed nothing, because a gradient was not
        finite.
      grad_norm: float32 [], global L2 norm of the last gradient, unscaled, before clipping and
        without frozen parameters; inf if the step was skipped, ``UNKNOWN`` if unknown.
      learning_rate: float32 [], the rate of the last step; ``UNKNOWN`` if unknown.
      loss_scale: The state of the loss scale; None without one.
    """

    inner: optax.OptState
    steps: jax.Array
    skipped: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    loss_scale: LossScaleState | None

    def with_inner(self, inner: optax.OptState) -> ZeroOptState:
        """Replaces the state of the wrapped transformation; None removes it."""
        return self._replace(inner=inner)


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """A transformation from :func:`wrap`; wrapping it again changes nothing."""


class CarriedState(abc.ABC):
    """The state of a wrapped transformation within a decorated step, with the update that the
    config asks for."""

    @abc.abstractmethod
    def updated(
        self,
        tx: ZeroTransformation,
        grads: optax.Updates,
        params: optax.Params | None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Updates as ``tx`` does; called by its ``update``."""


def wrap(
    tx: optax.GradientTransformation,
    *,
    gradient_clipping: float = 0.0,
    loss_scale: LossScale | None = None,
    skip_nonfinite: bool = False,
    learning_rate: float | optax.Schedule | None = None,
    compute_grad_norm: bool = True,
) -> ZeroTransformation:
    r"""Adds a loss scale, the skipping of overflowed steps, clipping and telemetry to an optimizer.

    With loss scale :math:`s` (1 without one) and :math:`n = \lVert g / s \rVert_2` in float32, over
    all shards of all leaves that ``tx`` uses,

    .. math:: g \leftarrow g / s \cdot \min(1, c / (n + 10^{-6}))

    where :math:`c` is ``gradient_clipping`` (DeepSpeed's ``runtime/utils.py``). With a loss scale,
    or with ``skip_nonfinite``, a step whose :math:`n` is not finite changes neither parameters nor
    the state of ``tx``, its schedule included, and counts as skipped. One NaN or inf anywhere makes
    :math:`n` NaN or inf on every device.

    ``tx`` does not use a leaf if neither an update nor a state depends on it: the gradient of a
    parameter under ``optax.set_to_zero``, as if the parameter were under ``jax.lax.stop_gradient``.
    (DeepSpeed counts the parameters that require a gradient.) A norm within ``tx`` uses every leaf
    that it reads.

    Args:
      tx: Any optax transformation.
      gradient_clipping: The maximum global norm of a gradient; 0 turns clipping off.
      loss_scale: The rules of the loss scale; None for no scale. The gradients must come from a
        loss multiplied by ``state.loss_scale.scale``: :func:`zerojax.value_and_grad` multiplies in
        a decorated step, and in other programs if its argument ``loss_scale=`` is set.
      skip_nonfinite: Whether steps with a norm that is not finite are skipped without a loss scale
        too.
      learning_rate: The rate of ``tx``, for telemetry; None reads the rate from the state of
        ``optax.inject_hyperparams``, if any.
      compute_grad_norm: Whether the norm is computed for telemetry where neither clipping nor
        skipping needs it; the norm is unknown otherwise.

    Raises:
      ConfigError, TypeError: An argument is invalid.

    Example:
      Any optax training loop works. The loop itself casts float32 masters to the compute dtype, and
      decides what to do at the smallest scale.

      >>> import jax, jax.numpy as jnp, optax, zerojax
      >>> tx = zerojax.wrap(optax.sgd(0.1), loss_scale=zerojax.LossScale(initial_scale_power=8))
      >>> def loss(params):
      ...     low = params.astype(jnp.float16)
      ...     return (low * low).sum().astype(jnp.float32)
      >>> @jax.jit
      ... def step(params, state):
      ...     scale = zerojax.telemetry(state)["loss_scale"]
      ...     value, grads = zerojax.value_and_grad(loss, loss_scale=scale)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, value
      >>> params = jnp.array([3.0, 4.0])
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     params, state, value = step(params, state)
      >>> float(value), round(float(state.grad_norm), 2)
      (16.0, 8.0)
    """
    ZeroConfig(gradient_clipping=gradient_clipping)
    if not (loss_scale is None or isinstance(loss_scale, LossScale)):
        raise TypeError(
            f"loss_scale={loss_scale!r}: pass a LossScale, such as LossScale(loss_scale=128.0)"
        )
    wrapped = cast(ZeroTransformation, tx)
    if isinstance(tx, ZeroTransformation | BoundTransformation):
        return wrapped
    inner_tx = optax.with_extra_args_support(tx)
    may_skip = skip_nonfinite or loss_scale is not None
    needs_norm = compute_grad_norm or may_skip or gradient_clipping > 0

    def init(params: optax.Params) -> ZeroOptState:
        return adopt(inner_tx.init(jax.tree.map(full_precision, params)), loss_scale=loss_scale)

    def update(
        grads: optax.Updates,
        state: ZeroOptState,
        params: optax.Params | None = None,
        *,
        square_sums: Sequence[jax.Array] | None = None,
        run: Run | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, ZeroOptState]:
        if isinstance(state, CarriedState):
            return state.updated(wrapped, grads, params, **extra)
        grads = jax.tree.map(lambda g: unscaled(g, state.loss_scale), grads)

        def update_inner(
            g: optax.Updates, s: PyTree = state.inner, p: PyTree = params
        ) -> tuple[optax.Updates, PyTree]:
            return inner_tx.update(g, s, p, **extra)  # type: ignore[no-any-return]

        # Parameters may contain functions (of an Equinox module), which cannot be arguments.
        arrays = all(isinstance(x, jax.Array) for x in jax.tree.leaves((state.inner, params)))
        given = (state.inner, params) if arrays else ()
        # jax traces the same function once, also for a step that is traced on other rows.
        alike = arrays and not extra
        inner_update = TracedUpdate(inner_tx.update if alike else update_inner, grads, *given)
        used = inner_update.uses
        # Gradients that have been offloaded come with their square sums.
        if not needs_norm:
            norm = jnp.full((), UNKNOWN, jnp.float32)
        elif square_sums is None:
            norm = global_norm([*compress(jax.tree.leaves(grads), used)])
        else:
            norm = norm_of([*compress(square_sums, used)])
        if gradient_clipping:
            factor = jnp.minimum(1.0, gradient_clipping / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        updates, inner = inner_update(grads, *given, run=run)
        if may_skip:
            finite = jnp.isfinite(norm)
            # Adding -0.0 keeps the bits of every number.
            updates = jax.tree.map(lambda u: jnp.where(finite, u, -jnp.zeros_like(u)), updates)
            inner = choose(finite, inner, state.inner)
        return updates, counted(state, inner, norm)

    def counted(state: ZeroOptState, inner: optax.OptState, norm: jax.Array) -> ZeroOptState:
        if learning_rate is None:
            rate = _injected_rate(inner)
        else:
            updates = state.steps - state.skipped
            rate = learning_rate(updates) if callable(learning_rate) else learning_rate
        skipped, scale = state.skipped, state.loss_scale
        if may_skip:
            finite = jnp.isfinite(norm)
            skipped = skipped + (~finite).astype(skipped.dtype)
            norm = jnp.where(finite, norm, jnp.inf)
            if scale is not None and loss_scale is not None:
                scale = loss_scale.next(scale, finite)
        return ZeroOptState(
            inner=inner,
            steps=optax.safe_increment(state.steps),
            skipped=skipped,
            grad_norm=norm.astype(jnp.float32),
            learning_rate=jnp.asarray(rate, jnp.float32),
            loss_scale=scale,
        )

    wrapped = ZeroTransformation(init, update)
    return wrapped


def unscaled(grad: jax.Array, loss_scale: LossScaleState | None) -> jax.Array:
    """Casts a gradient to float32 and divides it by the loss scale."""
    grad = full_precision(grad)
    return grad if loss_scale is None else grad * (1 / loss_scale.scale).astype(grad.dtype)


def find_zero_state(tree: PyTree) -> ZeroOptState | None:
    """Finds the first state of a wrapped transformation in a tree; None if there is none."""

    def is_zero_state(x: object) -> bool:
        return isinstance(x, ZeroOptState)

    return next(filter(is_zero_state, jax.tree.leaves(tree, is_leaf=is_zero_state)), None)


def features(config: ZeroConfig) -> dict[str, Any]:
    """Returns the keyword arguments of :func:`wrap` for a config."""
    return {
        "gradient_clipping": config.gradient_clipping,
        "loss_scale": LossScale.of(config) if config.fp16 else None,
        "skip_nonfinite": config.skips_overflow,
        "compute_grad_norm": config.compute_grad_norm,
    }


def configured(
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    learning_rate: float | optax.Schedule | None = None,
) -> ZeroTransformation:
    """Wraps an optimizer as a config asks; see :func:`wrap`."""
    if config.bf16_moments and not isinstance(tx, ZeroTransformation | BoundTransformation):
        tx = bf16_moments(tx)
    return wrap(tx, learning_rate=learning_rate, **features(config))


def adopt(
    inner: optax.OptState,
    steps: jax.typing.ArrayLike = 0,
    loss_scale: LossScale | None = None,
    grad_norm: float = 0.0,
) -> ZeroOptState:
    """Wraps an existing optimizer state in a new state of a wrapped transformation."""
    # Separate arrays: a state that is donated may contain a buffer only once.
    return ZeroOptState(
        inner=inner,
        steps=jnp.asarray(steps, jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        grad_norm=jnp.full((), grad_norm, jnp.float32),
        learning_rate=jnp.full((), UNKNOWN, jnp.float32),
        loss_scale=None if loss_scale is None else loss_scale.init(),
    )


def choose(condition: jax.Array, one: PyTree, other: PyTree) -> PyTree:
    """Selects one of two trees of the same structure by ``condition``, bool []."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def full_precision(x: jax.Array) -> jax.Array:
    """Casts a 16-bit float array to float32; returns any other array unchanged."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _injected_rate(state: optax.OptState) -> jax.typing.ArrayLike:
    rates = optax.tree.get_all_with_path(
        state, "learning_rate", filtering=lambda path, value: hasattr(value, "dtype")
    )
    return rates[0][1] if rates else UNKNOWN
