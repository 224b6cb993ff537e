"""Exercises that check themselves: `check(id, answer)` and `hint(id, number)`.

Those of a lesson are in the module of its number, as `EXERCISES`.
"""

from fa2_numba.lessons.exercises.exercise import (
    Exercise,
    ExerciseError,
    NotSolved,
    all_exercises,
    check,
    find,
    hint,
)

__all__ = ["Exercise", "ExerciseError", "NotSolved", "all_exercises", "check", "find", "hint"]
