"""A word from any process to all of them, at any moment."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable

import jax

from zerojax.xla import compat

_CLOSED = "closed"
_PATIENCE = 600_000  # ms; a wait that took so long begins again


class Broadcast:
    """One word that any process sends and a thread of each hears, whatever their main threads do.

    Args:
      name: Of the broadcast; every process makes those of one name in the same order.
      heard: Called with the word, in a thread of its own, in all processes.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """

    def __init__(self, name: str, heard: Callable[[str], None]) -> None:
        self._client, self._heard = compat.coordination(), heard
        mine = f"zerojax/{name}/{jax.process_index()}/"
        number = len(self._client.key_value_dir_get(mine))
        self._client.key_value_set(f"{mine}{number}", "")
        self._key = f"zerojax/{name} {number}/"
        self._thread = threading.Thread(target=self._listen, name=f"zerojax {name}", daemon=True)
        self._thread.start()
        # A thread that waits for the coordinator while Python ends would abort the process.
        atexit.register(self.close)

    def send(self, word: str) -> None:
        """Sends the word; only the first of all processes does. From a signal handler too."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
            if self._client.key_value_increment(f"{self._key}sent", 1) == 1:
                for process in range(jax.process_count()):
                    self._tell(process, f" {word}")

    def wait(self, key: str) -> str:
        """The word under a key of this broadcast, once a process sets it.

        Raises:
          JaxRuntimeError: The coordinator is gone.
        """
        while True:
            try:
                word: str = self._client.blocking_key_value_get(self._key + key, _PATIENCE)
                return word
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def set(self, key: str, word: str) -> None:
        """Sets the word under a key of this broadcast; the first word stays."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(self._key + key, word)

    def words(self, folder: str) -> list[str]:
        """The words under all keys that begin so, which end in "/".

        Raises:
          JaxRuntimeError: The coordinator is gone.
        """
        return [word for _, word in self._client.key_value_dir_get(self._key + folder)]

    def close(self) -> None:
        """Hears no more."""
        atexit.unregister(self.close)
        if self._thread.is_alive():  # not in a process that was forked
            self._tell(jax.process_index(), _CLOSED)
            self._thread.join(5)

    def _tell(self, process: int, word: str) -> None:
        self.set(f"to/{process}", word)

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job is over
            word = self.wait(f"to/{jax.process_index()}")
            if word != _CLOSED:
                self._heard(word[1:])
