"""Where transformers' layers differ from what the serving engines compute, set right after a layer is built."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


def latent_norm_eps(layer: Any, config: Any) -> None:
    """Let the norms of latent attention use the config's epsilon.

    transformers builds them with its class default, 1e-6; vLLM 0.32.0 and SGLang 0.5.23 (models/deepseek_v2.py in both) with
    `rms_norm_eps`, which is 1e-5 in GLM-4.7-Flash and GLM-5.
    """
    for norm in _latent_norms(layer):
        norm.variance_epsilon = config.rms_norm_eps


def _latent_norms(layer: Any) -> list[Any]:
    attention = getattr(layer, "self_attn", None)
    found = [getattr(attention, name, None) for name in LATENT_NORMS]
    return [norm for norm in found if norm is not None]


def latent_norms(target: Any) -> list[Any]:
    """The norms of latent attention in a whole transformers model, from the first layer to the last."""
    from mtp_zoo.shared import language_model

    return [norm for layer in getattr(language_model(target), "layers", ()) for norm in _latent_norms(layer)]


def correct_target(target: Any) -> None:
    """Let a whole transformers model norm its latents as the engines that will serve it do, for good; see `latent_norm_eps`.

    Otherwise the states that a head is trained on are not quite those that it will be handed: on tiny checkpoints of
    GLM-4.7-Flash's and GLM-5's kind they lie 5e-5 apart. Models without latent attention are left as they are.
    """
    from mtp_zoo.shared import language_model

    model = language_model(target)
    for layer in getattr(model, "layers", ()):
        latent_norm_eps(layer, model.config)


@contextmanager
def corrected(target: Any) -> Generator[None]:
    """Run a block under `correct_target`, and give the norms the epsilon back that they had.

    `target_states`, `speculate` and `replay` run so: a model that was handed in computes the states that engines will, and
    stays as it is. `train` corrects the model that it trains on for good, and `attach` until `detach`.
    """
    norms = latent_norms(target)
    before = [norm.variance_epsilon for norm in norms]
    correct_target(target)
    try:
        yield
    finally:
        for norm, epsilon in zip(norms, before, strict=True):
            norm.variance_epsilon = epsilon


def dense_attention(layer: Any, config: Any) -> None:
    """Attend to every token, and hold the indexer of sparse attention without running it.

    An indexer picks the `index_topk` best tokens; while the context has no more of them, that is every token. The block's
    `context_field` keeps longer sequences out.
    """
    del config
    layer.self_attn.indexer.forward = _pick_everything


def _pick_everything(*_args: Any, **_kwargs: Any) -> None:
    """No selection: attention functions other than transformers' own eager and sdpa are handed this and ignore it."""
