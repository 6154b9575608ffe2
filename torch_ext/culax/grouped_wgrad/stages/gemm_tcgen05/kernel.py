"""The SM100 block-scaled grouped weight-gradient kernel: allocates, builds the pipelines, picks the role.

Roles: warps 0-3 store, warp 4 of a leading CTA multiplies, warp 5 loads. Two CTAs of a pair multiply one tile: each
holds its 128 rows of A, half of B's columns, and all scales of B.
Pipeline ab (TMA -> tensor cores): full = one arrival a CTA of the pair, with the bytes it loads; empty = one commit.
Pipeline acc (tensor cores -> epilogue): full = one commit; empty = all epilogue threads of the pair.
Limits: M and N multiples of 16 where token-major, else of 8; T < 2**30, at most MAX_EXPERTS experts, 16-byte aligned
addresses and strides.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, Uint8, Uint16
from cutlass.memory import TmemAllocator

from culax.grouped_wgrad.stages.gemm import layouts as shared
from culax.grouped_wgrad.stages.gemm import schedule
from culax.grouped_wgrad.stages.gemm.config import MAX_EXPERTS
from culax.grouped_wgrad.stages.gemm.descriptors import POINTERS
from culax.grouped_wgrad.stages.gemm_tcgen05 import config as facts
from culax.grouped_wgrad.stages.gemm_tcgen05 import layouts, roles
from culax.grouped_wgrad.stages.gemm_tcgen05.config import Config
from culax.grouped_wgrad.stages.gemm_tcgen05.descriptors import Operand, Output, write_descriptors


def storage(config: Config):
    """Shared memory of one CTA; the big tiles first, each a multiple of 1024 bytes."""
    out = shared.DTYPES[config.out_dtype]
    rows = config.tile_m, config.b_rows
    sizes = [r * facts.TILE_BYTES * config.stages for r in rows]
    words = [size // 2 * config.stages for size in config.scale_bytes]
    chunks = cute.cosize(shared.epilogue(config))

    @cute.struct
    class Storage:
        a: cute.struct.Align[cute.struct.MemRange[Uint8, sizes[0]], 1024]
        b: cute.struct.Align[cute.struct.MemRange[Uint8, sizes[1]], 1024]
        c: cute.struct.Align[cute.struct.MemRange[out, chunks], 1024]
        scale_a: cute.struct.Align[cute.struct.MemRange[Uint16, words[0]], 512]
        scale_b: cute.struct.Align[cute.struct.MemRange[Uint16, words[1]], 512]
        offs: cute.struct.Align[cute.struct.MemRange[Int32, MAX_EXPERTS + 1], 128]
        ab: cute.struct.Align[cute.struct.MemRange[Int64, 2 * config.stages], 8]
        acc: cute.struct.Align[cute.struct.MemRange[Int64, 2 * config.accumulator_stages], 8]
        free: Int64
        address: Int32

    return Storage


def _modes(tensor: cute.Tensor, order: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(order)))


def _tensor(memory, layout: cute.ComposedLayout, dtype=None) -> cute.Tensor:
    if dtype is None:
        return memory.get_tensor(layout.outer, swizzle=layout.inner)
    pointer = cute.recast_ptr(memory.data_ptr(), layout.inner, dtype=dtype)
    return cute.make_tensor(pointer, layout.outer)


def _smem(config: Config, memory, mma: cute.TiledMma) -> roles.Smem:
    a, b = layouts.operands(config, mma)
    scale_a, scale_b = layouts.scales(config, mma)
    kind = layouts.scale_type(config)
    ranges = memory.scale_a, memory.scale_b
    return roles.Smem(
        (
            _tensor(memory.a, layouts.operand_bytes(config.tile_m, config.a_major, config.stages)),
            _tensor(memory.b, layouts.operand_bytes(config.b_rows, config.b_major, config.stages)),
            *(ranges[i].get_tensor(layouts.scale_words(layouts.scale_box(config, i), config)) for i in range(2)),
        ),
        _tensor(memory.a, a, layouts.ELEMENTS[config.a_format]),
        _tensor(memory.b, b, layouts.ELEMENTS[config.b_format]),
        cute.make_tensor(cute.recast_ptr(memory.scale_a.data_ptr(), dtype=kind), scale_a),
        cute.make_tensor(cute.recast_ptr(memory.scale_b.data_ptr(), dtype=kind), scale_b),
        _tensor(memory.c, shared.epilogue(config)),
        memory.offs.get_tensor(cute.make_layout(MAX_EXPERTS + 1)),
    )


def _pipelines(config: Config, memory):
    cluster = cute.make_layout((config.cluster_m, 1, 1, 1))
    thread = pipeline.Agent.Thread
    ab = roles.Ring.create(
        barrier_storage=memory.ab.data_ptr(),
        num_stages=config.stages,
        producer_group=pipeline.CooperativeGroup(thread, config.cluster_m),
        consumer_group=pipeline.CooperativeGroup(thread),
        tx_count=config.stage_bytes,
        cta_layout_vmnk=cluster,
        defer_sync=True,
    )
    acc = roles.Accumulators.create(
        barrier_storage=memory.acc.data_ptr(),
        num_stages=config.accumulator_stages,
        producer_group=pipeline.CooperativeGroup(thread),
        consumer_group=pipeline.CooperativeGroup(thread, facts.WARP * facts.EPILOGUE_WARPS * config.cluster_m),
        cta_layout_vmnk=cluster,
        defer_sync=True,
    )
    return ab, acc


def _tensor_memory(config: Config, mma: cute.TiledMma, base: cute.Pointer):
    """Accumulators, scales of A and scales of B in the allocated columns."""
    a, b = layouts.scale_columns(config, mma)
    kind = layouts.scale_type(config)
    first = config.accumulator_stride + config.tile_n
    return (
        cute.make_tensor(base, layouts.accumulator(config, mma)),
        cute.make_tensor(cute.recast_ptr(base + first, dtype=kind), a),
        cute.make_tensor(cute.recast_ptr(base + (first + config.scale_columns[0]), dtype=kind), b),
    )


@cute.kernel
def gemm(config: cutlass.Constexpr[Config], gmem: roles.Gmem, offs: cute.Tensor, space: schedule.Space):
    """One persistent CTA."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.utils.SmemAllocator().allocate(storage(config))
    mma = layouts.tiled_mma(config)
    smem = _smem(config, memory, mma)
    if warp == facts.LOAD_WARP:
        schedule.write_offsets(offs, space.tokens, smem.offs)
    ab, acc = _pipelines(config, memory)
    tmem = TmemAllocator(
        memory.address.ptr,
        barrier_for_retrieve=pipeline.NamedBarrier(
            barrier_id=roles.HALF_BARRIER + 2, num_threads=facts.WARP * (facts.EPILOGUE_WARPS + 1)
        ),
        is_two_cta=config.pair,
        two_cta_tmem_dealloc_mbar_ptr=memory.free.ptr if config.pair else None,
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=(config.cluster_m, 1), is_relaxed=True)
    cute.arch.sync_threads()
    pipeline.pipeline_init_wait(cluster_shape_mn=(config.cluster_m, 1))
    if warp == facts.LOAD_WARP:
        roles.load(config, gmem, smem, ab, space)
    if warp == facts.MULTIPLY_WARP:
        tmem.wait_for_alloc()
        base = tmem.retrieve_ptr(cutlass.Float32)
        if roles.rank() == 0:
            roles.multiply(config, smem, ab, acc, space, _tensor_memory(config, mma, base))
    if warp < facts.EPILOGUE_WARPS:
        tmem.allocate(facts.TMEM_COLUMNS)
        tmem.wait_for_alloc()
        base = tmem.retrieve_ptr(cutlass.Float32)
        roles.store(config, gmem, smem, acc, space, _tensor_memory(config, mma, base)[0])
        tmem.relinquish_alloc_permit()
        cute.arch.barrier(barrier_id=roles.HALF_BARRIER + 3, number_of_threads=facts.WARP * facts.EPILOGUE_WARPS)
        tmem.free(base)


