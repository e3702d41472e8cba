"""Named models, for `zerojax plan --model gpt2-xl` and `estimate --model 7b`.

`pyproject.toml` lists them as entry points of the group `zerojax.models`. Each takes `seq` (tokens
in a row), `remat` (a block saves only its input), `remat_policy` (a name for
`zerojax.remat_policy`: what a block with `remat` saves in addition), `scan` (the blocks' parameters
are stacked, and one block is compiled in place of all), and `attention`
(`zerojax.models.attention.ASKED`) for the devices of `zero`, whose mesh axis "model" shards the
model. A longer `seq` enlarges GPT-2's table of positions; Llama has no such table.

>>> gpt2_xl(seq=2048).config.block_size
2048
>>> llama_7b().config.scan
True
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from zerojax.api import Zero
from zerojax.models import gpt, llama
from zerojax.models.attention import planned_attention
from zerojax.models.config import ModelConfig, Sizes, remat_option
from zerojax.models.tensor_parallel import TensorParallel

_Model = TypeVar("_Model")


def _decoder(
    model: Callable[..., _Model],
    config: type[ModelConfig],
    sizes: Sizes,
    name: str,
    seq: int = 0,
    remat: bool = True,
    scan: bool = True,
    zero: Zero | None = None,
    attention: str = "auto",
    remat_policy: str | None = None,
) -> _Model:
    size = sizes[name] | {"block_size": max(seq, sizes[name]["block_size"])}
    tensor = TensorParallel.of(zero.mesh) if zero else None
    fused = planned_attention(zero, attention, tensor.sharded_heads if tensor else None)
    return model(
        config(**size, remat=remat_option(remat, remat_policy), scan=scan),
        sequence=zero.sequence if zero else None,
        tensor=tensor,
        **{"attention": fused} if fused else {},
    )


_gpt = partial(_decoder, gpt.GPT, gpt.GPTConfig, gpt.SIZES)
_llama = partial(_decoder, llama.Llama, llama.LlamaConfig, llama.SIZES)
mini: partial[gpt.GPT] = partial(_gpt, "mini")  # 1.3 million, byte-level: of examples/run_clm
gpt2: partial[gpt.GPT] = partial(_gpt, "small")  # 124 million
gpt2_medium: partial[gpt.GPT] = partial(_gpt, "medium")  # 355 million
gpt2_large: partial[gpt.GPT] = partial(_gpt, "large")  # 774 million
gpt2_xl: partial[gpt.GPT] = partial(_gpt, "gpt2-xl")  # 1.56 billion
llama_7b: partial[llama.Llama] = partial(_llama, "llama-7b")  # 6.74 billion
llama_13b: partial[llama.Llama] = partial(_llama, "llama-13b")  # 13.0 billion
llama_30b: partial[llama.Llama] = partial(_llama, "llama-30b")  # 32.5 billion
llama_65b: partial[llama.Llama] = partial(_llama, "llama-65b")  # 65.3 billion
llama3_8b: partial[llama.Llama] = partial(_llama, "llama3-8b")  # 8.03 billion, with grouped queries
llama_70b: partial[llama.Llama] = partial(_llama, "llama-70b")  # 69.0 billion, with grouped queries
