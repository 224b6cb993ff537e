"""The main job, `python -m fa2_numba`: every rung on what a real language model attends with.

`options` reads the command line, `problem` loads Q, K and V, `check` runs and judges the rungs,
`heads` and `plot` show where the heads look, `timing` measures on a GPU, `report` prints.
"""
