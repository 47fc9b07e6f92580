"""Joint training with transformers' Trainer, unchanged; a callback reads the head's metrics."""

from __future__ import annotations

from tiny_checkpoint import History, collate, make, out_folder, rows, show
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import mtp_zoo as mz

STEPS, ROWS = 100, 8


def main() -> None:
    """Train, save a checkpoint on the way, and save trunk and head."""
    out = out_folder()
    model = mz.attach(AutoModelForCausalLM.from_pretrained(make(out)), agreement=True)
    print(model.mtp)
    history = History(model)
    arguments = TrainingArguments(
        output_dir=str(out / "run"),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows(2 * STEPS * ROWS), data_collator=collate, callbacks=[history]
    )
    trainer.train()
    trainer.save_model(str(out / "trained"))
    show(history.steps[0], history.steps[-1], out / "trained")


if __name__ == "__main__":
    main()
