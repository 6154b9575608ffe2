"""Registration of the ops of namespace ``culax``: schemas, implementations, fakes, gradients, autocast.

The schemas come from ``schemas.txt``: declared by the compiled stub where it was built (a process without Python needs it),
else by this module. Everything is registered through ``torch.library.Library``, whose calls cost half of ``custom_op``'s;
what that leaves out (version counters of mutated tensors, a refusal to mutate in a graph) is put back here and in the
implementations. Limits: ``torch.func.grad`` and its relatives raise (see ``FUNC_GRAD_NOTE``); ``torch.vmap`` runs sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checks, fakes, gradients, main_grad
from .grouped_wgrad import api as grouped
from .kda import api as kda

FUNC_GRAD_NOTE = "culax ops support torch.autograd (backward, grad, create_graph), not torch.func.grad, vjp or jacrev"
"""What to do when a functional transform raises on a culax op."""

_FOLDER = Path(__file__).parent


def _schema_text() -> str:
    return (_FOLDER / "schemas.txt").read_text()


def _load_stub(text: str) -> str:
    """Load the compiled schemas; an empty string on success, else why they are not used."""
    stubs = sorted(_FOLDER.glob("_stub*.so"))
    if not stubs:
        return "no compiled stub beside the package"
    if text.encode() not in stubs[0].read_bytes():
        return f"{stubs[0].name} was built from other schemas: build the package again"
    try:
        torch.ops.load_library(str(stubs[0]))
    except OSError as error:
        return f"{stubs[0].name} does not load: {error}"
    return ""


def _declare() -> tuple[torch.library.Library, str, str]:
    text = _schema_text()
    note = _load_stub(text)
    if not note:
        return torch.library.Library("culax", "FRAGMENT"), "compiled stub", ""
    library = torch.library.Library("culax", "DEF")
    for line in text.splitlines():
        library.define(line, tags=(torch.Tag.pt2_compliant_tag,))
    return library, "python", note


LIBRARY, schema_source, schema_note = _declare()
"""``schema_source`` is "compiled stub" or "python"; ``schema_note`` says why the stub was not used."""

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "kda_fwd": kda.forward,
    "kda_bwd": kda.backward,
    "_kda_bwd_bwd": kda.double_backward,
    "grouped_mm": grouped.grouped_mm,
    "grouped_wgrad": grouped.grouped_wgrad,
    "grouped_wgrad_out": grouped.grouped_wgrad_out,
    "grouped_wgrad_out_list": grouped.grouped_wgrad_out_list,
}
AUTOCAST: dict[str, tuple[str, ...]] = {
    "kda_fwd": ("q", "k", "v"),
    "kda_bwd": ("do", "q", "k", "v"),
    "grouped_mm": ("x", "weight"),
    "_grouped_mm_main_grad": ("x", "weight"),
}
"""The arguments autocast casts. Gates, beta, states, scales and narrow operands keep their dtype."""


def overload(name: str) -> torch._ops.OpOverload:
    """The one overload of op ``culax::name``."""
    return getattr(torch.ops.culax, name).default


def _refusing_gradients(name: str) -> Callable[..., None]:
    """The Autograd kernel of a mutating op: an argument that requires grad raises, as there is no gradient formula."""
    op = overload(name)
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset: torch._C.DispatchKeySet, *arguments: Any) -> None:
        if torch.is_grad_enabled():
            for argument_name, argument in zip(names, arguments, strict=False):
                for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        expected = "no requires_grad in grad mode, as the op writes in place (grouped_wgrad has gradients)"
                        raise checks.bad(name, argument_name, expected, "requires_grad=True")
        with torch._C._AutoDispatchBelowAutograd():
            op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _casting(name: str, device_type: str, key: str) -> Callable[..., Any]:
    """The autocast kernel of an op: cast what AUTOCAST names, then call the op with autocast off."""
    op = overload(name)
    positions = [position for position, argument in enumerate(op._schema.arguments) if argument.name in AUTOCAST[name]]
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = list(arguments)
        for position in positions:
            tensor = cast[position]
            if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
                cast[position] = tensor.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*cast)

    return kernel


def _register() -> None:
    for name, implementation in IMPLEMENTATIONS.items():
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, implementation, device)
        torch.library.register_fake(f"culax::{name}", fakes.FAKES[name], lib=LIBRARY)
        if name in gradients.FORMULAS:
            setup, backward = gradients.FORMULAS[name]
            torch.library.register_autograd(f"culax::{name}", backward, setup_context=setup, lib=LIBRARY)
        else:
            LIBRARY.impl(name, _refusing_gradients(name), "Autograd", with_keyset=True)
    main_grad.register(LIBRARY)
    for name in AUTOCAST:
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            LIBRARY.impl(name, _casting(name, device_type, key), key)


_register()
