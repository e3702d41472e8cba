"""The last lines of a training script: metrics on the screen and in files, the model card."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from zerojax.api import Zero
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import TrainerState
from zerojax.xla.types import PyTree


class ScriptMethods(ABC):
    """Methods of ``Trainer`` that scripts of transformers call; files have transformers' names."""

    args: TrainingArguments
    state: TrainerState
    zero: Zero

    @abstractmethod
    def _abstract(self) -> PyTree:
        """Returns the shapes of the training state."""

    def is_world_process_zero(self) -> bool:
        """Returns whether this process speaks and writes for all."""
        return jax.process_index() == 0

    def is_local_process_zero(self) -> bool:
        """Returns whether this process is the first on its host."""
        return self.args.local_process_index == 0

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Prints metrics, a line each, in process 0.

        Args:
          split: "train", "eval" or "test".
          metrics: Numbers by name.
        """
        if not self.is_world_process_zero():
            return
        shown = {k: formatted(k, v) for k, v in self._with_epoch(metrics).items()}
        width, digits = max(map(len, shown)), max(map(len, shown.values()))
        print(f"***** {split} metrics *****")
        for name, value in sorted(shown.items()):
            print(f"  {name:<{width}} = {value:>{digits}}")

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Writes ``SPLIT_results.json`` to ``output_dir``, in process 0.

        Args:
          split: "train", "eval", "test" or "all".
          metrics: Numbers by name.
          combined: Whether ``all_results.json`` is updated, too.
        """
        if not self.is_world_process_zero():
            return
        found, folder = self._with_epoch(metrics), Path(self.args.output_dir)
        _write(folder / f"{split}_results.json", found)
        if combined:
            path = folder / "all_results.json"
            _write(path, (json.loads(path.read_text()) if path.exists() else {}) | found)

    def save_state(self) -> None:
        """Writes ``trainer_state.json`` to ``output_dir``, in process 0: steps, epochs, logs."""
        if self.is_world_process_zero():
            flags = {"is_world_process_zero": True, "is_local_process_zero": True}
            state = dataclasses.asdict(self.state) | flags
            _write(Path(self.args.output_dir, "trainer_state.json"), state)

    def create_model_card(
        self,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        **others: object,
    ) -> None:
        """Writes a model card, ``README.md``, to ``output_dir``, in process 0.

        The card has the arguments that were passed, the last evaluation, and the plan of the state:
        what each device stored.

        Args:
          model_name: The title; by default the name of ``output_dir``.
          finetuned_from: The model that training started from.
          tasks: What the model does.
          dataset_tags, dataset: The data.
          **others: Further entries of the metadata, such as ``language`` and ``license``.
        """
        if not self.is_world_process_zero():
            return
        head: dict[str, object] = {
            "base_model": finetuned_from, "datasets": _listed(dataset_tags or dataset),
            "pipeline_tag": _listed(tasks), "library_name": "zerojax", **others,
        }  # fmt: skip
        given = {k: v for k, v in head.items() if v}
        scores = [x for x in self.state.log_history if any(k.startswith("eval_") for k in x)]
        arguments = {k: v for k, v in self.args.to_dict().items() if k in self.args.given}
        lines = [
            "---", *(f"{k}: {json.dumps(v, default=str)}" for k, v in given.items()), "---", "",
            f"# {model_name or Path(self.args.output_dir).resolve().name}", "",
            *([f"Fine-tuned from {finetuned_from}.", ""] if finetuned_from else []),
            *([f"Data: {', '.join(_listed(dataset))}.", ""] if dataset else []),
            f"{self.state.global_step} updates, {self.state.epoch:.2f} epochs, with zerojax on "
            f"{self.zero.mesh.size} devices.", "",
            "## Results", "",
            *(["| metric | value |", "| --- | ---: |",
               *(f"| {k} | {formatted(k, v)} |" for k, v in scores[-1].items()), ""]
              if scores else ["No evaluation.", ""]),
            "## Arguments", "", "| argument | value |", "| --- | --- |",
            *(f"| {k} | {json.dumps(v, default=str)} |" for k, v in sorted(arguments.items())), "",
            "## What each device stored", "", "```",
            repr(self.zero.plan(self._abstract())), "```", "",
        ]  # fmt: skip
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        Path(self.args.output_dir, "README.md").write_text("\n".join(lines))

    def push_to_hub(self, *_: object, **__: object) -> NoReturn:
        """Refuses, as zerojax has no client of a hub.

        Raises:
          NotImplementedError: Always; the message says how to push.
        """
        raise NotImplementedError(
            "push_to_hub: zerojax has no client of a hub: write the folder with save_model() and "
            "create_model_card(), and run `hf upload REPOSITORY FOLDER`"
        )

    def _with_epoch(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"epoch": self.state.epoch, **metrics}


def formatted(name: str, value: Any) -> str:
    """Formats a metric as transformers does: ``*_runtime`` as a time, numbers to four digits.

    Example:
      >>> formatted("train_runtime", 3725.4), formatted("eval_loss", 0.123456), formatted("n", 3)
      ('1:02:05.40', '0.1235', '3')
    """
    if name.endswith("_runtime"):
        minutes, seconds = divmod(value, 60)
        hours, minutes = divmod(int(minutes), 60)
        hundredths = math.floor(seconds * 100) / 100
        return f"{hours}:{minutes:02}:{hundredths:05.2f}"
    return str(round(value, 4)) if isinstance(value, float) else str(value)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4, sort_keys=True, default=float))
