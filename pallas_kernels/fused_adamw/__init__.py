from pallas_kernels.fused_adamw.api import AdamWResult as AdamWResult
from pallas_kernels.fused_adamw.api import fused_adamw as fused_adamw
