"""flash_attn's differentiable functions on torch tensors: `from fa2_numba.torch import ...`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

try:
    import torch
except ImportError as error:
    raise ImportError(
        "fa2_numba.torch needs PyTorch, which is not installed here: pip install torch. "
        "fa2_numba.flash_attn_func and flash_attn_backward work without it"
    ) from error
from torch.autograd.function import FunctionCtx

from fa2_numba import gradients, interface
from fa2_numba.checks import check_flag
from fa2_numba.errors import (
    ArgumentError,
    ArgumentTypeError,
    TorchArgumentError,
    TorchArgumentTypeError,
)
from fa2_numba.ladder import refuse_without_backward
from fa2_numba.simulator import Simulator


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    rung: str = "auto",
    machine: str | Simulator = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact attention whose gradients with respect to q, k and v autograd can ask for.

    The arguments are those of `fa2_numba.flash_attn_func`, on CPU or CUDA tensors.

    deterministic: whether the gradient of q must be the same, bit by bit, in every run; all else
    always is.
    rung: an id of `ladder.RUNGS`, for both passes; where a gradient will be wanted it must be one
    that has a backward pass. With "auto" each pass takes the highest rung that runs on the device.

    Returns out like q; with return_attn_probs (out, lse, S_dmask), as `fa2_numba.flash_attn_func`.
    Gradients flow through out alone, and there are no gradients of gradients. Where no gradient
    will be wanted nothing is kept; else q, k, v, out and lse are. Nothing is cast, under
    torch.autocast either. Kernels run on torch's current stream, those of the backward pass on the
    one on which the forward pass ran.

    Raises `TorchArgumentError`, both a ValueError and a RuntimeError, or `TorchArgumentTypeError`,
    both a TypeError and a RuntimeError, before any launch.
    """
    tensors = {"q": q, "k": k, "v": v}
    forward = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "rung": rung,
        "machine": machine,
    }
    with _torch_errors():
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
                raise ArgumentTypeError(f"{name}: a {kind}; must be a torch tensor")
        check_flag("deterministic", deterministic)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
        if wanted:
            refuse_without_backward(rung)
        results = _FlashAttention.apply(q, k, v, forward, wanted)
    return results if return_attn_probs else results[0]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: dict[str, object],
        wanted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, lse, dropped = interface.flash_attn_func(q, k, v, **options, return_attn_probs=True)
        ctx.mark_non_differentiable(lse, dropped)
        ctx.set_materialize_grads(False)
        if wanted:
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = options
        return out, lse, dropped

    @staticmethod
    def backward(ctx: FunctionCtx, dout: torch.Tensor | None, *_: None) -> tuple:
        found = None, None, None
        if dout is not None:
            found = _Gradients.apply(dout, *ctx.saved_tensors, ctx.options)
        return *found, None, None


class _Gradients(torch.autograd.Function):
    """The backward pass as a function that autograd sees, so that it can refuse a second one."""

    @staticmethod
    def forward(ctx: FunctionCtx, dout: torch.Tensor, *arguments: object) -> tuple:
        *tensors, options = arguments
        options = {name: value for name, value in options.items() if name != "dropout_p"}
        # What autograd has computed may be negated lazily; kernels see memory as it is.
        dout = dout.resolve_neg()
        # Of a sum it is one number for all, which kernels would copy element by element.
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        with _torch_errors():
            return gradients.flash_attn_backward(dout, *tensors, **options)

    @staticmethod
    def backward(ctx: FunctionCtx, *_: object) -> None:
        raise NotImplementedError(
            "a gradient of flash_attn_func's gradients is wanted; they cannot be differentiated"
        )


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Refusals as the classes of them that are RuntimeErrors too."""
    try:
        yield
    except ArgumentError as error:
        raise TorchArgumentError(*error.args) from None
    except ArgumentTypeError as error:
        raise TorchArgumentTypeError(*error.args) from None
