"""Which collectives a step has, and where they stand."""

from zerojax.collectives.insert import Inserter as Inserter
from zerojax.collectives.shard import Shard as Shard
