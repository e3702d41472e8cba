"""ViT in flax linen, with a head for classes of images.

An image is split into square patches, which a dense layer embeds; a class token comes first.
Learned positions, pre-LayerNorm blocks, exact GELU, biases everywhere. Sources: Dosovitskiy et al.
2020, ViT (arXiv:2010.11929), and Hugging Face, whose names the config and the blocks have.

>>> model, images = ViTClassifier(ViTConfig(**SIZES["vit-tiny"])), jnp.ones((8, 3, 16, 16))
>>> variables = jax.eval_shape(model.init, jax.random.key(0), images)            # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, images)
ShapeDtypeStruct(shape=(8, 2), dtype=float32)

Shapes: B batch, C num_channels, N patches, P patch_size, T = N + 1, D hidden_size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import run_blocks
from zerojax.models.config import Sizes
from zerojax.models.encoder_layers import (
    BlocksConfig,
    DenseGelu,
    SelfAttention,
    dense,
    hidden_dropout,
    layer_norm,
)
from zerojax.models.loss import widen


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(BlocksConfig):
    """Sizes and options of a ViT, by Hugging Face's names; images and patches are square."""

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("image_size", "patch_size", "num_channels")
        if self.image_size % self.patch_size:
            self.reject("image_size", f"be a multiple of patch_size = {self.patch_size}")

    @property
    def patches_per_side(self) -> int:
        """The square root of N."""
        return self.image_size // self.patch_size


SIZES: Sizes = {
    "vit-tiny": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4,
    ),
    "vit-base-patch16-224": dict(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
    ),
}  # fmt: skip


class Embeddings(nn.Module):
    """Images [B, C, H, W] -> [B, T, D]."""

    config: ViTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        c = self.config
        init, side = nn.initializers.truncated_normal(c.initializer_range), c.patches_per_side
        token = self.param("cls_token", init, (1, 1, c.hidden_size))
        positions = self.param("position_embeddings", init, (1, side**2 + 1, c.hidden_size))
        dtype = c.dtype or token.dtype
        embed = nn.DenseGeneral(
            c.hidden_size, axis=(-3, -2, -1), dtype=c.dtype, kernel_init=init,
            name="patch_embeddings",
        )  # fmt: skip
        x = embed(split(pixel_values, c).astype(dtype))
        tokens = jnp.broadcast_to(token.astype(dtype), (len(x), 1, c.hidden_size))
        x = jnp.concatenate([tokens, x], axis=1) + positions.astype(dtype)
        return hidden_dropout(c, self.deterministic)(x)


class Output(nn.Module):
    """[B, T, ...] -> [B, T, D], the end of a branch."""

    config: ViTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        return hidden_dropout(c, self.deterministic)(dense(c.hidden_size, c, "dense")(x))


class Attention(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    config: ViTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fields = (self.config, self.deterministic)
        return Output(*fields, name="output")(SelfAttention(*fields, name="attention")(x, None))


class Block(nn.Module):
    """Attention, then an MLP. The second argument and result are `nn.scan`'s."""

    config: ViTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        c, fields = self.config, (self.config, self.deterministic)
        x = x + Attention(*fields, name="attention")(layer_norm(c, "layernorm_before")(x))
        h = layer_norm(c, "layernorm_after")(x)
        h = DenseGelu(c, c.intermediate_size, name="intermediate")(h)
        return x + Output(*fields, name="output")(h), None


class Encoder(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    config: ViTConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, fields = self.config, (self.config, self.deterministic)
        layers = range(c.num_hidden_layers)
        return run_blocks(
            Block, fields, x, layers=layers, name="layer", scan=c.scan, remat=c.remat
        )[0]


class ViT(nn.Module):
    """Images [B, C, H, W] -> features [B, D] of the class token."""

    config: ViTConfig
    deterministic: bool = True

    @nn.compact
    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        fields = (self.config, self.deterministic)
        x = Embeddings(*fields, name="embeddings")(pixel_values)
        x = Encoder(*fields, name="encoder")(x)
        return layer_norm(self.config, "layernorm")(x[:, 0])


class ViTClassifier(nn.Module):
    """Images [B, C, H, W] -> logits [B, num_labels] in fp32 or wider.

    `deterministic=False` needs `rngs={"dropout": key}`.
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, pixel_values: jax.Array, deterministic: bool = True) -> jax.Array:
        x = ViT(self.config, deterministic, name="vit")(pixel_values)
        return widen(dense(self.config.num_labels, self.config, "classifier")(x))


def split(images: jax.Array, c: ViTConfig) -> jax.Array:
    """Splits images [B, C, H, W] into patches [B, N, C, P, P], row by row.

    Raises:
      ValueError: The images have other sizes than the config.
    """
    wanted = (c.num_channels, c.image_size, c.image_size)
    if images.shape[1:] != wanted:
        raise ValueError(
            f"pixel_values are {[*images.shape]}, but num_channels and image_size of the config "
            f"need {['B', *wanted]}: resize the images"
        )
    side, patch = c.patches_per_side, c.patch_size
    x = images.reshape(-1, c.num_channels, side, patch, side, patch)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(-1, side**2, c.num_channels, patch, patch)
