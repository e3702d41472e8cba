"""Eight architectures, in a few lines each, for ``architectures.py``.

Nothing here knows of devices or shards. Parameters arrive in the compute dtype, and every model
computes in theirs. B rows, T positions, D width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from benchmarks.compiled import Program
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama, LlamaConfig

BF16 = jnp.bfloat16
Batch = dict[str, jax.ShapeDtypeStruct]


class StateWithStatistics(TrainState):
    """A train state with the running means of batch normalisation."""

    batch_stats: Any = None


def architecture(
    name: str,
    model: nn.Module,
    loss: Callable[[Any, Any], tuple[jax.Array, Any]],
    batch: Callable[[int], Batch],
    rows: int,
) -> Program:
    """A model's training step with AdamW.

    Args:
      loss: ``(variables, batch) -> (loss, changed variables)``.
      batch: ``rows -> shapes``.
      rows: Rows of one device.
    """

    def create(key: jax.Array) -> StateWithStatistics:
        inputs = [jnp.zeros((1, *x.shape[1:]), x.dtype) for x in batch(1).values()]
        variables = model.init(key, *inputs)
        return StateWithStatistics.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables.get("batch_stats", {}),
            tx=optax.adamw(3e-4),
        )

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def of(params: Any) -> tuple[jax.Array, Any]:
            low = jax.tree.map(lambda x: x.astype(BF16), params)  # for plain jit
            return loss({"params": low, "batch_stats": state.batch_stats}, batch)

        (value, changed), grads = jax.value_and_grad(of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=changed), {"loss": value}

    return Program(
        name, create, train_step, lambda devices: batch(devices * rows), lambda state: state.params
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all models: layers of each stack, width, width of a head, and so on."""

    layers: int = 6
    width: int = 1024
    head: int = 64
    vocabulary: int = 16384
    tokens: int = 512
    image: int = 256
    patch: int = 16
    experts: int = 8
    expert_width: int = 2048
    steps: int = 256
    convolutions: tuple[int, ...] = (3, 4, 6, 3)
    rows: int = 4
    recurrent_rows: int = 16
    image_rows: int = 16


