// State of the emulated device: registered memory, a wave, and a worker that runs blocks.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "instructions.h"
#include "switch.h"

namespace attnlab {
namespace {

constexpr int MOST_THREADS = 1024, MOST_SHARED = 1 << 16;

// A memory region that kernels may access, registered by Python.
struct Region {
  std::string name;
  char* base;
  size_t bytes, element;
  bool writable, fresh;  // fresh: not written yet
  std::vector<bool> written;                              // per byte, if fresh
  std::map<std::pair<int, unsigned>, std::vector<uint8_t>> reads;  // bits by element, by launch and blockIdx.x
  std::vector<uint8_t>* current = nullptr;
};

// A finding of the checked build that does not stop the run: a read of unwritten memory.
struct Finding {
  std::string region;
  size_t element, count;
  unsigned block[3], thread;
  int launch;
  const void* code;
};

struct Settings {
  int workers = 1;
  bool checked = false;
  int order = 0;  // 0 ascending, 1 descending, other values seed a shuffle
};

Settings settings;
std::vector<Region> regions;
std::vector<Finding> findings;
std::vector<std::string> launches;
std::mutex error_lock;
std::string error_text;
const void* error_code;
std::atomic<bool> failed;

struct Wave {
  alignas(64) uint64_t a[WAVE], b[WAVE];
  alignas(64) float c[WAVE][4], d[WAVE][4];
  uint32_t value[WAVE], result[WAVE];
  int operand[WAVE];
  int waiting, alive, operation, line, modifier[2];
};

struct Worker;
thread_local Worker* worker_here;

struct Worker {
  char* stacks;
  std::vector<Context> contexts{MOST_THREADS};
  Context scheduler;
  Wave waves[MOST_THREADS / WAVE];
  uint16_t ready[2 * MOST_THREADS];
  unsigned head, tail;  // of the ready queue
  int at_barrier, alive, threads, barrier_line;
  uint8_t state[MOST_THREADS];  // 0 running or ready, 1 at an instruction, 2 at the barrier, 3 ended
  // The order in which threads are woken: those of wave w are turn[64 w … 64 w + 63]; waves follow wave_turn.
  uint16_t turn[MOST_THREADS], wave_turn[MOST_THREADS / WAVE];
  const Launch* launch;
  int launch_number;
  unsigned block_x;
  alignas(64) char shared[MOST_SHARED];
  std::vector<bool> shared_written;
  struct Named { int name; size_t at, bytes; };
  std::vector<Named> named;
  size_t shared_used;
  sigjmp_buf crashed;
  char signal_stack[1 << 15];

  Worker() {
    const size_t bytes = (MOST_THREADS + 1) * STACK_BYTES;
    char* memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stacks = (char*)(((uintptr_t)memory + STACK_BYTES - 1) & ~(uintptr_t)(STACK_BYTES - 1));
  }
  Thread* thread(int i) { return (Thread*)(stacks + (size_t)i * STACK_BYTES); }
};

Worker& mine(Thread* thread) { return *(Worker*)thread->worker; }

void fail_with(const std::string& text, const void* code = nullptr) {
  std::lock_guard<std::mutex> lock(error_lock);
  if (!failed.exchange(true)) error_text = text, error_code = code;
}

std::string where(const Thread* t) {
  char text[120];
  std::snprintf(text, sizeof text, "block (%u, %u, %u), thread %u", t->block.x, t->block.y, t->block.z,
                t->number);
  return text;
}

// End this thread and the launch.
[[noreturn]] void give_up(Thread* thread, const std::string& text, const void* code = nullptr) {
  Worker& w = mine(thread);
  fail_with(text + ", " + w.launch->kernel + ", " + where(thread), code);
  switch_to(w.contexts[thread->number], w.scheduler);
  std::abort();
}

}  // namespace
}  // namespace attnlab
