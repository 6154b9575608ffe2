"""Bad input to every op: a ValueError that names the op, the argument, what was expected and what was got."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import culax
from tests.ops import cases

OPS = torch.ops.culax
F32, F64, BF16, I32 = torch.float32, torch.float64, torch.bfloat16, torch.int32


def kda_forward() -> dict[str, Any]:
    case = cases.kda(batch=2, tokens=3, dtype=F32, sizes=(2, 4, 8, 6))
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "scale")
    return dict(zip(names, case.arguments)) | {"output_final_state": True}


def packed_forward() -> dict[str, Any]:
    case = cases.kda(tokens=9, dtype=F32, lengths=(4, 5), sizes=(2, 4, 8, 6))
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "scale")
    return dict(zip(names, case.arguments)) | {"output_final_state": True}


def kda_backward() -> dict[str, Any]:
    arguments = kda_forward()
    o, final_state, Aqk, Akk = OPS.kda_fwd(**arguments)
    del arguments["output_final_state"]
    return {"do": o, "dht": final_state, "Aqk": Aqk, "Akk": Akk} | arguments


def double_backward() -> dict[str, Any]:
    arguments = kda_backward()
    gradients = {f"gd{name}": arguments[name] for name in cases.KDA_INPUTS}
    return gradients | {name: value for name, value in arguments.items() if name not in ("Aqk", "Akk")}


def product() -> dict[str, Any]:
    _, x, offs = cases.wgrad()
    return {"x": x, "weight": cases.normal(9, 4, 5, 3), "offs": offs}


def main_grad() -> dict[str, Any]:
    return product() | {"main_grad": torch.zeros(4, 5, 3)}


def wgrad() -> dict[str, Any]:
    return dict(zip(("mat_a", "mat_b", "offs"), cases.wgrad()))


def into() -> dict[str, Any]:
    return {"out": torch.zeros(4, 6, 5)} | wgrad()


def into_list() -> dict[str, Any]:
    return {"outs": list(torch.zeros(4, 6, 5))} | wgrad()


def mx() -> dict[str, Any]:
    return cases.scaled_wgrad("e4m3")


def mx_concatenated() -> dict[str, Any]:
    return cases.scaled_wgrad("e5m2", "concatenated")


def nv() -> dict[str, Any]:
    return cases.scaled_wgrad("nvfp4")


BASES = {
    "kda_fwd": kda_forward,
    "kda_fwd/packed": packed_forward,
    "kda_bwd": kda_backward,
    "_kda_bwd_bwd": double_backward,
    "grouped_mm": product,
    "_grouped_mm_main_grad": main_grad,
    "grouped_wgrad": wgrad,
    "grouped_wgrad_out": into,
    "grouped_wgrad_out_list": into_list,
    "grouped_wgrad/mx": mx,
    "grouped_wgrad/mx_concatenated": mx_concatenated,
    "grouped_wgrad/nv": nv,
}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def like(name: str, **changes: Any) -> Any:
    """A change of argument ``name`` to zeros of another shape, dtype or device."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        tensor = arguments[name]
        if "cut" in changes:
            return {name: tensor.narrow(changes["cut"], 0, tensor.shape[changes["cut"]] - 1)}
        options = {"shape": tensor.shape, "dtype": tensor.dtype, **changes}
        return {name: torch.zeros(options.pop("shape"), **options)}

    return change


def fixed(**values: Any) -> Any:
    """A change of arguments to fixed values."""
    return lambda arguments: values


