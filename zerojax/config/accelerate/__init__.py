"""Translation of the YAML that `accelerate config` writes into a DeepSpeed JSON."""

from zerojax.config.accelerate.check import SECTIONS as SECTIONS
from zerojax.config.accelerate.check import is_accelerate as is_accelerate
from zerojax.config.accelerate.check import read_checked as read_checked
from zerojax.config.accelerate.keys import KEYS as KEYS
from zerojax.config.accelerate.translate import translate as translate
from zerojax.config.accelerate.translation import Translation as Translation
from zerojax.config.accelerate.translation import without as without
