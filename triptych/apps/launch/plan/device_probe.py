"""`python -m triptych.apps.launch.plan.device_probe`: the GPUs torch sees and their free memory, as JSON.

In a process of its own, since a process that opens a GPU occupies some of its memory until it ends.
"""

from __future__ import annotations

import json
import sys


def probe() -> list[dict[str, object]]:
    """Name and free bytes of each visible device, in torch's order, which CUDA_VISIBLE_DEVICES decides."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        {"name": f"cuda:{index}", "free": torch.cuda.mem_get_info(index)[0]}
        for index in range(torch.cuda.device_count())
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
