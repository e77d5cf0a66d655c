"""Spares Triton's interpreter work that has no effect here, which is most of what it does: it runs three times as fast.

Triton gives the functions of `triton.language` their interpreted form before each kernel, and before each function that
a kernel calls, and their compiled form back after it. In a process that compiles nothing the first time is enough. It
also builds a table of all types to look up one, and checks each sum of integers for overflow, which compiled kernels
check only in Triton's debug mode, and works out the shape of each value anew. What a kernel computes stays as it was.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

_INTERPRETER = "triton.runtime.interpreter"


class _NothingToRestore:
    def restore(self) -> None:
        """The interpreted form stays."""


def _once(patch: Callable[[Any], Any], interpreter: ModuleType) -> Callable[[Any], _NothingToRestore]:
    """`patch` for the first kernel, for all modules that a kernel can reach the language by, and no more."""
    nothing = _NothingToRestore()
    pending = True

    def patch_once(_function: object) -> _NothingToRestore:
        nonlocal pending
        if pending:
            language = interpreter.tl
            patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
            _remember_shapes(language.core)
            pending = False
        return nothing

    return patch_once


def _remember_shapes(core: ModuleType) -> None:
    """What a tensor knows of its shape is its type's; and one type of blocks leads to few others."""
    with_elements = core.block_type.with_element_ty

    def create(self: Any, handle: object, type: Any) -> None:  # noqa: A002 - the name that Triton gives it
        self.handle, self.type = handle, type
        known = vars(type).get("_kvscope_shape")
        if known is None:
            shape = type.shape if type.is_block() else ()
            known = (type.scalar, core.constexpr(math.prod(shape)), core.tuple([core.constexpr(s) for s in shape]))
            type._kvscope_shape = known
        self.dtype, self.numel, self.shape = known

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        known = vars(self).setdefault("_kvscope_others", {})
        if scalar_ty.name not in known:
            known[scalar_ty.name] = with_elements(self, scalar_ty)
        return known[scalar_ty.name]

    core.tensor.__init__, core.block_type.with_element_ty = create, with_element_ty


def _remembered(look_up: Callable[[Any], Any], interpreter: ModuleType) -> Callable[[Any], Any]:
    """`look_up` from Triton's types to NumPy's. A block has the type of its elements; all pointers have one."""
    known: dict[str, Any] = {}

    def remember(triton_type: Any) -> Any:
        language = interpreter.tl
        element = triton_type.element_ty if isinstance(triton_type, language.block_type) else triton_type
        name = "pointer" if isinstance(element, language.pointer_type) else element.name
        if name not in known:
            known[name] = look_up(element)
        return known[name]

    return remember


def hasten(interpreter: ModuleType) -> None:
    """Change `triton.runtime.interpreter`. What another Triton lacks of it is left as it is."""
    for name, quick in (("_patch_lang", _once), ("_get_np_dtype", _remembered)):
        if hasattr(interpreter, name):
            setattr(interpreter, name, quick(getattr(interpreter, name), interpreter))
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Acts on Triton's interpreter as soon as it is there. It imports Triton's language, which must come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hasten(module: ModuleType) -> None:
                execute(module)
                hasten(module)

            spec.loader.exec_module = execute_and_hasten  # type: ignore[method-assign]  # this loader alone acts so
        return spec


def hasten_when_imported() -> None:
    """To be called while Triton looks for its backends: its interpreter is imported later, or not at all."""
    sys.meta_path.insert(0, _WhenImported())