# (op, argument blamed, what the message says was expected, change)
KDA_TABLE = [
    ("kda_fwd", "q", "4 dimensions (B, T, H, K)", like("q", shape=(2, 3, 8))),
    ("kda_fwd", "q", "dtype bfloat16 or float16 or float32 or float64", like("q", dtype=I32)),
    ("kda_fwd", "q", "H of at least 1", like("q", shape=(2, 3, 0, 8))),
    ("kda_fwd", "q", "K of at least 1", like("q", shape=(2, 3, 2, 0))),
    ("kda_fwd", "k", "shape (B, T, H, K) = (2, 3, 2, 8)", like("k", cut=3)),
    ("kda_fwd", "k", "shape (B, T, H, K) = (2, 3, 2, 8)", like("k", cut=1)),
    ("kda_fwd", "k", "dtype float32", like("k", dtype=BF16)),
    ("kda_fwd", "k", "device cpu (that of `q`)", like("k", device="meta")),
    ("kda_fwd", "v", "4 dimensions (B, T, HV, V)", like("v", shape=(2, 3, 4))),
    ("kda_fwd", "v", "HV a multiple of H = 2", like("v", cut=2)),
    ("kda_fwd", "v", "shape (B, T, HV, V) = (2, 3, 4, 6)", like("v", cut=1)),
    ("kda_fwd", "v", "HV of at least 1", like("v", shape=(2, 3, 0, 6))),
    ("kda_fwd", "v", "V of at least 1", like("v", shape=(2, 3, 4, 0))),
    ("kda_fwd", "v", "dtype float32", like("v", dtype=F64)),
    ("kda_fwd", "g", "shape (B, T, HV, K) = (2, 3, 4, 8)", like("g", shape=(2, 3, 2, 8))),
    ("kda_fwd", "g", "shape (B, T, HV, K) = (2, 3, 4, 8)", like("g", shape=(2, 3, 4))),
    ("kda_fwd", "g", "dtype float32", like("g", dtype=F64)),
    ("kda_fwd", "g", "device cpu (that of `q`)", like("g", device="meta")),
    ("kda_fwd", "beta", "shape (B, T, HV) = (2, 3, 4)", like("beta", shape=(2, 3, 4, 1))),
    ("kda_fwd", "beta", "dtype float32", like("beta", dtype=BF16)),
    ("kda_fwd", "initial_state", "shape (N, HV, K, V) = (2, 4, 8, 6)", like("initial_state", shape=(2, 4, 6, 8))),
    ("kda_fwd", "initial_state", "shape (N, HV, K, V) = (2, 4, 8, 6)", like("initial_state", cut=0)),
    ("kda_fwd", "initial_state", "dtype float32", like("initial_state", dtype=BF16)),
    ("kda_fwd", "initial_state", "device cpu (that of `q`)", like("initial_state", device="meta")),
    ("kda_fwd", "scale", "a finite number", fixed(scale=float("nan"))),
    ("kda_fwd", "scale", "a finite number", fixed(scale=float("inf"))),
    ("kda_fwd", "q", "B = 1 with cu_seqlens", fixed(cu_seqlens=ints(0, 1, 3))),
    ("kda_fwd/packed", "cu_seqlens", "1 dimension (N+1)", fixed(cu_seqlens=ints(0, 4, 9)[None])),
    ("kda_fwd/packed", "cu_seqlens", "N+1 of at least 1", fixed(cu_seqlens=ints())),
    ("kda_fwd/packed", "cu_seqlens", "dtype int32 or int64", fixed(cu_seqlens=torch.tensor([0.0, 4.0, 9.0]))),
    ("kda_fwd/packed", "cu_seqlens", "device cpu (that of `q`)", like("cu_seqlens", device="meta")),
    ("kda_fwd/packed", "cu_seqlens", "offsets that never descend", fixed(cu_seqlens=ints(0, 6, 4))),
    ("kda_fwd/packed", "cu_seqlens", "offsets of at most T = 9", fixed(cu_seqlens=ints(0, 6, 10))),
    ("kda_fwd/packed", "cu_seqlens", "a first offset of 0", fixed(cu_seqlens=ints(1, 4, 9))),
    ("kda_fwd/packed", "cu_seqlens", "a first offset of 0", fixed(cu_seqlens=ints(-1, 4, 9))),
    ("kda_fwd/packed", "initial_state", "shape (N, HV, K, V) = (3, 4, 8, 6)", fixed(cu_seqlens=ints(0, 2, 4, 9))),
    ("kda_bwd", "do", "shape (B, T, HV, V) = (2, 3, 4, 6)", like("do", cut=3)),
    ("kda_bwd", "do", "dtype float32", like("do", dtype=BF16)),
    ("kda_bwd", "do", "device cpu (that of `q`)", like("do", device="meta")),
    ("kda_bwd", "dht", "shape (N, HV, K, V) = (2, 4, 8, 6)", like("dht", shape=(0, 4, 8, 6))),
    ("kda_bwd", "dht", "dtype float32", like("dht", dtype=F64)),
    ("kda_bwd", "Aqk", "a tensor, as `Akk` is given (both or neither)", fixed(Aqk=None)),
    ("kda_bwd", "Akk", "a tensor, as `Aqk` is given (both or neither)", fixed(Akk=None)),
    ("kda_bwd", "Aqk", "shape (B, T, HV, 64) = (2, 3, 4, 64)", like("Aqk", cut=3)),
    ("kda_bwd", "Akk", "dtype float32", like("Akk", dtype=BF16)),
    ("kda_bwd", "beta", "shape (B, T, HV) = (2, 3, 4)", like("beta", cut=2)),
    ("_kda_bwd_bwd", "gdq", "shape (B, T, H, K) = (2, 3, 2, 8)", like("gdq", cut=0)),
    ("_kda_bwd_bwd", "gdbeta", "dtype float32", like("gdbeta", dtype=F64)),
    ("_kda_bwd_bwd", "gdinitial_state", "None, as there is no initial_state", fixed(initial_state=None)),
]
GROUPED_TABLE = [
    ("grouped_mm", "x", "2 dimensions (T, K)", like("x", shape=(2, 74, 5))),
    ("grouped_mm", "x", "dtype bfloat16 or float16 or float32 or float64", like("x", dtype=I32)),
    ("grouped_mm", "weight", "3 dimensions (E, K, N)", like("weight", shape=(5, 3))),
    ("grouped_mm", "weight", "shape (E, K, N) = (4, 5, 3)", like("weight", cut=1)),
    ("grouped_mm", "weight", "shape (E, K, N) = (4, 5, 3)", like("weight", cut=0)),
    ("grouped_mm", "weight", "dtype float32", like("weight", dtype=BF16)),
    ("grouped_mm", "weight", "device cpu (that of `x`)", like("weight", device="meta")),
    ("grouped_mm", "offs", "offsets of at most T = 74", fixed(offs=ints(3, 3, 69, 75))),
    ("grouped_mm", "offs", "dtype int32 or int64", like("offs", dtype=F32)),
    ("_grouped_mm_main_grad", "main_grad", "shape (E, K, N) = (4, 5, 3)", like("main_grad", cut=2)),
    ("grouped_wgrad", "mat_a", "2 dimensions (M, T)", like("mat_a", shape=(74,))),
    ("grouped_wgrad", "mat_a", "dtype bfloat16 or float16 or float32 or float64 or", like("mat_a", dtype=I32)),
    ("grouped_wgrad", "mat_b", "2 dimensions (T, N)", like("mat_b", shape=(4, 74, 5))),
    ("grouped_wgrad", "mat_b", "shape (T, N) = (74, 5)", like("mat_b", cut=0)),
    ("grouped_wgrad", "mat_b", "dtype float32", like("mat_b", dtype=BF16)),
    ("grouped_wgrad", "mat_b", "device cpu (that of `mat_a`)", like("mat_b", device="meta")),
    ("grouped_wgrad", "offs", "1 dimension (E)", fixed(offs=ints(1, 2)[None])),
    ("grouped_wgrad", "offs", "dtype int32 or int64", like("offs", dtype=torch.int16)),
    ("grouped_wgrad", "offs", "device cpu (that of `mat_a`)", like("offs", device="meta")),
    ("grouped_wgrad", "offs", "offsets that never descend", fixed(offs=ints(3, 2, 69, 70))),
    ("grouped_wgrad", "offs", "offsets that never descend", fixed(offs=ints(-1, 2, 69, 70))),
    ("grouped_wgrad", "offs", "offsets of at most T = 74", fixed(offs=ints(3, 3, 69, 75))),
    ("grouped_wgrad", "out_dtype", "bfloat16 or float16 or float32", fixed(out_dtype=F64)),
    ("grouped_wgrad", "out_dtype", "bfloat16 or float16 or float32", fixed(out_dtype=I32)),
    ("grouped_wgrad", "scale_layout", "'padded' or 'concatenated'", fixed(scale_layout="swizzled")),
    ("grouped_wgrad", "operand_layout", "'2d' or 'ragged'", fixed(operand_layout="3d")),
    ("grouped_wgrad", "mat_a", "a dense buffer, unit stride along tokens", fixed(operand_layout="ragged")),
    ("grouped_wgrad", "scale_a", "None with float32 operands", fixed(scale_a=torch.zeros(128, 4))),
    ("grouped_wgrad", "global_scale_b", "None with float32 operands", fixed(global_scale_b=torch.zeros(4))),
    ("grouped_wgrad_out", "out", "shape (E, M, N) = (4, 6, 5)", like("out", cut=1)),
    ("grouped_wgrad_out", "out", "shape (E, M, N) = (4, 6, 5)", like("out", shape=(6, 5))),
    ("grouped_wgrad_out", "out", "dtype bfloat16 or float16 or float32", like("out", dtype=F64)),
    ("grouped_wgrad_out", "out", "device cpu (that of `mat_a`)", like("out", device="meta")),
    (
        "grouped_wgrad_out",
        "out",
        "dtype float32 or float64 with accumulate",
        fixed(out=torch.zeros(4, 6, 5).bfloat16(), accumulate=True),
    ),
    ("grouped_wgrad_out", "out", "elements that do not overlap", fixed(out=torch.zeros(1, 6, 5).expand(4, 6, 5))),
    ("grouped_wgrad_out", "offs", "offsets that never descend", fixed(offs=ints(3, 2, 69, 70))),
    ("grouped_wgrad_out_list", "outs", "one tensor an expert, E = 4", fixed(outs=list(torch.zeros(3, 6, 5)))),
    (
        "grouped_wgrad_out_list",
        "outs[1]",
        "shape (M, N) = (6, 5)",
        fixed(outs=[torch.zeros(6, 5), *torch.zeros(3, 5, 6)]),
    ),
    (
        "grouped_wgrad_out_list",
        "outs[3]",
        "dtype float32",
        fixed(outs=[*torch.zeros(3, 6, 5), torch.zeros(6, 5).half()]),
    ),
    (
        "grouped_wgrad_out_list",
        "outs[2]",
        "memory apart from that of outs[0]",
        fixed(outs=[(x := torch.zeros(6, 5)), torch.zeros(6, 5), x, torch.zeros(6, 5)]),
    ),
    (
        "grouped_wgrad_out_list",
        "outs[0]",
        "dtype float32 or float64 with accumulate",
        fixed(outs=list(torch.zeros(4, 6, 5).half()), accumulate=True),
    ),
]
SCALED_TABLE = [
    ("grouped_wgrad/mx", "scale_a", "a scale tensor for float8_e4m3fn operands", fixed(scale_a=None)),
    ("grouped_wgrad/mx", "scale_b", "a scale tensor for float8_e4m3fn operands", fixed(scale_b=None)),
    ("grouped_wgrad/mx", "scale_a", "dtype float8_e8m0fnu", fixed(scale_a=torch.zeros(128, 16))),
    ("grouped_wgrad/mx", "scale_a", "2 dimensions (rows, columns)", lambda a: {"scale_a": a["scale_a"].view(-1)}),
    ("grouped_wgrad/mx", "scale_a", "128 rows", lambda a: {"scale_a": a["scale_a"].view(256, -1)}),
    (
        "grouped_wgrad/mx",
        "scale_b",
        "a multiple of 4 columns",
        lambda a: {"scale_b": a["scale_b"][:, :15].contiguous()},
    ),
    (
        "grouped_wgrad/mx",
        "scale_b",
        "at least 16 columns for these offs",
        lambda a: {"scale_b": a["scale_b"][:, :12].contiguous()},
    ),
    ("grouped_wgrad/mx", "scale_b", "a contiguous tensor", lambda a: {"scale_b": a["scale_b"].view(20, 128).t()}),
    (
        "grouped_wgrad/mx",
        "global_scale_a",
        "None: only fp4 operands have global scales",
        fixed(global_scale_a=torch.ones(4)),
    ),
    ("grouped_wgrad/mx", "mat_b", "dtype float8_e4m3fn or float8_e5m2", lambda a: {"mat_b": a["mat_b"].float()}),
    ("grouped_wgrad/mx", "out_dtype", "bfloat16 or float16 or float32", fixed(out_dtype=F64)),
    (
        "grouped_wgrad/mx_concatenated",
        "scale_a",
        "16 columns in the concatenated layout",
        lambda a: {"scale_a": a["scale_a"][:, :12].contiguous()},
    ),
    (
        "grouped_wgrad/mx_concatenated",
        "offs",
        "experts of a multiple of 128 tokens",
        fixed(offs=ints(100, 128, 384, 512)),
    ),
    ("grouped_wgrad/nv", "global_scale_a", "one fp32 global scale an expert (E,)", fixed(global_scale_a=None)),
    ("grouped_wgrad/nv", "global_scale_b", "shape (E) = (4,)", fixed(global_scale_b=torch.ones(3))),
    ("grouped_wgrad/nv", "global_scale_b", "dtype float32", fixed(global_scale_b=torch.ones(4).double())),
    (
        "grouped_wgrad/nv",
        "scale_b",
        "dtype float8_e4m3fn",
        lambda a: {"scale_b": a["scale_b"].view(torch.float8_e8m0fnu)},
    ),
    ("grouped_wgrad/nv", "offs", "multiples of 16 with fp4 operands", fixed(offs=ints(128, 136, 384, 512))),
    (
        "grouped_wgrad/nv",
        "mat_a",
        "a multiple of 16 tokens",
        lambda a: {"mat_a": a["mat_a"][:, :250], "mat_b": a["mat_b"][:250]},
    ),
]
TABLE = KDA_TABLE + GROUPED_TABLE + SCALED_TABLE


