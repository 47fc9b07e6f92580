"""A made-up run with everything in it that a run can hold."""

from __future__ import annotations

from mtp_zoo_conformance.record import Cell, EngineRecord, FlipResult, Record, ServedHead, Tier, Verdict


def cell(
    engine: str,
    tier: Tier,
    stage: str,
    verdict: Verdict = "pass",
    *,
    diff: float | None = None,
    tolerance: float | None = None,
    variant: str = "untied",
    reason: str = "",
    expected: bool = False,
) -> Cell:
    version = {"vllm": "0.32.0", "sglang": "0.5.23", "reference": "2.13.0"}.get(engine, "")
    return Cell(
        family="qwen3_5",
        variant=variant,
        engine=engine,
        engine_version=version,
        tier=tier,
        stage=stage,
        max_abs_diff=diff,
        tolerance=tolerance,
        verdict=verdict,
        reason=reason,
        expected=expected,
    )


def parity() -> Record:
    """A run in which everything agrees, but for a part that a case declares as not judged."""
    return Record(
        cells=[
            cell("none", "keys", "claimed"),
            cell("reference", "forward", "fusion", diff=0.0, tolerance=2e-5),
            cell("reference", "forward", "logits", diff=2.1e-6, tolerance=2e-5),
            cell("vllm", "module", "fusion", diff=1.9e-6, tolerance=1e-4),
            cell("vllm", "module", "logits", diff=3.4e-6, tolerance=1e-4),
            cell("vllm", "module", "drafts"),
            cell("vllm", "module", "tap", "not_judged", variant="hybrid", reason="bf16 only", expected=True),
            cell("vllm", "module", "logits", diff=3.1e-6, tolerance=1e-4, variant="hybrid"),
            cell("sglang", "module", "fusion", diff=4.5e-7, tolerance=1e-5),
            cell("sglang", "module", "logits", diff=8.9e-7, tolerance=1e-5),
            cell("vllm", "serve", "counters", diff=0.0, tolerance=0.0, variant="trained, k = 3"),
        ],
        sensitivity=[
            FlipResult("qwen3_5", engine, flip, True, moved)
            for engine in ("reference", "vllm", "sglang")
            for flip, moved in (("fuse_order", 5.1), ("qk_norm", 0.036))
        ],
        served=[served("trained", "vllm", 3), served("trained", "sglang", 3), served("oracle", "vllm", 1)],
        engines=[
            EngineRecord(
                engine="vllm",
                version="0.32.0",
                torch="2.13.0+cpu",
                device="cpu",
                backend="CPU_ATTN",
                draft_classes=("Qwen3_5MTP",),
                shims=(),
                settings=("custom_ops: none",),
            ),
            EngineRecord(
                engine="sglang",
                version="0.5.23",
                torch="2.13.0+cpu",
                device="cpu",
                backend="torch_native",
                draft_classes=("Qwen3_5ForCausalLMMTP",),
                shims=("bodies of the sgl_kernel operators in plain torch",),
                settings=(),
            ),
        ],
        versions={"mtp_zoo": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.24.0"},
        seconds=321.0,
    )


def served(head: str, engine: str, k: int) -> ServedHead:
    accepted = tuple(40 - 10 * depth for depth in range(k))
    length = 1 + sum(accepted) / 60
    return ServedHead(
        family="qwen3_5",
        head=head,
        engine=engine,
        engine_version="0",
        dtype="float32",
        k=k,
        accepted=accepted,
        verify_steps=60,
        accept_length=length,
        library_accepted=accepted,
        library_verify_steps=60,
        library_accept_length=length,
    )
