// Scheduling of a block's threads, and their synchronisation at barriers and wave-wide instructions.
#pragma once
#include "state.h"

namespace attnlab {
namespace {

// Scheduling.

void wake(Worker& w, int thread) {
  w.state[thread] = 0;
  w.ready[w.tail++ % (2 * MOST_THREADS)] = (uint16_t)thread;
}

void next(Worker& w, int me) {
  if (w.head == w.tail) {
    switch_to(w.contexts[me], w.scheduler);
  } else {
    const int other = w.ready[w.head++ % (2 * MOST_THREADS)];
    if (other != me) switch_to(w.contexts[me], w.contexts[other]);
  }
}

// Wake the threads of a wave that wait in `state`, except `me`, in schedule order.
void wake_wave(Worker& w, int wave, int state, int me) {
  const int first = wave * WAVE, last = std::min(first + WAVE, w.threads);
  for (int i = first; i < last; i++) {
    const int thread = w.turn[i];
    if (w.state[thread] == state && thread != me) wake(w, thread);
  }
}

void wake_block(Worker& w, int state, int me) {
  for (int i = 0; i * WAVE < w.threads; i++) wake_wave(w, w.wave_turn[i], state, me);
}

void wait(Worker& w, int me, int state) {
  w.state[me] = (uint8_t)state;
  next(w, me);
}

// Set the order in which the threads of this block run.
void deal(Worker& w, std::mt19937& random) {
  const int waves = (w.threads + WAVE - 1) / WAVE;
  auto arrange = [&](uint16_t* begin, int first, int last) {
    for (int i = first; i < last; i++) begin[i - first] = (uint16_t)i;
    uint16_t* end = begin + (last - first);
    if (settings.order == 1) std::reverse(begin, end);
    else if (settings.order) std::shuffle(begin, end, random);
  };
  arrange(w.wave_turn, 0, waves);
  for (int i = 0; i < waves; i++)
    arrange(w.turn + i * WAVE, i * WAVE, std::min((i + 1) * WAVE, w.threads));
}

// Synchronisation.

template <class Arrive, class Compute>
void meet(int operation, int line, Arrive arrive, Compute compute) {
  Thread* thread = self();
  Worker& w = mine(thread);
  const int me = (int)thread->number;
  Wave& wave = w.waves[me / WAVE];
  if (wave.waiting == 0) {
    wave.operation = operation, wave.line = line;
  } else if (wave.operation != operation || wave.line != line) {
    give_up(thread, "threads of one wave meet at different instructions, of lines " +
                        std::to_string(wave.line) + " and " + std::to_string(line));
  }
  arrive(wave, me % WAVE);
  if (++wave.waiting < wave.alive) {
    wait(w, me, 1);
    return;
  }
  if (wave.alive < WAVE) give_up(thread, "a wave meets at an instruction after some of its threads ended");
  wave.waiting = 0;
  compute(wave);
  wake_wave(w, me / WAVE, 1, me);
  if (settings.order) {  // do not favour the last arrival
    wake(w, me);
    next(w, me);
  }
}

void compute_matrix(Wave& w, int operation) {
  const int cbsz = w.modifier[0], abid = w.modifier[1];
  switch (operation) {
    case MFMA_4X4X1_F32: return mfma_4x4<Element::f32, 1>(w.a, w.b, w.c, w.d, cbsz, abid);
    case MFMA_4X4X4_F16: return mfma_4x4<Element::f16, 4>(w.a, w.b, w.c, w.d, cbsz, abid);
    case MFMA_4X4X4_BF16: return mfma_4x4<Element::bf16, 4>(w.a, w.b, w.c, w.d, cbsz, abid);
    case MFMA_16X16X16_F16: return mfma_16x16<Element::f16, 4>(w.a, w.b, w.c, w.d);
    case MFMA_16X16X16_BF16: return mfma_16x16<Element::bf16, 4>(w.a, w.b, w.c, w.d);
    case MFMA_16X16X32_OCP: return mfma_16x16<Element::fp8_ocp, 8>(w.a, w.b, w.c, w.d);
    default: return mfma_16x16<Element::fp8_fnuz, 8>(w.a, w.b, w.c, w.d);
  }
}

int source_of(int operation, int lane, int operand, int width) {
  switch (operation) {
    case ROW_ROR: return row_ror_source(lane, operand);
    case BPERMUTE: return bpermute_source(lane, operand);
    case SHFL_XOR: return shfl_xor_source(lane, operand, width);
    default: return shfl_down_source(lane, operand, width);
  }
}

Float4 mfma(int operation, uint64_t a, uint64_t b, const Float4* c, int cbsz, int abid, int line) {
  Wave& here = mine(self()).waves[self()->number / WAVE];
  meet(
      operation, line,
      [&](Wave& wave, int lane) {
        wave.a[lane] = a, wave.b[lane] = b;
        std::copy_n(c->at, 4, wave.c[lane]);
        wave.modifier[0] = cbsz, wave.modifier[1] = abid;
      },
      [&](Wave& wave) { compute_matrix(wave, operation); });
  return bits<Float4>(here.d[self()->number % WAVE]);
}

uint32_t move(int operation, uint32_t value, int operand, int width, int line) {
  Wave& here = mine(self()).waves[self()->number / WAVE];
  meet(
      operation, line,
      [&](Wave& wave, int lane) { wave.value[lane] = value, wave.operand[lane] = operand; },
      [&](Wave& wave) {
        for (int i = 0; i < WAVE; i++)
          wave.result[i] = wave.value[source_of(operation, i, wave.operand[i], width)];
      });
  return here.result[self()->number % WAVE];
}

void release_barrier(Worker& w, int me) {
  w.at_barrier = 0;
  wake_block(w, 2, me);
}

void barrier(int line) {
#ifdef ATTNLAB_FAULT_BARRIER
  if (line == ATTNLAB_FAULT_BARRIER) return;
#endif
  Thread* thread = self();
  Worker& w = mine(thread);
  const int me = (int)thread->number;
  if (w.at_barrier == 0) w.barrier_line = line;
  else if (w.barrier_line != line)
    give_up(thread, "threads of one block meet at different barriers, of lines " +
                        std::to_string(w.barrier_line) + " and " + std::to_string(line));
  if (++w.at_barrier < w.alive) return wait(w, me, 2);
  release_barrier(w, me);
  if (settings.order) {
    wake(w, me);
    next(w, me);
  }
}

void* shared(int name, size_t bytes) {
  Thread* thread = self();
  Worker& w = mine(thread);
  for (const auto& one : w.named)
    if (one.name == name) return w.shared + one.at;
  const size_t at = (w.shared_used + 15) & ~(size_t)15;
  if (at + bytes > MOST_SHARED) give_up(thread, "the block asks for more than 64 KiB of shared memory");
  w.shared_used = at + bytes;
  w.named.push_back({name, at, bytes});
  return w.shared + at;
}

}  // namespace
}  // namespace attnlab
