"""Each rule on small kernels written here: the right ones pass, each way to be wrong is reported."""

from __future__ import annotations

import pytest

from tests.ptx.check import check_text

BIG = """
.visible .entry k(.param .align 64 .b8 d[128], .param .u64 w)
.reqntid %d, 1, 1
{
%s
}
"""


def rules(body: str, threads: int = 128) -> set[str]:
    """Rules that the kernel around `body` breaks."""
    return {found.rule for found in check_text(".extern .shared .align 1024 .b8 shmem[];\n" + BIG % (threads, body))}


STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r1, %r2}], [%r3];"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
COPY = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%r1], 128;"
EDIT = "tensormap.replace.tile.global_address.global.b1024.b64 [%rd2], %rd3;"


def _tiles(in_loop: str, before: str = "", after_address: str = "") -> str:
    """A persistent loop whose descriptor address depends on the tile."""
    return f"""
    ld.param.u64 %rd1, [w];
    {RELEASE}
    {before}
$L:
    ld.global.u32 %r4, [%rd1];
    mul.wide.s32 %rd9, %r4, 128;
    add.s64 %rd2, %rd1, %rd9;
    {after_address}
$T:
    {in_loop}
    setp.ne.s32 %p2, %r5, %r6;
    @%p2 bra $T;
    setp.ne.s32 %p1, %r4, 0;
    @%p1 bra $L;
    ret;
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_tiles(STORE, after_address=ACQUIRE), set()),
        (_tiles(ACQUIRE + STORE), set()),
        (_tiles(STORE), {"acquire"}),
        (_tiles(STORE, before=ACQUIRE), {"acquire"}),
        (_tiles(STORE + ACQUIRE), {"acquire"}),
        (_tiles(STORE, after_address=f"setp.eq.s32 %p3, %r4, %r7; @%p3 bra $T; {ACQUIRE}"), {"acquire"}),
        (_tiles(STORE, after_address=f"@%p3 {ACQUIRE}"), {"acquire"}),
        (_tiles(STORE, after_address=ACQUIRE.replace("%rd2", "%rd2+128")), {"acquire"}),
        (_tiles(STORE, after_address=ACQUIRE + EDIT), {"acquire", "descriptor-release"}),
        (_tiles(STORE, after_address=EDIT + RELEASE + ACQUIRE), set()),
        (_tiles(STORE.replace("%rd2", "%rd4"), before="mov.b64 %rd4, d;"), set()),
    ],
    ids=[
        "once-a-switch",
        "once-a-tile",
        "none",
        "before-the-address",
        "after-the-store",
        "on-one-path",
        "predicated",
        "another-descriptor",
        "rewritten-since",
        "rewritten-released-acquired",
        "parameter",
    ],
)
def test_acquire(body: str, expected: set[str]) -> None:
    assert rules(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{EDIT} {RELEASE} ret;", set()),
        (f"@%p1 bra $A; {EDIT} $A: {RELEASE} ret;", set()),
        (f"{EDIT} ret;", {"descriptor-release"}),
        (f"{RELEASE} {EDIT} ret;", {"descriptor-release"}),
        (f"{EDIT} @%p1 bra $A; {RELEASE} $A: ret;", {"descriptor-release"}),
        (f"{EDIT} @%p1 {RELEASE} ret;", {"descriptor-release"}),
        (
            f"{EDIT} {COPY} ret;",
            set(),
        ),
    ],
    ids=["released", "released-by-all", "never", "before", "on-one-path", "predicated", "with-the-copy"],
)
def test_descriptor_release(body: str, expected: set[str]) -> None:
    assert rules(body) == expected


def test_a_file_that_uses_descriptors_writes_them_somewhere() -> None:
    assert rules(_tiles(STORE, after_address=ACQUIRE).replace(RELEASE, "")) == {"descriptor-release"}


MMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2}, %rd7, %rd8, 1, 1, 1;"
COMMIT = "wgmma.commit_group.sync.aligned;"


def _drain(n: int) -> str:
    return f"wgmma.wait_group.sync.aligned {n};"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (MMA + COMMIT + _drain(0) + "add.f32 %f3, %f1, %f2;", set()),
        (MMA + MMA + COMMIT + _drain(0) + "mov.f32 %f1, 0f00000000;", set()),
        (MMA + COMMIT + "add.f32 %f3, %f1, %f2;" + _drain(0), {"registers"}),
        (MMA + COMMIT + _drain(1) + "mov.f32 %f1, 0f00000000;", {"registers"}),
        (MMA + "mov.f32 %f1, 0f00000000;" + COMMIT + _drain(0), {"registers"}),
        (MMA.replace("%rd7", "{%r1, %r2}") + COMMIT + "mov.u32 %r1, 0;" + _drain(0), {"registers"}),
        (MMA.replace("%rd7", "{%r1, %r2}") + COMMIT + "mov.u32 %r3, %r1;" + _drain(0), set()),
        (MMA + COMMIT + _drain(0) + "mbarrier.arrive.shared.b64 _, [%r9];", set()),
        (MMA + COMMIT + _drain(1) + "mbarrier.arrive.shared.b64 _, [%r9];", {"drain"}),
        (MMA + COMMIT + "bar.sync 1, 128;" + _drain(0), {"drain"}),
        (f"@%p1 bra $A; {MMA} {COMMIT} $A: bar.sync 1, 128; {_drain(0)}", {"drain"}),
    ],
    ids=[
        "drained",
        "same-accumulators",
        "read-early",
        "weak-wait",
        "uncommitted",
        "operand-overwritten",
        "operand-read",
        "release-drained",
        "release-early",
        "barrier-early",
        "on-one-path",
    ],
)
def test_groups(body: str, expected: set[str]) -> None:
    assert rules(body + "ret;") == expected


def _wait(address: str, parity: str) -> str:
    return f"{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [{address}], {parity}; @P bra D; bra W; D: }}"


def _advance(stage: str, parity: str, stages: int = 3) -> str:
    return f"""
    add.s32 {stage}, {stage}, 1;
    setp.eq.s32 %p9, {stage}, {stages};
    selp.b32 {stage}, 0, {stage}, %p9;
    selp.b32 %r19, 1, 0, %p9;
    xor.b32 {parity}, {parity}, %r19;
    """


def ring(
    *,
    fill: str = "1",
    wait: str = "1",
    drain: int = 1,
    drain_at_end: int = 0,
    release: str = "lagging",
    release_first: bool = False,
    release_at_end: bool = True,
    first: str = "setp.eq.s32 %p3, %r11, 0; @%p3 bra $N;",
) -> str:
    """Three stages of 1 KiB at 1024, full barriers at +8192, empty ones at +8448; warp 4 loads, warps 0..3 multiply.

    The consumer releases a stage one trip late. Arguments leave something out or do it wrongly.
    """
    bar_full = "shl.b32 %r16, %r12, 3; add.s32 %r16, %r16, %r15; add.s32 %r17, %r16, 8192;"
    bar_empty = "add.s32 %r18, %r16, 8448;"
    stage = {"lagging": "%r13", "newest": "%r12"}.get(release, "%r13")
    arrive = f"""
        shl.b32 %r20, {stage}, 3; add.s32 %r20, %r20, %r15;
        and.b32 %r21, %r10, 31; setp.ne.s32 %p4, %r21, 0; @%p4 bra $SKIP;
        {"" if release == "never" else "mbarrier.arrive.shared.b64 _, [%r20+8448];"}
