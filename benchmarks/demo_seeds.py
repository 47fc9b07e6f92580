"""The demo on several seeds, held to what it claims.

    python benchmarks/demo_seeds.py [--seeds 0 1 2]

For every seed: the fine-tune costs at least half a token of accept length, training the head brings back at least 80 % of
that, one block behind real text falls below 1.5 and comes back above 2. Exits with 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from mtp_zoo.demo.story import tell

LEAST_FALL = 0.5
LEAST_RECOVERY = 0.8
STALE_BLOCK = 1.5
TRAINED_BLOCK = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    held = True
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            story = tell(Path(folder) / "demo", seed=seed)
        base, stale, trained = (stage.report.accept_length for stage in story.stages)
        fall, recovery = base - stale, (trained - stale) / (base - stale)
        stale_block, trained_block = story.stages[1].block, story.stages[2].block
        good = (
            fall >= LEAST_FALL
            and recovery >= LEAST_RECOVERY
            and stale_block < STALE_BLOCK
            and trained_block > TRAINED_BLOCK
        )
        held &= good
        print(
            f"seed {seed}: accept length {base:.2f} -> {stale:.2f} -> {trained:.2f}, recovery {recovery:.0%}; one block "
            f"{story.stages[0].block:.2f} -> {stale_block:.2f} -> {trained_block:.2f}; real loop lossless "
            f"{story.loop.lossless}; {story.seconds:.0f} s; {'holds' if good else 'DOES NOT HOLD'}"
        )
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
