"""Models by name, for `zerojax plan --model gpt2-xl` and `estimate --model 7b`.

`pyproject.toml` lists them as entry points of the group `zerojax.models`. Each takes `seq` (tokens
in a row), `remat` (a block keeps its input only) and `scan` (the blocks' parameters are stacked,
and one block is compiled in place of all). A longer `seq` stretches GPT-2's table of positions;
Llama has no such table.

>>> gpt2_xl(seq=2048).config.block_size
2048
>>> llama_7b().config.scan
True
"""

from zerojax.models import gpt, llama
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama, LlamaConfig


def mini(seq: int = 128, remat: bool = True, scan: bool = True) -> GPT:
    """1.3 million parameters, byte-level: the model of the main job."""
    return _gpt("mini", seq, remat, scan)


def gpt2(seq: int = 1024, remat: bool = True, scan: bool = True) -> GPT:
    """124 million parameters."""
    return _gpt("small", seq, remat, scan)


def gpt2_medium(seq: int = 1024, remat: bool = True, scan: bool = True) -> GPT:
    """355 million parameters."""
    return _gpt("medium", seq, remat, scan)


def gpt2_large(seq: int = 1024, remat: bool = True, scan: bool = True) -> GPT:
    """774 million parameters."""
    return _gpt("large", seq, remat, scan)


def gpt2_xl(seq: int = 1024, remat: bool = True, scan: bool = True) -> GPT:
    """1.56 billion parameters."""
    return _gpt("gpt2-xl", seq, remat, scan)


def llama_7b(seq: int = 2048, remat: bool = True, scan: bool = True) -> Llama:
    """6.74 billion parameters."""
    return _llama("llama-7b", seq, remat, scan)


def llama_13b(seq: int = 2048, remat: bool = True, scan: bool = True) -> Llama:
    """13.0 billion parameters."""
    return _llama("llama-13b", seq, remat, scan)


def llama_30b(seq: int = 2048, remat: bool = True, scan: bool = True) -> Llama:
    """32.5 billion parameters."""
    return _llama("llama-30b", seq, remat, scan)


def llama_65b(seq: int = 2048, remat: bool = True, scan: bool = True) -> Llama:
    """65.3 billion parameters."""
    return _llama("llama-65b", seq, remat, scan)


def llama_70b(seq: int = 4096, remat: bool = True, scan: bool = True) -> Llama:
    """69.0 billion parameters, with grouped queries."""
    return _llama("llama-70b", seq, remat, scan)


def _gpt(name: str, seq: int, remat: bool, scan: bool) -> GPT:
    size = gpt.SIZES[name]
    longest = {"block_size": max(seq, size["block_size"])}
    return GPT(GPTConfig(**size | longest, remat=remat, scan=scan))


def _llama(name: str, seq: int, remat: bool, scan: bool) -> Llama:
    size = llama.SIZES[name]
    longest = {"block_size": max(seq, size["block_size"])}
    return Llama(LlamaConfig(**size | longest, remat=remat, scan=scan))
