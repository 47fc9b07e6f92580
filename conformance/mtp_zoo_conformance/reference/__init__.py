"""Heads in plain torch, one file a family, written from the published conventions; nothing here imports `mtp_zoo`."""
