from pallas_kernels.activations.api import bias_gelu as bias_gelu
from pallas_kernels.activations.api import swiglu as swiglu
