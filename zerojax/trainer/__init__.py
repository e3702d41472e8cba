"""Hugging Face's Trainer API over ``@zero``: arguments, training loop, callbacks.

Start with :class:`Trainer` in ``loop``. A model, arguments and datasets come in; checkpoints, logs
and metrics come out. In reading order:

- ``arguments``, with ``other_arguments`` (those without effect, or refused): the settings.
  ``resolved``: the DeepSpeed config from them. ``optimizer``, ``optimizer_names``: the optimizer.
- ``loop``: the training loop. ``callbacks``: hooks, and when an event is due.
- ``model``: linen and NNX models alike. ``initial_state``: new parameters, or the user's.
  ``losses``: the interface of loss functions; ready ones are in ``zerojax.models.losses``.
- ``data``: rows and batches, of lists and streams. ``order``: the order of the rows. ``limits``:
  checks of batches. ``partial``: an epoch's last update.
- ``evaluation``: evaluations and predictions. ``run_folder``: checkpoints. ``saved_model``: the
  folders of ``save_model``.
- ``reports``: logs, monitors and lines. ``screen``: the terminal. ``picture``: the end of a run.
"""

from zerojax.models.losses import causal_lm_loss as causal_lm_loss
from zerojax.models.losses import classification_loss as classification_loss
from zerojax.models.losses import seq2seq_loss as seq2seq_loss
from zerojax.trainer.arguments import TrainingArguments as TrainingArguments
from zerojax.trainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
from zerojax.trainer.callbacks import TrainerCallback as TrainerCallback
from zerojax.trainer.callbacks import TrainerControl as TrainerControl
from zerojax.trainer.callbacks import TrainerState as TrainerState
from zerojax.trainer.evaluation import EvalPrediction as EvalPrediction
from zerojax.trainer.evaluation import PredictionOutput as PredictionOutput
from zerojax.trainer.loop import Trainer as Trainer
from zerojax.trainer.loop import TrainOutput as TrainOutput
