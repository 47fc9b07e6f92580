"""Joint training under accelerate, in BF16 mixed precision: the loop of accelerate's own documentation, and one line more."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from tiny_checkpoint import collate, make, make_tokenizer, out_folder, rows, show
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import mtp_zoo as mz

STEPS, ROWS = 90, 16


def main() -> None:
    """Train, and save trunk and head."""
    out = out_folder()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = AutoModelForCausalLM.from_pretrained(make(out)).train()
    mz.attach(model, agreement=True)  # the one line
    accelerator.print(model.mtp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rows(STEPS * ROWS), batch_size=ROWS, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    history: list[dict[str, float]] = []
    for batch in loader:
        result = model(**batch)
        accelerator.backward(result.loss)
        optimizer.step()
        optimizer.zero_grad()
        measured = {"loss": result.loss.item(), "mtp_loss": result.mtp_loss.item()}
        history.append({**measured, "accept length": float(result.metrics["mtp/accept_length"])})
    accelerator.unwrap_model(model).save_pretrained(
        out / "trained",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    make_tokenizer().save_pretrained(out / "trained")
    show(history[0], history[-1], out / "trained")


if __name__ == "__main__":
    main()
