"""Words that the processes of a job tell each other."""

from collections.abc import Callable
from typing import Any

import jax

from zerojax.distributed.exchange import ProcessesMissing, exchange


def talk(process: int) -> tuple[list[list[str]], str]:
    told = [exchange("a greeting", f"{process} at {turn}") for turn in range(3)]
    told.append(exchange("a farewell", str(process)))
    missing = ""
    if process == 1:
        try:
            exchange("the last words", "here", 0.2)
        except ProcessesMissing as error:
            missing = str(error)
    exchange("the end", "")
    return told, missing


def test_everyone_hears_everyone(in_processes: Callable[..., list[Any]]) -> None:
    for process, (told, missing) in enumerate(in_processes(4, talk)):
        assert told[:3] == [[f"{each} at {turn}" for each in range(4)] for turn in range(3)]
        assert told[3] == ["0", "1", "2", "3"]
        which = "the last words: processes 0, 2, 3 did not arrive within 0.2 s"
        assert missing == (which if process == 1 else "")


def test_the_only_process() -> None:
    assert jax.process_count() == 1
    assert exchange("a greeting", "hello") == ["hello"]
