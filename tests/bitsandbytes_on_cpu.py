"""Let bitsandbytes train on processors with avx512_bf16, for tests only; a rank's program imports this first.

Its 4-bit layers repack their weights for such a processor at the first forward pass outside of training, as in the
check of data isolation. The backward pass does not know the packed format, and gradients are wrong from then on.
bitsandbytes has no setting for this; GPUs never repack.
"""

import bitsandbytes.nn.modules


def _never() -> bool:
    return False


bitsandbytes.nn.modules.has_avx512bf16 = _never
