"""The thread that runs the checks among the processes."""

import threading

from zerojax.distributed.coordinator import Coordinator


def test_checks_run_until_the_script_ends() -> None:
    this, called, order = Coordinator(), threading.Event(), list[str]()

    def look() -> float:
        order.append("look")
        if order.count("look") == 3:
            called.set()
        return 0.01

    def idle() -> float:
        order.append("idle")
        return 3600.0

    this.every(look)
    this.every(idle)
    this.every(never)
    this.forget(never)
    this.start()
    assert called.wait(60)
    before = order.count("idle")
    this.leave()
    assert not this.is_alive()
    assert before == 1
    assert order[-4:].count("idle") == 2, "all checks look at the end, due or not"


def never() -> float:
    raise AssertionError
