#include "step_inputs.h"

#include <string>
#include <type_traits>

namespace nb = nanobind;

namespace noria {

namespace {

template <class T>
bool is_format(const char* format) {
  if (format == nullptr || format[0] == 0 || format[1] != 0) return false;
  const std::string of_kind = std::is_floating_point_v<T> ? "fd" : std::is_signed_v<T> ? "bhilq" : "BHILQ";
  return of_kind.find(format[0]) != std::string::npos;
}

constexpr int64_t kAnyLength = -1;

}  // namespace

StepArrays::~StepArrays() {
  for (Py_buffer& buffer : held_) PyBuffer_Release(&buffer);
}

// The memory of one C-contiguous array of T; `length` is checked, or set where it is kAnyLength.
template <class T>
void* StepArrays::acquire(nb::handle object, const char* name, int64_t& length, bool writable) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0)
    nb::raise_python_error();
  held_.push_back(buffer);
  const int64_t count = buffer.len / static_cast<int64_t>(sizeof(T));
  if (buffer.itemsize != static_cast<Py_ssize_t>(sizeof(T)) || !is_format<T>(buffer.format))
    throw nb::type_error((std::string(name) + " has the wrong element type").c_str());
  if (length == kAnyLength) length = count;
  if (count != length)
    throw nb::type_error((std::string(name) + " has " + std::to_string(count) + " elements, not " + std::to_string(length)).c_str());
  return buffer.buf;
}

template <class T>
const T* StepArrays::array(nb::handle owner, const char* name, int64_t length) {
  return static_cast<const T*>(acquire<T>(nb::getattr(owner, name), name, length, false));
}
template <class T>
T* StepArrays::out(nb::handle owner, const char* name, int64_t length) {
  return static_cast<T*>(acquire<T>(nb::getattr(owner, name), name, length, true));
}

void StepArrays::read_inputs(nb::handle inputs, int64_t table_width) {
  int64_t tokens = kAnyLength, rows = kAnyLength, logits = kAnyLength, hidden = kAnyLength;
  view.tokens = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(inputs, "tokens"), "tokens", tokens, false));
  view.row_slots = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(inputs, "row_slots"), "row_slots", rows, false));
  view.logit_rows = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(inputs, "logit_rows"), "logit_rows", logits, false));
  view.hidden_rows = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(inputs, "hidden_rows"), "hidden_rows", hidden, false));
  view.token_count = tokens;
  view.row_count = rows;
  view.logit_count = logits;
  view.hidden_count = hidden;
  view.positions = array<int32_t>(inputs, "positions", tokens);
  view.row_offsets = array<int32_t>(inputs, "row_offsets", rows + 1);
  view.table_width = table_width;
  int64_t table_size = kAnyLength;
  for (nb::handle table : nb::getattr(inputs, "block_tables")) {
    if (view.group_count == kMaxGroups) throw nb::type_error("too many block tables");
    view.block_tables[view.group_count++] = static_cast<const int32_t*>(acquire<int32_t>(table, "a block table", table_size, false));
    const Py_buffer& buffer = held_.back();
    if (buffer.ndim != 2 || buffer.shape[1] != table_width)
      throw nb::type_error("a block table has another width than the cache was built for");
    view.table_rows = buffer.shape[0];
  }
  read_draws(nb::getattr(inputs, "draws"));
}

void StepArrays::read_draws(nb::handle draws) {
  DrawsView& d = view.draws;
  int64_t n = kAnyLength, history = kAnyLength, biases = kAnyLength, bans = kAnyLength;
  d.logit_row = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(draws, "logit_row"), "logit_row", n, false));
  d.count = n;
  d.temperature = array<float>(draws, "temperature", n);
  d.top_k = array<int32_t>(draws, "top_k", n);
  d.top_p = array<float>(draws, "top_p", n);
  d.min_p = array<float>(draws, "min_p", n);
  d.seed = array<uint64_t>(draws, "seed", n);
  d.position = array<int64_t>(draws, "position", n);
  d.stream = array<int32_t>(draws, "stream", n);
  d.target = array<int32_t>(draws, "target", n);
  d.num_top = array<int32_t>(draws, "num_top", n);
  d.repetition = array<float>(draws, "repetition", n);
  d.presence = array<float>(draws, "presence", n);
  d.frequency = array<float>(draws, "frequency", n);
  d.history_offsets = array<int64_t>(draws, "history_offsets", n + 1);
  d.history_tokens = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(draws, "history_tokens"), "history_tokens", history, false));
  d.history_counts = array<int32_t>(draws, "history_counts", history);
  d.bias_offsets = array<int64_t>(draws, "bias_offsets", n + 1);
  d.bias_tokens = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(draws, "bias_tokens"), "bias_tokens", biases, false));
  d.bias_values = array<float>(draws, "bias_values", biases);
  d.ban_offsets = array<int64_t>(draws, "ban_offsets", n + 1);
  d.ban_tokens = static_cast<const int32_t*>(acquire<int32_t>(nb::getattr(draws, "ban_tokens"), "ban_tokens", bans, false));
  const auto covers = [n](const int64_t* offsets, int64_t length) {
    for (int64_t i = 0; i < n; ++i)
      if (offsets[i] > offsets[i + 1]) return false;
    return offsets[0] >= 0 && offsets[n] <= length;
  };
  if (!covers(d.history_offsets, history) || !covers(d.bias_offsets, biases) || !covers(d.ban_offsets, bans))
    throw nb::type_error("the offsets of a draws list do not ascend inside the list");
  if (const nb::object masks = nb::getattr(draws, "masks"); !masks.is_none()) read_masks(masks);
}

void StepArrays::read_masks(nb::handle masks) {
  DrawsView& d = view.draws;
  int64_t words = kAnyLength;
  d.mask = array<int32_t>(masks, "index", d.count);
  d.masks = static_cast<const uint32_t*>(acquire<uint32_t>(nb::getattr(masks, "words"), "words", words, false));
  const Py_buffer& buffer = held_.back();
  if (buffer.ndim != 2) throw nb::type_error("words is not [masks, words of a mask]");
  d.mask_count = buffer.shape[0];
  d.mask_words = buffer.shape[1];
  d.masks_ready = array<int32_t>(masks, "ready", 1);
}

void StepArrays::read_drawn(nb::handle drawn) {
  const int64_t n = view.draws.count;
  DrawnView& d = view.drawn;
  d.token = out<int32_t>(drawn, "token", n);
  d.logprob = out<float>(drawn, "logprob", n);
  int64_t all = kAnyLength;
  d.top_tokens = static_cast<int32_t*>(acquire<int32_t>(nb::getattr(drawn, "top_tokens"), "top_tokens", all, true));
  d.top_logprobs = out<float>(drawn, "top_logprobs", all);
  d.width = n == 0 ? 0 : all / n;
  if (d.width * n != all) throw nb::type_error("top_tokens is not [draws, width]");
  if (view.hidden_count == 0) return;
  int64_t size = kAnyLength;
  d.hidden = static_cast<float*>(acquire<float>(nb::getattr(drawn, "hidden"), "hidden", size, true));
  d.hidden_width = size / view.hidden_count;
  if (d.hidden_width * view.hidden_count != size) throw nb::type_error("hidden is not [hidden rows, width]");
}

}  // namespace noria
