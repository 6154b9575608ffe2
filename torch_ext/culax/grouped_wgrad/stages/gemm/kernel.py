"""The SM90 grouped weight-gradient kernel: allocates, builds the pipeline, picks the role.

Roles: warpgroup 0 gives its registers away and its first warp loads; warpgroups 1 and 2 take tiles in turn, one
multiplying while the other stores.
Pipeline ab (TMA -> consumers): full = one arrival with Config.stage_bytes of transactions; empty =
Config.empty_arrivals, one a warp of the reading warpgroup of every CTA that shares a multicast with this one.
Limits: M and N multiples of 8, T < 2**30, at most MAX_EXPERTS experts, 16-byte aligned addresses and strides.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from culax.grouped_wgrad.stages.gemm import config as facts
from culax.grouped_wgrad.stages.gemm import layouts, roles, schedule
from culax.grouped_wgrad.stages.gemm.config import Config
from culax.grouped_wgrad.stages.gemm.descriptors import POINTERS, Sources, write_descriptors


def storage(config: Config):
    """Shared memory of one CTA; the big tiles first, each a multiple of 1024 bytes."""
    dtype, out = layouts.DTYPES[config.dtype], layouts.DTYPES[config.out_dtype]
    sizes = [cute.cosize(layouts.operand(x, m, config)) for x, m in _operands(config)]
    chunks = cute.cosize(layouts.epilogue(config))

    @cute.struct
    class Storage:
        a: cute.struct.Align[cute.struct.MemRange[dtype, sizes[0]], 1024]
        b: cute.struct.Align[cute.struct.MemRange[dtype, sizes[1]], 1024]
        c: cute.struct.Align[cute.struct.MemRange[out, chunks], 1024]
        offs: cute.struct.Align[cute.struct.MemRange[Int32, facts.MAX_EXPERTS + 1], 128]
        bars: cute.struct.Align[cute.struct.MemRange[Int64, 2 * config.stages], 8]

    return Storage


def _operands(config: Config):
    return (config.tile_m, config.a_major), (config.tile_n, config.b_major)


def _modes(tensor: cute.Tensor, order: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(order)))


def _tensor(memory, layout: cute.ComposedLayout) -> cute.Tensor:
    return memory.get_tensor(layout.outer, swizzle=layout.inner)


@cute.kernel
def gemm(config: cutlass.Constexpr[Config], gmem: roles.Gmem, offs: cute.Tensor, space: schedule.Space):
    """One persistent CTA."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.utils.SmemAllocator().allocate(storage(config))
    smem = roles.Smem(
        _tensor(memory.a, layouts.operand(config.tile_m, config.a_major, config)),
        _tensor(memory.b, layouts.operand(config.tile_n, config.b_major, config)),
        _tensor(memory.c, layouts.epilogue(config)),
        memory.offs.get_tensor(cute.make_layout(facts.MAX_EXPERTS + 1)),
    )
    if warp == 0:
        if cutlass.const_expr(not config.a_written):
            cpasync.prefetch_descriptor(gmem.tma_a)
        if cutlass.const_expr(not config.b_written):
            cpasync.prefetch_descriptor(gmem.tma_b)
        if cutlass.const_expr(not config.discrete):
            cpasync.prefetch_descriptor(gmem.tma_c)
    if warp == facts.WARPGROUP // 32:
        schedule.write_offsets(offs, space.tokens, smem.offs)
    ab = pipeline.PipelineTmaAsync.create(
        barrier_storage=memory.bars.data_ptr(),
        num_stages=config.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, config.empty_arrivals),
        tx_count=config.stage_bytes,
        cta_layout_vmnk=cute.make_layout((1, config.cluster_m, config.cluster_n, 1)),
        defer_sync=True,
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=(config.cluster_m, config.cluster_n), is_relaxed=True)
    cute.arch.sync_threads()
    pipeline.pipeline_init_wait(cluster_shape_mn=(config.cluster_m, config.cluster_n))
    if warp < facts.WARPGROUP // 32:
        cute.arch.setmaxregister_decrease(facts.PRODUCER_REGISTERS)
        if warp == 0 or config.whole_producer:
            roles.load(config, gmem, smem, ab, space)
    else:
        cute.arch.setmaxregister_increase(facts.CONSUMER_REGISTERS)
        roles.consume(config, roles.multiply, roles.product(config, smem), gmem, smem, ab, space)


@dataclass(frozen=True)
class Args:
    """Operands as the launcher gives them: a (M, T), b (N, T), offs (E,), ws (E, slots, 16) int64 or None."""

    a: cute.Tensor
    b: cute.Tensor
    offs: cute.Tensor
    ws: cute.Tensor | None
    stream: object


