"""An update taken apart gives what the whole of it gives, and any piece where it may be cut."""

import functools
from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import optax
import pytest

from zerojax.hlo.traffic import collectives
from zerojax.offload.separate import Cluster, SeparatedUpdate
from zerojax.optim.loss_scale import LossScale
from zerojax.optim.wrap import wrap

pytestmark = pytest.mark.usefixtures("quick_compile")

SHAPES = ((4, 3), (3,), (5, 2))
Run = Callable[[SeparatedUpdate, Cluster, list[Any], Any], list[Any]]


class Update:
    """``tx`` around parameters of some shapes, as a function of flat gradients, parameters and
    state; and the same taken apart."""

    def __init__(self, tx: Any, shapes: Any = SHAPES, **features: Any) -> None:
        tx, n = wrap(tx, **features), len(shapes)
        params = {f"l{i}": jnp.full(shape, 0.1) for i, shape in enumerate(shapes)}
        leaves, tree = jax.tree.flatten((params, params, tx.init(params)))

        def update(*leaves: Any) -> list[Any]:
            grads, params, state = jax.tree.unflatten(tree, leaves)
            updates, state = tx.update(grads, state, params)
            return jax.tree.leaves((optax.apply_updates(params, updates), state))

        self.update, self.n = update, n
        self.own = [i >= n and x.ndim > 0 for i, x in enumerate(leaves)]
        self.separated = SeparatedUpdate(update, leaves, self.own)
        self.values = leaves

    def apart(self, run: Run, *values: Any) -> list[Any]:
        """The results of the prelude, and of each cluster by ``run`` of its arguments and the
        prelude's scalars."""
        separated = self.separated
        light = [None if own else x for own, x in zip(self.own, values, strict=True)]
        scalars, shared = separated.prelude(light)
        made = dict(zip(separated.shared, shared, strict=True))
        for cluster in separated.clusters:
            outs = run(separated, cluster, [values[i] for i in cluster.inputs], scalars)
            assert not made.keys() & set(cluster.outputs)
            made |= dict(zip(cluster.outputs, outs, strict=True))
        return [made[i] for i in range(len(made))]


def at_once(
    separated: SeparatedUpdate, cluster: Cluster, values: list[Any], scalars: Any
) -> list[Any]:
    return separated.run(cluster.outputs, cluster.inputs, values, scalars)


def in_two(
    separated: SeparatedUpdate, cluster: Cluster, values: list[Any], scalars: Any
) -> list[Any]:
    """Flat halves of unequal size; unsplit where a cluster cannot be cut."""
    if not cluster.elementwise:
        return at_once(separated, cluster, values, scalars)
    flat = [x.reshape(-1) for x in values]
    m = flat[0].size // 2

    def run(piece: list[Any]) -> list[Any]:
        shape = piece[0].shape
        return separated.run(cluster.outputs, cluster.inputs, piece, scalars, shape)

    pieces = [run([x[part] for x in flat]) for part in (slice(m), slice(m, None))]
    return [jnp.concatenate(x).reshape(values[0].shape) for x in zip(*pieces, strict=True)]


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


FP16 = {"loss_scale": LossScale(), "gradient_clipping": 1.0}
# An update, and for each of its clusters whether it can be cut.
UPDATES: dict[str, tuple[Callable[[], Update], list[bool]]] = {
    "adamw": (lambda: Update(optax.adamw(optax.linear_schedule(1e-3, 0, 9)), gradient_clipping=1.0),
              [True] * 3),
    "fp16": (lambda: Update(optax.adamw(1e-3), **FP16), [True] * 3),
    "momentum": (lambda: Update(optax.sgd(0.1, momentum=0.9)), [True] * 3),
    "sgd": (lambda: Update(optax.sgd(0.1)), [True] * 3),
    "lamb": (lambda: Update(optax.lamb(0.1)), [False] * 3),
    "lion": (lambda: Update(optax.lion(0.1)), [True] * 3),
    "clip first": (lambda: Update(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
                   [True] * 3),
    "clip last": (lambda: Update(optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0))),
                  [False]),
    "mask": (lambda: Update(optax.adamw(0.1, mask=matrices)), [True] * 3),
    # Four of them are the statistics that it does not keep, and sets to 0.
    "adafactor": (lambda: Update(optax.adafactor(0.1, min_dim_size_to_factor=2)), [False] * 7),
    # One condition around all of it.
    "multisteps": (lambda: Update(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
                   [False]),
    "noise": (lambda: Update(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(0.1))),
              [False] * 3),
    "injected": (lambda: Update(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)),
                 [True] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_the_parts_make_what_the_whole_makes(name: str) -> None:
    make, cut = UPDATES[name]
    update = make()
    assert [c.elementwise for c in update.separated.clusters] == cut
    for run in (at_once, in_two) if any(cut) else (at_once,):
        parts = functools.partial(update.apart, run)
        assert exact.differing(parts, update.update, *update.values) == []


def test_a_cluster_multiplies_its_shards() -> None:
    def update(grad: Any, param: Any) -> Any:
        return [param - grad * jnp.vdot(param, grad) / jnp.linalg.norm(param.ravel())]

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shards = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    array = jax.ShapeDtypeStruct((3, 16), jnp.float32, sharding=shards)
    separated = SeparatedUpdate(update, [array, array], [False, True])

    def run(*values: Any) -> Any:
        return separated.run((0,), (0, 1), values, ())

    text = jax.jit(run, out_shardings=[shards]).lower(array, array).compile().as_text()
    assert {each.kind for each in collectives(text)} == {"all-reduce"}


def test_alike_clusters_have_one_key() -> None:
    same = Update(optax.adamw(1e-3), ((4, 3),) * 20 + ((3, 4),), gradient_clipping=1.0)
    assert len(same.separated.clusters) == 21
    assert len({c.key for c in same.separated.clusters}) == 2
    # The one decays and the other does not.
    differ = Update(
        optax.adamw(1e-3, mask={"l0": True, "l1": False}, weight_decay=0.1), ((4, 3),) * 2
    )
    assert len({c.key for c in differ.separated.clusters}) == 2


def test_constants_tell_clusters_apart() -> None:
    """Two leaves with the same program but for an array that the optimizer closes over."""
    masks = {"a": jnp.array([1.0, 0.0]), "b": jnp.array([0.0, 1.0])}

    def update(g_a: Any, g_b: Any, p_a: Any, p_b: Any) -> list[Any]:
        return [p_a - masks["a"] * g_a, p_b - masks["b"] * g_b]

    leaf = jax.ShapeDtypeStruct((2,), jnp.float32)
    found = SeparatedUpdate(update, [leaf] * 4, [False, False, True, True])
    assert len({cluster.key for cluster in found.clusters}) == 2
