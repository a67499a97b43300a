"""Pure: Which GPUs an instance type brings, for clouds that label nodes with nothing better.

A hint for people, never a label unless they ask for it: a type says what was ordered. From the
public catalogues of AWS, Azure, Google Cloud and Oracle.
"""

import re
from typing import Final

KEY: Final = "node.kubernetes.io/instance-type"

_TYPES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"p2\..+", "k80"),
        (r"p3dn\..+", "v100-32gb"),
        (r"p3\..+", "v100"),
        (r"p4d\..+", "a100"),
        (r"p4de\..+", "a100-80gb"),
        (r"p5\..+", "h100"),
        (r"p5en?\..+", "h200"),
        (r"p6-b200\..+", "b200"),
        (r"p6-b300\..+", "b300"),
        (r"g3s?\..+", "m60"),
        (r"g4dn\..+", "t4"),
        (r"g5\..+", "a10g"),
        (r"g5g\..+", "t4g"),
        (r"g6\..+|gr6\..+", "l4"),
        (r"g6e\..+", "l40s"),
        (r"standard_nc\d+as_t4_v3", "t4"),
        (r"standard_nc\d+s_v3|standard_nd40s?_v2", "v100"),
        (r"standard_nd40rs_v2", "v100-32gb"),
        (r"standard_nc\d+ads_a100_v4|standard_nd96amsr_a100_v4", "a100-80gb"),
        (r"standard_nd96asr_v4", "a100"),
        (r"standard_nc\d+adi?s_h100_v5", "h100-nvl"),
        (r"standard_nd96isr_h100_v5", "h100"),
        (r"standard_nd96isr_h200_v5", "h200"),
        (r"standard_nd96isr_mi300x_v5", "mi300x"),
        (r"a2-highgpu-.+|a2-megagpu-.+", "a100"),
        (r"a2-ultragpu-.+", "a100-80gb"),
        (r"a3-(high|edge)gpu-.+", "h100"),
        (r"a3-megagpu-.+", "h100-mega"),
        (r"a3-ultragpu-.+", "h200"),
        (r"a4-highgpu-.+", "b200"),
        (r"g2-standard-.+", "l4"),
        (r"bm\.gpu\.h100\..+", "h100"),
        (r"bm\.gpu\.h200\..+", "h200"),
        (r"bm\.gpu\.b200\..+", "b200"),
        (r"bm\.gpu4\..+", "a100"),
        (r"bm\.gpu\.a100-v2\..+", "a100-80gb"),
        (r"bm\.gpu\.l40s.*", "l40s"),
        (r"(bm|vm)\.gpu\.a10\..+", "a10"),
        (r"bm\.gpu\.mi300x\..+", "mi300x"),
        (r"gpu-(h100|h200|b200|b300|l40s)-.+", ""),
    )
)


def hint(instance_type: str) -> str | None:
    """Return the accelerator that a type brings, or None for one that nobody listed."""
    text = instance_type.lower()
    for pattern, name in _TYPES:
        found = pattern.fullmatch(text)
        if found:
            return name or found[1]
    return None