$SKIP:
        add.s32 %r13, %r13, 1; setp.eq.s32 %p5, %r13, 3; selp.b32 %r13, 0, %r13, %p5;
    """
    multiply = f"""
        shl.b32 %r22, %r12, 10; add.s32 %r22, %r22, %r15; shr.u32 %r22, %r22, 4; and.b32 %r22, %r22, 16383;
        cvt.u64.u32 %rd7, %r22; or.b64 %rd7, %rd7, 4611686293305360384;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2}}, %rd7, %rd7, 1, 1, 1;
        {COMMIT}
    """
    lag = f"{first} {arrive.replace('SKIP', 'Q1')} $N:"
    steps = lag + _drain(drain) if release_first else _drain(drain) + lag
    return f"""
    mov.u32 %r10, %tid.x;
    mov.u32 %r15, shmem;
    shr.u32 %r14, %r10, 5;
    shfl.sync.idx.b32 %r14, %r14, 0, 31, -1;
    ld.param.u64 %rd1, [w];
    mov.u32 %r12, 0; mov.u32 %r13, 0;
    setp.eq.s32 %p1, %r14, 4;
    @%p1 bra $PRODUCER;
    mov.u32 %r24, 0;
$TILE:
    ld.global.u32 %r23, [%rd1];
    setp.lt.s32 %p6, %r23, 1;
    @%p6 bra $DONE;
    mov.u32 %r11, 0;
