"""torch.export save, load and run; AOTInductor in the same process and in a fresh one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.ops import cases
from tests.ops.test_process import run_python

OPS = torch.ops.culax
SMALL_GRAPHS = {"compile_threads": 1}


class Block(torch.nn.Module):
    """Both forwards in one program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(cases.normal(9, 2, 8, 3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offs: Tensor) -> Tensor:
        o, _, _, _ = OPS.kda_fwd(q, k, v, g, beta, None, None, 0.5, False)
        return OPS.grouped_mm(o.flatten(0, 2), self.weight, offs)


class Gradients(torch.nn.Module):
    """Both backwards in one program, the grouped one in place."""

    def forward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, main_grad: Tensor
    ) -> Tensor:
        dq, dk, *_ = OPS.kda_bwd(do, None, q, k, v, g, beta, None, None, None, None, 0.5)
        offs = torch.full((2,), 3, dtype=torch.int32)
        OPS.grouped_wgrad_out(main_grad, q.flatten(0, 2).t(), do.flatten(0, 2)[: q.shape[1]], offs, accumulate=True)
        return dq + dk


def block_inputs(tokens: int) -> tuple[Tensor, ...]:
    case = cases.kda(tokens=tokens, dtype=torch.float32, sizes=(1, 2, 4, 8), state=False)
    return *case.arguments[:5], torch.tensor([tokens // 2, 2 * tokens], dtype=torch.int32)


def export_block() -> tuple[torch.export.ExportedProgram, Block]:
    block, tokens = Block(), torch.export.Dim("tokens", min=2, max=4096)
    shapes = [{1: tokens}] * 5 + [None]
    with torch.no_grad():
        return torch.export.export(block, block_inputs(12), dynamic_shapes=shapes), block


def test_export_save_load_run(tmp_path: Path) -> None:
    program, block = export_block()
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for tokens in (12, 70, 129):
        assert torch.equal(loaded(*block_inputs(tokens)), block(*block_inputs(tokens)))


class Packed(torch.nn.Module):
    """Packed sequences from their states to their states."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *others, state, cu_seqlens = inputs
        return OPS.kda_fwd(*others, state, cu_seqlens, 0.5, True)[:2]


def packed_inputs(lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    case = cases.kda(tokens=sum(lengths), dtype=torch.float32, lengths=lengths, sizes=(1, 2, 4, 8))
    return case.arguments[:7]


def test_exported_program_takes_any_number_of_sequences_one_among_them() -> None:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ((*[{1: dynamic}] * 5, {0: dynamic}, {0: dynamic}),)
    program = torch.export.export(Packed(), packed_inputs((4, 8)), dynamic_shapes=shapes).module()
    for lengths in ((4, 8), (5,), (0, 3, 66)):
        inputs = packed_inputs(lengths)
        for found, expected in zip(program(*inputs), Packed()(*inputs), strict=True):
            assert torch.equal(found, expected)


def test_export_of_the_backward(tmp_path: Path) -> None:
    """The in-place op is functionalised and its output still written."""
    case = cases.kda(tokens=6, dtype=torch.float32, sizes=(1, 1, 4, 8), state=False)
    inputs = (case.v, *case.arguments[:5])
    program = torch.export.export(Gradients(), (*inputs, torch.zeros(2, 4, 8))).run_decompositions()
    torch.export.save(program, tmp_path / "gradients.pt2")
    loaded = torch.export.load(tmp_path / "gradients.pt2").module()
    ours, true = torch.ones(2, 4, 8), torch.ones(2, 4, 8)
    assert torch.equal(loaded(*inputs, ours), Gradients()(*inputs, true))
    assert torch.equal(ours, true) and not torch.equal(ours, torch.ones(2, 4, 8))


def test_aot_inductor(tmp_path: Path) -> None:
    """A package compiled ahead of time runs where it was made and in a fresh process that imports culax."""
    program, block = export_block()
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "block.pt2"), inductor_configs=SMALL_GRAPHS
    )
    here = torch._inductor.aoti_load_package(package)
    for tokens in (12, 70):
        torch.testing.assert_close(here(*block_inputs(tokens)), block(*block_inputs(tokens)), rtol=1e-6, atol=1e-6)
    out = run_python(
        "import torch, culax\n"
        "from tests.ops.test_export import Block, block_inputs\n"
        f"loaded = torch._inductor.aoti_load_package({package!r})\n"
        "print(torch.allclose(loaded(*block_inputs(70)), Block()(*block_inputs(70)), rtol=1e-6, atol=1e-6))\n"
    )
    assert out == "True\n"
