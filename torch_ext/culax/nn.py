"""`culax.GroupedLinear`: one linear layer per expert over tokens sorted by expert."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """y = x_e @ weight[e] (+ bias[e]) for every expert e, over token rows sorted by expert.

    Args:
        num_experts: E, the number of groups.
        in_features, out_features: columns of x and of the result.
        bias: learn one bias per expert.
        device, dtype: of the parameters.
        accumulate_main_grad: add the weight's gradient in fp32 into `weight.main_grad` during the backward, instead of
            into `weight.grad`, which then stays None.

    Attributes:
        weight: [E, in_features, out_features], the layout of `torch.nn.functional.grouped_mm`.
        bias: [E, out_features] or None.

    With accumulate_main_grad, `weight.main_grad` ([E, in, out] fp32, fp64 for an fp64 weight) is made with the layer
    and follows it to its device; one the caller has put there is used as it is. `zero_main_grad()` takes the place of
    `zero_grad()` for it. `weight.grad_added_to_main_grad` is True, and set again by each forward. It follows that:

    - an optimiser needs the gradient handed over: `p.grad = p.main_grad.to(p.dtype)`;
    - `torch.cuda.make_graphed_callables` runs warm-up backwards on uninitialised gradients, which are added too: call
      `zero_main_grad()` after it;
    - reducers see no gradient for the weight. Under DistributedDataParallel put the weight's name in the wrapped
      module's `_ddp_params_and_buffers_to_ignore` (DDP fills a missing gradient with zeros) and all-reduce
      `weight.main_grad`. Under `fully_shard` all-reduce `layer.main_grad`, this rank's unsharded gradient, and hand it
      over with `torch.distributed.tensor.distribute_tensor(grad, weight.device_mesh, weight.placements)`;
    - every backward through the layer adds, torch.autograd.grad for other tensors than the weight among them;
    - neither main_grad nor its accumulation is part of the state_dict, and create_graph=True raises.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_main_grad = accumulate_main_grad
        # Holds main_grad where the weight can't: fully_shard shows another tensor as `weight` outside the forward.
        self._main_grad: Tensor | None = None
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_experts, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        if accumulate_main_grad:
            self.zero_main_grad()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly in +-1/sqrt(in_features), as torch.nn.Linear does for each expert."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def main_grad(self) -> Tensor | None:
        """This rank's accumulator [E, in, out], or None before the first use; at hand while the weight is sharded."""
        return getattr(self.weight, "main_grad", self._main_grad)

    def zero_main_grad(self) -> None:
        """Zero main_grad in place (so that captured graphs go on seeing it), or make it where there is none yet."""
        if not self.accumulate_main_grad:
            raise ValueError("GroupedLinear: zero_main_grad: expected accumulate_main_grad=True, got False")
        main_grad = self.main_grad
        if main_grad is None:
            self._attach_main_grad(self._new_main_grad())
        else:
            main_grad.zero_()

    def _new_main_grad(self) -> Tensor:
        return torch.zeros(self.weight.shape, dtype=self._main_grad_dtype(), device=self.weight.device)

    def _main_grad_dtype(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _attach_main_grad(self, main_grad: Tensor) -> None:
        # Imported here: both take seconds, and only accumulating layers need them.
        from torch._dynamo import mark_static_address
        from torch.distributed.tensor import DTensor

        # CUDA-graph trees skip a graph that mutates an input whose address they take for changing.
        mark_static_address(main_grad, guard=False)
        if isinstance(self.weight, DTensor):
            self._main_grad = main_grad
        else:
            self.weight.main_grad = main_grad  # type: ignore[attr-defined]
            # Already true when the forward looks: inside a compiled checkpoint no attribute may be set.
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupedLinear":
        main_grad = self.main_grad
        super()._apply(fn, recurse)
        if main_grad is not None:
            if main_grad.is_meta:
                main_grad = self._new_main_grad()
            self._attach_main_grad(main_grad.to(device=self.weight.device, dtype=self._main_grad_dtype()))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied layer; a deep copy leaves main_grad behind and so starts at zero."""
        super().__setstate__(state)
        if self.accumulate_main_grad and self.main_grad is None:
            self.zero_main_grad()

    def extra_repr(self) -> str:
        """Sizes and options, as printed by nn.Module."""
        options = f", bias={self.bias is not None}, accumulate_main_grad={self.accumulate_main_grad}"
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}{options}"
        )

    def _product(self, x: Tensor, offs: Tensor) -> Tensor:
        weight = self.weight
        if not (self.accumulate_main_grad and weight.requires_grad and torch.is_grad_enabled()):
            return torch.ops.culax.grouped_mm(x, weight, offs)
        if not weight.is_leaf:
            raise ValueError(
                "GroupedLinear: weight: expected a leaf with accumulate_main_grad=True, as only main_grad gets its "
                "gradient, got a tensor computed from others"
            )
        if not hasattr(weight, "main_grad"):
            if torch.compiler.is_compiling():
                raise RuntimeError("GroupedLinear: weight.main_grad is missing: call zero_main_grad() first")
            if self._main_grad is None:
                self._main_grad = self._new_main_grad()
            self._attach_main_grad(self._main_grad)
        if not getattr(weight, "grad_added_to_main_grad", False):
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.ops.culax._grouped_mm_main_grad(x, weight, offs, weight.main_grad)  # type: ignore[attr-defined]

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Multiply each token row by its expert's weight.

        x: [T, in_features], rows sorted by expert, in the weight's dtype. offs: [E] int32 or int64 end offsets (expert
        e owns rows offs[e-1] to offs[e] - 1), on x's device. Returns
        [T, out_features]; rows past offs[-1] are zero. Raises ValueError for shapes, dtypes and devices that don't fit
        (see torch.ops.culax.grouped_mm).
        """
        y = self._product(x, offs)
        if self.bias is None:
            return y
        # A product with a column of ones places each expert's bias on its own rows and sums the bias gradient per
        # expert in a fixed order, both without reading offs on the host.
        return y + torch.ops.culax.grouped_mm(x.new_ones((x.shape[0], 1)), self.bias.unsqueeze(1), offs)
