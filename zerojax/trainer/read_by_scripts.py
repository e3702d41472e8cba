"""Values that training scripts read from their arguments: processes, batch sizes, JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax

from zerojax.checkpoint.processes import LONGEST
from zerojax.distributed.exchange import exchange
from zerojax.distributed.launched import launched


class ReadByScripts:
    """The part of ``TrainingArguments`` that scripts read and Trainer does not."""

    per_device_train_batch_size: Any
    given: frozenset[str]

    @property
    def world_size(self) -> int:
        """The number of devices, each of which has rows of its own."""
        return jax.device_count()

    @property
    def n_gpu(self) -> int:
        """The number of devices of this process."""
        return jax.local_device_count()

    @property
    def process_index(self) -> int:
        """The index of this process."""
        return jax.process_index()

    @property
    def local_process_index(self) -> int:
        """The index of this process on its host; 0 where the launcher does not state it."""
        me = launched(os.environ) if jax.process_count() > 1 else None
        return 0 if me is None else me.local_index or 0

    @property
    def should_log(self) -> bool:
        """True in the process that speaks for all."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """True in the process that writes files."""
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        """Rows of a micro-batch of this process's devices."""
        return int(self.per_device_train_batch_size) * self.n_gpu

    def get_process_log_level(self) -> int:
        """Returns the level of ``logging``: INFO in process 0, WARNING in others."""
        return logging.INFO if self.should_log else logging.WARNING

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs the block in one process first, and in the others once it has finished there.

        Args:
          local: Whether one process of each host is first; otherwise process 0.
          desc: A name for messages.

        Raises:
          TimeoutError: The first process did not finish within 20 minutes.
        """
        is_first = (self.local_process_index if local else self.process_index) == 0
        if not is_first:
            exchange(desc, "", LONGEST)
        try:
            yield
        finally:
            if is_first:
                exchange(desc, "", LONGEST)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments by name, as values of a JSON."""
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in vars(self).items()
            if name != "given"
        }

    def to_json_string(self) -> str:
        """Returns the arguments as a JSON."""
        return json.dumps(self.to_dict(), indent=2)
