"""Copies by the Tensor Memory Accelerator: one thread starts them, an mbarrier knows when they end.

A tensor map says where a tensor of four axes lies, and how large a box of it a copy takes; what of
a box is outside the tensor is read as zeros, and not written. Boxes lie in shared memory as rows of
64 elements, swizzled (`wgmma.swizzled`). (PTX ISA 8.x, "cp.async.bulk" and "cp.async.bulk.tensor".)
"""

from __future__ import annotations

from numba.cuda.types import int32, int64

from fa2_numba.device.instruction import Barrier, Map, instruction

COORDINATES = {f"c{axis}": int32 for axis in range(4)}
"""Of a box's first element: column (head dim), row (sequence), head, batch element."""


@instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{destination}], [{tensor_map}, {{{c0}, {c1}, {c2}, {c3}}}], [{barrier}];",
    memory=True,
    destination=int32,
    tensor_map=Map(),
    **COORDINATES,
    barrier=Barrier(),
)
def tma_load_4d(destination, tensor_map, c0, c1, c2, c3, barrier):
    """Start to copy a box to shared memory; when it is there, the barrier is brought its bytes."""


@instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
    "[{tensor_map}, {{{c0}, {c1}, {c2}, {c3}}}], [{source}];",
    memory=True,
    tensor_map=Map(),
    **COORDINATES,
    source=int32,
)
def tma_store_4d(tensor_map, c0, c1, c2, c3, source):
    """Start to copy a box from shared memory to the tensor."""


@instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{destination}], [{source}], {size}, [{barrier}];",
    memory=True,
    destination=int32,
    source=int64,
    size=int32,
    barrier=Barrier(),
)
def bulk_load(destination, source, size, barrier):
    """Start to copy so many bytes, a multiple of 16, from global to shared memory."""


@instruction("cp.async.bulk.commit_group;", memory=True)
def bulk_commit_group():
    """The stores that this thread has started since the last commit become one group."""


@instruction("cp.async.bulk.wait_group.read 0;", memory=True)
def bulk_wait_group_read_0():
    """Wait until this thread's stores have read shared memory, which may then be overwritten."""


@instruction(
    "fence.proxy.tensormap::generic.acquire.gpu [{tensor_map}], 128;",
    memory=True,
    tensor_map=Map(),
)
def fence_tensor_map(tensor_map):
    """A map that was written as ordinary global memory is there for this thread's copies."""
