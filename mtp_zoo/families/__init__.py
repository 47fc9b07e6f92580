"""One import line a family: importing it registers it."""

from mtp_zoo.families import deepseek_v3 as deepseek_v3
from mtp_zoo.families import deepseek_v32 as deepseek_v32
from mtp_zoo.families import glm4_moe as glm4_moe
from mtp_zoo.families import glm4_moe_lite as glm4_moe_lite
from mtp_zoo.families import glm_moe_dsa as glm_moe_dsa
from mtp_zoo.families import qwen3_5 as qwen3_5
from mtp_zoo.families import qwen3_5_moe as qwen3_5_moe
from mtp_zoo.families import qwen3_next as qwen3_next
