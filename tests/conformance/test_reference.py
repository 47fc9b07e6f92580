"""Plain torch against numbers written out by hand, and YaRN against transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from mtp_zoo_conformance.cases.deepseek_v3 import YARN
from mtp_zoo_conformance.reference.nextn import Layer, experts
from mtp_zoo_conformance.reference.rotary import Rotary, rotary_of

QUARTER = math.pi / 2


@pytest.mark.parametrize(
    ("neighbours", "turned"),
    [(True, [-2.0, 1.0, 3.0, 4.0, 5.0]), (False, [-3.0, 2.0, 1.0, 4.0, 5.0])],
    ids=["neighbours", "halves"],
)
def test_the_first_pair_turns_by_a_quarter_and_the_second_stays(neighbours: bool, turned: list[float]) -> None:
    rotate = Rotary(torch.tensor([QUARTER, 0.0], dtype=torch.float64), neighbours)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).expand(2, 1, 5)
    out = rotate(x, torch.tensor([0, 1]))
    assert torch.allclose(out[0, 0], x[0, 0])
    assert torch.allclose(out[1, 0], torch.tensor(turned), atol=1e-6)


def test_frequencies_fall_from_one_by_the_base() -> None:
    rotate = rotary_of({"rope_theta": 10000, "rope_scaling": None}, 4, neighbours=True)
    assert rotate.frequencies.tolist() == pytest.approx([1.0, 0.01])
    assert (rotate.gain, rotate.score_gain) == (1.0, 1.0)
    assert rotary_of({"rope_parameters": {"rope_theta": 100}}, 4, neighbours=True).frequencies[1] == pytest.approx(0.1)


@pytest.mark.parametrize(("mscale", "all_dims"), [(1.0, 1.0), (0.707, 1.0)])
def test_yarn_is_that_of_transformers(mscale: float, all_dims: float) -> None:
    yarn = {**YARN, "mscale": mscale, "mscale_all_dim": all_dims}
    rotate = rotary_of({"rope_theta": 10000, "rope_scaling": yarn}, 64, neighbours=True)
    parameters = {**yarn, "rope_type": "yarn", "rope_theta": 10000.0}
    config = DeepseekV3Config(rope_parameters=parameters, max_position_embeddings=8192, qk_rope_head_dim=64)
    frequencies, gain = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert torch.allclose(rotate.frequencies.float(), frequencies, rtol=1e-6)
    assert rotate.gain == pytest.approx(gain)
    assert rotate.score_gain == pytest.approx((0.1 * all_dims * math.log(8) + 1) ** 2)


def layer(bias: list[float], **config: object) -> Layer:
    """Four experts in two groups. Expert e multiplies by e + 1 where its gate is large; the router reads the input as is."""
    big = torch.tensor([[20.0]])  # silu(20) is 20 to seven digits
    tensors = {"mlp.gate.weight": torch.eye(4), "mlp.gate.e_score_correction_bias": torch.tensor(bias)}
    for number in range(4):
        tensors |= expert(f"mlp.experts.{number}", big, float(number + 1))
    tensors |= expert("mlp.shared_experts", big, 100.0)
    common = {"num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 10.0, "n_group": 1}
    return Layer(tensors, {**common, "topk_group": 1, **config})


def expert(name: str, big: torch.Tensor, value: float) -> dict[str, torch.Tensor]:
    """Reads the last entry, which is one, and writes `value` to the first."""
    last, first = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    return {
        f"{name}.gate_proj.weight": big * last,
        f"{name}.up_proj.weight": last / 20,
        f"{name}.down_proj.weight": value * first,
    }


def logit(score: float) -> float:
    """What the sigmoid turns into a score."""
    return math.log(score / (1 - score))


SCORES = [0.8, 0.2, 0.6, torch.tensor(1.0).sigmoid().item()]
"""Of the four experts; the last is that of the entry that experts read."""


@pytest.mark.parametrize(
    ("bias", "config", "chosen"),
    [
        ([0, 0, 0, 0], {}, {0: 0.8, 3: SCORES[3]}),
        ([0, 1, 0, 0], {}, {0: 0.8, 1: 0.2}),  # chosen by the bias, weighed without it
        ([0, 0, 0, 0], {"n_group": 2}, {2: 0.6, 3: SCORES[3]}),  # .8 + .2 against .6 + .73
    ],
    ids=["scores", "bias", "groups"],
)
def test_experts_are_chosen_by_biased_scores_and_weighed_by_scores(
    bias: list[float], config: dict[str, int], chosen: dict[int, float]
) -> None:
    x = torch.tensor([[logit(0.8), logit(0.2), logit(0.6), 1.0]])
    routed = sum(share * (number + 1) for number, share in chosen.items()) / sum(chosen.values())
    assert experts(layer(bias, **config), x)[0].tolist() == pytest.approx([100 + 10 * routed, 0, 0, 0], rel=1e-5)


def test_shares_are_the_scores_themselves_where_nothing_norms_them() -> None:
    x = torch.tensor([[logit(0.8), logit(0.2), logit(0.6), 1.0]])
    out = experts(layer([0, 0, 0, 0], norm_topk_prob=False), x)[0, 0]
    assert float(out) == pytest.approx(100 + 10 * (0.8 * 1 + SCORES[3] * 4), rel=1e-5)
