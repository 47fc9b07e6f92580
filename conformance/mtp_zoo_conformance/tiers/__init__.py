"""The four tiers: keys (no weights are run), forward (plain torch), module (an engine's module), serve (the engine)."""
