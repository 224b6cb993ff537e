"""Timings on a GPU; see README.md."""
