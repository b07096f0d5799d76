// Memory checks of the checked device: which tensor an access belongs to, and whether it was written before.
#pragma once
#include "state.h"

namespace attnlab {
namespace {

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

void fail(const char* text, const void* code) { give_up(self(), text, code ? code : __builtin_return_address(0)); }

}  // namespace
}  // namespace attnlab
