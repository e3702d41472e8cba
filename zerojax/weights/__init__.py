"""Weights of any model: loaded from and saved to safetensors files, with tensor names as data.

Start with `load` and `save`. Parameters, or their shapes and shardings, and `Names` come in; arrays
or files come out, and the host holds one shard at a time. In reading order:

- `names`: the tensors of each parameter. `arrangement`: which elements of a tensor become which
  elements of a parameter. `tree`: a model's arrays by path.
- `loader`, `reader`: parameters from files. `saver`, `writer`: files from parameters. Both use
  `shards` (devices to host and back), `strides` (blocks within a file) and `cast`.
"""

from zerojax.weights.loader import load as load
from zerojax.weights.names import Names as Names
from zerojax.weights.names import Tensor as Tensor
from zerojax.weights.saver import save as save
