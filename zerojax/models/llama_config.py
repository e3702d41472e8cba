"""What a Llama is made of, and the sizes that were published.

>>> config = LlamaConfig(**SIZES["llama-70b"])
>>> config.n_head, config.kv_heads, config.head_size
(64, 8, 128)
"""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """What a Llama is made of. Named as in `GPTConfig`, with Hugging Face's names beside.

    `n_kv_head=None` gives each query head a key and value head of its own. `dtype=None` computes in
    the parameters' own dtype, so bf16 parameters make a bf16 model; RMSNorm's statistics, the
    rotation, the softmax, the logits and the loss are in fp32 whatever it is. `scan` stacks the L
    blocks' parameters to `[L, ...]` leaves and compiles one block, not L. `remat` keeps each
    block's input only and computes the rest again in the backward pass.
    """

    vocab_size: int
    block_size: int  # max_position_embeddings
    n_layer: int  # num_hidden_layers
    n_head: int  # num_attention_heads
    n_embd: int  # hidden_size
    n_inner: int  # intermediate_size
    n_kv_head: int | None = None  # num_key_value_heads
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    scan: bool = False
    remat: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner"):
            _check_size(name, getattr(self, name))
        if self.n_kv_head is not None:
            _check_size("n_kv_head", self.n_kv_head)
        if self.n_embd % (2 * self.n_head):
            raise ValueError(
                f"LlamaConfig.n_embd = {self.n_embd} does not divide into n_head = {self.n_head} "
                "heads of an even size, as the rotation of pairs needs: choose a multiple of "
                f"{2 * self.n_head}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"LlamaConfig.n_head = {self.n_head} does not divide among n_kv_head = "
                f"{self.kv_heads} key and value heads: choose a divisor of n_head"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            known = isinstance(value, int | float) and not isinstance(value, bool)
            if not known or not 0 < value < math.inf:
                raise ValueError(f"LlamaConfig.{name} must be a positive number, not {value!r}")
        for name in ("tie_word_embeddings", "scan", "remat"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"LlamaConfig.{name} must be True or False, not {value!r}")

    @property
    def kv_heads(self) -> int:
        """Key and value heads: n_kv_head, or n_head."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.n_embd // self.n_head


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"LlamaConfig.{name} must be a positive int, not {value!r}")


def _size(
    n_layer: int, n_head: int, n_embd: int, n_inner: int, eps: float = 1e-6, **other: int
) -> dict[str, Any]:
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_inner=n_inner)
    return dict(vocab_size=32000, block_size=2048, rms_norm_eps=eps) | sizes | other


# Parameters; the first for tests, four of Touvron et al. 2023 (arXiv:2302.13971), then the one of
# Llama 2 with grouped queries (arXiv:2307.09288).
SIZES: dict[str, dict[str, Any]] = {
    "llama-tiny": _size(2, 4, 32, 96, vocab_size=256, block_size=32, n_kv_head=2),  # 41k
    "llama-7b": _size(32, 32, 4096, 11008),  # 6.74B
    "llama-13b": _size(40, 40, 5120, 13824),  # 13.0B
    "llama-30b": _size(60, 52, 6656, 17920),  # 32.5B
    "llama-65b": _size(80, 64, 8192, 22016, 1e-5),  # 65.3B
    "llama-70b": _size(80, 64, 8192, 28672, 1e-5, block_size=4096, n_kv_head=8),  # 69.0B
}
