"""Known-wrong answers to the exercises of the course: `MUTANTS` in the module of each lesson."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A reference solution with a mistake, and what the judge says of it.

    changes: (text, replacement) pairs; each text stands once in the solution's cell. says: a
    regular expression.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    says: str
