"""Training programs that know nothing of zerojax, to be run plain and decorated.

Each is what a flax user writes: a state, a step, batches. Sizes are multiples of 8 where the
case does not say otherwise, so that eight devices can share each leaf.
"""

from cases import linen, nnx
from cases.case import ROWS as ROWS
from cases.case import STEPS as STEPS
from cases.case import Case as Case
from cases.case import cast as cast
from cases.linen import megatron_specs as megatron_specs

CASES: dict[str, Case] = {case.name: case for case in (*linen.CASES, *nnx.CASES)}

# Their parameters carry the user's own PartitionSpecs over a mesh axis called "model".
PARTITIONED: dict[str, Case] = {case.name: case for case in (*linen.PARTITIONED, *nnx.PARTITIONED)}
