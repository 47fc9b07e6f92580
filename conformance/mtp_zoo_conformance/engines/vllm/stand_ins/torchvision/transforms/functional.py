"""Stand-in for `torchvision.transforms.functional`."""

from .. import missing
from . import InterpolationMode  # noqa: F401

__getattr__ = missing
