"""The SM90 grouped weight-gradient kernel for block-scaled operands: allocates, builds the pipelines, picks the role.

Roles: warp 0 loads, 1 and 2 decode the scales of A and B, 4 to 7 convert the CTA's part of B and send it to the other
CTA of the cluster; warpgroups 2 and 3 convert 64 rows of A each, multiply and store. Schedule, descriptors and epilogue
are those of the plain kernel.
Ring loaded (TMA and scales -> both conversions): full = Config.full_arrivals and Config.stage_bytes of transactions,
empty = Config.empty_arrivals. Ring ready (B converted -> the multiplying warpgroups of the cluster): full =
Config.ready_arrivals and the bytes of the other CTA, empty = Config.used_arrivals.
Limits: tokens contiguous, M and N multiples of 8, T < 2**30, at most MAX_EXPERTS experts, 16-byte aligned addresses.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from culax.grouped_wgrad.stages.gemm import config as facts
from culax.grouped_wgrad.stages.gemm import kernel as plain
from culax.grouped_wgrad.stages.gemm import layouts as plain_layouts
from culax.grouped_wgrad.stages.gemm import roles as plain_roles
from culax.grouped_wgrad.stages.gemm import schedule
from culax.grouped_wgrad.stages.gemm.descriptors import Sources
from culax.grouped_wgrad.stages.gemm_scaled import config as scaled_facts
from culax.grouped_wgrad.stages.gemm_scaled import layouts, roles
from culax.grouped_wgrad.stages.gemm_scaled.config import Config

FORMATS = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2, "e2m1": cutlass.Float4E2M1FNx2}
WARPS = facts.WARPGROUP // 32


def storage(config: Config):
    """Shared memory of one CTA; the big tiles first, each a multiple of 1024 bytes."""
    out = plain_layouts.DTYPES[config.out_dtype]
    sizes = [cute.cosize(layouts.loaded(x, config)) for x in (config.tile_m, config.b_rows)]
    ready = cute.cosize(layouts.ready(config))
    chunks = cute.cosize(plain_layouts.epilogue(config))
    scales = config.tile_m * config.blocks * config.stages

    @cute.struct
    class Storage:
        ready_b: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, ready], 1024]
        a: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, sizes[0]], 1024]
        b: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, sizes[1]], 1024]
        c: cute.struct.Align[cute.struct.MemRange[out, chunks], 1024]
        a_factors: cute.struct.Align[cute.struct.MemRange[Int32, scales], 128]
        b_factors: cute.struct.Align[cute.struct.MemRange[Int32, scales], 128]
        offs: cute.struct.Align[cute.struct.MemRange[Int32, facts.MAX_EXPERTS + 1], 128]
        atoms: cute.struct.Align[cute.struct.MemRange[Int32, facts.MAX_EXPERTS + 1], 128]
        loaded_bars: cute.struct.Align[cute.struct.MemRange[Int64, 2 * config.stages], 8]
        ready_bars: cute.struct.Align[cute.struct.MemRange[Int64, 2 * config.ready_stages], 8]

    return Storage


def _tensor(memory, layout: cute.ComposedLayout) -> cute.Tensor:
    return memory.get_tensor(layout.outer, swizzle=layout.inner)


def _chunks(memory, stage_bytes: int, stages: int) -> cute.Tensor:
    """(4, 16-byte chunks of a stage, stages) int32, without a swizzle."""
    pointer = cute.recast_ptr(memory.data_ptr(), dtype=Int32)
    layout = cute.make_layout((4, stage_bytes // 16, stages), stride=(1, 4, stage_bytes // 4))
    return cute.make_tensor(pointer, layout)


def views(config: Config, memory) -> roles.Smem:
    """The tensors over a CTA's shared memory."""
    stages, rows = config.stages, config.tile_m
    factors = cute.make_layout((rows, config.blocks, stages))
    table = cute.make_layout(facts.MAX_EXPERTS + 1)
    return roles.Smem(
        _tensor(memory.a, layouts.loaded(config.tile_m, config)),
        _tensor(memory.b, layouts.loaded(config.b_rows, config)),
        _chunks(memory.a, config.tile_m * config.loaded_k, stages),
        _chunks(memory.b, config.b_rows * config.loaded_k, stages),
        memory.a_factors.get_tensor(factors),
        memory.b_factors.get_tensor(factors),
        _tensor(memory.ready_b, layouts.ready(config)),
        _chunks(memory.ready_b, config.converted_bytes, config.ready_stages),
        _tensor(memory.c, plain_layouts.epilogue(config)),
        memory.offs.get_tensor(table),
        memory.atoms.get_tensor(table),
    )


