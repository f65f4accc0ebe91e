"""Numbers of rows and gradients on their way between ranks: float32, or bfloat16, half the bytes.

What a rank hands to itself is rounded too: what a model sees does not depend on who owns a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

WIRES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types in which rows may travel, by the name of the setting."""
