"""Hugging Face's Trainer API over ``@zero``: arguments, training loop, callbacks.

See :class:`Trainer`.
"""

from zerojax.trainer.arguments import TrainingArguments as TrainingArguments
from zerojax.trainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
from zerojax.trainer.callbacks import TrainerCallback as TrainerCallback
from zerojax.trainer.callbacks import TrainerControl as TrainerControl
from zerojax.trainer.callbacks import TrainerState as TrainerState
from zerojax.trainer.loop import Trainer as Trainer
from zerojax.trainer.loop import TrainOutput as TrainOutput
from zerojax.trainer.losses import causal_lm_loss as causal_lm_loss
from zerojax.trainer.losses import classification_loss as classification_loss
from zerojax.trainer.predictions import EvalPrediction as EvalPrediction
from zerojax.trainer.predictions import PredictionOutput as PredictionOutput
