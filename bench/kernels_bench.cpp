// How close each CPU kernel comes to what one core can do: GF/s as a share of a fused-multiply-add loop in
// registers, GB/s as a share of a memcpy of 64 MiB, both measured at the start of the same run. Rates are per
// second of CPU time of this thread, so a busy machine disturbs them little. Sizes: a GPT-2 style model of
// width 256 and GPT-2 124M (Radford et al. 2019). Bytes are those that must move at least once: every input
// read, every output written.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace {

using bmt::kernels::cpu::Int;
using bmt::kernels::cpu::kernels;
using Floats = std::vector<float>;

double threadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Ceiling {
  double flops_per_s = 0, bytes_per_s = 0;
};

// The best of several short trials: the ceiling is what the core can do, not what it did while it was
// disturbed.
Ceiling measureCeiling() {
  Ceiling ceiling;
  float sink = 0;
  std::vector<char> from(64u << 20, 1), to(64u << 20, 2);
  for (int trial = 0; trial < 7; ++trial) {
    double start = threadSeconds();
    const double flops = kernels().fmaPeak(2'000'000, &sink);
    ceiling.flops_per_s = std::max(ceiling.flops_per_s, flops / (threadSeconds() - start));
    start = threadSeconds();
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::DoNotOptimize(to.data());
    const double moved = 2.0 * static_cast<double>(from.size());
    ceiling.bytes_per_s = std::max(ceiling.bytes_per_s, moved / (threadSeconds() - start));
  }
  benchmark::DoNotOptimize(sink);
  return ceiling;
}

const Ceiling& ceiling() {
  static const Ceiling measured = measureCeiling();
  return measured;
}

Floats randomFloats(Int n) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(n));
  for (float& value : values) value = normal(random);
  return values;
}

void report(benchmark::State& state, double flops, double floats) {
  using benchmark::Counter;
  const auto rate = Counter::kIsIterationInvariantRate;
  if (flops > 0) {
    state.counters["GF/s"] = Counter(flops * 1e-9, rate);
    state.counters["of_peak"] = Counter(flops / ceiling().flops_per_s, rate);
  }
  if (floats > 0) {
    state.counters["GB/s"] = Counter(floats * 4e-9, rate);
    state.counters["of_memcpy"] = Counter(floats * 4 / ceiling().bytes_per_s, rate);
  }
}

void linearForward(benchmark::State& state) {
  const Int n = state.range(0), o = state.range(1), i = state.range(2);
  Floats x = randomFloats(n * i), w = randomFloats(o * i), bias = randomFloats(o),
         out(static_cast<std::size_t>(n * o));
  for (auto _ : state) kernels().linearForward(out.data(), x.data(), w.data(), bias.data(), n, o, i);
  report(state, 2.0 * static_cast<double>(n * o * i), 0);
}

void linearBackwardInput(benchmark::State& state) {
  const Int n = state.range(0), o = state.range(1), i = state.range(2);
  Floats dout = randomFloats(n * o), w = randomFloats(o * i), dx(static_cast<std::size_t>(n * i));
  for (auto _ : state) kernels().linearBackwardInput(dx.data(), dout.data(), w.data(), n, o, i);
  report(state, 2.0 * static_cast<double>(n * o * i), 0);
}

void linearBackwardWeight(benchmark::State& state) {
  const Int n = state.range(0), o = state.range(1), i = state.range(2);
  Floats dout = randomFloats(n * o), x = randomFloats(n * i), dw(static_cast<std::size_t>(o * i));
  Floats dbias(static_cast<std::size_t>(o));
  for (auto _ : state)
    kernels().linearBackwardWeight(dw.data(), dbias.data(), dout.data(), x.data(), n, o, i, true);
  report(state, 2.0 * static_cast<double>(n * o * i), 0);
}

// Rows x outputs x inputs: the products of a layer of width 256 at 512 tokens, its head, and GPT-2 124M's.
void linearSizes(benchmark::internal::Benchmark* b) {
  for (const auto& size : {std::vector<std::int64_t>{512, 768, 256},
                           {512, 1024, 256},
                           {512, 256, 1024},
                           {512, 4096, 256},
                           {256, 2304, 768},
                           {256, 3072, 768},
                           {256, 768, 3072},
                           {64, 50304, 768}}) {
    b->Args(size);
  }
}
BENCHMARK(linearForward)->Apply(linearSizes);
BENCHMARK(linearBackwardInput)->Apply(linearSizes);
BENCHMARK(linearBackwardWeight)->Apply(linearSizes);

// B, T, heads, head width. Flops of the causal half only: forward 2 products, backward 5.
void attentionSizes(benchmark::internal::Benchmark* b) {
  b->Args({4, 128, 4, 64})->Args({4, 64, 12, 64})->Args({1, 1024, 12, 64});
}

void attentionForward(benchmark::State& state) {
  const Int b = state.range(0), t = state.range(1), h = state.range(2), d = state.range(3);
  Floats qkv = randomFloats(b * t * 3 * h * d), out(static_cast<std::size_t>(b * t * h * d));
  Floats lse(static_cast<std::size_t>(b * t * h));
  for (auto _ : state) kernels().attentionForward(out.data(), lse.data(), qkv.data(), b, t, h, h, d);
  report(state, 2.0 * static_cast<double>(b * h * t * (t + 1) * d), 0);
}
BENCHMARK(attentionForward)->Apply(attentionSizes);

