# ruff: noqa: ARG002, D102 - the methods are those of Python's import system
"""Import hooks: how the stand-ins come into an unmodified SGLang."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

KERNELS = "sgl_kernel"
KERNELS_VERSION = "0.4.10"
"""SGLang 0.5.23 looks at the version of its kernel package; this is the one that it was released with."""

BOUND_AT_IMPORT = (
    "fused_moe_router_cpu",
    "rmsnorm_cpu",
    "fused_dual_residual_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
)
"""Operators that model files look up when they are imported, and that no judged family calls."""

_libraries: list[Any] = []  # a torch library that is collected takes its operators with it


class Placeholder:
    """A kernel that has no CPU build: attributes are placeholders, a call raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Placeholder:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{self._name} has no CPU build, and no stand-in for it is in force")


class AfterImport(MetaPathFinder):
    """Calls a function with a module right after the module's own code has run."""

    def __init__(self, functions: dict[str, Callable[[Any], None]]) -> None:
        self._functions = functions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self._functions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._functions[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class BeforeImport(MetaPathFinder):
    """Calls a function the first time that a module is asked for."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == self._name:
            sys.meta_path.remove(self)
            self._function()


class KernelPackage(MetaPathFinder, Loader):
    """A package `sgl_kernel`: the stand-ins that SGLang imports from it, placeholders for all else."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname == KERNELS or fullname.startswith(KERNELS + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from . import delta_rule, speculation
        from .ledger import bodies

        offered = {KERNELS: speculation, f"{KERNELS}.mamba": delta_rule}.get(module.__name__)
        contents = vars(module)
        contents.update(bodies(vars(offered)) if offered else {}, __version__=KERNELS_VERSION, __all__=[])

        def missing(attribute: str) -> Placeholder:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Placeholder(f"{module.__name__}.{attribute}")

        contents["__getattr__"] = missing


class Operators:
    """`torch.ops.sgl_kernel`: the stand-ins; any other name is missing, as it is for a build without it."""

    def __getattr__(self, attribute: str) -> Any:
        from . import attention, delta_rule, norms
        from .ledger import bodies

        for module in (norms, delta_rule, attention):
            if attribute in bodies(vars(module)):
                return vars(module)[attribute]
        if attribute in BOUND_AT_IMPORT:
            return Placeholder(f"torch.ops.{KERNELS}.{attribute}")
        raise AttributeError(f"torch.ops.{KERNELS}.{attribute}")


def _before_sglang() -> None:
    import torch

    from .ledger import stand_in

    @stand_in
    def cuda_synchronize(*args: Any) -> None:
        """torch.cuda.synchronize does nothing: models call it after they share the target's embedding."""

    torch.ops.sgl_kernel = Operators()  # type: ignore[assignment]
    torch.cuda.synchronize = cuda_synchronize


def _before_torchvision() -> None:
    """The compiled operators of PyPI's torchvision do not load beside a CPU torch; its Python part, which is all that is
    imported here, only wants these two to be declared."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def install() -> None:
    """Put the hooks in place. Call it before anything imports sglang or torchvision, once in every process."""
    from .patches import PATCHES

    sys.meta_path.insert(0, AfterImport(PATCHES))
    sys.meta_path.insert(0, BeforeImport("sglang", _before_sglang))
    sys.meta_path.insert(0, BeforeImport("torchvision", _before_torchvision))
    sys.meta_path.append(KernelPackage())


def in_force() -> bool:
    """Whether `install` was called in this process."""
    return any(isinstance(finder, KernelPackage) for finder in sys.meta_path)
