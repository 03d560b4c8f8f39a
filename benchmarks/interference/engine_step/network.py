"""A network with a model's shapes and random weights, and one engine step of it. Needs PyTorch and nothing else.

A step computes `decode` sequences, one token each with `context` tokens in the cache, and one prefill chunk of
`prefill` tokens after `cached` ones; either may be 0. As in an engine, both share the matrix products and have separate
attention. All contexts of a batch are equally long. Scheduling, sampling (except taking the most likely token) and
paging of the cache are left out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Tensor = Any  # of torch, which is not installed where types are checked

_PIECES = 264  # of work that fill a GPU: two for each multiprocessor of an H100
_QUERIES = 128  # of one piece
_LEAST_TOKENS = 256  # of a part of a cache


class Attention(StrEnum):
    """Whose kernels, on a GPU."""

    CUDNN = "cudnn"  # on Hopper the faster one for long prefills
    FLASH = "flash"  # FlashAttention 2, as it comes with PyTorch


@dataclass(frozen=True)
class NetworkShape:
    """The defaults are Llama-3.1-8B's."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14336
    vocabulary: int = 128256

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True)
class StepPoint:
    decode: int  # sequences
    context: int  # tokens in each one's cache, with the one being computed
    prefill: int  # tokens of the chunk
    cached: int  # before it

    @property
    def kv_tokens(self) -> int:
        return self.decode * self.context + (self.prefill + self.cached if self.prefill else 0)


@dataclass
class _Layer:
    before_attention: Tensor
    qkv: Tensor
    out: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor
    kv: Tensor  # flat, for K and V; a step takes the views it needs