@dataclass(frozen=True)
class Args:
    """Operands as the launcher gives them.

    a (M, T / packed) and b (N, T / packed) uint8, their scale bytes, fp32 global scales (E,) or None, offs (E,),
    ws (E, slots, 16) int64. concatenated: 0 or 1, the scale layout.
    """

    a: cute.Tensor
    b: cute.Tensor
    scale_a: cute.Tensor
    scale_b: cute.Tensor
    global_a: cute.Tensor | None
    global_b: cute.Tensor | None
    concatenated: Int32
    offs: cute.Tensor
    ws: cute.Tensor
    stream: object


@cute.jit
def write_all(config: cutlass.Constexpr[Config], operands, output: Output, args: Args, space: schedule.Space, pointers):
    """Launch the descriptor writer, POINTERS experts at a time."""
    experts = args.offs.shape[0]
    for first in cutlass.range(0, experts, POINTERS, unroll=1):
        count = cutlass.min(experts - first, POINTERS)
        chunk = (Int64(0),)
        if cutlass.const_expr(config.discrete):
            chunk = tuple(pointers[first + i] for i in range(POINTERS))
        write_descriptors(config, operands, output, args.offs, space, args.concatenated, args.ws, first, chunk).launch(
            grid=(count, 1, 1), block=(facts.WARP, 1, 1), stream=args.stream
        )


