"""Named workloads other than language models, for `zerojax plan --model deberta-v2-xlarge`.

`pyproject.toml` lists them as entry points of the group `zerojax.models`. Each trains with dropout,
with a new mask in each step, and takes `zero`, `rows`, `seq` (tokens in a row), and, with the
meaning that `zerojax.models.names` describes, `remat`, `remat_policy` and `scan`.

>>> import zerojax
>>> task = blenderbot_400m(zerojax.zero(stage=2), rows=200, seq=128)
>>> {name: leaf.shape for name, leaf in task.batch.items()}
{'input_ids': (200, 128), 'attention_mask': (200, 128), 'labels': (200, 64)}
"""

import dataclasses
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import optax
from flax import linen

from zerojax.api import Zero
from zerojax.models import bart, deberta
from zerojax.models.config import remat_option
from zerojax.trace.gradients import weighted_mean
from zerojax.tuning.workload import Trained, Workload, trained
from zerojax.xla.types import PyTree


def classification(
    size: str,
    zero: Zero,
    rows: int,
    seq: int = 128,
    remat: bool = True,
    scan: bool = True,
    remat_policy: str | None = None,
) -> Workload:
    """Returns the training of a DeBERTa that classifies texts, or pairs, of `seq` tokens."""
    kept = remat_option(remat, remat_policy)
    config = deberta.DebertaConfig(**deberta.SIZES[size], remat=kept, scan=scan)
    model = deberta.DebertaClassifier(config)

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        logits = model.apply(
            {"params": params}, batch["input_ids"], batch["attention_mask"],
            deterministic=False, rngs={"dropout": key},
        )  # fmt: skip
        return cast(
            jax.Array,
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(),
        )

    batch = _tokens(rows, seq) | {"labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    init = partial(_params, model, jnp.zeros((1, 8), jnp.int32))
    return _workload(trained(zero, init, loss), batch, seq)


def seq2seq(
    size: str,
    zero: Zero,
    rows: int,
    seq: int = 128,
    remat: bool = True,
    scan: bool = True,
    remat_policy: str | None = None,
) -> Workload:
    """Returns the training of a BART on sources of `seq` and targets of `seq / 2` tokens."""
    sizes = bart.SIZES[size]
    longest = max(seq, sizes["max_position_embeddings"])
    sizes = sizes | {"max_position_embeddings": longest}
    config = bart.BartConfig(**sizes, remat=remat_option(remat, remat_policy), scan=scan)
    model, target = bart.Bart(config), max(1, seq // 2)

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        labels = batch["labels"]
        losses: PyTree = model.apply(
            {"params": params}, batch["input_ids"], bart.shifted(labels, config),
            batch["attention_mask"], targets=labels, deterministic=False, rngs={"dropout": key},
        )  # fmt: skip
        return weighted_mean(losses, labels != config.pad_token_id)

    batch = _tokens(rows, seq) | {"labels": jax.ShapeDtypeStruct((rows, target), jnp.int32)}
    tokens = jnp.zeros((1, 8), jnp.int32)
    init = partial(_params, model, tokens, tokens)
    work = _workload(trained(zero, init, loss), batch, seq + target)
    return dataclasses.replace(work, model=model)


def _workload(functions: Trained, batch: dict[str, jax.ShapeDtypeStruct], tokens: int) -> Workload:
    rows, key = batch["input_ids"].shape[0], jax.eval_shape(lambda: jax.random.key(0))
    return Workload(*functions, batch, tokens=rows * tokens, args=(key,))


def _params(model: linen.Module, *inputs: jax.Array) -> PyTree:
    *tokens, key = inputs
    return model.init(key, *tokens)["params"]


def _tokens(rows: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    return {"input_ids": shape, "attention_mask": shape}


deberta_v2_xlarge: partial[Workload] = partial(
    classification, "deberta-v2-xlarge"
)  # 887 million parameters
blenderbot_400m: partial[Workload] = partial(seq2seq, "blenderbot-400m")  # 365 million
