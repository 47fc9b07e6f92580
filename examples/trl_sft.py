"""Joint training with TRL's SFTTrainer, unchanged, on prompts and completions.

SFTTrainer makes its loss outside the model. The gradient holds the MTP loss; the loss that it logs is the model's own.
"""

from __future__ import annotations

from datasets import Dataset
from tiny_checkpoint import History, make, out_folder, show, texts
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import mtp_zoo as mz

STEPS, ROWS = 100, 16


def main() -> None:
    """Train, and save trunk and head."""
    out = out_folder()
    source = make(out)
    model = mz.attach(AutoModelForCausalLM.from_pretrained(source), agreement=True)
    print(model.mtp)
    history = History(model)
    arguments = SFTConfig(
        output_dir=str(out / "run"),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(texts(STEPS * ROWS)),
        processing_class=AutoTokenizer.from_pretrained(source),
        callbacks=[history],
    )
    trainer.train()
    trainer.save_model(str(out / "trained"))
    show(history.steps[0], history.steps[-1], out / "trained")


if __name__ == "__main__":
    main()
