"""The engines that judge: their pinned environments, their workers, and our side of them."""
