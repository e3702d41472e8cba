"""Forms of calls of two processes, between threads that stand for them."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
from groups import LIMIT

from zerojax.distributed.call_agreement import CallAgreement
from zerojax.distributed.coordinator import Coordinator


class Shared(Coordinator):
    """A coordinator whose thread is not started, and whose texts both processes share."""

    def __init__(self, me: int, texts: dict[tuple[str, int, int], str]) -> None:
        super().__init__()
        self.me, self.count, self.texts = me, 2, texts
        self.looks: list[Any] = []

    def publish(self, topic: str, text: str, number: int = 0) -> None:
        self.texts[topic, number, self.me] = text

    def collect(self, topic: str, number: int = 0) -> dict[int, str]:
        texts = {i: self.texts.get((topic, number, i)) for i in range(2)}
        return {i: text for i, text in texts.items() if text is not None}

    def wait(self, topic: str, number: int, process: int, seconds: float) -> str | None:
        while process not in self.collect(topic, number):
            time.sleep(0.01)
        return self.texts[topic, number, process]

    def delete(self, topic: str, number: int) -> None:
        pass

    def every(self, look: Any, *, offline: bool = False) -> None:
        self.looks.append(look)


def test_the_next_round_waits_for_the_one_that_the_thread_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 0 changes its form at call 2, process 1 at call 3, before its thread has compared."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    texts: dict[tuple[str, int, int], str] = {}
    both = [Shared(me, texts) for me in range(2)]
    agreements = [CallAgreement("step", LIMIT, this) for this in both]

    def agree(process: int, *shapes: str) -> None:
        for each in shapes:
            agreements[process].agree({"batch['x']": each, "batch['y']": "int32[8]"})

    with ThreadPoolExecutor(2) as threads:
        begun = threads.submit(agree, 0, "8"), threads.submit(agree, 1, "8", "8")
        for each in begun:
            each.result(LIMIT)
        first = threads.submit(agree, 0, "9")
        (look,) = both[1].looks
        while ("forms of step", 2, 1) not in texts:
            look()
        second = threads.submit(agree, 1, "9")
        while not second.done():
            look()
            time.sleep(0.01)
        said = r"at call 2: batch\['x'\] is 9 in process 0, 8 in process 1\. All processes run"
        for told in (first, second):
            with pytest.raises(ValueError, match=said):
                told.result(LIMIT)
    assert ("forms of step", 3, 1) not in texts
