"""Training programs as users write them, each with what comes of it, by name."""

from programs import (
    generative,
    guards,
    language,
    losses,
    optimizers,
    reinforcement,
    shapes,
    tables,
    teachers,
    vision,
)
from programs.program import ROWS, Kind, Outcome, Program

FAMILIES = (
    vision,
    language,
    generative,
    teachers,
    reinforcement,
    optimizers,
    losses,
    guards,
    shapes,
    tables,
)
PROGRAMS = {program.name: program for family in FAMILIES for program in family.PROGRAMS}

__all__ = ["PROGRAMS", "ROWS", "Kind", "Outcome", "Program"]
