"""The weight of the MTP loss, as configs name it."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_zoo.errors import ModelConfigError
from mtp_zoo.loss_weight import configured_lambda


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"mtp_loss_scaling_factor": None, "mtp_config": None, "text_config": {"hidden_size": 64}}, None),
        ({"mtp_loss_scaling_factor": 0.1}, 0.1),
        ({"mtp_loss_weight": 0.2}, 0.2),
        ({"mtp_loss_weight": 0}, 0.0),
        ({"mtp_config": {"loss_scaling_factor": 0.3}}, 0.3),
        ({"mtp_config": {"loss_weight": 0.3, "num_layers": 1}}, 0.3),
        ({"mtp_config": {"mtp_loss_weight": 0.3}}, 0.3),
        ({"text_config": {"mtp_loss_weight": 0.4}}, 0.4),
        ({"text_config": {"mtp_config": {"mtp_loss_scaling_factor": 0.5}}}, 0.5),
        ({"mtp_loss_weight": 1, "text_config": {"mtp_loss_scaling_factor": 1.0}}, 1.0),
    ],
)
def test_every_known_name_is_read_and_silence_is_no_number(config: dict[str, Any], expected: float | None) -> None:
    """https://github.com/unslothai/unsloth/pull/6557"""
    assert configured_lambda(config) == expected


def test_names_that_disagree_are_refused_with_all_of_them() -> None:
    config = {"mtp_loss_scaling_factor": 0.1, "text_config": {"mtp_config": {"loss_weight": 1.0}}}
    with pytest.raises(ModelConfigError, match="weight of the MTP loss") as caught:
        configured_lambda(config)
    assert caught.value.problems == ("mtp_loss_scaling_factor: 0.1", "text_config.mtp_config.loss_weight: 1.0")


@pytest.mark.parametrize("value", [True, "0.1", -0.1, float("nan"), float("inf"), [0.1]])
def test_what_can_be_no_weight_is_refused_by_name(value: object) -> None:
    with pytest.raises(ModelConfigError) as caught:
        configured_lambda({"mtp_loss_weight": value, "mtp_loss_scaling_factor": 0.1})
    assert caught.value.problems == (f"mtp_loss_weight: {value!r} is no finite number >= 0",)
