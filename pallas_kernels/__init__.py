"""Fused kernels for NVIDIA GPUs, written with Pallas (Mosaic GPU); independent of zerojax.

Each kernel is one public function with ``implementation=None | "mosaic_gpu" | "xla"``, in a folder:
``api.py``, ``reference.py`` (plain JAX, the definition), ``mosaic_gpu.py`` and ``arguments.py``
(the shapes that tests and benchmark share).
"""

from pallas_kernels.attention import attention as attention
from pallas_kernels.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from pallas_kernels.norms import layer_norm as layer_norm
from pallas_kernels.norms import rms_norm as rms_norm
from pallas_kernels.quantize import Quantized as Quantized
from pallas_kernels.quantize import dequantize_blockwise as dequantize_blockwise
from pallas_kernels.quantize import quantize_blockwise as quantize_blockwise