$L:
    {bar_full}
    {_wait("%r17", "%r24") if wait else ""}
    {multiply}
    {steps}
    {_advance("%r12", "%r24")}
    add.s32 %r11, %r11, 1;
    setp.ne.s32 %p2, %r11, %r23;
    @%p2 bra $L;
    {_drain(drain_at_end)}
    {arrive.replace("SKIP", "Q2") if release_at_end else ""}
$DONE:
    ld.global.u32 %r25, [%rd1];
    setp.ne.s32 %p7, %r25, 0;
    @%p7 bra $TILE;
    ret;
$PRODUCER:
    mov.u32 %r24, 1;
$F:
    {bar_full} {bar_empty}
    {_wait("%r18", "%r24") if fill else ""}
    elect.sync %r26|%p8, -1;
    @!%p8 bra $E;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r17], 1024;
    mov.b64 %rd4, d;
    shl.b32 %r27, %r12, 10; add.s32 %r27, %r27, %r15;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r27], [%rd4, {{%r1, %r2}}], [%r17];
$E:
    {_advance("%r12", "%r24")}
    ld.global.u32 %r25, [%rd1];
    setp.ne.s32 %p7, %r25, 0;
    @%p7 bra $F;
    ret;
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ring(), set()),
        (ring(drain=0), set()),
        (ring(drain=2), {"drain"}),
        (ring(drain_at_end=1), {"drain"}),
        (ring(release_first=True), {"drain"}),
        (ring(release="newest"), {"drain", "release"}),
        (ring(release="newest", drain=0), {"release"}),
        (ring(first=""), {"drain", "release"}),
        (ring(release="never"), {"release"}),
        (ring(release_at_end=False), {"release"}),
        (ring(wait=""), {"fill"}),
        (ring(fill=""), {"drain", "fill"}),
    ],
    ids=[
        "lag-one",
        "lag-one-with-full-drain",
        "weak-wait",
        "weak-wait-after-the-loop",
        "release-before-wait",
        "releases-the-newest",
        "releases-the-newest-drained",
        "releases-on-the-first-trip",
        "never-releases",
        "forgets-the-last-stage",
        "reads-without-waiting",
        "fills-without-waiting",
    ],
)
def test_ring(body: str, expected: set[str]) -> None:
    assert rules(body, threads=160) == expected


def test_a_ring_nobody_can_be_seen_to_use_is_not_passed() -> None:
    assert rules(ring().replace("setp.eq.s32 %p1, %r14, 4;", "setp.eq.s32 %p1, %r14, 9;"), threads=160) == {"drain"}


def test_unknown_addresses_are_not_passed() -> None:
    unknown = "ld.global.u32 %r22, [%rd1]; cvt.u64.u32 %rd7, %r22;"
    assert "drain" in rules(ring().replace("cvt.u64.u32 %rd7, %r22;", unknown), threads=160)


def test_text_without_a_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        check_text("// nothing")
