"""Make the checkpoint that the demo starts from: a tiny Qwen3.5-shaped target with a trained head, on real text.

    python scripts/make_demo_base.py --out mtp_zoo/demo/assets/tiny-qwen3_5

Everything comes from the standard library of the Python that runs and from one seed: a byte-level BPE tokenizer (prose
and code), the target (prose only), then its head on the frozen target (prose only). `--out` is replaced. The same
Python, the same library versions and the same kind of processor give the same checkpoint; others give a similar one.
"""

from __future__ import annotations

import argparse
import platform
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
)

from mtp_zoo.acceptance import replay
from mtp_zoo.demo.corpus import Corpus, load_corpus, tokens
from mtp_zoo.demo.head import DEPTHS, WEIGHTS, train_head
from mtp_zoo.demo.target import demo_config, even_windows, fine_tune, perplexity
from mtp_zoo.keymap import to_native
from mtp_zoo.loader import load_head
from mtp_zoo.progress import progress

DEFAULT_OUT = Path(__file__).parents[1] / "mtp_zoo" / "demo" / "assets" / "tiny-qwen3_5"
WEIGHTS_FILE = "model.safetensors"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
TOKENIZER_CODE_CHARACTERS = 2_500_000  # prose is 1.6 M; all of the code would leave prose too few merges
TARGET_LR = 4e-3
TARGET_WARMUP = 20
HEAD_LR = 2e-3
PROMPTS = 64
PROMPT_LENGTH = 96
NEW_TOKENS = 64

README = Path(__file__).with_name("demo_base_readme.md")


def main() -> None:
    """Build the target, then its head, then describe both."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # a fresh model's tails are denormal, and those are slow on a CPU
    corpus = load_corpus()
    if not arguments.head_only:
        build_target(arguments.out, corpus, seed=arguments.seed, steps=arguments.steps)
    build_head(arguments.out, corpus, seed=arguments.seed, steps=arguments.head_steps)
    describe(arguments.out, corpus, arguments)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help="optimiser steps of the target")
    parser.add_argument("--head-steps", type=int, default=300, help="optimiser steps of the head")
    parser.add_argument("--head-only", action="store_true", help="keep the target in OUT and train its head anew")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def build_target(out: Path, corpus: Corpus, *, seed: int, steps: int) -> None:
    """Write tokenizer and target, without a head yet."""
    tokenizer = train_tokenizer(corpus)
    torch.manual_seed(seed)
    target = Qwen3_5ForCausalLM(demo_config(len(tokenizer), end_of_text=tokenizer.eos_token_id))
    stream = tokens(tokenizer, corpus.text("prose", "train"))
    with progress("Training the target on prose", total=steps) as advance:
        fine_tune(target, stream, steps=steps, lr=TARGET_LR, warmup=TARGET_WARMUP, seed=seed, progress=advance)
    shutil.rmtree(out, ignore_errors=True)
    target.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """A byte-level BPE of both domains' training text."""
    texts = ["\n\n".join(corpus.text("prose", "train"))]
    texts.append("\n\n".join(corpus.text("code", "train"))[:TOKENIZER_CODE_CHARACTERS])
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(texts, vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trainer._tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, model_max_length=1024
    )


def build_head(out: Path, corpus: Corpus, *, seed: int, steps: int) -> None:
    """Train a new head on the target in `out`, as it was rounded for storage, and put it into the same file."""
    tokenizer, target = AutoTokenizer.from_pretrained(out), load_target(out)
    head = load_head(out, target=target, init="random", dtype=torch.float32, seed=seed)
    stream = tokens(tokenizer, corpus.text("prose", "train"))
    with progress("Training the head on prose", total=steps) as advance:
        train_head(head, target, stream, steps=steps, lr=HEAD_LR, seed=seed, progress=advance)
    trunk = {name: tensor for name, tensor in load_file(out / WEIGHTS_FILE).items() if not head.site.in_scope(name)}
    native = to_native(head.origin.bindings, head.weights())
    mtp = {name: tensor.to(torch.bfloat16) for name, tensor in native.items()}
    save_file({**trunk, **mtp}, out / WEIGHTS_FILE, metadata={"format": "pt"})
    (out / WEIGHTS_FILE).chmod(0o644)


def load_target(out: Path) -> PreTrainedModel:
    """The target in float32, frozen."""
    return Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32).eval().requires_grad_(False)


def describe(out: Path, corpus: Corpus, arguments: argparse.Namespace) -> None:
    """Write README.md: how the checkpoint was made, and what it measures on text that it was not trained on."""
    tokenizer, target = AutoTokenizer.from_pretrained(out), load_target(out)
    head = load_head(out, target=target, dtype=torch.float32)
    streams = {domain: tokens(tokenizer, corpus.text(domain, "held_out")) for domain in ("prose", "code")}
    prompts = even_windows(streams["prose"], PROMPTS, PROMPT_LENGTH).tolist()
    report = replay(target, head, prompts, k=DEPTHS, max_new_tokens=NEW_TOKENS)
    text = README.read_text(encoding="utf-8").format(
        target_parameters=sum(parameter.numel() for parameter in target.parameters()),
        head_parameters=sum(parameter.numel() for parameter in head.parameters()),
        prose=perplexity(target, streams["prose"]),
        code=perplexity(target, streams["code"]),
        report=report,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        training_tokens=len(tokens(tokenizer, corpus.text("prose", "train"))),
        vocab_size=VOCAB_SIZE,
        target_lr=TARGET_LR,
        head_lr=HEAD_LR,
        depths=DEPTHS,
        weights=" / ".join(map(str, WEIGHTS)),
        prompts=PROMPTS,
        prompt_length=PROMPT_LENGTH,
        new_tokens=NEW_TOKENS,
        arguments=arguments,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