class Block(nn.Module):
    """[B, T, D] -> [B, T, D]: attention to itself, to ``memory`` [B, S, D] if given, and an MLP."""

    width: int
    head: int
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        x = x + self._attention("attention", nn.LayerNorm()(x), None, self.causal)
        if memory is not None:
            x = x + self._attention("cross", nn.LayerNorm()(x), memory, False)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)

    def _attention(
        self, name: str, x: jax.Array, memory: jax.Array | None, causal: bool
    ) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0]) if causal else None
        attend = nn.MultiHeadDotProductAttention(self.width // self.head, name=name)
        return attend(x, memory, mask=mask)


class MoEBlock(nn.Module):
    """[B, T, D] -> [B, T, D]: attention, and experts to which einsums send each row's tokens.

    Each token goes to its best expert, which takes twice its share at most.
    Source: Lepikhin et al. 2020, GShard (arXiv:2006.16668). The second result is ``nn.scan``'s.
    """

    width: int
    head: int
    experts: int
    expert_width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        h = nn.LayerNorm()(x)
        attend = nn.MultiHeadDotProductAttention(self.width // self.head)
        x = x + attend(h, mask=nn.make_causal_mask(x[..., 0]))
        h = nn.LayerNorm()(x)
        init = nn.initializers.normal(0.02)
        into = self.param("into", init, (self.experts, self.width, self.expert_width))
        back = self.param("back", init, (self.experts, self.expert_width, self.width))
        gates = jax.nn.softmax(nn.Dense(self.experts, use_bias=False)(h).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), self.experts)
        place = ((jnp.cumsum(chosen, axis=1) - 1) * chosen).sum(-1).astype(jnp.int32)
        room = 2 * x.shape[1] // self.experts
        send = chosen[..., None] * jax.nn.one_hot(place, room)[:, :, None]  # [B, T, E, room]
        combine = (send * gates[..., None]).astype(x.dtype)
        sent = jnp.einsum("btec,btd->becd", send.astype(x.dtype), h)
        done = jnp.einsum("becf,efd->becd", nn.gelu(jnp.einsum("becd,edf->becf", sent, into)), back)
        return x + jnp.einsum("btec,becd->btd", combine, done), None


class MoE(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V]; scanned and rematerialised blocks."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.sizes
        embed = nn.Embed(s.vocabulary, s.width)
        block = nn.scan(
            nn.remat(MoEBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=s.layers,
        )
        x, _ = block(s.width, s.head, s.experts, s.expert_width)(embed(tokens), None)
        return embed.attend(nn.LayerNorm()(x))


class VisionTower(nn.Module):
    """Images [B, H, W, 3] -> [B, D]; blocks one after the other."""

    sizes: Sizes

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        s = self.sizes
        x = nn.Conv(s.width, (s.patch, s.patch), (s.patch, s.patch))(images.astype(BF16))
        x = x.reshape(x.shape[0], -1, s.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(s.layers):
            x = nn.remat(Block)(s.width, s.head)(x)
        return nn.LayerNorm()(x).mean(1)


class ViT(nn.Module):
    """Images [B, H, W, 3], labels int [B] -> logits [B, 1024]."""

    sizes: Sizes

    @nn.compact
    def __call__(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        return nn.Dense(1024)(VisionTower(self.sizes)(images))


class TextTower(nn.Module):
    """Tokens int [B, T] -> [B, T, D]; looks at ``memory`` [B, S, D] as well, if given."""

    sizes: Sizes
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        s = self.sizes
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(s.layers):
            x = nn.remat(Block)(s.width, s.head, self.causal)(x, memory)
        return nn.LayerNorm()(x)


class EncoderDecoder(nn.Module):
    """Source and target, int [B, T], -> logits [B, T, V]; one embedding for both and the output."""

    sizes: Sizes

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        s = dataclasses.replace(self.sizes, layers=self.sizes.layers // 2)
        embed = nn.Embed(s.vocabulary, s.width)
        memory = TextTower(s, name="encoder")(embed(source))
        return embed.attend(TextTower(s, causal=True, name="decoder")(embed(target), memory))


class CLIP(nn.Module):
    """Images [B, H, W, 3], tokens int [B, T] -> similarities [B, B]."""

    sizes: Sizes

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        s = dataclasses.replace(self.sizes, layers=self.sizes.layers // 2)
        seen = nn.Dense(512)(VisionTower(s)(images))
        read = TextTower(s, causal=True)(nn.Embed(s.vocabulary, s.width)(tokens))[:, -1]
        read = nn.Dense(512)(read)
        seen, read = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (seen, read))
        return seen @ read.T * jnp.exp(self.param("scale", nn.initializers.constant(2.6), ()))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, each with batch normalisation."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def convolved(x: jax.Array, features: int, size: int, stride: int = 1) -> jax.Array:
            x = nn.Conv(features, (size, size), (stride, stride), use_bias=False)(x)
            return nn.BatchNorm(use_running_average=False)(x)

        y = nn.relu(convolved(x, self.features, 1))
        y = nn.relu(convolved(y, self.features, 3, self.stride))
        y = convolved(y, 4 * self.features, 1)
        if y.shape != x.shape:
            x = convolved(x, 4 * self.features, 1, self.stride)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [B, H, W, 3], labels int [B] -> logits [B, 1024]."""

    sizes: Sizes

    @nn.compact
    def __call__(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False)(images.astype(BF16))
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, blocks in enumerate(self.sizes.convolutions):
            for j in range(blocks):
                x = Bottleneck(64 * 2**i, 2 if i and not j else 1)(x)
        return nn.Dense(1024)(x.mean((1, 2)))


class LSTM(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V]: two recurrent layers."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.sizes.vocabulary, self.sizes.width)(tokens)
        for _ in range(2):
            # What is carried is fp32 by default, and all that follows with it.
            y: Any = nn.RNN(nn.OptimizedLSTMCell(self.sizes.width, dtype=BF16))(x)
            x = y.astype(BF16)
        return nn.Dense(self.sizes.vocabulary)(x)


def architectures(s: Sizes) -> list[Program]:
    """All eight."""
    scanned: dict[str, Any] = {"scan": True, "remat": True}
    gpt = GPT(
        GPTConfig(
            vocab_size=s.vocabulary,
            block_size=s.tokens,
            n_layer=s.layers,
            n_head=s.width // s.head,
            n_embd=s.width,
            remat=True,
        )
    )
    llama = Llama(
        LlamaConfig(
            vocab_size=s.vocabulary,
            block_size=s.tokens,
            n_layer=2 * s.layers,
            n_head=s.width // s.head,
            n_kv_head=s.width // s.head // 2,
            n_embd=s.width,
            n_inner=3 * s.width,
            **scanned,
        )
    )
    moe = MoE(dataclasses.replace(s, width=s.width // 2))
    vit, both, clip, resnet = ViT(s), EncoderDecoder(s), CLIP(s), ResNet(s)
    lstm = LSTM(s)
    text, image = s.tokens, s.image

    def rows_of(*names: str) -> Callable[[int], Batch]:
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "tokens": ((text,), jnp.int32),
            "target": ((text,), jnp.int32),
            "images": ((image, image, 3), jnp.float32),
            "labels": ((), jnp.int32),
            "series": ((s.steps,), jnp.int32),
        }
        return lambda rows: {
            name: jax.ShapeDtypeStruct((rows, *shapes[name][0]), shapes[name][1]) for name in names
        }

    tokens, seen = rows_of("tokens"), rows_of("images", "labels")
    return [
        architecture("GPT, unrolled", gpt, language(gpt), tokens, s.rows),
        architecture("Llama, scanned", llama, language(llama), tokens, s.rows),
        architecture("MoE, einsum dispatch, scanned", moe, language(moe), tokens, s.rows),
        architecture("ViT, unrolled", vit, labelled(vit), seen, s.image_rows),
        architecture(
            "encoder-decoder, unrolled",
            both,
            translation(both),
            rows_of("tokens", "target"),
            s.rows,
        ),
        architecture(
            "CLIP, two towers",
            clip,
            contrastive(clip),
            rows_of("images", "tokens"),
            s.image_rows,
        ),
        architecture("ResNet, batch statistics", resnet, labelled(resnet), seen, s.image_rows),
        architecture("LSTM, 2 layers", lstm, language(lstm), rows_of("series"), s.recurrent_rows),
    ]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()


def language(model: nn.Module) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """The cross-entropy of the next token; the last position has none."""

    def loss(variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        (tokens,) = batch.values()
        logits: Any = model.apply({"params": variables["params"]}, tokens)
        return _cross_entropy(logits, jnp.roll(tokens, -1, axis=1)), {}

    return loss


def translation(model: nn.Module) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """The cross-entropy of the target's next token, given the source."""

    def loss(variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        source, target = batch["tokens"], batch["target"]
        logits: Any = model.apply({"params": variables["params"]}, source, target)
        return _cross_entropy(logits, jnp.roll(target, -1, axis=1)), {}

    return loss


def labelled(model: nn.Module) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """The cross-entropy of the label, and the batch statistics after it."""

    def loss(variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        inputs = batch["images"], batch["labels"]
        logits, changed = model.apply(variables, *inputs, mutable=["batch_stats"])
        return _cross_entropy(logits, batch["labels"]), changed.get("batch_stats", {})

    return loss


def contrastive(model: nn.Module) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """Each image finds its text among all of the batch, each text its image."""

    def loss(variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        inputs = batch["images"], batch["tokens"]
        similar: Any = model.apply({"params": variables["params"]}, *inputs)
        own = jnp.arange(similar.shape[0])
        return (_cross_entropy(similar, own) + _cross_entropy(similar.T, own)) / 2, {}

    return loss
