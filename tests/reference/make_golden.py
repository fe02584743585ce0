#!/usr/bin/env python3
"""Golden losses, gradients and updates of two small models, from PyTorch's autograd: an implementation that shares no line
with ours. Run once; its output is committed and tests/integration/reference_test.cpp compares with it.

    pip install torch numpy && python3 tests/reference/make_golden.py tests/golden

All values are float64 results, so they are the truth that an fp32 run approximates. Parameters, tokens and targets are the
deterministic functions of executor/init.h and of tokens() below, so no tensor needs to be stored."""
import json
import math
import sys

import numpy
import torch

MASK = (1 << 64) - 1
SEED, BATCH, SEQ, VOCAB, STEPS = 7, 4, 16, 101, 5
STD, BIAS_STD, NORM_STD = 0.2, 0.05, 0.05
LR, BETAS, EPS, DECAY, CLIP = 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def init_normal(name, rows, cols, std):
    h = 14695981039346656037
    for byte in name.encode():
        h = ((h ^ byte) * 1099511628211) & MASK
    h ^= (SEED * 0x9E3779B97F4A7C15) & MASK
    values = numpy.empty(rows * cols, numpy.float32)
    for i in range(rows * cols):
        u1 = ((splitmix64((h + 2 * i) & MASK) >> 11) + 1) / 2.0**53
        u2 = (splitmix64((h + 2 * i + 1) & MASK) >> 11) / 2.0**53
        values[i] = std * math.sqrt(-2 * math.log(u1)) * math.cos(2 * math.pi * u2)
    return values.reshape(rows, cols)


def parameter_shapes(c):
    d, q, kv, ff = c["d_model"], c["heads"] * c["d_head"], c["kv_heads"] * c["d_head"], c["d_ff"]
    gpt2 = c["family"] == "gpt2"
    shapes = {"embedding.weight": (VOCAB, d), "final_norm.weight": (1, d)}
    if gpt2:
        shapes |= {"position.weight": (SEQ, d), "final_norm.bias": (1, d)}
    else:
        shapes |= {"head.weight": (VOCAB, d)}
    for layer in range(c["layers"]):
        p = f"layers.{layer}."
        for name, shape in {"attn.q": (q, d), "attn.k": (kv, d), "attn.v": (kv, d), "attn.out": (d, q),
                            "mlp.up": (ff, d), "mlp.down": (d, ff)}.items():
            shapes[p + name + ".weight"] = shape
            if gpt2:
                shapes[p + name + ".bias"] = (shape[0], 1) if name not in ("attn.out", "mlp.down") else (1, shape[0])
        if not gpt2:
            shapes[p + "mlp.gate.weight"] = (ff, d)
        for norm in ("norm1", "norm2"):
            shapes[p + norm + ".weight"] = (1, d)
            if gpt2:
                shapes[p + norm + ".bias"] = (1, d)
    return shapes


def parameters(c):
    result = {}
    for name, (rows, cols) in parameter_shapes(c).items():
        norm = "norm" in name and name.endswith(".weight")
        std = BIAS_STD if name.endswith(".bias") else NORM_STD if norm else STD
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * c["layers"])
        values = init_normal(name, rows, cols, std)
        if norm:
            values = values + numpy.float32(1)
        result[name] = torch.tensor(values.astype(numpy.float64), requires_grad=True)
    return result


def tokens():
    flat = [[splitmix64(1000 * b + t) % VOCAB for t in range(SEQ + 1)] for b in range(BATCH)]
    all_tokens = torch.tensor(flat)
    return all_tokens[:, :-1], all_tokens[:, 1:]


def rotate(x, theta):
    """Rotary positions on [B, H, T, D] in the half-split layout: pairs (i, i + D/2)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def loss_of(c, p, x, y):
    gpt2 = c["family"] == "gpt2"
    functional = torch.nn.functional

    def norm(h, name):
        w = p[name + ".weight"].flatten()
        if gpt2:
            return functional.layer_norm(h, (c["d_model"],), w, p[name + ".bias"].flatten(), 1e-5)
        return h * (h.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w

    def linear(h, name):
        bias = p[name + ".bias"].flatten() if gpt2 else None
        return functional.linear(h, p[name + ".weight"], bias)

    h = p["embedding.weight"][x]
    if gpt2:
        h = h + p["position.weight"][:SEQ]
    for layer in range(c["layers"]):
        n = f"layers.{layer}."
        normed = norm(h, n + "norm1")

        def heads(name, count):
            return linear(normed, n + name).view(BATCH, SEQ, count, c["d_head"]).transpose(1, 2)

        q, k, v = heads("attn.q", c["heads"]), heads("attn.k", c["kv_heads"]), heads("attn.v", c["kv_heads"])
        if not gpt2:
            q, k = rotate(q, 10000.0), rotate(k, 10000.0)
        group = c["heads"] // c["kv_heads"]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(c["d_head"])
        causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        h = h + linear(mixed.transpose(1, 2).reshape(BATCH, SEQ, -1), n + "attn.out")
        normed = norm(h, n + "norm2")
        if gpt2:
            inner = functional.gelu(linear(normed, n + "mlp.up"), approximate="tanh")
        else:
            inner = functional.silu(linear(normed, n + "mlp.gate")) * linear(normed, n + "mlp.up")
        h = h + linear(inner, n + "mlp.down")
    table = p["embedding.weight"] if gpt2 else p["head.weight"]
    logits = functional.linear(norm(h, "final_norm"), table)
    return functional.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


def golden(c):
    p = parameters(c)
    x, y = tokens()
    decayed = [v for n, v in p.items() if n.endswith(".weight") and "norm" not in n]
    rest = [v for n, v in p.items() if not (n.endswith(".weight") and "norm" not in n)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}],
                                  lr=LR, betas=BETAS, eps=EPS)
    result = {"config": c, "losses": [], "grad_norms": [], "gradients": {}, "weights": {}}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(c, p, x, y)
        loss.backward()
        result["losses"].append(loss.item())
        if step == 0:
            for name, v in p.items():
                flat = v.grad.flatten()
                result["gradients"][name] = {"norm": flat.norm().item(), "first": flat[:8].tolist(), "last": flat[-8:].tolist()}
        # The norm is summed here, not by the library, so that its small constant stays out.
        norm = math.sqrt(sum(v.grad.pow(2).sum().item() for v in p.values()))
        result["grad_norms"].append(norm)
        for v in p.values():
            v.grad.mul_(min(1.0, CLIP / norm))
        optimizer.step()
    for name, v in p.items():
        flat = v.detach().flatten()
        result["weights"][name] = {"norm": flat.norm().item(), "first": flat[:8].tolist(), "last": flat[-8:].tolist()}
    return result


def main():
    common = {"layers": 2, "d_model": 48, "heads": 4, "d_head": 12}
    for c in ({"family": "gpt2", "kv_heads": 4, "d_ff": 192} | common, {"family": "llama", "kv_heads": 2, "d_ff": 128} | common):
        document = {"made_by": f"tests/reference/make_golden.py, torch {torch.__version__}, float64"} | golden(c)
        with open(f"{sys.argv[1]}/{c['family']}_reference.json", "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")


main()
