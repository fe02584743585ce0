#!/usr/bin/env python3
"""Closed loop: calibrate once, then predict and measure plans that the profile was not fitted on.

    bench/closed_loop.py [--bmtrain build/release/bin/bmtrain] [--profile FILE] [--steps 12] [--limit N] [--out FILE.md]

For every plan the step time is simulated with the one profile and measured (median of the steps after two warm-up steps).
Reported: error = (predicted - measured) / measured, mean absolute percentage error, Spearman's rank correlation. Beside the wall
time stands the CPU time per step, which other programs on the machine disturb less: where CPU / (wall * cores) is far below the
predicted compute share, the machine was not ours and the wall-clock error says little.
Needs only Python's standard library.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

MODELS = {
    "gpt2-3m": {"family": "gpt2", "layers": 4, "d_model": 224, "heads": 7, "d_ff": 896, "vocab": 1024, "seq_len": 128},
    "gpt2-7m": {"family": "gpt2", "layers": 8, "d_model": 256, "heads": 8, "d_ff": 1024, "vocab": 2048, "seq_len": 96},
    "llama-2m": {"family": "llama", "layers": 4, "d_model": 192, "heads": 6, "kv_heads": 6, "d_head": 32, "d_ff": 512,
                 "vocab": 1024, "seq_len": 128, "norm": "rmsnorm", "activation": "silu", "position": "rope",
                 "gated_mlp": True, "tied_embedding": False, "qkv_bias": False, "attn_out_bias": False, "mlp_bias": False},
}
CASES = [
    ("gpt2-3m", "mb=1,gb=4"),
    ("gpt2-3m", "mb=4,gb=4"),
    ("gpt2-3m", "mb=2,gb=8,recompute=full"),
    ("gpt2-3m", "dp=2,mb=2,gb=8"),
    ("gpt2-3m", "dp=2,mb=1,gb=4,zero=1"),
    ("gpt2-3m", "pp=2,mb=1,gb=8"),
    ("gpt2-7m", "pp=2,mb=1,gb=8,schedule=gpipe"),
    ("gpt2-7m", "tp=2,mb=2,gb=4"),
    ("gpt2-7m", "dp=2,pp=2,mb=1,gb=8"),
    ("llama-2m", "mb=2,gb=4"),
    ("llama-2m", "tp=2,mb=2,gb=4,sp"),
    ("llama-2m", "dp=2,tp=2,mb=1,gb=4"),
    ("llama-2m", "tp=2,pp=2,mb=1,gb=8"),
    ("llama-2m", "dp=4,mb=1,gb=8,zero=1"),
]


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"closed_loop: {' '.join(map(str, command))}\n{done.stderr.strip()}")
    return done.stdout


def ranks_of(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def spearman(a, b):
    ra, rb = ranks_of(a), ranks_of(b)
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ra, rb)) / (n * (n * n - 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bmtrain", default="build/release/bin/bmtrain")
    parser.add_argument("--profile", help="an existing profile; default: calibrate now")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=int, default=len(CASES), help="only the first N plans")
    parser.add_argument("--out", help="also write the table here (Markdown)")
    args = parser.parse_args()
    if args.steps < 3 or args.limit < 2:
        sys.exit("closed_loop: --steps must be at least 3 (two are warm-up) and --limit at least 2")
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        profile = args.profile or folder / "profile.json"
        if not args.profile:
            run(args.bmtrain, "calibrate", "--out", profile, "--quiet")
        (folder / "text.txt").write_bytes(pathlib.Path("/usr/share/common-licenses/GPL-3").read_bytes() * 4)
        run(args.bmtrain, "prepare", "--tokenizer", "bytes", "--out", folder / "text.bin", folder / "text.txt")
        for model, fields in MODELS.items():
            (folder / f"{model}.json").write_text(json.dumps({"schema": "bmtrain.model/1", "name": model, **fields}))
        lines = ["| model | plan | predicted | measured | error | CPU per step | cores used | predicted compute |",
                 "|---|---|---|---|---|---|---|---|"]
        predicted, measured = [], []
        for model, plan in CASES[: args.limit]:
            result = json.loads(run(args.bmtrain, "train", "--model", folder / f"{model}.json", "--plan", plan, "--data",
                                    folder / "text.bin", "--steps", args.steps, "--profile", profile, "--no-progress", "--json"))
            report = json.loads(run(args.bmtrain, "simulate", "--model", folder / f"{model}.json", "--plan", plan, "--cluster",
                                    f"local:{result['num_ranks']}", "--profile", profile, "--ranks", "all", "--json"))
            p, m = report["step_time_s"], result["step_time_s"]
            predicted.append(p)
            measured.append(m)
            cpu = result["cpu_s_per_step"]
            lines.append(f"| {model} | {plan} | {1e3 * p:.1f} ms | {1e3 * m:.1f} ms | {100 * (p - m) / m:+.1f} % | "
                         f"{1e3 * cpu:.1f} ms | {cpu / m:.2f} of {cores} | {100 * report['compute_fraction']:.0f} % |")
            print(lines[-1], file=sys.stderr, flush=True)
        errors = [abs(p - m) / m for p, m in zip(predicted, measured)]
        lines.append("")
        lines.append(f"{len(errors)} plans, {args.steps} steps each: mean absolute error {100 * statistics.mean(errors):.1f} %, "
                     f"median {100 * statistics.median(errors):.1f} %, rank correlation {spearman(predicted, measured):.3f}; "
                     f"load average {os.getloadavg()[0]:.1f} on {cores} cores")
        text = "\n".join(lines) + "\n"
        print(text)
        if args.out:
            pathlib.Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
