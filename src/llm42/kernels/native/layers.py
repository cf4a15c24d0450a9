"""All decoder layers in one call of the native library: `Kernels.run_layers` without the calls between operations.

Invariant: the structures here are laid out as those of the same names in `src/layers.cpp`; everything they point to is
kept alive by the object that holds them.
"""

from __future__ import annotations

import ctypes

import torch

from llm42.kernels.interface import DecoderStack, PreparedLinear
from llm42.kernels.kv import KVPool

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = (("packed", _POINTER), ("bias", _POINTER), ("out_features", _SIZE), ("in_features", _SIZE))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _POINTER),
        ("qkv", _Linear),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("o", _Linear),
        ("post_attention_norm", _POINTER),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("rope", _POINTER),
        ("window", _SIZE),
        ("kv", _POINTER),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", _POINTER),
        *((name, _SIZE) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "block_size")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class PassRows(ctypes.Structure):
    """The rows of a pass: what `RowBatch` says, as pointers."""

    _fields_ = (
        ("rows", _SIZE),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("segments", _POINTER),
        ("num_segments", _SIZE),
        ("blocks", _POINTER),
    )


class NativeStack:
    """A decoder's layers over one KV pool, ready to be called.

    Args:
        library: The native library.
        dtype: The library's number of the model's dtype.
        stack: The layers; their linears are packed by the native backend.
        kv: The KV memory.
        block_size: Positions of one KV block.
    """

    def __init__(self, library: ctypes.CDLL, dtype: int, stack: DecoderStack, kv: KVPool, block_size: int) -> None:
        self._call = library.llm42_layers
        self._call.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER]
        self._call.restype = None
        # The structures hold addresses only, so what they point to is kept here.
        self._of = (stack, kv, block_size)
        layers = [_layer(stack, kv, index) for index in range(len(stack.layers))]
        self._layers = (_Layer * len(layers))(*layers)
        self._stack = _Stack(
            self._layers,
            stack.final_norm.data_ptr(),
            len(layers),
            stack.final_norm.shape[0],
            stack.num_heads,
            stack.num_kv_heads,
            stack.head_dim,
            block_size,
            stack.eps,
            stack.scale,
            dtype,
        )

    def is_of(self, stack: DecoderStack, kv: KVPool, block_size: int) -> bool:
        """Whether this is the given decoder over the given memory."""
        return self._of[0] is stack and self._of[1] is kv and self._of[2] == block_size

    def __call__(self, rows: PassRows, x: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[rows, hidden]`` after the final norm, from embeddings of the same shape."""
        out = torch.empty_like(x)
        self._call(ctypes.addressof(self._stack), ctypes.addressof(rows), x.data_ptr(), out.data_ptr())
        return out


def _layer(stack: DecoderStack, kv: KVPool, index: int) -> _Layer:
    layer = stack.layers[index]
    return _Layer(
        layer.input_norm.data_ptr(),
        _linear(layer.qkv),
        _address(layer.q_norm),
        _address(layer.k_norm),
        _linear(layer.o),
        layer.post_attention_norm.data_ptr(),
        _linear(layer.gate_up),
        _linear(layer.down),
        stack.rope.data_ptr() if layer.has_rope else None,
        layer.window or 0,
        kv.layer(index).data_ptr(),
    )


def _linear(linear: PreparedLinear) -> _Linear:
    return _Linear(linear.weight.data_ptr(), _address(linear.bias), linear.out_features, linear.in_features)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
