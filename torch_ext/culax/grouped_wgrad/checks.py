"""Checks of the grouped ops' arguments; the only place that builds their problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import checks
from .problem import GroupedMmProblem, WgradProblem

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MX_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
NV_FLOAT = torch.float4_e2m1fn_x2
BLOCKS = {torch.float8_e4m3fn: 32, torch.float8_e5m2: 32, NV_FLOAT: 16}
SCALE_LAYOUTS = ("padded", "concatenated")
OPERAND_LAYOUTS = ("2d", "ragged")
SCALE_NAMES = ("scale_a", "scale_b", "global_scale_a", "global_scale_b")

Size = int | torch.SymInt
Scales = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _round_up(size: Size, multiple: int) -> Size:
    return (size + multiple - 1) // multiple * multiple


def token_count(mat_a: Tensor) -> Size:
    """T in elements: fp4 operands hold two tokens a byte."""
    return mat_a.shape[1] * 2 if mat_a.dtype is NV_FLOAT else mat_a.shape[1]


def output_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The output dtypes that operands of ``dtype`` allow."""
    return (torch.float64,) if dtype is torch.float64 else (torch.bfloat16, torch.float16, torch.float32)


def default_output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The output dtype when none is asked for: the operands', bf16 for block-scaled ones."""
    return torch.bfloat16 if dtype in BLOCKS else dtype


def _expect_offs(op: str, offs: Tensor, device: torch.device, first: str) -> None:
    checks.expect_rank(op, "offs", offs, "E")
    checks.expect_dtype(op, "offs", offs, checks.OFFSET_DTYPES)
    checks.expect_device(op, "offs", offs, device, first)


def validate_mm(x: Tensor, weight: Tensor, offs: Tensor) -> None:
    """Check grouped_mm's metadata."""
    op = "grouped_mm"
    checks.expect_rank(op, "x", x, "T, K")
    checks.expect_rank(op, "weight", weight, "E, K, N")
    checks.expect_dtype(op, "x", x, FLOATS)
    checks.expect_dtype(op, "weight", weight, (x.dtype,))
    checks.expect_device(op, "weight", weight, x.device, "x")
    _expect_offs(op, offs, x.device, "x")
    checks.expect_shape(op, "weight", weight, "E, K, N", (offs.shape[0], x.shape[1], weight.shape[2]))


def _expect_scale(op: str, argument: str, scale: Tensor | None, rows: Size, dtype: torch.dtype) -> None:
    if scale is None:
        raise checks.bad(op, argument, f"a scale tensor for {str(dtype).removeprefix('torch.')} operands", None)
    checks.expect_rank(op, argument, scale, "rows, columns")
    checks.expect_dtype(op, argument, scale, (torch.float8_e4m3fn if dtype is NV_FLOAT else torch.float8_e8m0fnu,))
    if checks.differ(scale.shape[0], rows):
        raise checks.bad(op, argument, f"{rows} rows (a multiple of 128 that covers the operand)", tuple(scale.shape))
    if not checks.symbolic(scale) and not scale.is_contiguous():
        raise checks.bad(op, argument, "a contiguous tensor", f"strides {scale.stride()}")


