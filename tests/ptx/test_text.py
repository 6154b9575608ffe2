from __future__ import annotations

import pytest

from tests.ptx.flow import backward_must, forward, read, written
from tests.ptx.remainders import moduli
from tests.ptx.slicing import END, slice_kernel
from tests.ptx.text import Instruction, Kernel, kernels, split_operands
from tests.ptx.values import Values


def kernel(body: str, threads: int = 128) -> Kernel:
    """One kernel around `body`."""
    (found,) = kernels(f".visible .entry k(.param .u64 p)\n.reqntid {threads}, 1, 1\n{{\n{body}\n}}\n")
    return found


def _one(text: str) -> Instruction:
    return kernel(text).instructions[0]


LOOP = """
    mov.u32 %r1, 0;   // comment with { and ;
$L1:
    add.s32 %r1, %r1, 1;
    setp.lt.s32 %p1, %r1, %r2;
    @%p1 bra $L1;
    ret;
"""


def test_instructions_labels_and_successors() -> None:
    k = kernel(LOOP)
    assert [i.op for i in k.instructions] == ["mov.u32", "add.s32", "setp.lt.s32", "bra", "ret"]
    assert k.successors == ((1,), (2,), (3,), (1, 4), ())
    assert k.predecessors == ((), (0, 3), (1,), (2,), (3,))
    assert k.leaders == (0, 1, 4)
    assert (k.instructions[3].predicate, k.instructions[3].negated) == ("%p1", False)
    assert [i.line for i in k.instructions] == [5, 7, 8, 9, 10]


def test_scopes_have_labels_and_predicates_of_their_own() -> None:
    wait = "{ .reg .pred P1; W: mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2; @P1 bra D; bra W; D: }"
    k = kernel(f"{wait}\n{wait}\nret;")
    assert [i.op.split(".")[0] for i in k.instructions] == ["mbarrier", "bra", "bra"] * 2 + ["ret"]
    assert k.successors == ((1,), (3, 2), (0,), (4,), (6, 5), (3,), ())
    first, second = k.instructions[1].predicate, k.instructions[4].predicate
    assert first != second
    assert written(k.instructions[0]) == (first,)


def test_block_size_and_negated_guard() -> None:
    k = kernel("@!%p1 st.global.u32 [%rd1], %r1;\nret;", threads=384)
    assert k.threads == 384
    assert (k.instructions[0].predicate, k.instructions[0].negated) == ("%p1", True)


@pytest.mark.parametrize("text", ["brx.idx %r1, table;", "call.uni f, (p);"])
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        kernel(f"{text}\nret;")


def test_operands_are_split_outside_brackets() -> None:
    assert split_operands("[%rd1, {%r1, %r2}], [%r3+8], 1") == ("[%rd1, {%r1, %r2}]", "[%r3+8]", "1")


@pytest.mark.parametrize(
    ("text", "writes", "reads"),
    [
        ("add.s32 %r1, %r2, %r3;", ("%r1",), ("%r2", "%r3")),
        ("@%p1 mov.u32 %r1, %r2;", ("%r1",), ("%r2", "%p1")),
        ("st.shared.u32 [%r1+4], %r2;", (), ("%r1", "%r2")),
        ("mov.b64 {%r1, %r2}, %rd1;", ("%r1", "%r2"), ("%rd1",)),
        ("elect.sync %r1|%p1, -1;", ("%r1", "%p1"), ()),
        ("wgmma.mma_async.x {%f1, %f2}, %rd1, %rd2, %p1;", ("%f1", "%f2"), ("%f1", "%f2", "%rd1", "%rd2", "%p1")),
        ("cp.async.bulk.tensor.2d.x [%r1], [%rd1, {%r2}], [%r3];", (), ("%r1", "%rd1", "%r2", "%r3")),
    ],
)
def test_registers_written_and_read(text: str, writes: tuple, reads: tuple) -> None:
    assert written(_one(text)) == writes
    assert read(_one(text)) == reads


def test_forward_joins_over_paths_and_leaves_the_unreachable_out() -> None:
    k = kernel("@%p1 bra $A;\nmov.u32 %r1, 1;\n$A:\nmov.u32 %r2, 2;\nret;\nmov.u32 %r3, 3;")
    states = forward(k, frozenset(), lambda i, s: s | {i.index}, lambda a, b: a | b)
    assert states[2] == {0, 1}
    assert states[4] is None


