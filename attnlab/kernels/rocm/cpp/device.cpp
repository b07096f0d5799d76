// The emulated device: runs the blocks of a launch on the machine's cores. The threads of a block are fibers
// that switch at barriers and at wave-wide instructions.
#include <thread>

#include "meeting.h"
#include "memory.h"

namespace attnlab {
namespace {

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
  if (!worker_here) {  // a fault outside a kernel
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
    // Stacks with equal page offsets would compete for few cache lines.
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

// The functions that Python calls. One call of the op at a time.
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

// The elements of a region that blocks with one blockIdx.x read in one launch, as bits. `who` receives the
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

// Memory for the tensor with that number, at least 64 GiB from any other; null if there is no room.
void* attnlab_place(int number, size_t bytes) {
  char* wanted = (char*)0x100000000000 + ((size_t)number << 38);
  void* got = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return got == MAP_FAILED ? nullptr : got;
}

void attnlab_leave(void* place, size_t bytes) { munmap(place, bytes); }

// The instructions for tests: registers of 64 lanes in, registers out.
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
