"""Sizes and options of BART and BlenderBot."""

import dataclasses
from typing import Any

from zerojax.models.checks import dropout_rates, even_heads, positive_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig:
    """Sizes and options of a BART by Hugging Face's names, or of a BlenderBot with `BLENDERBOT`.

    `dtype=None` computes in the parameters' dtype; LayerNorm's statistics, the softmax, the logits
    and the loss are always in fp32. `scan` stacks the blocks' parameters into `[L, ...]` leaves and
    compiles one block, not L. `remat` saves only each block's input and recomputes the rest in the
    backward pass. `hugging_face` is as in `GPTConfig`.
    """

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    max_position_embeddings: int
    normalize_before: bool = False  # norms are at the start of each branch, not after the sum
    normalize_embedding: bool = True
    add_final_layer_norm: bool = False
    position_offset: int = 2  # unused rows at the start of the table of positions
    add_logits_bias: bool = False  # a bias that no gradient changes
    scale_embedding: bool = False  # multiplies token embeddings by sqrt(D)
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    encoder_layerdrop: float = 0.0  # the probability that a block is skipped
    decoder_layerdrop: float = 0.0
    init_std: float = 0.02
    pad_token_id: int = 1
    eos_token_id: int = 2
    decoder_start_token_id: int = 2
    scan: bool = False
    remat: bool = False
    dtype: Any = None
    hugging_face: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        positive_sizes(
            self,
            *("vocab_size", "d_model", "encoder_layers", "decoder_layers"),
            *("encoder_attention_heads", "decoder_attention_heads"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"),
        )
        even_heads(self, "d_model", "encoder_attention_heads")
        even_heads(self, "d_model", "decoder_attention_heads")
        dropout_rates(self, "dropout", "attention_dropout", "activation_dropout")
        dropout_rates(self, "encoder_layerdrop", "decoder_layerdrop")


BLENDERBOT: dict[str, Any] = dict(
    normalize_before=True, normalize_embedding=False, add_final_layer_norm=True, position_offset=0,
    scale_embedding=True, pad_token_id=0, decoder_start_token_id=1,
)  # fmt: skip


def _size(layers: tuple[int, int], heads: int, width: int, **other: Any) -> dict[str, Any]:
    return dict(
        encoder_layers=layers[0], decoder_layers=layers[1], d_model=width,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
    ) | other  # fmt: skip


# Numbers of parameters; the second config is Hugging Face's `facebook/blenderbot-400M-distill`.
SIZES: dict[str, dict[str, Any]] = {
    "blenderbot-tiny": _size(
        (2, 2), 4, 32, vocab_size=96, max_position_embeddings=24, dropout=0.0, **BLENDERBOT
    ),
    "blenderbot-400m": _size(
        (2, 12), 32, 1280, vocab_size=8008, max_position_embeddings=128, **BLENDERBOT
    ),  # 364,802,560
    "bart-large": _size(
        (12, 12), 16, 1024, vocab_size=50265, max_position_embeddings=1024
    ),  # 406,291,456
}
