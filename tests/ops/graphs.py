"""A torch.compile backend that keeps the text of what AOTAutograd captured, and runs it unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._ops import HigherOrderOperator


class Capture:
    """``backend`` for torch.compile; ``forward`` and ``backward`` are the texts of the graphs it was given."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.backend = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    def _keep(self, texts: list[str]) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            texts.append(ops_of(graph))
            return make_boxed_func(graph.forward)

        return compiler


def ops_of(graph: torch.fx.GraphModule) -> str:
    """One line a call of an op, getitems left out: its name and arguments, inputs p1.. and output gradients t1.."""
    lines = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload | HigherOrderOperator):
            lines.append(f"{node.name} = {node.target}({', '.join(map(str, node.args))})")
    return "\n".join(lines).replace("primals_", "p").replace("tangents_", "t")
