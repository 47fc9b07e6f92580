"""What is wrong with a checkpoint, as findings with stable ids, and the mending of what can be mended without a choice."""
