// The emulated device: runs the blocks of a launch on the machine's cores, and the threads of a block as
// fibers that take turns where they meet, at a barrier or at an instruction of the whole wave.
#include "device.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "instructions.h"
#include "switch.h"

namespace attnlab {
namespace {

constexpr int MOST_THREADS = 1024, MOST_SHARED = 1 << 16, BARRIER = -1;

// A stretch of memory that kernels may touch, as Python registered it.
struct Region {
  std::string name;
  char* base;
  size_t bytes, element;
  bool writable, fresh;  // fresh: nothing has been written there yet
  std::vector<bool> written;                              // by byte, where fresh
  std::map<std::pair<int, unsigned>, std::vector<uint8_t>> reads;  // bits by element, by launch and blockIdx.x
  std::vector<uint8_t>* current = nullptr;
};

// What the checked build saw that is no error of its own: a read of what nobody wrote.
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
  int order = 0;  // 0 forwards, 1 backwards, else the seed of a shuffle
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
  // The order in which threads are woken: a wave's are turn[64 w … 64 w + 63], waves go by wave_turn.
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

// Leave this thread for good, and the launch with it.
[[noreturn]] void give_up(Thread* thread, const std::string& text, const void* code = nullptr) {
  Worker& w = mine(thread);
  fail_with(text + ", " + w.launch->kernel + ", " + where(thread), code);
  switch_to(w.contexts[thread->number], w.scheduler);
  std::abort();
}

// Taking turns.

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

// Wake the threads of a wave that wait in `state`, but for `me`, in their turn.
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

// Say in which order the threads of this block take turns.
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

// Meeting.

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
  if (settings.order) {  // no one goes first because it came last
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

// Checking.

const Device* table();

std::string element_text(const Region& r, const char* at) {
  const ptrdiff_t element = (at - r.base) / (ptrdiff_t)r.element - (at < r.base && (at - r.base) % (ptrdiff_t)r.element != 0);
  return r.name + " at element " + std::to_string(element) + " of " + std::to_string(r.bytes / r.element);
}

void note_unwritten(const std::string& name, size_t element, Thread* t, const void* code) {
  const int launch = mine(t).launch_number;
  for (auto& f : findings)
    if (f.region == name && f.code == code && f.launch == launch) {
      f.count++;
      return;
    }
  findings.push_back({name, element, 1, {t->block.x, t->block.y, t->block.z}, t->number, launch, code});
}

bool in_shared(Worker& w, Thread* t, char* at, size_t bytes, bool writes, const void* code) {
  if (at < w.shared || at >= w.shared + MOST_SHARED) return false;
  const size_t first = (size_t)(at - w.shared);
  for (const auto& one : w.named) {
    if (first < one.at || first + bytes > one.at + one.bytes) continue;
    for (size_t i = first; i < first + bytes; i++) {
      if (writes) w.shared_written[i] = true;
      else if (!w.shared_written[i]) {
        note_unwritten("shared memory", first - one.at, t, code);
        break;
      }
    }
    return true;
  }
  give_up(t, "shared memory: out of bounds", code);
}

void in_region(Region& r, Thread* t, char* at, size_t bytes, bool writes, const void* code) {
  const size_t first = (size_t)(at - r.base);
  if (writes) {
    if (!r.writable) give_up(t, element_text(r, at) + " is written, and is an input", code);
    if (r.fresh) std::fill_n(r.written.begin() + (ptrdiff_t)first, bytes, true);
    return;
  }
  if (r.fresh && !r.written[first]) note_unwritten(r.name, first / r.element, t, code);
  Worker& w = mine(t);
  if (!r.current) {
    r.current = &r.reads[{w.launch_number, w.block_x}];
    r.current->resize((r.bytes / r.element + 7) / 8);
  }
  for (size_t e = first / r.element; e <= (first + bytes - 1) / r.element; e++)
    (*r.current)[e / 8] |= (uint8_t)(1 << e % 8);
}

void access(const void* address, size_t bytes, bool writes, const void* code) {
  Thread* t = self();
  Worker& w = mine(t);
  char* at = (char*)address;
  if (at >= w.stacks && at < w.stacks + MOST_THREADS * STACK_BYTES) return;  // a thread's registers
  if (at >= (char*)table() && at < (char*)(table() + 1)) return;
  if (in_shared(w, t, at, bytes, writes, code)) return;
  const Region* nearest = nullptr;
  size_t least = SIZE_MAX;
  for (auto& r : regions) {
    if (at >= r.base && at + bytes <= r.base + r.bytes) return in_region(r, t, at, bytes, writes, code);
    const size_t off = (size_t)(at < r.base ? r.base - at : at - (r.base + r.bytes));
    if (off < least) least = off, nearest = &r;
  }
  const std::string what = std::string(writes ? "write" : "read") + " of " + std::to_string(bytes) + " bytes";
  give_up(t, "out of bounds: " + what + (nearest ? ", nearest is " + element_text(*nearest, at) : ""), code);
}

void fail(const char* text) { give_up(self(), text, __builtin_return_address(0)); }

// Running.

void entry() {
  Thread* thread = self();
  Worker& w = mine(thread);
  w.launch->invoke(w.launch);
  const int me = (int)thread->number;
  Wave& wave = w.waves[me / WAVE];
  w.state[me] = 3;
  wave.alive--, w.alive--;
  if (wave.waiting && wave.waiting == wave.alive)
    give_up(thread, "a thread ended while its wave waits at line " + std::to_string(wave.line));
  if (w.at_barrier && w.at_barrier == w.alive) release_barrier(w, me);
  next(w, me);
  std::abort();
}

void on_crash(int number, siginfo_t* info, void*) {
  if (!worker_here) {  // a fault that is not a kernel's
    signal(number, SIG_DFL);
    return;
  }
  char text[160];
  std::snprintf(text, sizeof text,
                number == SIGFPE ? "the kernel divided by zero (signal %d)"
                                 : "the kernel touched memory that is not there (signal %d, address %p)",
                number, info->si_addr);
  if (!failed.exchange(true)) error_text = std::string(text) + ", " + worker_here->launch->kernel;
  siglongjmp(worker_here->crashed, 1);
}

void poison(Worker& w) {
  if (!settings.checked) return;
  std::fill_n((uint32_t*)w.shared, MOST_SHARED / 4, 0x7fbadbadu);  // NaN in every format of 2 and 4 bytes
  w.shared_written.assign(MOST_SHARED, false);
}

void run_block(Worker& w, Index at, std::mt19937& random) {
  const Launch& launch = *w.launch;
  w.named.clear();
  w.shared_used = 0, w.head = w.tail = 0, w.at_barrier = 0, w.block_x = at.x;
  w.alive = w.threads;
  for (auto& r : regions) r.current = nullptr;
  poison(w);
  deal(w, random);
  for (int i = 0; i < w.threads; i++) {
    Thread* t = w.thread(i);
    t->number = (unsigned)i;
    t->block_dim = launch.block, t->grid_dim = launch.grid, t->block = at;
    t->thread = {(unsigned)i % launch.block.x, (unsigned)i / launch.block.x % launch.block.y,
                 (unsigned)i / launch.block.x / launch.block.y};
    Wave& wave = w.waves[i / WAVE];
    wave.waiting = 0, wave.alive = std::min(WAVE, w.threads - i / WAVE * WAVE);
    // Stacks that all begin at one offset of a page would share few lines of the processor's cache.
    begin(w.contexts[i], t, (char*)t + STACK_BYTES - (size_t)(i * 320 % 8192), entry);
  }
  std::fill_n(w.state, w.threads, 1);
  wake_block(w, 1, -1);
  const int first = w.ready[w.head++];
  switch_to(w.scheduler, w.contexts[first]);
  if (w.alive && !failed)
    fail_with("threads wait for each other for ever, " + std::string(launch.kernel) + ": " +
              std::to_string(w.at_barrier) + " of " + std::to_string(w.alive) + " are at the barrier of line " +
              std::to_string(w.barrier_line));
}

void work(Worker& w, const Launch* launch, int number, std::atomic<size_t>& done, size_t blocks) {
  w.launch = launch, w.launch_number = number;
  w.threads = (int)(launch->block.x * launch->block.y * launch->block.z);
  for (int i = 0; i < w.threads; i++) {
    w.thread(i)->device = table();
    w.thread(i)->worker = &w;
  }
  std::mt19937 random((unsigned)settings.order);
  stack_t signals = {}, before = {};
  signals.ss_sp = w.signal_stack, signals.ss_size = sizeof w.signal_stack;
  sigaltstack(&signals, &before);
  worker_here = &w;
  if (!sigsetjmp(w.crashed, 1)) {
    for (size_t i = done++; i < blocks && !failed; i = done++) {
      const unsigned x = launch->grid.x, y = launch->grid.y;
      run_block(w, {(unsigned)(i % x), (unsigned)(i / x % y), (unsigned)(i / x / y)}, random);
    }
  }
  worker_here = nullptr;
  sigaltstack(&before, nullptr);
}

std::vector<Worker*> idle;  // one call at a time: Python holds a lock

int launch(const Launch* asked) {
  const size_t blocks = (size_t)asked->grid.x * asked->grid.y * asked->grid.z;
  const size_t threads = (size_t)asked->block.x * asked->block.y * asked->block.z;
  const int number = (int)launches.size();
  launches.push_back(asked->kernel);
  if (!asked->function || threads == 0 || threads > MOST_THREADS) {
    fail_with("a block has " + std::to_string(threads) + " threads, " + asked->kernel);
    return 1;
  }
  struct sigaction ours = {}, before[3];
  ours.sa_sigaction = on_crash, ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  for (int i = 0; i < 3; i++) sigaction(signals[i], &ours, &before[i]);
  const size_t wanted = settings.checked ? 1 : std::max<size_t>(1, std::min<size_t>((size_t)settings.workers, blocks));
  while (idle.size() < wanted) idle.push_back(new Worker);
  std::atomic<size_t> done = 0;
  std::vector<std::thread> others;
  for (size_t i = 1; i < wanted; i++)
    others.emplace_back([&, i] { work(*idle[i], asked, number, done, blocks); });
  work(*idle[0], asked, number, done, blocks);
  for (auto& other : others) other.join();
  for (int i = 0; i < 3; i++) sigaction(signals[i], &before[i], nullptr);
  return failed;
}

const Device* table() {
  static const Device device = {mfma, move, barrier, shared, access, fail, launch};
  return &device;
}

}  // namespace
}  // namespace attnlab

// What Python calls. One call of the op at a time.
using namespace attnlab;

extern "C" {

const void* attnlab_device() { return table(); }

void attnlab_begin(int workers, int checked, int order) {
  settings.workers = workers, settings.checked = checked != 0, settings.order = order;
  regions.clear(), findings.clear(), launches.clear();
  error_text.clear(), error_code = nullptr, failed = false;
}

void attnlab_region(const char* name, void* base, size_t bytes, size_t element, int writable, int fresh) {
  Region region = {name, (char*)base, bytes, element, writable != 0, fresh != 0, {}, {}, nullptr};
  if (fresh) region.written.assign(bytes, false);
  regions.push_back(std::move(region));
}

const char* attnlab_error(const void** code) {
  *code = error_code;
  return error_text.c_str();
}

int attnlab_findings() { return (int)findings.size(); }

const char* attnlab_finding(int i, uint64_t* numbers, const void** code) {
  const Finding& f = findings[(size_t)i];
  const uint64_t all[] = {f.element, f.count, f.block[0], f.block[1], f.block[2], f.thread, (uint64_t)f.launch};
  std::copy_n(all, 7, numbers);
  *code = f.code;
  return f.region.c_str();
}

int attnlab_readers(const char* region) {
  for (const auto& r : regions)
    if (r.name == region) return (int)r.reads.size();
  return 0;
}

// The elements of a region that blocks with one blockIdx.x read in one launch, as bits; `who` gets the
// launch and the blockIdx.x.
const uint8_t* attnlab_reads(const char* region, int i, unsigned* who) {
  for (const auto& r : regions) {
    if (r.name != region) continue;
    const auto& found = *std::next(r.reads.begin(), i);
    who[0] = (unsigned)found.first.first, who[1] = found.first.second;
    return found.second.data();
  }
  return nullptr;
}

// Memory for the tensor of that number, 64 GiB and more from any other's; null: there is none.
void* attnlab_place(int number, size_t bytes) {
  char* wanted = (char*)0x100000000000 + ((size_t)number << 38);
  void* got = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return got == MAP_FAILED ? nullptr : got;
}

void attnlab_leave(void* place, size_t bytes) { munmap(place, bytes); }

// The instructions alone, for the tests: registers of 64 lanes in, registers out.
void attnlab_matrix(int operation, const uint64_t* a, const uint64_t* b, const float* c, float* d,
                    int cbsz, int abid) {
  Wave wave = {};
  std::copy_n(a, WAVE, wave.a), std::copy_n(b, WAVE, wave.b);
  std::copy_n(c, WAVE * 4, &wave.c[0][0]);
  wave.modifier[0] = cbsz, wave.modifier[1] = abid;
  compute_matrix(wave, operation);
  std::copy_n(&wave.d[0][0], WAVE * 4, d);
}

int attnlab_source(int operation, int lane, int operand, int width) {
  return source_of(operation, lane, operand, width);
}

float attnlab_fp8_to_float(int ocp, uint8_t b) { return ocp ? fp8_to_float<false>(b) : fp8_to_float<true>(b); }
uint8_t attnlab_float_to_fp8(int ocp, float f) { return ocp ? float_to_fp8<false>(f) : float_to_fp8<true>(f); }
uint16_t attnlab_float_to_bf16(float f) { return float_to_bf16(f); }
uint16_t attnlab_float_to_f16_rtz(float f) { return bits<uint16_t>(float_to_f16_rtz(f)); }
}
