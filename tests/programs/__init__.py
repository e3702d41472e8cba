"""Training programs as users write them, each with what comes of it, by name."""

from programs import (
    adapters,
    basic,
    basic_nnx,
    generative,
    guards,
    language,
    layouts,
    losses,
    optimizers,
    reinforcement,
    reused,
    sequences,
    shapes,
    stacks,
    tables,
    teachers,
    vision,
)
from programs.program import ROWS, Kind, Outcome, Program

FAMILIES = (
    basic,
    basic_nnx,
    vision,
    language,
    generative,
    teachers,
    reinforcement,
    optimizers,
    adapters,
    losses,
    guards,
    shapes,
    stacks,
    tables,
    reused,
    sequences,
    layouts,
)
PROGRAMS = {program.name: program for family in FAMILIES for program in family.PROGRAMS}

__all__ = ["PROGRAMS", "ROWS", "Kind", "Outcome", "Program"]
