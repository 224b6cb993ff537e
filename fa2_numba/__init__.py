"""FlashAttention-2 in Numba CUDA: exact attention kernels to read, run, step and measure."""

from importlib import import_module

_PUBLIC = {
    "flash_attn_func": "fa2_numba.interface",
    "flash_attn_backward": "fa2_numba.gradients",
    "RUNGS": "fa2_numba.ladder",
    "Simulator": "fa2_numba.simulator",
    "simulate": "fa2_numba.simulator",
    "Report": "fa2_numba.simulator",
    "Stepper": "fa2_numba.simulator.stepper",
    "attention_forward": "fa2_numba.reference",
    "attention_backward": "fa2_numba.reference",
    "ArgumentError": "fa2_numba.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    """Import a public name on first use: the doctor runs even where Numba cannot be imported."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fa2_numba' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
