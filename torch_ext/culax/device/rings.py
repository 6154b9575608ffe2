"""A ring of stages in shared memory that one warp fills by bulk and TMA copies and one warpgroup reads by wgmma.

Each stage has two barriers: `full`, one arrival with the bytes of all its copies, and `empty`, one arrival a reading
warp. A reader arrives at `empty` only when the wgmma groups that read the stage have completed, so the copies that
refill it cannot overtake them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from culax.device import bulk

READERS = 4
"""Warps that read."""


@dataclass(frozen=True)
class Ring:
    """`stages` barriers each, one behind the other."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr

    def acquire(self, state: pipeline.PipelineState) -> None:
        """The loading warp waits until the stage has been read."""
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)

    def ready(self, state: pipeline.PipelineState) -> None:
        """A reading warp waits until the stage is filled, spinning: what follows is urgent."""
        bulk.wait(self.full + state.index, state.phase)

    def release(self, state: pipeline.PipelineState) -> None:
        """A reading warp is done with the stage; its wgmma groups that read it must have completed.

        One lane arrives for all, behind a barrier of the warp: elect_one alone puts the others' reads in no order.
        """
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + state.index)


def allocate_ring(memory: cutlass.memory.SmemAllocator, stages: int) -> Ring:
    """The barriers of `stages` stages, not set up yet."""
    start = bulk.allocate_barriers(memory, 2 * stages)
    return Ring(start, start + stages, stages)


def init_ring(ring: Ring) -> None:
    """Set the barriers up; returns when every thread of the CTA may use them."""
    bulk.init_barriers([(ring.full, ring.stages, 1), (ring.empty, ring.stages, READERS)])


def loading(stages: int) -> pipeline.PipelineState:
    """Where the loading warp begins: every stage is free."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def reading(stages: int) -> pipeline.PipelineState:
    """Where readers begin."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


@cute.jit
def poison(images: list[cute.Tensor], stage: cutlass.Int32) -> None:
    """One warp fills a stage of images [rows, columns, stages] with NaN, the last rows of the last image first.

    A product that still reads the stage shows it. Only fault-injection builds call this.
    """
    lane = cute.arch.lane_idx()
    vector = cute.make_rmem_tensor((1, 8), cutlass.BFloat16)
    vector.fill(float("nan"))
    for back in cutlass.range_constexpr(len(images)):
        image = images[len(images) - 1 - back][None, None, stage]
        rows = cute.size(image, mode=[0])
        for step in cutlass.range(rows // 4, unroll=1):
            for block in cutlass.range_constexpr(cute.size(image, mode=[1]) // 64):
                row = rows - 4 * (step + 1) + lane // 8
                cute.autovec_copy(vector, cute.local_tile(image, (1, 8), (row, 8 * block + lane % 8)))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
