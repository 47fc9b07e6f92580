"""The demo: what happens to a head when the model under it is fine-tuned, and how it is brought back.

    base          a small model and its head, both trained on prose
    target_tuned  the model is fine-tuned on code by a trainer that knows of no head; the head is the old one
    head_trained  the head is loaded strictly, trained on the tuned model, exported, and loaded again from the export

Prompts are held-out text of the model's own domain at each stage: prose for the base, code after the fine-tune.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mtp_zoo.acceptance import AcceptanceReport, replay, speculate
from mtp_zoo.demo.corpus import Corpus, Domain, load_corpus, tokens
from mtp_zoo.demo.head import DEPTHS, train_head
from mtp_zoo.demo.page import write_page
from mtp_zoo.demo.target import even_windows, fine_tune
from mtp_zoo.errors import HeadNotFoundError, OutputExistsError
from mtp_zoo.exporter import export
from mtp_zoo.head import DraftHead
from mtp_zoo.loader import load_head
from mtp_zoo.progress import progress

BASE = Path(__file__).parent / "assets" / "tiny-qwen3_5"
MARKER = ".mtp-zoo-demo"
TITLES = {
    "base": "base model, its own head",
    "target_tuned": "model fine-tuned on code, old head",
    "head_trained": "same model, head trained and exported",
}


@dataclass(frozen=True)
class Settings:
    """How much of everything; `SHORT` only shows that the machinery runs."""

    corpus_tenths: int = 5
    windows: int = 4
    tune_steps: int = 120
    tune_lr: float = 1e-3
    head_steps: int = 130
    head_lr: float = 2e-3
    prompts: int = 64
    prompt_tokens: int = 96
    new_tokens: int = 64
    block_prompts: int = 192
    block_tokens: int = 64
    loop_prompts: int = 2


FULL = Settings()
SHORT = Settings(tune_steps=30, head_steps=30, prompts=16, new_tokens=32, block_prompts=32, loop_prompts=1)


@dataclass(frozen=True)
class Stage:
    """One measured stage.

    Attributes:
        name: `base`, `target_tuned` or `head_trained`.
        text: domain of the prompts.
        report: acceptance over greedy outputs.
        error: standard error of its accept length.
        block: accept length of one draft/verify step behind real text, without drift and loops.
        block_error: its standard error.
    """

    name: str
    text: Domain
    report: AcceptanceReport
    error: float
    block: float
    block_error: float

    def as_dict(self) -> dict[str, Any]:
        """The stage for `--json`."""
        return {
            "name": self.name,
            "text": self.text,
            "accept_rate": self.report.accept_rate,
            "accept_length": self.report.accept_length,
            "standard_error": self.error,
            "loop_share": self.report.loop_share,
            "block_accept_length": self.block,
            "block_standard_error": self.block_error,
        }


@dataclass(frozen=True)
class Story:
    """What the demo found.

    Attributes:
        stages: base, target_tuned, head_trained.
        loop: the real draft/verify loop of the last stage on its first prompts.
        refusal: what a strict load of the tuned checkpoint, which lost its head, says.
        history: metrics of each step of the head's training.
        seconds: wall time.
        report: the HTML report.
        checkpoint: the exported, servable checkpoint.
    """

    stages: tuple[Stage, ...]
    loop: AcceptanceReport
    refusal: str
    history: list[dict[str, float]] = field(repr=False)
    seconds: float
    report: Path
    checkpoint: Path

    def as_dict(self) -> dict[str, Any]:
        """The story for `--json`."""
        return {
            "stages": [stage.as_dict() for stage in self.stages],
            "loop": self.loop.as_dict(),
            "seconds": self.seconds,
            "report": str(self.report),
            "checkpoint": str(self.checkpoint),
        }

    def __str__(self) -> str:
        from mtp_zoo.tables import render_table

        headers = ("stage", "prompts", "accept rate", "accept length", "std. error", "outputs that loop", "one block")
        title = f"Accept length with {DEPTHS} drafted tokens a step"
        return "\n".join(
            [
                render_table(title, headers, self.rows(), right=(2, 3, 4, 5, 6)),
                f"A strict load of the fine-tuned checkpoint: {self.refusal}",
                f"Real draft/verify loop on {len(self.loop.prompts)} of the last stage's prompts: accept length "
                f"{self.loop.accept_length:.3f}, output equals plain greedy decoding: {self.loop.lossless}",
                f"{self.seconds:.0f} s; report {self.report}; servable checkpoint {self.checkpoint}",
            ]
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells."""
        return [
            (
                TITLES[stage.name],
                stage.text,
                f"{stage.report.accept_rate:.3f}",
                f"{stage.report.accept_length:.3f}",
                f"{stage.error:.3f}",
                f"{stage.report.loop_share:.0%}",
                f"{stage.block:.3f} +- {stage.block_error:.3f}",
            )
            for stage in self.stages
        ]