def load_atoms(config: Config, plain, scales):
    """(atoms, coordinate tensors) of A, B and their scales."""
    rows, majors = (config.tile_m, config.b_rows), (config.a_major, config.b_major)
    loads = []
    for i in range(2):
        layout = layouts.operand_bytes(rows[i], majors[i], config.stages)
        loads.append(layouts.load_atom(shared.base(plain[i], config), layout, (rows[i], facts.TILE_BYTES), config))
    for i in range(2):
        box = layouts.scale_box(config, i)
        words = layouts.scale_tensor(cute.recast_ptr(scales[i], dtype=Uint16), plain[i].shape[0], Int32(1))
        loads.append(layouts.load_atom(words, layouts.scale_words(box, config), box, config))
    return tuple(zip(*loads))


@cute.jit
def launch(config: cutlass.Constexpr[Config], args: Args, c: cute.Tensor, pointers, sms: Int32):
    """Both kernels. c (M, N, E), or (M, N) where discrete: only its strides count then."""
    m, n, tokens = args.a.shape[0], args.b.shape[0], args.a.shape[1] * config.packed
    space = schedule.make_space(config, m, n, args.offs.shape[0], tokens)
    scales = args.scale_a.iterator, args.scale_b.iterator
    plain = args.a, args.b
    tmas, coordinates = load_atoms(config, plain, scales)
    tma_c, m_c = shared.store_atom(c, config)
    operands = tuple(Operand(tmas[i], plain[i], tmas[2 + i], scales[i]) for i in range(2))
    output = Output(tma_c if config.discrete else None, (m, n), c.stride[0])
    write_all(config, operands, output, args, space, pointers)
    globals_ = (args.global_a, args.global_b) if config.nvfp4 else None
    gmem = roles.Gmem(tmas, coordinates, tma_c, m_c, plain, scales, globals_, args.ws)
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

    Call with (mat_a (M, T / packed) uint8, mat_b (T / packed, N) uint8, offs (E,) int32, scale_a and scale_b uint8,
    global_a and global_b (E,) fp32 or None, out, ws, concatenated, sms): out is (E, M, N), or where discrete the CPU
    int64 tensor of E output addresses padded to a multiple of POINTERS; ws an int64 (E, slots, 16) workspace, 128-byte
    aligned; concatenated 0 or 1, the scale layout; sms the number of CTAs that fit the device.
    """
    out = shared.DTYPES[config.out_dtype]

    @cute.jit
    def dense(mat_a, mat_b, offs, scale_a, scale_b, global_a, global_b, c, ws, concatenated: Int32, sms: Int32, stream):
        args = Args(mat_a, _modes(mat_b, (1, 0)), scale_a, scale_b, global_a, global_b, concatenated, offs, ws, stream)
        launch(config, args, _modes(c, (1, 2, 0)), None, sms)

    @cute.jit
    def discrete(
        mat_a, mat_b, offs, scale_a, scale_b, global_a, global_b, c, ws, concatenated: Int32, sms: Int32, stream
    ):
        b = _modes(mat_b, (1, 0))
        base = cute.recast_ptr(ws.iterator, dtype=out)
        like = cute.make_tensor(base, cute.make_layout((mat_a.shape[0], b.shape[0]), stride=(Int64(b.shape[0]), 1)))
        args = Args(mat_a, b, scale_a, scale_b, global_a, global_b, concatenated, offs, ws, stream)
        launch(config, args, like, c, sms)

    fake = cute.runtime.make_fake_tensor
    m, n, t, e = (cute.sym_int() for _ in range(4))
    experts = cute.sym_int()

    def matrix(rows, columns, row_major):
        pitch = cute.sym_int64(divisibility=1 if config.ragged else 16)
        return fake(Uint8, (rows, columns), (pitch, 1) if row_major else (1, pitch), assumed_align=16)

    def scale():
        return fake(Uint8, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=16)

    def global_scale():
        return fake(cutlass.Float32, (experts,), (1,), assumed_align=4) if config.nvfp4 else None

    offs = fake(Int32, (experts,), (1,), assumed_align=4)
    ws = fake(Int64, (e, config.slots, 16), (config.slots * 16, 16, 1), assumed_align=128)
    if config.discrete:
        c = fake(Int64, (cute.sym_int(),), (1,), memspace=cute.AddressSpace.generic, assumed_align=8)
    else:
        pitches = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8)
        c = fake(out, (experts, m, n), (*pitches, 1), assumed_align=16)
    operands = matrix(m, t, config.a_major == "k"), matrix(t, n, config.b_major == "mn")
    scales = scale(), scale(), global_scale(), global_scale()
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return discrete if config.discrete else dense, (*operands, offs, *scales, c, ws, Int32(0), Int32(148), stream)
