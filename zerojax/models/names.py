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
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zerojax.api import Zero
from zerojax.models import gpt, llama
from zerojax.models.attention import planned_attention
from zerojax.models.config import ModelConfig, remat_option
from zerojax.models.tensor_parallel import TensorParallel

_Model = TypeVar("_Model")


@dataclass(frozen=True)
class Decoder(Generic[_Model]):
    """A decoder of known sizes."""

    model: Callable[..., _Model]
    config: type[ModelConfig]
    sizes: dict[str, Any]

    def __call__(
        self,
        seq: int = 0,
        remat: bool = True,
        scan: bool = True,
        zero: Zero | None = None,
        attention: str = "auto",
        remat_policy: str | None = None,
    ) -> _Model:
        sizes = self.sizes | {"block_size": max(seq, self.sizes["block_size"])}
        tensor = TensorParallel.of(zero.mesh) if zero else None
        fused = planned_attention(zero, attention, tensor.sharded_heads if tensor else None)
        return self.model(
            self.config(**sizes, remat=remat_option(remat, remat_policy), scan=scan),
            sequence=zero.sequence if zero else None,
            tensor=tensor,
            **{"attention": fused} if fused else {},
        )


def _gpt(name: str) -> Decoder[gpt.GPT]:
    return Decoder(gpt.GPT, gpt.GPTConfig, gpt.SIZES[name])


def _llama(name: str) -> Decoder[llama.Llama]:
    return Decoder(llama.Llama, llama.LlamaConfig, llama.SIZES[name])


mini = _gpt("mini")  # 1.3 million, byte-level: of examples/run_clm
gpt2 = _gpt("small")  # 124 million
gpt2_medium = _gpt("medium")  # 355 million
gpt2_large = _gpt("large")  # 774 million
gpt2_xl = _gpt("gpt2-xl")  # 1.56 billion
llama_7b = _llama("llama-7b")  # 6.74 billion
llama_13b = _llama("llama-13b")  # 13.0 billion
llama_30b = _llama("llama-30b")  # 32.5 billion
llama_65b = _llama("llama-65b")  # 65.3 billion
llama3_8b = _llama("llama3-8b")  # 8.03 billion, with grouped queries
llama_70b = _llama("llama-70b")  # 69.0 billion, with grouped queries
