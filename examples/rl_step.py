"""A policy-gradient loop in which the head follows the policy: policy loss + lambda * MTP loss.

The rollout's tokens come from model.generate. All three ways from the MTP loss into the policy are cut, so the policy gets
the gradient of its own loss and no other: the example compares the two.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_checkpoint import NUMBERS, WORDS, make, make_tokenizer, out_folder, show
from torch import Tensor
from transformers import AutoModelForCausalLM

import mtp_zoo as mz

STEPS, ROLLOUTS, LAMBDA, NEW = 60, 32, 0.1, 10


def reward(answers: Tensor) -> Tensor:
    """How many words of an answer are the number seven: something that a policy learns in a few steps."""
    return (answers == WORDS.index("seven")).float().mean(dim=1)


def policy_loss(logits: Tensor, ids: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    """REINFORCE with a baseline, over the tokens that the policy wrote."""
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(advantage[:, None] * chosen * mask[:, 1:]).sum() / mask[:, 1:].sum()


def trunk_gradient(model: Any, loss: Tensor) -> list[Tensor]:
    """Gradient of a loss on everything but the head."""
    trunk = [p for name, p in model.named_parameters() if not name.startswith("mtp_head.")]
    return list(torch.autograd.grad(loss, trunk, retain_graph=True, allow_unused=True, materialize_grads=True))


def main() -> None:
    """Train, compare the policy's gradient with and without the head, and save trunk and head."""
    out, tokenizer = out_folder(), make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(make(out)).train()
    mz.attach(model, mtp_lambda=LAMBDA, detach={"embedding", "backbone", "lm_head"}, agreement=True)
    print(model.mtp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history: list[dict[str, float]] = []
    for step in range(STEPS):
        asked = [f"count up from {NUMBERS[n % len(NUMBERS)]} :" for n in range(step, step + ROLLOUTS)]
        prompts = torch.tensor([tokenizer(text)["input_ids"] for text in asked])
        ids = model.generate(prompts, do_sample=True, max_new_tokens=NEW, min_new_tokens=NEW)
        mask = torch.arange(ids.shape[1]).expand_as(ids) >= prompts.shape[1]
        rewards = reward(ids[:, prompts.shape[1] :])
        result = model(input_ids=ids, mtp_mask=mask)
        own = policy_loss(result.logits, ids, mask, rewards - rewards.mean())
        loss = own + LAMBDA * result.mtp_loss
        if step == STEPS - 1:
            pairs = zip(trunk_gradient(model, own), trunk_gradient(model, loss), strict=True)
            same = all(torch.equal(alone, both) for alone, both in pairs)
            print(f"the policy's gradient with and without the MTP loss: {'equal' if same else 'DIFFERENT'}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measured = {"reward": rewards.mean().item(), "mtp_loss": result.mtp_loss.item()}
        history.append({**measured, "accept length": float(result.metrics["mtp/accept_length"])})
    model.save_pretrained(out / "trained")
    make_tokenizer().save_pretrained(out / "trained")
    show(history[0], history[-1], out / "trained")


if __name__ == "__main__":
    main()