def test_backward_must_needs_every_path() -> None:
    both = kernel("@%p1 bra $A;\nmembar.gl;\nret;\n$A:\nmembar.gl;\nret;")
    one = kernel("@%p1 bra $A;\nmembar.gl;\n$A:\nret;")
    assert backward_must(both, lambda i: i.op == "membar.gl", ends=False)[0]
    assert not backward_must(one, lambda i: i.op == "membar.gl", ends=False)[0]


def test_values_are_linear_and_stop_at_what_several_definitions_reach() -> None:
    k = kernel(
        """
        mov.u32 %r1, %tid.x;
        shl.b32 %r2, %r1, 3;
        add.s32 %r3, %r2, 16;
        @%p1 bra $A;
        mov.u32 %r4, 1;
        bra $B;
$A:
        mov.u32 %r4, 2;
$B:
        add.s32 %r5, %r4, 4;
        ret;
        """
    )
    values = Values(k)
    end = len(k.instructions) - 1
    assert values.operand("%r3", end) == values.operand("%tid.x", end).times(8).plus(values.operand("16", end))
    (leaf,) = values.operand("%r5", end).leaves
    assert leaf.register == "%r4"
    assert len(leaf.definitions) == 2
    assert values.address("[%r2+16]", end) == values.operand("%r3", end)


def test_a_slice_keeps_what_decides_an_event_and_skips_the_rest() -> None:
    k = kernel(
        """
        mov.u32 %r1, 0;
        mov.u32 %r9, 0;
$L:
        add.s32 %r9, %r9, 7;
        setp.gt.s32 %p2, %r9, 99;
        @%p2 bra $S;
        st.global.u32 [%rd1], %r9;
$S:
        mbarrier.arrive.shared.b64 _, [%r1];
        add.s32 %r1, %r1, 8;
        setp.lt.s32 %p1, %r1, 64;
        @%p1 bra $L;
        ret;
        """
    )
    (event,) = (i.index for i in k.instructions if i.op.startswith("mbarrier"))
    found = slice_kernel(k, [event], ["%r1"], frozenset())
    assert found.registers == {"%r1", "%p1"}
    skipped = next(i.index for i in k.instructions if i.is_branch and i.predicate == "%p2")
    assert found.joins == {skipped: event}
    assert END not in found.joins.values()


DIVIDE = (
    "mul.hi.s32 %r2, {x}, {factor}; shr.u32 %r3, %r2, 31; {shift} add.s32 %r4, %r2, %r3; mul.lo.s32 %r5, %r4, {by};"
)
BY_SIX = {"x": "%r1", "factor": 715827883, "shift": "", "by": 6}
BY_FIVE = {"x": "%r1", "factor": 1717986919, "shift": "shr.s32 %r2, %r2, 1;", "by": 5}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("rem.u32 %r9, %r1, 6;", 6),
        (DIVIDE.format(**BY_SIX), 6),
        (DIVIDE.format(**BY_FIVE), 5),
        ("mul.hi.u32 %r2, %r1, -1431655765; shr.u32 %r4, %r2, 1; mul.lo.s32 %r5, %r4, 3;", 3),
        ("shr.u32 %r3, %r1, 31; add.s32 %r4, %r1, %r3; and.b32 %r5, %r4, -2;", 2),
        (DIVIDE.format(**{**BY_SIX, "factor": 715827880}), None),
        (DIVIDE.format(**{**BY_SIX, "x": "%r7"}), None),
        ("mov.u32 %r5, 6;", None),
    ],
    ids=["rem", "six", "five", "three-unsigned", "two", "wrong-factor", "another-dividend", "difference"],
)
def test_remainders_are_recognised(body: str, expected: int | None) -> None:
    tail = "" if body.startswith("rem") else "sub.s32 %r9, %r1, %r5;"
    k = kernel(f"ld.global.u32 %r1, [%rd1]; ld.global.u32 %r7, [%rd1]; {body} {tail} ret;")
    assert list(moduli(k, Values(k)).values()) == ([] if expected is None else [expected])
