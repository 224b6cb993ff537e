"""The rungs: one rung, one file, one idea."""
