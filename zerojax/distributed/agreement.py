"""A turn that all processes choose together, in loops that run in lockstep."""

from __future__ import annotations

import contextlib
import threading

import jax

from zerojax.xla import compat

_PATIENCE = 600_000  # ms; a wait that took so long begins again


class Agreement:
    """One process asks at any moment, and all processes learn so before the same turn.

    A turn is a call of :meth:`reached`, of which every process makes the same number. The chosen
    turn is the first that no process has begun when it hears of the question; until all have told
    where they are, :meth:`reached` waits.

    Args:
      name: Of the question; every process makes its agreements of one name in the same order.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """

    def __init__(self, name: str) -> None:
        self._client, me = compat.coordination(), jax.process_index()
        earlier = len(self._client.key_value_dir_get(f"zerojax/{name}/{me}/"))
        self._client.key_value_set(f"zerojax/{name}/{me}/{earlier}", "")
        self._key = f"zerojax/{name} {earlier}/"
        self._turns = 0
        self._chosen: int | None = None
        self._choosing = threading.Lock()
        threading.Thread(target=self._listen, name=f"zerojax {name}", daemon=True).start()

    def ask(self) -> None:
        """Asks all processes; from a signal handler too."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
            self._client.key_value_set(f"{self._key}asked", "", allow_overwrite=True)

    def reached(self) -> bool:
        """Begins a turn, and tells whether it is the chosen one or a later one."""
        with self._choosing:
            self._turns += 1
            return self._chosen is not None and self._turns >= self._chosen

    def close(self) -> None:
        """Makes no further turns; the others need not wait for this process."""
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told before
            self._client.key_value_set(f"{self._key}turns/{jax.process_index()}", str(self._turns))

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job is over
            self._wait("asked")
            with self._choosing:
                self._tell()
                turns = [int(self._wait(f"turns/{i}")) for i in range(jax.process_count())]
                self._chosen = max(turns) + 1

    def _wait(self, key: str) -> str:
        while True:
            try:
                word: str = self._client.blocking_key_value_get(self._key + key, _PATIENCE)
                return word
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
