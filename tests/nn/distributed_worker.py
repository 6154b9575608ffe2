"""One rank of the data-parallel checks; test_grouped_linear_distributed.py starts two."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from culax import GroupedLinear

STEPS = 3


class Block(nn.Module):
    """Two grouped layers, the first with a bias, the second optionally checkpointed."""

    def __init__(self, accumulate: bool, checkpointed: bool) -> None:
        super().__init__()
        self.up = GroupedLinear(4, 6, 10, bias=True, accumulate_main_grad=accumulate)
        self.down = GroupedLinear(4, 10, 6, accumulate_main_grad=accumulate)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x, offs))
        return (
            checkpoint(self.down, hidden, offs, use_reentrant=False) if self.checkpointed else self.down(hidden, offs)
        )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Ranks route differently: other group sizes, an expert without tokens on one of them."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, torch.tensor([[2, 2, 6, 9], [5, 6, 6, 8]][rank], dtype=torch.int32)


def loss_of(block: nn.Module, rank: int, step: int) -> Tensor:
    return block(*batch(rank, step)).square().sum()


def expected(reference: Block) -> list[Tensor]:
    """Mean over ranks of the summed steps' gradients, from one process that sees every rank's batches."""
    for rank in range(2):
        for step in range(STEPS):
            (loss_of(reference, rank, step) / 2).backward()
    return [p.grad for p in (reference.up.weight, reference.up.bias, reference.down.weight)]


def mean_over_ranks(t: Tensor) -> Tensor:
    dist.all_reduce(t)
    return t / 2


def whole(t: Tensor | None) -> Tensor | None:
    return t.full_tensor() if isinstance(t, DTensor) else t


def run(rank: int, wrap: Callable[[Block], nn.Module], accumulate: bool, checkpointed: bool) -> None:
    torch.manual_seed(0)
    reference = Block(accumulate=False, checkpointed=False)
    block = Block(accumulate, checkpointed)
    block.load_state_dict(reference.state_dict())
    wrapped = wrap(block)
    for step in range(STEPS):
        loss_of(wrapped, rank, step).backward()
    want = expected(reference)
    if accumulate:
        assert block.up.weight.grad is None and block.down.weight.grad is None
        got = [mean_over_ranks(block.up.main_grad), whole(block.up.bias.grad), mean_over_ranks(block.down.main_grad)]
    else:
        got = [whole(p.grad) for p in (block.up.weight, block.up.bias, block.down.weight)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if accumulate:
        block.up.zero_main_grad()
        assert block.up.main_grad.count_nonzero() == 0
        loss_of(wrapped, rank, 0).backward()
        assert block.up.main_grad.count_nonzero() > 0 and block.up.weight.grad is None
    # one optimiser step keeps the ranks equal
    for layer in (block.up, block.down):
        if accumulate:
            gradient = mean_over_ranks(layer.main_grad)
            if isinstance(layer.weight, DTensor):
                gradient = distribute_tensor(gradient, layer.weight.device_mesh, layer.weight.placements)
            layer.weight.grad = gradient
    before = [whole(p.detach()).clone() for p in block.parameters()]
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    for p, old in zip(block.parameters(), before):
        assert not torch.equal(whole(p.detach()), old)
        mine = whole(p.detach()).clone()
        assert torch.equal(mean_over_ranks(mine.clone()), mine)


def ddp(block: Block) -> nn.Module:
    if block.up.accumulate_main_grad:
        block._ddp_params_and_buffers_to_ignore = ["up.weight", "down.weight"]
    return DistributedDataParallel(block)


def fsdp(block: Block) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (block.up, block.down):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(block, mesh=mesh, mp_policy=policy)


def main() -> None:
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for wrap in (ddp, fsdp):
        for accumulate in (False, True):
            for checkpointed in (False, True):
                run(rank, wrap, accumulate, checkpointed)
                print(f"ok {wrap.__name__} accumulate={accumulate} checkpointed={checkpointed}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
