"""A message from any process to all processes, at any moment."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable

import jax

from zerojax.xla import compat

_CLOSED = "closed"
_PATIENCE = 600_000  # ms; a wait that took as long is started again


class Broadcast:
    """One message from any process to a thread of every process, whatever the main threads do.

    Args:
      name: Name of the broadcast; every process creates broadcasts of one name in the same order.
      heard: Called with the message, in a separate thread, in all processes.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """

    def __init__(self, name: str, heard: Callable[[str], None]) -> None:
        self._client, self._heard = compat.coordination(), heard
        prefix = f"zerojax/{name}/{jax.process_index()}/"
        number = len(self._client.key_value_dir_get(prefix))
        self._client.key_value_set(f"{prefix}{number}", "")
        self._key = f"zerojax/{name} {number}/"
        self._thread = threading.Thread(target=self._listen, name=f"zerojax {name}", daemon=True)
        self._thread.start()
        # A thread that waits for the coordinator while Python ends would abort the process.
        atexit.register(self.close)

    def send(self, word: str) -> None:
        """Sends the message unless another process was first; signal handlers may call it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
            if self._client.key_value_increment(f"{self._key}sent", 1) == 1:
                for process in range(jax.process_count()):
                    self._tell(process, f" {word}")

    def wait(self, key: str) -> str:
        """Waits until a process sets a key of this broadcast, and returns the message.

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
        """Sets the message under a key of this broadcast; a key keeps its first message."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(self._key + key, word)

    def words(self, folder: str) -> list[str]:
        """Returns the messages under all keys that begin with ``folder``, which ends in "/".

        Raises:
          JaxRuntimeError: The coordinator is gone.
        """
        return [word for _, word in self._client.key_value_dir_get(self._key + folder)]

    def close(self) -> None:
        """Stops listening."""
        atexit.unregister(self.close)
        if self._thread.is_alive():  # a forked process does not have the thread
            self._tell(jax.process_index(), _CLOSED)
            self._thread.join(5)

    def _tell(self, process: int, word: str) -> None:
        self.set(f"to/{process}", word)

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job is over
            word = self.wait(f"to/{jax.process_index()}")
            if word != _CLOSED:
                self._heard(word[1:])
