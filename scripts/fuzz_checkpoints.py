"""Read mutated checkpoints: headers, indexes, configs, truncated shards.

    python scripts/fuzz_checkpoints.py                      # 6,000 cases, about five minutes on one core
    python scripts/fuzz_checkpoints.py --cases 100 --first 4711
    python scripts/fuzz_checkpoints.py --json

Each case goes through `CheckpointIndex.open`, `inspect`, `load_shared`, `load_head` and, where the head loads, now and then
`export`. It must end in one of the library's own errors or in the tensors that the safetensors library reads, within five
seconds and a gigabyte. Ends with 1 where one does not; `--cases 1 --first N` runs that one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from tests.fuzzing import run_cases


def main() -> int:
    """Run the cases and print what they came to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    found = run_cases(range(options.first, options.first + options.cases))
    if options.as_json:
        print(json.dumps(asdict(found)))
        return int(bool(found.failures))
    print(f"{found.cases} cases; slowest {found.slowest:.2f} s; at most {found.peak / 2**20:.0f} MiB on top")
    for name, count in sorted(found.outcomes.items(), key=lambda item: -item[1]):
        print(f"  {name:32} {count}")
    for number, what in found.failures:
        print(f"  case {number}: {what}")
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
