"""Weights of any model: loaded from and saved to safetensors files, with tensor names as data."""

from zerojax.weights.in_memory import rearranged as rearranged
from zerojax.weights.loader import load as load
from zerojax.weights.names import Names as Names
from zerojax.weights.names import Tensor as Tensor
from zerojax.weights.saver import save as save
