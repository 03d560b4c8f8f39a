"""A network with a model's shapes and random weights, and one engine step of it. Needs PyTorch and nothing else.

A step computes `decode` sequences, one token each with `context` tokens in the cache, and one prefill chunk of
`prefill` tokens after `cached` ones; either may be 0. As in an engine, both share the matrix products and have separate
attention. All contexts of a batch are equally long. Scheduling, sampling (except taking the most likely token) and
paging of the cache are left out.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

Tensor = Any  # of torch, which is not installed where types are checked


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
    def __init__(self, shape: NetworkShape, *, kv_tokens: int, device: str, dtype: str, seed: int = 0) -> None:
        """`kv_tokens`: of KV that all sequences of a step may have together."""
        self.torch = importlib.import_module("torch")
        self.shape, self.device = shape, device
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
        torch, linear, shape = self.torch, self.torch.nn.functional.linear, self.shape
        stream = self._embedding[tokens]
        for layer in self._layers:
            qkv = linear(self._norm(stream, layer.before_attention), layer.qkv)
            stream = stream + linear(self._attend(point, layer, qkv, rotations), layer.out)
            gate, up = linear(self._norm(stream, layer.before_mlp), layer.gate_up).split(shape.mlp, dim=-1)
            stream = stream + linear(torch.nn.functional.silu(gate) * up, layer.down)
        answered = stream[: point.decode]
        if point.prefill:
            answered = torch.cat([answered, stream[-1:]])
        return linear(self._norm(answered, self._last_norm), self._head).argmax(dim=-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.torch.nn.functional.rms_norm(x, (self.shape.hidden,), weight, 1e-5)

    def _attend(self, point: StepPoint, layer: _Layer, qkv: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        shape, size = self.shape, self.shape.head_dim
        q, k, v = qkv.view(len(qkv), -1, size).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        q, k = self._rotate(q, rotations), self._rotate(k, rotations)
        parts = []
        if point.decode:
            parts.append(self._decode(point, layer, q[: point.decode], k[: point.decode], v[: point.decode]))
        if point.prefill:
            parts.append(self._prefill(point, layer, q[point.decode :], k[point.decode :], v[point.decode :]))
        return self.torch.cat(parts) if len(parts) > 1 else parts[0]

    def _rotate(self, x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        cosines, sines = rotations
        return x * cosines + self.torch.cat([-high, low], dim=-1) * sines

    def _decode(self, point: StepPoint, layer: _Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The query heads of one KV head are given as several queries, so that each K and V is read once."""
        shape = self.shape
        size = (point.decode, shape.kv_heads, point.context, shape.head_dim)
        keys, values = self._views(layer, 0, size)
        keys[:, :, -1], values[:, :, -1] = k, v
        grouped = q.view(point.decode, shape.kv_heads, -1, shape.head_dim)
        return self._attention(grouped, keys, values).reshape(point.decode, -1)

    def _prefill(self, point: StepPoint, layer: _Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """KV heads are the batch dimension, so that their query heads share K and V without a copy."""
        shape, total = self.shape, point.cached + point.prefill
        used = point.decode * point.context * shape.kv_heads * shape.head_dim
        keys, values = self._views(layer, used, (shape.kv_heads, 1, total, shape.head_dim))
        keys[:, 0, point.cached :], values[:, 0, point.cached :] = k.transpose(0, 1), v.transpose(0, 1)
        group = shape.heads // shape.kv_heads
        queries = q.view(point.prefill, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
        wide = (shape.kv_heads, group, total, shape.head_dim)
        out = self._attention(queries, keys.expand(wide), values.expand(wide), chunk=point.prefill, total=total)
        return out.permute(2, 0, 1, 3).reshape(point.prefill, -1)

    def _views(self, layer: _Layer, start: int, size: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        count = size[0] * size[1] * size[2] * size[3]
        flat = layer.kv[:, start : start + count]
        return flat[0].view(size), flat[1].view(size)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 0, total: int = 0) -> Tensor:
        """Without `chunk`, all queries attend to all keys; with it causally, to `total` keys that end in the chunk."""
        attend = self.torch.nn.functional.scaled_dot_product_attention
        if not chunk:
            return attend(q, k, v)
        if chunk == total:
            return attend(q, k, v, is_causal=True)
        # is_causal aligns the mask to the upper left, which is right only where nothing is cached.
        mask = importlib.import_module("torch.nn.attention.bias").causal_lower_right(chunk, total)
        return attend(q, k, v, attn_mask=mask)
