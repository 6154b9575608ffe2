"""Registration of the ops of namespace ``culax``: schemas, implementations, fakes, gradients, autocast.

The schemas come from ``schemas.txt``: declared by the compiled stub where it was built (a process without Python needs
it), else by this module. Everything is registered through ``torch.library.Library``, whose calls cost half of
``custom_op``'s; what that leaves out (version counters of mutated tensors, a refusal to mutate in a graph) is put back
here and in the implementations. Limits: ``torch.func.grad``, ``vjp``, ``jvp`` and their relatives raise
NotImplementedError; ``torch.vmap`` runs the functional ops sample by sample and raises on the mutating ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from . import checks, fakes, gradients, main_grad
from .grouped_wgrad import api as grouped
from .kda import api as kda

FUNC_GRAD_NOTE = "use torch.autograd (backward, grad, create_graph=True), which culax ops support to second order"
"""What an error of a functional transform advises."""

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
"""The arguments autocast casts. Gates, beta, states, scales and narrow operands keep their dtype.

Every op has an autocast kernel, if only to switch autocast off inside: its products would otherwise round to 16 bits.
"""


DEVICE_KEYS = (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU)
"""Where the implementations are registered; an Autograd kernel calls them itself when nothing lies between."""


def overload(name: str) -> torch._ops.OpOverload:
    """The one overload of op ``culax::name``."""
    return getattr(torch.ops.culax, name).default


def _tensors(arguments: tuple) -> Iterator[tuple[int, Tensor]]:
    """Every tensor among the arguments, lists included, with its argument's position."""
    for position, argument in enumerate(arguments):
        for tensor in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(tensor, Tensor):
                yield position, tensor


def _refuse_tangents(name: str, arguments: tuple) -> None:
    """Forward-mode derivatives would be dropped without a word: raise instead."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for _, tensor in _tensors(arguments)):
        raise NotImplementedError(f"{name}: no forward-mode derivative (torch.func.jvp, forward_ad); {FUNC_GRAD_NOTE}")


class _Direct(dict[int, bool]):
    """Whether a keyset, by its raw value, has nothing but the device's implementation below autograd."""

    _plain = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)

    def __missing__(self, raw: int) -> bool:
        keyset = torch._C.DispatchKeySet.from_raw_repr(raw) & self._plain
        self[raw] = direct = keyset.highestPriorityTypeId() in DEVICE_KEYS
        return direct


_direct = _Direct()


def _differentiable(name: str) -> Callable[..., Any]:
    """The Autograd kernel of an op with a gradient formula; functional transforms raise with a message that helps."""
    setup, backward = gradients.FORMULAS[name]
    op, implementation = overload(name), IMPLEMENTATIONS[name]
    recording = make_autograd_impl(op, Info(backward, setup))

    def guarded(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if torch._C._functorch.maybe_current_level() is not None:
                raise NotImplementedError(f"{name}: no torch.func.grad; {FUNC_GRAD_NOTE}")
            return recording(keyset, *arguments)
        if _direct[keyset.raw_repr()]:
            return implementation(*arguments)
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return guarded


def _refusing_gradients(name: str) -> Callable[..., None]:
    """The Autograd kernel of a mutating op: an argument that requires grad raises, as there is no gradient formula."""
    op, implementation = overload(name), IMPLEMENTATIONS[name]
    names = [argument.name for argument in op._schema.arguments]

    def refuse(arguments: tuple) -> None:
        for position, tensor in _tensors(arguments):
            if tensor.requires_grad:
                expected = "no requires_grad in grad mode, as the op writes in place (grouped_wgrad has gradients)"
                raise checks.bad(name, names[position], expected, "requires_grad=True")

    def kernel(keyset: torch._C.DispatchKeySet, *arguments: Any) -> None:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            refuse(arguments)
        if _direct[keyset.raw_repr()]:
            implementation(*arguments)
        else:
            op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _casting(name: str, device_type: str, key: str) -> Callable[..., Any]:
    """The autocast kernel of an op: cast what AUTOCAST names, then call the op with autocast off."""
    op, cast_names = overload(name), AUTOCAST.get(name, ())
    positions = [position for position, argument in enumerate(op._schema.arguments) if argument.name in cast_names]
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
        kernel = _differentiable(name) if name in gradients.FORMULAS else _refusing_gradients(name)
        LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
    main_grad.register(LIBRARY)
    for name in (line.partition("(")[0] for line in _schema_text().splitlines()):
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            LIBRARY.impl(name, _casting(name, device_type, key), key)


_register()