@pytest.mark.parametrize(
    "op, argument, expected, change", TABLE, ids=[f"{i}-{row[0]}-{row[1]}" for i, row in enumerate(TABLE)]
)
def test_message(op: str, argument: str, expected: str, change: Any) -> None:
    name = op.partition("/")[0]
    arguments = BASES[op]()
    arguments |= change(arguments)
    pattern = re.escape(f"{name}: argument `{argument}`: expected {expected}") + ".*, got ."
    with pytest.raises(ValueError, match=pattern):
        getattr(OPS, name)(**arguments)


@pytest.mark.parametrize("op", BASES)
def test_unchanged_arguments_pass(op: str) -> None:
    """Without its change each call of the table is legal, so the errors come from the changes."""
    getattr(OPS, op.partition("/")[0])(**BASES[op]())


def test_cached_signatures_still_check_values() -> None:
    """The metadata checks are remembered by signature; the checks of values are not."""
    arguments = wgrad()
    OPS.grouped_wgrad(**arguments)
    with pytest.raises(ValueError, match="argument `offs`: expected offsets that never descend"):
        OPS.grouped_wgrad(**arguments | {"offs": ints(3, 2, 69, 70)})


@pytest.mark.parametrize("kind, sizes", [("e5m2", (128, 0, 256, 97, 0)), ("nvfp4", (64, 128, 0, 48, 0))])
def test_the_last_filled_expert_may_end_anywhere(kind: str, sizes: tuple[int, ...]) -> None:
    """In the concatenated scale layout, which then is the padded one."""
    calls = [cases.scaled_wgrad(kind, layout, sizes=sizes) for layout in ("concatenated", "padded")]
    assert torch.equal(*(OPS.grouped_wgrad(**arguments) for arguments in calls))


