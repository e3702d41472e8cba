"""Launch variables of a Ray Train worker, whose environment has none."""

from __future__ import annotations

import socket
import sys
from typing import Any


def ray_train_variables() -> dict[str, str]:
    """Returns the variables that `zerojax launch` would set; {} outside of Ray Train's workers.

    All workers call this function equally often: worker 0 broadcasts the address of the
    coordinator.
    """
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return {}
    try:
        context = train.get_context()
        count, index = context.get_world_size(), context.get_world_rank()
    except RuntimeError:
        return {}  # the program that starts the workers
    if not count or count == 1:
        return {}
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    with socket.socket() as listener:
        listener.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"
    return {
        "ZEROJAX_COORDINATOR": broadcast_from_rank_zero(address if index == 0 else None),
        "ZEROJAX_NUM_PROCESSES": str(count),
        "ZEROJAX_PROCESS_ID": str(index),
        "ZEROJAX_LOCAL_PROCESSES": str(context.get_local_world_size()),
        "ZEROJAX_LOCAL_PROCESS_ID": str(context.get_local_rank()),
    }
