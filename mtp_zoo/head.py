"""DraftHead: the multi-token-prediction module of a model, as one trainable torch module.

Canonical names, the same for every family; the key map translates:

    depths.{i}.enorm     norm of the token embedding that enters
    depths.{i}.hnorm     norm of the hidden state that enters
    depths.{i}.eh_proj   projection of both, joined, to the hidden size
    depths.{i}.block     one decoder layer of the target's own kind
    depths.{i}.norm      output norm, in front of the lm_head
    depths.{i}.lm_head   output projection of the depth's own, in families that have one (`private_head="kept"`); elsewhere
                         the target's is borrowed

Families with one fusion for several blocks let every depth use the parts of depth 0, under the names of depth 0.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

from mtp_zoo.arguments import DEPTHS, DEVICE, checked, instance, optional, whole
from mtp_zoo.batch import TokenBatch
from mtp_zoo.chain_attention import register_attention
from mtp_zoo.draft_depth import DraftDepth
from mtp_zoo.draft_module import DepthState, DraftModule
from mtp_zoo.errors import (
    ContextLimitError,
    FamilyDefinitionError,
    NotAttachedError,
    PrecisionError,
    SettingsError,
    SharedTensorError,
)
from mtp_zoo.groups import GROUPS, Group, group_of
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import Family
from mtp_zoo.rollout import Rollout, default_rollout, run_rollout
from mtp_zoo.shared import SharedTensors
from mtp_zoo.site import HeadSite
from mtp_zoo.spec import DepthPolicy, Engine

if TYPE_CHECKING:
    from mtp_zoo.load_report import LoadReport, Origin


class DraftHead(nn.Module):
    """The head of one checkpoint.

    Args:
        family: its family record.
        config: the checkpoint's config.
        depths: number of depths that the checkpoint stores.
        first_layer: number of depth 0 among the trunk's layers, for families whose head lies behind them.
        device: where parameters are made; "meta" makes shapes only.

    Attributes:
        config: the checkpoint's config.
        engine: the engine whose conventions to follow where engines differ; None is the training default.
        report, origin: what `load_head` read and from where.
    """

    report: LoadReport
    origin: Origin

    @checked(
        "Making a draft head",
        error=FamilyDefinitionError,
        family=instance("a Family", Family),
        config=instance("a ModelConfig", ModelConfig),
        depths=DEPTHS,
        first_layer=whole(least=0),
        device=optional(DEVICE),
    )
    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        *,
        depths: int = 1,
        first_layer: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        recycled = {family.spec.recycle.of(name) for name in (None, "vllm", "sglang")}
        if family.spec.fuse_order == "sum" or "streams" in {family.spec.hidden_tap, *recycled}:
            raise FamilyDefinitionError(
                f"Family '{family.name}': DraftHead joins by concatenation and carries one stream.",
                remedy="Give the family a head module of its own that follows DraftModule.",
            )
        register_attention()
        self.family = family
        self.config = config
        self.site = HeadSite(family, first_layer)
        self.spec = family.spec
        self.engine: Engine | None = None
        self.factory = family.block.build(config)
        self.depths = nn.ModuleList()
        with torch.device(device or "cpu"):
            for _ in range(depths):
                first = self.depths[0] if len(self.depths) else None
                parts = {name: getattr(first, name) for name in family.shared_parts} if first is not None else {}
                self.depths.append(DraftDepth(self.spec, self.factory, parts))
        self.rotary = self.factory.rotary()
        self._shared: SharedTensors | None = None
        self._checkpointing = False
        self.train_only(GROUPS)

    @property
    def num_depths(self) -> int:
        """Number of depths with weights of their own."""
        return len(self.depths)

    @property
    def depth_policy(self) -> DepthPolicy:
        """How depths chain: a stack of several depths is never recycled as one."""
        return self.spec.depth_policy if self.num_depths == 1 else "distinct"

    @property
    def hidden_size(self) -> int:
        """Width of the states."""
        return self.factory.config.hidden_size

    @property
    def shared(self) -> SharedTensors:
        """The target's embedding and lm_head.

        Raises:
            NotAttachedError: `attach` was not called.
        """
        if self._shared is None:
            raise NotAttachedError(
                f"Running the {self.family.name} head: its target's embedding and lm_head are not attached.",
                remedy="Pass target= to load_head, or call head.attach(load_shared(source)).",
            )
        return self._shared

    @property
    def target(self) -> Any:
        """The transformers model that embedding and lm_head are borrowed from, while it lives; else None."""
        return None if self._shared is None else self._shared.target

    def attach(self, target: Any) -> DraftHead:
        """Borrow embedding and lm_head from a transformers model or from `SharedTensors`; returns the head.

        Raises:
            SharedTensorError: the target has no embedding or lm_head, or is of another width.
        """
        shared = target if isinstance(target, SharedTensors) else SharedTensors.of(target)
        width = shared.lm_head_weight.shape[1]
        if width != self.hidden_size:
            raise SharedTensorError(
                f"Attaching a target to the {self.family.name} head: expected hidden size {self.hidden_size}, got {width}.",
                remedy="Attach the model that the head was loaded from.",
            )
        self._shared = shared
        return self

    @contextmanager
    def borrowing(self, target: Any) -> Generator[None]:
        """Attach a target for the length of a block; what was attached before comes back."""
        before = self._shared
        self.attach(target)
        try:
            yield
        finally:
            self._shared = before

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor by canonical name: the entries of `state_dict()`, with their graph."""
        stored = self.state_dict().keys()
        buffers = {name: value for name, value in self.named_buffers(remove_duplicate=False) if name in stored}
        return {**dict(self.named_parameters(remove_duplicate=False)), **buffers}

    def train_only(self, groups: Collection[Group]) -> None:
        """Let the tensors of these groups take gradients, and no others.

        By default all groups do. The router's correction bias and the indexer of sparse attention belong to none.

        Args:
            groups: of `fusion`, `attention`, `mlp`, `experts`, `router`, `norms`, `lm_head` (the head's own, never the
                target's).

        Raises:
            SettingsError: a group that does not exist, or none that this head has.
        """
        present = {name: group_of(name) for name, _ in self.named_parameters()}
        if not set(groups) & set(present.values()) or set(groups) - set(GROUPS):
            held = [group for group in GROUPS if group in present.values()]
            raise SettingsError(
                f"Choosing what the {self.family.name} head trains: expected groups of {held}, got {list(groups)}.",
                remedy="Name at least one group that the head has.",
            )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(present[name] in groups)

    def rounds(self, name: str) -> bool:
        """Whether a cast of the head may lower the precision of a tensor, by canonical name.

        It may not for what is never trained, nor for what the model's own code computes with in FP32 (routers of sigmoid
        scores): these keep the dtype they were stored in.
        """
        return group_of(name) is not None and not name.endswith(self.factory.float_names)

    def _apply(self, fn: Any, recurse: bool = True) -> DraftHead:
        before = {name: value.data for name, value in self._unrounded()}
        super()._apply(fn, recurse)
        for name, value in self._unrounded():
            if torch.promote_types(before[name].dtype, value.dtype) != value.dtype:
                value.data = before[name].to(value.device)
        return self

    def _unrounded(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in (*self.depths.named_parameters("depths"), *self.depths.named_buffers("depths")):
            if not self.rounds(name):
                yield name, value

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that take gradients; never the target's."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def gradient_checkpointing_enable(self, enable: bool = True) -> None:
        """Recompute each depth in the backward pass, or stop doing so; memory then grows by one state a depth."""
        self._checkpointing = enable

    def run_depth(
        self, depth: int, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any
    ) -> DepthState:
        """One application of depth `depth` (1-based; wraps around the stored depths).

        Args:
            depth: which depth.
            embeddings, hidden: [batch, seq, hidden]; cast to the head's dtype.
            position_ids: [batch, seq].
            attention: what the attention function takes: `mtp_chain`, or `cache` and `mask`.

        """
        module = self.depths[(depth - 1) % self.num_depths]
        assert isinstance(module, DraftDepth)
        like = next(module.eh_proj.parameters())
        _refuse_two_halves(like)
        arguments = (module, embeddings.to(like.dtype), hidden.to(like.dtype), position_ids)
        if self._checkpointing and torch.is_grad_enabled():
            # Only the non-reentrant kind sees the gradients of keys and values that leave through the attention's state.
            return cast("DepthState", checkpoint(self._run, *arguments, use_reentrant=False, **attention))
        return self._run(*arguments, **attention)

    def own_lm_head(self, depth: int) -> Float[Tensor, "vocab hidden"] | None:
        """The output projection of the depth's own (1-based; wraps around), with its graph; None where it uses the target's.

        Gathered where the head is sharded over ranks; its gradient is then summed over them, as that of the rest.
        """
        if self.spec.private_head != "kept":
            return None
        weight: Tensor = cast("DraftDepth", self.depths[(depth - 1) % self.num_depths]).lm_head.weight
        if not isinstance(weight, DTensor):
            return weight
        return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)

    def logits(self, depth: int, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Full logits of what a depth drafts from `DepthState.normed`; for drafting. Losses use chunks."""
        return self.shared.logits(states, self.own_lm_head(depth))

    def check_context(self, tokens: int) -> None:
        """Refuse a context, drafts included, for which the block's attention is not exact; to know before a long run.

        Raises:
            ContextLimitError: it is longer than that.
        """
        limit = self.factory.context_limit
        if limit is None or tokens <= limit:
            return
        raise ContextLimitError(
            f"Running the {self.family.name} head: expected a context of at most {limit} tokens "
            f"('{self.family.block.context_field}'), got {tokens}. Its attention here is dense, and engines attend to the "
            "tokens that an indexer picks: the same up to there, not beyond.",
            remedy=f"Cut or split documents so that, with the drafted depths, none is longer than {limit} tokens.",
        )

    def _run(
        self, module: DraftDepth, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any
    ) -> DepthState:
        if self.spec.zero_first_embedding.of(self.engine):
            embeddings = embeddings * (position_ids != 0)[..., None]
        fused = module.fuse(embeddings, hidden)
        rotated = self.rotary(fused, position_ids)
        out = self.factory.run(module.block, fused, rotated, position_ids, **attention)
        normed = module.norm(out)
        return DepthState(normed, normed if self.spec.recycle.of(self.engine) == "post_norm" else out)

    def forward(
        self,
        tokens: TokenBatch,
        hidden: Float[Tensor, "batch seq hidden"],
        *,
        depths: int,
        rollout: Rollout | None = None,
        detach_embedding: bool = True,
    ) -> list[DepthState]:
        """The states of depths 1..`depths` in every slot; the whole loop runs in one forward, as FSDP2 wants it.

        See `mtp_zoo.rollout.run_rollout` for the arguments.

        Raises:
            ContextLimitError: a document, drafted tokens included, is longer than the context for which the block's
                attention is exact.
        """
        chained = (rollout or default_rollout(self)) == "chain"
        self.check_context(tokens.last_position + (depths if chained else 1))
        return run_rollout(self, tokens, hidden, depths=depths, rollout=rollout, detach_embedding=detach_embedding)

    def draft_step(
        self,
        input_ids: Int[Tensor, "batch seq"],
        hidden: Float[Tensor, "batch seq hidden"],
        position_ids: Int[Tensor, "batch seq"],
        *,
        cache: Any,
        depth: int = 1,
        mask: Bool[Tensor, "masked 1 seq entries"] | None = None,
    ) -> DepthState:
        """Feed tokens behind those in a KV cache (a transformers `Cache`), as a server does while it drafts.

        `mask` says which entries, the new ones included, each token sees, for every row or (`masked` = 1) for all; None: all up
        to its own.

        Raises:
            ContextLimitError: without a mask, where the cache then holds more tokens than the context for which the block's
                attention is exact.
        """
        length, past = input_ids.shape[1], cache.get_seq_length()
        if mask is None:
            self.check_context(past + length)
        if mask is None and length > 1:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=input_ids.device).tril(past)[None, None]
        return self.run_depth(depth, self.shared.embed(input_ids), hidden, position_ids, cache=cache, mask=mask)


__all__ = ["DepthState", "DraftDepth", "DraftHead", "DraftModule"]


def _refuse_two_halves(parameter: Tensor) -> None:
    device, halves = parameter.device.type, {torch.bfloat16, torch.float16}
    if not torch.is_autocast_enabled(device):
        return
    wanted = torch.get_autocast_dtype(device)
    if {parameter.dtype, wanted} == halves:
        raise PrecisionError(
            f"Running a head: its parameters are {parameter.dtype}, under autocast to {wanted}.",
            remedy="Keep the head in FP32 (head.float()), or use autocast to the head's own dtype.",
        )
