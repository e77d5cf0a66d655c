"""The compiler: it owns the target "cpu" and refuses to compile, because the interpreter never asks it to."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend only marks the CPU as a device of Triton")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend only marks the CPU as a device of Triton")

    def load_dialects(self, context: Any) -> None:
        """No dialect of its own."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
