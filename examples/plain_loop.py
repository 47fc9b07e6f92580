"""Joint training in a plain torch loop, with gradients accumulated over micro-batches of unequal size.

The step's token counts are taken before its first micro-batch runs, so that the sum of the micro-batches' losses is the
loss of one big batch, however it is cut.
"""

from __future__ import annotations

import torch
from tiny_checkpoint import collate, make, make_tokenizer, out_folder, rows, show
from transformers import AutoModelForCausalLM

import mtp_zoo as mz

STEPS, MICRO_BATCHES, ROWS, DEPTHS = 80, 2, 8, 2


def main() -> None:
    """Train, and save trunk and head."""
    out = out_folder()
    model = AutoModelForCausalLM.from_pretrained(make(out)).train()
    mz.attach(model, depths=DEPTHS, agreement=True)
    print(model.mtp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = rows(STEPS * MICRO_BATCHES * ROWS)
    history: list[dict[str, float]] = []
    for step in range(STEPS):
        start = step * MICRO_BATCHES * ROWS
        batches = [collate(data[start + n * ROWS : start + (n + 1) * ROWS]) for n in range(MICRO_BATCHES)]
        tokens = [mz.TokenBatch.from_collated(batch) for batch in batches]
        counts = mz.step_counts(tokens, DEPTHS)
        labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        measured: list[dict[str, float]] = []
        for batch in batches:
            result = model(**batch, num_items_in_batch=labels, mtp_counts=counts)
            result.loss.backward()
            measured.append({"loss": result.loss.item(), "mtp_loss": result.mtp_loss.item()})
        optimizer.step()
        optimizer.zero_grad()
        sums = {name: sum(each[name] for each in measured) for name in measured[0]}
        history.append({**sums, "accept length": float(result.metrics["mtp/accept_length"])})
    model.save_pretrained(out / "trained")
    make_tokenizer().save_pretrained(out / "trained")
    show(history[0], history[-1], out / "trained")


if __name__ == "__main__":
    main()
