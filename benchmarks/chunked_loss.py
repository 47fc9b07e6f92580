"""Memory and time of the objective's loss at a large vocabulary: in chunks, against the plain way.

    python benchmarks/chunked_loss.py [--tokens 2048] [--vocab 248320] [--hidden 1024]

Both compute the loss and its gradient on the states, in FP32, each in a process of its own. "Extra" is the peak of the
resident set above what holding the inputs takes. The plain way holds all logits of head and target at once.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from measure import measure

from mtp_zoo.losses import LOSSES, chunked_loss


def inputs(tokens: int, vocab: int, hidden: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "states": torch.randn(tokens, hidden, generator=generator).requires_grad_(),
        "targets": torch.randn(tokens, hidden, generator=generator),
        "labels": torch.randint(0, vocab, (tokens,), generator=generator),
        "weight": torch.randn(vocab, hidden, generator=generator) * hidden**-0.5,
    }


def chunked(loss: str, given: dict[str, Any]) -> None:
    chunked_loss(given["states"], given["targets"], given["labels"], given["weight"], {loss: 1.0}).total.backward()


def plain(loss: str, given: dict[str, Any]) -> None:
    log_q = (given["states"] @ given["weight"].T).log_softmax(-1)
    with torch.no_grad():
        log_p = (given["targets"] @ given["weight"].T).log_softmax(-1)
    LOSSES[loss](log_q, log_p, given["labels"]).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    prepare = functools.partial(inputs, arguments.tokens, arguments.vocab, arguments.hidden)
    print(f"{arguments.tokens} tokens, vocabulary {arguments.vocab:,}, hidden {arguments.hidden}, FP32")
    for loss in ("ce", "kl"):
        seconds, memory = measure(prepare, functools.partial(chunked, loss), repeats=arguments.repeats)
        plain_seconds, plain_memory = measure(prepare, functools.partial(plain, loss), repeats=arguments.repeats)
        print(
            f"{loss}: chunked {memory:.2f} GiB extra, {seconds:.1f} s; plain {plain_memory:.2f} GiB extra, "
            f"{plain_seconds:.1f} s; memory ratio {plain_memory / memory:.1f}, time ratio {seconds / plain_seconds:.2f}"
        )


if __name__ == "__main__":
    main()
