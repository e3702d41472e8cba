"""Adam's update in one pass over memory, by a fused kernel.

An optax transformation returns updates, which a separate pass adds to the parameters. A
:class:`WithOnePass` can also write the parameters itself; ``zerojax/step/resident.py`` uses that
where :attr:`OnePass.wins`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax.optim.decay import Mask
from zerojax.xla.types import MaybeNone, PyTree

_KERNEL = "mosaic_gpu"


class OnePass(NamedTuple):
    """An optimizer's update that writes parameters and moments in one pass over memory.

    Attributes:
      wins: ``wins(mesh)`` returns whether the devices of a mesh, existing or not, should use it.
      update: ``update(grads, state, params, shardings, scale=..., run=...)`` returns the updated
        parameters and the optimizer's state. ``shardings`` is a tree like the parameters, which
        gradients and moments share; ``scale`` multiplies the gradients, and with a false
        ``run`` nothing changes.
    """

    wins: Callable[[Mesh], bool]
    update: Callable[..., tuple[optax.Params, optax.OptState]]


class WithOnePass(optax.GradientTransformationExtraArgs):
    """An optax transformation that may have a one-pass update.

    Attributes:
      one_pass: The one-pass update, or None.
    """

    one_pass: OnePass | None = None


def adam_in_one_pass(
    tx: optax.GradientTransformation,
    *,
    rate: float | optax.Schedule,
    betas: Sequence[float | optax.Schedule],
    eps: float,
    weight_decay: float,
    mask: Mask | None,
    decoupled: bool,
    implementation: str | None,
    always: bool,
) -> WithOnePass:
    """Adds to ``tx`` a one-pass update by :func:`pallas_kernels.fused_adamw`.

    Args:
      tx: A chain of ``optax.scale_by_adam``, decayed weights and the learning rate, in the order
        of ``decoupled``.
      rate, betas, eps, weight_decay, mask, decoupled: The settings of ``tx``; see
        :func:`zerojax.optim.named.named_optimizer`. The first beta may be a schedule.
      implementation: "mosaic_gpu" or "xla"; None for the implementation that measured faster.
      always: Whether None takes the kernel on every device on which the kernel works in place,
        faster or not.
    """

    def wins(mesh: Mesh) -> bool:
        from pallas_kernels import dispatch  # imports for seconds; only needed here

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if implementation is None and always:
                return dispatch.in_place(dispatch.target()) == _KERNEL
            return dispatch.choose("fused_adamw", implementation) == _KERNEL

    def update(
        grads: optax.Updates,
        state: tuple[Any, ...],
        params: optax.Params,
        shardings: PyTree,
        *,
        scale: jax.typing.ArrayLike = 1.0,
        run: jax.typing.ArrayLike = True,
    ) -> tuple[optax.Params, optax.OptState]:
        from pallas_kernels import fused_adamw

        position = next(i for i, x in enumerate(state) if isinstance(x, optax.ScaleByAdamState))
        adam, last = state[position], state[-1]
        after = optax.safe_increment(adam.count)
        b1 = betas[0](adam.count) if callable(betas[0]) else betas[0]
        lr = rate(last.count) if callable(rate) else rate
        scalars = [jnp.asarray(x, jnp.float32) for x in (scale, lr, b1, run)]
        chosen = True if mask is None or not weight_decay else mask
        chosen = chosen(params) if callable(chosen) else chosen
        decays = [bool(x) for x in jax.tree.leaves(jax.tree.broadcast(chosen, params))]

        def on_shards(
            scalars: Sequence[jax.Array], count: jax.Array, *leaves: list[jax.Array]
        ) -> list[list[jax.Array]]:
            scale, lr, b1, run = scalars
            updated: list[list[jax.Array] | MaybeNone] = [None] * len(decays)
            for decay in (True, False):
                part = [i for i, is_decayed in enumerate(decays) if is_decayed == decay]
                if part:
                    fused = fused_adamw(
                        *([column[i] for i in part] for column in leaves),
                        count=count,
                        learning_rate=lr,
                        b1=b1,
                        b2=betas[1],
                        eps=eps,
                        weight_decay=weight_decay if decay else 0.0,
                        decoupled=decoupled,
                        scale=scale,
                        run=run != 0,
                        implementation=_KERNEL,
                    )
                    columns = (fused.params, fused.mu, fused.nu)
                    for i, *results in zip(part, *columns, strict=True):
                        updated[i] = results
            return [list(column) for column in zip(*updated, strict=True)]

        placed = jax.tree.leaves(shardings)
        specs = [s.spec for s in placed]
        replicated = PartitionSpec()
        results = jax.shard_map(
            on_shards,
            mesh=placed[0].mesh,
            in_specs=(replicated, replicated, specs, specs, specs, specs),
            out_specs=[specs] * 3,
            check_vma=False,
        )(scalars, after, *map(jax.tree.leaves, (grads, params, adam.mu, adam.nu)))
        tree = jax.tree.structure(params)
        new, mu, nu = (jax.tree.unflatten(tree, column) for column in results)
        new_state = [*state]
        keep = jnp.asarray(run)
        new_state[position] = adam._replace(count=jnp.where(keep, after, adam.count), mu=mu, nu=nu)
        if callable(rate):
            count = optax.safe_increment(last.count)
            new_state[-1] = last._replace(count=jnp.where(keep, count, last.count))
        return new, tuple(new_state)

    with_one_pass = WithOnePass(tx.init, optax.with_extra_args_support(tx).update)
    with_one_pass.one_pass = OnePass(wins, update)
    return with_one_pass
