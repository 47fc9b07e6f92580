"""The checkpoints that engines serve for a case, each a target with a head, written by `mtp_zoo.export`.

    trained     a small target that learnt a made-up language, and a head that learnt the target in part: its drafts are
                accepted often, not always, and less often the deeper they are, so that a wrong count shows
    untouched   the head of `trained`, loaded and exported again without a change
    oracle      a target whose layers add nothing, so that the next token depends on the last one alone, and a head that
                computes the same from the token that it embeds: every draft must be accepted
    demo        qwen3_5 only: what the demo exports, a target fine-tuned on real text with its head trained again

All but the demo's are stored in FP32: every side then computes from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

import mtp_zoo as mz
from mtp_zoo.demo.corpus import load_corpus, tokens
from mtp_zoo.demo.head import train_head
from mtp_zoo.demo.story import tell
from mtp_zoo.demo.target import even_windows, fine_tune
from mtp_zoo.errors import ConformanceError
from mtp_zoo.head import DraftHead
from mtp_zoo.progress import progress
from mtp_zoo.shared import language_model
from mtp_zoo.spec import Engine
from mtp_zoo.training.target import load_tokenizer
from mtp_zoo_conformance.case import ConformanceCase, Dtype
from mtp_zoo_conformance.tiny import target_model

TRAINED, UNTOUCHED, ORACLE, DEMO = "trained", "untouched", "oracle", "demo"
SEED = 1

WORDS = 18
SUCCESSORS = (0.6, 0.3, 0.1)
"""The made-up language: `WORDS` tokens of the vocabulary; behind every pair of them one of these three likely tokens."""

STREAM_TOKENS = 20_000
BATCH, LENGTH = 8, 36
TARGET_STEPS, TARGET_LR = 100, 4e-3
HEAD_STEPS, HEAD_LR = 60, 3e-3
"""Enough for a head that is right in a good half of its first drafts; ten seconds on one slow core."""

PROMPT_LENGTHS = (4, 9, 17, 30, 41, 60)
DEMO_PROMPT_LENGTHS = (24, 35, 46, 57, 68, 79, 90, 101)
NEW_TOKENS = 40
"""Tokens that are generated behind each prompt."""

NORM_SPREAD = 2.0
"""Standard deviation of the oracle's final norm weights. With gains of one sign the most likely token behind a token would
often be that token itself, and an output that repeats one token tells little."""

FP32: Mapping[Engine, Dtype] = {"vllm": "float32", "sglang": "float32"}
DEMO_DTYPES: Mapping[Engine, Dtype] = {"vllm": "bfloat16", "sglang": "float32"}
"""vLLM's gated delta net runs on a CPU in BF16 only."""


IN_FULL = "qwen3_5"
"""The family for which every head is run with every number of drafts. Counting is the same for all families."""
DRAFTS: Mapping[str, tuple[int, ...]] = {TRAINED: (1, 3), UNTOUCHED: (3,), ORACLE: (3,)}
"""Head -> drafts a step, for the others."""


@dataclass(frozen=True, kw_only=True)
class ServedCheckpoint:
    """One exported checkpoint, and what is generated with it.

    Attributes:
        head: `trained`, `untouched`, `oracle` or `demo`.
        path: the checkpoint.
        plain: name of the checkpoint whose outputs without drafts are those of this one's target too; its own name unless
            both have the same target.
        prompts: token ids.
        dtypes: what each engine computes in.
        drafts: tokens that are drafted a step, one run each.
        not_run: engine -> why it can't run the target on a CPU.
    """

    head: str
    path: Path
    plain: str
    prompts: tuple[tuple[int, ...], ...]
    dtypes: Mapping[Engine, Dtype]
    drafts: tuple[int, ...] = (1, 2, 3)
    not_run: Mapping[Engine, str] = field(default_factory=dict)

    @property
    def has_own_target(self) -> bool:
        """Whether its outputs without drafts are to be generated."""
        return self.plain == self.head


def build(case: ConformanceCase, folder: Path, *, seed: int = SEED) -> tuple[ServedCheckpoint, ...]:
    """Make every checkpoint of a case, in new folders under `folder`, from a seed.

    Raises:
        ConformanceError: the case's output projections are not those of its target or head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with progress(f"Training the heads to serve ({case.family})", total=2) as advance:
        trained = _trained(case, folder, seed)
        advance()
        oracle = _oracle(case, folder, seed)
        advance()
    return (*trained, oracle, *EXTRA.get(case.family, _none)(folder))


def language(vocab: int, length: int, *, seed: int) -> Int[Tensor, " length"]:
    """A stream of the made-up language: the next token depends on the last two, and never repeats the last."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randperm(vocab, generator=generator)[:WORDS]
    likely = torch.randint(WORDS, (WORDS, WORDS, len(SUCCESSORS)), generator=generator)
    last = torch.arange(WORDS)[None, :, None]
    likely = torch.where(likely == last, (likely + 1) % WORDS, likely).tolist()
    picks = torch.multinomial(torch.tensor(SUCCESSORS), length, replacement=True, generator=generator).tolist()
    pair, stream = (0, 1), list[int]()
    for pick in picks:
        pair = (pair[1], likely[pair[0]][pair[1]][pick])
        stream.append(pair[1])
    return words[stream]


