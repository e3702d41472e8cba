"""A disk store that tells what happens to which key."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.offload.disk.store import DiskStore


class WatchedStore(DiskStore):
    """Calls ``on_event(event, key)``; events are "read issued" and "write issued"."""

    def __init__(
        self, nvme_path: str | Path, on_event: Callable[[str, str], None], *, buffer_count: int = 2
    ) -> None:
        super().__init__(nvme_path, buffer_count=buffer_count)
        self._on_event = on_event

    def write(self, key: str, data: Any) -> Future[None]:
        self._on_event("write issued", key)
        return super().write(key, data)

    def read(self, key: str) -> Future[np.ndarray]:
        self._on_event("read issued", key)
        return super().read(key)
