"""Stand-in for `torchvision.transforms`."""

import enum


class InterpolationMode(enum.Enum):
    """The modes that are named in signatures."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from . import functional, v2  # noqa: E402, F401  # both import the class above
