"""Weight-only quantization: parameters as int8 or int4 codes with scales, sharded as before.

- ``weights``, to be read first: :func:`quantize_weights` and :func:`dequantize`.
- ``choice``: the arrays that are quantized, and the dimension that shares a scale.

A program holds such weights as codes until an operation uses them, see :mod:`zerojax.trace.late`.
"""

from zerojax.quantize.weights import check_trainable as check_trainable
from zerojax.quantize.weights import dequantize as dequantize
from zerojax.quantize.weights import is_quantized as is_quantized
from zerojax.quantize.weights import quantize_weights as quantize_weights
