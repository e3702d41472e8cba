"""Runs of transformers' Trainer over a small network, recorded: the tests need no torch.

Written by `python tests/trainer/recorded.py` where torch and transformers are installed
(transformers 5.24.0, accelerate 1.15.0 and torch 2.13.0 on a CPU), in fp32. Weights and rows are
drawn, so that both sides draw the same, and are read in order. transformers has one device with
batches of 8 rows, zerojax eight devices with one row each.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILE = Path(__file__).parent / "data" / "transformers.npz"
VOCABULARY, WIDTH, DEVICES = 11, 6, 8


class Case(NamedTuple):
    """A run: its network, its rows, whether they are a stream, and the arguments of both sides."""

    kind: str
    arguments: dict[str, Any]
    rows: int = 32
    stream: bool = False
    evaluated: bool = False


COMMON: dict[str, Any] = dict(
    learning_rate=0.05, weight_decay=0.1, max_steps=4, lr_scheduler_type="constant",
    train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none",
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
_TWICE = {"gradient_accumulation_steps": 2}
_PLATEAU = dict(
    lr_scheduler_type="reduce_lr_on_plateau", learning_rate=0.5, max_steps=6,
    lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 0.1},
    eval_strategy="steps", eval_steps=1,
)  # fmt: skip
CASES: dict[str, Case] = {
    "causal, smoothed": Case("causal", {**_TWICE, "label_smoothing_factor": 0.1}, rows=27),
    "seq2seq, smoothed": Case("seq2seq", {"label_smoothing_factor": 0.2}),
    "classes, smoothed": Case("classes", {**_TWICE, "label_smoothing_factor": 0.1}, rows=27),
    "dropped": Case("classes", {**_TWICE, "dataloader_drop_last": True}, rows=27),
    "stream": Case("classes", _TWICE, rows=27, stream=True),
    "adafactor": Case("classes", {"optim": "adafactor"}),
    "rmsprop, centered": Case(
        "classes",
        {"optim": "rmsprop", "optim_args": "momentum=0.5,centered=True,alpha=0.9,eps=1e-4",
         "learning_rate": 0.01},
    ),
    "adagrad": Case("classes", {"optim": "adagrad"}),
    "sgd": Case("classes", {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"}),
    "plateau": Case("classes", _PLATEAU, evaluated=True),
}  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """The parameters of the network, as flax has them."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, WIDTH), "kernel": (WIDTH, VOCABULARY), "bias": (VOCABULARY,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def rows(kind: str, number: int) -> list[dict[str, Any]]:
    """Rows of a kind of network; the tokens of a row count unequally often."""
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(number):
        row: dict[str, Any] = {"input_ids": rng.integers(0, VOCABULARY, 5)}
        if kind == "classes":
            row["labels"] = int(rng.integers(0, VOCABULARY))
        else:
            counts = np.arange(5) < rng.integers(2, 6)
            row["labels"] = np.where(counts, rng.integers(0, VOCABULARY, 5), -100)
        if kind == "seq2seq":
            row["decoder_input_ids"] = rng.integers(0, VOCABULARY, 5)
        drawn.append(row)
    return drawn


def compute() -> dict[str, np.ndarray]:
    """Losses, learning rates and the final parameters of each run, by name."""
    found: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        logs, params = _trained(case)
        for figure in ("loss", "learning_rate", "eval_loss"):
            values = [log[figure] for log in logs if figure in log]
            if values:
                found[f"{name}.{figure}"] = np.array(values, np.float64)
        found |= {f"{name}.{key}": value for key, value in params.items()}
    return found


def _trained(case: Case) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    import torch
    import transformers
    from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.PretrainedConfig()
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.head = torch.nn.Linear(WIDTH, VOCABULARY)
            given = {name: torch.from_numpy(x) for name, x in weights().items()}
            with torch.no_grad():
                self.embed.weight.copy_(given["embed"])
                self.head.weight.copy_(given["kernel"].T)
                self.head.bias.copy_(given["bias"])

        def forward(
            self, input_ids: Any, decoder_input_ids: Any = None, labels: Any = None, **kwargs: Any
        ) -> Any:
            x = self.embed(input_ids)
            if case.kind == "seq2seq":
                x = self.embed(decoder_input_ids) + x.mean(1, keepdim=True)
            logits = self.head(torch.tanh(x.mean(1) if case.kind == "classes" else x))
            if labels is None:
                return {"logits": logits}
            if case.kind == "causal":
                loss = ForCausalLMLoss(logits, labels, VOCABULARY, **kwargs)
            else:
                loss = fixed_cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **kwargs)
            return {"loss": loss, "logits": logits}

    if case.kind == "causal":  # the Trainer shifts labels by the name of the class and of the loss
        Net.__name__, Net.loss_type = "GPT2LMHeadModel", "ForCausalLM"  # type: ignore[attr-defined]

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(rows(case.kind, case.rows))

    with tempfile.TemporaryDirectory() as folder:
        arguments = {**COMMON, **case.arguments}
        trainer = transformers.Trainer(
            Net(),
            transformers.TrainingArguments(
                folder, per_device_train_batch_size=DEVICES, per_device_eval_batch_size=DEVICES,
                **arguments,
            ),
            train_dataset=Stream() if case.stream else rows(case.kind, case.rows),
            eval_dataset=rows(case.kind, 12) if case.evaluated else None,
        )  # fmt: skip
        trainer.train()
    net = {name: x.detach().numpy() for name, x in trainer.model.state_dict().items()}
    params = {
        "embed": net["embed.weight"],
        "kernel": net["head.weight"].T,
        "bias": net["head.bias"],
    }
    return trainer.state.log_history, params


if __name__ == "__main__":
    np.savez_compressed(FILE, **compute())
    print(FILE, FILE.stat().st_size)
