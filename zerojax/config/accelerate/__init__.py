"""The YAML that `accelerate config` writes, as a DeepSpeed JSON."""

from zerojax.config.accelerate.check import check as check
from zerojax.config.accelerate.check import is_accelerate as is_accelerate
from zerojax.config.accelerate.keys import TYPES as TYPES
from zerojax.config.accelerate.translate import translate as translate
from zerojax.config.accelerate.translation import Translation as Translation
from zerojax.config.accelerate.translation import without as without
