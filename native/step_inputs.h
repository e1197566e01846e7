// Reads noria.backends.base.StepInputs and Drawn through the buffer protocol: 35 to 38 arrays in about five microseconds.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "step.h"

namespace noria {

// The arrays of one step, held until the step has run.
class StepArrays {
 public:
  StepArrays() = default;
  ~StepArrays();
  StepArrays(const StepArrays&) = delete;
  StepArrays& operator=(const StepArrays&) = delete;

  // Throws nanobind::type_error where an array has another type or length than the contract says.
  void read_inputs(nanobind::handle inputs, int64_t table_width);
  void read_drawn(nanobind::handle drawn);

  StepView view = {};

 private:
  void read_draws(nanobind::handle draws);
  void read_masks(nanobind::handle masks);
  template <class T>
  const T* array(nanobind::handle owner, const char* name, int64_t length);
  template <class T>
  T* out(nanobind::handle owner, const char* name, int64_t length);
  template <class T>
  void* acquire(nanobind::handle object, const char* name, int64_t& length, bool writable);

  std::vector<Py_buffer> held_;
};

}  // namespace noria
