// Context switch between the stacks of two threads.
#pragma once
#include <cstdint>

#if defined(__x86_64__) && !defined(ATTNLAB_UCONTEXT)

namespace attnlab {

struct Context {
  void* stack;
};

// Save the callee-saved registers on this stack and continue on the other. A jump instead of a `ret` keeps
// the processor's return prediction correct.
extern "C" void attnlab_switch(Context* from, const Context* to);
asm(R"(
.text
.globl attnlab_switch
.hidden attnlab_switch
attnlab_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
)");

inline void switch_to(Context& from, const Context& to) { attnlab_switch(&from, &to); }

// Make a context that starts at `entry` on a stack whose highest address is `top`.
inline void begin(Context& context, void*, char* top, void (*entry)()) {
  void** stack = (void**)((uintptr_t)top & ~(uintptr_t)15);
  *--stack = nullptr;        // return address of `entry`, which never returns
  *--stack = (void*)entry;
  for (int i = 0; i < 6; i++) *--stack = nullptr;
  context.stack = stack;
}

}  // namespace attnlab

#else
#include <ucontext.h>

namespace attnlab {

struct Context {
  ucontext_t registers;
};

inline void switch_to(Context& from, const Context& to) { swapcontext(&from.registers, &to.registers); }

inline void begin(Context& context, void* bottom, char* top, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = bottom;
  context.registers.uc_stack.ss_size = (size_t)(top - (char*)bottom);
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

}  // namespace attnlab
#endif
