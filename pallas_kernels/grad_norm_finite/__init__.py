from pallas_kernels.grad_norm_finite.api import NormFinite as NormFinite
from pallas_kernels.grad_norm_finite.api import grad_norm_finite as grad_norm_finite
