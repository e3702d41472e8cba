"""Translation of the YAML that `accelerate config` writes into a DeepSpeed JSON.

Start with `translate.translate`, which returns a `Translation`: the JSON, the treatment of each key
of the YAML, and the problems. `keys` has the table of the keys, those without effect as one.
"""

from zerojax.config.accelerate.keys import KEYS as KEYS
from zerojax.config.accelerate.keys import SECTIONS as SECTIONS
from zerojax.config.accelerate.translate import Translation as Translation
from zerojax.config.accelerate.translate import read_checked as read_checked
from zerojax.config.accelerate.translate import translate as translate
