"""The collectives of a step, and their places in the program."""

from zerojax.collectives.insert import Inserter as Inserter
from zerojax.collectives.shard import Shard as Shard
