"""Stand-ins that let an unmodified SGLang wheel run on a CPU, where no build of its kernel package `sgl_kernel` exists.

Nothing in site-packages is touched: import hooks put plain-torch bodies in the place of the kernels that SGLang's CPU path
calls, and everything else of `sgl_kernel` becomes a placeholder that raises when it is called. What was really called in a
job is written down (`ledger`), so that a report can say what was ours. All that is not listed there is SGLang's own.

Bodies, by purpose: `norms` (norms and gates), `delta_rule` (linear attention), `attention` (backend `intel_amx`),
`speculation` (draft chains), `sparse` (attention by an index), `patches` (functions of SGLang that are written for triton or
for another device).

Written for SGLang 0.5.23.
"""

from __future__ import annotations

from .importing import in_force, install
from .patches import keep_intel_amx

__all__ = ["in_force", "install", "keep_intel_amx"]
