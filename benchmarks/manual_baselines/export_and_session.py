"""The usual way to run a network: torch.onnx.export, onnxsim and a session of ONNX Runtime, all with their defaults."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxsim
import torch
from numpy.typing import NDArray
from torch import nn


def export(module: nn.Module, shape: tuple[int, ...], path: Path, *, free_batch: bool = False) -> None:
    """Write a graph for images [B, C, H, W] of exactly that shape, or of any batch, in the exporter's own opset."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about optional packages
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        sizes = ({0: "batch"},) if free_batch else None
        program = torch.onnx.export(module, (torch.zeros(shape),), dynamo=True, verbose=False, dynamic_shapes=sizes)
    assert program is not None
    simplified, sound = onnxsim.simplify(program.model_proto)
    assert sound
    onnx.save(simplified, path)


def runner(path: Path, threads: int) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """A function from images to logits, in a session with default options except for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images})[0]