def tell(out: Path, *, seed: int = 0, short: bool = False) -> Story:
    """Run the demo into `out`.

    Args:
        out: directory to make; one that an earlier demo made is replaced.
        seed: of the fine-tune and of the head's training.
        short: fewer steps and prompts.

    Raises:
        OutputExistsError: `out` exists and no demo made it.
    """
    _prepare(out)
    with _small_tensors():
        return _tell(out, seed, SHORT if short else FULL)


@contextmanager
def _small_tensors() -> Generator[None]:
    """One thread: the demo's tensors are so small that several would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def _tell(out: Path, seed: int, settings: Settings) -> Story:
    began = time.monotonic()
    streams = _Streams(load_corpus(tenths=settings.corpus_tenths), AutoTokenizer.from_pretrained(BASE))
    target = _load_target(BASE)
    head = load_head(BASE, target=target, dtype=torch.float32)
    stages = [_measure("base", "prose", target, head, streams, settings)]

    code = streams("code", "train")
    how: dict[str, Any] = {"batch_size": settings.windows}
    with progress("Fine-tuning the model on code", total=settings.tune_steps) as advance:
        how |= {"steps": settings.tune_steps, "lr": settings.tune_lr, "seed": 100 + seed}
        fine_tune(target, code, **how, progress=advance)
    tuned = _save_without_head(target, out / "tuned", streams.tokenizer)
    stages.append(_measure("target_tuned", "code", target, head, streams, settings))
    refusal = _refusal(tuned)

    with progress("Training the head on code", total=settings.head_steps) as advance:
        how |= {"steps": settings.head_steps, "lr": settings.head_lr, "seed": 200 + seed}
        history = train_head(head, target, code, **how, progress=advance)
    exported = export(head, base=tuned, out=out / "checkpoint", training={"demo_seed": seed, "steps": len(history)})
    target = _load_target(exported.out)
    head = load_head(exported.out, target=target, dtype=torch.float32)
    stages.append(_measure("head_trained", "code", target, head, streams, settings))
    prompts = _prompts(streams("code", "held_out"), settings.prompts, settings.prompt_tokens)[: settings.loop_prompts]
    loop = speculate(target, head, prompts, k=DEPTHS, max_new_tokens=settings.new_tokens)

    seconds = time.monotonic() - began
    story = Story(tuple(stages), loop, refusal, history, seconds, out / "report.html", Path(exported.out))
    write_page(story)
    return story


class _Streams:
    """Token streams of the corpus, each encoded once."""

    def __init__(self, corpus: Corpus, tokenizer: Any) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self._made: dict[tuple[str, str], Tensor] = {}

    def __call__(self, domain: Domain, split: Any) -> Tensor:
        key = (domain, split)
        if key not in self._made:
            self._made[key] = tokens(self.tokenizer, self.corpus.text(domain, split))
        return self._made[key]


def _measure(
    name: str, text: Domain, target: PreTrainedModel, head: DraftHead, streams: _Streams, settings: Settings
) -> Stage:
    stream = streams(text, "held_out")
    prompts = _prompts(stream, settings.prompts, settings.prompt_tokens)
    report = replay(target, head, prompts, k=DEPTHS, max_new_tokens=settings.new_tokens)
    # Two tokens a prompt: the prefill's own, and one draft/verify step behind it.
    block = replay(
        target, head, _prompts(stream, settings.block_prompts, settings.block_tokens), k=DEPTHS, max_new_tokens=2
    )
    return Stage(name, text, report, _error(report), block.accept_length, _error(block))


def _error(report: AcceptanceReport) -> float:
    assert report.standard_error is not None, "every stage has several prompts"
    return report.standard_error


def _prompts(stream: Tensor, count: int, length: int) -> list[Sequence[int]]:
    return even_windows(stream, count, length).tolist()


def _load_target(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _save_without_head(target: PreTrainedModel, out: Path, tokenizer: Any) -> Path:
    """What a trainer does that knows transformers only: it saves the model, and the head is gone."""
    twin = AutoModelForCausalLM.from_config(target.config, dtype=torch.bfloat16)
    twin.load_state_dict(target.state_dict())
    twin.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _refusal(tuned: Path) -> str:
    try:
        load_head(tuned)
    except HeadNotFoundError as error:
        return f"refused, {error.message}"
    raise AssertionError(f"{tuned} was saved by transformers and still holds a head")


def _prepare(out: Path) -> None:
    if out.exists() and not (out / MARKER).is_file():
        raise OutputExistsError(
            f"Running the demo into {out}: it exists, and no demo made it.", remedy="Name a new directory with --out."
        )
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).write_text("This directory was made by `mtp-zoo demo`, which may replace it.\n", encoding="utf-8")
