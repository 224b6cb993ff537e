"""Benchmarks that measure something else."""

from . import Mutant

TURNS = "    for _ in range(30):\n        for kernel in (mine, peer):\n"
ONE_BY_ONE = "    for kernel in (mine, peer):\n        for _ in range(30):\n"

MUTANTS = {
    "11.compare": (
        Mutant(
            "no synchronisation",
            (
                ("start.record()", "begin = gpu.seconds()"),
                ("            stop.record()\n            stop.synchronize()\n", ""),
                ("gpu.elapsed_ms(start, stop)", "1000 * (gpu.seconds() - begin)"),
            ),
            "0.005 ms .*A launch returns at once",
        ),
        Mutant("an event that is not waited for", (("stop.synchronize()", "pass"),), "synchronize"),
        Mutant(
            "the stop before the launch",
            (
                ("            stop.record()\n", ""),
                (
                    "            start.record()\n",
                    "            start.record()\n            stop.record()\n",
                ),
            ),
            "A launch returns at once",
        ),
        Mutant("cold", (("range(50)", "range(0)"),), "cold ones"),
        Mutant("compiled, but cold", (("range(50)", "range(1)"),), "cold ones"),
        Mutant("zeros", (("gpu.normal()", "gpu.zeros()"),), "Its input was zeros"),
        Mutant(
            "a mean",
            (
                (
                    "np.median(times[mine]), np.median(times[peer])",
                    "np.mean(times[mine]), np.mean(times[peer])",
                ),
            ),
            "a mean does not forgive",
        ),
        Mutant(
            "one after the other", ((TURNS, ONE_BY_ONE),), "not measured under the same conditions"
        ),
        Mutant("seconds", (("append(gpu", "append(0.001 * gpu"),), "Or are these seconds"),
        Mutant(
            "the wrong way round",
            (
                (
                    "np.median(times[mine]), np.median(times[peer])",
                    "np.median(times[peer]), np.median(times[mine])",
                ),
            ),
            "The time of mine is",
        ),
        Mutant(
            "a ratio",
            (
                (
                    "return np.median(times[mine]), np.median(times[peer])",
                    "return np.median(times[mine]) / np.median(times[peer])",
                ),
            ),
            "must be .ms of mine, ms of peer.",
        ),
        Mutant("one run", (("range(30)", "range(1)"),), "GPU|ratio"),
        Mutant(
            "nothing",
            (
                (
                    "return np.median(times[mine]), np.median(times[peer])",
                    "return float('nan'), float('nan')",
                ),
            ),
            "is nan ms",
        ),
    )
}
