"""Translation of the YAML that `accelerate config` writes into a DeepSpeed JSON.

Start with `translate.translate`, which returns a `Translation`: the JSON, the treatment of each key
of the YAML, and the problems. `check` checks values by the table in `keys`; `fsdp` translates what
is for `distributed_type: FSDP`.
"""

from zerojax.config.accelerate.check import SECTIONS as SECTIONS
from zerojax.config.accelerate.check import is_accelerate as is_accelerate
from zerojax.config.accelerate.check import read_checked as read_checked
from zerojax.config.accelerate.keys import KEYS as KEYS
from zerojax.config.accelerate.translate import translate as translate
from zerojax.config.accelerate.translation import Translation as Translation
