"""The vLLM worker: `python worker.py MANIFEST.json`, run by the interpreter of an environment with vLLM.

Imports vLLM once (about 15 s on two cores) and runs the manifest's jobs, see `job_server`. Written for vLLM 0.32.0.
Nothing of vLLM is patched; a stand-in for torchvision is put in its place where the real one can't be imported.
vLLM looks at every model class that it meets for the first time in a subprocess, 15 s each, and keeps what it saw in its own
cache (`VLLM_CACHE_ROOT`): the first jobs in a new home are that much slower than the later ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STAND_INS = HERE / "stand_ins"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its counters and its models can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # tiny models; and a forked child must not inherit a pool of threads that aren't there
}
"""Set where the user has not, before torch or vLLM is imported."""


def prepare() -> list[str]:
    """Set the environment; returns what stands in for something else, in words."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    load_job_server()
    try:
        importlib.import_module("torchvision")
    except Exception:  # not there, or built for another torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, str(STAND_INS))
        paths = [str(STAND_INS), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # vLLM looks at model classes in a subprocess
        return ["torchvision: import names only, no image is seen"]
    return []


def load_job_server() -> None:
    """Import `job_server` by its file: beside it lie folders called vllm and sglang, so its folder is kept off sys.path."""
    spec = importlib.util.spec_from_file_location("job_server", HERE.parent / "job_server.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["job_server"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["job_server"])


def main() -> None:
    """Run the manifest, or the one job, that is named on the command line."""
    shims = prepare()
    import generate
    import job_server
    import module
    import torch
    import vllm
    from vllm.platforms import current_platform

    on_cpu: bool = current_platform.is_cpu()

    def facts() -> dict[str, Any]:
        return {
            "engine": "vllm",
            "version": vllm.__version__,
            "torch": torch.__version__,
            "device": current_platform.device_type,
            "device_name": job_server.processor() if on_cpu else current_platform.get_device_name(),
            "shims": shims,
        }

    runners = {"module": module.run_module, "generate": generate.run_generate}
    job_server.serve(runners, facts, fork=on_cpu)


if __name__ == "__main__":
    main()
