"""Memory and time of the objective's loss at a large vocabulary: one pass over chunks, against the plain way.

    python benchmarks/chunked_loss.py [--tokens 1024] [--vocab 248320] [--hidden 1024] [--depths 1 3] [--json]

Both compute the loss, its gradient on the states, and what verification would accept, in FP32, each in a process of its own,
in turns; time is the median. "Extra" is the peak of the resident set above what holding the inputs takes. The plain way holds
all logits of head and target at once, one depth after the other. Depth k predicts from slot t what depth 1 predicts from slot
t + k - 1, as in training, so that chunks can share the target's distributions.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from typing import Any

import torch
from measure import measure

from mtp_zoo.chunked_loss import DepthRows, chunked_loss

LOSSES = ("ce", "kl")


def inputs(tokens: int, vocab: int, hidden: int, depths: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "states": [torch.randn(tokens, hidden, generator=generator).requires_grad_() for _ in range(depths)],
        "targets": torch.randn(tokens, hidden, generator=generator),
        "labels": torch.randint(0, vocab, (tokens,), generator=generator),
        "weight": torch.randn(vocab, hidden, generator=generator) * hidden**-0.5,
    }


def chunked(loss: str, given: dict[str, Any]) -> torch.Tensor:
    rows = torch.arange(len(given["labels"]))
    depths = [DepthRows(states, given["labels"], rows, {loss: 1.0}, torch.tensor(1.0)) for states in given["states"]]
    total, _ = chunked_loss(depths, given["targets"], given["weight"])
    total.backward()
    return total.detach()


def plain(loss: str, given: dict[str, Any]) -> torch.Tensor:
    total = torch.zeros(())
    for states in given["states"]:
        log_q = (states @ given["weight"].T).log_softmax(-1)
        with torch.no_grad():
            log_p = (given["targets"] @ given["weight"].T).log_softmax(-1)
            q, p = log_q.exp(), log_p.exp()
            torch.minimum(q, p).sum(-1), log_q.argmax(-1) == log_p.argmax(-1), log_q.argmax(-1) == given["labels"]
        if loss == "ce":
            value = torch.nn.functional.nll_loss(log_q, given["labels"], reduction="sum")
        else:
            value = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
        value.backward()
        total += value.detach()
    return total


def compare(loss: str, depths: int, arguments: argparse.Namespace) -> dict[str, Any]:
    prepare = functools.partial(inputs, arguments.tokens, arguments.vocab, arguments.hidden, depths)
    runs = [
        [measure(prepare, functools.partial(way, loss), repeats=1) for way in (chunked, plain)]
        for _ in range(arguments.repeats)
    ]
    (seconds, memory), (plain_seconds, plain_memory) = (
        [statistics.median(run[way][part] for run in runs) for part in (0, 1)] for way in (0, 1)
    )
    ratios = sorted(mine[0] / theirs[0] for mine, theirs in runs)
    return {
        "loss": loss,
        "depths": depths,
        "chunked_gib": memory,
        "plain_gib": plain_memory,
        "memory_ratio": memory / plain_memory,
        "chunked_seconds": seconds,
        "plain_seconds": plain_seconds,
        "time_ratio": statistics.median(ratios),
        "time_ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = [compare(loss, depths, arguments) for depths in arguments.depths for loss in LOSSES]
    if arguments.json:
        print(json.dumps({**vars(arguments), "results": found}, indent=2))
        return
    print(f"{arguments.tokens} tokens, vocabulary {arguments.vocab:,}, hidden {arguments.hidden}, FP32")
    for row in found:
        print(
            "{loss}, {depths} depth(s): chunked {chunked_gib:.2f} GiB extra, {chunked_seconds:.1f} s; plain {plain_gib:.2f} "
            "GiB extra, {plain_seconds:.1f} s; memory {memory_ratio:.1%}, time {time_ratio:.2f} of the plain way".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
