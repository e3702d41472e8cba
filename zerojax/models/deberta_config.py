"""Sizes and options of DeBERTa v2 and v3."""

import dataclasses
from typing import Any

from zerojax.models.checks import dropout_rates, even_heads, one_of, positive_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebertaConfig:
    """The sizes and options of a DeBERTa, by Hugging Face's names.

    `dtype=None` computes in the parameters' dtype; LayerNorm's statistics, the softmax and the
    logits are always in fp32. `scan` stacks the blocks' parameters into `[L, ...]` leaves and
    compiles one block, not L; with a convolution, the first block is not stacked. `remat` saves
    only each block's input and recomputes the rest in the backward pass. `hugging_face` is as in
    `GPTConfig`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    max_relative_positions: int = -1  # below 1: max_position_embeddings
    position_buckets: int = 256  # below 1: a bucket for each distance
    pos_att_type: tuple[str, ...] = ("c2p", "p2c")  # empty: no relative positions
    share_att_key: bool = True  # positions use the content's projections
    norm_rel_ebd: str = "layer_norm"  # or "none"
    position_biased_input: bool = False  # adds absolute positions
    type_vocab_size: int = 0
    conv_kernel_size: int = 0
    conv_act: str = "gelu"
    layer_norm_eps: float = 1e-7
    initializer_range: float = 0.02
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    num_labels: int = 2
    scan: bool = False
    remat: bool = False
    dtype: Any = None
    hugging_face: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        positive_sizes(
            self,
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("intermediate_size", "max_position_embeddings", "num_labels"),
        )
        even_heads(self, "hidden_size", "num_attention_heads")
        dropout_rates(self, "hidden_dropout_prob", "attention_probs_dropout_prob")
        one_of(self, "norm_rel_ebd", "layer_norm", "none")
        one_of(self, "conv_act", "gelu", "tanh")
        one_of(self, "pos_att_type", (), ("c2p",), ("p2c",), ("c2p", "p2c"), ("p2c", "c2p"))
        if self.conv_kernel_size and self.conv_kernel_size % 2 == 0:
            raise ValueError(
                f"DebertaConfig.conv_kernel_size must be odd, or 0 for no convolution, not "
                f"{self.conv_kernel_size}"
            )

    @property
    def span(self) -> int:
        """Span S: the table of 2 S positions has a row for each distance from -S to S - 1."""
        return self.position_buckets if self.position_buckets > 0 else self.farthest

    @property
    def farthest(self) -> int:
        """Distance at which the last bucket ends."""
        if self.max_relative_positions > 0:
            return self.max_relative_positions
        return self.max_position_embeddings


# Numbers of parameters with two classes; Hugging Face's `microsoft/deberta-v2-xlarge` (He et al.
# report 900M) has 884,593,152 without the head.
SIZES: dict[str, dict[str, Any]] = {
    "deberta-tiny": dict(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, position_buckets=8, conv_kernel_size=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "deberta-mini": dict(
        vocab_size=1024, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=256, max_position_embeddings=128, position_buckets=32, conv_kernel_size=3,
        type_vocab_size=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.05,
    ),
    "deberta-v2-xlarge": dict(
        vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24,
        intermediate_size=6144, conv_kernel_size=3,
    ),  # 886,957,058
}  # fmt: skip
