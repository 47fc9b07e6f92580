"""A checkpoint that transformers saves without its head, the head grafted back, and served by an engine.

python scripts/serve_grafted.py                                      # the shipped Qwen3.5, BF16, vLLM and SGLang
python scripts/serve_grafted.py --family glm4_moe --dtype float32    # the case's trained target and head, in FP32

The checkpoint goes through `from_pretrained` and `save_pretrained`; that its head is gone behind that is checked. What the
engines accept is then counted and compared by `serve_saved.py`. Ends with 1 where an engine did not serve it, or counts in
FP32 differ. On a CPU, vLLM runs linear attention in BF16 alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import mtp_zoo as mz
from mtp_zoo.errors import HeadNotFoundError
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.served import build

SHIPPED = Path(__file__).parents[1] / "mtp_zoo/demo/assets/tiny-qwen3_5"
SERVE = Path(__file__).with_name("serve_saved.py")


def main() -> int:
    """Make the checkpoint, and serve it with each engine."""
    arguments = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base = SHIPPED if arguments.family is None else build(get_case(arguments.family), root / "made")[0].path
        saved = save(base, root / "saved", getattr(torch, arguments.dtype))
        print(mz.graft(base, saved, root / "grafted"), flush=True)
        command = [sys.executable, str(SERVE), str(root / "grafted"), "--drafts", "1", "3", "--engine"]
        return max(subprocess.run([*command, engine], check=False).returncode for engine in arguments.engines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", help="make target and head of this conformance case; the shipped model if left out")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--engines", nargs="+", choices=("vllm", "sglang"), default=["vllm", "sglang"])
    return parser.parse_args()


def save(base: Path, saved: Path, dtype: torch.dtype) -> Path:
    """What transformers saves of `base`, which has no head."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(saved)
    for tokenizer in base.glob("tokenizer*"):
        (saved / tokenizer.name).write_bytes(tokenizer.read_bytes())
    try:
        mz.load_head(saved)
    except HeadNotFoundError as error:
        print(error.message, flush=True)
        return saved
    raise SystemExit(f"{saved} still holds a head: transformers has learnt to keep it")


if __name__ == "__main__":
    sys.exit(main())
