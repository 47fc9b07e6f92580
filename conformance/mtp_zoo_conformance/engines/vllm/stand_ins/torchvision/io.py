"""Stand-in for `torchvision.io`."""

import enum

from . import missing


class ImageReadMode(enum.Enum):
    """The modes that are named in signatures."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


__getattr__ = missing
