// How Python calls the op's host code; included after the source.
#pragma once

namespace {

enum { OUT, EXP_SUMS, MAX_LOGITS, TMP_OUT, QUERY, KEY_CACHE, VALUE_CACHE, BLOCK_TABLES, SEQ_LENS,
       QUERY_START_LOC, ALIBI_SLOPES, K_SCALE, V_SCALE, FP8_OUT_SCALE, TENSORS };

struct Arguments {
  torch::Tensor tensors[TENSORS];  // a tensor without dimensions means None
  int64_t num_kv_heads, block_size, max_seq_len;
  double scale;
  const char *kv_cache_dtype, *mfma_type;
};

// The op of 0.11.2 has 20 parameters, the last is mfma_type. Releases up to 0.10 lack it. Later releases
// add use_interleaved_v_cache after it, which the lab leaves at its default.
template <class... Parameters, class... Given>
void call_op(void (*op)(Parameters...), const std::string& mfma_type, Given&... given) {
  if constexpr (sizeof...(Parameters) == sizeof...(Given)) {
    op(given...);
  } else if constexpr (sizeof...(Parameters) == sizeof...(Given) + 1) {
    op(given..., mfma_type);
  } else {
    op(given..., mfma_type, false);
  }
}

void call_with(Arguments& a) {
  auto optional = [&](int i) {
    return a.tensors[i].dims ? std::optional<torch::Tensor>(a.tensors[i]) : std::nullopt;
  };
  torch::Tensor* t = a.tensors;
  const auto query_start_loc = optional(QUERY_START_LOC), alibi_slopes = optional(ALIBI_SLOPES);
  const auto fp8_out_scale = optional(FP8_OUT_SCALE);
  const std::string kv_cache_dtype = a.kv_cache_dtype, mfma_type = a.mfma_type;
  call_op(paged_attention, mfma_type, t[OUT], t[EXP_SUMS], t[MAX_LOGITS], t[TMP_OUT], t[QUERY], t[KEY_CACHE],
          t[VALUE_CACHE], a.num_kv_heads, a.scale, t[BLOCK_TABLES], t[SEQ_LENS], query_start_loc,
          a.block_size, a.max_seq_len, alibi_slopes, kv_cache_dtype, t[K_SCALE], t[V_SCALE],
          fp8_out_scale);
}

}  // namespace

// Call the op. Returns 0 on success, 1 if the host code rejects the arguments, 2 if a kernel failed on the
// device, 3 if the host code would end the process. `text` receives the reason. If `context` has no `find`,
// launches are only recorded and `text` receives the names of the kernels, one per line.
extern "C" int attnlab_call(const attnlab::Context* context, Arguments* arguments, char* text, size_t size) {
  attnlab::context = *context;
  attnlab::noted.clear();
  std::string message;
  int outcome = 0;
  try {
    call_with(*arguments);
    for (const auto& name : attnlab::noted) message += name + "\n";
  } catch (const attnlab::Rejected& error) {
    outcome = 1, message = error.what();
  } catch (const attnlab::DeviceFailed&) {
    outcome = 2;
  } catch (const attnlab::Aborted& error) {
    outcome = 3, message = error.what();
  }
  std::snprintf(text, size, "%s", message.c_str());
  return outcome;
}