void attentionBackward(benchmark::State& state) {
  const Int b = state.range(0), t = state.range(1), h = state.range(2), d = state.range(3);
  Floats qkv = randomFloats(b * t * 3 * h * d), out(static_cast<std::size_t>(b * t * h * d)), dqkv = qkv;
  Floats lse(static_cast<std::size_t>(b * t * h)), dout = randomFloats(b * t * h * d);
  kernels().attentionForward(out.data(), lse.data(), qkv.data(), b, t, h, h, d);
  for (auto _ : state) {
    kernels().attentionBackward(dqkv.data(), dout.data(), qkv.data(), out.data(), lse.data(), b, t, h, h, d);
  }
  report(state, 5.0 * static_cast<double>(b * h * t * (t + 1) * d), 0);
}
BENCHMARK(attentionBackward)->Apply(attentionSizes);

void layerNormForward(benchmark::State& state) {
  const Int n = state.range(0), c = state.range(1);
  Floats x = randomFloats(n * c), delta = randomFloats(n * c), bias = randomFloats(c), out = x, y = x;
  Floats mean(static_cast<std::size_t>(n)), rstd = mean;
  for (auto _ : state) {
    kernels().layerNormForward(out.data(), y.data(), mean.data(), rstd.data(), x.data(), delta.data(),
                               bias.data(), bias.data(), bias.data(), n, c, 1e-5f);
  }
  report(state, 0, static_cast<double>(4 * n * c));
}
BENCHMARK(layerNormForward)->Args({512, 256})->Args({256, 768});

void layerNormBackward(benchmark::State& state) {
  const Int n = state.range(0), c = state.range(1);
  Floats y = randomFloats(n * c), dout = randomFloats(n * c), w = randomFloats(c), dw = w, db = w, dx = y;
  const Floats mean(static_cast<std::size_t>(n), 0.0f), rstd(static_cast<std::size_t>(n), 1.0f);
  for (auto _ : state) {
    kernels().layerNormBackward(dx.data(), dw.data(), db.data(), dout.data(), y.data(), w.data(), mean.data(),
                                rstd.data(), dout.data(), n, c, false);
  }
  report(state, 0, static_cast<double>(4 * n * c));
}
BENCHMARK(layerNormBackward)->Args({512, 256})->Args({256, 768});

void geluForward(benchmark::State& state) {
  Floats x = randomFloats(state.range(0)), out = x;
  for (auto _ : state) kernels().geluForward(out.data(), x.data(), state.range(0));
  report(state, 0, static_cast<double>(2 * state.range(0)));
}
BENCHMARK(geluForward)->Arg(512 * 1024)->Arg(256 * 3072);

void geluBackward(benchmark::State& state) {
  Floats x = randomFloats(state.range(0)), dout = x, dx = x;
  for (auto _ : state) kernels().geluBackward(dx.data(), dout.data(), x.data(), state.range(0));
  report(state, 0, static_cast<double>(3 * state.range(0)));
}
BENCHMARK(geluBackward)->Arg(512 * 1024)->Arg(256 * 3072);

void crossEntropy(benchmark::State& state) {
  const Int n = state.range(0), v = state.range(1);
  const Floats fresh = randomFloats(n * v);
  Floats logits = fresh, stats(static_cast<std::size_t>(3 * n));
  const std::vector<std::int32_t> targets(static_cast<std::size_t>(n), 1);
  double loss = 0;
  for (auto _ : state) {  // logits of later rounds are gradients of earlier ones: other values, the same work
    kernels().crossEntropyStats(stats.data(), logits.data(), targets.data(), n, v, 0, v);
    kernels().crossEntropyBackward(logits.data(), stats.data(), targets.data(), &loss, n, v, 0, v, 1, 1.0f);
  }
  benchmark::DoNotOptimize(loss);
  report(state, 0, static_cast<double>(3 * n * v));
}
BENCHMARK(crossEntropy)->Args({512, 4096})->Args({64, 50304});

void adamW(benchmark::State& state) {
  const Int n = state.range(0);
  Floats p = randomFloats(n), m = p, g = p, v(static_cast<std::size_t>(n), 1.0f);
  for (auto _ : state) {
    kernels().adamW(p.data(), m.data(), v.data(), g.data(), n, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0.5f,
                    1.0f);
  }
  report(state, 0, static_cast<double>(7 * n));
}
BENCHMARK(adamW)->Arg(1 << 22);

void sumOfSquares(benchmark::State& state) {
  const Floats x = randomFloats(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(kernels().sumOfSquares(x.data(), state.range(0)));
  report(state, 0, static_cast<double>(state.range(0)));
}
BENCHMARK(sumOfSquares)->Arg(1 << 22);

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  std::fprintf(stderr, "%s, one core: %.1f GF/s fused multiply-add, %.1f GB/s memcpy (read + write)\n",
               kernels().name, ceiling().flops_per_s * 1e-9, ceiling().bytes_per_s * 1e-9);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
