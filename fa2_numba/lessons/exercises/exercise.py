"""What an exercise is, where it is found, and how an answer is judged."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from fa2_numba.simulator import SimulationError, ThreadError

PACKAGE = __package__
ID = re.compile(r"(\d\d)\.[a-z]\w*")
HINTS = 3


class _InWords:
    """A notebook shows such an error without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class ExerciseError(_InWords, ValueError):
    """There is no such exercise or hint."""


class NotSolved(_InWords, AssertionError):
    """What is wrong with an answer, in words."""


@dataclass(frozen=True)
class Exercise:
    """One task of a lesson.

    id: lesson and name, "07.split_q". answer: the name that the student's function has, unlike any
    other exercise's. points: in grading. hints: three, from a nudge to nearly the answer.
    judge(answer): returns if the answer is right, and raises NotSolved, or lets an error of the
    answer through, if it is not. It uses the simulator alone, so that it says the same everywhere.
    """

    id: str
    answer: str
    points: int
    hints: tuple[str, str, str]
    judge: Callable[[object], None]

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.id):
            raise ValueError(f"id={self.id!r}: must be like '07.split_q'")
        if self.points < 1:
            raise ValueError(f"points={self.points!r}: must be at least 1")
        if len(self.hints) != HINTS or not all(self.hints):
            raise ValueError(f"hints of {self.id}: must be {HINTS} texts")

    @property
    def grade_id(self) -> str:
        """The id as nbgrader allows it: "07-split_q"."""
        return self.id.replace(".", "-")


def all_exercises() -> Iterator[Exercise]:
    """Every exercise of the course, in its order."""
    package = import_module(PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("lesson_"):
            yield from import_module(f"{PACKAGE}.{module.name}").EXERCISES


def find(id: str) -> Exercise:
    """The exercise of this id; ExerciseError with the ids there are."""
    lesson = ID.fullmatch(id) if isinstance(id, str) else None
    module = f"{PACKAGE}.lesson_{lesson[1]}" if lesson else ""
    if module and find_spec(module):
        for exercise in import_module(module).EXERCISES:
            if exercise.id == id:
                return exercise
    known = ", ".join(exercise.id for exercise in all_exercises())
    raise ExerciseError(f"no exercise {id!r}: must be one of {known}")


def check(id: str, answer: object) -> None:
    """Judge an answer: print that it is right, or raise NotSolved with what is wrong in words."""
    exercise = find(id)
    try:
        exercise.judge(answer)
    except Exception as error:
        raise NotSolved(
            f'{id}: {_in_words(error)}\nHelp: hint("{id}", 1), then 2, then 3.'
        ) from error
    print(f"{id}: right. {exercise.points} point{'s' * (exercise.points != 1)}.")


def hint(id: str, number: int) -> None:
    """Print hint 1, 2 or 3 of an exercise; each says more than the one before."""
    hints = find(id).hints
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= HINTS:
        raise ExerciseError(f"number={number!r}: must be 1 to {HINTS}")
    print(hints[number - 1])


def _in_words(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, NotSolved):
        return f"not yet. {error}"
    # In a kernel the simulator says which thread came to it.
    if isinstance(error, NotImplementedError) or isinstance(error.__cause__, NotImplementedError):
        return "not written yet."
    if isinstance(error, SimulationError) and not isinstance(error, ThreadError):
        return f"the simulator refuses what a GPU would punish. {kind}: {error}"
    return f"your code fails. {kind}: {error}"
