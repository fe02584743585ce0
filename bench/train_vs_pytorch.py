#!/usr/bin/env python3
"""One-rank training against PyTorch on the CPU, one thread each, in turn: tokens per CPU-second and resident memory; then two data-parallel ranks against one.

    python3 bench/train_vs_pytorch.py [--bmtrain build/release/bin/bmtrain] [--repeats 3] [--out FILE.json]

Needs torch and numpy (pip install torch numpy) in the Python that runs it. Both sides do the same step: GPT-2 style model, fp32,
forward, backward, clipping by the global norm, AdamW. The peer is PyTorch's fast path: scaled_dot_product_attention, fused
AdamW, set_to_none. CPU time is user + system time of the process over the steps after two warm-up steps; start-up is left out.
The llm.c column is quoted from FACTS.md (another machine) and is no ratio."""
import argparse
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time

SIZES = [  # name, layers, d_model, heads, T, B, vocab, steps, llm.c tokens per CPU-s and MiB as FACTS.md quotes them
    ("L4 C256 V4096", 4, 256, 4, 128, 4, 4096, 8, "560; 190 MiB"),
    ("L4 C256 V50257", 4, 256, 4, 128, 4, 50257, 6, "97-150; 732 MiB"),
    ("L8 C512 V8192", 8, 512, 8, 256, 4, 8192, 5, "80; 1,428 MiB"),
    ("GPT-2 124M", 12, 768, 12, 64, 4, 50257, 5, "20; 2,462 MiB"),
]
WARMUP = 2


def pytorch_side(layers, d, heads, t, b, vocab, steps):
    """Runs in a process of its own; prints one JSON line."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x):
            q, k, v = (y.view(b, t, heads, d // heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(d, 2))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(vocab, d), nn.Embedding(t, d)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.norm = nn.LayerNorm(d)

        def forward(self, x, y):
            h = self.norm(self.blocks(self.token(x) + self.position.weight))
            logits = functional.linear(h, self.token.weight)
            return functional.cross_entropy(logits.view(-1, vocab), y.view(-1))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    x, y = torch.randint(vocab, (b, t)), torch.randint(vocab, (b, t))
    start = 0.0
    for step in range(steps):
        if step == WARMUP:
            start = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    cpu = (time.process_time() - start) / (steps - WARMUP)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu_s_per_step": cpu, "peak_rss_bytes": rss, "version": torch.__version__}))


def run_pytorch(size):
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--pytorch", json.dumps(size)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def token_file(path, vocab, count):
    state, payload = 1, bytearray()
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        payload += struct.pack("<H", (state >> 33) % vocab)
    h = 14695981039346656037
    for byte in payload:
        h = ((h ^ byte) * 1099511628211) % 2**64
    with open(path, "wb") as file:
        file.write(b"BMTTOKEN" + struct.pack("<IIQQQ", 1, 2, vocab, count, h) + bytes(24) + payload)


def start_bmtrain(program, folder, size, dp, batches):
    """One step trains `batches` micro-batches, spread over dp ranks."""
    layers, d, heads, t, b, vocab, steps = size
    model = {"schema": "bmtrain.model/1", "name": "bench", "family": "gpt2", "layers": layers, "d_model": d, "heads": heads,
             "d_ff": 4 * d, "vocab": vocab, "seq_len": t}
    model_path, data_path = os.path.join(folder, "model.json"), os.path.join(folder, f"{vocab}.bin")
    with open(model_path, "w") as file:
        json.dump(model, file)
    if not os.path.exists(data_path):
        token_file(data_path, vocab, 20000)
    plan = f"dp={dp},mb={b},gb={b * batches},loss-chunk={min(256, b * t)}" + (",zero=1" if dp > 1 else "")
    command = [program, "train", "--model", model_path, "--data", data_path, "--plan", plan, "--steps", str(steps), "--quiet", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate()
    if process.returncode != 0:
        sys.exit(f"bench: error: {' '.join(process.args)}: {err}")
    return json.loads(out)


def run_bmtrain(program, folder, size, dp=1, batches=1):
    return finish(start_bmtrain(program, folder, size, dp, batches))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bmtrain", default="build/release/bin/bmtrain")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--pytorch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pytorch:
        pytorch_side(*json.loads(arguments.pytorch))
        return
    print(f"{'size':<16}{'BMTrain':>20}{'PyTorch':>20}{'ratio':>8}{'BMTrain':>12}{'PyTorch':>12}   llm.c elsewhere (FACTS.md)")
    print(f"{'':<16}{'tokens/CPU-s':>20}{'tokens/CPU-s':>20}{'':>8}{'MiB':>12}{'MiB':>12}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, *shape, quoted in SIZES:
            ours, theirs = [], []
            for _ in range(arguments.repeats):  # in turn, so that both meet the same machine
                ours.append(run_bmtrain(arguments.bmtrain, folder, shape))
                theirs.append(run_pytorch(shape))
            tokens = shape[3] * shape[4]
            a, p = (tokens / statistics.median(r["cpu_s_per_step"] for r in side) for side in (ours, theirs))
            ma, mp = (max(r["peak_rss_bytes"] for r in side) / 2**20 for side in (ours, theirs))
            rows.append({"size": name, "bmtrain_tokens_per_cpu_s": a, "pytorch_tokens_per_cpu_s": p, "ratio": a / p,
                         "bmtrain_mib": ma, "pytorch_mib": mp, "torch": theirs[0]["version"]})
            print(f"{name:<16}{a:>20.0f}{p:>20.0f}{a / p:>8.2f}{ma:>12.0f}{mp:>12.0f}   {quoted}", flush=True)
        print("\ntwo data-parallel ranks (zero=1) against one, the same global batch, wall time per step; the limit is what two separate "
              "one-rank\nprocesses with half the batch each reach at the same time, which shares nothing but the machine:")
        for name, *shape, _ in SIZES[:3]:
            shape[-1] = 8
            one, two, apart = [], [], []
            for _ in range(arguments.repeats):
                one.append(run_bmtrain(arguments.bmtrain, folder, shape, batches=2)["step_time_s"])
                two.append(run_bmtrain(arguments.bmtrain, folder, shape, dp=2, batches=2)["step_time_s"])
                pair = [start_bmtrain(arguments.bmtrain, folder, shape, 1, 1) for _ in range(2)]
                apart.append(max(finish(process)["step_time_s"] for process in pair))
            a, b, c = (statistics.median(side) for side in (one, two, apart))
            rows.append({"size": name, "one_rank_step_s": a, "two_rank_step_s": b, "speedup": a / b, "limit": a / c})
            print(f"{name:<16}{1e3 * a:>12.1f} ms{1e3 * b:>12.1f} ms{a / b:>8.2f} times as fast; limit {a / c:.2f}", flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(rows, file, indent=1)


main()