class Network:
    def __init__(
        self,
        shape: NetworkShape,
        *,
        kv_tokens: int,
        device: str,
        dtype: str,
        attention: Attention = Attention.CUDNN,
        compiled: bool = False,
        seed: int = 0,
    ) -> None:
        """`kv_tokens`: of KV that all sequences of a step may have together. `compiled`: what lies between the matrix
        products and the attention is fused by torch.compile, as vLLM does."""
        self.torch = importlib.import_module("torch")
        self.shape, self.device, self._attention = shape, device, attention
        self._elementwise = _Elementwise.of(self.torch, compiled=compiled)
        self._generator = self.torch.Generator(device=device).manual_seed(seed)
        self._kind = {"device": device, "dtype": getattr(self.torch, dtype)}
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._embedding = self._random(shape.vocabulary, shape.hidden)
        self._head = self._random(shape.vocabulary, shape.hidden)
        self._last_norm = self.torch.ones(shape.hidden, **self._kind)
        self._layers = [
            _Layer(
                self.torch.ones(shape.hidden, **self._kind),
                self._random(queries + 2 * keys, shape.hidden),
                self._random(shape.hidden, queries),
                self.torch.ones(shape.hidden, **self._kind),
                self._random(2 * shape.mlp, shape.hidden),
                self._random(shape.hidden, shape.mlp),
                self._random(2, kv_tokens * keys),
            )
            for _ in range(shape.layers)
        ]

    def _random(self, *size: int) -> Tensor:
        return self.torch.empty(*size, **self._kind).normal_(0, 0.02, generator=self._generator)

    def inputs(self, point: StepPoint) -> Tensor:
        size = (point.decode + point.prefill,)
        return self.torch.randint(0, self.shape.vocabulary, size, generator=self._generator, device=self.device)

    def rotations(self, point: StepPoint) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, (tokens, 1, head_dim)."""
        torch, half = self.torch, self.shape.head_dim // 2
        chunk = torch.arange(point.cached, point.cached + point.prefill, device=self.device)
        last = torch.full((point.decode,), point.context - 1, device=self.device)
        speeds = 500_000.0 ** (-torch.arange(half, device=self.device) / half)
        angles = (torch.cat([last, chunk])[:, None] * speeds).repeat(1, 2)[:, None, :]
        return angles.cos().to(self._kind["dtype"]), angles.sin().to(self._kind["dtype"])

    def step(self, point: StepPoint, tokens: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """The most likely next token of each decoding sequence, then of the chunk."""
        linear, add_norm, gate = self.torch.nn.functional.linear, self._elementwise.add_norm, self._elementwise.gate
        stream = self._embedding[tokens]
        change = self.torch.zeros_like(stream)
        for layer in self._layers:
            stream, normed = add_norm(stream, change, layer.before_attention)
            change = linear(self._attend(point, layer, linear(normed, layer.qkv), rotations), layer.out)
            stream, normed = add_norm(stream, change, layer.before_mlp)
            change = linear(gate(linear(normed, layer.gate_up)), layer.down)
        _, normed = add_norm(stream, change, self._last_norm)
        answered = normed[: point.decode]
        if point.prefill:
            answered = self.torch.cat([answered, normed[-1:]])
        return linear(answered, self._head).argmax(dim=-1)

    def _attend(self, point: StepPoint, layer: _Layer, qkv: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        shape, size = self.shape, self.shape.head_dim
        q, k, v = qkv.view(len(qkv), -1, size).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        q, k = self._elementwise.rotate(q, *rotations), self._elementwise.rotate(k, *rotations)
        parts = []
        if point.decode:
            parts.append(self._decode(point, layer, q[: point.decode], k[: point.decode], v[: point.decode]))
        if point.prefill:
            parts.append(self._prefill(point, layer, q[point.decode :], k[point.decode :], v[point.decode :]))
        return self.torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, point: StepPoint, layer: _Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = self.shape
        keys, values = self._views(layer, 0, (point.decode, shape.kv_heads, point.context, shape.head_dim))
        keys[:, :, -1], values[:, :, -1] = k, v
        queries = q.view(point.decode * shape.kv_heads, -1, shape.head_dim)
        out, _ = self._to_all(queries, keys.flatten(0, 1), values.flatten(0, 1))
        return out.reshape(point.decode, -1)

    def _prefill(self, point: StepPoint, layer: _Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """To the cached tokens and causally to the chunk's own; each weighs as its sum of exponentials."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        start = point.decode * point.context * shape.kv_heads * shape.head_dim
        own_keys, own_values = self._views(layer, start, (shape.kv_heads, point.prefill, shape.head_dim))
        own_keys.copy_(k.transpose(0, 1))
        own_values.copy_(v.transpose(0, 1))
        queries = q.view(point.prefill, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
        wide = (shape.kv_heads, group, point.prefill, shape.head_dim)
        out, sums = self._kernel(queries, own_keys[:, None].expand(wide), own_values[:, None].expand(wide), True)
        if point.cached:
            size = (shape.kv_heads, point.cached, shape.head_dim)
            keys, values = self._views(layer, start + own_keys.numel(), size)
            before, its_sums = self._to_all(queries.flatten(1, 2), keys, values)
            share = self.torch.sigmoid(its_sums.view(sums.shape) - sums)[..., None]
            out = self._elementwise.mix(out, before.view(out.shape), share)
        return out.permute(2, 0, 1, 3).reshape(point.prefill, -1)

    def _views(self, layer: _Layer, start: int, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        flat = layer.kv[:, start : start + math.prod(size)]
        return flat[0].view(size), flat[1].view(size)

    def _to_all(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Each of (KV heads, queries, head_dim) to all of (KV heads, tokens, head_dim), with the logarithms of sums.

        The query heads of one KV head are queries of it, so each K and V is read once. Where that is too little work
        at once to fill the GPU, the tokens are cut into parts whose answers are weighed by their sums (flash decoding).
        """
        heads, queries, size = q.shape
        parts = self._parts(heads * -(-queries // _QUERIES), k.shape[1])
        if parts == 1:
            out, sums = self._kernel(q[:, None], k[:, None], v[:, None], False)
            return out[:, 0], sums[:, 0]
        many = q[:, None].expand(heads, parts, queries, size).reshape(heads * parts, 1, queries, size)
        cut = (heads * parts, 1, k.shape[1] // parts, size)
        out, sums = self._kernel(many, k.view(cut), v.view(cut), False)
        out, sums = out.view(heads, parts, queries, size), sums.view(heads, parts, queries)
        return self._elementwise.weigh(out, sums), sums.logsumexp(dim=1)

    @staticmethod
    def _parts(pieces: int, tokens: int) -> int:
        """A power of two that divides the tokens."""
        parts = 1
        while pieces * parts < _PIECES and tokens % (2 * parts) == 0 and tokens // (2 * parts) >= _LEAST_TOKENS:
            parts *= 2
        return parts

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The attention, (batch, heads, queries, head_dim), and the logarithm of each query's sum of exponentials."""
        aten = self.torch.ops.aten
        if not self.device.startswith("cuda"):
            out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        elif self._attention is Attention.CUDNN:
            out, sums, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
        else:
            out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
        return out, sums.reshape(q.shape[:-1])


@dataclass(frozen=True)
class _Elementwise:
    """What lies between the matrix products and the attention."""

    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # stream, its change, weight: both, normed
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    gate: Callable[[Tensor], Tensor]
    mix: Callable[[Tensor, Tensor, Tensor], Tensor]  # the second one's share
    weigh: Callable[[Tensor, Tensor], Tensor]  # (heads, parts, queries, head_dim), the logarithms of the parts' sums

    @classmethod
    def of(cls, torch: Any, *, compiled: bool) -> _Elementwise:
        def add_norm(stream: Tensor, change: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            stream = stream + change
            return stream, torch.nn.functional.rms_norm(stream, (stream.shape[-1],), weight, 1e-5)

        def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
            low, high = x.chunk(2, dim=-1)
            return x * cosines + torch.cat([-high, low], dim=-1) * sines

        def gate(both: Tensor) -> Tensor:
            gates, up = both.chunk(2, dim=-1)
            return torch.nn.functional.silu(gates) * up

        def mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
            return (one.float() * (1 - share) + other.float() * share).to(one.dtype)

        def weigh(parts: Tensor, sums: Tensor) -> Tensor:
            return (parts * sums.softmax(dim=1)[..., None]).sum(dim=1).to(parts.dtype)

        every: tuple[Any, ...] = (add_norm, rotate, gate, mix, weigh)
        return cls(*(torch.compile(each, dynamic=True) if compiled else each for each in every))
