"""The dense half compiled by `torch.compile`, with the same bits for every plan.

Compiled code depends on the shapes it first meets, and torch keeps it by function for the whole
process. So each trainer has code of its own, made from its own batches in their order, which no
plan changes. Nothing is chosen by timing: two runs would get other kernels, and other bits.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.errors import ConfigError, ModelError
from nestpipe.models.protocol import Loss

MOST_FORMS = 16
"""Times that one function is compiled: sizes of 0 and 1 are forms of their own, and so are
training and evaluation."""


class CompiledDense:
    """The method `dense` of a model; call it as that. The model itself stays as it is.

    The parameters, their names and `state_dict` are the model's own.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Refuses a machine that has no compiler for the device."""
        _refuse_without_compiler(device)
        self._name = type(model).__name__
        graphs = ", instead of CUDA graphs" if device.type == "cuda" else ""
        self.reason = f"dense half: compiled by torch.compile{graphs}, while the first batches wait"
        """What a run says of it."""
        # Sizes are symbols from the first batch on: jagged features differ from batch to batch.
        compile_: Any = torch.compile  # its declared forms leave out the last two parameters
        self._dense = compile_(
            getattr(model, "dense"),  # noqa: B009 - a method that `nn.Module` does not declare
            dynamic=True,
            # torch hashes headers by openssl, and fails where there is none.
            options={
                "deterministic": True,
                "cpp_cache_precompile_headers": shutil.which("openssl") is not None,
            },
            recompile_limit=MOST_FORMS,
            isolate_recompiles=True,
        )

    def __call__(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        # Not imported before they are needed: torch's compiler is large.
        from torch._dynamo import config, exc
        from torch.fx.experimental import _config

        shapes: Any = _config
        # Equal sizes of a first batch must not become one symbol: the next batch would need other
        # code, and which code a batch gets would depend on the batches before.
        with (
            shapes.patch(use_duck_shape=False),
            config.patch(fail_on_recompile_limit_hit=True),
        ):
            try:
                return self._dense(rows, batch)
            except exc.FailOnRecompileLimitHit as error:
                raise ModelError(
                    f"`dense` of {self._name} was compiled {MOST_FORMS} times and needs yet "
                    "another form; set model.compile = false, or let it branch on fewer sizes"
                ) from error
            except exc.TorchDynamoException as error:
                text = " ".join(str(error).split())[:200]
                raise ModelError(
                    f"`dense` of {self._name} cannot be compiled ({type(error).__name__}: {text}); "
                    "set model.compile = false"
                ) from error


def _refuse_without_compiler(device: torch.device) -> None:
    """Say what is missing before training begins, rather than in its first batch."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise ConfigError(
            f"model.compile is true, and torch {torch.__version__} cannot keep the code of two "
            "trainers apart; use torch 2.13 or newer, or set model.compile = false"
        )
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "model.compile is true but there is no Triton for this GPU; install triton, or set "
                "model.compile = false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "model.compile is true but there is no C++ compiler; install g++, name one in CXX, or "
            "set model.compile = false"
        ) from None
