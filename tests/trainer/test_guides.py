"""A guide's arguments with its file, verbatim, train a small GPT on eight devices."""

import math
from pathlib import Path

import pytest
from trainer.jobs import CONFIG, TOKENS
from trainer.test_resolved import GUIDES, printed

from zerojax import Trainer, TrainingArguments
from zerojax.models.gpt import GPT
from zerojax.trainer import causal_lm_loss

pytestmark = pytest.mark.usefixtures("quick_compile")
NAME = "trainer_zero3_bf16"


@pytest.mark.slow
def test_a_guide_trains(tmp_path: Path) -> None:
    arguments, _ = GUIDES[NAME]
    args = TrainingArguments(str(tmp_path), deepspeed=printed(NAME), **arguments)
    trainer = Trainer(GPT(CONFIG), args, train_dataset=TOKENS * 2, loss=causal_lm_loss)
    out = trainer.train()
    assert out.global_step == 3 * math.ceil(150 / trainer.epochs.batch)
    assert abs(out.training_loss - math.log(64)) < 0.1
    assert trainer.zero.config.compute_dtype == ("bf16" if args.bf16 else "fp16")
