"""Rollouts: how the depths of a head are chained over a whole batch at once.

chain     one recycled block, as vLLM and SGLang draft with it. At depth k the query of slot t sits at the position of slot
          t plus k - 1, and sees the depth-1 keys of slots <= t of its document and its own keys of depths 2..k: exactly the
          cache that a server holds while it drafts behind a verified prefix that ends in t.
sequence  a block and a cache of its own for each depth. Every depth runs a causal pass over each document at the target's
          positions. For one recycled block this is what most trainers do and not what is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from mtp_zoo.batch import PADDING
from mtp_zoo.chain_attention import ChainState
from mtp_zoo.context_parallel import ShardedBatch
from mtp_zoo.errors import ObjectiveError

if TYPE_CHECKING:
    from torch import Tensor

    from mtp_zoo.batch import TokenBatch
    from mtp_zoo.context_attention import ContextState
    from mtp_zoo.draft_module import DepthState, DraftModule

Rollout: TypeAlias = Literal["chain", "sequence"]


def default_rollout(head: DraftModule) -> Rollout:
    """What serves this head: `chain` for one recycled block, `sequence` for a block a depth."""
    return "chain" if head.depth_policy == "recycled" else "sequence"


def run_rollout(
    head: DraftModule,
    tokens: TokenBatch,
    hidden: Tensor,
    *,
    depths: int,
    rollout: Rollout | None = None,
    detach_embedding: bool = True,
) -> list[DepthState]:
    """States of depths 1..`depths` in every slot of the batch.

    Args:
        head: the draft module.
        tokens: the batch; it says which token enters which slot at which depth.
        hidden: [batch, seq, hidden], target states at the family's tap.
        depths: how many depths to run, at least 1.
        rollout: `chain` or `sequence`; None takes the family's.
        detach_embedding: cut the token embeddings that enter from the target's embedding.

    States on padding are taken as zeros, whatever they hold. So is the embedding of a slot into which no token of its
    document enters, or a placeholder: what stands in a placeholder's own row of the embedding moves nothing.

    Between depths the graph is whole: a loss at depth 3 reaches the blocks of depths 1 and 2, and `hidden`.

    Raises:
        ObjectiveError: no depth asked for, an unknown rollout, or states whose shape is not the batch's.
    """
    rollout = rollout or default_rollout(head)
    if depths < 1 or rollout not in get_args(Rollout) or tuple(hidden.shape[:2]) != tokens.shape:
        raise ObjectiveError(
            f"Rolling out: expected depths >= 1, a rollout of {get_args(Rollout)} and hidden states "
            f"[{tokens.shape[0]}, {tokens.shape[1]}, hidden]; got {depths}, {rollout!r} and {list(hidden.shape)}.",
            remedy="Compute the hidden states from the same TokenBatch (mtp_zoo.target_states).",
        )
    # What lies on padding may be NaN, and 0 times NaN is NaN: it is replaced, never multiplied.
    state, states, recycled = _chain_state(tokens), [], hidden.masked_fill((tokens.doc_ids == PADDING)[..., None], 0)
    for depth in range(1, depths + 1):
        chained = rollout == "chain"
        view = state.at(depth) if chained else _chain_state(tokens).at(1)
        positions = slot_positions(head, tokens.position_ids, depth if chained else 1)
        slots = tokens.slots(depth)
        embeddings = head.shared.embed(slots.input_ids, detach=detach_embedding)
        embeddings = embeddings.masked_fill(~slots.enters[..., None], 0)
        out = head.run_depth(depth, embeddings, recycled, positions, mtp_chain=view)
        states.append(out)
        recycled = out.recycled
    return states


def _chain_state(tokens: TokenBatch) -> ChainState | ContextState:
    return tokens.chain_state() if isinstance(tokens, ShardedBatch) else ChainState(tokens.segments)


def slot_positions(head: DraftModule, position_ids: Tensor, depth: int) -> Tensor:
    """RoPE positions of the slots at a depth of the chain (1-based).

    Example: the slot at position 7 runs depth 3 at 9 under `hidden`, at 10 under `token`, at 7 under `constant`.
    """
    advance = {"hidden": depth - 1, "token": depth, "constant": 0}[head.spec.position_rule]
    return position_ids + advance