def _validate_scales(
    op: str, mat_a: Tensor, mat_b: Tensor, experts: Size, scales: Scales, scale_layout: str, operand_layout: str
) -> None:
    for name, scale in zip(SCALE_NAMES, scales, strict=True):
        if scale is not None:
            if mat_a.dtype not in BLOCKS:
                raise checks.bad(op, name, f"None with {checks.dtype_names((mat_a.dtype,))} operands", "a tensor")
            checks.expect_device(op, name, scale, mat_a.device, "mat_a")
    if mat_a.dtype not in BLOCKS:
        return
    tokens, block = token_count(mat_a), BLOCKS[mat_a.dtype]
    for name, scale, rows in (("scale_a", scales[0], mat_a.shape[0]), ("scale_b", scales[1], mat_b.shape[1])):
        _expect_scale(op, name, scale, _round_up(rows, 128), mat_a.dtype)
        assert scale is not None
        columns = _round_up((tokens + block - 1) // block, 4)
        if scale_layout == "concatenated" and checks.differ(scale.shape[1], columns):
            raise checks.bad(op, name, f"{columns} columns in the concatenated layout", tuple(scale.shape))
        if isinstance(scale.shape[1], int) and scale.shape[1] % 4:
            raise checks.bad(op, name, "a multiple of 4 columns", tuple(scale.shape))
    for name, scale in zip(SCALE_NAMES[2:], scales[2:], strict=True):
        if mat_a.dtype is NV_FLOAT:
            if scale is None:
                raise checks.bad(op, name, "one fp32 global scale an expert (E,) for fp4 operands", None)
            checks.expect_shape(op, name, scale, "E", (experts,))
            checks.expect_dtype(op, name, scale, (torch.float32,))
        elif scale is not None:
            raise checks.bad(op, name, "None: only fp4 operands have global scales", tuple(scale.shape))


def validate_operands(
    op: str, mat_a: Tensor, mat_b: Tensor, offs: Tensor, scales: Scales, scale_layout: str, operand_layout: str
) -> None:
    """Check the metadata of both operands, the offsets and the scales of a grouped weight gradient."""
    checks.expect_rank(op, "mat_a", mat_a, "M, T")
    checks.expect_rank(op, "mat_b", mat_b, "T, N")
    checks.expect_dtype(op, "mat_a", mat_a, (*FLOATS, *BLOCKS))
    checks.expect_dtype(op, "mat_b", mat_b, MX_FLOATS if mat_a.dtype in MX_FLOATS else (mat_a.dtype,))
    checks.expect_device(op, "mat_b", mat_b, mat_a.device, "mat_a")
    checks.expect_shape(op, "mat_b", mat_b, "T, N", (mat_a.shape[1], mat_b.shape[1]))
    _expect_offs(op, offs, mat_a.device, "mat_a")
    if scale_layout not in SCALE_LAYOUTS:
        raise checks.bad(op, "scale_layout", " or ".join(map(repr, SCALE_LAYOUTS)), repr(scale_layout))
    if operand_layout not in OPERAND_LAYOUTS:
        raise checks.bad(op, "operand_layout", " or ".join(map(repr, OPERAND_LAYOUTS)), repr(operand_layout))
    if operand_layout == "ragged":
        for name, matrix in (("mat_a", mat_a), ("mat_b", mat_b.t())):
            if not checks.symbolic(matrix) and not matrix.is_contiguous():
                got = (mat_a if name == "mat_a" else mat_b).stride()
                raise checks.bad(op, name, "a dense buffer, unit stride along tokens (ragged layout)", f"strides {got}")
    if mat_a.dtype is NV_FLOAT and isinstance(mat_a.shape[1], int) and mat_a.shape[1] % 8:
        raise checks.bad(op, "mat_a", "a multiple of 16 tokens (8 packed bytes)", tuple(mat_a.shape))
    _validate_scales(op, mat_a, mat_b, offs.shape[0], scales, scale_layout, operand_layout)


def validate_wgrad(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    out_dtype: torch.dtype | None = None,
) -> None:
    """Check grouped_wgrad's metadata."""
    op = "grouped_wgrad"
    scales = (scale_a, scale_b, global_scale_a, global_scale_b)
    validate_operands(op, mat_a, mat_b, offs, scales, scale_layout, operand_layout)
    if out_dtype is not None and out_dtype not in output_dtypes(mat_a.dtype):
        raise checks.bad(op, "out_dtype", checks.dtype_names(output_dtypes(mat_a.dtype)), out_dtype)


def _validate_out(op: str, argument: str, out: Tensor, mat_a: Tensor, accumulate: bool) -> None:
    checks.expect_dtype(op, argument, out, output_dtypes(mat_a.dtype))
    checks.expect_device(op, argument, out, mat_a.device, "mat_a")
    if accumulate and out.dtype not in (torch.float32, torch.float64):
        raise checks.bad(op, argument, "dtype float32 or float64 with accumulate", checks.dtype_names((out.dtype,)))
    if checks.overlaps_itself(out):
        raise checks.bad(op, argument, "elements that do not overlap", f"{tuple(out.shape)}, strides {out.stride()}")


def validate_wgrad_out(
    out: Tensor,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    accumulate: bool = False,
) -> None:
    """Check grouped_wgrad_out's metadata."""
    op = "grouped_wgrad_out"
    scales = (scale_a, scale_b, global_scale_a, global_scale_b)
    validate_operands(op, mat_a, mat_b, offs, scales, scale_layout, operand_layout)
    checks.expect_shape(op, "out", out, "E, M, N", (offs.shape[0], mat_a.shape[0], mat_b.shape[1]))
    _validate_out(op, "out", out, mat_a, accumulate)


def validate_wgrad_out_list(
    outs: Sequence[Tensor],
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    accumulate: bool = False,
) -> None:
    """Check grouped_wgrad_out_list's metadata."""
    op = "grouped_wgrad_out_list"
    scales = (scale_a, scale_b, global_scale_a, global_scale_b)
    validate_operands(op, mat_a, mat_b, offs, scales, scale_layout, operand_layout)
    if checks.differ(len(outs), offs.shape[0]):
        raise checks.bad(op, "outs", f"one tensor an expert, E = {offs.shape[0]}", f"{len(outs)} tensors")
    for expert, out in enumerate(outs):
        checks.expect_shape(op, f"outs[{expert}]", out, "M, N", (mat_a.shape[0], mat_b.shape[1]))
        _validate_out(op, f"outs[{expert}]", out, mat_a, accumulate)
        checks.expect_dtype(op, f"outs[{expert}]", out, (outs[0].dtype,))


VALIDATORS: dict[str, Callable[..., None]] = {
    "grouped_mm": validate_mm,
    "grouped_wgrad": validate_wgrad,
    "grouped_wgrad_out": validate_wgrad_out,
    "grouped_wgrad_out_list": validate_wgrad_out_list,
}


def signature(arguments: Sequence) -> tuple:
    """A key that equals another call's only if every metadata check gives the same answer."""
    # A list and the cheap checks first: this runs on every call.
    return tuple(
        [
            argument
            if argument is None or isinstance(argument, str)
            else (argument.shape, argument.stride(), argument.dtype, argument.device)
            if isinstance(argument, Tensor)
            else signature(argument)
            if isinstance(argument, (list, tuple))
            else argument
            for argument in arguments
        ]
    )


def _canonical_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides with those of size-1 dimensions, which callers may set to anything, replaced by 1."""
    return tuple(1 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def build_mm(op: str, arguments: tuple) -> GroupedMmProblem:
    """Check the arguments of grouped_mm and describe the call."""
    VALIDATORS[op](*arguments)
    x, weight = arguments[:2]
    experts, k, n = weight.shape
    return GroupedMmProblem(
        tokens=x.shape[0],
        k=k,
        n=n,
        experts=experts,
        dtype=x.dtype,
        x_strides=x.stride(),
        weight_strides=weight.stride(),
        device_type=x.device.type,
    )


def build_wgrad(op: str, arguments: tuple) -> WgradProblem:
    """Check the arguments of grouped_wgrad, grouped_wgrad_out or grouped_wgrad_out_list and describe the call."""
    VALIDATORS[op](*arguments)
    first = 0 if op == "grouped_wgrad" else 1
    mat_a, mat_b, offs = arguments[first : first + 3]
    scale_layout, operand_layout = arguments[first + 7 : first + 9]
    block = BLOCKS.get(mat_a.dtype, 0)
    out_dtype = arguments[9] if op == "grouped_wgrad" else None
    if op == "grouped_wgrad_out":
        out_dtype = arguments[0].dtype
    elif op == "grouped_wgrad_out_list" and arguments[0]:
        out_dtype = arguments[0][0].dtype
    return WgradProblem(
        m=mat_a.shape[0],
        n=mat_b.shape[1],
        tokens=int(token_count(mat_a)),
        experts=offs.shape[0],
        a_dtype=mat_a.dtype,
        b_dtype=mat_b.dtype,
        out_dtype=out_dtype or default_output_dtype(mat_a.dtype),
        a_strides=_canonical_strides(mat_a),
        b_strides=_canonical_strides(mat_b),
        operand_layout=operand_layout,
        scale_layout=scale_layout if block else "",
        block=block,
        discrete=op == "grouped_wgrad_out_list",
        accumulate=first == 1 and bool(arguments[-1]),
        device_type=mat_a.device.type,
    )


def expect_offs(op: str, offs: Tensor, tokens: int) -> None:
    """Check the values of offs where reading them costs nothing: on the CPU."""
    if offs.is_cpu:
        checks.expect_offsets(op, "offs", offs.tolist(), None, tokens)


def expect_scaled_offs(op: str, offs: Tensor, scale_a: Tensor, scale_b: Tensor, problem: WgradProblem) -> None:
    """Check, on the CPU, what block-scaled operands ask of the offsets and the scales of the offsets."""
    if not offs.is_cpu:
        return
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for expert, end in enumerate(ends):
        if problem.block == 16 and end % 16:
            raise checks.bad(op, "offs", "multiples of 16 with fp4 operands", f"{end} at position {expert}")
    if problem.scale_layout == "padded":
        columns = sum(-(-size // (4 * problem.block)) * 4 for size in sizes)
        for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
            if scale.shape[1] < columns:
                raise checks.bad(op, name, f"at least {columns} columns for these offs", tuple(scale.shape))
        return
    filled = [size for size in sizes if size]
    for size in filled[:-1]:
        if size % (4 * problem.block):
            expected = f"experts of a multiple of {4 * problem.block} tokens with the concatenated scale layout"
            raise checks.bad(op, "offs", expected, f"one of {size}")
