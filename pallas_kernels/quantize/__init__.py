from pallas_kernels.quantize.api import Quantized as Quantized
from pallas_kernels.quantize.api import dequantize_blockwise as dequantize_blockwise
from pallas_kernels.quantize.api import quantize_blockwise as quantize_blockwise
