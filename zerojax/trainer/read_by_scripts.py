"""Values that training scripts read from their arguments: processes, batch sizes, JSON."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from zerojax.checkpoint.processes import LONGEST
from zerojax.distributed.exchange import exchange
from zerojax.distributed.launched import launched
from zerojax.trainer.other_arguments import OTHERS, their_default


class ParallelMode(enum.Enum):
    """The values of transformers' ``ParallelMode`` that a run can have."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"


class ReadByScripts:
    """The part of ``TrainingArguments`` that scripts read and Trainer does not."""

    per_device_train_batch_size: Any
    given: frozenset[str]
    others: Mapping[str, object]

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            """Returns an argument of transformers that has no effect here, as given or default."""
            others = vars(self).get("others", {})
            if name in others:
                return others[name]
            if name in OTHERS:
                return their_default(name)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", obj=self)

    @property
    def device(self) -> jax.Device:
        """The first device of this process."""
        return jax.local_devices()[0]

    @property
    def parallel_mode(self) -> ParallelMode:
        """The mode of a run on several devices, or on one."""
        several = self.world_size > 1
        return ParallelMode.DISTRIBUTED if several else ParallelMode.NOT_PARALLEL

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
        """True in process 0, which logs and writes files."""
        return self.process_index == 0

    local_rank, should_save = local_process_index, should_log

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
            if name not in ("given", "others")
        }

    def to_json_string(self) -> str:
        """Returns the arguments as a JSON."""
        return json.dumps(self.to_dict(), indent=2)
