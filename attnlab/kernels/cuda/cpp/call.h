// How Python calls the ops of csrc/cache_kernels.cu; included after the source.

namespace {

// Later releases add a flag at the end (skip_scale, interleaved_v), which the lab leaves at false.
template <class... Parameters, class... Given>
void call_op(void (*op)(Parameters...), Given&... given) {
  if constexpr (sizeof...(Parameters) == sizeof...(Given)) op(given...);
  else op(given..., false);
}

void call_with(const std::string& name, torch::Tensor* t, const std::string& kv_cache_dtype) {
  if (name == "concat_and_cache_mla") call_op(concat_and_cache_mla, t[0], t[1], t[2], t[3], kv_cache_dtype, t[4]);
  else if (name == "reshape_and_cache")
    call_op(reshape_and_cache, t[0], t[1], t[2], t[3], t[4], kv_cache_dtype, t[5], t[6]);
  else call_op(reshape_and_cache_flash, t[0], t[1], t[2], t[3], t[4], kv_cache_dtype, t[5], t[6]);
}

}  // namespace

// Call an op. Returns 0 on success, 1 if the host code rejects the arguments, 2 if a kernel failed on the device.
// `text` receives the reason of 1.
extern "C" int attnlab_call(const attnlab::Context* context, const char* name, torch::Tensor* tensors,
                            const char* kv_cache_dtype, char* text, size_t size) {
  attnlab::context = *context;
  try {
    call_with(name, tensors, kv_cache_dtype);
  } catch (const attnlab::Rejected& error) {
    std::snprintf(text, size, "%s", error.what());
    return 1;
  } catch (const attnlab::DeviceFailed&) {
    return 2;
  }
  return 0;
}