def _ring(memory, stages: int, arrivals: tuple[int, int], readers: int, tx: int) -> plain_roles.Ring:
    """A ring whose stages take arrivals[0] arrivals to fill and arrivals[1] to free, by `readers` CTAs each."""
    full, empty = (pipeline.CooperativeGroup(pipeline.Agent.Thread, count) for count in arrivals)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=memory.data_ptr(),
        num_stages=stages,
        producer_group=full,
        consumer_group=empty,
        tx_count=tx,
        cta_layout_vmnk=cute.make_layout((1, readers, 1, 1)),
        defer_sync=True,
    )


@cute.kernel
def gemm(config: cutlass.Constexpr[Config], gmem: roles.Gmem, offs: cute.Tensor, space: schedule.Space):
    """One persistent CTA."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.utils.SmemAllocator().allocate(storage(config))
    smem = views(config, memory)
    if warp == 0:
        if cutlass.const_expr(not config.discrete):
            cpasync.prefetch_descriptor(gmem.tma_c)
    if warp == WARPS:
        schedule.write_offsets(offs, space.tokens, smem.offs)
        schedule.write_scale_atoms(smem.offs, offs.shape[0], config.block, smem.atoms)
    filled, freed = (config.full_arrivals, config.empty_arrivals), (config.ready_arrivals, config.used_arrivals)
    rings = roles.Rings(
        _ring(memory.loaded_bars, config.stages, filled, 1, config.stage_bytes),
        _ring(memory.ready_bars, config.ready_stages, freed, config.cluster_m, 0),
    )
    cluster = config.cluster_m, config.cluster_n
    pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
    cute.arch.sync_threads()
    pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
    if warp < WARPS:
        cute.arch.setmaxregister_decrease(scaled_facts.LOADER_REGISTERS)
        if warp == 0:
            roles.load(config, gmem, smem, rings.loaded, space)
        elif warp <= scaled_facts.DECODING_WARPS:
            roles.decode(config, gmem, smem, rings.loaded, space, warp - 1)
    elif warp < 2 * WARPS:
        cute.arch.setmaxregister_decrease(scaled_facts.CONVERTER_REGISTERS)
        roles.convert_b(config, smem, rings, space)
    else:
        cute.arch.setmaxregister_increase(scaled_facts.CONSUMER_REGISTERS)
        roles.consume(config, gmem, smem, rings, space)
    # No CTA leaves while the other still sends to it or arrives at its barriers.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def launch(config: Config, args: plain.Args, c, pointers, scales, sms: Int32):
    """Build the TMA atoms, write the descriptors, launch the GEMM. c is (M, N, E), or (M, N) if discrete.

    args.a, args.b are bytes (X, T / packed); scales = (scale_a, scale_b, global_a, global_b, concatenated).
    """
    a, b = plain_layouts.base(args.a, config), plain_layouts.base(args.b, config)
    loaded_a, loaded_b = layouts.loaded(config.tile_m, config), layouts.loaded(config.b_rows, config)
    tma_a, m_a = plain_layouts.load_atom(a, loaded_a, config.tile_m, 1, config)
    tma_b, m_b = plain_layouts.load_atom(b, loaded_b, config.b_rows, 1, config)
    tma_c, m_c = plain_layouts.store_atom(c, config)
    m, n = args.a.shape[0], args.b.shape[0]
    space = schedule.make_space(config, m, n, args.offs.shape[0], args.a.shape[1] * config.packed)
    if cutlass.const_expr(config.slots > 0):
        sources = Sources(
            tma_a if config.a_written else None,
            tma_b if config.b_written else None,
            tma_c if config.discrete else None,
            args.a,
            args.b,
            c.stride[0],
        )
        plain.write_all(config, sources, args, space, (m, n), pointers)
    gmem = roles.Gmem(tma_a, m_a, tma_b, m_b, tma_c, m_c, args.a, args.b, args.ws, *scales)
    size = config.cluster_size
    gemm(config, gmem, args.offs, space).launch(
        grid=(size, cutlass.min(sms // size, space.total), 1),
        block=(scaled_facts.THREADS, 1, 1),
        cluster=(size, 1, 1),
        min_blocks_per_mp=1,
        stream=args.stream,
    )


def _bytes(matrix: cute.Tensor, order: tuple[int, int]) -> cute.Tensor:
    """An operand as bytes (X, T / packed)."""
    layout = cute.select(matrix.layout, mode=list(order))
    return cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=cutlass.Uint8), layout)


def _vectors(scale: cute.Tensor) -> cute.Tensor:
    """A contiguous scale tensor as (4, bytes / 16) int32."""
    count = Int64(scale.shape[0]) * scale.shape[1] // 16
    pointer = cute.recast_ptr(scale.iterator, dtype=Int32)
    return cute.make_tensor(pointer, cute.make_layout((4, count), stride=(1, 4)))


def entry(config: Config):
    """(jit function, fake arguments) of one variant.

    Call with (mat_a (M, T), mat_b (T, N), offs (E,) int32, out, ws, sms, scale_a, scale_b, global_a, global_b,
    concatenated): the first six as for the plain kernel, fp4 operands two tokens an element; scales contiguous and
    16-byte aligned; global scales (E,) fp32 or None for MXFP8; concatenated 1 or 0, the scale layout.
    """
    out = plain_layouts.DTYPES[config.out_dtype]

    @cute.jit
    def dense(mat_a, mat_b, offs, c, ws, sms: Int32, scale_a, scale_b, global_a, global_b, concatenated: Int32, stream):
        args = plain.Args(_bytes(mat_a, (0, 1)), _bytes(mat_b, (1, 0)), offs, ws, stream)
        scales = _vectors(scale_a), _vectors(scale_b), global_a, global_b, concatenated
        launch(config, args, plain._modes(c, (1, 2, 0)), None, scales, sms)

    @cute.jit
    def discrete(
        mat_a, mat_b, offs, c, ws, sms: Int32, scale_a, scale_b, global_a, global_b, concatenated: Int32, stream
    ):
        args = plain.Args(_bytes(mat_a, (0, 1)), _bytes(mat_b, (1, 0)), offs, ws, stream)
        scales = _vectors(scale_a), _vectors(scale_b), global_a, global_b, concatenated
        base = cute.recast_ptr(ws.iterator, dtype=out)
        n = args.b.shape[0]
        like = cute.make_tensor(base, cute.make_layout((args.a.shape[0], n), stride=(Int64(n), 1)))
        launch(config, args, like, c, scales, sms)

    fake = cute.runtime.make_fake_tensor
    m, n, t, e = (cute.sym_int() for _ in range(4))
    experts = cute.sym_int()
    divisor = 1 if config.ragged else 16
    mat_a = fake(FORMATS[config.a_format], (m, t), (cute.sym_int64(divisibility=divisor), 1), assumed_align=16)
    mat_b = fake(FORMATS[config.b_format], (t, n), (1, cute.sym_int64(divisibility=divisor)), assumed_align=16)
    offs = fake(cutlass.Int32, (experts,), (1,), assumed_align=4)
    ws = fake(Int64, (e, config.slots, 16), (config.slots * 16, 16, 1), assumed_align=128) if config.slots else None
    if config.discrete:
        c = fake(Int64, (cute.sym_int(),), (1,), memspace=cute.AddressSpace.generic, assumed_align=8)
    else:
        pitches = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8)
        c = fake(out, (experts, m, n), (*pitches, 1), assumed_align=16)
    kind = cutlass.Float8E4M3FN if config.nv else cutlass.Float8E8M0FNU
    scales = [fake(kind, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=16) for _ in range(2)]
    factors = [fake(Float32, (experts,), (1,), assumed_align=4) if config.nv else None for _ in range(2)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = mat_a, mat_b, offs, c, ws, Int32(132), *scales, *factors, Int32(0), stream
    return discrete if config.discrete else dense, arguments
