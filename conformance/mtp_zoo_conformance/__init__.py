"""Numerical parity of every registered head with plain torch, with transformers, and with the engines that will serve it.

`mtp-zoo conform` runs it, and so does `python -m pytest --pyargs mtp_zoo_conformance`.
"""
