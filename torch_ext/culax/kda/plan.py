"""Which kernels run a KDA problem; chooses every Config and nothing else does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import torch

from ..device.walks import SLICE
from ..runtime.variants import Variant
from .problem import KdaProblem
from .stages.backward.config import BackwardConfig
from .stages.chunk_table.config import ChunkTableConfig
from .stages.group_sum.config import GroupSumConfig
from .stages.join.config import JoinConfig
from .stages.local.config import LocalConfig
from .stages.prep.config import PrepConfig
from .stages.scans.config import ScansConfig

ARCHITECTURES = ("sm_90a",)
DIMS = (64, 128)
MULTIPROCESSORS = 132
"""Of the device that segments are chosen for; on another one they are as right, perhaps slower."""
FEWEST_CHUNKS = 16
"""Of a segment: walks over shorter ones take less than summaries and joining cost."""
MOST_SEGMENTS = 32


@dataclass(frozen=True, eq=False)
class Plan:
    """What runs one kind of backward call; compared by identity, as there is one of each.

    packed: whether the call has cu_seqlens; variant: launches all stages; stages: launch one each, for tests, by name
    (group_sum only where a query head has several value heads).
    """

    key_dim: int
    value_dim: int
    packed: bool
    variant: Variant
    stages: dict[str, Variant]

    @property
    def config(self) -> BackwardConfig:
        """The variant's configuration."""
        assert isinstance(self.variant.config, BackwardConfig)
        return self.variant.config


def segments(key_dim: int, value_dim: int, sequences: int, value_heads: int, chunks: int) -> int:
    """How many segments each sequence's chunks are walked over in at once, from shapes alone; chunks: of all sequences.

    One where that fills the multiprocessors, or where sequences are short. Else as many as there are multiprocessors
    for, one for every 64 columns of a state: in a walk over all segments both ways, and in summaries, which have all
    segments but one both ways and the transitions of all but two.
    """
    walks, transitions = 2 * value_dim // SLICE, key_dim // SLICE
    states, length = sequences * value_heads, chunks // max(sequences, 1)
    most = min(length // FEWEST_CHUNKS, MOST_SEGMENTS)
    fitting = [
        count
        for count in range(3, most + 1)
        if states * max(walks * count, walks * (count - 1) + transitions * (count - 2)) <= MULTIPROCESSORS
    ]
    return max(fitting, default=1)


def _variant(arch: str, stage: str, suffix: str, config: object) -> Variant:
    name = f"kda_{stage}_{suffix}_{arch.replace('_', '')}"
    return Variant("kda", arch, name, f"culax.kda.stages.{stage}.kernel:entry", config)


@cache
def plan_for(arch: str, key_dim: int, value_dim: int, offsets: str, grouped: bool, beta: str = "float32") -> Plan:
    """The plan for one kind of call. offsets: "int64" with cu_seqlens, or "" without; grouped: HV > H; beta: its dtype,
    "float32" or "bfloat16"."""
    dims, shares = f"k{key_dim}_v{value_dim}", "_shares" if grouped else ""
    config = BackwardConfig(
        PrepConfig(key_dim, value_dim),
        ScansConfig(key_dim, value_dim),
        ScansConfig(key_dim, value_dim, summary=True),
        JoinConfig(key_dim, value_dim),
        LocalConfig(key_dim, value_dim, partial=grouped),
        GroupSumConfig(key_dim) if grouped else None,
        beta,
    )
    stages = {
        "chunk_table": _variant(arch, "chunk_table", offsets or "equal", ChunkTableConfig(offsets)),
        "prep": _variant(arch, "prep", dims, config.prep),
        "scans": _variant(arch, "scans", dims, config.scans),
        "summary": _variant(arch, "scans", dims + "_summary", config.summary),
        "join": _variant(arch, "join", dims, config.join),
        "local": _variant(arch, "local", dims + shares, config.local),
    }
    if grouped:
        stages["group_sum"] = _variant(arch, "group_sum", f"k{key_dim}", config.group_sum)
    suffix = dims + shares + ("_beta16" if beta == "bfloat16" else "")
    return Plan(key_dim, value_dim, bool(offsets), _variant(arch, "backward", suffix, config), stages)


def plan(problem: KdaProblem, arch: str) -> Plan | str:
    """The kernels for a problem on an architecture, or the reason why there are none."""
    if arch not in ARCHITECTURES:
        return f"the KDA kernels are made for {', '.join(ARCHITECTURES)}, not {arch}"
    if problem.op != "kda_bwd":
        return f"{problem.op} has no kernels yet: the chunked torch path runs it"
    if problem.dtype is not torch.bfloat16:
        return f"the KDA kernels take bfloat16 inputs, not {problem.dtype}"
    if problem.key_dim not in DIMS or problem.value_dim not in DIMS:
        return f"the KDA kernels take K and V of 64 or 128, not K = {problem.key_dim}, V = {problem.value_dim}"
    return plan_for(
        arch,
        problem.key_dim,
        problem.value_dim,
        "int64" if problem.varlen else "",
        problem.value_heads > problem.heads,
        str(problem.beta_dtype).removeprefix("torch."),
    )


def _plans(arch: str) -> list[Plan]:
    if arch not in ARCHITECTURES:
        return []
    kinds = itertools.product(DIMS, DIMS, ("", "int64"), (False, True), ("float32", "bfloat16"))
    return [plan_for(arch, *kind) for kind in kinds]


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that plan() can choose on an architecture."""
    return tuple(dict.fromkeys(chosen.variant for chosen in _plans(arch)))


def stage_variants(arch: str) -> tuple[Variant, ...]:
    """The stages alone, which tests launch."""
    return tuple(dict.fromkeys(variant for chosen in _plans(arch) for variant in chosen.stages.values()))


def fault_variants(arch: str) -> tuple[Variant, ...]:
    """The scans with poisoned stages, and with a release that comes too early, which tests ask for by name; plan()
    never returns them."""
    if arch not in ARCHITECTURES:
        return ()
    found = []
    for key_dim in DIMS:
        for fault in ("", "weak_release"):
            config = ScansConfig(key_dim, 128, fault=fault, poison=True)
            found.append(_variant(arch, "scans", f"k{key_dim}_v128_{fault}{'_' * bool(fault)}poison", config))
    return tuple(found)
