"""Bulk copies of whole tiles: a tape's entry in global memory is the image of its tile in shared memory (images.py).

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
def init_barriers(groups: list[tuple[cute.Pointer, int, int]]) -> None:
    """Set up groups of barriers (first, count, arrivals of each); returns when every thread may use them."""
    if cute.arch.thread_idx()[0] == 0:
        for first, count, arrivals in groups:
            for i in cutlass.range_constexpr(count):
                cute.arch.mbarrier_init(first + i, arrivals)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def wait(barrier: cute.Pointer, phase: cutlass.Int32) -> None:
    """Spin until the phase of this parity of a barrier is complete.

    One instruction in a loop of its own, so that a checker of the built code sees one wait, which ends.
    """
    test = "mbarrier.test_wait.parity.shared.b64 DONE, [{$r0}], {$r1};"
    loop = "{ .reg .pred DONE; AGAIN: " + test + " @DONE bra END; bra AGAIN; END: }"
    cute.arch.inline_ptx(loop, read_only_args=[barrier, cutlass.Int32(phase)])


def announce(barrier: cute.Pointer, total: int) -> None:
    """Arrive at a barrier whose phase ends when `total` bytes have been copied as well; by one thread."""
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, total)


def start_loads(pairs: list[tuple[cute.Tensor, cute.Tensor]], barrier: cute.Pointer) -> None:
    """Start copies of vectors, which images are in the order of memory, from global to shared memory; by one thread."""
    for source, target in pairs:
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), source.element_type)
        cute.copy(atom, source, target, mbar_ptr=barrier)


def load_images(pairs: list[tuple[cute.Tensor, cute.Tensor]], barrier: cute.Pointer) -> None:
    """Announce and start such copies, when nothing else arrives in this phase of the barrier."""
    announce(barrier, sum(cute.size(source) * source.element_type.width // 8 for source, _ in pairs))
    start_loads(pairs, barrier)


@cute.jit
def store_images(pairs: list[tuple[cute.Tensor, cute.Tensor]]) -> None:
    """Start copies of vectors from shared to global memory, as one group of the CTA's first thread.

    Before, every thread that wrote to the tiles must pass `publish`, and after them a barrier. The tiles must stay as
    they are, and the CTA must not end, until the first thread has passed `stored`.
    """
    if cute.arch.thread_idx()[0] == 0:
        atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), cutlass.BFloat16)
        for source, target in pairs:
            cute.copy(atom, source, target)
        cute.arch.cp_async_bulk_commit_group()


def publish() -> None:
    """Make the calling thread's writes to shared memory visible to bulk copies that start behind the next barrier."""
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def stored() -> None:
    """Wait, in the CTA's first thread, until all its bulk stores have read their tiles."""
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
