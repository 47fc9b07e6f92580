"""The demo: a head is left behind by a fine-tune, trained and exported again, with its accept length at every step."""
