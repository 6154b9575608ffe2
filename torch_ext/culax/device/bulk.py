"""Bulk copies of whole tiles: a tape's entry in global memory is the image of its tile in shared memory, padding
included.

One thread starts the copies of a stage and announces their bytes on the stage's barrier; everybody waits there. The
copies write through the asynchronous proxy, which the barrier's completion makes visible.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def allocate_barriers(memory: cutlass.memory.SmemAllocator, count: int) -> cute.Pointer:
    """`count` transaction barriers in shared memory."""
    return memory.allocate_array(cutlass.Int64, count, byte_alignment=8)


@cute.jit
def init_barriers(barriers: cute.Pointer, count: cutlass.Constexpr) -> None:
    """Set up the barriers for one arrival each; returns when every thread may use them."""
    if cute.arch.thread_idx()[0] == 0:
        for i in cutlass.range_constexpr(count):
            cute.arch.mbarrier_init(barriers + i, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def _image(tile: cute.Tensor) -> cute.Tensor:
    """A padded tile [R, D] as the vector of all its elements and padding."""
    return cute.make_tensor(tile.iterator, cute.make_layout((tile.shape[0] * tile.stride[0],)))


def load_images(pairs: list[tuple[cute.Tensor, cute.Tensor]], barrier: cute.Pointer) -> None:
    """Start copies of padded tiles (or contiguous vectors) from global to shared memory; by one thread."""
    images = [
        (_image(source), _image(target)) if cute.rank(source) == 2 else (source, target) for source, target in pairs
    ]
    total = sum(cute.size(source) * source.element_type.width // 8 for source, _ in images)
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, total)
    for source, target in images:
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), source.element_type)
        cute.copy(atom, source, target, mbar_ptr=barrier)
