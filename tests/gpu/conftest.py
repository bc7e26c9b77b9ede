"""These tests need a CUDA device; elsewhere they are not even collected."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
