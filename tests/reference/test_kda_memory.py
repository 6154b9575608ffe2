"""Peak memory of the chunked path grows in proportion to T, with a constant that pairwise decays would break."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from culax.reference import kda_chunked
from tests.reference.kda_cases import Case, chunked, make


class PeakMemory(TorchDispatchMode):
    """Most bytes of tensors alive after any operator, beyond those that were there before."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def peak(tokens, ends):
    x = make(Case(tokens=tokens, ends=ends and ends(tokens), key_dim=32, value_dim=32), dtype=torch.float32)
    with PeakMemory() as memory:
        chunked(x, recompute=True)
    return memory.peak


@pytest.mark.parametrize(
    "ends", [None, lambda n: (0, n // 3, n), lambda n: tuple(range(0, n + 1, 32))], ids=["dense", "two", "many short"]
)
def test_linear_in_tokens(ends):
    short, long = peak(512, ends), peak(2048, ends)
    assert long / short < 4.2
    # Sequences of 32 tokens fill half a chunk of 64, and the bound on their number of chunks adds half as much again.
    padding = 3 if ends and len(ends(512)) > 3 else 1
    values = 2048 * 2 * 32
    assert long < 64 * padding * 4 * values, f"{long / 4 / values:.0f} values for each value of v"


def test_pairwise_decays_are_caught(monkeypatch):
    real = kda_chunked.intra

    def pairwise(x, E, dL):
        decay = (x.g[:, :, :, None] - x.g[:, :, None]).exp()
        result = real(x, E, dL)
        del decay
        return result

    monkeypatch.setattr(kda_chunked, "intra", pairwise)
    assert peak(512, None) > 64 * 4 * 512 * 2 * 32
