"""A tiny Qwen3.5 checkpoint with a head, a tokenizer of 32 words, and text to learn: what the examples train.

The checkpoint has the config, the names and the file layout of a published one, so everything in the examples but this
file works with a real one in its place.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import mtp_zoo as mz

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
WORDS = ["<pad>", "<end>", "count", "up", "down", "from", ":", ".", *NUMBERS]

CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],  # vLLM on a CPU runs these in FP32
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def make(folder: Path) -> Path:
    """Write the checkpoint, with random weights and a random head, below `folder`; returns its path."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG))
    model.save_pretrained(folder / "trunk")
    tokenizer.save_pretrained(folder / "trunk")
    head = mz.load_head(folder / "trunk", init="random")
    mz.export(head, base=folder / "trunk", out=folder / "tiny")
    return folder / "tiny"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts and completions: `count up from three :` and `three four five . <end>`, of many lengths."""
    chosen, out = random.Random(seed), list[dict[str, str]]()
    for _ in range(count):
        start, length, step = chosen.randrange(len(NUMBERS)), chosen.randint(3, 12), chosen.choice((1, -1))
        named = [NUMBERS[(start + step * number) % len(NUMBERS)] for number in range(length)]
        prompt = f"count {'up' if step > 0 else 'down'} from {NUMBERS[start]} :"
        out.append({"prompt": prompt, "completion": f" {' '.join(named)} . <end>"})
    return out


def rows(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """The same as token ids, with -100 as the label of a prompt's tokens."""
    tokenizer, out = make_tokenizer(), list[dict[str, list[int]]]()
    for text in texts(count, seed):
        prompt, completion = (tokenizer(text[part])["input_ids"] for part in ("prompt", "completion"))
        out.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return out


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """One batch, padded on the right."""
    longest = max(len(example["input_ids"]) for example in examples)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([example[name] + [fill] * (longest - len(example[name])) for example in examples])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}


class History(transformers.TrainerCallback):
    """Keeps, step by step, the loss that a trainer logs and what the head measured in the step's last micro-batch."""

    def __init__(self, model: Any) -> None:
        self.model, self.steps = model, list[dict[str, float]]()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Called with each line of a trainer's log."""
        if "loss" in logs:
            found = self.model.mtp.metrics
            measured = {"mtp_loss": found["mtp/loss_1"], "accept length": found["mtp/accept_length"]}
            self.steps.append({"loss": logs["loss"], **measured})


def out_folder() -> Path:
    """`--out`, or a new folder among the system's temporary files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="folder for all files of this example")
    return parser.parse_args().out or Path(tempfile.mkdtemp(prefix="mtp-zoo-example-"))


def show(first: dict[str, float], last: dict[str, float], saved: Path) -> None:
    """Print what the first and the last step measured, and where the model lies."""
    print(f"{'':16}{'first step':>12}{'last step':>12}")
    for name in first:
        print(f"{name:16}{first[name]:12.3f}{last[name]:12.3f}")
    print(f"saved: {saved}")