@cute.jit
def write_all(config: cutlass.Constexpr[Config], sources: Sources, args: Args, space: schedule.Space, shape, pointers):
    """Launch the descriptor writer, POINTERS experts at a time."""
    ws, stream = args.ws, args.stream
    experts = args.offs.shape[0]
    for first in cutlass.range(0, experts, POINTERS, unroll=1):
        count = cutlass.min(experts - first, POINTERS)
        chunk = (Int64(0),)
        if cutlass.const_expr(config.discrete):
            chunk = tuple(pointers[first + i] for i in range(POINTERS))
        write_descriptors(config, sources, args.offs, space, shape, ws, first, chunk).launch(
            grid=(count, 1, 1), block=(32, 1, 1), stream=stream
        )


def launch(config: Config, args: Args, c: cute.Tensor, pointers: cute.Tensor | None, sms: Int32):
    """Build the TMA atoms, write descriptors where needed, launch the GEMM. c is (M, N, E), or (M, N) if discrete."""
    (tile_m, a_major), (tile_n, b_major) = _operands(config)
    a = layouts.base(args.a, config) if config.a_written else layouts.wrapped(args.a)
    b = layouts.base(args.b, config) if config.b_written else layouts.wrapped(args.b)
    tma_a, m_a = layouts.load_atom(a, layouts.operand(tile_m, a_major, config), tile_m, config.cluster_n, config)
    tma_b, m_b = layouts.load_atom(b, layouts.operand(tile_n, b_major, config), tile_n, config.cluster_m, config)
    tma_c, m_c = layouts.store_atom(c, config)
    m, n = args.a.shape[0], args.b.shape[0]
    space = schedule.make_space(config, m, n, args.offs.shape[0], args.a.shape[1])
    if cutlass.const_expr(config.slots > 0):
        sources = Sources(
            tma_a if config.a_written else None,
            tma_b if config.b_written else None,
            tma_c if config.discrete else None,
            args.a,
            args.b,
            c.stride[0],
        )
        write_all(config, sources, args, space, (m, n), pointers)
    gmem = roles.Gmem(tma_a, m_a, tma_b, m_b, tma_c, m_c, args.a, args.b, args.ws)
    size = config.cluster_size
    gemm(config, gmem, args.offs, space).launch(
        grid=(size, cutlass.min(sms // size, space.total), 1),
        block=(facts.THREADS, 1, 1),
        cluster=(size, 1, 1),
        min_blocks_per_mp=1,
        stream=args.stream,
    )


def entry(config: Config):
    """(jit function, fake arguments) of one variant.

    Call with (mat_a (M, T), mat_b (T, N), offs (E,) int32, out, ws, sms): out is (E, M, N), or where discrete the CPU
    int64 tensor of E output addresses padded to a multiple of POINTERS; ws an int64 (E, slots, 16) workspace, 128-byte
    aligned, or None where no descriptor is written; sms the number of CTAs that fit the device.
    """
    dtype, out = layouts.DTYPES[config.dtype], layouts.DTYPES[config.out_dtype]

    @cute.jit
    def dense(mat_a, mat_b, offs, c, ws, sms: Int32, stream):
        args = Args(mat_a, _modes(mat_b, (1, 0)), offs, ws, stream)
        launch(config, args, _modes(c, (1, 2, 0)), None, sms)

    @cute.jit
    def discrete(mat_a, mat_b, offs, c, ws, sms: Int32, stream):
        b = _modes(mat_b, (1, 0))
        base = cute.recast_ptr(ws.iterator, dtype=out)
        like = cute.make_tensor(base, cute.make_layout((mat_a.shape[0], b.shape[0]), stride=(Int64(b.shape[0]), 1)))
        launch(config, Args(mat_a, b, offs, ws, stream), like, c, sms)

    fake = cute.runtime.make_fake_tensor
    m, n, t, e = (cute.sym_int() for _ in range(4))
    experts = cute.sym_int()

    def matrix(rows, columns, row_major):
        pitch = cute.sym_int64(divisibility=1 if config.ragged else 8)
        return fake(dtype, (rows, columns), (pitch, 1) if row_major else (1, pitch), assumed_align=16)

    offs = fake(cutlass.Int32, (experts,), (1,), assumed_align=4)
    ws = fake(Int64, (e, config.slots, 16), (config.slots * 16, 16, 1), assumed_align=128) if config.slots else None
    if config.discrete:
        c = fake(Int64, (cute.sym_int(),), (1,), memspace=cute.AddressSpace.generic, assumed_align=8)
    else:
        pitches = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8)
        c = fake(out, (experts, m, n), (*pitches, 1), assumed_align=16)
    operands = matrix(m, t, config.a_major == "k"), matrix(t, n, config.b_major == "mn")
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return discrete if config.discrete else dense, (*operands, offs, c, ws, Int32(132), stream)
