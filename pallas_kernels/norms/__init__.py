from pallas_kernels.norms.api import layer_norm as layer_norm
from pallas_kernels.norms.api import rms_norm as rms_norm
