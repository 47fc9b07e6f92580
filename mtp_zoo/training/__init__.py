"""Training a head: configuration, data, the trainer and its report. Submodules are imported by name."""
