"""What Hopper's own instructions do in the simulator: each by its name, on the units of a block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from greenlet import getcurrent

from fa2_numba.device.instruction import Descriptor, Instruction, Registers
from fa2_numba.device.warpgroups import WARPGROUP_SIZE
from fa2_numba.simulator.bulk_copies import BulkCopies
from fa2_numba.simulator.mbarriers import Mbarriers
from fa2_numba.simulator.products import Products
from fa2_numba.simulator.source import Place
from fa2_numba.simulator.warpgroups import NamedBarriers, Warpgroup

if TYPE_CHECKING:
    from fa2_numba.simulator.engine import Block


class HopperUnits:
    """Barriers, copies and products of one block."""

    def __init__(self, block: Block) -> None:
        self.mbarriers = Mbarriers(block)
        self.named_barriers = NamedBarriers(block)
        self.copies = BulkCopies(block, self.mbarriers)
        count = -(-len(block.threads) // WARPGROUP_SIZE)
        self.warpgroups = [Warpgroup(block, number) for number in range(count)]
        self.products = [Products(block, group.threads) for group in self.warpgroups]

    def land(self) -> bool:
        """A copy arrives; False if none is under way."""
        return self.copies.land()

    def stuck(self) -> Exception | None:
        """Why threads wait for ever at what is here; None if they do not."""
        for group in self.warpgroups:
            if (error := group.stuck()) is not None:
                return error
        return self.mbarriers.stuck() or self.named_barriers.stuck()

    def finish(self) -> None:
        """All threads have left the kernel: nothing may be under way."""
        self.mbarriers.finish()
        self.copies.finish()
        for products in self.products:
            products.finish()


def units() -> HopperUnits:
    """Those of the running thread's block."""
    block = getcurrent().block
    if block.hopper is None:
        block.hopper = HopperUnits(block)
    return block.hopper


def _group() -> int:
    return getcurrent().number // WARPGROUP_SIZE


def _fence_proxy() -> None:
    thread = getcurrent()
    thread.fenced = thread.clock
    thread.clock += 1


BY_THREAD: dict[str, Callable] = {
    "mbarrier_init": lambda place, *a: units().mbarriers.make(*a),
    "fence_mbarrier_init": lambda place: units().mbarriers.fence(),
    "mbarrier_arrive": lambda place, *a: units().mbarriers.arrive(*a),
    "mbarrier_arrive_expect_tx": lambda place, *a: units().mbarriers.arrive(*a),
    "mbarrier_wait": lambda place, address, parity: units().mbarriers.at(address).wait(parity),
    "bar_sync": lambda place, *a: units().named_barriers.arrive(*a, waits=True),
    "bar_arrive": lambda place, *a: units().named_barriers.arrive(*a, waits=False),
    "fence_proxy_async": lambda place: _fence_proxy(),
    "fence_tensor_map": lambda place, tensor_map: None,
    "tma_load_4d": lambda place, to, tensor_map, *rest: units().copies.load_box(
        to, tensor_map, rest[:4], rest[4], place
    ),
    "tma_store_4d": lambda place, tensor_map, *rest: units().copies.store_box(
        tensor_map, rest[:4], rest[4], place
    ),
    "bulk_load": lambda place, *a: units().copies.load_bytes(*a, place),
    "bulk_commit_group": lambda place: units().copies.commit(),
    "bulk_wait_group_read_0": lambda place: units().copies.wait_read(),
}
"""Instruction of one thread -> what it does, given its place and its operands."""


def simulated_hopper(what: Instruction, register_maker: Callable) -> Callable | None:
    """The function that stands for one of Hopper's instructions; None for another one.

    register_maker: makes what takes a block of registers from the arguments of a call.
    """
    if what.name in BY_THREAD:
        return _by_thread(what, BY_THREAD[what.name])
    if what.collective == WARPGROUP_SIZE:
        return _by_warpgroup(what, register_maker)
    return None


def _by_thread(what: Instruction, do: Callable) -> Callable:
    def call(*arguments: object) -> None:
        if len(arguments) != len(what.operands):
            raise TypeError(f"{what.name} takes {len(what.operands)} arguments")
        numbers = tuple(int(a) if hasattr(a, "__index__") else a for a in arguments)
        if (observer := getcurrent().block.observer) is not None:
            observer.hopper_called(what, numbers)
        do(_place(), *numbers)

    call.__name__, call.__doc__ = what.name, what.meaning.__doc__
    return call


def _place() -> Place:
    """The instruction of the kernel that called what called this."""
    frame = sys._getframe(2)
    return frame.f_code, frame.f_lasti


def _by_warpgroup(what: Instruction, register_maker: Callable) -> Callable:
    makers = [
        register_maker(kind) if isinstance(kind, Registers) else lambda given: int(next(given))
        for kind in what.operands.values()
    ]
    act = _action(what)

    def call(*arguments: object) -> None:
        given, place = iter(arguments), _place()
        operands = tuple(make(given) for make in makers)
        if (observer := getcurrent().block.observer) is not None:
            observer.hopper_called(what, operands)
        if what.name == "wgmma_fence":
            getcurrent().registers.fence()
        group, block = _group(), getcurrent().block

        def all_here(values: list) -> None:
            act(units().products[group], values, place)
            if block.observer:
                block.observer.instruction_done(what)

        units().warpgroups[group].meet(what.name, operands, all_here)

    call.__name__, call.__doc__ = what.name, what.meaning.__doc__
    return call


def _action(what: Instruction) -> Callable[[Products, list, Place], None]:
    """What a warpgroup does when all its threads have come."""
    if any(isinstance(kind, Descriptor) for kind in what.operands.values()):
        return lambda products, values, place: products.issue(what, values, place)
    if what.name == "wgmma_commit_group":
        return lambda products, values, place: products.commit()
    if what.name.startswith("wgmma_wait_group"):
        pending = what.meaning()
        return lambda products, values, place: products.wait(pending)
    return lambda products, values, place: None  # fences and register counts
