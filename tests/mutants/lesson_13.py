"""Cursors that wait for what is not yet, or never, there."""

from . import Mutant

ROUND = "number // stages"
PARITY = "(lap + producer) % 2"

MUTANTS = {
    "13.parity": (
        Mutant("both begin alike", ((PARITY, "lap % 2"),), "refuses .* BarrierError"),
        Mutant("the other way round", ((PARITY, "(lap + 1 - producer) % 2"),), "refuses"),
        Mutant("changes with every chunk", ((ROUND, "number"),), "refuses"),
        Mutant("never changes", ((ROUND, "0"),), "refuses"),
        Mutant("changes with every second round", ((ROUND, "number // (2 * stages)"),), "refuses"),
        Mutant(
            "one stage only",
            (("number % stages", "0 * number"), (ROUND, "number")),
            "use 1 of 2 stages: must use each",
        ),
        Mutant("past the ring", (("number % stages", "number"),), "must be 0 to 0"),
        Mutant("a round, not its parity", ((PARITY, "lap + producer"),), "parity .* 0 to 1"),
        Mutant("stage alone", ((f"number % stages, {PARITY}", "number % stages"),), "two integers"),
    ),
}