def _trained(case: ConformanceCase, folder: Path, seed: int) -> tuple[ServedCheckpoint, ServedCheckpoint]:
    text, base = case.variants[0].text_config, folder / "trained-base"
    stream = language(text["vocab_size"], STREAM_TOKENS, seed=seed)
    target = target_model(case.target_class, text, seed=seed).requires_grad_(True)
    fine_tune(target, stream, steps=TARGET_STEPS, lr=TARGET_LR, batch_size=BATCH, length=LENGTH, seed=seed)
    target.requires_grad_(False).save_pretrained(base)
    head = mz.load_head(base, target=target, family=case.family, init="random", dtype=torch.float32, seed=seed)
    train_head(head, target, stream, steps=HEAD_STEPS, lr=HEAD_LR, batch_size=BATCH, length=LENGTH, seed=seed)
    first, again = folder / "trained", folder / "untouched"
    mz.export(head, base=base, out=first)
    mz.export(mz.load_head(first, family=case.family), base=first, out=again)
    prompts = _windows(language(text["vocab_size"], STREAM_TOKENS, seed=seed)[LENGTH:], PROMPT_LENGTHS)
    return _served(case, TRAINED, first, prompts), _served(case, UNTOUCHED, again, prompts, plain=TRAINED)


def _served(
    case: ConformanceCase, head: str, path: Path, prompts: tuple[tuple[int, ...], ...], *, plain: str | None = None
) -> ServedCheckpoint:
    return ServedCheckpoint(
        head=head,
        path=path,
        plain=plain or head,
        prompts=prompts,
        dtypes=FP32,
        drafts=(1, 2, 3) if case.family == IN_FULL else DRAFTS[head],
        not_run=_not_run(case),
    )


def _oracle(case: ConformanceCase, folder: Path, seed: int) -> ServedCheckpoint:
    text, base = case.variants[0].text_config, folder / "oracle-base"
    generator = torch.Generator().manual_seed(seed)
    target = target_model(case.target_class, text, seed=seed)
    decoder = language_model(target)
    for number, layer in enumerate(decoder.layers):
        _silence(layer, case, f"layer {number} of the target")
    decoder.norm.weight.data = NORM_SPREAD * torch.randn(decoder.norm.weight.shape, generator=generator)
    target.save_pretrained(base)
    head = mz.load_head(base, target=target, family=case.family, init="random", dtype=torch.float32, seed=seed)
    with torch.no_grad():
        make_oracle(head, case)
    mz.export(head, base=base, out=folder / "oracle")
    prompts = _windows(torch.randint(text["vocab_size"], (STREAM_TOKENS,), generator=generator), PROMPT_LENGTHS)
    return _served(case, ORACLE, folder / "oracle", prompts)


def make_oracle(head: DraftHead, case: ConformanceCase) -> None:
    """Let the head compute `norm(enorm(embedding))` and nothing else, with the target's own final norm."""
    final_norm = head.shared.final_norm
    assert final_norm is not None
    keep, drop = torch.eye(head.hidden_size), torch.zeros(head.hidden_size, head.hidden_size)
    pair = (keep, drop) if head.spec.fuse_order == "embed_hidden" else (drop, keep)
    gain_of_one = 0.0 if head.spec.norm_weight == "zero_centered" else 1.0
    for number, depth in enumerate(head.depths):
        part: Any = depth
        part.enorm.weight.fill_(gain_of_one)
        part.eh_proj.weight.copy_(torch.cat(pair, dim=1))
        part.norm.weight.copy_(final_norm.weight)
        _silence(part.block, case, f"the block of depth {number + 1}")


def _silence(layer: nn.Module, case: ConformanceCase, place: str) -> None:
    """Set the output projections to zero; a layer need not have all of them (a dense layer among sparse ones)."""
    found = {name: value for name, value in layer.named_parameters() if name in case.output_projections}
    if not found:
        raise ConformanceError(
            f"Building the oracle of family '{case.family}': expected one of {list(case.output_projections)} in {place}, "
            f"found {[name for name, _ in layer.named_parameters()]}.",
            remedy="Correct the case's output_projections.",
        )
    for parameter in found.values():
        parameter.data.zero_()


def _demo(folder: Path) -> tuple[ServedCheckpoint, ...]:
    """What `mtp-zoo demo --short` exports; prompts from held-out text of the kind that its target was fine-tuned on."""
    path = tell(folder / "demo-run", short=True).checkpoint
    text = tokens(load_tokenizer(path), load_corpus(tenths=2).text("code", "held_out"))
    prompts = _windows(text, DEMO_PROMPT_LENGTHS)
    return (ServedCheckpoint(head=DEMO, path=path, plain=DEMO, prompts=prompts, dtypes=DEMO_DTYPES, drafts=(1, 3)),)


def _not_run(case: ConformanceCase) -> Mapping[Engine, str]:
    """A server needs the target, so it can run no variant whose target or module can't."""
    return {**case.variants[0].no_target, **case.variants[0].not_run}


def _none(folder: Path) -> tuple[ServedCheckpoint, ...]:
    del folder
    return ()


EXTRA: Mapping[str, Callable[[Path], tuple[ServedCheckpoint, ...]]] = {"qwen3_5": _demo}
"""Family -> checkpoints besides those that every case has."""


def _windows(stream: Int[Tensor, " tokens"], lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Pieces of the given lengths, evenly spaced over the stream."""
    pieces = even_windows(stream, len(lengths), max(lengths)).tolist()
    return tuple(tuple(piece[:length]) for piece, length in zip(pieces, lengths, strict=True))
