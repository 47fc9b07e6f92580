"""The SGLang worker: `python worker.py MANIFEST.json`, run by the interpreter of an environment with SGLang.

Imports SGLang and its models once (about 20 s on two cores) and runs the manifest's jobs, see `job_server`. Written for
SGLang 0.5.23.

Where there is no accelerator and no build of SGLang's kernel package, the stand-ins of `shim` are put in force; an SGLang
that runs on an accelerator runs as it is. There `sglang.Engine` spawns processes, and each of them runs this file once more
as `__mp_main__`: all that they need too stands outside `main`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # tiny models; and a forked child must not inherit a pool of threads that aren't there
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for a GPU must not initialise CUDA: a forked child could not use it
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set where the user has not, before torch is imported."""

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # SGLang compiles a few helpers: seconds in every job, and a C++ compiler is wanted
}
"""Set where the user has not, before SGLang is imported, where there is no accelerator."""


def prepare() -> None:
    """Environment, and import hooks; runs in every process, before SGLang is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    load_job_server()
    import torch

    if not torch.accelerator.is_available():
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if importlib.util.find_spec("sgl_kernel") is None:
            import shim

            shim.install()
    import canary
    from shim.importing import AfterImport

    sys.meta_path.insert(0, AfterImport({canary.LOADER: canary.watch}))


def load_job_server() -> None:
    """Import `job_server` by its file: beside it lie folders called vllm and sglang, so its folder is kept off sys.path."""
    spec = importlib.util.spec_from_file_location("job_server", HERE.parent / "job_server.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["job_server"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["job_server"])


def main() -> None:
    """Run the manifest, or the one job, that is named on the command line."""
    import generate
    import job_server
    import module
    import sglang
    import torch
    from settings import on_cpu
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()  # imports every model once, for all jobs
    gc.freeze()  # what was imported stays: SGLang collects garbage several times a job, half a second each on this heap
    cpu = on_cpu()

    def facts() -> dict[str, Any]:
        return {
            "engine": "sglang",
            "version": sglang.__version__,
            "torch": torch.__version__,
            "device": "cpu" if cpu else str(torch.accelerator.current_accelerator()),
            "device_name": job_server.processor() if cpu else torch.cuda.get_device_name(),
        }

    job_server.serve({"module": module.run_module, "generate": generate.run_generate}, facts, fork=cpu)


prepare()
if __name__ == "__main__":
    main()