@pytest.mark.parametrize("other", [torch.zeros(6, 4), torch.zeros(6, 5, dtype=BF16), torch.zeros(6, 1).expand(6, 5)])
def test_lists_are_told_apart_by_every_output(other: torch.Tensor) -> None:
    arguments = into_list()
    OPS.grouped_wgrad_out_list(**arguments)
    outs = [*arguments["outs"][:2], other, arguments["outs"][3]]
    with pytest.raises(ValueError, match=r"grouped_wgrad_out_list: argument `outs\[2\]`"):
        OPS.grouped_wgrad_out_list(**arguments | {"outs": outs})


@pytest.mark.parametrize("name", ["grouped_wgrad", "kda_fwd"])
def test_compiled_code_checks(name: str) -> None:
    """Bad metadata is refused while tracing; bad values when the compiled code runs."""
    good = packed_forward() if name == "kda_fwd" else wgrad()
    offsets = "cu_seqlens" if name == "kda_fwd" else "offs"
    compiled = torch.compile(lambda arguments: getattr(OPS, name)(**arguments), fullgraph=True, backend="eager")
    compiled(good)
    with pytest.raises(ValueError, match=f"{name}: argument `{offsets}`: expected offsets that never descend"):
        compiled(good | {offsets: ints(0, 6, 4) if name == "kda_fwd" else ints(3, 2, 69, 70)})
    with pytest.raises(Exception, match=f"{name}: argument `{offsets}`: expected dtype int32 or int64"):
        compiled(good | {offsets: good[offsets].float()})


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda x: culax.explain("kda_forward", x), "argument `op`: expected one of"),
        (lambda x: culax.explain("grouped_mm", x), "argument `weight`: expected a value"),
        (lambda x: culax.explain("grouped_mm", x, x, x, x), "arguments of grouped_mm"),
        (lambda x: culax.explain("grouped_mm", x, x, wrong=x), "arguments of grouped_mm"),
        (lambda x: culax.explain("grouped_mm", x, x, x), "argument `weight`: expected 3 dimensions"),
        (lambda x: culax.warmup("grouped_mm", 1, 2, 3), "expected at least one tensor"),
    ],
    ids=["unknown_op", "missing", "too_many", "unknown_name", "bad_tensor", "no_tensor"],
)
def test_explain_and_warmup(call: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        call(torch.zeros(3, 4))
