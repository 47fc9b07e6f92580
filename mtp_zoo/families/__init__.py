"""One import line a family: importing it registers it."""

from mtp_zoo.families import qwen3_5 as qwen3_5
